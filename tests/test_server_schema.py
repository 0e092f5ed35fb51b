"""schemathesis drives the routes of the OpenAPI document with what it allows and with what it does not: never a 5xx."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from server_helpers import serving

EXAMPLES = 50  # a route and mode


@pytest.fixture(scope="module")
def schema(qwen3_path):
    with serving(qwen3_path) as (_, url):
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_is_a_server_error(schema, mode):
    """The same examples in every run. Where nothing is sent there is nothing that is not allowed."""
    routes = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        routes = [route for route in routes if len(route.body)]
    num_cases = 0
    for route in routes:

        @hypothesis.settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=route.as_strategy(generation_mode=mode))
        def call(case):
            nonlocal num_cases
            num_cases += 1
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        call()
    assert len(routes) == (9 if mode is GenerationMode.POSITIVE else 4) and num_cases >= 4 * EXAMPLES

"""Random loads: whatever is asked for in whatever order, every request ends in time with exactly its own tokens, and
the books balance at every step. No model: a fake runner checks every step and makes tokens from the true prefix."""

from dataclasses import dataclass

from fake_runner import FakeEngine, check_output, expected_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.engine.sequence import Status

# Prompts are cut from few texts, so that prefixes are often shared, and part inside blocks as well as between them.
TEXTS = ([1] * 24, [1, 1, 1, 1, 2, 2, 2, 2] * 3, [1, 2, 3] * 8, list(range(24)))
# The same loads in every run: what fails, fails for everybody.
RANDOM = settings(deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Request:
    """One request; `arrival` and `abort` count steps."""

    prompt: list[int]
    n: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    min_tokens: int
    score: int | None
    logprobs: int | None
    penalty: float
    arrival: int
    abort: int | None

    def most_tokens(self):
        return self.n * (len(self.prompt) + self.max_tokens)


@st.composite
def pools(draw):
    """The knobs of an engine."""
    return {
        "block_size": draw(st.integers(1, 4)),
        "num_blocks": draw(st.integers(4, 12)),
        "budget": draw(st.integers(4, 64)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "prefix_caching": draw(st.booleans()),
        "num_snapshots": draw(st.sampled_from((None, None, 0, 1, 3))),
        "lag": draw(st.integers(0, 2)),  # the engine's is 1; the scheduler must not count on it
    }


@st.composite
def requests(draw, longest):
    """A request that an engine whose pool holds `longest` tokens accepts."""
    length = draw(st.integers(1, min(longest - 1, 20)))
    prompt = draw(st.sampled_from(TEXTS))[:length]
    if draw(st.booleans()):
        prompt = [*prompt[:-1], draw(st.integers(0, 3))]
    max_tokens = draw(st.integers(1, min(longest - length, 16)))
    stops = [expected_tokens(prompt, max_tokens)[-1]] if draw(st.booleans()) else []
    score = draw(st.sampled_from((None, None, 0, 2))) if length > 1 else None
    return Request(
        prompt,
        n=draw(st.integers(1, 3)),
        max_tokens=0 if score is not None and draw(st.booleans()) else max_tokens,
        stop_ids=tuple(stops + draw(st.lists(st.integers(0, 100), max_size=3))),
        min_tokens=draw(st.integers(0, max_tokens)),
        score=score,
        logprobs=draw(st.sampled_from((None, 0, 2))),
        penalty=draw(st.sampled_from((0.0, 0.0, 0.5))),
        arrival=draw(st.integers(0, 25)),
        abort=draw(st.one_of(st.none(), st.none(), st.integers(0, 40))),
    )


@st.composite
def loads(draw):
    """An engine's knobs and the requests for it."""
    knobs = draw(pools())
    longest = knobs["block_size"] * knobs["num_blocks"]
    return knobs, draw(st.lists(requests(longest), min_size=1, max_size=6))


def add(engine, request):
    return [
        engine.add(
            request.prompt,
            request.max_tokens,
            seed=i,
            stop_ids=request.stop_ids,
            prompt_logprobs=request.score,
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
            presence_penalty=request.penalty,
        )
        for i in range(request.n)
    ]


def serve(knobs, requests, lose_at=None):
    """Run a load to its end, which must come in a bounded number of steps; returns the engine and its sequences."""
    engine = FakeEngine(**knobs)
    added = {}
    # The last abort comes at step 65; then a step for each token is plenty, preemption included: of 15,000 loads the
    # slowest took half of it.
    limit = 70 + sum(request.most_tokens() for request in requests)
    for time in range(limit):
        for i, request in enumerate(requests):
            if request.arrival == time:
                added[i] = add(engine, request)
            if request.abort is not None and request.arrival + request.abort == time:
                for seq in added[i]:
                    if seq.status is not Status.FINISHED:
                        engine.scheduler.finish(seq, "abort")
        if time == lose_at:
            engine.scheduler.schedule()
            engine.lose_step()
        engine.step()
        if len(added) == len(requests) and not engine.scheduler.has_unfinished:
            break
    assert not engine.scheduler.has_unfinished, f"not over after {limit} steps"
    engine.check_idle()
    return engine, [seq for i in sorted(added) for seq in added[i]]


def check_sequence(seq):
    """All its tokens, or, where it was aborted, the first ones of them."""
    if seq.finish_reason != "abort":
        check_output(seq)
        return
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    expected = expected_tokens(prompt, seq.max_tokens, seq.seed, seq.stop_ids, seq.params.min_tokens)
    assert seq.output_token_ids == expected[: seq.num_output_tokens]


@settings(RANDOM, max_examples=300)
@given(loads())
def test_any_load_ends_in_time_with_its_own_tokens(load):
    """A23, A18, A22: pools of 4 to 12 blocks of 1 to 4 tokens, shared prefixes, late arrivals, aborts."""
    _, seqs = serve(*load)
    for seq in seqs:
        check_sequence(seq)


@settings(RANDOM, max_examples=60)
@given(loads())
def test_a_small_pool_gives_what_a_large_one_gives(load):
    """A18: the same requests where nobody is ever preempted."""
    knobs, requests = load
    for request in requests:
        request.abort = None
    _, small = serve(knobs, requests)
    engine, large = serve({**knobs, "num_blocks": 1000, "budget": 1000, "max_num_seqs": 18}, requests)
    assert not any(seq.num_preemptions for seq in large)
    assert len(small) == len(large) == sum(request.n for request in requests) == len(engine.seqs)
    for one, other in zip(small, large, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == other.logprobs
        assert one.prompt_token_logprobs == other.prompt_token_logprobs


@settings(RANDOM, max_examples=60)
@given(loads(), st.integers(0, 30))
def test_a_step_lost_at_any_time_harms_nobody_who_comes_later(load, lose_at):
    """Later requests hit no prefix that was never computed."""
    _, seqs = serve(*load, lose_at=lose_at)
    for seq in seqs:
        check_sequence(seq)

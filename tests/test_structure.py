"""The package keeps its shape: import direction, budgets, docstrings, names. The rules are in structure.py.

Every rule is also run on small bad snippets, so that none passes by seeing nothing.
"""

from fnmatch import fnmatch

import pytest
from structure import (
    LAYOUT,
    LIBRARY_LINES,
    PACKAGE,
    ROOT,
    RULES,
    SERVER_LINES,
    make_package,
    package_lines,
    violations,
)

PUBLIC_NAMES = {"LLM", "SamplingParams", "RequestOutput", "__version__"}

TOP_LEVEL = {
    *("nanovllm", "tests", "docs", "scripts", ".ci", ".gitignore"),
    *("example.py", "bench.py", "pyproject.toml", "README.md", "LICENSE"),
}
TOP_LEVEL_OPTIONAL = {"examples", "bench_quant.py", "bench_quant_quality.py"}


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps(rule):
    """Every file of the package keeps the rule."""
    found = violations(rule, PACKAGE)
    assert not found, "\n".join(["", RULES[rule].__doc__, *found])


def test_package_is_seen():
    """The rules above were run on something."""
    assert {"__init__.py", "config.py", "engine/llm_engine.py", "engine/scheduler.py"} <= PACKAGE.keys()


def test_package_is_small():
    """The whole library can be read in an afternoon."""
    library, server = package_lines(PACKAGE)
    assert library <= LIBRARY_LINES, f"nanovllm/ has {library} lines of code, allowed are {LIBRARY_LINES}"
    assert server <= SERVER_LINES, f"nanovllm/server/ has {server} lines of code, allowed are {SERVER_LINES}"


def test_top_level_of_the_repository():
    """No stray file at the top; what git ignores does not count."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]
    names = {path.name for path in ROOT.iterdir() if not any(fnmatch(path.name, pattern) for pattern in ignored)}
    assert not names - TOP_LEVEL - TOP_LEVEL_OPTIONAL, "not expected at the top (TOP_LEVEL in tests/test_structure.py)"
    assert not TOP_LEVEL - names, "missing at the top of the repository"


def test_public_names():
    """What `from nanovllm import ...` offers is a decision, not an accident."""
    import nanovllm

    assert set(nanovllm.__all__) == PUBLIC_NAMES
    assert all(hasattr(nanovllm, name) for name in PUBLIC_NAMES)


def stub_package(path, source):
    """An empty file for each line of LAYOUT, and one file with content."""
    stubs = {pattern.replace("*", "stub"): "" for pattern in LAYOUT}
    # One file that a host-side file may import and that does load torch.
    return make_package({**stubs, "attention/__init__.py": "", "platform.py": "import torch\n", path: source})


LONG_BODY = "    x = 1\n" * 60

BAD = [
    ("placed", "utils.py", ""),
    ("placed", "utils/helpers.py", ""),
    ("placed", "engine/new_idea.py", ""),
    ("placed", "kernels/folder/op.py", ""),
    ("direction", "layers/linear.py", "from nanovllm.models import stub"),
    ("direction", "layers/linear.py", "from ..models.stub import Model"),
    ("direction", "layers/linear.py", "import nanovllm.models.stub"),
    ("direction", "layers/linear.py", "import nanovllm.models.stub as m"),
    ("direction", "layers/linear.py", "from .. import engine"),
    ("direction", "layers/linear.py", "from nanovllm import LLM"),
    ("direction", "layers/linear.py", "if TYPE_CHECKING:\n    from ..engine.batch import Batch"),
    ("direction", "layers/linear.py", "def f():\n    import importlib\n    importlib.import_module('nanovllm.llm')"),
    ("direction", "attention/base.py", "from ..quantization.stub import x"),
    ("direction", "engine/scheduler.py", "from .llm_engine import LLMEngine"),
    ("direction", "engine/scheduler.py", "from . import llm_engine"),
    ("direction", "engine/scheduler.py", "from .nowhere import x"),
    ("direction", "config.py", "from . import platform"),
    ("direction", "llm.py", "from .server.stub import app"),
    ("forbidden", "config.py", "import torch"),
    ("forbidden", "config.py", "from transformers import AutoConfig"),
    ("forbidden", "cache_spec.py", "import torch.nn as nn"),
    ("forbidden", "engine/block_manager.py", "from torch import Tensor"),
    ("forbidden", "engine/step.py", "from ..models.stub import Model"),
    ("forbidden", "engine/sequence.py", "from .model_runner import ModelRunner"),
    ("forbidden", "engine/batch.py", "from .scheduler import Scheduler"),
    ("forbidden", "engine/worker.py", "from nanovllm.engine import scheduler"),
    ("forbidden", "engine/model_runner.py", "from .tokenizer import Tokenizer"),
    ("forbidden", "engine/__init__.py", "from .llm_engine import LLMEngine"),
    ("forbidden", "kernels/norm.py", "import triton"),
    ("forbidden", "layers/norm.py", "import triton.language as tl"),
    ("forbidden", "kernels/norm_triton.py", "from .norm import norm_ref"),
    ("forbidden", "kernels/norm_triton.py", "import numpy"),
    ("forbidden", "server/app.py", "from ..layers.stub import Linear"),
    ("forbidden", "server/app.py", "from ..engine.sansho_runner import SanshoRunner"),
    ("forbidden", "models/llama.py", "from .stub import _Attention"),
    ("reaches", "engine/scheduler.py", "from ..platform import device"),
    ("reaches", "engine/scheduler.py", "from .. import platform"),
    ("lazy", "engine/batch.py", "def f():\n    import json"),
    ("lazy", "engine/batch.py", "class A:\n    def f(self):\n        from . import cuda_graph"),
    ("lazy", "engine/batch.py", "f = lambda: __import__('json')"),
    ("lazy", "kernels/norm.py", "def f():\n    from .stub_triton import norm\n    return norm"),
    ("lazy", "attention/base.py", "def f():\n    import flash_attn"),
    ("file_lines", "llm.py", "\n" * 401),
    ("function_lines", "llm.py", f"def f():\n{LONG_BODY}"),
    ("function_lines", "kernels/norm_triton.py", f"def f():\n{LONG_BODY * 2}"),
    ("step", "engine/llm_engine.py", "class E:\n  def step(self):\n" + "    x = 1\n" * 10),
    ("step", "engine/llm_engine.py", ""),
    ("families", "engine/scheduler.py", "# a slot for Mamba"),
    ("families", "engine/block_manager.py", "is_qwen3 = True"),
    ("asserts", "llm.py", "def f(x):\n    assert x > 0"),
    ("docstrings", "llm.py", "def f():\n    return 1"),
    ("docstrings", "llm.py", "class A:\n    def f(self):\n        return 1"),
    ("docstrings", "llm.py", "class A:\n    def forward(self):\n        return 1"),
    ("docstrings", "llm.py", "class A:\n    @property\n    def f(self):\n        x = 1\n        return x"),
    ("docstrings", "llm.py", "try:\n    import x\nexcept ImportError:\n    def f():\n        return 1"),
]

GOOD = [
    (
        "direction",
        "layers/linear.py",
        "from ..attention.stub import x\nfrom .stub import y\nfrom .. import platform",
    ),
    ("direction", "attention/torch.py", "import torch\nfrom .base import x"),
    ("direction", "llm.py", "from nanovllm import sampling_params\nfrom .engine.llm_engine import LLMEngine"),
    ("direction", "server/app.py", "from nanovllm import LLM"),
    ("forbidden", "kernels/norm_triton.py", "import math\nimport torch\nimport triton.language as tl"),
    ("forbidden", "layers/norm.py", "import torch\nfrom ..attention import triton\nfrom ..kernels.stub import norm"),
    ("reaches", "engine/scheduler.py", "from ..config import EngineConfig\nfrom .step import Step"),
    ("lazy", "kernels/choice.py", "def twin(name):\n    import json"),
    ("lazy", "models/registry.py", "def f():\n    from . import stub"),
    ("lazy", "attention/__init__.py", "def f():\n    from . import stub"),
    ("function_lines", "kernels/norm_triton.py", f"def f():\n{LONG_BODY}"),
    ("step", "engine/llm_engine.py", 'class E:\n  def step(self):\n    """One\n    step."""\n' + "    x = 1\n" * 9),
    ("families", "engine/model_runner.py", "# mamba"),
    ("asserts", "llm.py", "def f(x):\n    assert x > 0, f'x is {x}, must be positive'"),
    ("docstrings", "llm.py", 'class A:\n    """A."""\n    def forward(self):\n        return 1\n    def _f(self): ...'),
    (
        "docstrings",
        "llm.py",
        "class A:\n    def __init__(self): ...\n    @property\n    def f(self): return 1",
    ),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_rule_sees(rule, path, source):
    """A bad snippet is reported with its file, its line and the rule."""
    found = violations(rule, stub_package(path, source))
    assert any(line.startswith(f"nanovllm/{path}:") and f": {rule}: " in line for line in found), found


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_rule_lets_pass(rule, path, source):
    """A good snippet is not reported."""
    assert not [line for line in violations(rule, stub_package(path, source)) if line.startswith(f"nanovllm/{path}:")]


def test_every_rule_has_a_bad_snippet():
    """A rule without one could be blind."""
    assert {rule for rule, _, _ in BAD} == RULES.keys()


def test_package_budget_counts():
    """Lines with code, over all files: no docstring, comment or blank line, all lines of a string that is a value."""
    files = {
        "a.py": '"""Says\nwhat."""\n\n# why\nx = (\n    1\n)\n',
        "b/c.py": 'def f():\n    """Doc."""\n    return """a\n    b"""\n',
        "server/d.py": "y = 1\n",
    }
    assert package_lines(make_package(files)) == (3 + 3, 1)

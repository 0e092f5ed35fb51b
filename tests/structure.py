"""The rules on the package's shape, read from its syntax trees; test_structure.py applies them.

A new file of the package needs a line in LAYOUT. Each check_* function is a rule: it takes a Module and yields
(line, what is wrong).
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The library, and the extra on top of it: `server/` imports the library and nothing imports it.
LIBRARY_LINES, SERVER_LINES = 7500, 1500
FILE_LINES, FUNCTION_LINES, TRITON_FUNCTION_LINES, STEP_LINES = 400, 60, 120, 9

RUNNERS = ("engine/model_runner.py", "engine/sansho_runner.py")
SCHEDULER, TOKENIZER = "engine/scheduler.py", "engine/tokenizer.py"

# Tokens that make no line a line of code.
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

# What these files may not name, in code or comment.
FAMILIES = ("mamba", "sansho", "qwen", "llama")
FAMILY_BLIND = (
    "engine/sequence.py",
    "engine/block_manager.py",
    "engine/scheduler.py",
    "engine/step.py",
    "engine/snapshots.py",
)


@dataclass(frozen=True)
class Entry:
    """Where a file stands. Beyond what the row forbids: local files or folders, and outside packages, it may not have.

    A package in `outside` may not be reached through other files of the library either; `triton` is for kernel files
    only, so every entry forbids it unless `only` says what alone may be imported (beside the standard library).
    """

    row: int
    local: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None


HOST = Entry(7, local=("layers/*", "models/*", *RUNNERS), outside=("torch",))
DEVICE = Entry(7, local=(SCHEDULER,))
RUNNER = Entry(7, local=(SCHEDULER, TOKENIZER))

# The first pattern that fits decides. A `*` does not cross a folder.
LAYOUT = {
    "config.py": Entry(0, outside=("torch", "transformers")),
    "sampling_params.py": Entry(0, outside=("torch",)),
    "outputs.py": Entry(0, outside=("torch",)),
    "cache_spec.py": Entry(0, outside=("torch",)),
    "platform.py": Entry(1),
    "distributed.py": Entry(1),
    "kernels/*_triton.py": Entry(2, only=("torch", "triton")),
    "kernels/*.py": Entry(2),
    "attention/*.py": Entry(3),
    "quantization/*.py": Entry(3),
    "context.py": Entry(4),
    "layers/*.py": Entry(5),
    "models/*.py": Entry(6),
    "loader.py": Entry(6),
    "engine/__init__.py": Entry(7, only=()),  # it runs before the host side does, so it must be empty
    "engine/sequence.py": HOST,
    "engine/block_manager.py": HOST,
    "engine/scheduler.py": HOST,
    "engine/snapshots.py": HOST,
    "engine/step.py": HOST,
    "engine/request.py": HOST,
    "engine/tokenizer.py": HOST,
    "engine/detokenizer.py": HOST,
    "engine/batch.py": DEVICE,
    "engine/cuda_graph.py": DEVICE,
    "engine/penalties.py": DEVICE,
    "engine/device_state.py": DEVICE,
    "engine/results.py": DEVICE,
    "engine/sansho_batch.py": DEVICE,
    "engine/model_runner.py": RUNNER,
    "engine/sansho_runner.py": RUNNER,
    "engine/build.py": DEVICE,
    "engine/worker.py": DEVICE,
    "engine/llm_engine.py": Entry(8),
    "llm.py": Entry(9),
    "__init__.py": Entry(9),
    "quantize.py": Entry(10),
    "server/*.py": Entry(10, local=("layers/*", "models/*", *RUNNERS)),
}

# (file, function, what it may import): where an optional part is chosen.
LAZY_IMPORTS = [
    ("kernels/choice.py", "twin", "*"),
    ("attention/__init__.py", "*", "attention/*.py"),
    ("models/registry.py", "*", "models/*.py"),
    ("server/__init__.py", "_run", "*"),
]


def fits(path, pattern):
    """fnmatch folder by folder."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


def entry_of(path):
    """The Entry of a file of the package, or None."""
    return next((entry for pattern, entry in LAYOUT.items() if fits(path, pattern)), None)


@dataclass(frozen=True)
class Import:
    """One imported name. target: a path in the package, or the dotted name of what is outside it."""

    line: int
    target: str
    name: str
    function: str | None
    is_local: bool


@dataclass
class Module:
    """One file of the package, its path relative to the package."""

    path: str
    source: str
    package: dict[str, "Module"] = field(repr=False)

    @cached_property
    def tree(self):
        return ast.parse(self.source, self.path)

    @cached_property
    def imports(self):
        return list(self._walk(self.tree, None))

    def _walk(self, node, function):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield self._import(node, alias.name, "", function)
        elif isinstance(node, ast.ImportFrom):
            folder = ["nanovllm", *self.path.split("/")[:-1]]
            start = folder[: len(folder) - node.level + 1] if node.level else []
            dotted = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield self._import(node, dotted, alias.name, function)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "a computed name"
            yield self._import(node, name, "", function)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            function = function or getattr(node, "name", "lambda")
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, function)

    def _import(self, node, dotted, name, function):
        root, _, rest = dotted.partition(".")
        if root != "nanovllm":
            return Import(node.lineno, dotted, name, function, False)
        stem = rest.replace(".", "/")
        paths = [f"{stem}/{name}/__init__.py", f"{stem}/{name}.py"] if name else []
        paths += [f"{stem}/__init__.py", f"{stem}.py"]
        there = [path.lstrip("/") for path in paths if path.lstrip("/") in self.package]
        return Import(node.lineno, there[0] if there else f"{stem}.py", name, function, True)


def check_placed(module):
    """Every file has a place in LAYOUT."""
    if entry_of(module.path) is None:
        yield 1, "has no row: add it to LAYOUT in tests/structure.py, and to the table of parts in the design"


def check_direction(module):
    """A file imports from a lower row, or from its own folder at its own row."""
    mine = entry_of(module.path)
    for found in module.imports:
        theirs = entry_of(found.target) if found.is_local else None
        if not found.is_local or mine is None:
            continue
        if theirs is None:
            yield found.line, f"imports {found.target}, which has no row in LAYOUT of tests/structure.py"
        elif theirs.row > mine.row:
            yield found.line, f"row {mine.row} imports {found.target} of the higher row {theirs.row}"
        elif theirs.row == mine.row and found.target.rpartition("/")[0] != module.path.rpartition("/")[0]:
            yield found.line, f"row {mine.row} imports {found.target} of the same row but another folder"


def check_forbidden(module):
    """No file imports what its entry forbids; private names of a model stay in its file."""
    entry = entry_of(module.path) or Entry(0)
    for found in module.imports:
        root = found.target.split(".")[0]
        if entry.only is not None:
            if found.is_local or root not in {*entry.only, *sys.stdlib_module_names}:
                yield found.line, f"imports {found.target}; allowed is {', '.join(entry.only) or 'nothing'}"
            continue
        if found.is_local and any(fits(found.target, pattern) for pattern in entry.local):
            yield found.line, f"may not import {found.target}"
        if not found.is_local and root in (*entry.outside, "triton"):
            yield found.line, f"may not import {root}"
        if fits(found.target, "models/*.py") and found.name.startswith("_"):
            yield found.line, f"takes the private {found.name} of {found.target}"


def check_reaches(module):
    """What a file may not import from outside, it may not load through the library's other files either."""
    entry, seen, todo = entry_of(module.path) or Entry(0), set(), [(module, None, "")]
    while todo:
        here, line, chain = todo.pop()
        for found in here.imports:
            root = found.target.split(".")[0]
            if not found.is_local and root in entry.outside and line is not None:
                yield line, f"loads {root} through {chain}"
            if found.is_local and found.target in module.package and found.target not in seen:
                seen.add(found.target)
                todo.append((module.package[found.target], line or found.line, f"{chain} {found.target}".strip()))


def check_lazy(module):
    """Imports stand at the top, save those in LAZY_IMPORTS."""
    for found in module.imports:
        where = (module.path, found.function, found.target)
        if found.function and not any(
            fits(where[0], file) and fnmatch(where[1], function) and (what == "*" or fits(where[2], what))
            for file, function, what in LAZY_IMPORTS
        ):
            yield found.line, f"imports {found.target} inside {found.function}(); see LAZY_IMPORTS"


def check_file_lines(module):
    """A file has at most FILE_LINES lines."""
    lines = len(module.source.splitlines())
    if lines > FILE_LINES:
        yield lines, f"has {lines} lines, allowed are {FILE_LINES}"


def check_function_lines(module):
    """A function has at most FUNCTION_LINES lines, one in a Triton file TRITON_FUNCTION_LINES."""
    allowed = TRITON_FUNCTION_LINES if fits(module.path, "kernels/*_triton.py") else FUNCTION_LINES
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if lines > allowed:
                yield node.lineno, f"{node.name}() has {lines} lines, allowed are {allowed}"


def check_step(module):
    """The engine's step can be read at a glance: its body, docstring apart, stays under ten lines."""
    if module.path != "engine/llm_engine.py":
        return
    steps = [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    if not steps:
        yield 1, "has no function step()"
    for node in steps:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        lines = node.end_lineno - body[0].lineno + 1 if body else 0
        if lines > STEP_LINES:
            yield node.lineno, f"step() has {lines} lines of body, allowed are {STEP_LINES}"


def check_families(module):
    """The host side sees blocks and slots, no model family."""
    if module.path not in FAMILY_BLIND:
        return
    for number, line in enumerate(module.source.splitlines(), 1):
        for word in FAMILIES:
            if word in line.lower():
                yield number, f"names the model family {word!r}"


def check_asserts(module):
    """An assert says what is wrong; for what a user can cause, raise instead."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield node.lineno, f"has a bare assert: {ast.unparse(node)}"


def check_docstrings(module):
    """Public functions and methods have a docstring.

    A one-line property needs none, nor does the forward of a class that has one.
    """
    todo = [(node, None) for node in module.tree.body]
    while todo:
        node, owner = todo.pop(0)
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            todo += [(child, owner) for child in ast.iter_child_nodes(node)]
        if not hasattr(node, "name") or node.name is None or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            todo += [(child, node) for child in node.body]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is None:
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            one_line = node.end_lineno == node.body[0].lineno
            if "overload" in decorators or (one_line and decorators & {"property", "cached_property", "setter"}):
                continue
            if owner is not None and node.name == "forward" and ast.get_docstring(owner) is not None:
                continue
            yield node.lineno, f"{owner.name + '.' if owner else ''}{node.name}() has no docstring"


RULES = {name[6:]: rule for name, rule in list(globals().items()) if name.startswith("check_")}


def make_package(sources):
    """Modules by path from sources by path."""
    package = {}
    package.update({path: Module(path, source, package) for path, source in sources.items()})
    return package


def violations(rule, package):
    """Lines `file:line: rule: what` for every breach, once where one import brings several names."""
    found = [
        f"nanovllm/{path}:{line}: {rule}: {what}"
        for path, module in sorted(package.items())
        for line, what in RULES[rule](module)
    ]
    return list(dict.fromkeys(found))


def package_lines(package):
    """Lines that hold code, of the library's files and of the server's: docstrings, comments and blank lines are free,
    or the budget would be kept by explaining less. (tinygrad's line budget counts so too.)"""
    server = sum(len(_code_lines(module)) for path, module in package.items() if path.startswith("server/"))
    return sum(len(_code_lines(module)) for module in package.values()) - server, server


def _code_lines(module):
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node) is not None
        ):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


PACKAGE = make_package(
    {
        path.relative_to(ROOT / "nanovllm").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "nanovllm").rglob("*.py"))
    }
)

"""The OpenAI-compatible server, an extra: pip install 'nanovllm[server]'."""

import importlib
import sys


def main() -> int:
    """Console script `nanovllm-openai-server`."""
    return _run("nanovllm.server.cli")


def batch() -> int:
    """Console script `nanovllm-run-batch`."""
    return _run("nanovllm.server.run_batch")


def _run(module: str) -> int:
    """A command's `main`, or what is missing where the extra is not installed."""
    try:
        command = importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"error: this needs {error.name}: pip install 'nanovllm[server]'", file=sys.stderr)
        return 1
    return command.main()

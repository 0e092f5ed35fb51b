"""The OpenAI-compatible server, an extra: pip install 'nanovllm[server]'."""

import sys


def main() -> int:
    """Console script `nanovllm-openai-server`; says what is missing where the extra is not installed."""
    try:
        from nanovllm.server.cli import main as run
    except ModuleNotFoundError as error:
        print(f"error: the server needs {error.name}: pip install 'nanovllm[server]'", file=sys.stderr)
        return 1
    return run()

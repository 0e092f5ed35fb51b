"""`nanovllm-openai-server`: options, start, signals."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import os
import re
import socket
import sys
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import uvicorn

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.server.app import create_app
from nanovllm.server.service import Service

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
# A step that is under way when the server stops is waited for so long.
_STEP_SECONDS = 10.0


def make_parser() -> argparse.ArgumentParser:
    """The server's own options, and every knob of the engine under its own name, with its docstring as help."""
    parser = argparse.ArgumentParser(
        prog="nanovllm-openai-server", description="Serve one model over an OpenAI-compatible HTTP API."
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="what requests call the model; its path when left out"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get(API_KEY_VARIABLE), metavar="KEY",
        help=f"what clients must send, on every route but /health; ${API_KEY_VARIABLE} when left out",
    )  # fmt: skip
    parser.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web pages browsers may call from"
    )
    parser.add_argument(
        "--disable-default-logprobs", action="store_true", help="no log probabilities unless a request asks for them"
    )
    parser.add_argument("--reasoning-parser", choices=["qwen3"], help="tell a model's thinking apart in chat answers")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="how long SIGTERM waits for requests (default: %(default)s)"
    )
    add_engine_options(parser.add_argument_group("engine"))
    return parser


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """An option for each field of EngineConfig, with what its docstring says of it."""
    hints, texts = get_type_hints(EngineConfig), _field_texts()
    for field in fields(EngineConfig):
        hint = str(hints[field.name])
        option: dict[str, Any] = {"help": texts.get(field.name, "").replace("%", "%%"), "default": field.default}
        if hints[field.name] is bool:
            option["action"] = argparse.BooleanOptionalAction
        else:
            option["type"] = int if "int" in hint else float if "float" in hint else str
            option["metavar"] = option["type"].__name__.upper()
            if "tuple" in hint:
                option["nargs"] = "+"
        if field.default is MISSING:
            option |= {"required": True, "default": None}
        group.add_argument(f"--{field.name.replace('_', '-')}", **option)


def _field_texts() -> dict[str, str]:
    """What the docstring of EngineConfig says of each field."""
    _, _, block = inspect.getdoc(EngineConfig).partition("Args:\n")
    texts = {}
    for entry in re.split(r"\n(?=    \w)", block):
        names, _, text = entry.strip().partition(": ")
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


class Server(uvicorn.Server):
    """The first SIGTERM or Ctrl-C takes no more requests and waits for those that run; the second stops at once."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task | None = None
        self._told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; says where it listens."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            print(f"nanovllm is listening on http://{host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal came."""
        if self._told:
            self.should_exit = self.force_exit = True
        else:
            self._told = True
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.thread.drain(self._drain_seconds)
        self.should_exit = True


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What `add_engine_options` added, as the engine takes it.

    Raises:
        ValueError: a value that is not allowed.
    """
    knobs = {field.name: getattr(args, field.name) for field in fields(EngineConfig)}
    return EngineConfig.from_kwargs(knobs.pop("model"), **knobs)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the model is loaded.

    Raises:
        OSError: the address cannot be had.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


def serve(args: argparse.Namespace, sock: socket.socket) -> bool:
    """Load the model and serve it until a signal comes; returns whether the engine stopped in good order.

    Raises:
        ValueError: the engine's config is not allowed, or does not fit.
    """
    engine = LLMEngine(engine_config(args))
    name = args.served_model_name or args.model
    service = Service(engine, name, not args.disable_default_logprobs, args.reasoning_parser is not None)
    app = create_app(service, args.api_key, tuple(args.allowed_origins))
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=_STEP_SECONDS)
    Server(config, service, args.drain_seconds).run([sock])
    return service.thread.stop(_STEP_SECONDS)


def main(argv: list[str] | None = None) -> int:
    """Serve; returns the exit status. What a user can mend is one line on stderr."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sock = listen(args.host, args.port)
    except OSError as error:
        print(
            f"error: cannot listen on {args.host}:{args.port}: {error.strerror}; choose another --port", file=sys.stderr
        )
        return 1
    try:
        return 0 if serve(args, sock) else 1
    except (ValueError, TypeError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        sock.close()

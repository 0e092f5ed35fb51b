"""The routes, who may use them, and how answers and errors are sent."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm import __version__
from nanovllm.sampling_params import SamplingParams
from nanovllm.server import protocol
from nanovllm.server.chat import render, start_chat
from nanovllm.server.completions import start_completion
from nanovllm.server.protocol import ApiError, validation_error
from nanovllm.server.service import Answer, Service, dumps

_OPEN_PATH = "/health"
_GONE = 499  # nobody reads it


def create_app(service: Service, api_key: str | None = None, allowed_origins: tuple[str, ...] = ()) -> FastAPI:
    """The ASGI application around a service; the engine's thread starts with it.

    Args:
        api_key: what clients send as `Authorization: Bearer KEY`, on every route but /health; None asks for none.
        allowed_origins: web pages that browsers may call it from.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        yield

    app = FastAPI(title="nanovllm", version=__version__, lifespan=lifespan)
    app.add_exception_handler(ApiError, lambda request, error: send_error(error))
    app.add_exception_handler(RequestValidationError, lambda request, e: send_error(validation_error(e.errors())))
    app.add_exception_handler(HTTPException, lambda request, e: send_error(ApiError(e.status_code, str(e.detail))))
    app.add_exception_handler(Exception, lambda request, e: send_error(ApiError(500, f"{type(e).__name__}: {e}")))
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_state_routes(app, service)
    if api_key is not None:
        app.add_middleware(KeyCheck, api_key=api_key)
    if allowed_origins:  # added last, so it is asked first: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        return await respond(request, await start_completion(service, body))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Response:
        return await respond(request, await start_chat(service, body))


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "exactly one of prompt and messages is needed", "prompt")
        if body.messages is not None:
            tokens = await render(service, body.messages, body.chat_template_kwargs)
        else:
            (tokens,) = await service.encode_prompts(body.prompt)
        return send_json({"count": len(tokens), "max_model_len": service.engine.max_model_len, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> Response:
        service.check_model(body.model)
        service.check_prompt(body.tokens, SamplingParams(), 0, "tokens")
        tokenizer = service.engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "detokenize needs a tokenizer, and skip_tokenizer_init is set")
        return send_json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_state_routes(app: FastAPI, service: Service) -> None:
    card = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "nanovllm"}
    card["max_model_len"] = service.engine.max_model_len

    @app.get(_OPEN_PATH)
    async def health() -> Response:
        service.thread.check()
        return send_json({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return send_json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        return send_json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return send_json(card)


def send_json(value: Any, status: int = 200) -> Response:
    """A JSON response. What is no Unicode, which only an echoed mistake can hold, is replaced."""
    return Response(dumps(value).encode("utf-8", "replace"), status, media_type="application/json")


def send_error(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    return send_json(error.body, error.status)


async def respond(request: Request, answer: Answer) -> Response:
    """Send an answer as its request wants it; a client that goes away ends it."""
    if answer.request.stream:
        return EventStream(answer)
    body = await while_connected(request.receive, answer.body(), answer.close)
    return Response(status_code=_GONE) if body is None else send_json(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Any], close: Callable[[], None]) -> Any:
    """What `work` returns, or None when the client went away first. `close` is called in any case."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        close()
        working.cancel()
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The status line waits for the first of them, so that an error before it is a plain one."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._write(send), self._answer.close)

    async def _write(self, send: Send) -> None:
        """Events that came together are one write: it costs as much as all the rest of an event."""
        started, events = False, []
        try:
            async for event in self._answer.events():
                events.append(event)
                if self._answer.job.must_wait:
                    if not started:
                        started = True
                        await self._start(send)
                    await self._send(send, events, more=True)
                    events.clear()
        except ApiError as error:
            if not (started or events):
                raise
            events.append(dumps(error.body))
        else:
            events.append("[DONE]")
        if not started:
            await self._start(send)
        await self._send(send, events, more=False)

    def _start(self, send: Send) -> Awaitable[None]:
        return send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    @staticmethod
    def _send(send: Send, events: list[str], more: bool) -> Awaitable[None]:
        body = "".join([f"data: {event}\n\n" for event in events]).encode()
        return send({"type": "http.response.body", "body": body, "more_body": more})


class KeyCheck:
    """Refuses whoever does not bring the key. All routes are behind it, known or not, but for /health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _OPEN_PATH:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):  # takes as long wherever they differ
                error = ApiError(401, "no valid API key: send 'Authorization: Bearer KEY'", code="invalid_api_key")
                await send_error(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

"""What the routes share: the service around one engine, and how the answer to a request is put together."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.tokenizer import Tokenizer, encode_prompts
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.engine_thread import Delta, EngineThread, Job, Prompt
from nanovllm.server.metrics import Metrics
from nanovllm.server.protocol import ApiError, GenerationRequest, client_error, refusing

# JSON has no -inf; a logit bias or a filter of the model can make one.
_LEAST_LOGPROB = -9999.0
# One encoder for all: `json.dumps` makes a new one at each call, which takes longer than a small event itself.
dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class TokenNames:
    """How tokens are written in log probabilities: their text, or "bytes:\\xf0\\x9f" where that is no whole character,
    so that no two tokens of a place share a name."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """Name and bytes of a token, looked up once."""
        if token_id not in self._known:
            exact = self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else b""
            try:
                name = exact.decode() or f"token_id:{token_id}"
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in exact)
            self._known[token_id] = name, exact
        return self._known[token_id]


@dataclass
class Service:
    """One engine and how it is offered.

    Args:
        engine: loaded.
        model_name: what `model` of a request must be.
        default_logprobs: whether a request that says nothing about log probabilities gets them.
        splits_reasoning: whether chat answers have their thinking apart.
    """

    engine: LLMEngine
    model_name: str
    default_logprobs: bool = True
    splits_reasoning: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)
        self.thread = EngineThread(self.engine, self.metrics)
        self.names = TokenNames(self.engine.tokenizer)
        if self.engine.tokenizer is not None:
            self.engine.tokenizer.encode(["a"])  # its first use settles its state; from then on threads may share it

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not this one.

        Raises:
            ApiError: status 404; or 503 when nothing can be served.
        """
        self.thread.check()
        if name is not None and name != self.model_name:
            known = f"the model {name!r} does not exist: this server has {self.model_name!r}"
            raise ApiError(404, known, "model", "model_not_found")

    async def encode_prompts(self, prompts: Any) -> list[list[int]]:
        """Token ids of at least one prompt.

        Raises:
            ApiError: they are no prompts.
        """
        with refusing("prompt"):
            token_ids = await asyncio.to_thread(encode_prompts, self.engine.tokenizer, prompts)
            if not token_ids:
                raise ValueError("prompt is an empty list: it needs at least one prompt")
            return token_ids

    async def encode_chat(self, messages: list[dict[str, str]], template_kwargs: dict[str, Any]) -> list[int]:
        """Token ids of a conversation that an answer shall follow.

        Raises:
            ApiError: the template refuses it, or there is none.
        """
        tokenizer = self.engine.tokenizer
        with refusing("messages"):
            if tokenizer is None:
                raise ValueError("chat needs a tokenizer, and skip_tokenizer_init is set")
            return (await asyncio.to_thread(tokenizer.encode_chat, [messages], True, template_kwargs))[0]

    def check_prompt(self, token_ids: list[int], params: SamplingParams, num_new_tokens: int, param: str) -> None:
        """Refuse what the engine cannot serve.

        Raises:
            ApiError: with code "context_length_exceeded" where it is too long.
        """
        try:
            self.engine.check_request(token_ids, params, num_new_tokens)
        except ValueError as error:
            too_long = len(token_ids) + num_new_tokens > self.engine.max_model_len
            raise client_error(error, param, "context_length_exceeded" if too_long else None) from None


class Answer(ABC):
    """A request that runs, as one body or as a stream of events. Close it when nobody waits for it any more."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, service: Service, request: GenerationRequest, prompts: list[Prompt]) -> None:
        self.service = service
        self.request = request
        self.prompts = prompts
        self.num_samples = prompts[0].params.n
        self._usage = {"prompt": sum(len(prompt.token_ids) for prompt in prompts), "completion": 0, "cached": 0}
        self._head = {
            "id": self.id_prefix + uuid.uuid4().hex,
            "object": self.chunk_object if request.stream else self.object,
            "created": int(time.time()),
            "model": service.model_name,
        }
        self.job: Job = service.thread.submit(prompts, bool(request.stream))

    @abstractmethod
    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """One entry of `choices`; in a stream None where there is nothing to tell yet."""

    async def body(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: the engine failed.
        """
        choices = [self._choice(delta) async for delta in self.job]
        choices.sort(key=lambda choice: choice["index"])
        return {**self._head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The chunks of a stream, as JSON. What is the same in all of them is encoded once.

        Raises:
            ApiError: the engine failed.
        """
        options = self.request.stream_options
        with_usage = options is not None and options.include_usage
        opening = dumps({**self._head, "usage": None} if with_usage else self._head)[:-1] + ',"choices":['
        async for delta in self.job:
            choice = self._choice(delta)
            if choice is not None:
                yield f"{opening}{dumps(choice)}]}}"
        if with_usage:
            yield dumps({**self._head, "choices": [], "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        prompt, completion = self._usage["prompt"], self._usage["completion"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._usage["cached"]},
        }

    def close(self) -> None:
        """End what still runs."""
        self.job.close()

    def _choice(self, delta: Delta) -> dict[str, Any] | None:
        if delta.finish_reason not in (None, "stop", "length"):
            raise ApiError(500, delta.error or f"the engine ended the request: {delta.finish_reason}")
        self._usage["completion"] += len(delta.token_ids)
        if delta.finish_reason is not None and delta.index % self.num_samples == 0:
            self._usage["cached"] += delta.num_cached_tokens
        choice = self.choice(delta)
        if choice is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            if self.request.return_token_ids:
                choice["token_ids"] = delta.token_ids
        return choice


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def most_likely(entries: list[tuple[int, float]], name: Callable[[int], tuple[str, bytes]]) -> dict[str, float]:
    """Log probabilities by token name. Where two tokens share a name, the likelier one stands."""
    found: dict[str, float] = {}
    for token_id, logprob in entries:
        found.setdefault(name(token_id)[0], finite(logprob))
    return found

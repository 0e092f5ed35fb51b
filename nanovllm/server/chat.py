"""POST /v1/chat/completions: conversations answered, with the thinking apart where a model thinks aloud."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanovllm.server.engine_thread import Delta, Prompt
from nanovllm.server.protocol import ApiError, ChatRequest, Message
from nanovllm.server.service import Answer, Service, finite

# Keywords of the function that renders: chat_template_kwargs are for the template.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_OPEN, _CLOSE = "<think>", "</think>"


async def render(service: Service, messages: list[Message], template_kwargs: dict[str, Any] | None) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: the template refuses it, or a keyword is not for the template.
    """
    for name in template_kwargs or {}:
        if name in _RESERVED:
            raise ApiError(400, f"chat_template_kwargs: {name!r} cannot be set by a request", "chat_template_kwargs")
    return await service.encode_chat([message.as_dict() for message in messages], template_kwargs or {})


async def start_chat(service: Service, request: ChatRequest) -> ChatAnswer:
    """Check a request and let it run.

    Raises:
        ApiError: it cannot be served; nothing runs then.
    """
    service.check_model(request.model)
    limits = {value for value in (request.max_tokens, request.max_completion_tokens) if value is not None}
    if len(limits) > 1:
        message = f"max_tokens={request.max_tokens} and max_completion_tokens={request.max_completion_tokens} differ"
        raise ApiError(400, message, "max_completion_tokens")
    max_tokens = limits.pop() if limits else None  # the room that the prompt leaves
    wants = service.default_logprobs if "logprobs" not in request.model_fields_set else bool(request.logprobs)
    if request.top_logprobs and not wants:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    params = request.sampling_params(logprobs=(request.top_logprobs or 0) if wants else None, max_tokens=max_tokens)
    token_ids = await render(service, request.messages, request.chat_template_kwargs)
    service.check_prompt(token_ids, params, max_tokens or 1, "messages")
    return ChatAnswer(service, request, [Prompt(token_ids, params)])


class ChatAnswer(Answer):
    """Choices of messages, or in a stream of what is new of them."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, request: ChatRequest, prompts: list[Prompt]) -> None:
        self._splitters: dict[int, ThinkSplitter] = {}
        self._started: set[int] = set()
        self._thinks_at_once = False
        if service.splits_reasoning:
            # Some templates open the thinking themselves; six tokens hold the tag however it is cut.
            end = service.engine.tokenizer.decode(prompts[0].token_ids[-6:], False)
            self._thinks_at_once = end.rstrip().endswith(_OPEN)
        super().__init__(service, request, prompts)

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """A message, or the part of it that is new."""
        content, reasoning = delta.text, ""
        if self.service.splits_reasoning:
            splitter = self._splitters.setdefault(delta.index, ThinkSplitter(self._thinks_at_once))
            reasoning, content = splitter.push(delta.text, final=delta.finish_reason is not None)
        logprobs = None
        if self.prompts[0].params.logprobs is not None:
            logprobs = {"content": self._logprobs(delta), "refusal": None}
        if not self.request.stream:
            message = {"role": "assistant", "content": content}
            if self.service.splits_reasoning:
                message["reasoning_content"] = reasoning or None
            return {"index": delta.index, "message": message, "logprobs": logprobs}
        has_news = content or reasoning or delta.finish_reason
        if not (has_news or (delta.token_ids and (logprobs or self.request.return_token_ids))):
            return None
        part: dict[str, str] = {}
        if delta.index not in self._started:
            self._started.add(delta.index)
            part = {"role": "assistant", "content": ""}
        if reasoning:
            part["reasoning_content"] = reasoning
        if content:
            part["content"] = content
        return {"index": delta.index, "delta": part, "logprobs": logprobs}

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        chosen = zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True)
        return [
            {**self._entry(token_id, logprob), "top_logprobs": [self._entry(*one) for one in top]}
            for token_id, logprob, top in chosen
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, exact = self.service.names(token_id)
        return {"token": name, "logprob": finite(logprob), "bytes": list(exact)}


class ThinkSplitter:
    """Takes a text apart, as it comes, into what stands in <think>...</think> at its start and what follows.

    White space at the start of either part is dropped. A text that starts otherwise is all answer.

    Args:
        inside: the prompt opened the thinking.
    """

    def __init__(self, inside: bool) -> None:
        self._where = "reasoning" if inside else "start"
        self._held = ""
        self._is_empty = True  # the part we are in

    def push(self, text: str, final: bool) -> tuple[str, str]:
        """New reasoning and new content. Until `final`, what may be the start of a tag is held back."""
        self._held += text
        reasoning = content = ""
        if self._where == "start":
            head = self._held.lstrip()
            if head.startswith(_OPEN):
                self._where, self._held = "reasoning", head[len(_OPEN) :]
            elif final or not _OPEN.startswith(head):
                self._where = "plain"
        if self._where == "reasoning":
            inner, tag, rest = self._held.partition(_CLOSE)
            keep = 0 if tag or final else _held_back(inner)
            reasoning = self._part(inner[: len(inner) - keep])
            self._held = rest if tag else inner[len(inner) - keep :]
            if tag:
                self._where, self._is_empty = "answer", True
        if self._where == "answer":
            content, self._held = self._part(self._held), ""
        elif self._where == "plain":
            content, self._held = self._held, ""
        return reasoning, content

    def _part(self, text: str) -> str:
        if self._is_empty:
            text = text.lstrip()
        self._is_empty = self._is_empty and not text
        return text


def _held_back(text: str) -> int:
    """Length of the longest end of `text` that may become the closing tag."""
    return next((n for n in range(min(len(_CLOSE) - 1, len(text)), 0, -1) if _CLOSE.startswith(text[-n:])), 0)

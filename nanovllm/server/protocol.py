"""What requests may say, and how errors are told: the part of OpenAI's API that this server serves, as pydantic models.

A field that is not listed here is refused by name. Every optional field takes null, which means its default. Types are
checked here, values by `SamplingParams` and the engine, so that they are the same offline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, WithJsonSchema

from nanovllm.sampling_params import SamplingParams

# Of OpenAI's completions when max_tokens is left out.
DEFAULT_COMPLETION_TOKENS = 16
# logprobs has its own shape in either API, and is translated there.
SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams)) - {"logprobs"}
MAX_LOGPROBS = 20
MAX_N = 128
# No message repeats more of what the client sent than this.
_MAX_MESSAGE = 600

Unsupported = Annotated[None, Field(description="Not supported: null only.")]
_TEXT_OR_IDS = [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
PromptField = Annotated[
    Any,
    WithJsonSchema({"anyOf": [*_TEXT_OR_IDS, {"type": "array", "items": {"anyOf": _TEXT_OR_IDS}}]}),
    Field(description="A string, a list of token ids, or a list of such."),
]


class ApiError(Exception):
    """What a client is told in place of an answer.

    Args:
        status: HTTP status.
        message: one sentence or two; cut where it is long.
        param: the field that is wrong.
        code: for programs, such as "context_length_exceeded".
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2 :]}"
        told = {"message": message, "type": "server_error" if status >= 500 else kind, "param": param, "code": code}
        self.body = {"error": told}


def client_error(error: Exception, param: str | None, code: str | None = None) -> ApiError:
    """Status 400 for what the library refused; `param` unless the message itself names a sampling parameter."""
    name = str(error).partition("=")[0]
    return ApiError(400, str(error), name if name in SAMPLING_NAMES else param, code)


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """What the library refuses within is the client's mistake."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise client_error(error, param) from None


def validation_error(errors: list[dict[str, Any]]) -> ApiError:
    """One small error for all that pydantic found: the first of them, and how many more there are."""
    first = errors[0]
    where = [str(part)[:64] for part in first["loc"] if part != "body"]
    param, message = (where[0] if where else None), first["msg"]
    if first["type"] == "extra_forbidden":
        param = ".".join(where)
        message = f"unknown field {param!r}"
    elif first["type"] == "none_required":
        message = f"{param!r} is not supported by this server: leave it out"
    elif first["type"] == "json_invalid":
        param, message = None, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}"
    elif where:
        message = f"{'.'.join(where)}: {message}"
    more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
    return ApiError(400, message + more, param)


class Body(BaseModel):
    """A JSON object without fields nobody reads."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: StrictBool | None = None


class GenerationRequest(Body):
    """What both ways to generate share. `user` is taken and has no effect."""

    model: str | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    max_tokens: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    logit_bias: dict[int, StrictFloat] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Extensions, named as in SamplingParams.
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    return_token_ids: StrictBool | None = None

    def sampling_params(self, **values: Any) -> SamplingParams:
        """The request's own settings, and `values` in place of those of the same name.

        Raises:
            ApiError: a value out of range.
        """
        own = {name: getattr(self, name) for name in SAMPLING_NAMES & type(self).model_fields.keys()}
        given = {name: value for name, value in own.items() if value is not None}
        with refusing():
            if self.stream_options is not None and not self.stream:
                raise ApiError(400, "stream_options needs stream=true", "stream_options")
            return SamplingParams(**{**given, **values})


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Without `logprobs` the server's default holds; null and false mean none."""

    prompt: PromptField
    echo: StrictBool | None = None
    logprobs: StrictBool | Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Unsupported = None
    best_of: Unsupported = None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. Text parts are joined by newlines; "developer" is another name for "system"."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Unsupported = None
    tool_calls: Unsupported = None

    def as_dict(self) -> dict[str, str]:
        """Role and content as chat templates take them."""
        parts = self.content if isinstance(self.content, list) else None
        content = self.content if parts is None else "\n".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Conversation(Body):
    """Messages and how the model's template renders them."""

    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseFormat(Body):
    """Text, the only one there is."""

    type: Literal["text"]


class ChatRequest(GenerationRequest, Conversation):
    """POST /v1/chat/completions. Without `logprobs` the server's default holds; null and false mean none."""

    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Unsupported = None
    tool_choice: Unsupported = None
    parallel_tool_calls: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    reasoning_effort: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    store: Unsupported = None
    metadata: Unsupported = None
    service_tier: Unsupported = None


class TokenizeRequest(Body):
    """POST /tokenize: a text as completions take it, or a conversation as chat does."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]

"""What a request gets back: plain dicts, described here."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class TokenLogprob(NamedTuple):
    """One entry of `top_logprobs`: the log probability with the token's text and bytes at hand.

    `text` is the token decoded alone (U+FFFD where it holds part of a character); `bytes` are exact.
    """

    logprob: float
    text: str
    bytes: bytes


class SampleOutput(TypedDict, total=False):
    """One sample. `logprobs` and `top_logprobs` are there when `SamplingParams.logprobs` was set.

    finish_reason: "stop" (eos, a stop token or a stop string), "length", or "error" when the model gave
        logits that are not finite (`error` then says so).
    stop_reason: the stop string or stop token id that ended the text; None for eos and for "length".
    logprobs: one float per generated token, the selected token's.
    top_logprobs: per generated token, the k most likely ids, most likely first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    error: str
    logprobs: list[float]
    top_logprobs: list[dict[int, TokenLogprob]]


class RequestOutput(SampleOutput, total=False):
    """What `generate` returns per prompt: the first sample's fields, and with n > 1 all samples in `outputs`.

    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    time_to_first_token: seconds from being queued to the first token on the host; None when there is none.
    """

    prompt_token_ids: list[int]
    num_cached_tokens: int
    time_to_first_token: float | None
    outputs: list[SampleOutput]


class StreamOutput(TypedDict):
    """What `stream` yields: text and token ids since the last one; `finish_reason` is None until the last."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None


class ScoreOutput(TypedDict):
    """What `score` returns per prompt. The first token has no log probability: None stands in its place."""

    token_ids: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[int, TokenLogprob] | None]
    sum_logprob: float

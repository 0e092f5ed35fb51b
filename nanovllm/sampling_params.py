"""What one request may ask of the sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.config import check, check_int, is_number, unknown_name_error

# Below this the scaled logits could overflow float32; the distribution is one-hot long before.
GREEDY_TEMPERATURE = 1e-5
# Twice this is still a float32.
_MAX_BIAS = 1e38


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to continue a prompt; names and meaning as in vLLM.

    Args:
        temperature: 0 is greedy (the largest logit), else logits are divided by it.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this.
        top_k: keep this many most likely tokens; -1 or 0 keeps all.
        min_p: drop tokens less likely than this times the most likely one.
        max_tokens: most tokens to generate; None means as many as `max_model_len` leaves room for.
        min_tokens: eos and `stop_token_ids` cannot be drawn, and stop strings are not looked for, before this many.
        n: number of samples per prompt; sample i uses seed + i.
        seed: makes the samples of this request repeatable whatever else is in the batch.
        stop: a string or strings that end the text; they are cut from it.
        stop_token_ids: ids that end the text like eos does.
        ignore_eos: go on after eos.
        presence_penalty: subtracted from the logit of every token already generated, in [-2, 2].
        frequency_penalty: subtracted once per time a token was generated, in [-2, 2].
        repetition_penalty: > 1 makes tokens of prompt and output less likely (positive logits are divided by
            it, negative ones multiplied).
        logit_bias: token id -> number added to its logit.
        logprobs: None for none; k for the selected token's log probability and the k most likely tokens'.
            They are of the model's own distribution, before temperature, penalties and filters.
        skip_special_tokens: leave special tokens such as eos out of the text.

    Raises:
        TypeError: an unknown name, with the nearest known one.
        ValueError: a value out of range: what, got, allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 64
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __init__(self, **kwargs: Any) -> None:
        known = {f.name: f.default for f in fields(self)}
        for name in kwargs:
            if name not in known:
                raise unknown_name_error("SamplingParams()", name, list(known))
        values = {**known, **kwargs}
        values["stop"] = _as_tuple("stop", values["stop"], "a string or a list of strings")
        values["stop_token_ids"] = _as_tuple("stop_token_ids", values["stop_token_ids"], "a list of integers")
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_distribution()
        self._check_lengths()
        self._check_tokens()

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p can drop a token."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalized(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _check_distribution(self) -> None:
        ranges = (
            ("temperature", 0, math.inf, "a finite number of at least 0 (0 is greedy)"),
            ("top_p", 0, 1, "a number in (0, 1]"),
            ("min_p", 0, 1, "a number in [0, 1]"),
            ("presence_penalty", -2, 2, "a number in [-2, 2]"),
            ("frequency_penalty", -2, 2, "a number in [-2, 2]"),
            ("repetition_penalty", 0, math.inf, "a finite number above 0"),
        )
        for name, low, high, allowed in ranges:
            value = getattr(self, name)
            ok = is_number(value) and math.isfinite(value) and low <= value <= high
            check(ok and (value != 0 or name not in ("top_p", "repetition_penalty")), name, value, allowed)
        check_int("top_k", self.top_k, -1, " (-1 or 0 keeps all)")

    def _check_lengths(self) -> None:
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, ", or None for as many as fit")
            at_most = f"at most max_tokens={self.max_tokens}"
            check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, at_most)
        check_int("n", self.n, 1)
        if self.seed is not None:
            check_int("seed", self.seed, 0)
            check(self.seed < 2**63, "seed", self.seed, "below 2**63")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0)
        for name in ("ignore_eos", "skip_special_tokens"):
            check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")

    def _check_tokens(self) -> None:
        for text in self.stop:
            check(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id, 0)
        biases = {} if self.logit_bias is None else self.logit_bias
        check(isinstance(biases, dict), "logit_bias", biases, "a dict of token id to number")
        for token_id, bias in biases.items():
            check_int("logit_bias token id", token_id, 0)
            ok = is_number(bias) and abs(bias) <= _MAX_BIAS
            check(ok, f"logit_bias[{token_id}]", bias, f"a finite number, at most {_MAX_BIAS:.0e} either way")


def _as_tuple(name: str, value: Any, allowed: str) -> tuple:
    if value is None or isinstance(value, str):
        return (value,) if value is not None else ()
    check(isinstance(value, (list, tuple, set, frozenset)), name, value, allowed)
    return tuple(value)

"""From logits to results on the host: drawing, scoring, and the copy back; what every runner does the same way."""

from __future__ import annotations

from typing import Protocol

import torch

from nanovllm.engine.batch import Rows, upload
from nanovllm.engine.step import Logprobs, PrefillChunk, Sampling, StepResult
from nanovllm.kernels import sampling as ops

# Rows of float32 logits that exist at once when a prompt is scored, however long it is.
_SCORE_ROWS = 256
PLAIN = Sampling(greedy=False, filtered=False, penalized=[], biases=[], num_logprobs=-1)


class Head(Protocol):
    """What scoring needs of a model."""

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden_size] to [R, vocab_size]."""


class PendingResult:
    """Results on their way to the host. `wait` blocks until they are there."""

    def __init__(
        self,
        token_ids: torch.Tensor | None,
        logprobs: tuple[torch.Tensor, ...] | None,
        scores: list[tuple[torch.Tensor, ...]],
        device: torch.device,
    ) -> None:
        self._token_ids = None if token_ids is None else _to_host(token_ids)
        self._logprobs = None if logprobs is None else tuple(map(_to_host, logprobs))
        self._scores = [tuple(map(_to_host, score)) for score in scores]
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> StepResult:
        """The step's results as plain numbers."""
        if self._event is not None:
            self._event.synchronize()
        token_ids = [] if self._token_ids is None else self._token_ids.tolist()
        logprobs = None if self._logprobs is None else _as_logprobs(self._logprobs)
        return StepResult(token_ids, logprobs, [_as_logprobs(score) for score in self._scores])


def draw_tokens(
    state: Rows, logits: torch.Tensor, rows: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """Draw a token for each of `rows` [R] from its [R, V] logits and remember it in `state`; with its log probabilities
    if any row wants them."""
    raw, device = logits, logits.device
    if sampling.biases or sampling.penalized:
        logits = raw.to(torch.float32, copy=True)
    for position, ids, values in sampling.biases:
        at = upload(ids, torch.int64, device)
        logits[position, at] += upload(values, torch.float32, device)
    if sampling.penalized:
        state.penalize(logits, rows, sampling.penalized)
    if sampling.greedy:
        token_ids = ops.greedy(logits)
    else:
        filters = (state.top_k, state.top_p, state.min_p) if sampling.filtered else None
        token_ids = ops.sample(logits, rows, state.temperature, state.seed, state.context_len, filters)
    state.record(rows, token_ids, sampling)
    if sampling.num_logprobs < 0:
        return token_ids, None
    return token_ids, ops.token_logprobs(raw, token_ids, sampling.num_logprobs)


def score_chunks(model: Head, hidden: torch.Tensor, chunks: list[PrefillChunk]) -> list[tuple[torch.Tensor, ...]]:
    """Log probabilities of the chunks' targets from all their hidden states, a few rows of logits at a time."""
    scores = []
    first = 0
    for chunk in chunks:
        if chunk.score_targets:
            start = first + chunk.score_start - chunk.start
            rows = hidden[start : start + len(chunk.score_targets)]
            targets = upload(chunk.score_targets, torch.int64, hidden.device)
            pieces = [
                ops.token_logprobs(model.compute_logits(h), t, chunk.num_score_logprobs)
                for h, t in zip(rows.split(_SCORE_ROWS), targets.split(_SCORE_ROWS), strict=True)
            ]
            scores.append(tuple(torch.cat(parts) for parts in zip(*pieces, strict=True)))
        first += len(chunk.token_ids)
    return scores


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _as_logprobs(tensors: tuple[torch.Tensor, ...]) -> Logprobs:
    chosen, top_ids, top = (tensor.tolist() for tensor in tensors)
    return Logprobs(chosen, top_ids, top)

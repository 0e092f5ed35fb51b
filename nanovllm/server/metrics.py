"""What GET /metrics tells Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nanovllm.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from nanovllm.server.engine_thread import Delta

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The figures of one engine, in a registry of their own. Gauges are read when somebody asks."""

    def __init__(self, engine: LLMEngine) -> None:
        self._registry = CollectorRegistry()
        scheduler = engine.scheduler
        blocks = scheduler.block_manager
        self._gauge("requests_running", "Sequences that hold a row.", lambda: len(scheduler.running))
        self._gauge("requests_waiting", "Sequences in the queue.", lambda: len(scheduler.waiting))
        num_blocks = len(blocks.blocks)
        self._gauge("kv_cache_usage_ratio", "Share of KV blocks held.", lambda: 1 - blocks.num_free / num_blocks)
        self._gauge("prefix_cache_hit_ratio", "Share of prompt tokens whose KV was there.", self._hit_ratio)
        self._num_prompt = self._num_cached = 0
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished sequences.")
        self._cached = self._counter("prompt_tokens_cached", "Those whose KV came from the prefix cache.")
        self._generated = self._counter("generation_tokens", "Generated tokens of finished sequences.")
        self._finished = self._counter("requests_finished", "Sequences by how they ended.", ["finish_reason"])
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Mean time between a sequence's tokens.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its end.")

    def observe(self, delta: Delta, num_prompt_tokens: int, started: float) -> None:
        """Count a sequence that ended with `delta`; its request came at `started` (`time.perf_counter`)."""
        self._num_prompt += num_prompt_tokens
        self._num_cached += delta.num_cached_tokens
        self._prompt.inc(num_prompt_tokens)
        self._cached.inc(delta.num_cached_tokens)
        self._finished.labels(delta.finish_reason).inc()
        self._whole.observe(time.perf_counter() - started)
        self._generated.inc(delta.num_output_tokens)
        if delta.first_token_time is not None:
            self._first.observe(delta.first_token_time - started)
            if delta.num_output_tokens > 1:
                self._between.observe((delta.time - delta.first_token_time) / (delta.num_output_tokens - 1))

    def count_abort(self) -> None:
        """A client went away."""
        self._finished.labels("abort").inc()

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def _hit_ratio(self) -> float:
        return self._num_cached / max(self._num_prompt, 1)

    def _gauge(self, name: str, text: str, read: object) -> None:
        Gauge(f"nanovllm_{name}", text, registry=self._registry).set_function(read)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"nanovllm_{name}", text, labels or (), registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"nanovllm_{name}", text, registry=self._registry, buckets=_SECONDS)

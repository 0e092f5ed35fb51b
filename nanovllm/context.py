"""The one record per step that layers read, so that a model's forward passes activations alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nanovllm.attention.base import AttentionBackend, AttentionMetadata


@dataclass(slots=True)
class ForwardContext:
    """attention: the step's metadata; backend: who attends."""

    attention: AttentionMetadata
    backend: AttentionBackend


# Per thread: two engines in one process may step at the same time.
_current = threading.local()


def get_context() -> ForwardContext:
    """The context of the step that runs in this thread."""
    return _current.context


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one for the body.

    Raises:
        RuntimeError: a step is already running in this thread.
    """
    if getattr(_current, "context", None) is not None:
        raise RuntimeError("a forward pass is already running in this thread")
    _current.context = context
    try:
        yield
    finally:
        _current.context = None

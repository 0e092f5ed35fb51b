"""Ranks that hold one model together: which slice of a weight each has, and what they tell each other.

A group owns its connections. Nothing here touches torch's default process group, so that engines never meet.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# How long a rank waits in one collective for the others before it calls them lost; a rank that died is noticed at once.
_COLLECTIVE = timedelta(minutes=30)
_POLL = 0.02  # seconds


class PeerError(RuntimeError):
    """Another rank is gone, or does not answer."""


@dataclass(frozen=True)
class Cut:
    """Which entries of a dimension of `total` entries this rank holds: slices (start, stop), in order."""

    total: int
    slices: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Entries that this rank holds."""
        return sum(stop - start for start, stop in self.slices)

    @property
    def is_partial(self) -> bool:
        """Whether other ranks hold entries that this one does not."""
        return self.size < self.total

    def of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The entries of a tensor that has `total` of them in `dim`; a view where they are one slice."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.slices]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def as_cut(size: int | Cut) -> Cut:
    """A number stands for a dimension that every rank holds whole."""
    return size if isinstance(size, Cut) else Cut(size, ((0, size),))


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint goes: `view`, this rank's part of it, cut in its first dimensions by `cuts`."""

    view: torch.Tensor
    cuts: tuple[Cut, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size([*(cut.total for cut in self.cuts), *self.view.shape[len(self.cuts) :]])

    def fill(self, whole: torch.Tensor) -> None:
        """Copy this rank's part of `whole`."""
        for dim, cut in enumerate(self.cuts):
            whole = cut.of(whole, dim)
        self.view.copy_(whole)


class Group:
    """`size` ranks, of which this process is `rank`. Of size 1 it is never connected, and every method is the identity.

    Args:
        rank, size: as they say.
        store: where the ranks find each other; None for size 1.
        device: a CPU makes it speak gloo, a GPU NCCL.
        host: address that gloo listens on; None for the one that torch finds.
        check: raises when a peer is known to be gone; called while this rank waits.

    Raises:
        PeerError: of all methods that talk: a peer is gone.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        device: torch.device | None = None,
        host: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._check = store, check
        self._round = 0
        self._backend = None
        if size > 1:
            self.exchange(None)  # all are there, so that connecting takes no time
            with _peers():
                self._backend = _connect(store, rank, size, device, host)
            self.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first one, which no graph may hold

    def cut(self, *sections: tuple[int, int]) -> Cut:
        """This rank's entries of a dimension.

        Args:
            sections: (entries, units) one after the other in it: a section's units (such as heads) lie side by side,
                and each rank gets equally many of them, or, where there are fewer units than ranks, shares one.
        """
        slices, first = [], 0
        for entries, units in sections:
            length = entries // units * max(1, units // self.size)
            start = first + entries // units * (self.rank * units // self.size)
            slices.append((start, start + length))
            first += entries
        return Cut(first, tuple(slices))

    def padded_cut(self, entries: int) -> tuple[Cut, int]:
        """This rank's entries of a dimension that need not be divisible, and how many each rank has room for, a
        multiple of eight; the last ranks hold fewer."""
        room = -(-entries // (8 * self.size)) * 8
        start, stop = (min(entries, room * rank) for rank in (self.rank, self.rank + 1))
        return Cut(entries, ((start, stop),)), room

    def all_reduce(self, x: torch.Tensor, largest: bool = False) -> torch.Tensor:
        """The sum over ranks (or the largest of their entries), in place of `x`, which must be contiguous."""
        if self.size == 1:
            return x
        options = dist.AllreduceOptions()
        options.asyncOp = False
        if largest:
            options.reduceOp = dist.ReduceOp.MAX
        with _peers():
            _finish(self._backend.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' [R, n] side by side, [R, size * n]."""
        if self.size == 1:
            return x
        gathered = x.new_empty(self.size, *x.shape)
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        with _peers():
            _finish(self._backend._allgather_base(gathered.flatten(0, 1), x.contiguous(), options))
        return gathered.transpose(0, 1).flatten(1)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, small and picklable, in order of ranks. It travels through the store, so that nobody
        waits on a device for it."""
        if self.size == 1:
            return [value]
        self._round += 1
        names = [f"{self._round}/{rank}" for rank in range(self.size)]
        with _peers():
            self._store.set(names[self.rank], pickle.dumps(value))
            while not self._store.check(names):  # somebody is still busy, perhaps with loading
                self._check()
                time.sleep(_POLL)
            return [pickle.loads(self._store.get(name)) for name in names]

    def abort(self) -> None:
        """Make collectives that wait on a GPU for a lost peer return."""
        if self._backend is not None and self._backend.name() == "nccl":
            self._backend.abort()

    def close(self) -> None:
        """Drop the connections; a second time does nothing."""
        self.abort()
        self._backend = self._store = None


def _finish(work: dist.Work | None) -> None:
    """Wait for gloo. NCCL's work is queued on the current stream like any kernel, and has nothing to wait for."""
    if work is not None:
        work.wait()


def _connect(store: dist.Store, rank: int, size: int, device: torch.device, host: str | None) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _COLLECTIVE
        with torch.cuda.device(device):
            return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _COLLECTIVE
    make = dist.ProcessGroupGloo.create_default_device
    options._devices = [make() if host is None else dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


@contextmanager
def _peers() -> Iterator[None]:
    """What torch raises in the body is a lost peer's fault."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(f"lost the other ranks: {error}") from error


ALONE = Group()
_building = threading.local()


def current() -> Group:
    """The group whose model this thread is building; `ALONE` outside of `use`."""
    return getattr(_building, "group", ALONE)


@contextmanager
def use(group: Group) -> Iterator[None]:
    """Layers made in the body are cut for `group`."""
    before, _building.group = current(), group
    try:
        yield
    finally:
        _building.group = before

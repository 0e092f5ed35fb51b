"""A bounded pool of snapshots of rows, for models that keep more of a sequence than its blocks: a prefix of theirs can
be resumed only where a snapshot was taken."""

from __future__ import annotations

from collections import OrderedDict


class Snapshots:
    """Which known prefix (by the uid of its last block) has a snapshot, and in which slot; the least recently used one
    goes first.

    Args:
        num_slots: size of the pool.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reset()

    def __contains__(self, uid: int) -> bool:
        return uid in self._slots

    def use(self, uid: int) -> int:
        """The slot of a prefix that is about to be resumed."""
        self._slots.move_to_end(uid)
        return self._slots[uid]

    def take(self, uid: int) -> int | None:
        """A slot for the snapshot of a prefix; None where there is one already, or no pool."""
        if uid in self._slots or not self.num_slots:
            return None
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[uid] = slot
        return slot

    def drop(self, uid: int) -> None:
        """The prefix is no longer known."""
        if uid in self._slots:
            self._free.append(self._slots.pop(uid))

    def reset(self) -> None:
        """Forget all of them."""
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(self.num_slots))

    def check(self, known: set[int]) -> None:
        """Compare the books with the uids of all known prefixes.

        Raises:
            RuntimeError: they do not balance; the message has the numbers.
        """
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(self.num_slots)) or not known >= self._slots.keys():
            raise RuntimeError(
                f"snapshots do not balance: {len(self._slots)} taken + {len(self._free)} free of {self.num_slots}, "
                f"{len(self._slots.keys() - known)} of unknown prefixes"
            )

"""Lockstep: ranks that call different units are told so, instead of waiting for each other.

FSDP2's collectives pair up by order alone. A rank that leaves a unit out, or calls another one, waits for the others
for good, or gathers half of a unit from another one without noticing. So the ranks agree on the order of what they do:
they learn it in the first session of each kind, event by event, and from then on following it costs one comparison. A
rank that is about to do something else asks the others before it does, through a store they share.
"""

from __future__ import annotations

import time
from typing import Any

_PATIENCE_S = 15.0  # how long to wait for the others' word before a collective
_FORGIVEN = 16  # changes of order after which a kind of session is not watched any more


class Lockstep:
    """The order of events on all ranks. Events are short strings that name what a rank does next."""

    def __init__(self, store: Any, rank: int, world_size: int, *, patience_s: float = _PATIENCE_S):
        """
        Args:
            store: a `torch.distributed.Store` that all ranks share, with keys of this object alone.
            rank: this process.
            world_size: number of processes.
            patience_s: how long to wait for the others. When it ends, a rank that was about to leave the known order
                raises; one with no order to follow goes on unwatched, since its peers may just be slow, or dead.
        """
        self._store, self._rank, self._world_size = store, rank, world_size
        self._patience_s = patience_s
        self._orders: dict[Any, list[str]] = {}
        self._changes: dict[Any, int] = {}
        self._session = 0
        self._kind: Any = None
        self._expected: list[str] = []
        self._at = 0
        self._learning = False  # whether every event of this session is agreed on
        self._watching = False

    def begin(self, kind: Any) -> None:
        """A session starts; sessions of one `kind` are expected to have one order."""
        self._session += 1
        self._kind, self._at = kind, 0
        self._learning = kind not in self._orders
        self._expected = self._orders.setdefault(kind, [])
        self._watching = self._changes.get(kind, 0) <= _FORGIVEN

    def note(self, event: str) -> None:
        """This rank is about to do `event`.

        Raises:
            RuntimeError: another rank does something else.
        """
        if not self._watching:
            return
        if self._at < len(self._expected) and self._expected[self._at] == event:
            self._at += 1
            return
        self._agree(event)
        self._expected[self._at :] = [event]
        self._at += 1

    def end(self) -> None:
        """The session ends where it should."""
        self.note("end")
        self._watching = False

    def abandon(self) -> None:
        """The session ended with an error here: nobody waits for this rank's word."""
        if self._watching:
            self._give_up()

    def _agree(self, event: str) -> None:
        """Wait until every rank is about to do the same."""
        leaving = not self._learning
        if leaving:
            self._changes[self._kind] = self._changes.get(self._kind, 0) + 1
            self._learning = True
        prefix = f"{self._session}/{self._at}"
        self._store.set(f"{prefix}/{self._rank}", event)
        same = self._store.add(f"{prefix}/={event}", 1)
        self._store.add(prefix, 1)
        deadline, pause = time.monotonic() + self._patience_s, 0.0002
        while same < self._world_size:
            # In this order: a rank counts among its likes before it counts among all.
            everybody = self._store.add(prefix, 0)
            same = self._store.add(f"{prefix}/={event}", 0)
            if everybody > same or (leaving and time.monotonic() > deadline):
                self._refuse(event, prefix)
            if time.monotonic() > deadline or self._store.check([f"{self._session}/given up"]):
                self._give_up()
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def _give_up(self) -> None:
        self._watching = False
        self._changes[self._kind] = _FORGIVEN + 1
        try:
            self._store.set(f"{self._session}/given up", "")
        except Exception:  # the process that keeps the store may be gone
            return

    def _refuse(self, event: str, prefix: str) -> None:
        """Raise, saying who does what."""
        found = {self._rank: event}
        for rank in range(self._world_size):
            key = f"{prefix}/{rank}"
            if rank != self._rank and self._store.check([key]):
                found[rank] = self._store.get(key).decode()
        said = [f"rank {rank}: {what}" for rank, what in sorted(found.items())]
        if len(found) < self._world_size:
            said.append(f"the others: {(self._expected[self._at :] or ['something else'])[0]}")
        message = (
            f"ranks do different things ({'; '.join(said)}). Sharded units must be called, and contribute to the loss, "
            "alike on every rank, or ranks wait for each other; leave a module that only some ranks use to the unit "
            "around it (remove the unit rule that takes it)"
        )
        raise RuntimeError(message)

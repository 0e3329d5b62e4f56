"""Who failed first: when a run of several processes breaks, each says why, and what it heard from the others.

A process whose peer is gone gets an error of the network, which names a socket. So each process that fails leaves a
line in the store where they met, and one that fails in a collective call looks there before it ends. torchrun keeps the
store; otherwise rank 0 does, and when that is the one that failed, the others can only say that it is gone.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

_PATIENCE_S = 3.0  # for the lines of ranks that fail at the same moment
_LIMIT_S = 8.0  # for everything, should the store not answer
_LINE = 400  # characters of an error that are passed on
_SHOWN = 8  # ranks that are named
_CAUSE = "!"  # marks an error that is no echo of another rank's
_KEY = "failed"
_NO_STORE = "rank 0, which keeps the store, does not answer: it has ended or is stuck"
_OF_THE_NETWORK = re.compile(  # what gloo and NCCL say
    r"gloo|NCCL|onnection (closed|reset) by peer|Broken pipe|Timed out waiting|Application timeout|Socket Timeout"
)


def report(error: BaseException, store: Any, rank: int, world_size: int) -> None:
    """Tell the other ranks why this one ends; if it ends because of another, add a note that says so to `error`.

    Takes seconds at most, and raises nothing: the error itself must not be lost.
    """
    network = is_of_the_network(error)
    notes: list[str] = []

    def tell_and_ask() -> None:
        try:
            line = ("" if network else _CAUSE) + _summary(error)
            store.append(_KEY, json.dumps([rank, line]) + "\n")
            if network:
                notes.extend(_news(_heard(store, rank, world_size), rank, world_size))
        except Exception:  # the store went with the rank that kept it
            notes.append(_NO_STORE)

    # A store whose machine is gone may answer never.
    thread = threading.Thread(target=tell_and_ask, name="purestep failure", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    if thread.is_alive():
        notes.append(_NO_STORE)
    if network and notes:
        error.add_note(f"purestep: rank {rank} of {world_size} ended because " + "; ".join(notes))


def is_of_the_network(error: BaseException) -> bool:
    """Whether `error`, or what led to it, is a collective call that did not come to its end."""
    return any(
        isinstance(one, torch.distributed.DistError)
        or (isinstance(one, RuntimeError) and _OF_THE_NETWORK.search(str(one)) is not None)
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _heard(store: Any, rank: int, world_size: int) -> dict[int, str]:
    """The lines of the other ranks, once one of them names a cause of its own and none is missing, or time is up."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        lines = (json.loads(line) for line in store.get(_KEY).decode().splitlines())
        heard = {other: line for other, line in lines if other != rank}
        causes = any(line.startswith(_CAUSE) for line in heard.values())
        if causes or len(heard) == world_size - 1 or time.monotonic() > deadline:
            return heard
        time.sleep(0.2)


def _news(heard: dict[int, str], rank: int, world_size: int) -> Iterator[str]:
    causes = {other: line.removeprefix(_CAUSE) for other, line in heard.items() if line.startswith(_CAUSE)}
    silent = [other for other in range(world_size) if other not in heard and other != rank]
    if causes:
        yield from (f"rank {other} failed: {line}" for other, line in sorted(causes.items())[:_SHOWN])
    elif silent:
        more = f" and {len(silent) - _SHOWN} more" if len(silent) > _SHOWN else ""
        yield (
            f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent[:_SHOWN]))}{more} left no error and did not "
            "answer: killed (out of memory?), stuck, or not in this collective call"
        )
    else:
        yield "a collective call failed on every rank: look at the network, and at the timeout of the process group"


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:_LINE]

"""Agreement between ranks: what one rank finds wrong, every rank raises."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from purestep.state.placement import default_rank, default_world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_group: ContextVar[ProcessGroup | None] = ContextVar("group", default=None)


@contextmanager
def using(group: ProcessGroup | None) -> Iterator[None]:
    """Let the collectives of the body go through `group`, which has all ranks in their order; None: the default group.

    Two threads must not use one group at the same time. What this sets is the calling thread's own.
    """
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def current_group() -> ProcessGroup | None:
    """The group that `using` set; None: the default group."""
    return _group.get()


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank. `[value]` outside a process group."""
    if default_world_size() == 1:
        return [value]
    values: list[Any] = [None] * default_world_size()
    torch.distributed.all_gather_object(values, value, group=_group.get())
    return values


def from_rank_zero(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and give its result, or its error, to every rank."""
    result: list[Any] = [None, None]
    if default_rank() == 0:
        try:
            result = [function(), None]
        except Exception as error:
            result = [None, _portable(error)]
    if default_world_size() > 1:
        torch.distributed.broadcast_object_list(result, src=0, group=_group.get())
    if result[1] is not None:
        raise result[1]
    return result[0]


def on_every_rank(function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank and give every rank all results. If it fails on any rank, all ranks raise.

    Raises:
        Exception: the error of the lowest rank that failed, on every rank.
    """
    try:
        outcome: tuple[Any, Exception | None] = (function(), None)
    except Exception as error:
        outcome = (None, _portable(error))
    outcomes = gather_objects(outcome)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def _portable(error: Exception) -> Exception:
    """`error`, or its text where it would not survive the way to the other ranks, which would then wait for it."""
    if default_world_size() == 1:
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

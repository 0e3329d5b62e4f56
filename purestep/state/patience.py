"""Calls that take longer on some ranks than a collective call may wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from purestep.state.collective import gather_objects, on_every_rank
from purestep.state.placement import default_world_size
from purestep.state.workers import Job

T = TypeVar("T")
_LONGEST_PAUSE_S = 1.0


def with_patience(function: Callable[[], T]) -> T:
    """This rank's `function()`, however long it takes; if it fails on any rank, all raise. Collective.

    A rank that is done would wait for the others in a collective call, and run into the timeout of the process group
    (a download may take an hour). So the calls are made by a thread, while the ranks tell each other every now and then
    whether they are done. `function` must not make collective calls.
    """
    if default_world_size() == 1:
        return function()
    job = Job(function, ())
    thread = threading.Thread(target=job.run, name="purestep", daemon=True)
    thread.start()
    began, pause = time.monotonic(), 0.0
    while not all(gather_objects(not thread.is_alive())):
        thread.join(pause)
        pause = min(_LONGEST_PAUSE_S, (time.monotonic() - began) / 10 + 0.002)
    results: list[T] = []
    on_every_rank(lambda: results.append(job.result()))
    return results[0]

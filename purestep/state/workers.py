"""Threads for work that leaves Python: hashing, files, NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")
Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""
_MOST = 8  # more threads than this would only wait for memory or the disk


def num_workers() -> int:
    """Threads this rank may keep busy: its share of the machine's cores."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST, cores // max(1, int(local_ranks) if local_ranks.isdigit() else 1)))


def in_parallel(function: Callable[[A], T], items: Iterable[A], *, serial: bool = False) -> list[T]:
    """`[function(item) for item in items]`, several at a time unless `serial`; the first error in order is raised."""
    items = list(items)
    num = min(num_workers(), len(items))
    if serial or num < 2:
        return [function(item) for item in items]
    with Pool(num) as pool:
        jobs = [pool.submit(function, item) for item in items]
    return [job.result() for job in jobs]


class Job(Generic[T]):
    """A call that a thread makes."""

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call: tuple[Callable[..., T], tuple[Any, ...]] | None = (function, args)
        self._ended = Event()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call."""
        assert self._call is not None
        function, args = self._call
        self._call = None  # what it was given may go
        try:
            self._result = function(*args)
        except BaseException as error:
            self._error = error
        self._ended.set()

    def result(self) -> T:
        """What the call returned, once it has; or its error is raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Pool:
    """Up to `num` threads that make calls in the order they are submitted; a context manager that waits for them.

    Unlike those of `concurrent.futures`, it works while the interpreter ends, when a last save may still be writing: a
    Python that starts no threads then makes the calls right away.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._threads: list[Thread] = []
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, function: Callable[..., T], *args: Any) -> Job[T]:
        """Have `function(*args)` called."""
        job = Job(function, args)
        if len(self._threads) < self._num:
            self._start_thread()
        if self._threads:
            self._jobs.put(job)
        else:
            job.run()
        return job

    def close(self) -> None:
        """Return when all calls have been made and the threads have ended."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start_thread(self) -> None:
        thread = Thread(target=self._work, name="purestep", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, or there are too many threads
            return
        self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

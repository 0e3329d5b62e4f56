"""One job at a time in a thread of its own, whose failure cannot be missed."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from purestep.state.checkpoint.staging import destroy_groups
from purestep.state.collective import using
from purestep.state.files.manifest import CheckpointError
from purestep.state.placement import default_world_size

_running: set[threading.Thread] = set()
_unreported: dict[int, str] = {}
_ids = itertools.count()


class Background:
    """Runs jobs in a thread, one after the other, beside the same jobs of the other ranks.

    The thread's collectives go through a gloo group of its own. It is no daemon: a program that comes to its end waits
    for it, and exits with code 1 if the job fails and nobody asked.
    """

    def __init__(self) -> None:
        """Collective in a process group."""
        self._group: Any = torch.distributed.new_group(backend="gloo") if default_world_size() > 1 else None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._id = next(_ids)

    def start(self, what: str, job: Callable[[], None]) -> None:
        """Begin a job; the one before must be over (`wait`).

        Args:
            what: what it is about, for the error: a path.
            job: what every rank does.
        """
        assert self._thread is None

        def run() -> None:
            try:
                with using(self._group):
                    job()
            except BaseException as error:  # in a thread, nobody else would hear of it
                self._error = _told(what, error)
                _unreported[self._id] = str(self._error)
            finally:
                _running.discard(thread)

        thread = threading.Thread(target=run, name=f"purestep {what}", daemon=False)
        self._thread = thread
        _running.add(thread)
        try:
            thread.start()
        except BaseException:  # the interpreter is about to end, or there is no room for a thread
            self._thread = None
            _running.discard(thread)
            raise

    def join(self) -> CheckpointError | None:
        """Wait for the job. Its failure, which is returned, still counts as one that nobody was told of."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def wait(self) -> None:
        """Wait for the job and raise its failure, once.

        Raises:
            CheckpointError: it failed.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            del _unreported[self._id]
            raise error

    def close(self) -> None:
        """Give the process group back. The job is over."""
        destroy_groups([] if self._group is None else [self._group])
        self._group = None


def finish_running() -> None:
    """Wait for every job of this process: what they use, such as a process group, is about to go away."""
    for thread in list(_running):
        thread.join()


def _told(what: str, error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    told = CheckpointError(f"checkpoint {what}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _refuse_silence() -> None:
    """At the end of the program: failures that nobody was told of become its exit code.

    The interpreter gives exit handlers no other way to set one.
    """
    if not _unreported:
        return
    for message in _unreported.values():
        print(f"error: {message}", file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _forget_in_child() -> None:
    _running.clear()
    _unreported.clear()


# On import, so that the handlers of what the program opens later run before this one.
atexit.register(_refuse_silence)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

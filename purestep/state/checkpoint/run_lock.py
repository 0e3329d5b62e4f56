"""That one run at a time writes into a directory of checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import weakref
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from purestep.state.files.locks import Lock
from purestep.state.files.manifest import CheckpointError

LOCK_FILE = ".lock"
_logger = logging.getLogger("purestep")
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_guard = threading.Lock()
_held: dict[Path, Lock] = {}
_holders: Counter[Path] = Counter()


class RunLock:
    """The right to write checkpoints into a directory: of one process at a time, until `release`.

    It is the lock of the file `.lock`, which says who holds it. The lock is gone when its process is, so a file left
    behind by one that was killed is no obstacle. Objects of one process share it: they are one run.
    """

    def __init__(self, directory: Path) -> None:
        """Take it; the directory is made if it is missing.

        Raises:
            CheckpointError: another process holds it; says which, where, and since when.
            OSError: the directory or the file cannot be made.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory.resolve() / LOCK_FILE
        with _guard:
            if not _holders[path]:
                lock = _take(path)
                if lock is not None:
                    _held[path] = lock
            _holders[path] += 1
        # Also when the object is dropped without a word, and when the program ends.
        self._finalizer = weakref.finalize(self, _give_up, path, os.getpid())

    def release(self) -> None:
        """Let the next run in. Safe to call twice."""
        self._finalizer()


def _take(path: Path) -> Lock | None:
    while True:
        try:
            lock = Lock(path, create=True)
        except BlockingIOError:
            raise CheckpointError(
                f"{path.parent} is in use by another run ({_holder(path)}): wait for it, stop it, or choose another "
                "directory"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _logger.warning("%s cannot be locked, so nothing keeps a second run out of it: %s", path.parent, error)
            return None
        if lock.is_of(path):
            break
        lock.release()  # the file of a holder that removed it in the meantime
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
    assert lock.descriptor is not None
    os.truncate(lock.descriptor, 0)
    os.pwrite(lock.descriptor, holder.encode(), 0)
    return lock


def _give_up(path: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked process: it never had the lock
        return
    with _guard:
        _holders[path] -= 1
        if _holders[path] > 0:
            return
        del _holders[path]
        lock = _held.pop(path, None)
        if lock is not None:
            if lock.is_of(path):
                with contextlib.suppress(OSError):
                    path.unlink()
            lock.release()


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text())
        return f"process {int(who['pid'])} on {str(who['host'])!r}, since {who['since']!s}"
    except (OSError, ValueError, TypeError, KeyError):
        return "which has only just begun"


def _forget_in_child() -> None:
    global _guard
    _guard = threading.Lock()  # another thread may have held it when the process was forked
    _held.clear()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

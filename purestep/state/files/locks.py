"""Locks on files and directories that end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_ours: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """An open file or directory that is locked until `release`, or until this process or this object is gone."""

    def __init__(self, path: str | os.PathLike, *, shared: bool = False, create: bool = False) -> None:
        """Take the lock, without waiting for it.

        Args:
            path: an existing file or directory.
            shared: whether others may hold it shared at the same time.
            create: make the file if there is none.

        Raises:
            BlockingIOError: somebody else holds it.
            OSError: `path` cannot be opened, or cannot be locked on this system or file system.
        """
        self.descriptor: int | None = None
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "this system has no locks that end with their process", os.fspath(path))
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        _ours.add(self)

    def release(self) -> None:
        """Give it up. Safe to call twice."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def is_of(self, path: Path) -> bool:
        """Whether what is locked is what `path` names now, rather than something that was removed or replaced."""
        assert self.descriptor is not None
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_or_none(path: str | os.PathLike, *, shared: bool = False) -> Lock | None:
    """The lock, or None where it cannot be had for whatever reason."""
    try:
        return Lock(path, shared=shared)
    except OSError:
        return None


def _close_in_child() -> None:
    # A forked process (a loader's worker, say) has our descriptors, and would go on holding our locks after our death.
    for lock in list(_ours):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

"""Putting a finished directory in place of an older one, so that there is always a whole one."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: leftovers of dead processes cannot be told from live ones and stay
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger("purestep")
_INFIX = ".tmp-"
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2


class Replacement:
    """A new directory being written beside `target`, which it replaces at `commit`.

    The temporary directory is locked while its process lives, so that the leftovers of dead ones can be told apart.
    """

    def __init__(self, path: str | os.PathLike, allowed: Collection[str]) -> None:
        """Make the temporary directory.

        Args:
            path: the directory to make or replace; links are followed.
            allowed: names an existing directory may hold; one that holds anything else is not ours to replace.
        """
        self.target = Path(os.path.realpath(path))
        self._refuse_strangers(allowed)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = self.target.with_name(f".{self.target.name}{_INFIX}{secrets.token_hex(8)}")
        self.temporary.mkdir()
        self._lock = _lock(self.temporary)

    def commit(self) -> None:
        """Put the new directory in place, durably, and remove what it replaces and what dead processes left."""
        sync_directories(self.temporary)
        if self.target.exists():
            _exchange(self.temporary, self.target)
        else:
            self.temporary.rename(self.target)
        sync_directory(self.target.parent)
        self._unlock()
        _remove(self.temporary)
        remove_leftovers(self.target.parent, f"{self.target.name}{_INFIX}")

    def abort(self) -> None:
        """Remove the new directory; what is at the target stays."""
        _remove(self.temporary)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_strangers(self, allowed: Collection[str]) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise FileExistsError(errno.EEXIST, "is a file, not a checkpoint; choose another path", str(self.target))
        strangers = sorted(set(os.listdir(self.target)) - set(allowed))
        if strangers:
            raise FileExistsError(
                errno.EEXIST,
                f"holds {strangers[0]!r}, so it is no checkpoint to replace; choose another path",
                str(self.target),
            )


def remove_leftovers(directory: Path, prefix: str) -> None:
    """Remove the temporary directories of targets `prefix...` whose process died before it could."""
    for name in os.listdir(directory):
        path = directory / name
        if name.startswith(f".{prefix}") and _INFIX in name and path.is_dir() and not path.is_symlink():
            lock = _lock(path)
            if lock is not None:
                _remove(path)
                os.close(lock)


def sync_directories(root: Path) -> None:
    """fsync `root` and every directory below it: the names in them are then on disk."""
    for directory, _, _ in os.walk(root):
        sync_directory(Path(directory))


def sync_directory(path: Path) -> None:
    """fsync one directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one step; by two renames where the system or the file system has no such call."""
    if _swap(os.fsencode(new), os.fsencode(old)):
        return
    aside = new.with_name(new.name + "-old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)


def _swap(a: bytes, b: bytes) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(a, b, _RENAME_SWAP)
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fsdecode(b))


def _lock(path: Path) -> int | None:
    """A descriptor that locks the directory as long as this process lives; None if another process holds it."""
    if fcntl is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, gone, not ours, or on a file system without locks
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _remove(path: Path) -> None:
    """Remove a directory; failing to is no reason to fail a save that is already in place."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("could not remove %s: %s", path, error)

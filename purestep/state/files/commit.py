"""Putting a finished directory in place of an older one, so that there is always a whole one."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from purestep.state.files.locks import Lock, lock_or_none

_logger = logging.getLogger("purestep")
_INFIX, _ASIDE = ".tmp-", "-old"
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
        self.temporary = _temporary_name(self.target)
        self.temporary.mkdir()
        self._lock = lock_or_none(self.temporary)

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
            self._lock.release()
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


def recover(directory: Path) -> None:
    """Put back what a process that died between the two renames of `_exchange` had moved aside."""
    for name in os.listdir(directory):
        aside = re.fullmatch(rf"\.(.+){re.escape(_INFIX)}[0-9a-f]+{_ASIDE}", name)
        if aside is None or os.path.lexists(directory / aside[1]):
            continue
        new = directory / name.removesuffix(_ASIDE)
        lock = lock_or_none(new)
        if lock is None and new.exists():  # its process lives: the second rename is about to come
            continue
        (directory / name).rename(directory / aside[1])
        sync_directory(directory)
        if lock is not None:
            lock.release()


def remove_leftovers(directory: Path, prefix: str) -> None:
    """Remove the temporary directories of targets `prefix...` whose process died before it could."""
    recover(directory)
    for name in os.listdir(directory):
        path = directory / name
        if name.startswith(f".{prefix}") and _INFIX in name and path.is_dir() and not path.is_symlink():
            lock = lock_or_none(path)
            if lock is not None:  # where nothing can be locked, dead processes cannot be told from live ones
                _remove(path)
                lock.release()


def discard(path: Path) -> bool:
    """Remove a directory so that a crash leaves all of it, or a leftover, and never a part under its name.

    Returns:
        Whether it was removed: not while somebody is reading it, see `held_for_reading`, and not through a link.
    """
    if path.is_symlink():
        return False
    lock = None
    try:
        lock = Lock(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # no locks here: then nobody's reading can be told, either
        pass
    try:
        temporary = _temporary_name(path)
        path.rename(temporary)
        sync_directory(path.parent)
        _remove(temporary)
    finally:
        if lock is not None:
            lock.release()
    return True


@contextmanager
def held_for_reading(path: str | os.PathLike) -> Iterator[None]:
    """Keep `discard` from removing a directory while the body reads it. Waits for nobody, and never fails."""
    lock = lock_or_none(path, shared=True)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


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
    aside = new.with_name(new.name + _ASIDE)
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


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}{_INFIX}{secrets.token_hex(8)}")


def _remove(path: Path) -> None:
    """Remove a directory; failing to is no reason to fail a save that is already in place."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("could not remove %s: %s", path, error)

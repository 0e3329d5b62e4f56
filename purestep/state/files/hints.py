"""What the operating system may be told about memory and files in advance. Linux listens; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import lru_cache
from typing import Any, BinaryIO

from torch import Tensor

_LARGE = 1 << 21  # bytes; smaller memory comes from the allocator's own stock, smaller files need no plan
_SYNC_FILE_RANGE_WRITE = 2
_NOT_OFFERED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


def expect_to_be_filled(tensor: Tensor) -> None:
    """Ask for huge pages behind a large new tensor: at first touch, small ones cost more than reading a file does."""
    if tensor.device.type != "cpu" or tensor.nbytes < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def reserve(file: BinaryIO, size: int) -> None:
    """Reserve the disk space of a new file, so that writing is faster, and fails at once where there is not enough.

    Raises:
        OSError: the file cannot become so large.
    """
    # Python's posix_fallocate is no substitute: where a file system cannot do this, the C library writes every block.
    if size < _LARGE or sys.platform != "linux" or not hasattr(_libc(), "fallocate"):
        return
    if _libc().fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in _NOT_OFFERED:
            raise OSError(code, os.strerror(code))


def start_writing(file: BinaryIO, begin: int, size: int) -> None:
    """Have the system write some bytes of a file to the disk from now on, so that fsync has less to wait for."""
    if sys.platform == "linux" and hasattr(_libc(), "sync_file_range"):
        _libc().sync_file_range(
            file.fileno(), ctypes.c_int64(begin), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )


@lru_cache(maxsize=1)
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)

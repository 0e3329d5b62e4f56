"""Fresh memory that is about to be filled."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any

from torch import Tensor

_WORTH_IT = 1 << 21  # bytes; below, memory comes from the allocator's own stock


def expect_to_be_filled(tensor: Tensor) -> None:
    """Ask for huge pages behind a large new tensor: at first touch, small ones cost more than reading a file does.

    Only a hint, for host memory, where the system offers it; values are not touched.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _WORTH_IT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


@lru_cache(maxsize=1)
def _libc() -> Any:
    return ctypes.CDLL(None)

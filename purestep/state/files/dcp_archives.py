"""Where the values are in what `torch.save` wrote for one tensor: found without unpickling and without torch.load."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from purestep.state.files.file_reading import Cut, Extent, extent_of

_MAX_PICKLE = 1 << 16  # a tensor's description takes some hundred bytes
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file."""

    place: int
    """Place in the file of its storage's first byte."""
    nbytes: int
    """Size of the storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements of the storage before the first of the tensor."""

    @property
    def is_plain(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        expected = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return False
            expected *= length
        return True


@dataclass(frozen=True)
class StridedExtent(Extent):
    """A whole storage, of which a tensor is a strided view."""

    saved: SavedTensor

    @property
    def nbytes(self) -> int:
        """Size of the storage."""
        return self.saved.nbytes

    def memory(self) -> Any:
        """None: elements are not stored in their order."""
        return None

    def fill(self, data: Any) -> None:
        """Fill the target from the storage's bytes."""
        saved = self.saved
        storage = torch.from_numpy(data).clone().view(saved.dtype)
        self.to.copy_(storage.as_strided(saved.shape, saved.stride, saved.offset)[self.part])
        self.done()


def find_saved(
    file: BinaryIO,
    begin: int,
    length: int,
    *,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    cut: Cut,
    local: Tensor,
    done: Callable[[], None],
) -> Extent:
    """Where in `file` is what is cut out of the tensor whose archive is `length` bytes from `begin`.

    Raises:
        ValueError: it is no archive of a tensor of this dtype and shape.
    """
    try:
        saved = _find(file, begin, length)
    except Exception as error:  # what was made up may raise anything
        raise ValueError(f"it is no tensor that torch saved: {error}") from None
    if saved.dtype != dtype or saved.shape != shape:
        raise ValueError(f"it is {saved.dtype} {saved.shape} there")
    if saved.is_plain:
        return extent_of(saved.place + saved.offset * dtype.itemsize, shape, cut, local, done)
    ours, theirs = cut
    return StridedExtent(saved.place, shape, theirs, local[ours], done, saved)


def _find(file: BinaryIO, begin: int, length: int) -> SavedTensor:
    with zipfile.ZipFile(_Section(file, begin, length)) as archive:
        (description,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if description.file_size > _MAX_PICKLE:
            raise ValueError("its description is too long")
        folder = description.filename.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its bytes are not in little-endian order")
        tensor = _Describe(io.BytesIO(archive.read(description))).load()
        if not isinstance(tensor, _Described):
            raise ValueError("it is something else")
        info = archive.getinfo(f"{folder}data/{tensor.storage}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError("its values are compressed")
    file.seek(begin + info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\3\4":
        raise ValueError("its values have no header")
    start = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    inside = start + info.file_size <= length and (last + 1) * tensor.dtype.itemsize <= info.file_size
    if not inside and 0 not in tensor.shape:
        raise ValueError("its values are cut off")
    return SavedTensor(begin + start, info.file_size, tensor.dtype, tensor.shape, tensor.stride, tensor.offset)


@dataclass(frozen=True)
class _Described:
    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.stride)
        if not all(type(number) is int and number >= 0 for number in numbers) or len(self.shape) != len(self.stride):
            raise ValueError("its geometry cannot be")
        if not isinstance(self.dtype, torch.dtype) or not isinstance(self.storage, str):
            raise ValueError("its description cannot be")


class _Describe(pickle.Unpickler):
    """Reads a tensor's description with inert stand-ins for everything it asks for; it has no use for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _of_v2
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _of_v3
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name in (*_STORAGES, "UntypedStorage"):
            return name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a tensor has no use for")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, storage, key, _, _ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"it refers to a {kind!r}")
        return storage, key


def _of_v2(
    storage: tuple[str, str], offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, more: Any = None
) -> _Described:
    return _of_v3(storage, offset, shape, stride, _grad, _hooks, _STORAGES[storage[0]], more)


def _of_v3(storage: tuple[str, str], offset: int, shape: Any, stride: Any, *rest: Any) -> _Described:
    _grad, _hooks, dtype, *more = rest
    if any(more):
        raise ValueError(f"it is marked {more}")
    return _Described(storage[1], dtype, offset, tuple(shape), tuple(stride))


class _Section(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(22, "Invalid argument")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._begin + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data

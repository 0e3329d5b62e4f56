"""One file read front to back: hashed on the way, and its bytes put right where they belong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor

from purestep.state.blocks import Target
from purestep.state.files.hashing import StreamHash
from purestep.state.files.hints import expect_to_be_filled

B = TypeVar("B")
Cut = tuple[tuple[slice, ...], tuple[slice, ...]]
_WINDOW = 1 << 20  # bytes read at a time, of small extents and of what nobody wants
_CHUNK = 1 << 21  # bytes read at a time of a large extent


@dataclass(frozen=True)
class Extent:
    """Bytes of a file that hold the rows of a block, and the tensor that a part of them is for."""

    begin: int
    """Place in the file of the first byte."""
    shape: tuple[int, ...]
    """Lengths of what is stored there, row-major, in the dtype of `to`."""
    part: tuple[slice, ...]
    """What is wanted of it: one slice a dim."""
    to: Tensor
    """Is filled with it."""
    done: Callable[[], None]
    """Is called then."""

    @property
    def nbytes(self) -> int:
        """Size of what is stored."""
        return math.prod(self.shape) * self.to.element_size()

    @property
    def end(self) -> int:
        """Place in the file of the first byte after it."""
        return self.begin + self.nbytes

    def memory(self) -> Any:
        """The target's bytes, if what is stored can be read right into them; else None."""
        if self.to.device.type != "cpu" or tuple(self.to.shape) != self.shape or not self.to.is_contiguous():
            return None
        return self.to.detach().reshape(-1).view(torch.uint8).numpy()

    def fill(self, data: Any) -> None:
        """Fill the target from the bytes that were read (a uint8 array, which may not be aligned)."""
        memory = self.memory()
        if memory is not None:
            memory[:] = data
        else:
            stored = torch.from_numpy(data).clone().view(self.to.dtype).view(self.shape)
            self.to.copy_(stored[self.part])
        self.done()


def read_extents(file: BinaryIO, extents: Iterable[Extent], *, stop: int, sha256: StreamHash | None) -> None:
    """Fill the targets of all extents from an unbuffered file, which stands at the first byte not hashed yet.

    Args:
        file: the file.
        extents: in any order; they may overlap.
        stop: size of the file.
        sha256: gets every byte up to `stop`, once and in order; None: only what is wanted is read.

    Raises:
        ValueError: the file ends before.
    """
    reading = _Reading(file, sha256)
    again: list[Extent] = []
    small: list[Extent] = []  # in the window of bytes that is to be read next
    for extent in sorted(extents, key=lambda extent: extent.begin):
        if extent.nbytes > _WINDOW // 4 or extent.end - reading.at > _WINDOW:
            reading.window(small)
            small = []
            reading.skip_to(extent.begin)
        if extent.begin < reading.at:
            again.append(extent)
        elif extent.nbytes > _WINDOW // 4:
            reading.large(extent)
        else:
            small.append(extent)
    reading.window(small)
    reading.skip_to(stop)
    rest = _Reading(file, None)
    for extent in again:
        rest.at = extent.begin
        rest.large(extent)
    if sha256 is not None:
        sha256.wait()


def cut_out(offset: tuple[int, ...], shape: tuple[int, ...], target: Target) -> Cut | None:
    """(slices of the target, slices of the block) where a stored block and the target overlap; None if they do not."""
    if offset == target.offset and shape == target.local.shape:
        everything = tuple(slice(0, length) for length in shape)
        return None if 0 in shape else (everything, everything)
    starts = [max(a, b) for a, b in zip(offset, target.offset, strict=True)]
    stops = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, target.offset, target.local.shape, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    ours, theirs = (
        tuple(slice(start - o, stop - o) for start, stop, o in zip(starts, stops, base, strict=True))
        for base in (target.offset, offset)
    )
    return ours, theirs


def cut_out_all(blocks: Iterable[tuple[B, tuple[int, ...], tuple[int, ...]]], target: Target) -> list[tuple[B, Cut]]:
    """Each of the stored blocks, given as (block, offset, shape), that overlaps the target, and where.

    Raises:
        ValueError: together they do not hold every element of the target; says how many they hold.
    """
    cuts = [(block, cut_out(offset, shape, target)) for block, offset, shape in blocks]
    found = [(block, cut) for block, cut in cuts if cut is not None]
    num = sum(math.prod(part.stop - part.start for part in ours) for _, (ours, _) in found)
    if num != target.local.numel():
        raise ValueError(f"{num} of {target.local.numel()} elements are stored")
    return found


def extent_of(place: int, shape: tuple[int, ...], cut: Cut, local: Tensor, done: Callable[[], None]) -> Extent:
    """The rows of a block, stored at `place`, that hold what is cut out of it."""
    ours, theirs = cut
    if not shape:
        return Extent(place, (), (), local, done)
    rows, *others = theirs
    row_bytes = math.prod(shape[1:]) * local.element_size()
    part = (slice(None), *others)
    return Extent(place + rows.start * row_bytes, (rows.stop - rows.start, *shape[1:]), part, local[ours], done)


def unreadable(leaf: str, file: str, error: Exception) -> str:
    """What to say of a leaf that cannot be read."""
    return f"cannot read leaf {leaf!r} from {file}: {getattr(error, 'strerror', None) or error}"


class _Reading:
    def __init__(self, file: BinaryIO, sha256: StreamHash | None) -> None:
        self._file, self._sha256 = file, sha256
        self._buffer = np.empty(0, dtype=np.uint8)
        self.at = file.tell()

    def large(self, extent: Extent) -> None:
        """Read one extent, into its target's memory where possible."""
        memory = extent.memory()
        if memory is not None:
            expect_to_be_filled(extent.to)
        data = np.empty(extent.nbytes, dtype=np.uint8) if memory is None else memory
        for start in range(0, len(data), _CHUNK):
            self._read(data[start : start + _CHUNK])
        if memory is None:
            extent.fill(data)
        else:
            extent.done()

    def window(self, extents: list[Extent]) -> None:
        """Read up to the end of the last of some extents that are near each other."""
        if not extents:
            return
        if self._sha256 is None:
            self.at = extents[0].begin
        begin, data = self.at, self._window(max(extent.end for extent in extents) - self.at)
        self._read(data)
        for extent in extents:
            extent.fill(data[extent.begin - begin : extent.end - begin])

    def skip_to(self, place: int) -> None:
        """Go to a place; what lies before it is hashed if anything is."""
        while self._sha256 is not None and self.at < place:
            self._read(self._window(min(_WINDOW, place - self.at)))
        self.at = max(self.at, place)

    def _window(self, size: int) -> Any:
        if self._sha256 is not None:
            self._sha256.wait()  # it may still be hashing what was in the buffer
        if len(self._buffer) < size:
            self._buffer = np.empty(_WINDOW, dtype=np.uint8)
        return self._buffer[:size]

    def _read(self, data: Any) -> None:
        self._file.seek(self.at)
        rest = memoryview(data)
        while len(rest):
            num = self._file.readinto(rest)  # type: ignore[attr-defined]
            if not num:
                raise ValueError(f"the file ends at byte {self.at + len(data) - len(rest)}")
            rest = rest[num:]
        self.at += len(data)
        if self._sha256 is not None:
            self._sha256.update(data.data)

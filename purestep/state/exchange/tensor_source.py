"""Named tensors that lie somewhere on disk and are read one at a time: what every kind of file is turned into."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.state.blocks import Target
from purestep.state.files.manifest import CheckpointError, is_inside


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: what it is, and how to get it."""

    name: str
    """The module's name for it."""
    shape: tuple[int, ...]
    """Lengths of the whole tensor, even if it lies in pieces."""
    dtype: torch.dtype
    """Type of the stored values."""
    file: str
    """Where it lies, for messages."""
    reader: Callable[[], Tensor] = field(repr=False, compare=False)
    filler: Callable[[Target], None] | None = field(default=None, repr=False, compare=False)
    """Fills a block of it, where less than the whole can be read."""

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The values, in new memory on the CPU.

        Raises:
            CheckpointError: the file does not hold what it promised; names file and tensor.
        """
        return self.reader()

    def fill(self, target: Target) -> None:
        """Fill a rank's block of the tensor; `target` has the stored dtype. Only what holds the block is read.

        Raises:
            CheckpointError: the file does not hold what it promised; names file and tensor.
        """
        if self.filler is not None:
            self.filler(target)
            return
        lengths = zip(target.offset, target.local.shape, strict=True)
        target.local.copy_(self.read()[tuple(slice(start, start + length) for start, length in lengths)])


class TensorSource(Mapping[str, StoredTensor]):
    """Stored tensors by name. Files stay open until it is closed: use it as a context manager, or let it go."""

    def __init__(
        self,
        path: Path,
        kind: str,
        tensors: Mapping[str, StoredTensor],
        files: ExitStack,
        *,
        left_out: Collection[str] = (),
    ) -> None:
        """Describe what was found.

        Args:
            path: the file or folder it was found in.
            kind: what that is, in words.
            tensors: what it holds.
            files: closes what reading keeps open.
            left_out: names of what is there and is no tensor to import.
        """
        self.path, self.kind, self.left_out = path, kind, tuple(left_out)
        self._tensors, self._files = dict(tensors), files

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def of(self, tensors: Mapping[str, StoredTensor]) -> TensorSource:
        """The same files, for other tensors of them."""
        return TensorSource(self.path, self.kind, tensors, self._files, left_out=self.left_out)

    def close(self) -> None:
        """Close the files; nothing can be read after."""
        self._files.close()

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self.kind} {self.path}>"


def file_in(folder: Path, name: Any) -> Path:
    """The plain file `name` of `folder`. A name found in a file may point anywhere: this is where it is stopped.

    The hub's download cache keeps files as links to its own `blobs` folder; no other link is followed.

    Raises:
        CheckpointError: the name leads out of the folder, or to something that is no file.
    """
    if not isinstance(name, str) or not is_inside(name) or "/" in name:
        raise CheckpointError(f"{folder}: {name!r:.80} is no name of a file in this folder")
    path = folder / name
    if path.is_symlink() and not _is_hub_blob(path):
        raise CheckpointError(f"{path} is a link, which is not followed; copy what it points to in its place")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist" if not path.exists() else f"{path} is no file")
    return path


def check_pieces(shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise unless the blocks (offset, shape) fill a tensor of `shape` exactly: no hole, no element twice.

    Raises:
        ValueError: they do not.
    """
    for offset, lengths in pieces:
        inside = len(offset) == len(lengths) == len(shape) and all(
            type(o) is int and type(n) is int and min(o, n) >= 0 and o + n <= whole
            for o, n, whole in zip(offset, lengths, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"a piece at {tuple(offset)} of shape {tuple(lengths)} is not in shape {tuple(shape)}")
    solid = sorted((tuple(o), tuple(n)) for o, n in pieces if math.prod(n))
    if sum(math.prod(n) for _, n in solid) != math.prod(shape):
        raise ValueError(f"the pieces do not add up to shape {tuple(shape)}")
    if not _in_a_row(solid) and any(_overlap(a, b) for i, a in enumerate(solid) for b in solid[:i]):
        raise ValueError(f"two pieces of shape {tuple(shape)} overlap")


def _is_hub_blob(link: Path) -> bool:
    """Whether `link` is in a snapshot of the hub's cache, `models--org--name/snapshots/REVISION`, and stays in it."""
    blobs = link.resolve().parent
    return blobs.name == "blobs" and any(
        parent.name == "snapshots" and parent.parent == blobs.parent and "--" in blobs.parent.name
        for parent in link.parent.resolve().parents
    )


def _in_a_row(pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether sorted pieces follow each other along one dim, as shards do: then none overlap."""
    for (a, n), (b, m) in pairwise(pieces):
        dims = [dim for dim in range(len(a)) if a[dim] != b[dim]]
        if len(dims) != 1 or a[dims[0]] + n[dims[0]] != b[dims[0]]:
            return False
        if any(n[dim] != m[dim] for dim in range(len(a)) if dim != dims[0]):
            return False
    return True


def _overlap(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(max(x, y) < min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))

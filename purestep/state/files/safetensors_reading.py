"""Where leaves are in safetensors files, and reading them. Headers are not trusted: what they say is checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from purestep.state.blocks import Target
from purestep.state.files.file_reading import Cut, Extent, cut_out_all, extent_of, read_extents, unreadable
from purestep.state.files.manifest import MANIFEST, DamagedCheckpointError, LeafInfo, StoredBlock
from purestep.state.files.safetensors_files import DTYPES, MAX_HEADER, model_name


class SafetensorsHeader:
    """Where the tensors of an open safetensors file are."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the header of an unbuffered file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no safetensors file.
        """
        self._size = os.fstat(file.fileno()).st_size
        file.seek(0)
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER, self._size - 8):
            raise ValueError("it is no safetensors file: it has no header")
        text = b""
        while len(text) < length and (more := file.read(length - len(text))):
            text += more
        try:
            self._entries = json.loads(text)
        except (ValueError, RecursionError):
            self._entries = None
        if not isinstance(self._entries, dict):
            raise ValueError("it is no safetensors file: its header is no JSON object")
        self._start = 8 + length

    def place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Place in the file of the tensor `name`, which is known to have this dtype and shape.

        Raises:
            ValueError: the header says something else.
        """
        width = dtype.itemsize
        code, stored = (DTYPES[dtype], shape) if dtype in DTYPES else ("U8", (*shape, width))
        entry = self._entries.get(name)
        if not isinstance(entry, dict):
            raise ValueError("it is not in the header")
        if entry.get("dtype") != code or entry.get("shape") != list(stored):
            raise ValueError(f"it is {entry.get('dtype')} {entry.get('shape')} there, not {code} {list(stored)}")
        offsets = entry.get("data_offsets")
        size = math.prod(shape) * width
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(place) is int for place in offsets):
            raise ValueError(f"the header places it at {offsets!r}")
        if not 0 <= offsets[0] <= offsets[1] <= self._size - self._start or offsets[1] - offsets[0] != size:
            raise ValueError(f"the header places its {size} bytes at {offsets!r}")
        return self._start + offsets[0]


class SafetensorsReader:
    """Reads leaves one at a time; a context manager that keeps its files open."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, tuple[BinaryIO, SafetensorsHeader]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, leaf: LeafInfo, target: Target) -> None:
        """Fill `target` with its block of `leaf`.

        Raises:
            DamagedCheckpointError: a file does not hold what the leaf table says; names file and leaf.
        """
        assert leaf.blocks is not None
        file = MANIFEST
        blocks = [(block, block.offset, block.shape) for block in leaf.blocks]
        try:
            for block, cut in cut_out_all(blocks, target):
                file = block.file
                opened, header = self._open(file)
                extent = find_extent(header, leaf, block, target, cut, lambda: None)
                opened.seek(extent.begin)
                read_extents(opened, [extent], stop=extent.end, sha256=None)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(f"checkpoint {self._root}: {unreadable(leaf.name, file, error)}") from None

    def _open(self, name: str) -> tuple[BinaryIO, SafetensorsHeader]:
        if name not in self._files:
            path = self._root / name
            if path.is_symlink():
                raise ValueError("it is a link")
            file: Any = self._stack.enter_context(path.open("rb", buffering=0))
            self._files[name] = file, SafetensorsHeader(file)
        return self._files[name]


def find_extent(
    header: SafetensorsHeader, leaf: LeafInfo, block: StoredBlock, target: Target, cut: Cut, done: Callable[[], None]
) -> Extent:
    """Where in its file the part of `block` is that `target` needs.

    Raises:
        ValueError: the header does not say what the leaf table says.
    """
    name = model_name(leaf.name) if block.file.startswith("model/") else leaf.name
    return extent_of(header.place(name, target.local.dtype, block.shape), block.shape, cut, target.local, done)

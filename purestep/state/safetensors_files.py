"""Leaves in safetensors files: whole ones in `model/`, for any reader, and each rank's blocks in `state/`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.state.blocks import Target, fill, flat_bytes, gather_to
from purestep.state.integrity import write_file
from purestep.state.manifest import DamagedCheckpointError, LeafInfo, StoredBlock
from purestep.state.placement import block_of, default_rank, default_world_size

MODEL_TREES = ("params/", "buffers/")
MAX_FILE_BYTES = 5 * 10**9  # of a file in model/: what hubs and file systems take without trouble
_CHUNK = 1 << 22  # bytes hashed and written at a time
_MAX_HEADER = 100_000_000  # the format's own limit
_DTYPES = {
    getattr(torch, name): code
    for name, code in {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
    }.items()
    if hasattr(torch, name)
}


@dataclass
class Written:
    """What one rank wrote: its files and, for each leaf in them, its blocks."""

    files: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Path -> (SHA-256, bytes)."""
    blocks: dict[str, list[StoredBlock]] = field(default_factory=dict)


def check_model_names(leaves: Mapping[str, Tensor]) -> None:
    """Raise unless params and buffers can be kept in `model/` under their module paths.

    Raises:
        ValueError: names the leaf.
    """
    for name, leaf in leaves.items():
        if not name.startswith(MODEL_TREES):
            continue
        path = model_name(name)
        if name.startswith("params/") and f"buffers/{path}" in leaves:
            raise ValueError(f"{path!r} is both in params and in buffers: rename one, or save with format='dcp'")
        if path == "__metadata__":
            raise ValueError(f"leaf {name!r}: safetensors keeps this name for itself; rename it, or use format='dcp'")
        if leaf.dtype not in _DTYPES:
            raise ValueError(
                f"leaf {name!r} is {leaf.dtype}, which safetensors cannot hold: change its dtype, or use format='dcp'"
            )


def model_name(leaf_name: str) -> str:
    """Name of a param or buffer in `model/`: its module path."""
    return leaf_name.split("/", 1)[1]


def write_model(root: Path, leaves: Mapping[str, Tensor]) -> Written:
    """Write params and buffers as whole tensors to `root/model`: collective, file i by rank i modulo the world size.

    A sharded leaf is gathered to its file's rank alone, and one leaf at a time. An error in writing does not keep this
    rank from the gathers that its peers wait in; it is raised at the end.
    """
    parts = _split({name: leaf for name, leaf in sorted(leaves.items()) if name.startswith(MODEL_TREES)})
    paths = [_part_name(i, len(parts)) for i in range(len(parts))]
    writers = {
        i: _Writer(root / paths[i], {model_name(name): leaf for name, leaf in part.items()})
        for i, part in enumerate(parts)
        if _owner(i) == default_rank()
    }
    # Files advance side by side, so that every owner has something to write while the others gather.
    for leaves_of_files in zip_longest(*(part.values() for part in parts)):
        for i, leaf in enumerate(leaves_of_files):
            pieces = None if leaf is None else gather_to(_owner(i), leaf)
            if pieces is not None:
                writers[i].write(pieces)
    written = Written()
    for i, writer in writers.items():
        written.files[paths[i]] = writer.close()
        for name, leaf in parts[i].items():
            written.blocks[name] = [StoredBlock(paths[i], (0,) * leaf.ndim, tuple(leaf.shape))]
    if len(parts) > 1 and default_rank() == 0:
        written.files.update(_write_index(root, dict(zip(paths, parts, strict=True))))
    return written


def write_shards(root: Path, leaves: Mapping[str, Tensor]) -> Written:
    """Write this rank's blocks of the leaves that are not in `model/` to one file in `root/state`."""
    blocks = {name: block_of(leaf) for name, leaf in leaves.items() if not name.startswith(MODEL_TREES)}
    mine = {name: block for name, block in blocks.items() if block.primary and block.local.numel()}
    if not mine:
        return Written()
    path = f"state/shard-{default_rank() + 1:05d}-of-{default_world_size():05d}.safetensors"
    tensors = _in_file_order({name: block.local for name, block in mine.items()})
    writer = _Writer(root / path, tensors)
    for tensor in tensors.values():
        writer.write([tensor])
    stored = {name: [StoredBlock(path, block.offset, tuple(block.local.shape))] for name, block in mine.items()}
    return Written({path: writer.close()}, stored)


class SafetensorsReader:
    """Reads blocks of leaves back; a context manager that keeps its files open."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, leaf: LeafInfo, target: Target) -> None:
        """Fill `target` from the blocks of `leaf`.

        Raises:
            DamagedCheckpointError: a file does not hold what the leaf table says; names file and leaf.
        """
        from safetensors import SafetensorError

        assert leaf.blocks is not None
        file = "no file"

        def fetch(block: StoredBlock, part: tuple[slice, ...]) -> Tensor:
            nonlocal file
            file = block.file
            return self._fetch(leaf, block, target.local.dtype, part)

        try:
            fill(target, ((block, block.offset, block.shape) for block in leaf.blocks), fetch)
        except (OSError, ValueError, SafetensorError) as error:
            raise DamagedCheckpointError(
                f"checkpoint {self._root}: cannot read leaf {leaf.name!r} from {file}: {error}"
            ) from None

    def _fetch(self, leaf: LeafInfo, block: StoredBlock, dtype: torch.dtype, part: tuple[slice, ...]) -> Tensor:
        if block.file not in self._files:
            from safetensors import safe_open

            self._files[block.file] = self._stack.enter_context(safe_open(self._root / block.file, framework="pt"))
        name = model_name(leaf.name) if block.file.startswith("model/") else leaf.name
        kept = self._files[block.file].get_slice(name)
        as_bytes = () if dtype in _DTYPES else (torch.empty((), dtype=dtype).element_size(),)
        code = _DTYPES.get(dtype, "U8")
        if kept.get_dtype() != code or tuple(kept.get_shape()) != (*block.shape, *as_bytes):
            raise ValueError(
                f"it is {kept.get_dtype()} {tuple(kept.get_shape())} there, and {code} {block.shape} in the leaf table"
            )
        if not part:
            data = self._files[block.file].get_tensor(name)
        else:
            data = kept[part]
        # A copy of bytes is aligned for any dtype; the mapped file is not, and complex128 then crashes the process.
        return data.clone().view(dtype).squeeze(-1) if as_bytes else data


class _Writer:
    """Writes one safetensors file front to back, hashing on the way.

    The first error is kept, later writes do nothing, and `close` raises it: the rank must go on taking part in gathers.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the header of `tensors`, which `write` will get in this order."""
        self._path = path
        self._error: Exception | None = None
        self._sha, self._size = hashlib.sha256(), 0
        self._file: Any = None
        self._guard(lambda: self._open(tensors))

    def write(self, pieces: list[Tensor]) -> None:
        """Append the next tensor, given as pieces that follow each other."""
        self._guard(lambda: self._append_tensors(pieces))

    def close(self) -> tuple[str, int]:
        """SHA-256 and size of the file, which is on disk when this returns."""
        self._guard(self._sync)
        if self._file is not None:
            with suppress(OSError):  # what could fail is in `_sync`; after an error, closing fails in flushing again
                self._file.close()
        if self._error is not None:
            raise self._error
        return self._sha.hexdigest(), self._size

    def _guard(self, action: Callable[[], Any]) -> None:
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def _open(self, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, tensor in tensors.items():
            stop = start + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape) if tensor.dtype in _DTYPES else [*tensor.shape, tensor.element_size()]
            header[name] = {"dtype": _DTYPES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER:
            raise ValueError(f"{self._path.name}: {len(tensors)} tensors are more than a safetensors header can list")
        self._file = open(self._path, "xb")  # noqa: SIM115 - closed by close()
        self._append(len(text).to_bytes(8, "little"))
        self._append(text)

    def _append_tensors(self, tensors: list[Tensor]) -> None:
        for data in map(flat_bytes, tensors):
            for start in range(0, data.numel(), _CHUNK):
                self._append(data[start : start + _CHUNK].cpu().numpy().data)

    def _append(self, data: bytes | memoryview) -> None:
        self._sha.update(data)
        self._file.write(data)
        self._size += len(data)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wider elements first, so that every tensor's data is aligned to its elements without holes between tensors."""

    def key(name: str) -> tuple[int, str]:
        return (-tensors[name].element_size() if tensors[name].dtype in _DTYPES else -1), name

    return {name: tensors[name] for name in sorted(tensors, key=key)}


def _owner(index: int) -> int:
    return index % default_world_size()


def _part_name(index: int, num: int) -> str:
    suffix = "" if num == 1 else f"-{index + 1:05d}-of-{num:05d}"
    return f"model/model{suffix}.safetensors"


def _split(model: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The leaves file by file, in file order: a file is closed before the leaf that would take it over the limit."""
    parts: list[dict[str, Tensor]] = []
    room = 0
    for name, leaf in model.items():
        size = leaf.numel() * leaf.element_size()
        if not parts or size > room:
            parts.append({})
            room = MAX_FILE_BYTES
        parts[-1][name] = leaf
        room -= size
    return [_in_file_order(part) for part in parts]


def _write_index(root: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[str, int]]:
    """The table that tells a reader of Hugging Face's layout which file holds which tensor."""
    total = sum(leaf.numel() * leaf.element_size() for part in parts.values() for leaf in part.values())
    where = {model_name(name): Path(path).name for path, part in parts.items() for name in part}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
    path = "model/model.safetensors.index.json"
    return {path: write_file(root / path, index.encode())}

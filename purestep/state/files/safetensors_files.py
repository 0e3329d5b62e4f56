"""Leaves in safetensors files: whole ones in `model/`, for any reader, and each rank's blocks in `state/`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from purestep.state.blocks import flat_bytes, gather_to
from purestep.state.files.hashing import StreamHash
from purestep.state.files.hints import reserve, start_writing
from purestep.state.files.integrity import write_file
from purestep.state.files.manifest import StoredBlock
from purestep.state.names import module_name
from purestep.state.placement import Block, block_of, default_rank, default_world_size, is_dtensor
from purestep.state.sums import sum_of_run
from purestep.state.workers import Job, Pool, num_workers

T = TypeVar("T")
MODEL_TREES = ("params/", "buffers/")
MAX_FILE_BYTES = 5 * 10**9  # of a file in model/: what hubs and file systems take without trouble
SHARD_FILE_BYTES = 1 << 26  # of a file in state/: a rank's files are written, hashed and read side by side, but
_MOST_SHARD_FILES = 8  # there are no more than this many a rank
MAX_HEADER = 100_000_000  # the format's own limit
_CHUNK = 1 << 20  # bytes hashed and written at a time
_WRITE_BEHIND = 1 << 25  # bytes after which the disk is set to work
DTYPES = {
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
    gathered: dict[str, int] = field(default_factory=dict)
    """Leaf -> the sum (see `digests`) of what was written of it, if it was put together from several ranks."""


def check_model_names(leaves: Mapping[str, Tensor]) -> None:
    """Raise unless params and buffers can be kept in `model/` under their module paths.

    Raises:
        ValueError: names the leaf.
    """
    taken: dict[str, str] = {}
    for name, leaf in leaves.items():
        if not name.startswith(MODEL_TREES):
            continue
        path = model_name(name)
        other = taken.setdefault(path, name)
        if other != name:
            raise ValueError(
                f"leaves {other!r} and {name!r} are both {path!r} in model/: rename one, or use format='dcp'"
            )
        if path == "__metadata__":
            raise ValueError(f"leaf {name!r}: safetensors keeps this name for itself; rename it, or use format='dcp'")
        if leaf.dtype not in DTYPES:
            raise ValueError(
                f"leaf {name!r} is {leaf.dtype}, which safetensors cannot hold: change its dtype, or use format='dcp'"
            )


def model_name(leaf_name: str) -> str:
    """Name of a param or buffer in `model/`: its module path."""
    return module_name(leaf_name)


def write_leaves(
    root: Path, leaves: Mapping[str, Tensor], *, shards: bool, ties: Sequence[Sequence[str]] = ()
) -> Written:
    """Write params and buffers whole to `root/model`, and if told so, this rank's blocks of the others to `root/state`.

    Collective. Files are written side by side; file i of `model/` by rank i modulo the world size, to which sharded
    leaves are gathered one at a time. An error in writing does not keep this rank from the gathers that its peers wait
    in; it is raised at the end. Files of `model/` note other names of their tensors as `safetensors.torch.save_model`
    does.
    """
    same = {other: first for first, *others in ties for other in others}
    parts = _cut({name: leaf for name, leaf in sorted(leaves.items()) if name.startswith(MODEL_TREES)}, MAX_FILE_BYTES)
    paths = [_part_name(i, len(parts)) for i in range(len(parts))]
    mine = [i for i in range(len(parts)) if _owner(i) == default_rank()]
    gathered = [i for i, part in enumerate(parts) if any(map(is_dtensor, part.values()))]
    files = _shard_files(leaves) if shards else {}
    jobs: dict[str, Job[tuple[str, int]]] = {}
    # A thread more than cores: one of them waits for the disk.
    with Pool(num_workers() + 1) as pool:
        whole = {path: {name: block.local for name, block in blocks.items()} for path, blocks in files.items()}
        whole |= {paths[i]: _by_module_path(parts[i]) for i in mine if i not in gathered}
        for path, tensors in sorted(whole.items(), key=lambda item: -sum(x.nbytes for x in item[1].values())):
            jobs[path] = pool.submit(
                _write_file, root / path, tensors, len(whole) < num_workers(), {} if path in files else same
            )
        writers = _write_gathered(root, {i: (paths[i], parts[i]) for i in gathered}, same)
    endings = {path: job.result for path, job in jobs.items()} | {path: w.close for path, w in writers.items()}
    written = Written(_end_all(endings))
    for path, blocks in files.items():
        for name, block in blocks.items():
            written.blocks[name] = [StoredBlock(path, block.offset, tuple(block.local.shape))]
    for i in mine:
        if i in gathered:
            sums = dict(zip(parts[i], writers[paths[i]].sums, strict=True))
            written.gathered |= {name: sums[name] for name, leaf in parts[i].items() if block_of(leaf).shard_groups}
        for name, leaf in parts[i].items():
            written.blocks[name] = [StoredBlock(paths[i], (0,) * leaf.ndim, tuple(leaf.shape))]
    if len(parts) > 1 and default_rank() == 0:
        written.files.update(_write_index(root, dict(zip(paths, parts, strict=True))))
    return written


def _write_gathered(
    root: Path, parts: Mapping[int, tuple[str, Mapping[str, Tensor]]], same: Mapping[str, str]
) -> dict[str, SafetensorsWriter]:
    """Gather each leaf to its file's rank, and write it there. The writers, by path, are yet to be closed."""
    writers = {
        i: SafetensorsWriter(root / path, _by_module_path(part), digest=True, same=same)
        for i, (path, part) in parts.items()
        if _owner(i) == default_rank()
    }
    # Files advance side by side, so that every owner has something to write while the others gather.
    for leaves_of_files in zip_longest(*(part.values() for _, part in parts.values())):
        for i, leaf in zip(parts, leaves_of_files, strict=True):
            pieces = None if leaf is None else gather_to(_owner(i), leaf)
            if pieces is not None:
                writers[i].write(pieces)
    return {parts[i][0]: writer for i, writer in writers.items()}


def _end_all(endings: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What each returns; every one of them is called before the first error is raised."""
    results, errors = {}, []
    for path, end in endings.items():
        try:
            results[path] = end()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _write_file(
    path: Path, tensors: Mapping[str, Tensor], hash_in_thread: bool, same: Mapping[str, str]
) -> tuple[str, int]:
    writer = SafetensorsWriter(path, tensors, hash_in_thread=hash_in_thread, same=same)
    for tensor in tensors.values():
        writer.write([tensor])
    return writer.close()


def _shard_files(leaves: Mapping[str, Tensor]) -> dict[str, dict[str, Block]]:
    """Path -> this rank's blocks in it, in file order, of the leaves that are not in `model/`."""
    blocks = {name: block_of(leaf) for name, leaf in leaves.items() if not name.startswith(MODEL_TREES)}
    mine = {name: block for name, block in blocks.items() if block.primary and block.local.numel()}
    tensors = {name: block.local for name, block in mine.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts = _cut(tensors, max(SHARD_FILE_BYTES, -(-total // _MOST_SHARD_FILES)))
    stem = f"state/shard-{default_rank() + 1:05d}-of-{default_world_size():05d}"
    return {
        f"{stem}{'-part' if len(parts) > 1 else ''}{_suffix(i, len(parts))}.safetensors": {n: mine[n] for n in part}
        for i, part in enumerate(parts)
    }


class SafetensorsWriter:
    """Writes one safetensors file front to back, hashing on the way.

    The first error is kept, later writes do nothing, and `close` raises it: the rank must go on taking part in gathers.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        *,
        hash_in_thread: bool = True,
        digest: bool = False,
        same: Mapping[str, str] | None = None,
    ) -> None:
        """Write the header.

        Args:
            path: a file that does not exist.
            tensors: what `write` will get, in this order; only their names, shapes and dtypes are used.
            hash_in_thread: see `StreamHash`.
            digest: whether to fill `sums`.
            same: other name of a tensor -> its name here; what is about tensors of this file is noted in the header.
        """
        self.sums: list[int] = []
        """The sum (see `digests`) of each tensor that was written."""
        self._digest = digest
        self._path = path
        self._error: Exception | None = None
        self._hash, self._size = StreamHash(in_thread=hash_in_thread), 0
        self._small = bytearray()  # what is yet to be written: small tensors are written many at a time
        self._file: Any = None
        self._put_bytes = self._started = 0  # of the file: written, and on their way to the disk
        tied = {other: name for other, name in (same or {}).items() if name in tensors}
        self._guard(lambda: self._open(tensors, tied))

    def write(self, pieces: list[Tensor]) -> None:
        """Append the next tensor, given as pieces that follow each other."""
        self._guard(lambda: self._append_tensors(pieces))

    def close(self) -> tuple[str, int]:
        """SHA-256 and size of the file, which is on disk when this returns."""
        self._guard(self._sync)
        self._hash.close()
        if self._file is not None:
            with suppress(OSError):  # what could fail is in `_sync`
                self._file.close()
        if self._error is not None:
            raise self._error
        return self._hash.hexdigest(), self._size

    def _guard(self, action: Callable[[], Any]) -> None:
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def _open(self, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": {**tied, "format": "pt"}}
        start = 0
        for name, tensor in tensors.items():
            stop = start + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape) if tensor.dtype in DTYPES else [*tensor.shape, tensor.element_size()]
            header[name] = {"dtype": DTYPES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise ValueError(f"{self._path.name}: {len(tensors)} tensors are more than a safetensors header can list")
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        reserve(self._file, 8 + len(text) + start)
        self._append(len(text).to_bytes(8, "little"))
        self._append(text)

    def _append_tensors(self, tensors: list[Tensor]) -> None:
        total = done = 0
        for data in map(flat_bytes, tensors):
            for start in range(0, data.numel(), _CHUNK):
                chunk = data[start : start + _CHUNK].cpu().numpy()
                if self._digest:
                    total += sum_of_run(chunk, done)
                    done += len(chunk)
                self._append(chunk.data)
        self.sums.append(total)

    def _append(self, data: bytes | memoryview) -> None:
        self._size += len(data)
        if len(data) + len(self._small) < _CHUNK:
            self._small += data
            return
        self._flush()
        self._put(data)

    def _flush(self) -> None:
        small, self._small = self._small, bytearray()
        self._put(memoryview(small))

    def _put(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        rest = memoryview(data)
        while len(rest):  # a full disk takes a part, and only then refuses
            rest = rest[self._file.write(rest) :]
        self._put_bytes += len(data)
        if self._put_bytes - self._started >= _WRITE_BEHIND:
            start_writing(self._file, self._started, self._put_bytes - self._started)
            self._started = self._put_bytes

    def _sync(self) -> None:
        self._flush()
        os.fsync(self._file.fileno())


def _in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wider elements first, so that every tensor's data is aligned to its elements without holes between tensors."""

    def key(name: str) -> tuple[int, str]:
        return (-tensors[name].element_size() if tensors[name].dtype in DTYPES else -1), name

    return {name: tensors[name] for name in sorted(tensors, key=key)}


def _owner(index: int) -> int:
    return index % default_world_size()


def _part_name(index: int, num: int) -> str:
    return f"model/model{_suffix(index, num)}.safetensors"


def _suffix(index: int, num: int) -> str:
    return "" if num == 1 else f"-{index + 1:05d}-of-{num:05d}"


def _by_module_path(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {model_name(name): leaf for name, leaf in leaves.items()}


def _cut(leaves: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """The leaves file by file, in file order: a file is closed before the leaf that would take it over the limit."""
    parts: list[dict[str, Tensor]] = []
    room = 0
    for name, leaf in leaves.items():
        size = leaf.numel() * leaf.element_size()
        if not parts or size > room:
            parts.append({})
            room = limit
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

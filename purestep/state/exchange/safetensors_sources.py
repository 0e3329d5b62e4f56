"""Tensors in safetensors files that others wrote: single files, Hugging Face's sharded folders, DCP's shards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.state.blocks import Target, fill
from purestep.state.exchange.tensor_source import StoredTensor, TensorSource, check_pieces, file_in
from purestep.state.files.file_reading import cut_out_all, extent_of, read_extents
from purestep.state.files.manifest import CheckpointError, DamagedCheckpointError
from purestep.state.files.safetensors_files import DTYPES
from purestep.state.files.safetensors_reading import SafetensorsHeader

INDEX_SUFFIX = ".safetensors.index.json"
_SHARDING = "DCP_SHARDING_INFO"  # where torch's HuggingFaceStorageWriter notes the offsets of a file's shards
_SHARD_FILE = re.compile(r"shard-(\d+)-model-")
_MAX_INDEX_BYTES = 256 << 20
_MAX_MAPPED_BYTES = 32 << 20  # read from mapped files before they are closed: what is mapped counts as this process's
_CODES = {code: dtype for dtype, code in DTYPES.items()}


def from_file(path: Path) -> TensorSource:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: it is damaged, or holds shards of tensors.
    """
    files = _Files()
    if _SHARDING in files.metadata(path):
        raise CheckpointError(f"{path} holds shards of tensors, and others may hold the rest: name its folder")
    tensors = {name: files.stored(path, name, kept) for name, kept in files.table(path).items()}
    return TensorSource(path, "safetensors file", tensors, files.stack)


def from_index(folder: Path, index: Path) -> TensorSource:
    """The tensors that Hugging Face's index of a folder lists, from the files it names."""
    where = _weight_map(folder, index)
    files = _Files()
    paths = {name: file_in(folder, name) for name in sorted(set(where.values()))}
    tables = {name: files.table(path) for name, path in paths.items()}
    missing = [f"{name!r} (in {file})" for name, file in where.items() if name not in tables[file]]
    if missing:
        raise DamagedCheckpointError(f"{index} lists tensors that are not there: {_some(missing)}")
    tensors = {}
    for name, file in where.items():
        tensors[name] = files.stored(paths[file], name, tables[file][name])
    unlisted = [f"{name} in {file}" for file, table in tables.items() for name in table if where.get(name) != file]
    return TensorSource(folder, "Hugging Face folder", tensors, files.stack, left_out=sorted(unlisted))


def from_dcp_shards(folder: Path, names: list[str]) -> TensorSource:
    """The tensors whose shards torch's `HuggingFaceStorageWriter(save_distributed=True)` left in the files `names`.

    Nothing in such files says how many there were, or how large the tensors are: if the last ranks' are missing, their
    rows are missing without a trace.

    Raises:
        CheckpointError: the files do not hold tensors without holes, or those of a rank between are missing.
    """
    _refuse_gap(folder, names)
    files = _Files()
    pieces: dict[str, list[_Piece]] = {}
    for file in sorted(names):
        path = file_in(folder, file)
        offsets = _saved_offsets(path, files.metadata(path))
        for name, kept in files.table(path).items():
            if name not in offsets:
                raise DamagedCheckpointError(f"{path}: {_SHARDING} has no offsets for tensor {name!r}")
            pieces.setdefault(name, []).append(_Piece(path, name, tuple(offsets[name]), kept))
    tensors = {name: _joined(name, of_name, files) for name, of_name in sorted(pieces.items())}
    return TensorSource(folder, f"folder of DCP's safetensors shards ({len(names)} files)", tensors, files.stack)


def is_shard(path: Path) -> bool:
    """Whether the file says that its tensors are shards."""
    return _SHARDING in _Files().metadata(path)


@dataclass(frozen=True)
class _Kept:
    """What a file's header says about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Piece:
    """A block of a tensor, in a file of its own."""

    path: Path
    name: str
    offset: tuple[int, ...]
    kept: _Kept


class _Files:
    """Safetensors files, mapped while something is read from them."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self._read_bytes = 0
        self._headers: dict[Path, tuple[Any, SafetensorsHeader]] = {}

    def stored(self, path: Path, name: str, kept: _Kept) -> StoredTensor:
        """A tensor of the file, to be read later."""
        whole, part = partial(self.read, path, name), partial(self.fill, path, name, kept)
        return StoredTensor(name, kept.shape, kept.dtype, path.name, whole, part)

    def table(self, path: Path) -> dict[str, _Kept]:
        """What the file holds, by name; its header is checked against its size."""
        table = {}
        with _explained(path):
            for name in self._file(path).keys():  # noqa: SIM118 - no mapping
                kept = self._file(path).get_slice(name)
                code = kept.get_dtype()
                if code not in _CODES:
                    raise CheckpointError(f"{path}: tensor {name!r} is {code}, which this torch cannot hold")
                table[name] = _Kept(tuple(kept.get_shape()), _CODES[code])
        self._close()
        return table

    def metadata(self, path: Path) -> Mapping[str, str]:
        """The strings that its writer put into the file's header."""
        with _explained(path):
            return self._file(path).metadata() or {}

    def read(self, path: Path, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """A tensor of the file, or a part of it, in memory of its own."""
        with _explained(path, f" tensor {name!r}"):
            tensor = self._file(path).get_slice(name)[part] if part else self._file(path).get_tensor(name)
            tensor = tensor.clone()
        self._read_bytes += tensor.nbytes
        if self._read_bytes > _MAX_MAPPED_BYTES:
            self._close()
        return tensor

    def fill(self, path: Path, name: str, kept: _Kept, target: Target) -> None:
        """Fill a block of a tensor of the file, without mapping it: only the bytes of the block's rows are read."""
        with _explained(path, f" tensor {name!r}"):
            if path not in self._headers:
                opened: Any = self.stack.enter_context(path.open("rb", buffering=0))
                self._headers[path] = opened, SafetensorsHeader(opened)
            file, header = self._headers[path]
            for _, cut in cut_out_all([(name, (0,) * len(kept.shape), kept.shape)], target):
                place = header.place(name, kept.dtype, kept.shape)
                extent = extent_of(place, kept.shape, cut, target.local, lambda: None)
                file.seek(extent.begin)
                read_extents(file, [extent], stop=extent.end, sha256=None)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = self.stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]

    def _close(self) -> None:
        self._open.clear()
        self._headers.clear()
        self._read_bytes = 0
        self.stack.pop_all().close()


class _explained:  # noqa: N801 - reads as the statement it is
    """Turns what a broken file makes its reader raise into a `CheckpointError` that names it."""

    def __init__(self, path: Path, what: str = "") -> None:
        self._text = f"{path}: cannot read{what}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from safetensors import SafetensorError

        if isinstance(error, OSError | ValueError | SafetensorError):
            raise DamagedCheckpointError(f"{self._text}: {error}") from None


def _weight_map(folder: Path, index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file."""
    path = file_in(folder, index.name)
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("it is too large for one")
        table = json.loads(path.read_bytes())
        where = table["weight_map"]
        if not isinstance(where, dict) or not where:
            raise ValueError("it lists no tensors")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{index} is no index of safetensors files: {error}") from None
    return where


def _saved_offsets(path: Path, metadata: Mapping[str, str]) -> dict[str, list[int]]:
    if _SHARDING not in metadata:
        raise CheckpointError(
            f"{path.parent} holds several safetensors files and no *{INDEX_SUFFIX} that says which belong together; "
            "name one file"
        )
    try:
        return {name: list(entry["saved_offsets"]) for name, entry in json.loads(metadata[_SHARDING]).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: its {_SHARDING} cannot be read: {error}") from None


def _refuse_gap(folder: Path, names: list[str]) -> None:
    ranks = {int(match[1]) for match in map(_SHARD_FILE.match, names) if match}
    missing = sorted(set(range(1, max(ranks, default=0))) - ranks)
    if missing:
        raise DamagedCheckpointError(f"{folder}: the files shard-{missing[0]:05d}-* are missing")


def _joined(name: str, pieces: list[_Piece], files: _Files) -> StoredTensor:
    where = f"{pieces[0].path.parent}: tensor {name!r}"
    blocks = [(piece.offset, piece.kept.shape) for piece in pieces]
    dtypes = {piece.kept.dtype for piece in pieces}
    try:
        if len(dtypes) > 1:
            raise ValueError(f"its pieces are of different types: {', '.join(sorted(map(str, dtypes)))}")
        shape = tuple(max(o + n for o, n in zip(*dims, strict=True)) for dims in _by_dim(blocks))
        check_pieces(shape, blocks)
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(f"{where} cannot be put together: {error}") from None
    (dtype,) = dtypes

    def fill_block(target: Target) -> None:
        stored = ((piece, piece.offset, piece.kept.shape) for piece in pieces)
        fill(target, stored, lambda piece, part: files.read(piece.path, name, part))

    def read() -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        fill_block(Target(whole, whole, (0,) * len(shape)))
        return whole

    return StoredTensor(name, shape, dtype, ", ".join(piece.path.name for piece in pieces), read, fill_block)


def _by_dim(blocks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
    """For each dim the offsets and lengths of all blocks in it."""
    if len({len(offset) for offset, _ in blocks} | {len(lengths) for _, lengths in blocks}) != 1:
        raise ValueError("its pieces have different numbers of dims")
    return zip(zip(*(o for o, _ in blocks), strict=True), zip(*(n for _, n in blocks), strict=True), strict=True)


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

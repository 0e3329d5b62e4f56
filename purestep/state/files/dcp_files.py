"""Leaves in a `torch.distributed.checkpoint` (DCP) directory: written by DCP, read without its unpickling."""

from __future__ import annotations

import pathlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from purestep.state.blocks import Target
from purestep.state.collective import current_group
from purestep.state.files.dcp_archives import find_saved
from purestep.state.files.file_reading import Cut, Extent, cut_out_all, read_extents, unreadable
from purestep.state.files.hashing import StreamHash
from purestep.state.files.integrity import hash_file
from purestep.state.files.manifest import MANIFEST, DamagedCheckpointError, LeafInfo
from purestep.state.placement import default_rank, from_local, in_process_group, is_dtensor, local_tensor
from purestep.state.workers import num_workers

DIRECTORY = "state"
METADATA = ".metadata"
_SMALL_BYTES = 1 << 16  # of what is written at once; a thread is not worth its wake-up for less
_FILE_BYTES = 1 << 28  # of a rank's data file, if there are threads to write several


class DcpError(RuntimeError):
    """DCP could not write. (Its own error is a `BaseException`, which `except Exception` lets through.)"""


def write_dcp(root: Path, leaves: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Write all leaves as one DCP checkpoint to `root/state`: collective.

    Returns:
        Path -> (SHA-256, bytes) of the files this rank wrote.

    Raises:
        DcpError: says which ranks failed, and why.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Writer(dcp.FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()  # DCP would note the temporary directory's absolute path and a random id

        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception:
                for error in errors:  # torch.save only says that it did not get to where it wanted
                    raise error from None
                raise

    directory = root / DIRECTORY
    num_bytes = sum(local_tensor(leaf).nbytes for leaf in leaves.values())
    writer = Writer(directory, sync_files=True, thread_count=min(num_workers(), 1 + num_bytes // _FILE_BYTES))
    writer.fs, hashes, errors = _hashing_file_system()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is no mistake
            dcp.save(
                {name: _plain(leaf) for name, leaf in leaves.items()},
                storage_writer=writer,
                process_group=current_group(),
                no_dist=not in_process_group(),
            )
    except dcp.api.CheckpointException as error:
        rank = "rank {}: " if in_process_group() else ""
        raise DcpError(
            "; ".join(rank.format(r) + str(cause[0]) for r, cause in sorted(error.failures.items()))
        ) from None
    mine = sorted(directory.glob(f"__{default_rank()}_*.distcp"))
    mine += [directory / METADATA] if default_rank() == 0 else []
    return {f"{DIRECTORY}/{path.name}": hashes.get(path.name) or hash_file(path) for path in mine}


def _plain(leaf: Tensor) -> Tensor:
    """The leaf with its elements in row-major order: values are saved, not layouts."""
    if is_dtensor(leaf):
        local = leaf._local_tensor.detach()  # type: ignore[attr-defined]
        return from_local(local.resolve_conj().resolve_neg().contiguous(), leaf._spec)  # type: ignore[attr-defined]
    return leaf.detach().resolve_conj().resolve_neg().contiguous()


def _hashing_file_system() -> tuple[Any, dict[str, tuple[str, int]], list[OSError]]:
    """A file system for DCP's writer; by name, (SHA-256, bytes) of what it has written; and what went wrong."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    hashes: dict[str, tuple[str, int]] = {}
    errors: list[OSError] = []

    class Hashing(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as file:
                stream = _HashingStream(file, errors)
                try:
                    yield stream
                except OSError as error:
                    errors.append(error)
                    raise
                finally:
                    hashes[Path(path).name] = stream.end()

        def rename(self, path: Any, new_path: Any) -> None:
            super().rename(path, new_path)
            hashes[Path(new_path).name] = hashes.pop(Path(path).name)

    return Hashing(), hashes, errors


class _HashingStream:
    """A file that is only appended to, and hashed on the way."""

    def __init__(self, file: Any, errors: list[OSError]) -> None:
        self._file, self._errors = file, errors
        self._small = bytearray()  # what is yet to be hashed: the archive of a tensor has some 40 small parts
        self._sha256, self._size = StreamHash(), 0

    def write(self, data: Any) -> int:
        self._size += len(data)
        if len(data) < _SMALL_BYTES:
            self._small += data
            if len(self._small) >= _SMALL_BYTES:
                self._hash_small()
        else:
            self._hash_small()
            self._sha256.update(memoryview(data))
        try:
            return self._file.write(data)
        except OSError as error:
            self._errors.append(error)
            raise
        finally:
            if len(data) >= _SMALL_BYTES:
                self._sha256.wait()  # the memory is the caller's again

    def end(self) -> tuple[str, int]:
        """SHA-256 and size of what was written."""
        self._hash_small()
        self._sha256.close()
        return self._sha256.hexdigest(), self._size

    def _hash_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._sha256.update(small)

    def __getattr__(self, name: str) -> Any:
        if name in ("seek", "truncate"):
            raise AttributeError(f"{name}: this file is only appended to")
        return getattr(self._file, name)


class DcpTable:
    """Where DCP put what: its metadata, of which nothing is believed unchecked."""

    def __init__(self, root: Path, directory: str = DIRECTORY) -> None:
        """Read the metadata of the DCP checkpoint `root / directory`."""
        self._root, self._directory = root, directory
        self.metadata = read_metadata(root / directory / METADATA)

    def files_of(self, name: str) -> set[str]:
        """Files, as paths from `root`, that hold a part of the entry `name`."""
        return {f"{self._directory}/{i.relative_path}" for index, i in self._data.items() if index.fqn == name}

    def requests(
        self, leaf: LeafInfo, target: Target, done: Callable[[], None]
    ) -> list[tuple[str, Callable[[BinaryIO], Extent]]]:
        """(path from `root`, what finds the extent in that file) of each part of `leaf` that `target` needs.

        Raises:
            ValueError: the metadata does not say what the leaf table says; names file and leaf.
        """
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        try:
            table = self.metadata.state_dict_metadata.get(leaf.name)
            dtype = target.local.dtype
            if (
                not isinstance(table, TensorStorageMetadata)
                or tuple(table.size) != leaf.shape
                or table.properties.dtype != dtype
            ):
                raise ValueError(f"it does not list the leaf as {MANIFEST} does")
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in table.chunks]
            found = cut_out_all(((chunk, *chunk) for chunk in chunks), target)
            return [self._request(leaf.name, offset, shape, target, cut, done) for (offset, shape), cut in found]
        except Exception as error:  # tables that were made up may raise anything
            raise ValueError(unreadable(leaf.name, f"{self._directory}/{METADATA}", error)) from None

    def _request(
        self,
        name: str,
        offset: tuple[int, ...],
        shape: tuple[int, ...],
        target: Target,
        cut: Cut,
        done: Callable[[], None],
    ) -> tuple[str, Callable[[BinaryIO], Extent]]:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        info = self._data[MetadataIndex(name, torch.Size(offset))]
        # DCP's own files are flat and named by rank: anything else is an attempt to read elsewhere.
        if not re.fullmatch(r"__\d+_\d+\.distcp", info.relative_path) or info.transform_descriptors:
            raise ValueError(f"{info.relative_path!r} is no data file of DCP")
        if not all(type(place) is int and place >= 0 for place in (info.offset, info.length)):
            raise ValueError(f"its place is {info.offset!r}, {info.length!r}")
        find = partial(
            find_saved,
            begin=info.offset,
            length=info.length,
            dtype=target.local.dtype,
            shape=shape,
            cut=cut,
            local=target.local,
            done=done,
        )
        return f"{self._directory}/{info.relative_path}", find

    @property
    def _data(self) -> Mapping[Any, Any]:
        return self.metadata.storage_data


class DcpReader:
    """Reads leaves one at a time; a context manager that keeps its files open."""

    def __init__(self, root: Path, directory: str = DIRECTORY) -> None:
        """Read the metadata of the DCP checkpoint `root / directory`."""
        self._root = root
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()
        self._table = DcpTable(root, directory)
        self.metadata = self._table.metadata
        self.files_of = self._table.files_of

    def __enter__(self) -> DcpReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, leaf: LeafInfo, target: Target) -> None:
        """Fill `target` with its block of `leaf`.

        Raises:
            DamagedCheckpointError: DCP's files do not hold what the leaf table says; names file and leaf.
        """
        try:
            for file, find in self._table.requests(leaf, target, lambda: None):
                try:
                    opened = self._open(file)
                    extent = find(opened)
                    opened.seek(extent.begin)
                    read_extents(opened, [extent], stop=extent.end, sha256=None)
                except (OSError, ValueError) as error:
                    raise ValueError(unreadable(leaf.name, file, error)) from None
        except ValueError as error:
            raise DamagedCheckpointError(f"checkpoint {self._root}: {error}") from None

    def _open(self, file: str) -> BinaryIO:
        if file not in self._files:
            path = self._root / file
            if path.is_symlink():
                raise ValueError("it is a link")
            opened: Any = self._stack.enter_context(path.open("rb", buffering=0))
            self._files[file] = opened
        return self._files[file]


def read_metadata(path: Path) -> Any:
    """DCP's `Metadata`. It is a pickle: only the classes such a file is made of are let in, and nothing else runs.

    Raises:
        DamagedCheckpointError: the pickle asks for anything else, or is no such file.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise ValueError("it holds no DCP metadata")
        if not isinstance(metadata.storage_data, dict):
            raise ValueError("it does not say where the data is")
    except Exception as error:  # a broken pickle may raise anything
        raise DamagedCheckpointError(f"{path} is not trusted: {error}") from None
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        allowed = _allowed().get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which DCP metadata has no use for")
        return allowed


def _allowed() -> dict[tuple[str, str], Any]:
    from torch.distributed.checkpoint import filesystem, metadata

    classes = {
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
    # A path is only ever shown, never opened, so the kind without file operations stands in for all.
    paths = {(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")}
    return {
        **classes,
        **paths,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("builtins", "getattr"): _enum_member,
    }


def _enum_member(owner: Any, name: str) -> Any:
    """What Python 3.11's first releases pickle an enum's member as: `getattr(its class, its name)`; nothing else."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    if owner is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for an attribute of {owner!r}")
    return _MEM_FORMAT_ENCODING[name]

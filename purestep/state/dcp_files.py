"""Leaves in a `torch.distributed.checkpoint` (DCP) directory: written by DCP, read without its unpickling."""

from __future__ import annotations

import io
import pathlib
import pickle
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from purestep.state.blocks import Target, fill
from purestep.state.integrity import hash_file
from purestep.state.manifest import MANIFEST, DamagedCheckpointError, LeafInfo
from purestep.state.placement import default_rank, in_process_group

DIRECTORY = "state"
_METADATA = ".metadata"


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

    directory = root / DIRECTORY
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is no mistake
            dcp.save(
                {name: leaf.detach() for name, leaf in leaves.items()},
                storage_writer=Writer(directory, sync_files=True),
                no_dist=not in_process_group(),
            )
    except dcp.api.CheckpointException as error:
        rank = "rank {}: " if in_process_group() else ""
        raise DcpError(
            "; ".join(rank.format(r) + str(cause[0]) for r, cause in sorted(error.failures.items()))
        ) from None
    mine = sorted(directory.glob(f"__{default_rank()}_*.distcp"))
    mine += [directory / _METADATA] if default_rank() == 0 else []
    return {f"{DIRECTORY}/{path.name}": hash_file(path) for path in mine}


class DcpReader:
    """Reads blocks of leaves back; a context manager that keeps its files open."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()
        self._metadata = read_metadata(root / DIRECTORY / _METADATA)

    def __enter__(self) -> DcpReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, leaf: LeafInfo, target: Target) -> None:
        """Fill `target` with `leaf`.

        Raises:
            DamagedCheckpointError: DCP's files do not hold what the leaf table says; names file and leaf.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

        table = self._metadata.state_dict_metadata.get(leaf.name)
        where = f"checkpoint {self._root}: cannot read leaf {leaf.name!r} from {DIRECTORY}"
        if (
            not isinstance(table, TensorStorageMetadata)
            or tuple(table.size) != leaf.shape
            or table.properties.dtype != target.local.dtype
        ):
            raise DamagedCheckpointError(f"{where}/{_METADATA}: it does not list the leaf as {MANIFEST} does")
        file = _METADATA

        def fetch(chunk: Any, part: tuple[slice, ...]) -> Tensor:
            nonlocal file
            info = self._metadata.storage_data[MetadataIndex(leaf.name, chunk.offsets)]
            file = info.relative_path
            tensor = self._load(info)
            if tuple(tensor.shape) != tuple(chunk.sizes) or tensor.dtype != table.properties.dtype:
                raise ValueError(f"it is {tensor.dtype} {tuple(tensor.shape)} there")
            return tensor[part]

        try:
            fill(target, ((chunk, tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in table.chunks), fetch)
        except Exception as error:  # tables that were made up may raise anything
            raise DamagedCheckpointError(f"{where}/{file}: {error}") from None

    def _load(self, info: Any) -> Tensor:
        # DCP's own files are flat and named by rank: anything else is an attempt to read elsewhere.
        if not re.fullmatch(r"__\d+_\d+\.distcp", info.relative_path) or info.transform_descriptors:
            raise ValueError(f"{info.relative_path!r} is no data file of DCP")
        if info.relative_path not in self._files:
            path = self._root / DIRECTORY / info.relative_path
            if path.is_symlink():
                raise ValueError("it is a link")
            self._files[info.relative_path] = self._stack.enter_context(path.open("rb"))
        stream = self._files[info.relative_path]
        stream.seek(info.offset)
        tensor = torch.load(io.BytesIO(stream.read(info.length)), map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"it is a {type(tensor).__name__} there")
        return tensor


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

"""Tensors in DCP folders that others wrote, e.g. what accelerate's `save_state` leaves of an FSDP model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.state.blocks import allocate
from purestep.state.exchange.tensor_source import StoredTensor, TensorSource, check_pieces
from purestep.state.files.dcp_files import METADATA, DcpReader
from purestep.state.files.manifest import CheckpointError, DamagedCheckpointError, LeafInfo

_MODEL = "model"  # the entry of a saved {"model": ..., "optimizer": ...} that is imported


def from_dcp(folder: Path) -> TensorSource:
    """The model's tensors in a DCP folder.

    Of a nested state, `{"model": {...}, ...}`, these are the tensors below `model`, by their names there; of a flat one
    all tensors. Nothing in it is unpickled but through the list of classes that DCP's metadata is made of.

    Raises:
        CheckpointError: it is none, or holds no model; or its metadata asks for what it has no use for.
    """
    files = ExitStack()
    reader = files.enter_context(DcpReader(folder.parent, folder.name))
    tables = reader.metadata.state_dict_metadata
    names = _module_names(folder, tables, reader.metadata.planner_data)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    tensors = {}
    for name, key in names.items():
        if (row := _row(folder, key, tables[key])) is None:
            continue
        if row.nbytes > on_disk:
            raise DamagedCheckpointError(f"{folder}: {key!r} has {row.nbytes:,} bytes, more than all files together")
        dtype = tables[key].properties.dtype
        read = partial(_read, reader, row, dtype)
        fill = partial(reader.read, row)
        tensors[name] = StoredTensor(name, row.shape, dtype, f"{folder.name}, entry {key!r}", read, fill)
    if not tensors:
        raise CheckpointError(f"{folder} is a DCP checkpoint without a tensor of a model")
    taken = {names[name] for name in tensors}
    return TensorSource(folder, "DCP folder", tensors, files, left_out=sorted(set(map(str, tables)) - taken))


def _module_names(folder: Path, tables: Mapping[Any, Any], planner_data: Any) -> dict[str, str]:
    """Name in the module -> key in the checkpoint.

    DCP flattens a nested state to keys joined by dots, and keeps the way to each. Only that tells the `model.` of
    `{"model": {"embed": ...}}` from that of a module that has a child called `model`.
    """
    paths = planner_data if isinstance(planner_data, dict) else {}
    nested = {key: path for key, path in paths.items() if isinstance(path, tuple) and len(path) > 1 and key in tables}
    if not nested:
        return {str(key): key for key in tables}
    names = {key: ".".join(map(str, path[1:])) for key, path in nested.items() if path[0] == _MODEL}
    if not names:
        tops = ", ".join(sorted({str(path[0]) for path in nested.values()}))
        raise CheckpointError(f"{folder} holds no {_MODEL!r}, only {tops}: name the folder the model was saved to")
    if len(set(names.values())) < len(names):
        raise DamagedCheckpointError(f"{folder}: two of its tensors have one name in the module")
    return {name: key for key, name in names.items()}


def _row(folder: Path, key: str, table: Any) -> LeafInfo | None:
    """The entry as a row of a leaf table; None if it is no tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    if isinstance(table, BytesStorageMetadata):
        return None
    try:
        if not isinstance(table, TensorStorageMetadata) or not isinstance(table.properties.dtype, torch.dtype):
            raise ValueError("it is no tensor")
        shape = tuple(table.size)
        check_pieces(shape, [(chunk.offsets, chunk.sizes) for chunk in table.chunks])
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{folder / METADATA}: entry {key!r} cannot be: {error}") from None
    return LeafInfo(key, shape, str(table.properties.dtype).removeprefix("torch."), "whole", "")


def _read(reader: DcpReader, row: LeafInfo, dtype: torch.dtype) -> Tensor:
    target = allocate(torch.empty(row.shape, dtype=dtype, device="meta"), "cpu")
    reader.read(row, target)
    return target.leaf

"""Which leaves of a damaged file are wrong: for the message, so it costs nothing until there is damage."""

from __future__ import annotations

from typing import Any

import torch

from purestep.state.blocks import allocate
from purestep.state.digests import block_digest
from purestep.state.files.dcp_files import DIRECTORY, DcpReader
from purestep.state.files.integrity import Contents
from purestep.state.files.manifest import DamagedCheckpointError, LeafInfo, digest_text
from purestep.state.files.reading import LeafReader
from purestep.state.placement import Block


def damaged_leaves(contents: Contents, file: str) -> list[str]:
    """Names of the leaves that have a part in `file` and are not what was saved, or cannot be read. Not collective."""
    rows = contents.manifest.leaves.values()
    in_dcp = [row for row in rows if row.blocks is None]
    concerned = [row for row in rows if row.blocks and any(block.file == file for block in row.blocks)]
    concerned += _in_dcp_file(contents, in_dcp, file)
    with LeafReader(contents) as reader:
        return [row.name for row in concerned if not _is_whole(row, reader)]


def _in_dcp_file(contents: Contents, rows: list[LeafInfo], file: str) -> list[LeafInfo]:
    if not rows or not file.startswith(f"{DIRECTORY}/") or not file.endswith(".distcp"):
        return []
    try:
        with DcpReader(contents.root) as reader:
            return [row for row in rows if file in reader.files_of(row.name)]
    except DamagedCheckpointError:  # the table is damaged too, and said to be
        return []


def _is_whole(row: LeafInfo, reader: LeafReader) -> bool:
    dtype: Any = getattr(torch, row.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return True  # nothing can be said
    target = allocate(torch.empty(row.shape, dtype=dtype, device="meta"), "cpu")
    try:
        reader.read(row, target)
    except DamagedCheckpointError:
        return False
    digest = block_digest(Block(target.local, (0,) * len(row.shape), row.shape, True, ()))
    return digest_text(digest) == row.digest

"""The tensors of a model in a checkpoint of ours, whatever its format: verified, and read one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from purestep.state.blocks import allocate
from purestep.state.digests import leaf_digests
from purestep.state.exchange.tensor_source import StoredTensor, TensorSource
from purestep.state.files.commit import held_for_reading
from purestep.state.files.dcp_files import DIRECTORY
from purestep.state.files.integrity import Contents, damage, refuse_damage
from purestep.state.files.manifest import MANIFEST, CheckpointError, DamagedCheckpointError, LeafInfo, digest_text
from purestep.state.files.reading import LeafReader
from purestep.state.names import module_name
from purestep.state.workers import Progress


def from_checkpoint(contents: Contents, *, ema: bool, verify: bool, progress: Progress | None = None) -> TensorSource:
    """Params and buffers by module path; see `import_params`.

    Raises:
        CheckpointError: a file that is needed is damaged, or two leaves have one path.
        ValueError: `ema` of a checkpoint without.
    """
    rows = _select(contents, ema)
    with ExitStack() as stack:
        stack.enter_context(held_for_reading(contents.root))  # until it is closed, retention leaves it there
        if verify:
            _verify(contents, rows.values(), progress)
        reader = _Reader(contents, stack.pop_all(), check_digests=verify)
    tensors = {
        name: StoredTensor(name, row.shape, getattr(torch, row.dtype), _where(row), partial(reader.read, row))
        for name, row in rows.items()
    }
    kind = f"{contents.manifest.format} checkpoint of step {contents.manifest.step}"
    return TensorSource(contents.root, kind, tensors, reader.stack)


def _select(contents: Contents, ema: bool) -> dict[str, LeafInfo]:
    """Module path -> row of the buffer, of the param, or of the param's average."""
    leaves = contents.manifest.leaves
    if ema and not any(name.startswith("ema/") for name in leaves):
        raise ValueError(f"checkpoint {contents.root} holds no EMA")
    rows: dict[str, LeafInfo] = {}
    for name, row in leaves.items():
        if not name.startswith(("params/", "buffers/")):
            continue
        path = module_name(name)
        if path in rows:
            raise CheckpointError(f"checkpoint {contents.root}: {path!r} is both in params and in buffers")
        if not isinstance(getattr(torch, row.dtype, None), torch.dtype):
            raise CheckpointError(f"checkpoint {contents.root}: {name!r} is {row.dtype}, which this torch has not")
        averaged = leaves.get("ema/" + name.partition("/")[2]) if ema and name.startswith("params/") else None
        rows[path] = averaged or row
    return rows


def _verify(contents: Contents, rows: Iterable[LeafInfo], progress: Progress | None) -> None:
    """Compare the files that hold these leaves with their sums."""
    sizes = contents.manifest.files
    in_dcp = {name for name in sizes if name.startswith(f"{DIRECTORY}/") and not name.endswith(".safetensors")}
    needed: set[str] = set()
    for row in rows:
        needed |= in_dcp if row.blocks is None else {block.file for block in row.blocks}
    total, done = sum(sizes[name] for name in needed), 0

    def tell(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress("verifying", done, total)

    tell(0)
    refuse_damage(contents, damage(contents, needed, tell))


def _where(row: LeafInfo) -> str:
    return f"{DIRECTORY}/" if row.blocks is None else ", ".join(sorted({block.file for block in row.blocks}))


class _Reader:
    """Reads leaves whole, one at a time."""

    def __init__(self, contents: Contents, stack: ExitStack, *, check_digests: bool) -> None:
        self.stack = stack
        self._contents, self._check_digests = contents, check_digests
        self._leaves = stack.enter_context(LeafReader(contents))

    def read(self, row: LeafInfo) -> Tensor:
        target = allocate(torch.empty(row.shape, dtype=getattr(torch, row.dtype), device="meta"), "cpu")
        self._leaves.read(row, target)
        if self._check_digests:
            self._compare(row, target.leaf)
        return target.leaf

    def _compare(self, row: LeafInfo, leaf: Tensor) -> None:
        if digest_text(leaf_digests({row.name: leaf})[row.name]) != row.digest:
            raise DamagedCheckpointError(
                f"checkpoint {self._contents.root} is damaged: the values of {row.name} (in {_where(row)}) "
                f"differ from their digest in {MANIFEST}"
            )

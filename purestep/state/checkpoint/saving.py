"""Writing a `TrainState` to a checkpoint: whole, or not at all."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import purestep
from purestep.state.checkpoint.opening import fingerprint, naming, together
from purestep.state.checkpoint.tying import Ties, as_ties, refuse_untrue_ties
from purestep.state.collective import from_rank_zero, gather_objects, on_every_rank
from purestep.state.digests import add_up, block_digests, digest_of_table
from purestep.state.files.commit import Replacement
from purestep.state.files.dcp_files import write_dcp
from purestep.state.files.integrity import SUMS, write_file, write_sums
from purestep.state.files.manifest import (
    FORMATS,
    MANIFEST,
    TREES,
    CheckpointError,
    LeafInfo,
    Manifest,
    StoredBlock,
    as_json,
    digest_text,
    dump,
    encode_tree,
)
from purestep.state.files.safetensors_files import Written, check_model_names, write_leaves
from purestep.state.placement import block_of, default_rank, default_world_size, is_dtensor, local_tensor
from purestep.state.train_state import TrainState
from purestep.state.workers import Pool

_ENTRIES = (MANIFEST, SUMS, "model", "state")


@dataclass(frozen=True)
class _Plan:
    """What a save will write, known to be writable."""

    format: str
    leaves: Mapping[str, Tensor]
    extra: Any
    metadata: dict[str, Any]
    ties: Ties


def save(
    path: str | os.PathLike,
    state: TrainState,
    *,
    format: str = "safetensors",
    metadata: Mapping[str, Any] | None = None,
    ties: Iterable[Sequence[str]] = (),
) -> Path:
    """Write a state to the directory `path`: all of it, or nothing.

    The directory appears, or replaces the checkpoint that was there, in one step after everything is on disk. Whatever
    happens before that, an older checkpoint stays as it was. In a process group this is a collective call: every rank
    makes it, and if it fails on one of them, all raise. `path` must be on a file system that all ranks share.

    Args:
        path: the checkpoint's directory. Missing parents are made, links are followed.
        state: what to write; it is not changed.
        format: `safetensors`; `dcp` (torch.distributed.checkpoint); or `safetensors_dcp`: params and buffers as
            safetensors, and everything as DCP. Each can be restored on any topology.
        metadata: your own JSON values, kept in `state.json` (tuples become lists).
        ties: the names of each weight that the module ties, the state's first: `module.ties` of a `PureModule`. They
            are recorded, so that a module which does not tie them can restore the checkpoint.

    Returns:
        The path.

    Raises:
        ValueError: an unknown format, an abstract state, a leaf the format cannot keep, or a tie that the state
            contradicts; names the leaf.
        TypeError: a plain value in `extra` or `metadata` that JSON cannot keep; names it.
        CheckpointError: it could not be written; nothing is left behind.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state)
    ...     restored = ps.restore(path, state)
    >>> restored.digest() == state.digest()
    True
    """
    plan = together(path, lambda: _plan(state, format, metadata, ties))
    _refuse_disagreement(state, plan)
    _finish_on_devices(plan.leaves)
    held = {name: block_of(leaf) for name, leaf in plan.leaves.items()}
    # Rank 0 writes the leaf table: the sums of whole leaves are needed nowhere else.
    held = {name: block for name, block in held.items() if block.shard_groups or default_rank() == 0}
    with Pool(1) as pool, _replacing(path) as root:
        parts = pool.submit(block_digests, held)  # while files are written, which waits for the disk now and then
        files: dict[str, tuple[str, int]] = {}
        blocks: dict[str, list[StoredBlock]] = {}
        gathered: dict[str, int] = {}
        for write in _writers(plan, root):
            for written in on_every_rank(lambda write=write: naming(path, write)):  # type: ignore[misc]
                files.update(written.files)
                gathered.update(written.gathered)
                for name, stored in written.blocks.items():
                    blocks.setdefault(name, []).extend(stored)
        sums = add_up(held, together(path, parts.result))
        _refuse_wrong_wholes(path, sums, gathered)
        from_rank_zero(
            lambda: naming(path, lambda: _write_tables(root, _manifest(state, plan, sums, files, blocks), files))
        )
    return Path(path)


def refuse_unsaveable(
    path: str | os.PathLike,
    state: TrainState,
    *,
    format: str,
    metadata: Mapping[str, Any] | None,
    ties: Iterable[Sequence[str]] = (),
) -> None:
    """Raise what `save` would raise before it writes anything. Collective."""
    _refuse_disagreement(state, together(path, lambda: _plan(state, format, metadata, ties)))


def _plan(state: TrainState, format: str, metadata: Mapping[str, Any] | None, ties: Iterable[Sequence[str]]) -> _Plan:
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
    leaves = dict(sorted(state.leaves().items()))
    for name, leaf in leaves.items():
        _refuse_leaf(name, leaf)
    if format != "dcp":
        check_model_names(leaves)
    # Encoding refuses what a checkpoint cannot keep, in every tree; only `extra` needs it to be built again.
    trees = {tree: encode_tree(tree, getattr(state, tree), lambda value: isinstance(value, Tensor)) for tree in TREES}
    tied = as_ties(ties)
    refuse_untrue_ties(tied, leaves)
    return _Plan(format, leaves, trees["extra"], as_json("metadata", metadata or {}), tied)


def _refuse_leaf(name: str, leaf: Tensor) -> None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    local = local_tensor(leaf)
    if local.is_meta:
        raise ValueError(f"leaf {name!r} is a meta tensor: an abstract state has no values to save")
    if local.layout != torch.strided or is_traceable_wrapper_subclass(local):
        raise ValueError(
            f"leaf {name!r} is a {type(local).__name__} ({local.layout}): a checkpoint keeps dense tensors"
        )
    if is_dtensor(leaf) and leaf.device_mesh.size() != default_world_size():  # type: ignore[attr-defined]
        raise ValueError(
            f"leaf {name!r} lives on a mesh of {leaf.device_mesh.size()} of the {default_world_size()} ranks: "  # type: ignore[attr-defined]
            "a state's mesh must have all of them"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"leaf {name!r}: the name cannot be written as UTF-8; rename it") from None


def _refuse_disagreement(state: TrainState, plan: _Plan) -> None:
    """Raise if the ranks are about to save different things, which would end in a hang or a mixture."""
    rows = {name: [str(leaf.dtype), list(leaf.shape), _placement(leaf)] for name, leaf in plan.leaves.items()}
    said = {
        "step": state.step,
        "key": state.key.hex(),
        "format": plan.format,
        "leaf table": fingerprint(rows),
        "ties": str(plan.ties),
    }
    first, *others = gather_objects(said)
    for rank, other in enumerate(others, start=1):
        wrong = [f"{name} {other[name]} instead of {value}" for name, value in first.items() if other[name] != value]
        if wrong:
            raise ValueError(f"every rank must save the same state, but rank {rank} has {', '.join(wrong)}")


def _refuse_wrong_wholes(path: str | os.PathLike, sums: Mapping[str, int], gathered: Mapping[str, int]) -> None:
    """Raise unless what was put together from shards has the values that the shards have."""
    wrong = sorted(name for name, total in gathered.items() if (sums[name] - total) % 2**64)
    if wrong:
        raise CheckpointError(
            f"checkpoint {path}: what was gathered of {', '.join(map(repr, wrong))} is not what the ranks hold: it "
            "changed during the save, or a transfer between ranks failed"
        )


def _finish_on_devices(leaves: Mapping[str, Tensor]) -> None:
    """Wait for what is still being computed: the threads that read the leaves have streams of their own."""
    for device in {local_tensor(leaf).device for leaf in leaves.values()}:
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()


def _writers(plan: _Plan, root: Path) -> Iterator[Callable[[], Written]]:
    """What each rank has to do, one after the other: each a collective."""
    yield lambda: _make_directories(root)
    if plan.format != "dcp":
        yield lambda: write_leaves(root, plan.leaves, shards=plan.format == "safetensors", ties=plan.ties)
    if plan.format != "safetensors":
        yield lambda: Written(write_dcp(root, plan.leaves))


def _make_directories(root: Path) -> Written:
    if not root.is_dir():
        raise FileNotFoundError(f"{root.parent} is not the directory rank 0 sees; use a file system all ranks share")
    for name in ("model", "state"):
        (root / name).mkdir(exist_ok=True)
    return Written()


def _manifest(
    state: TrainState,
    plan: _Plan,
    sums: Mapping[str, int],
    files: Mapping[str, tuple[str, int]],
    blocks: Mapping[str, list[StoredBlock]],
) -> Manifest:
    def stored(name: str) -> tuple[StoredBlock, ...] | None:
        if name in blocks:
            return tuple(sorted(blocks[name], key=lambda block: (block.offset, block.file)))
        return () if plan.format == "safetensors" else None

    leaves = {
        name: LeafInfo(
            name,
            tuple(leaf.shape),
            str(leaf.dtype).removeprefix("torch."),
            _placement(leaf),
            digest_text(sums[name]),
            stored(name),
        )
        for name, leaf in plan.leaves.items()
    }
    return Manifest(
        format=plan.format,
        step=state.step,
        key=state.key.hex(),
        digest=digest_of_table(state, sums),
        topology={"world_size": default_world_size(), "mesh": _mesh(plan.leaves)},
        versions={"purestep": purestep.__version__, "torch": torch.__version__, "python": platform.python_version()},
        metadata=plan.metadata,
        extra=plan.extra,
        files={name: size for name, (_, size) in files.items()},
        leaves=leaves,
        ties=plan.ties,
    )


def _write_tables(root: Path, manifest: Manifest, files: Mapping[str, tuple[str, int]]) -> None:
    own, _ = write_file(root / MANIFEST, dump(manifest).encode())
    for name in ("model", "state"):
        if not any((root / name).iterdir()):
            (root / name).rmdir()
    write_sums(root, {MANIFEST: own, **{name: digest for name, (digest, _) in files.items()}})


@contextmanager
def _replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A new directory beside `path`, the same on all ranks, that takes its place if the body succeeds on all."""
    replacement: list[Replacement] = []

    def begin() -> Path:
        replacement.append(Replacement(path, _ENTRIES))
        return replacement[0].temporary

    try:
        yield from_rank_zero(lambda: naming(path, begin))
        from_rank_zero(lambda: naming(path, replacement[0].commit))
    except BaseException:
        for mine in replacement:
            mine.abort()
        raise


def _placement(leaf: Tensor) -> str:
    if not is_dtensor(leaf):
        return "whole"
    words = [f"shard({p.dim})" if p.is_shard() else "replicate" for p in leaf.placements]  # type: ignore[attr-defined]
    return " ".join(words)


def _mesh(leaves: Mapping[str, Tensor]) -> dict[str, int] | None:
    for leaf in leaves.values():
        if is_dtensor(leaf):
            mesh = leaf.device_mesh  # type: ignore[attr-defined]
            names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
            return {name: mesh.size(axis) for axis, name in enumerate(names)}
    return None

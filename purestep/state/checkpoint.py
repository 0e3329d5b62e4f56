"""Checkpoints of a `TrainState`: written whole or not at all, read only if they are what was written."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import purestep
from purestep.state.blocks import Target, allocate
from purestep.state.collective import from_rank_zero, gather_objects, on_every_rank
from purestep.state.commit import Replacement
from purestep.state.dcp_files import DcpError, DcpReader, write_dcp
from purestep.state.digests import digest_of_table, leaf_digests
from purestep.state.integrity import SUMS, Contents, damage, open_checkpoint, refuse_damage, write_file, write_sums
from purestep.state.keys import Key
from purestep.state.manifest import (
    FORMATS,
    MANIFEST,
    TREES,
    CheckpointError,
    DamagedCheckpointError,
    LeafInfo,
    Manifest,
    StoredBlock,
    as_json,
    decode_tree,
    dump,
    encode_tree,
    plain_names,
)
from purestep.state.placement import default_rank, default_world_size, is_dtensor, local_tensor
from purestep.state.safetensors_files import SafetensorsReader, Written, check_model_names, write_model, write_shards
from purestep.state.train_state import TrainState, map_leaves, named_leaves

T = TypeVar("T")
_ENTRIES = (MANIFEST, SUMS, "model", "state")


@dataclass(frozen=True)
class _Plan:
    """What a save will write, known to be writable."""

    format: str
    leaves: Mapping[str, Tensor]
    extra: Any
    metadata: dict[str, Any]


def save(
    path: str | os.PathLike,
    state: TrainState,
    *,
    format: str = "safetensors",
    metadata: Mapping[str, Any] | None = None,
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

    Returns:
        The path.

    Raises:
        ValueError: an unknown format, an abstract state, or a leaf the format cannot keep; names the leaf.
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
    plan = _together(path, lambda: _plan(state, format, metadata))
    _refuse_disagreement(state, plan)
    sums = leaf_digests(plan.leaves)
    with _replacing(path) as root:
        files: dict[str, tuple[str, int]] = {}
        blocks: dict[str, list[StoredBlock]] = {}
        for write in _writers(plan, root):
            for written in on_every_rank(lambda write=write: _naming(path, write)):  # type: ignore[misc]
                files.update(written.files)
                for name, stored in written.blocks.items():
                    blocks.setdefault(name, []).extend(stored)
        manifest = _manifest(state, plan, sums, files, blocks)
        from_rank_zero(lambda: _naming(path, lambda: _write_tables(root, manifest, files)))
    return Path(path)


def restore(
    path: str | os.PathLike,
    abstract_state: TrainState,
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
) -> TrainState:
    """Read a checkpoint into a new state of the shapes, dtypes and placements of `abstract_state`.

    The checkpoint must hold exactly the leaves asked for. It may have been saved on any other topology: each rank reads
    the bytes of its own shards. In a process group this is a collective call, and if it fails on one rank, all raise.

    Args:
        path: the checkpoint's directory.
        abstract_state: says what to make: `ps.abstract_state(module, optimizer)`, or any state of the run. Its values,
            step and key are not used, and it is not changed.
        device: where plain (unsharded) leaves go; by default to where the abstract ones are, and to the CPU if those
            are meta tensors. Sharded leaves go to their mesh's device.
        verify: compare every file with `SHA256SUMS` before reading, and every leaf's digest after.

    Returns:
        The state, with step, key and the plain values of `extra` as saved.

    Raises:
        CheckpointError: it is missing, incomplete or damaged (names the files); or it does not fit the abstract state
            (names every missing, unexpected, mis-shaped and differently typed leaf).

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> other = state.replace(params={"w": torch.ones(3), "b": torch.ones(1)})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state)
    ...     try:
    ...         ps.restore(path, other)
    ...     except ps.CheckpointError as error:
    ...         print(error)
    checkpoint ...demo (step 3) does not fit the state asked for:
      missing in the checkpoint: params/b
      shape of params/w: (2,) in the checkpoint, (3,) asked for
    """
    contents = open_together(path, verify=verify)
    targets = _together(path, lambda: _read(contents, abstract_state, device))
    leaves = {name: target.leaf for name, target in targets.items()}
    if verify:
        sums = leaf_digests(leaves)
        _together(path, lambda: _compare(contents, sums))
    manifest = contents.manifest
    return map_leaves(
        lambda name, leaf: leaves.get(name, leaf),
        abstract_state,
        step=manifest.step,
        key=Key.from_hex(manifest.key),
        extra=decode_tree(manifest.extra, leaves.__getitem__),
    )


def open_together(path: str | os.PathLike, *, verify: bool = True) -> Contents:
    """The tables of a checkpoint, and every file checked, each by one of the ranks. All ranks agree or all raise.

    Raises:
        CheckpointError: it is missing, incomplete or damaged; names the files.
    """

    def check() -> Contents:
        contents = open_checkpoint(path)
        if verify:
            files = contents.manifest.files
            by_size = sorted(files, key=lambda name: (-files[name], name))
            problems.extend(damage(contents, by_size[default_rank() :: default_world_size()]))
        return contents

    problems: list[str] = []
    contents = _together(path, check)
    refuse_damage(contents, [line for lines in gather_objects(problems) for line in lines])
    if len({_fingerprint(sums) for sums in gather_objects(contents.sums)}) > 1:
        raise CheckpointError(f"checkpoint {path}: the ranks see different files; use a file system they share")
    return contents


def _plan(state: TrainState, format: str, metadata: Mapping[str, Any] | None) -> _Plan:
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
    leaves = dict(sorted(state.leaves().items()))
    for name, leaf in leaves.items():
        _refuse_leaf(name, leaf)
    if format != "dcp":
        check_model_names(leaves)
    # Encoding refuses what a checkpoint cannot keep, in every tree; only `extra` needs it to be built again.
    trees = {tree: encode_tree(tree, getattr(state, tree), lambda value: isinstance(value, Tensor)) for tree in TREES}
    return _Plan(format, leaves, trees["extra"], as_json("metadata", metadata or {}))


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
    said = {"step": state.step, "key": state.key.hex(), "format": plan.format, "leaf table": _fingerprint(rows)}
    first, *others = gather_objects(said)
    for rank, other in enumerate(others, start=1):
        wrong = [f"{name} {other[name]} instead of {value}" for name, value in first.items() if other[name] != value]
        if wrong:
            raise ValueError(f"every rank must save the same state, but rank {rank} has {', '.join(wrong)}")


def _writers(plan: _Plan, root: Path) -> Iterator[Callable[[], Written]]:
    """What each rank has to do, one after the other: each a collective."""
    yield lambda: _make_directories(root)
    if plan.format != "dcp":
        yield lambda: write_model(root, plan.leaves)
    if plan.format == "safetensors":
        yield lambda: write_shards(root, plan.leaves)
    else:
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
            f"{sums[name] % 2**64:016x}",
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
    )


def _write_tables(root: Path, manifest: Manifest, files: Mapping[str, tuple[str, int]]) -> None:
    own, _ = write_file(root / MANIFEST, dump(manifest).encode())
    for name in ("model", "state"):
        if not any((root / name).iterdir()):
            (root / name).rmdir()
    write_sums(root, {MANIFEST: own, **{name: digest for name, (digest, _) in files.items()}})


def _read(contents: Contents, abstract: TrainState, device: torch.device | str | None) -> dict[str, Target]:
    manifest = contents.manifest
    leaves = abstract.leaves()
    problems = _misfits(manifest, leaves, abstract)
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise CheckpointError(
            f"checkpoint {contents.root} (step {manifest.step}) does not fit the state asked for:{lines}"
        )
    targets = {}
    with ExitStack() as stack:
        files = stack.enter_context(SafetensorsReader(contents.root))
        in_dcp = any(row.blocks is None for row in manifest.leaves.values())
        dcp = stack.enter_context(DcpReader(contents.root)) if in_dcp else None
        for name, leaf in leaves.items():
            row = manifest.leaves[name]
            targets[name] = allocate(leaf, device)
            reader = files if row.blocks is not None else dcp
            assert reader is not None
            reader.read(row, targets[name])
    return targets


def _misfits(manifest: Manifest, leaves: Mapping[str, Tensor], abstract: TrainState) -> list[str]:
    """One line for everything that keeps the checkpoint from being the state asked for."""
    plain = {name for name, value in named_leaves(abstract) if not isinstance(value, Tensor)}
    kept_plain = set(plain_names("extra", manifest.extra))
    lines = [f"missing in the checkpoint: {name}" for name in leaves if name not in manifest.leaves]
    lines += [f"missing in the checkpoint: {name}" for name in sorted(plain - kept_plain)]
    lines += [f"not in the state asked for: {name}" for name in manifest.leaves if name not in leaves]
    for name, leaf in leaves.items():
        if name not in manifest.leaves:
            continue
        row = manifest.leaves[name]
        if row.shape != tuple(leaf.shape):
            lines.append(f"shape of {name}: {row.shape} in the checkpoint, {tuple(leaf.shape)} asked for")
        dtype = str(leaf.dtype).removeprefix("torch.")
        if row.dtype != dtype:
            lines.append(f"dtype of {name}: {row.dtype} in the checkpoint, {dtype} asked for")
    return lines


def _compare(contents: Contents, sums: Mapping[str, int]) -> None:
    rows = contents.manifest.leaves
    wrong = [name for name, value in sums.items() if f"{value % 2**64:016x}" != rows[name].digest]
    if wrong:
        where = {name: sorted({block.file for block in rows[name].blocks or ()}) or ["state/"] for name in wrong}
        lines = [f"{name} (in {', '.join(where[name])})" for name in sorted(wrong)]
        raise DamagedCheckpointError(
            f"checkpoint {contents.root} is damaged: values differ from their digest in {MANIFEST}: " + "; ".join(lines)
        )


@contextmanager
def _replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A new directory beside `path`, the same on all ranks, that takes its place if the body succeeds on all."""
    replacement: list[Replacement] = []

    def begin() -> Path:
        replacement.append(Replacement(path, _ENTRIES))
        return replacement[0].temporary

    try:
        yield from_rank_zero(lambda: _naming(path, begin))
        from_rank_zero(lambda: _naming(path, replacement[0].commit))
    except BaseException:
        for mine in replacement:
            mine.abort()
        raise


def _together(path: str | os.PathLike, function: Callable[[], T]) -> T:
    """This rank's `function()`; if it fails on any rank, all raise. What it returns is not sent anywhere."""
    results: list[T] = []
    on_every_rank(lambda: _naming(path, lambda: results.append(function())))
    return results[0]


def _naming(path: str | os.PathLike, function: Callable[[], T]) -> T:
    """`function()`, an error of the system becoming a `CheckpointError` that says where and on which rank."""
    try:
        return function()
    except DcpError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    except OSError as error:
        rank = f"rank {default_rank()}: " if default_world_size() > 1 else ""
        raise CheckpointError(f"checkpoint {path}: {rank}{error}") from error


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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

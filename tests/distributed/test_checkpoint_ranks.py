"""Checkpoints saved and restored by several ranks: any topology to any other, and failures that all ranks share."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import purestep.state.files.safetensors_files as safetensors_files
from purestep.state import TrainState, key
from purestep.state.blocks import flat_bytes
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.files.integrity import describe, verify
from purestep.state.files.manifest import CheckpointError
from purestep.state.placement import local_tensor
from tests.ranks import run_ranks

FORMATS = ("safetensors", "dcp", "safetensors_dcp")


def _values() -> TrainState:
    """The reference: uneven rows (5 over 2), one row (an empty shard), both dims sharded, moments, plain values."""
    torch.manual_seed(0)
    params = {
        "a.weight": torch.randn(5, 3),
        "a.bias": torch.randn(5),
        "row": torch.randn(1, 3),
        "grid": torch.randn(5, 7),
        "columns": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "fp8": torch.randn(5, 2).to(torch.float8_e4m3fn),
    }
    moments = {slot: {name: torch.rand(p.shape) for name, p in params.items()} for slot in ("exp_avg", "exp_avg_sq")}
    return TrainState(
        step=7,
        params=params,
        buffers={"mean": torch.randn(3), "count": torch.tensor(4)},
        opt_state={"adamw": moments},
        key=key(5).fold_in(1),
        ema={name: p.bfloat16() for name, p in params.items()},
        extra={"scale": torch.tensor(2.0), "note": ("x", 1, None)},
    )


def _on(mesh: Any, *, meta: bool = False) -> TrainState:
    """The reference state, trainable leaves sharded by rows (and one of `extra` by columns); plain without a mesh."""
    state = _values()
    if mesh is not None:
        ahead = [Replicate()] * (mesh.ndim - 1)
        grid = [Shard(0), Shard(1)] if mesh.ndim == 2 else [Shard(0)]

        def shard(name: str, tree: Any) -> Any:
            if isinstance(tree, torch.Tensor):
                placements = {"grid": grid, "columns": [*ahead, Shard(1)]}.get(name, [*ahead, Shard(0)])
                return distribute_tensor(tree, mesh, placements, src_data_rank=None)
            return {name: shard(name, value) for name, value in tree.items()}

        trees = {tree: shard(tree, getattr(state, tree)) for tree in ("params", "opt_state", "ema")}
        state = state.replace(**trees)
    if meta:
        state = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda leaf: torch.zeros_like(leaf, device="meta"), state
        )
    return state


def _mesh(*shape: int) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def _assert_is_reference(restored: TrainState, mesh: Any) -> None:
    """Each rank's part equals the part that torch itself cut out of the reference, bit for bit."""
    reference, expected = _values(), _on(mesh).leaves()
    assert (restored.step, restored.key, restored.extra["note"]) == (
        reference.step,
        reference.key,
        reference.extra["note"],
    )
    assert list(restored.leaves()) == list(expected)
    for name, leaf in restored.leaves().items():
        ours, theirs = local_tensor(leaf), local_tensor(expected[name])
        assert type(leaf) is type(expected[name])
        assert (leaf.shape, ours.dtype, ours.shape) == (expected[name].shape, theirs.dtype, theirs.shape), name
        assert torch.equal(flat_bytes(ours), flat_bytes(theirs)), name
        if isinstance(leaf, DTensor):
            assert leaf.placements == expected[name].placements
            rows = -(-leaf.shape[0] // leaf.device_mesh.size(-1))
            if leaf.placements[-1] == Shard(0) and rows > ours.shape[0]:  # the storage that FSDP2 computes on is there
                assert ours.untyped_storage().nbytes() == rows * leaf.shape[1:].numel() * leaf.element_size()
    assert restored.digest() == reference.digest()


def _save_all(directory: str, meshes: dict[str, Callable[[], Any]], check: tuple[str, ...], file_bytes: int) -> None:
    """In one process group: save on every mesh in every format, then restore all named checkpoints on every mesh."""
    dist.init_process_group("gloo")
    safetensors_files.MAX_FILE_BYTES = safetensors_files.SHARD_FILE_BYTES = file_bytes
    built = {name: make() for name, make in meshes.items()}
    for name, mesh in built.items():
        for format in FORMATS:
            save(f"{directory}/{name}-{format}", _on(mesh), format=format)
    for mesh in built.values():
        abstract = _on(mesh, meta=True)
        for name in check:
            for format in FORMATS:
                _assert_is_reference(restore(f"{directory}/{name}-{format}", abstract), mesh)


def _two(directory: str, check: tuple[str, ...]) -> None:
    _save_all(directory, {"ddp": lambda: None, "fsdp2": lambda: _mesh(2)}, check, 70)


def _four(directory: str, check: tuple[str, ...]) -> None:
    _save_all(directory, {"hsdp": lambda: _mesh(2, 2), "fsdp4": lambda: _mesh(4)}, check, 70)


def test_every_topology_restores_every_other_bit_for_bit(tmp_path):
    for format in FORMATS:
        save(tmp_path / f"local-{format}", _values(), format=format)
    run_ranks(_two, 2, str(tmp_path), ("local", "ddp", "fsdp2"))
    run_ranks(_four, 4, str(tmp_path), ("local", "ddp", "fsdp2", "hsdp", "fsdp4"))
    run_ranks(_two, 2, str(tmp_path), ("hsdp", "fsdp4"))
    for path in sorted(tmp_path.iterdir()):
        _assert_is_reference(restore(path, _values()), None)
        assert verify(path).digest == _values().digest()
    assert describe(tmp_path / "hsdp-dcp").topology == {"world_size": 4, "mesh": {"replicate": 2, "shard": 2}}
    assert describe(tmp_path / "hsdp-dcp").leaves["params/a.bias"].placement == "replicate shard(0)"


def test_model_files_of_a_sharded_run_are_whole_and_shards_are_written_once(tmp_path):
    run_ranks(_two, 2, str(tmp_path), ())
    from safetensors.torch import load_file

    reference = _values()
    files = sorted((tmp_path / "fsdp2-safetensors/model").glob("*.safetensors"))
    assert len(files) > 2, files
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = {**reference.params, **reference.buffers}
    assert sorted(loaded) == sorted(expected)
    assert all(torch.equal(flat_bytes(loaded[name]), flat_bytes(value)) for name, value in expected.items())
    stored = sum(
        tensor.numel() for f in (tmp_path / "fsdp2-safetensors/state").iterdir() for tensor in load_file(f).values()
    )
    others = [leaf for name, leaf in reference.leaves().items() if not name.startswith(("params/", "buffers/"))]
    assert stored == sum(leaf.numel() for leaf in others)
    # A DDP run's second rank has nothing of its own to write.
    names = [path.name for path in (tmp_path / "ddp-safetensors/state").iterdir()]
    assert len(names) > 2
    assert all(name.startswith("shard-00001-of-00002-part-") for name in names), names


def _message(function: Callable[[], Any]) -> str:
    """What `function` raises, which must be the same on every rank."""
    try:
        function()
    except (CheckpointError, ValueError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing raised"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    assert len(set(everyone)) == 1, everyone
    return said


def _with_small_files(limit: int, ranks: tuple[int, ...], function: Callable[[], Any]) -> str:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    began = time.monotonic()
    try:
        return _message(function)
    finally:
        assert time.monotonic() - began < 15, "ranks that have nothing to report must not wait for a timeout"
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _failures(directory: str) -> dict[str, str]:
    dist.init_process_group("gloo")
    safetensors_files.MAX_FILE_BYTES = 70
    state, rank = _on(_mesh(2)), dist.get_rank()
    said = {}
    for format in FORMATS:
        path = f"{directory}/{format}"
        save(path, state, format=format)
        newer = state.replace(step=8)
        for who, ranks in (("rank 1", (1,)), ("both", (0, 1))):
            said[f"{format}, {who}"] = _with_small_files(
                60, ranks, lambda p=path, f=format, s=newer: save(p, s, format=f)
            )
            assert sorted(os.listdir(directory)) == sorted(FORMATS[: FORMATS.index(format) + 1])
            assert restore(path, state).step == 7
    said["rank 1 cannot write on"] = _message(lambda: _fail_in_the_middle(f"{directory}/safetensors", state))
    assert restore(f"{directory}/safetensors", state).step == 7
    save(f"{directory}/dcp", state.replace(step=8), format="dcp")
    assert restore(f"{directory}/dcp", state).step == 8
    path = f"{directory}/safetensors"
    said["changed"] = _message(lambda: _save_while_a_leaf_changes(f"{directory}/safetensors", state))
    assert restore(f"{directory}/safetensors", state).step == 7
    said["steps differ"] = _message(lambda: save(path, state.replace(step=7 + rank)))
    said["half a mesh"] = _message(lambda: save(path, _on(dist.DeviceMesh("cpu", [0], mesh_dim_names=("shard",)))))
    said["bad metadata on rank 1"] = _message(lambda: save(path, state, metadata={"x": {1}} if rank == 1 else {}))
    other = state.replace(params={**state.params, "a.bias": torch.zeros(4), "more": torch.zeros(2)})
    said["misfit"] = _message(lambda: restore(path, other))
    said["missing on rank 1"] = _message(lambda: restore(path + "-gone" * rank, state))
    with open(f"{path}/state/shard-00002-of-00002.safetensors", "r+b") as file:
        dist.barrier()
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    dist.barrier()
    said["damage"] = _message(lambda: restore(path, state))
    said["digest"] = _message(lambda: _restore_without_sums(path))
    return said


def _fail_in_the_middle(path: str, state: TrainState) -> None:
    """Save while rank 1 fails in its first write, with gathers to come that rank 0 waits in."""
    write = safetensors_files.SafetensorsWriter._append_tensors

    def full(writer: Any, tensors: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        write(writer, tensors)

    safetensors_files.SafetensorsWriter._append_tensors = full
    try:
        save(path, state.replace(step=8))
    finally:
        safetensors_files.SafetensorsWriter._append_tensors = write


def _save_while_a_leaf_changes(path: str, state: TrainState) -> None:
    """Save while a shard changes between being digested and being gathered."""
    import purestep.state.checkpoint.saving as checkpoint

    digests = checkpoint.block_digests

    def digest_then_change(blocks: Any) -> Any:
        sums = digests(blocks)
        return {name: value + (name == "params/a.weight" and dist.get_rank() == 1) for name, value in sums.items()}

    checkpoint.block_digests = digest_then_change
    try:
        save(path, state)
    finally:
        checkpoint.block_digests = digests


def _restore_without_sums(path: str) -> None:
    """Restore whole leaves from shards while no rank compares files with their sums: only leaf digests can tell."""
    import purestep.state.files.streaming as streaming

    share = streaming._share
    streaming._share = lambda contents: set()
    try:
        restore(path, _values())
    finally:
        streaming._share = share


def test_a_failure_on_one_rank_is_the_same_failure_on_all_and_leaves_the_old_checkpoint(tmp_path):
    said = run_ranks(_failures, 2, str(tmp_path))[0]
    for format in FORMATS:
        for who in ("rank 1", "both"):
            assert said[f"{format}, {who}"].startswith("CheckpointError"), said
            assert "File too large" in said[f"{format}, {who}"], said
        assert "rank 1" in said[f"{format}, rank 1"], said
    assert "rank 1: [Errno 28] No space left" in said["rank 1 cannot write on"], said
    assert "what was gathered of 'params/a.weight' is not what the ranks hold" in said["changed"], said
    assert said["steps differ"].startswith("ValueError: every rank must save the same state, but rank 1 has step 8"), (
        said
    )
    assert "lives on a mesh of 1 of the 2 ranks" in said["half a mesh"], said
    assert "metadata['x']" in said["bad metadata on rank 1"], said
    assert "missing in the checkpoint: params/more" in said["misfit"], said
    assert "shape of params/a.bias: (5,) in the checkpoint, (4,) asked for" in said["misfit"], said
    assert "no checkpoint at" in said["missing on rank 1"], said
    assert "state/shard-00002-of-00002.safetensors does not match its sum" in said["damage"], said
    assert "values differ from their digest" in said["digest"], said
    assert "shard-00002" in said["digest"], said


def _latest(directory: str) -> tuple[list[int], list[str], int]:
    dist.init_process_group("gloo")
    state, rank = _on(_mesh(2)), dist.get_rank()
    checkpoints = Checkpoints(directory)
    for step in (1, 2, 3, 4):
        checkpoints.save(state.replace(step=step))
    names = [checkpoints.latest().name]
    if rank == 1:  # damage that only the rank whose share it is will look at, and a checkpoint rank 1 does not have
        (Path(directory) / "step-00000004/state/shard-00002-of-00002.safetensors").write_bytes(b"")
        shutil.copytree(Path(directory) / "step-00000002", Path(directory) / "of-rank-1/step-00000002")
        checkpoints = Checkpoints(Path(directory) / "of-rank-1")
    dist.barrier()
    names.append(checkpoints.latest().name)
    return checkpoints.steps(), names, checkpoints.restore_latest(state).step


def test_ranks_agree_on_the_latest_checkpoint(tmp_path, capfd):
    results = run_ranks(_latest, 2, str(tmp_path))
    assert results == [([1, 2, 3, 4], ["step-00000004", "step-00000002"], 2)] * 2


def test_a_mesh_in_another_rank_order_is_gathered_right(tmp_path):
    run_ranks(_reversed_mesh, 2, str(tmp_path))
    _assert_is_reference(restore(tmp_path / "x", _values()), None)


def _reversed_mesh(directory: str) -> None:
    dist.init_process_group("gloo")
    mesh = dist.DeviceMesh("cpu", [1, 0], mesh_dim_names=("shard",))
    save(f"{directory}/x", _on(mesh))
    _assert_is_reference(restore(f"{directory}/x", _on(mesh, meta=True)), mesh)

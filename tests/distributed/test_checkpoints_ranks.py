"""`Checkpoints` on several ranks: saves in the background beside training's collectives, agreement, and kills."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import purestep as ps
from purestep.state.checkpoint import checkpoints as module
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.run_lock import RunLock
from purestep.state.files.manifest import CheckpointError
from purestep.state.train_state import map_leaves
from tests.dying import die_at
from tests.ranks import RanksFailed, run_on, run_ranks
from tests.state.test_checkpoints_killed import LOSSES, STEPS, check, state_of
from tests.toys import Net, error_of, net_batch, net_loss, net_optimizer, rank_slice, runtime_on


def _sharded(state: ps.TrainState, mesh: Any) -> ps.TrainState:
    return map_leaves(lambda name, leaf: distribute_tensor(leaf, mesh, [Shard(0)], src_data_rank=None), state)


def _train_while_saving(topology: tuple[int, int], directory: str, format: str) -> list[str]:
    """Digests of what was to be saved, and of the state that training went on to."""
    gate, save = threading.Event(), module.save

    def slow(*args: Any, **options: Any) -> Path:
        assert gate.wait(60)
        return save(*args, **options)

    module.save = slow
    with runtime_on(topology) as runtime:
        net = ps.shard(Net(batchnorm=True), runtime=runtime)
        step = ps.train_step(net, net_loss, net_optimizer(), donate=True)
        state = ps.init(net, net_optimizer(), ps.key(0))
        state, _ = step(state, rank_slice(runtime, net_batch(0)))
        digests = [state.digest()]
        ps.save(f"{directory}/sync", state, format=format)
        with Checkpoints(f"{directory}/async", format=format, async_save=True, keep_last=1) as checkpoints:
            for round_ in range(2):
                checkpoints.save(state.replace(step=round_), check_replicas=True)
                for i in range(1, 4):  # collectives here, and soon those of the writer in its thread
                    state, _ = step(state, rank_slice(runtime, net_batch(i)))
                assert checkpoints.steps() == [0][:round_]
                gate.set()
                for i in range(4, 9):
                    state, _ = step(state, rank_slice(runtime, net_batch(i)))
                checkpoints.wait()
                assert checkpoints.steps() == [round_]
                gate.clear()
                if not round_:
                    first = checkpoints.restore_latest(ps.abstract_state(net, net_optimizer()))
                    digests.append(first.replace(step=1).digest())
        return [*digests, state.digest()]


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("topology", [(1, 2), (2, 1)])
def test_training_goes_on_beside_the_writers(tmp_path, topology, format):
    first, second = run_on(topology, _train_while_saving, str(tmp_path), format)
    assert first == second
    saved, restored, trained = first
    assert saved == restored != trained
    sync, async_ = ps.describe(tmp_path / "sync"), ps.describe(tmp_path / "async/step-00000001")
    assert sync.topology == async_.topology
    places = {name: (leaf.shape, leaf.dtype, leaf.placement, leaf.blocks is None) for name, leaf in sync.leaves.items()}
    assert places == {
        name: (leaf.shape, leaf.dtype, leaf.placement, leaf.blocks is None) for name, leaf in async_.leaves.items()
    }


def test_a_hybrid_mesh_has_its_twin(tmp_path):
    first, *others = run_on((2, 2), _train_while_saving, str(tmp_path), "safetensors")
    assert others == [first] * 3
    assert first[0] == first[1]
    assert ps.describe(tmp_path / "async/step-00000001").topology["mesh"] == {"dp_replicate": 2, "dp_shard": 2}


def _leave_early(topology: tuple[int, int], directory: str) -> None:
    save = module.save

    def slow(*args: Any, **options: Any) -> Path:
        threading.Event().wait(0.5)
        return save(*args, **options)

    module.save = slow
    with runtime_on(topology) as runtime:
        net = ps.shard(Net(), runtime=runtime)
        checkpoints = Checkpoints(directory, async_save=True)
        checkpoints.save(ps.init(net, net_optimizer(), ps.key(0)))
    checkpoints.close()


def test_a_runtime_ends_after_the_save_in_flight(tmp_path):
    run_on((1, 2), _leave_early, str(tmp_path))
    assert ps.verify(tmp_path / "step-00000000").step == 0
    assert os.listdir(tmp_path) == ["step-00000000"]


def _fail(directory: str) -> dict[str, list]:
    dist.init_process_group("gloo")
    mesh, rank = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), dist.get_rank()
    state = _sharded(state_of(1, 0), mesh)
    said = {}
    checkpoints = Checkpoints(f"{directory}/run", async_save=True)
    checkpoints.save(state)
    checkpoints.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, ask in {
        "wait": checkpoints.wait,
        "save": lambda: checkpoints.save(state.replace(step=3)),
        "close": checkpoints.close,
    }.items():
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        checkpoints.save(state.replace(step=2))
        checkpoints._background._thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said[name] = error_of(ask)
    checkpoints = Checkpoints(f"{directory}/run", async_save=True)
    assert checkpoints.restore_latest(state).step == 1
    moved = state.replace(params={name: leaf * (1 + rank) for name, leaf in state_of(1, 1).params.items()})
    checkpoints.save(moved.replace(step=2), check_replicas=True)
    said["replicas"] = error_of(checkpoints.wait)
    said["metrics of rank 1"] = error_of(checkpoints.save, state, metrics={"x": "y" if rank else 1})
    said["leaf of rank 1"] = error_of(checkpoints.save, state.replace(step=2 + rank))
    checkpoints.save(state.replace(step=2))
    checkpoints.close()
    dist.barrier()  # rank 0 unlocks the directory
    said["left"] = sorted(os.listdir(f"{directory}/run"))
    with contextlib.ExitStack() as stack:  # another run, as rank 0 sees it
        if rank == 0:
            real, module.RunLock = module.RunLock, _refuse
            stack.callback(setattr, module, "RunLock", real)
        said["lock"] = error_of(lambda: Checkpoints(f"{directory}/run", lock=True))
    return said


def _refuse(directory: Path) -> RunLock:
    raise CheckpointError(f"{directory} is in use by another run")


def test_a_failure_on_one_rank_is_told_to_all(tmp_path):
    first, second = run_ranks(_fail, 2, str(tmp_path))
    assert first == second
    for name in ("wait", "save", "close"):
        kind, text = first[name]
        assert kind == "CheckpointError"
        assert "step-00000002: rank 1: [Errno 27] File too large" in text, first
    assert "step 2: replicas differ between ranks in 'params/a', 'params/b'" in first["replicas"][1]
    assert "metric 'x' must be a number" in first["metrics of rank 1"][1]
    assert "rank 1 has step 3 instead of 2" in first["leaf of rank 1"][1]
    assert first["left"] == ["step-00000001", "step-00000002"]
    assert first["lock"] == ("CheckpointError", f"{tmp_path}/run is in use by another run")


def _die_on(directory: str, async_save: bool, rank: int, moment: int) -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    if dist.get_rank() == rank:
        die_at(moment)
    with Checkpoints(f"{directory}/run", async_save=async_save, keep_last=2) as checkpoints:
        for i, step in enumerate(STEPS):
            checkpoints.save(_sharded(state_of(step, i), mesh), metrics={"loss": LOSSES[i]})
            Path(directory, f"saved-{i if async_save else i + 1}").touch()


@pytest.mark.parametrize(("async_save", "rank"), [(False, 0), (True, 0), (True, 1)])
def test_ranks_killed(tmp_path, async_save, rank):
    found = []
    for moment in {0: (4, 33, 61), 1: (0, 5)}[rank]:
        directory = tmp_path / str(moment)
        (directory / "run").mkdir(parents=True)
        with pytest.raises(RanksFailed, match="died without a word"):
            run_ranks(_die_on, 2, str(directory), async_save, rank, moment)
        num_saved = max((int(path.name.split("-")[1]) for path in directory.glob("saved-*")), default=0)
        found.append(check(str(directory / "run"), num_saved))
    assert found == sorted(found)
    assert found[0] < found[-1]


def _see_differently(directory: str) -> dict[str, Any]:
    """What the ranks make of a directory that rank 1 sees otherwise: a listing of a network file system grown old."""
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    said: dict[str, Any] = {}
    with Checkpoints(directory, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(_sharded(state_of(step, step), mesh))
    seen: dict[str, list[str]] = {
        "a leftover": [".step-00000003.tmp-0-0", "step-00000001", "step-00000002"],
        "an unfinished step": ["step-00000001", "step-00000002", "step-00000009"],
        "an older listing": ["step-00000001"],
        "nothing": [],
    }
    with contextlib.ExitStack() as stack:
        for i, (name, entries) in enumerate(seen.items()):
            if dist.get_rank() == 1:
                _list_instead(stack, Path(directory), entries)
            checkpoints = Checkpoints(directory, keep_last=2)
            steps, latest = checkpoints.steps(), checkpoints.latest()
            found = checkpoints.restore_latest(_sharded(state_of(0, 0), mesh))
            with checkpoints:
                checkpoints.save(_sharded(state_of(3 + i, 3 + i), mesh))
            said[name] = (steps, latest.name, found.step, found.digest() == state_of(found.step, found.step).digest())
    return said


def _list_instead(stack: contextlib.ExitStack, directory: Path, entries: list[str]) -> None:
    """Let every way to list `directory` give `entries` in this process."""
    listdir, iterdir = os.listdir, Path.iterdir

    def listed(path: Any = ".") -> list[str]:
        return list(entries) if Path(path) == directory else listdir(path)

    def iterated(path: Path) -> Any:
        return iter([path / name for name in entries]) if path == directory else iterdir(path)

    for owner, name, new in ((os, "listdir", listed), (Path, "iterdir", iterated)):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)


def test_what_one_rank_alone_sees_decides_nothing(tmp_path):
    first, second = run_ranks(_see_differently, 2, str(tmp_path / "run"))
    assert first == second
    newest = [2, 3, 4, 5]
    assert list(first.values()) == [([step - 1, step], f"step-{step:08d}", step, True) for step in newest]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000005", "step-00000006"]

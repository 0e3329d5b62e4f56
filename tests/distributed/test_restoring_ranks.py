"""Restoring and comparing on several ranks: misfits, casts, parts, ties and differences of sharded states."""

from __future__ import annotations

import ctypes
import gc
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import purestep as ps
from purestep.state.blocks import flat_bytes, whole_tensor
from purestep.state.files.manifest import FORMATS
from purestep.state.placement import local_tensor
from tests.distributed.test_checkpoint_ranks import _mesh, _message, _on, _values
from tests.ranks import run_on, run_ranks
from tests.state.test_checkpoint import awkward_leaves
from tests.toys import runtime_on


def whole(leaf: torch.Tensor) -> torch.Tensor:
    return whole_tensor(leaf) if isinstance(leaf, DTensor) else leaf


def _same(a: ps.TrainState, b: ps.TrainState) -> bool:
    """Equal in every bit of every rank's blocks."""
    ours, theirs = a.leaves(), b.leaves()
    return list(ours) == list(theirs) and all(
        type(ours[n]) is type(theirs[n])
        and ours[n].dtype == theirs[n].dtype
        and torch.equal(flat_bytes(local_tensor(ours[n])), flat_bytes(local_tensor(theirs[n])))
        for n in ours
    )


def _strictness(directory: str, shape: tuple[int, ...]) -> dict[str, str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = _mesh(*shape) if shape else None
    state, abstract = _on(mesh), _on(mesh, meta=True)
    said = {}
    for format in FORMATS:
        path = Path(directory, format)
        # B16: one error on every rank, which names everything
        more = {**abstract.params, "c": torch.zeros(1)}
        less = {name: leaf for name, leaf in abstract.params.items() if name != "a.bias"}
        said[f"{format} more"] = _message(lambda p=path, x=more: ps.restore(p, abstract.replace(params=x)))
        said[f"{format} less"] = _message(
            lambda p=path, x=less: ps.restore(p, abstract.replace(params=x, opt_state={}))
        )
        # casts: each rank its shard, uneven and empty ones too
        half = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(torch.float64), abstract.params)
        restored, report = ps.restore(path, abstract.replace(params=half), strict="exact_but_dtype", with_report=True)
        assert report.cast.keys() == {f"params/{name}" for name in state.params}
        expected = {name: whole(leaf).to(torch.float64) for name, leaf in state.params.items()}
        assert all(torch.equal(whole(restored.params[name]), leaf) for name, leaf in expected.items())
        assert _same(restored.replace(params=state.params), state)
        # parts: what is kept is this rank's own copy
        zeros = state.replace(step=0, ema={name: torch.zeros_like(leaf) for name, leaf in state.ema.items()})
        part = ps.restore(path, zeros, strict="partial", include=("params/*", "opt_state/*"))
        assert _same(part, zeros)
        assert part.ema["grid"] is not zeros.ema["grid"]
        # other names
        named = abstract.replace(
            params={f"net.{name}": leaf for name, leaf in abstract.params.items()},
            ema={f"net.{name}": leaf for name, leaf in abstract.ema.items()},
            buffers={f"net.{name}": leaf for name, leaf in abstract.buffers.items()},
            opt_state={
                "opt": {s: {f"net.{n}": x for n, x in slot.items()} for s, slot in abstract.opt_state["adamw"].items()}
            },
        )
        renamed = ps.restore(path, named, rename={"*": "net.*", "opt_state/adamw/*": "opt_state/opt/*"})
        assert torch.equal(
            whole(renamed.opt_state["opt"]["exp_avg"]["net.grid"]), whole(state.opt_state["adamw"]["exp_avg"]["grid"])
        )
    path = Path(directory, "safetensors")
    said["differ"] = _message(lambda: ps.restore(path, abstract, rename={"a.*": f"a{rank}.*"}))
    fewer = abstract.replace(ema=None) if rank else abstract
    said["leaves differ"] = _message(lambda: ps.restore(path, fewer))
    said["bad on one"] = _message(lambda: ps.restore(path, abstract, strict="partial" if rank == 0 else "part"))
    meta_on_one = (abstract if rank == 1 else state).replace(ema={})
    said["meta on one"] = _message(lambda: ps.restore(path, meta_on_one, strict="partial", include=("params/*",)))
    # A value out of range in one rank's shard alone
    huge = state.params["grid"].clone()
    if rank == dist.get_world_size() - 1:
        local_tensor(huge)[-1, -1] = 1e30
    ps.save(f"{directory}/huge", state.replace(params={"grid": huge}))
    asked = abstract.replace(params={"grid": abstract.params["grid"].to(torch.float16)})
    if mesh is not None:
        said["range"] = _message(lambda: ps.restore(f"{directory}/huge", asked, strict="exact_but_dtype"))
    return said


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)], ids=["ddp", "fsdp2", "hsdp"])
def test_strictness_is_the_same_on_every_rank(tmp_path, shape):
    for format in FORMATS:
        ps.save(tmp_path / format, _values(), format=format)
    said = run_ranks(_strictness, math.prod(shape) if shape else 2, str(tmp_path), shape)[0]
    for format in FORMATS:
        assert "missing in the checkpoint: params/c" in said[f"{format} more"], said
        assert said[f"{format} less"].count("not in the state asked for: opt_state/adamw/") == 12, said
        assert "not in the state asked for: params/a.bias" in said[f"{format} less"], said
    assert "ValueError: every rank must restore the same, but options of rank 1 are not" in said["differ"], said
    assert "but leaves of rank 1 are not those of rank 0" in said["leaves differ"], said
    assert "strict must be one of" in said["bad on one"], said
    assert "a meta tensor in the state given: buffers/mean" in said["meta on one"], said
    if shape:
        assert "leaf params/grid: it has values that torch.float16 cannot hold" in said["range"], said


# --- B19 -------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    sharding_spec = ps.ShardingSpec()

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def _tied(topology: tuple[int, int], directory: str) -> str:
    with runtime_on(topology) as runtime:
        module = ps.shard(Tied(), runtime=runtime)
        optimizer = ps.adamw(0.1)
        step = ps.train_step(module, lambda model, x, key: ps.Mean(model(x).square().sum(), x.numel()), optimizer)
        state, _ = step(ps.init(module, optimizer, ps.key(0)), torch.tensor([[0, 1], [1, 2]]))
        assert list(state.params) == ["embed.weight"]
        for format in FORMATS:
            ps.save(f"{directory}/{format}", state, format=format, ties=module.ties)
            restored = ps.restore(f"{directory}/{format}", ps.abstract_state(module, optimizer))
            assert _same(restored, state)
            x = torch.tensor([[2, 0], [1, 1]])
            assert step(restored, x)[0].digest() == step(state, x)[0].digest()
        untied = ps.shard(Untied(), runtime=runtime)
        for format in FORMATS:
            both = ps.restore(f"{directory}/{format}", ps.abstract_state(untied, optimizer))
            assert _same(both.replace(params=_tie(both.params), opt_state={"adamw": _tie_all(both)}), state)
            ps.save(f"{directory}/{format}-untied", both, format=format)
            again = ps.restore(f"{directory}/{format}-untied", ps.abstract_state(module, optimizer), ties=module.ties)
            assert _same(again, state)
        return state.digest()


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__(tie=False)


def _tie(by_path: Any) -> dict[str, torch.Tensor]:
    assert torch.equal(whole(by_path["embed.weight"]), whole(by_path["head.weight"]))
    return {"embed.weight": by_path["embed.weight"]}


def _tie_all(state: ps.TrainState) -> dict[str, dict[str, torch.Tensor]]:
    return {slot: _tie(by_path) for slot, by_path in state.opt_state["adamw"].items()}


@pytest.mark.parametrize("topology", [(1, 1), (1, 2)], ids=["local", "fsdp2"])
def test_b19_a_tied_weight_of_a_run_loads_everywhere(tmp_path, topology):
    digest = run_on(topology, _tied, str(tmp_path))[0]
    for format in FORMATS:
        module = ps.shard(Tied())
        state = ps.restore(tmp_path / format, ps.abstract_state(module, ps.adamw(0.1)))
        assert state.digest() == digest
        if format != "dcp":
            file = load_file(tmp_path / format / "model/model.safetensors")
            assert list(file) == ["embed.weight"]
            assert torch.equal(file["embed.weight"], state.params["embed.weight"])


def _awkward(directory: str) -> None:
    """Every layout and dtype of B19: sharded by rows where there are rows, plain otherwise."""
    dist.init_process_group("gloo")
    mesh = _mesh(2)
    torch.manual_seed(0)
    plain = awkward_leaves()
    leaves = {
        name: distribute_tensor(x.resolve_conj().resolve_neg().contiguous(), mesh, [Shard(0)], src_data_rank=None)
        for name, x in plain.items()
        if x.ndim
    }
    column = distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(1)], src_data_rank=None)
    state = ps.TrainState(
        step=1,
        params=leaves,
        buffers={f"plain.{name}": x for name, x in plain.items()},
        opt_state={"o": {"s": {"column": column}}},
        key=ps.key(0),
    )
    before = {n: (local_tensor(x).stride(), local_tensor(x).data_ptr()) for n, x in state.leaves().items()}
    for format in FORMATS:
        ps.save(f"{directory}/{format}", state, format=format)
        assert _same(ps.restore(f"{directory}/{format}", state), state)
    assert before == {n: (local_tensor(x).stride(), local_tensor(x).data_ptr()) for n, x in state.leaves().items()}


def test_b19_awkward_tensors_of_a_sharded_run_survive_by_value(tmp_path):
    run_ranks(_awkward, 2, str(tmp_path))
    torch.manual_seed(0)
    plain = awkward_leaves()
    file = load_file(tmp_path / "safetensors/model/model.safetensors")
    for name, x in plain.items():
        for loaded in (file[f"plain.{name}"], *([file[name]] if x.ndim else [])):
            assert torch.equal(flat_bytes(loaded), flat_bytes(x)), name


# --- differences -----------------------------------------------------------------------------------------------------


def _differences(directory: str) -> list[Any]:
    dist.init_process_group("gloo")
    mesh, flat = _mesh(2, 2), _mesh(4)
    grid = _values().params["grid"]
    grid[0, 0] += 1
    grid[4, 6] -= 2
    found = []
    for one in (None, mesh, flat):
        state = _on(one)
        assert ps.diff(f"{directory}/x", state).equal
        assert ps.diff(state, f"{directory}/x", values=True).equal
        for other in (None, mesh, flat):
            placements = {None: None, mesh: [Shard(1), Shard(0)], flat: [Shard(1)]}[other]
            changed = grid if other is None else distribute_tensor(grid, other, placements, src_data_rank=None)
            also = _on(other).replace(step=8)
            also = also.replace(params={**also.params, "grid": changed})
            found.append(ps.diff(state, also, values=True))
            found.append(ps.diff(f"{directory}/x", also, values=True))
    found.append(ps.diff(f"{directory}/x", f"{directory}/y", values=True))  # not collective, so one rank may be alone
    if dist.get_rank() == 1:
        ps.diff(f"{directory}/x", f"{directory}/y", values=True)
    said = _message(lambda: ps.diff(f"{directory}/{'xz'[dist.get_rank() % 2]}", _on(flat)))
    assert "there is no checkpoint at" in said
    return [(x.step, [str(value) for value in x.values]) for x in found]


def test_differences_are_the_same_on_every_rank_and_in_every_placement(tmp_path):
    values = _values()
    ps.save(tmp_path / "x", values)
    grid = values.params["grid"].clone()
    grid[0, 0] += 1
    grid[4, 6] -= 2
    other = values.replace(step=8, params={**values.params, "grid": grid})
    ps.save(tmp_path / "y", other, format="dcp")
    local = ps.diff(values, other, values=True)
    expected = ((7, 8), [str(value) for value in local.values])
    assert [(value.num_differing, value.max_abs) for value in local.values] == [(2, pytest.approx(2.0))]
    for found in run_ranks(_differences, 4, str(tmp_path)):
        assert found == [expected] * len(found)
        assert len(found) == 19


# --- memory ----------------------------------------------------------------------------------------------------------

_LEAVES, _ROWS = 12, 1 << 20  # of 4 bytes: 48 MiB whole, 4 MiB a leaf


def _large(mesh: Any) -> ps.TrainState:
    leaves = {f"w{i}": torch.full((_ROWS,), float(i)) for i in range(_LEAVES)}
    if mesh is not None:
        leaves = {n: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for n, x in leaves.items()}
    return ps.TrainState(step=0, params={}, buffers={}, opt_state={"o": {"s": leaves}}, key=ps.key(0))


def _anonymous() -> int:
    """Bytes of memory of this process that no file backs."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _peak(function: Any) -> int:
    """How many bytes `function` adds at most, looked at every fraction of a millisecond."""
    gc.collect()
    start, peak, done = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0003):
            peak = max(peak, _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        kept = function()
    finally:
        done.set()
        thread.join()
    del kept
    return max(peak, _anonymous()) - start


def _memory(directory: str, options: dict[str, Any], dtype: torch.dtype) -> dict[str, int]:
    dist.init_process_group("gloo")
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed tensors go back to the system at once
    mesh = _mesh(2)
    abstract = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: torch.zeros_like(x, device="meta", dtype=dtype), _large(mesh)
    )
    ps.restore(f"{directory}/{FORMATS[0]}", abstract, **options)  # whatever is set up once
    return {format: _peak(lambda f=format: ps.restore(f"{directory}/{f}", abstract, **options)) for format in FORMATS}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("cast", [False, True])
def test_a_restore_needs_the_memory_of_its_own_shard_and_no_more_than_a_file(tmp_path, cast):
    for format in FORMATS:
        ps.save(tmp_path / format, _large(None), format=format)
    dtype = torch.float64 if cast else torch.float32
    shard, slack = _LEAVES * _ROWS * dtype.itemsize // 2, 16 << 20
    file = _LEAVES * _ROWS * 4 // 2 if cast else 0  # what this rank reads of the one file, before it is cast
    options = {"strict": "exact_but_dtype"} if cast else {}
    for peaks in run_ranks(_memory, 2, str(tmp_path), options, dtype):
        for format, peak in peaks.items():
            assert shard - (4 << 20) < peak < shard + file + slack, (format, peak / 2**20, shard / 2**20)

"""Plans: bytes as the ranks really allocate them, a table, a diff, and a form that serializes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.sharding.config import Topology
from tests.ranks import run_on
from tests.sharding.models import Recurrent, Stack, Tied, Wrapped, on_meta
from tests.toys import Net, net_batch, rank_slice, runtime_on

MODELS = {  # name -> how to build it, its spec
    "uneven": (Net, Net.sharding_spec),
    "one unit": (Stack, ps.ShardingSpec()),
    "nested": (Stack, ps.ShardingSpec(units=("Layer", "*coder.0.mlp"))),
    "never freed": (Stack, ps.ShardingSpec(units=(ps.Unit("Layer", reshard_after_forward=False),))),
    "fewer rows than ranks": (lambda: nn.Linear(3, 1), ps.ShardingSpec()),
    "tied": (lambda: Wrapped(Tied()), ps.ShardingSpec(units=("inner",))),
    "shared block": (Recurrent, ps.ShardingSpec(units=("blocks.*",))),
    "bf16": (lambda: Stack().bfloat16(), ps.ShardingSpec(units=("Layer",))),
}


def _allocated(topology: tuple[int, int]) -> dict[str, Any]:
    """Bytes of the storages that hold this rank's parameters, meta model and real one."""
    results: dict[str, Any] = {}
    with runtime_on(topology) as runtime:
        for name, (build, spec) in MODELS.items():
            for kind, model in (("real", build()), ("meta", on_meta(build))):
                module = ps.shard(model, spec, runtime)
                state = ps.init(module, ps.sgd(0.1), ps.key(0))
                storages = [getattr(p, "_local_tensor", p).untyped_storage() for p in state.params.values()]
                bytes_ = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
                results[f"{name}, {kind}"] = {"bytes": bytes_, "plan": module.plan.to_dict()}
            if name == "uneven":
                x, _ = rank_slice(runtime, net_batch(0))
                results["runs"] = module.apply(state.params, {}, x)[0].isfinite().all().item()
            if name == "shared block":
                results["runs, shared"] = module.apply(state.params, {}, torch.ones(1, 2))[0].shape == (1, 2)
    return results


@pytest.mark.parametrize("topology", [(1, 2), (2, 1)], ids=["fsdp2", "ddp"])
def test_a_rank_allocates_exactly_what_the_plan_says(topology):
    for results in run_on(topology, _allocated):
        assert results.pop("runs")
        assert results.pop("runs, shared")
        for name, found in results.items():
            build, spec = MODELS[name.rpartition(", ")[0]]
            plan = spec.resolve(build(), Topology(*topology))
            assert ps.Plan.from_dict(found["plan"]) == plan
            assert found["bytes"] == plan.bytes_per_rank, name


def _plan(topology: Topology, *rules: Any, **spec: Any) -> ps.Plan:
    return ps.ShardingSpec(units=rules or ("Layer",), **spec).resolve(Stack(), topology)


def test_bytes_by_hand():
    # A layer: attention 2 x (4x4 + 4), mlp 5x4 + 5, in fp32; on 2 ranks the 5 rows of the mlp become 3 and 3.
    whole, shard = 4 * (2 * 20 + 25), 4 * (2 * (8 + 2) + 12 + 3)
    root_whole, root_shard = 4 * (4 * 3 + 4 + 4 + 1), 4 * (2 * 3 + 2 + 4 + 1)
    plan = _plan(Topology(1, 2))
    assert [unit.bytes_per_rank for unit in plan.units] == [shard] * 4 + [root_shard]
    assert [unit.gather_bytes for unit in plan.units] == [2 * shard] * 4 + [2 * root_shard]
    assert plan.gather_peak == 2 * root_shard + 2 * (2 * shard)  # the root stays, two layers pass through
    unfreed = _plan(Topology(1, 2), ps.Unit("Layer", reshard_after_forward=False))
    assert unfreed.gather_peak == 2 * root_shard + 4 * (2 * shard)
    local = _plan(Topology(3, 1))
    assert [unit.bytes_per_rank for unit in local.units] == [whole] * 4 + [root_whole]
    assert local.gather_peak == 0


def test_replicas_do_not_change_what_a_rank_holds():
    assert _plan(Topology(4, 2)).bytes_per_rank == _plan(Topology(1, 2)).bytes_per_rank


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(1, 2), Topology(2, 3)], ids=str)
def test_a_plan_survives_json(topology):
    plan = _plan(topology, forward_methods=("encode",))
    assert ps.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_table():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    plan = ps.ShardingSpec(units=("0",)).resolve(model, Topology(1, 2))
    assert str(plan).splitlines() == [
        "fsdp2 (replicate 1 x shard 2)",
        "unit    class       params  bytes/rank  gathered  reshard",
        "0       Linear           9          24        48  yes",
        "(root)  Sequential       4          16        32  no",
        "total                   13          40   peak 80",
    ]


def test_a_diff_is_empty_for_equal_plans_and_names_what_differs():
    plan = _plan(Topology(1, 2))
    assert plan.diff(_plan(Topology(1, 2))) == ""
    diff = plan.diff(_plan(Topology(1, 2), ps.Unit("encoder.1", False), "Layer"))
    assert "-unit encoder.1 Layer reshard=True" in diff
    assert "+unit encoder.1 Layer reshard=False" in diff
    assert not [line for line in diff.splitlines() if line[0] in "+-" and "encoder.0" in line]
    frozen = Stack()
    frozen.head.bias.requires_grad_(False)
    diff = plan.diff(ps.ShardingSpec(("Layer",)).resolve(frozen, Topology(2, 2)))
    assert "+hsdp (replicate 2 x shard 2)" in diff
    assert "+  head.bias float32[1] frozen" in diff


def test_every_difference_shows_in_the_diff():
    plan = _plan(Topology(1, 2))
    unit = plan.units[0]
    param = unit.params[0]
    for changed in (
        dataclasses.replace(plan, forward_methods=("encode",)),
        dataclasses.replace(plan, topology=Topology(2, 2)),
        dataclasses.replace(plan, units=plan.units[1:]),
        *(
            dataclasses.replace(plan, units=(dataclasses.replace(unit, **change), *plan.units[1:]))
            for change in ({"path": "x"}, {"module_class": "X"}, {"params": ()}, {"reshard_after_forward": False})
        ),
        *(
            dataclasses.replace(
                plan,
                units=(dataclasses.replace(unit, params=(dataclasses.replace(param, **change),)), *plan.units[1:]),
            )
            for change in ({"name": "x"}, {"shape": (7,)}, {"dtype": "bfloat16"}, {"trainable": False})
        ),
    ):
        assert plan.diff(changed) != ""


def test_reading_a_plan_does_not_import_torch():
    code = "import sys, purestep.sharding.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

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
from purestep.sharding.accounting import Traffic, replicated
from purestep.sharding.config import Topology
from purestep.sharding.plan import PlanLeaf, UnitSettings
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
OPTIMIZERS = {
    "sgd": ps.sgd(0.1),
    "adamw": ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.1)),
    "momentum": ps.sgd(0.1, momentum=0.9, dampening=0.5),
}


def _bytes(leaves: Any) -> int:
    storages = [getattr(leaf, "_local_tensor", leaf).untyped_storage() for leaf in leaves]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _allocated(topology: tuple[int, int]) -> dict[str, Any]:
    """Bytes of the storages that hold this rank's state, meta model and real one."""
    results: dict[str, Any] = {}
    with runtime_on(topology) as runtime:
        for name, (build, spec) in MODELS.items():
            for kind, model in (("real", build()), ("meta", on_meta(build))):
                module = ps.shard(model, spec, runtime)
                for rule, optimizer in OPTIMIZERS.items():
                    state = ps.init(module, optimizer, ps.key(0))
                    slots = [leaf for leaf_name, leaf in state.leaves().items() if leaf_name.startswith("opt_state/")]
                    results[f"{name}, {kind}, {rule}"] = {
                        "params": _bytes(state.params.values()),
                        "opt_state": _bytes(slots),
                        "plan": module.plan.to_dict(),
                        "rank": runtime.rank,
                    }
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
            model, _, rule = name.split(", ")
            build, spec = MODELS[model]
            plan = spec.resolve(build(), Topology(*topology), source="config")
            assert dataclasses.replace(ps.Plan.from_dict(found["plan"]), source="config") == plan
            account = plan.with_optimizer(OPTIMIZERS[rule]).account(found["rank"])
            assert found["params"] == plan.bytes_per_rank == account.params, name
            assert found["opt_state"] == account.opt_state, name


def _plan(topology: Topology, *rules: Any, **spec: Any) -> ps.Plan:
    return ps.ShardingSpec(units=rules or ("Layer",), **spec).resolve(Stack(), topology)


def test_bytes_by_hand():
    # A layer: attention 2 x (4x4 + 4), mlp 5x4 + 5, in fp32; on 2 ranks the 5 rows of the mlp become 3 and 3.
    whole, shard = 4 * (2 * 20 + 25), 4 * (2 * (8 + 2) + 12 + 3)
    root_whole, root_shard = 4 * (4 * 3 + 4 + 4 + 1), 4 * (2 * 3 + 2 + 4 + 1)
    plan = _plan(Topology(1, 2))
    assert [unit.bytes_per_rank for unit in plan.units] == [shard] * 4 + [root_shard]
    assert [unit.gathered for unit in plan.account().units] == [2 * shard] * 4 + [2 * root_shard]
    assert plan.gather_peak == 2 * root_shard + 2 * (2 * shard)  # the root stays, two layers pass through
    unfreed = _plan(Topology(1, 2), ps.Unit("Layer", reshard_after_forward=False))
    assert unfreed.gather_peak == 2 * root_shard + 5 * (2 * shard)  # and the buffer of the last one
    local = _plan(Topology(3, 1))
    assert [unit.bytes_per_rank for unit in local.units] == [whole] * 4 + [root_whole]
    assert local.gather_peak == 0


def test_replicas_do_not_change_what_a_rank_holds():
    assert _plan(Topology(4, 2)).bytes_per_rank == _plan(Topology(1, 2)).bytes_per_rank


# Two layers without biases: 4 x 4 (64 bytes, 32 a rank) and 1 x 4 (16 bytes, on one of two ranks; padded, 32).


def _two(topology: Topology, rule: ps.Unit | str = "0", **accelerator: Any) -> ps.Plan:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    config = ps.AcceleratorConfig(**accelerator)
    return ps.ShardingSpec(units=(rule,)).resolve(model, topology, accelerator=config)


def test_traffic_by_hand():
    assert [unit.traffic for unit in _two(Topology(1, 2)).account().units] == [
        Traffic(gather_forward=32, gather_backward=32, reduce_scatter=32),
        Traffic(gather_forward=16, gather_backward=0, reduce_scatter=16),
    ]
    # A ring of 4 passes on 3 of 4 parts: of 64 bytes, and of 4 padded rows of 16.
    assert [unit.traffic.gather_forward for unit in _two(Topology(1, 4)).account().units] == [48, 48]
    hsdp = _two(Topology(3, 2)).account()
    assert [unit.traffic.all_reduce for unit in hsdp.units] == [2 * 2 * 32 // 3, 2 * 2 * 16 // 3]
    assert hsdp.sent == hsdp.traffic.total == 3 * 32 + 2 * 16 + 42 + 21
    ddp = _two(Topology(4, 1)).account()
    assert ddp.traffic == Traffic(all_reduce=2 * 3 * 64 // 4 + 2 * 3 * 16 // 4)
    assert _two(Topology(1, 1)).account().sent == 0


@pytest.mark.parametrize(
    ("policy", "reduce_scatters", "all_reduces"),
    [("sync_each", 3, 3), ("defer_all_reduce", 3, 1), ("defer_all", 1, 1)],
)
def test_traffic_of_microbatches(policy, reduce_scatters, all_reduces):
    windows = ps.GradientAccumulationConfig(steps=3, policy=policy)
    unit = _two(Topology(2, 2), gradient_accumulation=windows).account().units[0]
    assert unit.traffic == Traffic(96, 96, 32 * reduce_scatters, 32 * all_reduces)
    assert _two(Topology(2, 1), gradient_accumulation=windows).account().traffic == Traffic(all_reduce=80)


def test_dtypes_and_resharding_change_traffic():
    half = _two(Topology(1, 2), ps.Unit("0", param_dtype="bf16", reduce_dtype="bf16")).account().units[0]
    assert half.traffic == Traffic(16, 16, 16)
    assert (half.gathered, half.params, half.grads) == (32, 32, 32)
    wide = _two(Topology(1, 2), ps.Unit("0", param_dtype="bf16")).account().units[0]
    assert wide.traffic == Traffic(16, 16, 32)
    assert _two(Topology(1, 2), ps.Unit("0", reshard_after_forward=False)).account().traffic.gather_backward == 0
    partly = _two(Topology(1, 4), ps.Unit("0", reshard_after_forward=2)).account().units[0]
    assert (partly.traffic.gather_forward, partly.traffic.gather_backward) == (48, 32)


def test_the_peak_by_hand():
    plan = _two(Topology(1, 2))
    kept, root, flat = 48, 32, 64
    # The block is gathered (the root stays), out of a buffer of the same size; then its gradients are, freshly reduced.
    assert plan.account().peak.bytes == kept + root + 16 + flat + 64 == 224
    assert (plan.account().peak.at, plan.gather_peak) == ("backward of 0", root + flat + 64)
    adamw = plan.with_optimizer(ps.adamw(0.1)).account()
    assert adamw.opt_state == 2 * 48 + 2 * 4
    assert adamw.peak.bytes == 224 + adamw.opt_state
    assert plan.with_optimizer(ps.sgd(0.1), ema=True).account().peak.bytes == 224 + kept
    local = _two(Topology(1, 1)).account()
    assert (local.kept, local.peak.bytes) == (80, 160)  # parameters, and as many gradients
    assert _two(Topology(2, 1)).account().peak.bytes == 240  # and DDP's buckets


def test_whole_gradients_stay_when_their_reduction_is_deferred():
    each, deferred = (
        _two(Topology(1, 2), gradient_accumulation=ps.GradientAccumulationConfig(steps=4, policy=policy)).account()
        for policy in ("sync_each", "defer_all")
    )
    assert deferred.peak.bytes > each.peak.bytes
    assert deferred.sent < each.sent


def test_offloaded_units_are_on_the_host():
    here, there = (
        _two(Topology(1, 2), ps.Unit("0", cpu_offload=offload)).with_optimizer(ps.adamw(0.1)).account()
        for offload in (False, True)
    )
    assert here.kept == there.kept
    assert (here.on_host, there.on_host) == (0, 32 + 2 * 32 + 4)
    assert there.peak.bytes < here.peak.bytes


def test_what_an_optimizer_keeps_on_each_rank():
    plan = _two(Topology(1, 2)).with_optimizer(ps.adamw(0.1))
    assert plan.account(0).opt_state == 2 * (32 + 16) + 8
    assert plan.account(1).opt_state == 2 * 32 + 8  # the second layer has one row, which rank 0 holds
    with pytest.raises(ValueError, match=r"rank must be 0 to 1 in fsdp2 .*, got 2"):
        plan.account(2)


class Factored:
    """An optimizer whose state is not shaped like the parameters."""

    def init(self, params: Any) -> Any:
        rows = {name: torch.empty(leaf.shape[0], device="meta") for name, leaf in params.items()}
        return {"rows": rows, "count": {"all": torch.empty((), dtype=torch.int64, device="meta")}}


def test_state_that_is_not_shaped_like_parameters_is_whole():
    plan = _two(Topology(1, 2)).with_optimizer(Factored())
    assert plan.step.other_slots == (PlanLeaf("count/all", (), "int64", 8),)
    assert [unit.opt_state for unit in plan.account().units] == [16, 4]
    assert plan.account().opt_state == 16 + 4 + 8


def test_the_largest_replicated_leaves():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sharded, ddp = (ps.ShardingSpec().resolve(model, Topology(*degrees)) for degrees in ((1, 2), (2, 1)))
    assert replicated(sharded) == [("1.running_mean", 16), ("1.running_var", 16), ("1.num_batches_tracked", 8)]
    assert replicated(ddp, 2) == [("0.weight", 64), ("0.bias", 16)]
    assert replicated(ps.ShardingSpec().resolve(model, Topology(1, 1))) == []
    ignored = ps.ShardingSpec(ignored=("0",)).resolve(model, Topology(1, 2))
    assert replicated(ignored, 1) == [("0.weight", 64)]
    assert ignored.account().traffic.all_reduce == 80 + sharded.account().traffic.all_reduce
    # Buffers are averaged as fp32, counters as int64.
    assert sharded.account().buffer_traffic == 2 * (16 + 16 + 8) // 2


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(1, 2), Topology(2, 3)], ids=str)
def test_a_plan_survives_json(topology):
    recompute = ps.ActivationCheckpointing("selective", save_ops=("aten.mm",))
    rule = ps.Unit("Layer", activation_checkpointing=recompute, reduce_dtype="bf16")
    for plan in (_plan(topology, forward_methods=("encode",)), _plan(topology, rule)):
        for own in (plan, plan.with_optimizer(Factored(), ema=True)):
            assert ps.Plan.from_dict(json.loads(json.dumps(own.to_dict()))) == own


@pytest.mark.parametrize("data", [{}, {"topology": {"shards": 2}}, []], ids=str)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(ValueError, match=r"this is not a plan as Plan\.to_dict writes it"):
        ps.Plan.from_dict(data)


def test_the_table():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 1), nn.BatchNorm1d(1, affine=False))
    plan = ps.ShardingSpec(units=("0", "1")).resolve(model, Topology(1, 2)).with_optimizer(ps.adamw(1.0))
    assert str(plan).splitlines() == [
        "fsdp2 (replicate 1 x shard 2)",
        "units from config",
        "optimizer adamw",
        "",
        "unit     class       units  params  dtype    bytes/rank  grads  opt_state    gathered   sent  reshard",
        "0 ... 1  Linear        2 x       9  float32        24 B   24 B       56 B        48 B   72 B  yes",
        "(root)   Sequential              4  float32        16 B   16 B       40 B        32 B   32 B  no",
        "total                           22                 64 B   64 B      152 B  peak 128 B  192 B",
        "",
        "a rank keeps 232 B: params 64 B, opt_state 152 B, buffers 16 B",
        "at the peak it holds 464 B, activations not counted: backward of 0",
        "a step sends 192 B: all-gather in forward 64 B, in backward 48 B, reduce-scatter 64 B, all-reduce 16 B",
        "whole on every rank: 3.num_batches_tracked 8 B, 3.running_mean 4 B, 3.running_var 4 B",
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
    plan = _plan(Topology(1, 2)).with_optimizer(ps.adamw(0.1))
    unit = plan.units[0]
    param, never_freed = unit.params[0], UnitSettings(reshard_after_forward=False)
    changes = [{"forward_methods": ("encode",)}, {"topology": Topology(2, 2)}, {"source": "x"}]
    changes += [{"units": plan.units[1:]}, {"buffers": (PlanLeaf("x", (1,), "int8", 1, False),)}]
    of_step = ({"ema": True}, {"microbatches": 2}, {"policy": "defer_all"}, {"ddp_reduce_dtype": "bf16"})
    of_step += ({"optimizer": "x"}, {"other_slots": (PlanLeaf("x", (), "int8", 1),)})
    changes += [{"step": dataclasses.replace(plan.step, **change)} for change in of_step]
    of_unit = [{"path": "x"}, {"module_class": "X"}, {"params": ()}, {"settings": never_freed}, {"note": "x"}]
    of_unit += [
        {"params": (dataclasses.replace(param, **change), *unit.params[1:])}
        for change in (
            {"name": "x"},
            {"shape": (7,)},
            {"dtype": "bfloat16"},
            {"itemsize": 2},
            {"trainable": False},
            {"ignored": True},
            {"slots": param.slots[1:]},
        )
    ]
    changes += [{"units": (dataclasses.replace(unit, **change), *plan.units[1:])} for change in of_unit]
    for change in changes:
        assert plan.diff(dataclasses.replace(plan, **change)) != "", change


def test_reading_a_plan_does_not_import_torch():
    code = (
        "import sys, json, purestep.sharding.plan as p; plan = p.Plan.from_dict(json.loads(sys.stdin.read()));"
        "str(plan), plan.diff(plan), plan.account(); print('torch' in sys.modules)"
    )
    text = json.dumps(_plan(Topology(1, 2)).to_dict())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, input=text)
    assert done.stdout.strip() == "False"

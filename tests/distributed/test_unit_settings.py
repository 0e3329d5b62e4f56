"""What units are told changes memory, traffic or speed, and not what is computed: in every topology it is for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from tests.ranks import run_on
from tests.toys import TOPOLOGIES, leaf_table, rank_slice, runtime_on


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 9), nn.Linear(9, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 5), nn.Linear(5, 1)
        self.blocks = nn.ModuleList(_Block(5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], key: ps.Key) -> ps.Mean:
    x, y = batch
    return ps.Mean((model(x) - y).square().sum(), len(x))


def _checkpointing(*args: Any, **kwargs: Any) -> ps.Unit:
    return ps.Unit("blocks.*", activation_checkpointing=ps.ActivationCheckpointing(*args, **kwargs))


ANYWHERE = {
    "full": _checkpointing("full"),
    "selective": _checkpointing("selective"),
    "selective by op": _checkpointing("selective", save_ops=("aten.addmm", "aten.tanh")),
    "a submodule": _checkpointing("full", modules=("up",)),
    "every other": _checkpointing("full", every=2),
}
SHARDED = {
    "kept": ps.Unit("blocks.*", reshard_after_forward=False),
    "prefetch none": ps.Unit("blocks.*", prefetch=0),
    "prefetch two": ps.Unit("blocks.*", prefetch=2),
    "offload": ps.Unit("blocks.*", cpu_offload=True),
}
POLICIES = ("sync_each", "defer_all_reduce", "defer_all")


def _train(runtime: ps.Runtime, rule: ps.Unit, accumulate: int = 2) -> tuple[list[float], dict[str, list[float]]]:
    module = ps.shard(_Net(), ps.ShardingSpec(units=(rule,)), runtime)
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.05))
    step = ps.train_step(module, _loss, optimizer, accumulate=accumulate, donate=True)
    state, losses = ps.init(module, optimizer, ps.key(0)), []
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        batch = torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator)
        state, metrics = step(state, rank_slice(runtime, batch))
        losses.append(float(metrics["loss"]))
    ps.check_replicas(state)
    return losses, {name: leaf.flatten().tolist() for name, leaf in leaf_table(state).items()}


def _all_settings(topology: tuple[int, int]) -> dict[str, tuple[list[float], dict[str, list[float]]]]:
    with runtime_on(topology) as runtime:
        settings = {"plain": ps.Unit("blocks.*"), **ANYWHERE, **(SHARDED if topology[1] > 1 else {})}
        if topology == (1, 4):
            settings = {"plain": settings["plain"], "over 2": ps.Unit("blocks.*", reshard_after_forward=2)}
        return {name: _train(runtime, rule) for name, rule in settings.items()}


@pytest.mark.parametrize("topology", [*TOPOLOGIES.values(), (1, 4)], ids=[*TOPOLOGIES, "fsdp4"])
def test_settings_do_not_change_a_bit(topology):
    for found in run_on(topology, _all_settings):
        losses, leaves = found.pop("plain")
        assert len(set(losses)) == 3
        for name, (others, other_leaves) in found.items():
            assert others == losses, name
            assert [leaf for leaf in leaves if leaves[leaf] != other_leaves[leaf]] == [], name


def _policies(topology: tuple[int, int]) -> dict[str, tuple[list[float], dict[str, list[float]]]]:
    found = {}
    for policy in POLICIES:
        accumulation = ps.GradientAccumulationConfig(steps=4, policy=policy)
        with runtime_on(topology, gradient_accumulation=accumulation) as runtime:
            found[policy] = _train(runtime, ps.Unit("blocks.*"), accumulate=4)
    return found


@pytest.mark.parametrize("topology", [(1, 2), (2, 2)], ids=["fsdp2", "hsdp"])
def test_every_accumulation_policy_gives_the_same_gradient(topology):
    for found in run_on(topology, _policies):
        losses, leaves = found.pop("sync_each")
        for name, (others, other_leaves) in found.items():
            assert others == pytest.approx(losses, rel=1e-6), name
            for leaf, value in leaves.items():
                assert other_leaves[leaf] == pytest.approx(value, rel=1e-4, abs=1e-6), f"{name}: {leaf}"


def _dtypes(topology: tuple[int, int]) -> dict[str, list[float]]:
    rules = {
        "fp32": ps.Unit("blocks.*"),
        "bf16": ps.Unit("blocks.*", param_dtype="bf16", output_dtype="fp32"),
        "bf16 reduced": ps.Unit("blocks.*", param_dtype="bf16", reduce_dtype="bf16", output_dtype="fp32"),
    }
    with runtime_on(topology) as runtime:
        return {name: _train(runtime, rule, accumulate=1)[0] for name, rule in rules.items()}


def test_units_have_dtypes_of_their_own():
    first, second = run_on((1, 2), _dtypes)
    assert first == second
    exact = first.pop("fp32")
    for name, losses in first.items():
        assert losses != exact, name
        assert losses == pytest.approx(exact, rel=3e-2), name
    assert first["bf16"] != first["bf16 reduced"]


def _compiled(topology: tuple[int, int]) -> dict[str, list[float]]:
    with runtime_on(topology) as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of itself
        rules = {"eager": ps.Unit("blocks.*"), "compiled": ps.Unit("blocks.*", compile=True)}
        return {name: _train_without_dropout(runtime, rule) for name, rule in rules.items()}


def _train_without_dropout(runtime: ps.Runtime, rule: ps.Unit) -> list[float]:
    model = _Net()
    for block in model.blocks:
        block.dropout.p = 0.0  # Inductor draws other numbers
    module = ps.shard(model, ps.ShardingSpec(units=(rule,)), runtime)
    optimizer = ps.sgd(0.05)
    step, state, losses = ps.train_step(module, _loss, optimizer), ps.init(module, optimizer, ps.key(0)), []
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        batch = torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator)
        state, metrics = step(state, rank_slice(runtime, batch))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("topology", [(1, 1), (1, 2)], ids=["local", "fsdp2"])
def test_compiled_units_compute_the_same(topology):
    for found in run_on(topology, _compiled, timeout=300):
        assert found["compiled"] == pytest.approx(found["eager"], rel=1e-5)


class _Counted(nn.Module):
    """A layer whose forward leaves a trace of how often it ran."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(("mode", "calls"), [("none", 2), ("full", 4), ("selective", 4)])
def test_checkpointing_does_recompute(mode, calls):
    model = nn.Sequential(_Counted(), _Counted())
    rule = ps.Unit("_Counted", activation_checkpointing=ps.ActivationCheckpointing(mode))
    module = ps.shard(model, ps.ShardingSpec(units=(rule,)))
    params = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    _Counted.calls = 0
    ps.value_and_grad(module, lambda model, x, key: model(x).sum())(params, {}, torch.ones(2, 3), ps.key(0))
    assert _Counted.calls == calls


@pytest.mark.parametrize(
    ("checkpointing", "said"),
    [
        ({"mode": "full", "modules": ("nothing",)}, "no unit has such submodules"),
        ({"mode": "selective", "save_ops": ("aten.addm",)}, r"no such operator; near: .*aten\.addmm"),
    ],
)
def test_what_matches_nothing_is_refused(checkpointing, said):
    rule = ps.Unit("blocks.*", activation_checkpointing=ps.ActivationCheckpointing(**checkpointing))
    with pytest.raises(ps.ConfigError, match=said):
        ps.shard(_Net(), ps.ShardingSpec(units=(rule,)))


def _diverging(topology: tuple[int, int]) -> str | None:
    """Only rank 0 calls the second block."""

    class Sometimes(_Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.embed(x))
            return self.head(self.blocks[1](x) if torch.distributed.get_rank() == 0 else x)

    with runtime_on(topology) as runtime:
        module = ps.shard(Sometimes(), ps.ShardingSpec(units=("blocks.*",)), runtime)
        state = ps.init(module, ps.sgd(0.1), ps.key(0))
        try:
            ps.value_and_grad(module, _loss)(
                state.params, state.buffers, (torch.ones(4, 3), torch.ones(4, 1)), ps.key(0)
            )
        except RuntimeError as error:
            return str(error)
        return None


def test_ranks_that_call_different_units_are_told_so():
    for said in run_on((1, 2), _diverging, timeout=60):
        assert "ranks do different things" in said
        assert "forward of unit 'blocks.1'" in said


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def _many(topology: tuple[int, int]) -> set[str]:
    with runtime_on(topology) as runtime:
        found = set()
        for _ in range(50):
            module = ps.shard(_Tied(), ps.ShardingSpec(), runtime)
            found.add(ps.init(module, ps.sgd(0.1), ps.key(0)).digest())
            del module
        return found


def test_b07_models_that_come_and_go_are_not_mistaken_for_each_other():
    first, second = run_on((1, 2), _many)
    assert first == second
    assert len(first) == 1

"""One state, one plan, four topologies: same initial bits, same losses, pure steps (and cases B09, B10, B13)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from tests.ranks import RanksFailed, run_on
from tests.toys import (
    TOPOLOGIES,
    Net,
    error_of,
    leaf_table,
    net_batch,
    net_loss,
    net_optimizer,
    rank_slice,
    runtime_on,
    whole,
)


def everywhere(scenario: Any) -> Any:
    """Parametrize a test by topology, with `results`: what `scenario` returned on each rank."""
    cases = [pytest.param(t, scenario, id=name, marks=pytest.mark.xdist_group(name)) for name, t in TOPOLOGIES.items()]
    return pytest.mark.parametrize(("topology", "scenario"), cases)


@functools.cache
def _run(topology: tuple[int, int]) -> list[dict[str, Any]] | Exception:
    """Every scenario of this file in one set of processes, which costs more than the scenarios do."""
    try:
        return run_on(topology, _all_scenarios, timeout=150)
    except RanksFailed as error:
        return error


def _all_scenarios(topology: tuple[int, int]) -> dict[str, Any]:
    return {scenario.__name__: scenario(topology) for scenario in _SCENARIOS}


def on_ranks(topology: tuple[int, int], scenario: Any) -> list[Any]:
    everyone = _run(topology)
    if isinstance(everyone, Exception):
        raise everyone
    return [results[scenario.__name__] for results in everyone]


def _train(topology: tuple[int, int], steps: int = 20) -> dict[int, tuple[str, list[float], list[float]]]:
    with runtime_on(topology) as runtime:
        results = {}
        for accumulate in (1, 2, 4):
            module, optimizer = ps.shard(Net(), runtime=runtime), net_optimizer()
            state = ps.init(module, optimizer, ps.key(0))
            start = state.digest()
            step = ps.train_step(module, net_loss, optimizer, accumulate=accumulate, donate=True)
            losses, norms = [], []
            for k in range(steps):
                state, metrics = step(state, rank_slice(runtime, net_batch(k, rows=16)))
                losses.append(float(metrics["loss"]))
                norms.append(float(metrics["grad_norm"]))
            ps.check_replicas(state)
            results[accumulate] = (start, losses, norms)
        return results


def test_losses_agree_between_topologies_and_accumulations():
    reference = on_ranks((1, 1), _train)[0][1]
    for topology in TOPOLOGIES.values():
        everyone = on_ranks(topology, _train)
        assert all(result == everyone[0] for result in everyone)
        for start, losses, norms in everyone[0].values():
            assert start == reference[0]
            assert losses == pytest.approx(reference[1], rel=1e-5)
            assert norms == pytest.approx(reference[2], rel=1e-4)


def _purity(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        module, optimizer = ps.shard(Net(dropout=0.5), runtime=runtime), net_optimizer()
        state = ps.init(module, optimizer, ps.key(3))
        batch = rank_slice(runtime, net_batch(0))
        pure = ps.train_step(module, net_loss, optimizer, accumulate=2)
        donating = ps.train_step(module, net_loss, optimizer, accumulate=2, donate=True)
        results: dict[str, Any] = {"equal": [], "kept": []}
        for _ in range(3):
            before = state.digest()
            once, metrics = pure(state, batch)
            torch.rand(7)  # ambient draws have no say
            again, same = pure(state, batch)
            results["equal"] += [once.digest() == again.digest(), metrics == same]
            results["kept"].append(state.digest() == before)
            copy = state.clone()
            donated, _ = donating(copy, batch)
            results["equal"].append(donated.digest() == once.digest())
            state = once
        held = donated.params
        new, _ = donating(donated, batch)
        results["consumed"] = [
            error_of(lambda: donated.params),
            error_of(lambda: held["head.weight"]),
            error_of(donated.digest),
        ]
        results["second call"] = error_of(donating, donated, batch)
        results["alive"] = bool(torch.isfinite(whole(new.params["head.weight"])).all())
        return results


@everywhere(_purity)
def test_a_step_is_pure_and_a_donated_state_is_consumed(topology, scenario):
    for results in on_ranks(topology, scenario):
        assert all(results["equal"])
        assert all(results["kept"])
        for kind, message in [*results["consumed"], results["second call"]]:
            assert kind == "ConsumedStateError"
            assert "train_step, step 3" in message
            assert "state.clone()" in message
            assert "donate=False" in message
        assert "TrainState.params" in results["consumed"][0][1]
        assert results["alive"]


def _filled(state: ps.TrainState, value: float) -> ps.TrainState:
    state = state.clone()
    for leaf in state.params.values():
        getattr(leaf, "_local_tensor", leaf).fill_(value)
    return state


def _stale_values(topology: tuple[int, int]) -> dict[str, Any]:
    """B09: `Linear(1, 1)`, weight 10 or 100, input 1, loss w * x."""
    with runtime_on(topology) as runtime:
        module = ps.shard(nn.Linear(1, 1, bias=False), runtime=runtime)
        optimizer = ps.sgd(0.5)
        base = ps.init(module, optimizer, ps.key(0))
        a, b = _filled(base, 10.0), _filled(base, 100.0)
        x = torch.ones(2, 1)

        def value(state: ps.TrainState) -> float:
            return module.apply(state.params, state.buffers, x)[0][0].item()

        def loss(model: nn.Module, batch: torch.Tensor, key: ps.Key) -> ps.Mean:
            return ps.Mean(model(batch).square().sum(), len(batch))

        grad_fn = ps.value_and_grad(module, loss)

        def grad(state: ps.TrainState) -> float:
            return whole(grad_fn(state.params, state.buffers, x, state.key).grads["weight"]).item()

        results = {"fresh": [value(a), value(b), value(a)], "grads": [grad(b), grad(a), grad(b)]}
        results["used"] = [value(a), value(b), value(a)]
        fast = ps.train_step(module, loss, optimizer)
        slow = ps.train_step(module, loss, ps.sgd(0.25))
        left, _ = fast(a, x)
        right, _ = slow(a, x)
        results["branches"] = [value(left), value(right), value(a)]
        donating = ps.train_step(module, loss, optimizer, donate=True)
        moved, _ = donating(a.clone(), x)
        results["after donation"] = [value(moved), value(a), value(moved)]
        in_place = _filled(base, 3.0)
        first = value(in_place)
        local = getattr(in_place.params["weight"], "_local_tensor", in_place.params["weight"])
        local.fill_(4.0)
        results["written in place"] = [first, value(in_place)]
        results["after an error"] = [error_of(fast, a, torch.ones(2, 7)) is not None, grad(a), value(b), grad(b)]
        return results


@everywhere(_stale_values)
def test_b09_a_stale_value_is_never_computed_with(topology, scenario):
    for results in on_ranks(topology, scenario):
        assert results["fresh"] == results["used"] == [10, 100, 10]
        assert results["grads"] == [200, 20, 200]
        assert results["branches"] == [0, 5, 10]
        assert results["after donation"] == [0, 10, 0]
        assert results["written in place"] == [3, 4]
        assert results["after an error"] == [True, 20, 100, 200]


def _refusals(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        module = ps.shard(Net(), runtime=runtime)
        optimizer = net_optimizer()
        state = ps.init(module, optimizer, ps.key(0))
        x, _ = net_batch(0)

        def differentiate_apply() -> None:
            params = {name: leaf.detach().requires_grad_() for name, leaf in state.params.items()}
            out, _ = module.apply(params, state.buffers, x)
            out.sum().backward()
            if runtime.world_size == 1:
                assert params["head.bias"].grad is not None
                raise AssertionError("local: works")

        def nested() -> None:
            def loss(model: nn.Module, batch: torch.Tensor, key: ps.Key) -> torch.Tensor:
                other = {name: leaf.clone() for name, leaf in state.params.items()}
                return model(batch).mean() - module.apply(other, {}, batch)[0].mean()

            ps.train_step(module, loss, optimizer)(state, x)
            if runtime.world_size == 1:
                raise AssertionError("local: works")

        plain = {name: torch.zeros(leaf.shape) for name, leaf in state.params.items()}
        return {
            "grad of apply": error_of(differentiate_apply),
            "nested": error_of(nested),
            "missing": error_of(module.apply, {}, {}, x),
            "undeclared method": error_of(module.apply, state.params, {}, x, method="nope"),
            "plain params": error_of(module.apply, plain, {}, x),
            "no gradient": error_of(
                ps.train_step(module, lambda model, batch, key: torch.zeros(()), optimizer), state, x
            ),
            "still works": error_of(ps.train_step(module, net_loss, optimizer), state, net_batch(0)),
        }


@everywhere(_refusals)
def test_what_a_topology_cannot_do_it_says(topology, scenario):
    several = topology != (1, 1)
    sharded = topology[1] > 1
    for results in on_ranks(topology, scenario):
        assert ("ps.value_and_grad" if several else "local: works") in results["grad of apply"][1]
        assert ("one state at a time" if several else "local: works") in results["nested"][1]
        assert "missing blocks.0.down.bias" in results["missing"][1]
        assert "'nope' is not a method" in results["undeclared method"][1]
        assert results["plain params"] is None or "plain tensor" in results["plain params"][1]
        assert (results["plain params"] is not None) == sharded
        assert "does not depend on any trainable parameter" in results["no gradient"][1]
        assert results["still works"] is None


def _batchnorm(topology: tuple[int, int]) -> dict[str, Any]:
    """B10: BatchNorm1d(1), momentum 0.1, rank 0 [1, 3], rank 1 [11, 33]."""
    with runtime_on(topology, mixed_precision="bf16") as runtime:
        model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1))
        module = ps.shard(model, runtime=runtime)
        optimizer = ps.sgd(0.1)
        state = ps.init(module, optimizer, ps.key(0))
        x = torch.tensor([[1.0], [3.0]]) if runtime.rank % 2 == 0 else torch.tensor([[11.0], [33.0]])

        def loss(model: nn.Module, batch: torch.Tensor, key: ps.Key) -> torch.Tensor:
            return model(batch).square().mean()

        def stats(buffers: Any) -> tuple[float, float, int]:
            names = ("0.running_mean", "0.running_var", "0.num_batches_tracked")
            return tuple(round(buffers[name].item(), 5) for name in names)

        step = ps.train_step(module, loss, optimizer)
        new, _ = step(state, x)
        again, _ = step(state, x)
        twice, _ = ps.train_step(module, loss, optimizer, accumulate=2)(state, torch.cat([x, x]))
        ps.check_replicas(new)
        applied = module.apply(state.params, state.buffers, x, train=True)[1]
        in_eval = module.apply(state.params, state.buffers, x, train=False)[1]
        evaluated = ps.eval_step(module, loss)(new, x)["loss"]
        return {
            "old": stats(state.buffers),
            "new": stats(new.buffers),
            "again": again.digest() == new.digest(),
            "two microbatches": stats(twice.buffers),
            "applied": stats(applied),
            "in eval": stats(in_eval),
            "dtypes": {name: str(leaf.dtype) for name, leaf in new.buffers.items()},
            "evaluated": math.isfinite(float(evaluated)) and stats(new.buffers) == stats(again.buffers),
        }


@everywhere(_batchnorm)
def test_b10_buffers_are_leaves_of_the_state_and_equal_on_all_ranks(topology, scenario):
    # By hand: means 2 and 22, unbiased variances 2 and 242; running = 0.9 * (0, 1) + 0.1 * (mean, variance).
    local = (0.2, 1.1, 1)
    several = (round((0.2 + 2.2) / 2, 5), round((1.1 + 25.1) / 2, 5), 1)
    for results in on_ranks(topology, scenario):
        assert results["old"] == results["in eval"] == (0, 1, 0)
        assert results["new"] == results["applied"] == pytest.approx(local if topology == (1, 1) else several)
        assert results["again"]
        assert results["two microbatches"][2] == 2
        assert results["dtypes"] == {
            "0.running_mean": "torch.float32",
            "0.running_var": "torch.float32",
            "0.num_batches_tracked": "torch.int64",
        }
        assert results["evaluated"]


class _Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.tall = nn.Linear(4, 4), nn.Linear(3, 5)


def _initial(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        torch.manual_seed(1000 + runtime.rank)
        if runtime.rank == 0:
            torch.rand(13)
        direct = ps.shard(_Shapes(), ps.ShardingSpec(units=("square",), root=("tall",)), runtime)
        with torch.device("meta"):
            meta_model = _Shapes()
        meta = ps.shard(meta_model, ps.ShardingSpec(), runtime)
        optimizer = ps.adamw(0.1)
        ambient = torch.random.get_rng_state()
        states = [ps.init(module, optimizer, ps.key(0)) for module in (direct, meta)]
        untouched = torch.equal(ambient, torch.random.get_rng_state())
        ps.check_replicas(states[0])
        moved = states[0].clone()
        local = getattr(moved.params["square.weight"], "_local_tensor", moved.params["square.weight"])
        if runtime.rank == runtime.world_size - 1:
            local.view(-1)[0] += 1e-3
        shards = {name: getattr(leaf, "_local_tensor", leaf).tolist() for name, leaf in states[0].params.items()}
        return {
            "digests": [state.digest() for state in states],
            "other seed": ps.init(direct, optimizer, ps.key(1)).digest(),
            "ambient untouched": untouched,
            "shards": shards,
            "moved": error_of(ps.check_replicas, moved),
            "layers differ": not torch.equal(*(whole(states[0].params["square.weight"])[:2])),
        }


def test_b13_one_set_of_initial_bits_whatever_the_topology():
    digests = set()
    for name, topology in TOPOLOGIES.items():
        everyone = on_ranks(topology, _initial)
        for results in everyone:
            digests.update(results["digests"])
            assert results["other seed"] not in digests
            assert results["ambient untouched"]
            assert results["layers differ"]
        if name in ("ddp", "hsdp"):  # a replica was moved by 1e-3
            assert all("'params/square.weight'" in results["moved"][1] for results in everyone)
        if name == "ddp":
            assert everyone[0]["shards"] == everyone[1]["shards"]
        if name == "fsdp2":
            assert everyone[0]["shards"]["square.weight"] != everyone[1]["shards"]["square.weight"]
            assert [len(r["shards"]["tall.weight"]) for r in everyone] == [3, 2]
    assert len(digests) == 1


def _branches(topology: tuple[int, int]) -> list[bool]:
    with runtime_on(topology) as runtime:
        module, optimizer = ps.shard(Net(), runtime=runtime), net_optimizer()
        state = ps.init(module, optimizer, ps.key(0))
        step = ps.train_step(module, net_loss, optimizer)
        batches = [rank_slice(runtime, net_batch(k)) for k in range(3)]
        alone = [leaf_table(step(state, batch)[0]) for batch in batches]
        branches = [step(state, batch)[0] for batch in batches]
        deeper = [step(branch, batches[0])[0] for branch in branches]
        assert len({branch.digest() for branch in deeper}) == 3
        return [
            all(torch.equal(leaf, expected[name]) for name, leaf in leaf_table(branch).items())
            for branch, expected in zip(branches, alone, strict=True)
        ]


@everywhere(_branches)
def test_branches_from_one_state_do_not_influence_each_other(topology, scenario):
    for results in on_ranks(topology, scenario):
        assert all(results)


_SCENARIOS = (_train, _purity, _stale_values, _refusals, _batchnorm, _initial, _branches)

"""Transforms and wrappers in four topologies: cases B02, B04, B05 and B22, averages, noise, decay masks."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.state.collective import from_rank_zero, gather_objects
from tests.ranks import RanksFailed, run_on
from tests.toys import (
    TOPOLOGIES,
    Net,
    ToyT,
    error_of,
    leaf_table,
    net_batch,
    net_loss,
    rank_slice,
    runtime_on,
    toy_batch,
    toy_loss,
    whole,
)

SHARDED = {"fsdp2", "hsdp"}


@functools.cache
def _run(topology: tuple[int, int]) -> list[dict[str, Any]] | Exception:
    """Every scenario of this file in one set of processes, which costs more than the scenarios do."""
    try:
        return run_on(topology, _all_scenarios, timeout=150)
    except RanksFailed as error:
        return error


def _all_scenarios(topology: tuple[int, int]) -> dict[str, Any]:
    results = {}
    for scenario in (zero_tokens, frozen_leaves, bad_gradients, unfreezing, averages, same_everywhere):
        with runtime_on(topology) as runtime:
            results[scenario.__name__] = scenario(runtime)
    return results


def everywhere(scenario: Any) -> list[tuple[str, Any]]:
    """(topology, result of the scenario), after a check that all ranks have the same one."""
    found = []
    for name, topology in TOPOLOGIES.items():
        everyone = _run(topology)
        if isinstance(everyone, Exception):
            raise everyone
        results = [results[scenario.__name__] for results in everyone]
        assert all(repr(result) == repr(results[0]) for result in results), (name, results)
        found.append((name, results[0]))
    return found


def wrapped(optimizer: Any) -> Any:
    """Everything at once around an optimizer."""
    return ps.skip_nonfinite(ps.with_ema(ps.lookahead(optimizer, every=2), 0.5), max_consecutive=2)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def shared_folder() -> Path:
    return Path(from_rank_zero(tempfile.mkdtemp))


# B02: the token-weighted mean over ranks of which some, or all, have nothing to say.


def zero_tokens(runtime: ps.Runtime) -> Any:
    found = {}
    batches = {  # rows for up to 4 ranks
        "both": toy_batch([1, 2], [3], [10], [], length=2),
        "one": toy_batch([1, 2], [3], [], [], length=2),
        "none": toy_batch([], [], [], [], length=2),
    }
    for label, optimizer in (("plain", ps.sgd(0.1)), ("wrapped", wrapped(ps.sgd(0.1)))):
        for accumulate in (1, 2):
            module = ps.shard(ToyT(), ps.ShardingSpec(), runtime)
            step = ps.train_step(module, toy_loss, optimizer, accumulate=accumulate)
            state = ps.init(module, optimizer, ps.key(0))
            for name, batch in batches.items():
                before = leaf_table(state)
                new, metrics = step(state, rank_slice(runtime, batch))
                after = leaf_table(new)
                change = (before["params/linear.weight"] - after["params/linear.weight"]) / 0.1
                same = all(torch.equal(after[leaf], before[leaf]) for leaf in before)
                found[label, accumulate, name] = (
                    change.flatten().tolist(),
                    float(metrics["weight"]),
                    float(metrics["grad_norm"]),
                    same,
                    float(metrics["loss"] / before["params/linear.weight"].sum()) if metrics["weight"] else 0.0,
                )
    return found


def test_b02_ranks_without_tokens_weigh_nothing():
    for name, found in everywhere(zero_tokens):
        for label in ("plain", "wrapped"):
            for accumulate in (1, 2):
                for batch, mean, tokens in (("both", 4.0, 4), ("one", 2.0, 3), ("none", 0.0, 0)):
                    change, weight, norm, same, loss = found[label, accumulate, batch]
                    where = (name, label, accumulate, batch)
                    assert change == pytest.approx([mean, mean], abs=1e-5), where
                    assert weight == tokens, where
                    assert norm == pytest.approx(mean * math.sqrt(2), rel=1e-6), where
                    assert same == (tokens == 0), where
                    assert loss == pytest.approx(mean, rel=1e-6), where


# B04: frozen leaves.


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def frozen_leaves(runtime: ps.Runtime) -> Any:
    plain = ps.chain(clip=ps.clip_by_global_norm(0.05), adamw=ps.adamw(0.1, weight_decay=0.1))
    frozen = ps.freeze(plain, "0.*")
    module = ps.shard(two_layers(), ps.ShardingSpec(), runtime)
    found: dict[str, Any] = {}

    def train(state: ps.TrainState, optimizer: Any, steps: range) -> tuple[ps.TrainState, Any]:
        step = ps.train_step(module, net_loss, optimizer)
        for k in steps:
            state, metrics = step(state, rank_slice(runtime, net_batch(k)))
        return state, metrics

    start = ps.init(module, frozen, ps.key(0))
    state, metrics = train(start, frozen, range(3))
    moved = {n: not torch.equal(whole(state.params[n]), whole(start.params[n])) for n in state.params}
    found["from the start"] = (moved, sorted(state.opt_state["adamw"]["exp_avg"]), numbers(metrics)["grad_norm"])
    # The norm is that of what is trained: by hand, from the gradients of the state before the last step.
    before, _ = train(start, frozen, range(2))
    grads = ps.value_and_grad(module, net_loss)(
        before.params, before.buffers, rank_slice(runtime, net_batch(2)), before.key.fold_in(2)
    ).grads
    found["norm by hand"] = float(ps.global_norm({n: g for n, g in grads.items() if n.startswith("2.")}))
    found["norm of all"] = float(ps.global_norm(grads))
    # Frozen after two steps: leaves and moments as they were.
    middle, _ = train(ps.init(module, plain, ps.key(0)), plain, range(2))
    later, _ = train(middle, frozen, range(2, 4))
    old, new = leaf_table(middle), leaf_table(later)
    found["later"] = {name: not torch.equal(new[name], old[name]) for name in old}
    found["everything"] = error_of(ps.init, module, ps.freeze(plain, "**"), ps.key(0))
    return found


def test_b04_frozen_leaves_stay_bit_for_bit():
    norms = []
    for name, found in everywhere(frozen_leaves):
        moved, moments, norm = found["from the start"]
        assert moved == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}, name
        assert moments == ["2.bias", "2.weight"]
        assert norm == found["norm by hand"] < found["norm of all"]
        assert all(changed == ("/2." in leaf) for leaf, changed in found["later"].items() if "/step/" not in leaf)
        assert not any(changed for leaf, changed in found["later"].items() if "/0." in leaf)
        kind, message = found["everything"]
        assert kind == "ValueError"
        assert "nothing to train" in message
        norms.append(norm)
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)


# B05: gradients that are not finite on one rank.


class Root(nn.Module):
    """Whose gradient is not finite at 0, though its value is: sqrt."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.norm(x) + x)))


def root_loss(model: nn.Module, batch: torch.Tensor, key: ps.Key) -> ps.Mean:
    # The last column is a factor, under a root together with the output: 0 gives sqrt(0).
    out = model(batch[:, :2])
    return ps.Mean((out.abs() * batch[:, 2:]).sqrt().sum(), len(batch))


def root_batch(kind: str, row: int = 15) -> torch.Tensor:
    batch = torch.rand(16, 3, generator=torch.Generator().manual_seed(3)) + 0.5
    if kind == "nan":
        batch[row, 0] = math.nan
    elif kind == "inf":
        batch[row, 1] = math.inf
    elif kind == "sqrt":
        batch[row, 2] = 0.0
    return batch


def bad_gradients(runtime: ps.Runtime) -> Any:
    found: dict[Any, Any] = {}
    # On the last rank; or in the first of its two microbatches.
    rows = 16 // runtime.dp_size
    for donate in (False, True):
        for kind in ("nan", "inf", "sqrt"):
            for accumulate, row in ((1, 15), (2, 16 - rows)):
                optimizer = ps.skip_nonfinite(
                    ps.with_ema(ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.1)), 0.5), max_consecutive=1
                )
                module = ps.shard(Root(), ps.ShardingSpec(), runtime)
                step = ps.train_step(module, root_loss, optimizer, accumulate=accumulate, donate=donate)
                good, bad = (rank_slice(runtime, root_batch(k, row)) for k in ("good", kind))
                state, _ = step(ps.init(module, optimizer, ps.key(0)), good)
                old = leaf_table(state)
                state, skipped = step(state, bad)
                ps.check_replicas(state)
                new = leaf_table(state)
                changed = [name for name in old if not torch.equal(new[name], old[name])]
                third, metrics = step(state.clone(), good)
                finite = all(bool(leaf.isfinite().all()) for leaf in leaf_table(third).values())
                error = error_of(step, state, bad)
                found[donate, kind, accumulate] = {
                    "skipped": (float(skipped["skipped"]), state.step, changed),
                    "next": (float(metrics["skipped"]), finite),
                    "error": error,
                    "unchanged": leaf_table(state)["params/body.weight"].equal(new["params/body.weight"]),
                }
    found["resumed"] = resumed_count(runtime)
    found["without"] = without_guard(runtime)
    return found


def resumed_count(runtime: ps.Runtime) -> Any:
    """The run of skips goes on after a resume."""
    optimizer = ps.skip_nonfinite(ps.sgd(0.1), max_consecutive=1)
    module = ps.shard(Root(), ps.ShardingSpec(), runtime)
    step, bad = ps.train_step(module, root_loss, optimizer), rank_slice(runtime, root_batch("nan"))
    state, _ = step(ps.init(module, optimizer, ps.key(0)), bad)
    path = ps.save(shared_folder() / "state", state)
    return error_of(step, ps.restore(path, ps.abstract_state(module, optimizer)), bad)


def without_guard(runtime: ps.Runtime) -> Any:
    """Guard off: every rank goes the same way, and the norm says what happened."""
    module = ps.shard(Root(), ps.ShardingSpec(), runtime)
    step = ps.train_step(module, root_loss, ps.sgd(0.1))
    _, metrics = step(ps.init(module, ps.sgd(0.1), ps.key(0)), rank_slice(runtime, root_batch("nan")))
    return math.isfinite(float(metrics["grad_norm"]))


def test_b05_all_ranks_skip_alike_and_raise_alike():
    for name, found in everywhere(bad_gradients):
        assert found.pop("without") is False
        kind, message = found.pop("resumed")
        assert kind == "NonFiniteError", name
        assert "step 1: " in message
        assert "after 1 skipped in a row (max_consecutive=1)" in message
        assert len(found) == 12
        for case, result in found.items():
            assert result["skipped"] == (1.0, 2, ["opt_state/skip_nonfinite/in_a_row"]), (name, case)
            assert result["next"] == (0.0, True), (name, case)
            kind, message = result["error"]
            assert kind == "NonFiniteError", (name, case, message)
            assert "step 2: the gradient of 'norm.weight'" in message, (name, case)
            assert result["unchanged"], (name, case)


# B22: freezing, saving, unfreezing.


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def unfreezing(runtime: ps.Runtime) -> Any:
    module = ps.shard(Chained(), ps.ShardingSpec(), runtime)
    folder, batch = shared_folder(), rank_slice(runtime, torch.ones(4, 1))

    def loss(model: nn.Module, x: torch.Tensor, key: ps.Key) -> ps.Mean:
        return ps.Mean(model(x).sum(), len(x))

    def train(state: ps.TrainState, optimizer: Any) -> ps.TrainState:
        return ps.train_step(module, loss, optimizer)(state, batch)[0]

    def reloaded(name: str, state: ps.TrainState, optimizer: Any) -> ps.TrainState:
        return ps.restore(ps.save(folder / name, state), ps.abstract_state(module, optimizer))

    plain, frozen = ps.adamw(0.1), ps.freeze(ps.adamw(0.1), "first.*")
    found: dict[str, Any] = {}
    # Train both, freeze one, (save, load,) unfreeze, step.
    middle = train(train(ps.init(module, plain, ps.key(0)), plain), frozen)
    found["unfrozen"] = train(middle, plain).digest()
    found["unfrozen, saved"] = train(reloaded("middle", middle, plain), plain).digest()
    # Frozen from the start, then unfrozen: an error, or fresh moments with their own bias correction.
    start = train(ps.init(module, frozen, ps.key(0)), frozen)
    found["no moments"] = error_of(train, start, plain)
    found["no moments in the file"] = error_of(reloaded, "start", start, plain)
    fresh = ps.switch_optimizer(start, module, plain)
    change = whole(train(fresh, plain).params["first.weight"]) - whole(start.params["first.weight"])
    found["first update"] = abs(float(change))
    # Weight 1, gradient 1, saved at step 0.
    one = nn.Linear(1, 1, bias=False)
    module = ps.shard(one, ps.ShardingSpec(), runtime)
    adamw = ps.adamw(0.1, weight_decay=0.0)
    first = ps.init(module, adamw, ps.key(0))
    for leaf in first.params.values():
        getattr(leaf, "_local_tensor", leaf).fill_(1.0)
    found["first step"] = [
        float(whole(train(state, adamw).params["weight"])) for state in (first, reloaded("zero", first, adamw))
    ]
    return found


def test_b22_unfreezing_goes_on_where_it_was_or_says_that_it_cannot():
    for name, found in everywhere(unfreezing):
        assert found["unfrozen"] == found["unfrozen, saved"], name
        kind, message = found["no moments"]
        assert kind == "ValueError"
        assert "adamw has no 'exp_avg' for 'first.weight'" in message
        kind, message = found["no moments in the file"]
        assert kind == "CheckpointError"
        assert "opt_state/adamw/exp_avg/first.weight" in message
        assert found["first update"] == pytest.approx(0.1, rel=0.02)  # lr: the bias correction of a first update
        assert found["first step"] == pytest.approx([0.9, 0.9], abs=1e-6)


# Averages: in the state, placed as the parameters, in checkpoints, and in what convert writes.


def averages(runtime: ps.Runtime) -> Any:
    found: dict[str, Any] = {}
    optimizer = wrapped(ps.adamw(1e-2, implementation="foreach"))
    module = ps.shard(Net(), runtime=runtime)
    table: dict[bool, Any] = {}
    for donate in (False, True):
        step = ps.train_step(module, net_loss, optimizer, donate=donate)
        state = ps.init(module, optimizer, ps.key(0))
        found["start"] = all(torch.equal(whole(state.ema[n]), whole(leaf)) for n, leaf in state.params.items())
        for k in range(4):
            state, _ = step(state, rank_slice(runtime, net_batch(k)))
        table[donate] = leaf_table(state)
        found["placed", donate] = all(
            getattr(state.ema[n], "placements", None) == getattr(leaf, "placements", None)
            and state.ema[n].dtype == torch.float32
            for n, leaf in state.params.items()
        )
    found["donated"] = all(torch.equal(table[True][name], leaf) for name, leaf in table[False].items())
    found["differ"] = any(not torch.equal(whole(state.ema[n]), whole(leaf)) for n, leaf in state.params.items())
    path = ps.save(shared_folder() / "state", state)
    restored = ps.restore(path, ps.abstract_state(module, optimizer))
    found["restored"] = restored.digest() == state.digest()
    evaluate = ps.eval_step(module, net_loss)
    batch = rank_slice(runtime, net_batch(9))
    found["evaluated"] = float(evaluate(state.replace(params=ps.eval_params(state), ema=None), batch)["loss"])
    found["plain"] = float(evaluate(state, batch)["loss"])
    ema = {name: whole(leaf) for name, leaf in state.ema.items()}
    found["converted"] = from_rank_zero(lambda: converted(path, ema))
    return {**found, "ema": {name: leaf.tolist() for name, leaf in ema.items()}}


def converted(path: Path, ema: dict[str, torch.Tensor]) -> bool:
    from safetensors.torch import load_file

    ps.convert(path, path.parent / "out", include_ema=True)
    files = sorted((path.parent / "out" / "ema").glob("*.safetensors"))
    written = {name: leaf for file in files for name, leaf in load_file(file).items()}
    return written.keys() == ema.keys() and all(torch.equal(written[name], leaf) for name, leaf in ema.items())


def test_averages_live_with_the_parameters_in_every_topology():
    results = everywhere(averages)
    reference = results[0][1]
    for name, found in results:
        for check in ("start", ("placed", False), ("placed", True), "donated", "differ", "restored", "converted"):
            assert found[check] is True, (name, check)
        assert found["evaluated"] != found["plain"]
        assert found["evaluated"] == pytest.approx(reference["evaluated"], rel=1e-5)
        for leaf, values in reference["ema"].items():
            torch.testing.assert_close(torch.tensor(found["ema"][leaf]), torch.tensor(values), rtol=1e-4, atol=1e-5)


# What every topology must compute alike, to the bit where no sum is involved.


def same_everywhere(runtime: ps.Runtime) -> Any:
    found: dict[str, Any] = {}
    module = ps.shard(Net(), runtime=runtime)
    # Noise alone: of gradients that are zero.
    start = ps.init(module, ps.sgd(1.0), ps.key(0))
    zeros = {name: leaf * 0.0 for name, leaf in start.params.items()}
    noise = ps.add_noise(ps.key(7), 1.0)
    drawn, _ = noise.update(zeros, {}, start.params, step=3)
    found["noise"] = {name: whole(leaf).tolist() for name, leaf in drawn.items()}
    # Which parameters decay: those that zero gradients change.
    mask = ps.decay_mask(ps.adamw(0.1, weight_decay=0.1), module)
    decayed, _ = mask.update(zeros, mask.init(start.params), start.params, step=0)
    found["decays"] = sorted(n for n, leaf in decayed.items() if not torch.equal(whole(leaf), whole(start.params[n])))
    found["table"] = mask.describe()
    # Groups, classes of sharded modules among them, a monitor, hyperparameters in the state.
    groups = {"norms": ("LayerNorm", ps.sgd(0.1)), "rest": ("**", ps.adamw(1e-2, implementation="foreach"))}
    optimizer = ps.chain(
        monitor=ps.monitor_norms({"norms": "LayerNorm", "rest": "**"}, module=module, params=True),
        clip=ps.clip_by_group({"heads": ("head.*", 0.1)}, module=module),
        center=ps.centralize(),
        main=ps.with_hyperparameters(lambda decay: ps.partition(groups, module=module), decay=0.0),
    )
    step = ps.train_step(module, net_loss, optimizer)
    state = ps.init(module, optimizer, ps.key(0))
    for k in range(3):
        state, metrics = step(state, rank_slice(runtime, net_batch(k)))
    found["metrics"] = numbers(metrics)
    found["dead"] = error_of(ps.init, module, ps.partition({"a": ("bolcks.**", ps.sgd(0.1))}, module=module), ps.key(0))
    assert len(set(gather_objects(state.digest()))) == 1
    return found


def test_transforms_give_one_result_in_every_topology():
    results = everywhere(same_everywhere)
    reference = results[0][1]
    assert "blocks.0.up.weight" in reference["decays"]
    assert not any("norm" in name or name.endswith("bias") for name in reference["decays"])
    for name, found in results:
        assert found["noise"] == reference["noise"], name  # to the bit
        assert found["decays"] == reference["decays"], name
        assert found["table"] == reference["table"], name
        assert found["metrics"] == pytest.approx(reference["metrics"], rel=1e-4), name
        assert "grad_norm/norms" in found["metrics"]
        assert "'bolcks.**' of 'a' takes no parameter" in found["dead"][1], name

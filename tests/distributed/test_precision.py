"""bf16 and fp16 with one meaning in every topology, and the loss scale of fp16 as part of the state."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purestep as ps
from purestep.sharding.norms import compute_in_fp32
from tests.ranks import RanksFailed, run_on
from tests.toys import TOPOLOGIES, error_of, leaf_table, rank_slice, runtime_on, whole

SCALE = ps.LossScaleConfig(init=1024.0, growth_interval=3)
HUGE = 1e6  # as an input it overflows fp16


class Norms(nn.Module):
    """A residual block with LayerNorm, a BatchNorm and a head: every kind of layer that precision treats apart."""

    sharding_spec = ps.ShardingSpec(units=("up", "down"))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.layer_norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.batch_norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3) -> (rows, 4)
        x = self.embed(x)
        hidden = self.up(self.layer_norm(x.float()))
        self.seen = {"residual": self.layer_norm(x.float()).dtype, "hidden": hidden.dtype}
        return self.head(self.batch_norm(x + self.down(F.gelu(hidden))))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], key: ps.Key) -> ps.Mean:
    """Cross-entropy, summed over the rows."""
    x, targets = batch
    loss = F.cross_entropy(model(x), targets, reduction="sum")
    if isinstance(model, Norms):
        model.seen["loss"] = loss.dtype
    return ps.Mean(loss, len(x))


def batch_of(step: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, generator=generator), torch.randint(4, (rows,), generator=generator)


def optimizer_of() -> Any:
    return ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(1e-2))


def begin(runtime: ps.Runtime, model: nn.Module | None = None) -> tuple[ps.PureModule, Any, ps.TrainState]:
    module, optimizer = ps.shard(Norms() if model is None else model, runtime=runtime), optimizer_of()
    return module, optimizer, ps.init(module, optimizer, ps.key(0))


@functools.cache
def _run(topology: tuple[int, int]) -> list[dict[str, Any]] | Exception:
    """Every scenario of this file in one set of processes, which costs more than the scenarios do."""
    try:
        return run_on(topology, _all_scenarios, timeout=150)
    except RanksFailed as error:
        return error


def _all_scenarios(topology: tuple[int, int]) -> dict[str, Any]:
    return {scenario.__name__: scenario(topology) for scenario in _SCENARIOS}


def on_ranks(topology: tuple[int, int], scenario: Callable[..., Any]) -> list[Any]:
    everyone = _run(topology)
    if isinstance(everyone, Exception):
        raise everyone
    return [results[scenario.__name__] for results in everyone]


everywhere = pytest.mark.parametrize(
    "topology", [pytest.param(t, id=name, marks=pytest.mark.xdist_group(name)) for name, t in TOPOLOGIES.items()]
)


# --- one meaning ---


class Plain(nn.Module):
    """Without BatchNorm, whose numbers depend on the topology by their own rule."""

    sharding_spec = ps.ShardingSpec(units=("up", "down"))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def _losses(topology: tuple[int, int]) -> dict[str, list[float]]:
    results = {}
    for precision in ("no", "bf16", "fp16"):
        with runtime_on(topology, mixed_precision=precision, loss_scale=SCALE) as runtime:
            for accumulate in (1, 2):
                module, optimizer, state = begin(runtime, Plain())
                step = ps.train_step(module, loss_of, optimizer, accumulate=accumulate, donate=True)
                losses = []
                for k in range(8):
                    state, metrics = step(state, rank_slice(runtime, batch_of(k)))
                    losses.append(float(metrics["loss"]))
                results[f"{precision}, accumulate {accumulate}"] = losses
                assert {leaf.dtype for leaf in state.params.values()} == {torch.float32}
    return results


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@everywhere
def test_losses_agree_with_those_of_fp32_and_between_topologies(topology, precision):
    fp32 = on_ranks((1, 1), _losses)[0]["no, accumulate 1"]
    local = on_ranks((1, 1), _losses)[0][f"{precision}, accumulate 1"]
    for results in on_ranks(topology, _losses):
        for accumulate in (1, 2):
            losses = results[f"{precision}, accumulate {accumulate}"]
            between = {"no": 1e-5, "bf16": 1e-3, "fp16": 1e-4}[precision]
            assert losses == pytest.approx(local, rel=between), accumulate
            assert losses == pytest.approx(fp32, rel={"no": 1e-5, "bf16": 3e-3, "fp16": 3e-4}[precision]), accumulate
    assert precision == "no" or local != fp32  # it did compute in 16 bits


def _dtypes(topology: tuple[int, int]) -> dict[str, Any]:
    results = {}
    for precision in ("bf16", "fp16"):
        with runtime_on(topology, mixed_precision=precision, loss_scale=SCALE) as runtime:
            module, optimizer, state = begin(runtime)
            step = ps.train_step(module, loss_of, optimizer)
            for k in range(2):
                state, metrics = step(state, rank_slice(runtime, batch_of(k)))
            seen = module.module.seen
            results[precision] = {
                "activations": {name: str(dtype) for name, dtype in seen.items()},
                "buffers": {name: (str(leaf.dtype), leaf.tolist()) for name, leaf in state.buffers.items()},
                "state": {
                    str(leaf.dtype)
                    for tree in (state.params, *state.opt_state["adamw"].values())
                    for leaf in tree.values()
                },
                "finite": math.isfinite(float(metrics["loss"])),
            }
    return results


@everywhere
def test_norms_losses_and_buffers_keep_their_dtype(topology):
    for results in on_ranks(topology, _dtypes):
        for precision, name in (("bf16", "torch.bfloat16"), ("fp16", "torch.float16")):
            got = results[precision]
            assert got["activations"] == {"residual": "torch.float32", "hidden": name, "loss": "torch.float32"}
            assert got["state"] == {"torch.float32"}
            assert got["finite"]
            dtypes = {buffer.partition(".")[2]: dtype for buffer, (dtype, _) in got["buffers"].items()}
            assert dtypes == {
                "running_mean": "torch.float32",
                "running_var": "torch.float32",
                "num_batches_tracked": "torch.int64",
            }
            assert got["buffers"]["batch_norm.num_batches_tracked"][1] == 2


# --- the loss scale ---


def _scaled_gradients(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        module, _, state = begin(runtime)
        batch = batch_of(runtime.rank, rows=6 if runtime.rank == 0 else 32)  # no power of two, and no two ranks alike
        grad_fn = ps.accumulate(ps.value_and_grad(module, loss_of), 2)
        plain = grad_fn(state.params, state.buffers, batch, state.key)
        results = {}
        for scale in (1.0, 2.0**20, torch.tensor(2.0**-20)):
            scaled = grad_fn(state.params, state.buffers, batch, state.key, scale=scale)
            same = [torch.equal(whole(grad), whole(scaled.grads[name])) for name, grad in plain.grads.items()]
            results[str(scale)] = all(same) and float(scaled.loss) == float(plain.loss) and scaled.is_finite
        odd = grad_fn(state.params, state.buffers, batch, state.key, scale=1000.0)
        results["not a power of two"] = all(
            torch.allclose(whole(grad), whole(odd.grads[name]), rtol=1e-5, atol=1e-6)
            for name, grad in plain.grads.items()
        )
        return results


@everywhere
def test_a_power_of_two_scales_gradients_without_changing_a_bit(topology):
    for results in on_ranks(topology, _scaled_gradients):
        assert results == dict.fromkeys(results, True)


class Tiny(nn.Module):
    """Its gradients are below what fp16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _underflow(topology: tuple[int, int]) -> dict[str, Any]:
    def tiny(model: nn.Module, batch: tuple[Tensor, Tensor], key: ps.Key) -> ps.Mean:
        return ps.Mean((model(batch[0]).float() * 1e-8).sum(), len(batch[0]))

    results = {}
    for precision in ("no", "fp16"):
        with runtime_on(topology, mixed_precision=precision) as runtime:
            module, _, state = begin(runtime, Tiny())
            batch = rank_slice(runtime, batch_of(0))
            for scale in (1.0, 65536.0):
                out = ps.value_and_grad(module, tiny)(state.params, state.buffers, batch, state.key, scale=scale)
                results[f"{precision} {scale}"] = whole(out.grads["linear.weight"]).flatten().tolist()
    return results


@everywhere
def test_scaling_saves_gradients_too_small_for_fp16(topology):
    for results in on_ranks(topology, _underflow):
        assert results["fp16 1.0"] == [0.0] * 12
        assert results["no 1.0"] == results["no 65536.0"]
        assert results["fp16 65536.0"] == pytest.approx(results["no 1.0"], rel=1e-2)


def _with_overflow(runtime: ps.Runtime, step: int, rank: int | None = None) -> Any:
    """This rank's batch, which overflows in fp16 on one rank, if any."""
    x, targets = rank_slice(runtime, batch_of(step))
    return (x * HUGE if rank is not None and runtime.rank == rank else x), targets


def _skipping(topology: tuple[int, int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with runtime_on(topology, mixed_precision="fp16", loss_scale=SCALE) as runtime:
        last = runtime.world_size - 1
        for donate in (False, True):
            for accumulate in (1, 2):
                module, optimizer, state = begin(runtime)
                step = ps.train_step(module, loss_of, optimizer, accumulate=accumulate, donate=donate)
                rows = []
                # Good, overflow on the last rank alone, then good ones until the scale grows.
                for k, rank in enumerate((None, last, None, None, None, None)):
                    before = leaf_table(state)
                    old_step = state.step
                    state, metrics = step(state, _with_overflow(runtime, k, rank))
                    after = leaf_table(state)
                    rows.append(
                        {
                            "changed": sorted(
                                {n.partition("/")[0] for n in after if not torch.equal(after[n], before[n])}
                            ),
                            "steps": state.step - old_step,
                            "skipped": metrics["skipped"],
                            "used": float(metrics["loss_scale"]),
                            "scale": float(state.extra["loss_scale"]["scale"]),
                            "good": int(state.extra["loss_scale"]["good_steps"]),
                            "finite": all(bool(leaf.isfinite().all()) for leaf in after.values()),
                            "norm": math.isfinite(float(metrics["grad_norm"])),
                        }
                    )
                ps.check_replicas(state)
                results[f"donate={donate}, accumulate {accumulate}"] = rows
    return results


@everywhere
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_backs_off(topology):
    for results in on_ranks(topology, _skipping):
        for name, rows in results.items():
            assert [row["skipped"] for row in rows] == [0, 1, 0, 0, 0, 0], name
            assert [row["used"] for row in rows] == [1024, 1024, 512, 512, 512, 1024], name
            assert [row["scale"] for row in rows] == [1024, 512, 512, 512, 1024, 1024], name
            assert [row["good"] for row in rows] == [1, 0, 1, 2, 0, 1], name
            assert rows[1]["changed"] == ["extra"], name
            assert rows[0]["changed"] == rows[5]["changed"] == ["buffers", "extra", "opt_state", "params"], name
            assert all(row["steps"] == 1 and row["finite"] for row in rows), name
            assert [row["norm"] for row in rows] == [True, False, True, True, True, True], name


def _one_element(topology: tuple[int, int]) -> list[Any]:
    """Only the first row of the last weight overflows: where it is sharded, on one rank."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor], key: ps.Key) -> ps.Mean:
        factors = torch.tensor([batch[0].abs().max(), 1.0, 1.0, 1.0])
        return ps.Mean((model(batch[0].clamp(-1, 1)) * factors).sum(), len(batch[0]))

    with runtime_on(topology, mixed_precision="fp16", loss_scale=SCALE) as runtime:
        module = ps.shard(Tiny(), runtime=runtime)
        optimizer = ps.sgd(0.1)
        state = ps.init(module, optimizer, ps.key(0))
        step = ps.train_step(module, loss, optimizer)
        x, targets = rank_slice(runtime, batch_of(0))
        after, metrics = step(state, (x * 1e30, targets))
        return [metrics["skipped"], after.replace(step=0, extra=state.extra).digest() == state.digest()]


@everywhere
def test_one_bad_element_anywhere_skips_the_step_everywhere(topology):
    for skipped, unchanged in on_ranks(topology, _one_element):
        assert (skipped, unchanged) == (1.0, True)


def _clipped(topology: tuple[int, int]) -> dict[str, Any]:
    results = {}
    for precision in ("no", "fp16"):
        with runtime_on(topology, mixed_precision=precision) as runtime:
            module = ps.shard(Plain(), runtime=runtime)
            optimizer = ps.chain(clip=ps.clip_by_global_norm(0.25), sgd=ps.sgd(1.0))
            state = ps.init(module, optimizer, ps.key(0))
            new, metrics = ps.train_step(module, loss_of, optimizer)(state, rank_slice(runtime, batch_of(0)))
            moved = [whole(new.params[name]) - whole(leaf) for name, leaf in state.params.items()]
            length = float(torch.stack([x.square().sum() for x in moved]).sum().sqrt())
            results[precision] = (float(metrics["grad_norm"]), length)
    return results


@everywhere
def test_norms_and_clipping_see_the_unscaled_gradient(topology):
    for results in on_ranks(topology, _clipped):
        norm, length = results["fp16"]
        assert norm > 0.25
        assert norm == pytest.approx(results["no"][0], rel=1e-2)
        assert length == pytest.approx(0.25, rel=1e-4)


def _resumed(topology: tuple[int, int]) -> list[bool]:
    with runtime_on(topology, mixed_precision="fp16", loss_scale=SCALE) as runtime:
        module, optimizer, state = begin(runtime)
        step = ps.train_step(module, loss_of, optimizer, accumulate=2)
        holder = [tempfile.mkdtemp()] if runtime.is_main else [None]
        if runtime.world_size > 1:
            torch.distributed.broadcast_object_list(holder)
        path = Path(str(holder[0]), "checkpoint")
        digests = []
        for k in range(6):
            if k == 3:  # after the skipped step
                ps.save(path, state)
            state, _ = step(state, _with_overflow(runtime, k, 0 if k == 2 else None))
            digests.append(state.digest())
        resumed = ps.restore(path, ps.abstract_state(module, optimizer))
        again = []
        for k in range(3, 6):
            resumed, _ = step(resumed, _with_overflow(runtime, k, None))
            again.append(resumed.digest() == digests[k])
        return [*again, float(resumed.extra["loss_scale"]["scale"]) == 1024.0]


@everywhere
def test_a_resumed_run_scales_as_the_uninterrupted_one_bit_for_bit(topology):
    for results in on_ranks(topology, _resumed):
        assert results == [True, True, True, True]


def _composed(topology: tuple[int, int]) -> Any:
    """The same step written by hand from its parts."""
    with runtime_on(topology, mixed_precision="fp16", loss_scale=SCALE) as runtime:
        module, optimizer, state = begin(runtime)
        by_hand, step = state, ps.train_step(module, loss_of, optimizer, accumulate=2)
        grad_fn = ps.accumulate(ps.value_and_grad(module, loss_of), 2)

        def own_step(state: ps.TrainState, batch: Any) -> ps.TrainState:
            loss_scale = state.extra["loss_scale"]
            key = state.key.fold_in(state.step)
            out = grad_fn(state.params, state.buffers, batch, key, scale=loss_scale["scale"])
            params, opt_state, buffers = state.params, state.opt_state, state.buffers
            if out.is_finite:
                params, opt_state = optimizer.update(out.grads, opt_state, params, step=state.step)
                buffers = out.buffers
            adjusted = ps.next_loss_scale(loss_scale, is_finite=out.is_finite, config=SCALE)
            return state.replace(
                step=state.step + 1, params=params, opt_state=opt_state, buffers=buffers, extra={"loss_scale": adjusted}
            )

        same = []
        for k in range(4):
            batch = _with_overflow(runtime, k, 0 if k == 1 else None)
            state, by_hand = step(state, batch)[0], own_step(by_hand, batch)
            same.append(state.digest() == by_hand.digest())
        bare = state.replace(extra={})
        call = ps.value_and_grad(module, loss_of)
        return {
            "same": same,
            "no scale": error_of(call, state.params, state.buffers, batch, state.key),
            "no leaf": error_of(step, bare, batch),
            "reserved": error_of(ps.train_step(module, _reserved, optimizer), state, batch),
        }


def _reserved(model: nn.Module, batch: Any, key: ps.Key) -> Any:
    return loss_of(model, batch, key), {"loss_scale": 1.0}


@everywhere
def test_a_step_composed_by_hand_scales_too_and_one_without_a_scale_is_refused(topology):
    for results in on_ranks(topology, _composed):
        assert results["same"] == [True] * 4
        assert results["no scale"][0] == results["no leaf"][0] == "ValueError"
        assert 'scale=state.extra["loss_scale"]["scale"]' in results["no scale"][1]
        assert "ps.initial_loss_scale()" in results["no leaf"][1]
        assert "cannot name a metric 'loss_scale'" in results["reserved"][1]


# --- what travels between ranks ---


def _reduced(topology: tuple[int, int]) -> dict[str, Any]:
    results = {}
    for reduce_dtype in ("fp32", "bf16", "fp16"):
        config: dict[str, Any] = {
            "fsdp": ps.FSDPConfig(reduce_dtype=reduce_dtype),  # type: ignore[arg-type]
            "ddp": ps.DDPConfig(reduce_dtype=reduce_dtype),  # type: ignore[arg-type]
            "mixed_precision": "fp16",
        }
        with runtime_on(topology, **config) as runtime:
            module, _, state = begin(runtime, Plain())
            batch = rank_slice(runtime, batch_of(0))
            out = ps.value_and_grad(module, loss_of)(state.params, state.buffers, batch, state.key, scale=2.0**10)
            results[reduce_dtype] = {name: whole(grad).numpy() for name, grad in out.grads.items()}
    return results


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp"])
def test_gradients_are_reduced_in_the_dtype_that_was_asked_for(name):
    for arrays in on_ranks(TOPOLOGIES[name], _reduced):
        results = {how: {leaf: torch.from_numpy(x) for leaf, x in grads.items()} for how, grads in arrays.items()}
        for reduce_dtype, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            for leaf, grad in results[reduce_dtype].items():
                exact = results["fp32"][leaf]
                largest = float(exact.abs().max())
                assert grad.dtype == torch.float32
                assert torch.allclose(grad, exact, rtol=0, atol=torch.finfo(dtype).eps * 2 * largest), leaf
                # 16 rows, 2 or 4 ranks, a scale: all powers of two, so the reduced values still fit the dtype.
                assert torch.equal(grad * 2.0**10, (grad * 2.0**10).to(dtype).float()), leaf
            assert any(not torch.equal(grad, results["fp32"][leaf]) for leaf, grad in results[reduce_dtype].items())


def _gathered(topology: tuple[int, int]) -> dict[str, list[float]]:
    results = {}
    for precision, param_dtype in (("no", "fp32"), ("no", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        fsdp = ps.FSDPConfig(param_dtype=param_dtype)  # type: ignore[arg-type]
        with runtime_on(topology, mixed_precision=precision, fsdp=fsdp, loss_scale=SCALE) as runtime:
            module, optimizer, state = begin(runtime)
            step = ps.train_step(module, loss_of, optimizer, accumulate=2)
            losses = []
            for k in range(6):
                state, metrics = step(state, rank_slice(runtime, batch_of(k)))
                losses.append(float(metrics["loss"]))
            results[f"{precision} {param_dtype}"] = losses
            assert {leaf.dtype for leaf in state.params.values()} == {torch.float32}
            assert state.buffers["batch_norm.running_var"].dtype == torch.float32
    return results


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_units_gathered_in_16_bits_train_alike_norms_included(name):
    for results in on_ranks(TOPOLOGIES[name], _gathered):
        exact = results.pop("no fp32")
        for how, losses in results.items():
            assert losses == pytest.approx(exact, rel=3e-3 if "fp16" in how else 2e-2), how
            assert losses != exact, how


def test_only_norms_of_16_bit_units_are_cast():
    model = Norms()
    units = (ps.Unit("up", param_dtype="bf16"), ps.Unit("layer_norm", param_dtype="bf16"))
    plan = ps.ShardingSpec(units=units).resolve(model, ps.Topology(1, 2))
    compute_in_fp32(model, plan)
    assert "forward" in model.layer_norm.__dict__
    assert not any("forward" in module.__dict__ for module in (model.up, model.batch_norm, model.head))
    model.layer_norm.to(torch.bfloat16)
    parameters = dict(model.layer_norm._parameters)
    assert model.layer_norm(torch.randn(2, 6)).dtype == torch.float32  # torch refuses these together
    assert dict(model.layer_norm._parameters) == parameters


_SCENARIOS = (
    _losses,
    _dtypes,
    _scaled_gradients,
    _underflow,
    _skipping,
    _one_element,
    _clipped,
    _resumed,
    _composed,
    _reduced,
    _gathered,
)

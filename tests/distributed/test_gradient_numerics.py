"""Gradients and losses by hand arithmetic, in every topology: cases B01, B02, B03."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from tests.ranks import run_on
from tests.toys import TOPOLOGIES, ToyT, error_of, runtime_on, toy_batch, toy_loss, whole

Rows = list[list[float]]


def _toy_step(
    runtime: ps.Runtime, rows: Rows, *, accumulate: int, donate: bool, length: int | None = None
) -> dict[str, Any]:
    module = ps.shard(ToyT(), runtime=runtime)
    optimizer = ps.sgd(0.1)
    state = _ones(ps.init(module, optimizer, ps.key(0)))
    grad_fn = ps.value_and_grad(module, toy_loss)
    if accumulate > 1:
        grad_fn = ps.accumulate(grad_fn, accumulate)
    batch = toy_batch(*rows, length=length)
    scaling = {"scale": state.extra["loss_scale"]["scale"]} if state.extra else {}
    out = grad_fn(state.params, state.buffers, batch, state.key, **scaling)
    step = ps.train_step(module, toy_loss, optimizer, accumulate=accumulate, donate=donate)
    new, metrics = step(state, batch)
    return {
        "grad": whole(out.grads["linear.weight"]).flatten().tolist(),
        "loss": float(out.loss),
        "step loss": float(metrics["loss"]),
        "tokens": float(metrics["weight"]),
        "weight": whole(new.params["linear.weight"]).flatten().tolist(),
    }


def _ones(state: ps.TrainState) -> ps.TrainState:
    state = state.clone()
    for leaf in state.params.values():
        getattr(leaf, "_local_tensor", leaf).fill_(1.0)
    return state


GROUPINGS: list[tuple[str, Rows, int, int | None]] = [
    # name, rows, microbatches, padded length
    ("one row", [[1, 2, 3, 10]], 1, None),
    ("3 + 1", [[1, 2, 3], [10]], 2, None),
    ("1 + 3", [[1], [2, 3, 10]], 2, None),
    ("2 + 2", [[1, 2], [3, 10]], 2, None),
    ("other padding", [[1, 2, 3], [10]], 2, 7),
    ("rows of one, uneven microbatches", [[1], [2], [3], [10]], 3, None),
    ("an empty row between", [[1, 2, 3], [], [10]], 3, None),
]


def _all_groupings(topology: tuple[int, int], precision: str) -> dict[str, Any]:
    """Every rank sees every token: the mean over ranks is then the mean of one rank."""
    scale = ps.LossScaleConfig(init=256.0)
    with runtime_on(topology, mixed_precision=precision, loss_scale=scale) as runtime:
        results = {
            name: _toy_step(runtime, rows, accumulate=n, donate=i % 2 == 0, length=length)
            for i, (name, rows, n, length) in enumerate(GROUPINGS)
        }
        results["4 alone"] = _toy_step(runtime, [[4]], accumulate=2, donate=False)
        return results


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_b01_the_gradient_does_not_depend_on_how_tokens_are_grouped(topology, precision):
    tolerance = {"no": 1e-6, "bf16": 1e-2, "fp16": 1e-3}[precision]
    for results in run_on(topology, _all_groupings, precision):
        for name, got in results.items():
            assert got["grad"] == pytest.approx([4.0, 4.0], rel=tolerance), name
            assert got["weight"] == pytest.approx([0.6, 0.6], rel=tolerance), name
            assert got["loss"] == got["step loss"] == pytest.approx(8.0, rel=tolerance), name


def _uneven_ranks(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        first = runtime.rank == 0
        results: dict[str, Any] = {
            "3 and 1 tokens": _toy_step(runtime, [[1, 2, 3]] if first else [[10]], accumulate=1, donate=False),
            "rank 1 ignored": _toy_step(runtime, [[1, 2, 3] if first else []], accumulate=1, donate=False, length=3),
            "different numbers of rows": _toy_step(
                runtime, [[1], [2], [3]] if first else [[10]], accumulate=3, donate=True, length=2
            ),
        }
        module = ps.shard(ToyT(), runtime=runtime)
        optimizer = ps.adamw(0.1, weight_decay=0.1)
        state = _ones(ps.init(module, optimizer, ps.key(0)))
        before = state.digest()
        for donate in (False, True):
            step = ps.train_step(module, toy_loss, optimizer, donate=donate)
            new, metrics = step(state, toy_batch([], length=3))
            results[f"nobody has a token, donate={donate}"] = {
                "unchanged": new.replace(step=0).digest() == before,
                "step": new.step,
                "metrics": {name: float(value) for name, value in metrics.items()},
            }
        return results


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_b02_ranks_with_different_numbers_of_tokens(topology):
    everyone = run_on(topology, _uneven_ranks)
    assert everyone[0] == everyone[1]
    results = everyone[0]
    for name in ("3 and 1 tokens", "different numbers of rows"):
        assert results[name]["grad"] == pytest.approx([4.0, 4.0])
        assert results[name]["loss"] == pytest.approx(8.0)
        assert results[name]["tokens"] == 4
    assert results["rank 1 ignored"]["grad"] == pytest.approx([2.0, 2.0])
    assert results["rank 1 ignored"]["loss"] == pytest.approx(4.0)
    for donate in (False, True):
        empty = results[f"nobody has a token, donate={donate}"]
        assert empty["unchanged"]
        assert empty["step"] == 1
        assert empty["metrics"]["weight"] == 0
        assert all(math.isfinite(value) for value in empty["metrics"].values())


def _names_of_metrics(topology: tuple[int, int]) -> list[Any]:
    with runtime_on(topology) as runtime:
        module = ps.shard(ToyT(), runtime=runtime)
        optimizer = ps.sgd(0.1)
        state = ps.init(module, optimizer, ps.key(0))
        errors = []
        for names in ({0: "a", 1: "b"}, {0: "aaaa", 1: ""}, {0: "ab", 1: "ab"}):

            def loss(model: nn.Module, batch: Any, key: ps.Key, names: dict[int, str] = names) -> Any:
                return toy_loss(model, batch, key), dict.fromkeys(names[runtime.rank], 1.0)

            for call in (ps.train_step(module, loss, optimizer), ps.eval_step(module, loss)):
                errors.append(error_of(call, state, toy_batch([1, 2])))
        return errors


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_metrics_of_other_names_on_other_ranks_are_refused_everywhere(topology):
    for *wrong, step, evaluation in run_on(topology, _names_of_metrics):
        assert [kind for kind, _ in wrong] == ["ValueError"] * 4
        assert all("ranks report metrics of different names" in message for _, message in wrong)
        assert step is evaluation is None


class _Rows(nn.Module):
    """Linear layers whose gradients a loss can set by hand."""

    def __init__(self, **shapes: tuple[int, int]):
        super().__init__()
        for name, (out, into) in shapes.items():
            setattr(self, name, nn.Linear(into, out, bias=False))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        # Linear(x) = W x; the gradient of sum(c * W e_j) is c in column j.
        total = torch.zeros(())
        for name, grad in wanted.items():
            layer = getattr(self, name)
            total = total + (layer(torch.eye(grad.shape[1])) * grad.T).sum()
        return total


def _norms(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        results = {}
        wanted = {"a": torch.tensor([[3.0, 0.0], [4.0, 0.0], [12.0, 0.0]])}
        results["one unit"] = _norm_and_update(runtime, wanted, units=())
        wanted = {**wanted, "b": torch.tensor([[84.0]])}
        results["two units"] = _norm_and_update(runtime, wanted, units=("b",))
        results["inf"] = _norm_and_update(runtime, wanted, units=("b",), ord=math.inf)
        results["one row"] = _norm_and_update(runtime, {"a": torch.tensor([[3.0, 4.0, 12.0]])}, units=())
        return results


def _norm_and_update(
    runtime: ps.Runtime, wanted: dict[str, torch.Tensor], units: tuple[str, ...], ord: float = 2.0
) -> Any:
    model = _Rows(**{name: tuple(grad.shape) for name, grad in wanted.items()})  # type: ignore[arg-type]
    module = ps.shard(model, ps.ShardingSpec(units=units), runtime)
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0, ord=ord), sgd=ps.sgd(1.0))
    state = ps.init(module, optimizer, ps.key(0))
    step = ps.train_step(module, lambda model, batch, key: ps.Mean(model(batch), 1.0), optimizer)
    new, metrics = step(state, wanted)
    norm = metrics["grad_norm"]
    update = whole(state.params["a.weight"]) - whole(new.params["a.weight"])
    return {"norm": float(norm), "plain": type(norm) in (float, torch.Tensor), "update": update.tolist()}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_b03_the_gradient_norm_is_global_and_counts_replicas_once(topology):
    for results in run_on(topology, _norms):
        assert results["one unit"]["norm"] == 13.0
        assert results["two units"]["norm"] == 85.0
        assert results["inf"]["norm"] == 84.0
        assert results["one row"]["norm"] == 13.0
        assert all(result["plain"] for result in results.values())
        flat = torch.tensor(results["one unit"]["update"])
        assert torch.allclose(flat, torch.tensor([[3.0, 0], [4.0, 0], [12.0, 0]]) / 13, atol=1e-6)

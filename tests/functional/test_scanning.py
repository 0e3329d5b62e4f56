"""`ps.scan`: many steps as one are the steps one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.scanning import scan


def _pieces(donate=False):
    module, optimizer = ps.shard(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))), ps.adamw(0.1)

    def loss(model, batch, key):
        error = model(batch["x"]) - batch["y"]
        return ps.Mean(error.square().sum(), error.numel()), {"mae": ps.Mean(error.detach().abs().sum(), error.numel())}

    return ps.train_step(module, loss, optimizer, donate=donate), ps.init(module, optimizer, ps.key(0))


def _batches(n):
    return {"x": torch.randn(n, 6, 3), "y": torch.randn(n, 6, 1), "name": "train"}


@pytest.mark.parametrize("donate", [False, True])
def test_scanning_is_stepping(donate):
    step, state = _pieces(donate)
    batches = _batches(4)
    one_by_one, reports = state.clone(), []
    for i in range(4):
        batch = {"x": batches["x"][i], "y": batches["y"][i], "name": "train"}
        one_by_one, report = step(one_by_one, batch)
        reports.append(report)
    scanned, metrics = scan(step)(state, batches)
    assert scanned.digest() == one_by_one.digest()
    assert metrics.keys() == reports[0].keys()
    for name, values in metrics.items():
        assert values.shape == (4,)
        assert values.tolist() == [float(report[name]) for report in reports]
    if donate:
        with pytest.raises(ps.ConsumedStateError):
            _ = state.params
    else:
        assert scan(step)(state, batches)[0].digest() == scanned.digest()


def test_metrics_that_are_no_numbers_are_kept():
    state = ps.TrainState(step=0, params={}, buffers={}, opt_state={}, key=ps.key(0))

    def step(state, batch):
        return state.replace(step=state.step + 1), {"note": f"step {state.step}", "mixed": batch if state.step else 2.0}

    _, metrics = scan(step)(state, torch.tensor([0.5, 1.5]))
    assert metrics["note"] == ("step 0", "step 1")
    assert metrics["mixed"].tolist() == [2.0, 1.5]


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({"x": torch.ones(2, 3), "y": torch.ones(3)}, r"\['x'\]: \(2, 3\), \['y'\]: \(3,\)"),
        (torch.ones(0, 3), r"batches: \(0, 3\)"),
        (torch.ones(()), r"batches: \(\)"),
        ({"x": 3}, "no tensor"),
    ],
)
def test_what_cannot_be_scanned_over_is_refused(batches, said):
    step, state = _pieces()
    with pytest.raises(ValueError, match=f"one leading dim.*got {said}"):
        scan(step)(state, batches)
    with pytest.raises(TypeError, match="takes a step"):
        scan(None)

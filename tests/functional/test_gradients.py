"""What a loss may return and see, and how its microbatches add up, on one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.functional.gradients import split_batch

SGD = ps.sgd(0.1)


def module_and_state(model: nn.Module | None = None) -> tuple[ps.PureModule, ps.TrainState]:
    module = ps.shard(model if model is not None else nn.Linear(1, 1))
    return module, ps.init(module, SGD, ps.key(0))


def gradients(loss: Any, batch: Any, *, microbatches: int = 1, model: nn.Module | None = None) -> ps.Gradients:
    module, state = module_and_state(model)
    grad_fn = ps.accumulate(ps.value_and_grad(module, loss), microbatches)
    return grad_fn(state.params, state.buffers, batch, state.key)


ROWS = torch.tensor([[1.0], [-1.0], [2.0]])


def test_a_metric_that_only_some_microbatches_report_is_a_mean_over_those():
    def loss(model: nn.Module, x: Tensor, key: ps.Key) -> Any:
        return model(x).sum(), {"all": 1.0, **({"positive": ps.Mean(x.sum(), 1)} if x[0, 0] > 0 else {})}

    for grad_fn in (ps.value_and_grad, _users_own):
        module, state = module_and_state()
        out = ps.accumulate(grad_fn(module, loss), 3)(state.params, state.buffers, ROWS, state.key)
        assert {name: float(mean) for name, mean in out.metrics.items()} == {"all": 1.0, "positive": 1.5}
        assert float(out.metrics["positive"].weight) == 2


def _users_own(module: ps.PureModule, loss: Any) -> Any:
    """A gradient function that `accumulate` knows nothing about."""
    inner = ps.value_and_grad(module, loss)
    return lambda params, buffers, batch, key: inner(params, buffers, batch, key)


@pytest.mark.parametrize("name", ["loss", "weight", "grad_norm", "lr", ""])
def test_a_metric_cannot_take_the_name_of_what_steps_report(name):
    with pytest.raises(ValueError, match=f"a loss cannot name a metric '{name}', which steps report themselves"):
        gradients(lambda model, x, key: (model(x).sum(), {name: 1.0}), ROWS)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_ambient_generator_does_not_repeat_what_the_losss_key_gives(microbatches):
    drawn = []

    def loss(model: nn.Module, x: Tensor, key: ps.Key) -> Tensor:
        drawn.extend([torch.rand(1).item(), torch.rand(1, generator=key.generator()).item()])
        return model(x).sum()

    gradients(loss, ROWS, microbatches=microbatches)
    module, state = module_and_state()
    ps.eval_step(module, loss)(state, ROWS)
    assert len(set(drawn)) == len(drawn) == 2 * microbatches + 2


def test_totals_in_16_bits_add_up_in_32():
    def loss(model: nn.Module, x: Tensor, key: ps.Key) -> ps.Mean:
        return ps.Mean((model(x) * 0 + x).bfloat16().sum(), torch.tensor(1.0, dtype=torch.bfloat16))

    out = gradients(loss, torch.full((512, 1), 1.0), microbatches=512)
    assert float(out.loss.total) == float(out.loss.weight) == 512  # in bf16, 256 + 1 is 256


def test_a_buffer_that_forward_assigns_does_not_carry_the_graph_along():
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(x)
            self.mean = 0.9 * self.mean + 0.1 * out.mean()
            return out

        def reset_parameters(self) -> None:
            self.mean.zero_()

    out = gradients(lambda model, x, key: model(x).sum(), ROWS, model=Averaging(), microbatches=3)
    assert out.buffers["mean"].grad_fn is None
    assert not out.buffers["mean"].requires_grad
    assert out.buffers["mean"] != 0


def test_a_batch_is_split_evenly_and_in_order():
    batch = {"x": torch.arange(7), "pair": (torch.arange(14).view(7, 2), 3), "scale": torch.tensor(2.0)}
    parts = split_batch(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    assert torch.cat([part["pair"][0] for part in parts]).equal(batch["pair"][0])
    assert all(part["pair"][1] == 3 and part["scale"] == 2.0 for part in parts)
    assert len(split_batch(batch, 100)) == 7
    assert len(split_batch({"x": torch.ones(0, 2)}, 3)) == 1


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"one leading dim; got \['x'\]: 3, \['y'\]: 2"):
        split_batch({"x": torch.ones(3), "y": torch.ones(2)}, 2)
    with pytest.raises(ValueError, match="got no tensor with a leading dim"):
        split_batch({"x": 3}, 2)
    with pytest.raises(TypeError, match=r"batch\['y'\] is a ndarray, which is not split .* make it a tensor"):
        split_batch({"x": torch.ones(3), "y": np.ones(3)}, 2)


RESULTS = [  # what a loss returns, error
    (lambda total: (total, [1.0]), TypeError, "got list as metrics"),
    (lambda total: total.detach(), ValueError, "does not depend on any trainable parameter"),
    (lambda total: 3.0, ValueError, "does not depend on any trainable parameter"),
    (lambda total: total.expand(2), ValueError, r"must be a scalar, got a tensor of shape \(2,\)"),
    (lambda total: None, TypeError, "must be a 0-d tensor or a number, got NoneType"),
]


@pytest.mark.parametrize(("result", "error", "message"), RESULTS)
def test_what_a_loss_must_return(result, error, message):
    with pytest.raises(error, match=message):
        gradients(lambda model, x, key: result(model(x).sum()), ROWS)


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="nothing to train: no parameter of the module requires a gradient"):
        gradients(lambda model, x, key: model(x).sum(), ROWS, model=nn.Linear(1, 1).requires_grad_(False))


def test_a_parameter_the_loss_does_not_use_has_no_gradient():
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    grads = gradients(lambda model, x, key: model["used"](x).sum(), ROWS, model=model).grads
    assert sorted(grads) == ["used.bias", "used.weight"]


@pytest.mark.parametrize("steps", [0, -1])
def test_accumulate_needs_a_microbatch(steps):
    module, _ = module_and_state()
    with pytest.raises(ValueError, match=f"at least 1 microbatch, got {steps}"):
        ps.accumulate(ps.value_and_grad(module, lambda model, x, key: model(x).sum()), steps)


def test_value_and_grad_takes_a_pure_module():
    with pytest.raises(TypeError, match=r"a module made by ps\.shard, got Linear"):
        ps.value_and_grad(nn.Linear(1, 1), lambda model, x, key: model(x).sum())  # type: ignore[arg-type]

"""jvp, hvp and per-sample gradients against the plain gradient, and against differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.derivatives import hvp, jvp, per_sample_grads
from purestep.sharding.config import Topology
from purestep.sharding.runtime import Runtime


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x):
        return self.second(self.dropout(torch.tanh(self.first(x) + self.shift)))


def _loss(model, batch, key):
    x, y = batch
    error = model(x) - y
    return ps.Mean(error.square().sum(), len(x)), {"n": len(x)}


@pytest.fixture
def pieces():
    torch.manual_seed(0)
    module = ps.shard(_Net().double())
    state = ps.init(module, ps.sgd(0.1), ps.key(1))
    batch = (torch.randn(5, 3).double(), torch.randn(5, 2).double())
    return module, state, batch


def _direction(state, names=None):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        for name, leaf in state.params.items()
        if names is None or name in names
    }


def _gradient(module, state, batch, params=None):
    return ps.value_and_grad(module, _loss)(params or state.params, state.buffers, batch, ps.key(2))


def _shifted(params, direction, by):
    return {name: leaf + by * direction[name] if name in direction else leaf for name, leaf in params.items()}


@pytest.mark.parametrize("names", [None, ("first.weight",)])
def test_jvp_is_the_gradient_along_a_direction(pieces, names):
    module, state, batch = pieces
    before = state.digest()
    direction = _direction(state, names)
    value, slope = jvp(module, _loss)(state.params, state.buffers, batch, ps.key(2), direction)
    out = _gradient(module, state, batch)
    assert torch.allclose(value, out.loss.value, rtol=1e-14)  # the same dropout mask
    assert torch.allclose(slope, sum((out.grads[name] * direction[name]).sum() for name in direction), rtol=1e-12)
    assert state.digest() == before


@pytest.mark.parametrize("names", [None, ("first.weight", "second.bias")])
def test_hvp_is_the_change_of_the_gradient(pieces, names):
    module, state, batch = pieces
    direction = _direction(state, names)
    product = hvp(module, _loss)(state.params, state.buffers, batch, ps.key(2), direction)
    ahead, behind = (_gradient(module, state, batch, _shifted(state.params, direction, by)) for by in (1e-5, -1e-5))
    assert product.keys() == direction.keys()
    for name, row in product.items():
        assert torch.allclose(row, (ahead.grads[name] - behind.grads[name]) / 2e-5, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradients_of_samples_add_up_to_that_of_the_batch(pieces, chunk_size):
    module, state, batch = pieces
    module = ps.shard(_Net().double().eval())  # without dropout, whose masks differ from row to row

    def total(model, batch, key):
        model.eval()
        return _loss(model, batch, key)

    grads = per_sample_grads(module, total, chunk_size=chunk_size)(state.params, state.buffers, batch, ps.key(2))
    whole = ps.value_and_grad(module, total)(state.params, state.buffers, batch, ps.key(2)).grads
    for name, rows in grads.items():
        assert rows.shape == (5, *state.params[name].shape)
        assert torch.allclose(rows.mean(0), whole[name], rtol=1e-12)
        one = ps.value_and_grad(module, total)(state.params, state.buffers, tuple(x[2:3] for x in batch), ps.key(2))
        assert torch.allclose(rows[2], one.grads[name], rtol=1e-12)


def test_rows_draw_their_own_random_numbers(pieces):
    module, state, _ = pieces
    same = (torch.ones(8, 3).double(), torch.zeros(8, 2).double())
    rows = per_sample_grads(module, _loss)(state.params, state.buffers, same, ps.key(2))["second.weight"]
    again = per_sample_grads(module, _loss)(state.params, state.buffers, same, ps.key(2))["second.weight"]
    assert torch.equal(rows, again)
    assert len({tuple(row.flatten().tolist()) for row in rows}) > 1


def test_bad_input(pieces):
    module, state, batch = pieces
    with pytest.raises(ValueError, match=r"tangent 'nothing': got .* no such parameter"):
        jvp(module, _loss)(state.params, state.buffers, batch, ps.key(2), {"nothing": torch.ones(1)})
    with pytest.raises(ValueError, match=r"vector 'first.bias': got \(3,\) torch.float32, the parameter is \(4,\)"):
        hvp(module, _loss)(state.params, state.buffers, batch, ps.key(2), {"first.bias": torch.ones(3)})
    with pytest.raises(ValueError, match="one leading dim"):
        per_sample_grads(module, _loss)(state.params, state.buffers, (batch[0], batch[1][:2]), ps.key(2))
    module.runtime = Runtime(topology=Topology(2, 1), device=torch.device("cpu"))
    for make in (jvp, hvp, per_sample_grads):
        with pytest.raises(ValueError, match="on one process: this one is ddp"):
            make(module, _loss)
        with pytest.raises(TypeError, match=r"made by ps\.shard"):
            make(nn.Linear(1, 1), _loss)

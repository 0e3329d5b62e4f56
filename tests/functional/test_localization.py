"""`ps.find_nonfinite` names the first thing that is not finite, wherever it is put, and the same on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.localization import find_nonfinite
from tests.ranks import run_on
from tests.toys import TOPOLOGIES, runtime_on


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x):
        return torch.relu(self.linear(x)) + self.shift


class _Net(nn.Module):
    sharding_spec = ps.ShardingSpec(units=("layers.*",))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x, poison):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = x / (1 - poison)  # infinite or NaN after a module that is fine, hence in the next one
        return x


def _loss(model, batch, key):
    out = model(batch["x"], batch["poison"])
    # the root of zero has an infinite derivative: the loss is fine, the gradient is not
    return ps.Mean((out.square().sum(-1) * batch["root"]).sqrt().sum() + (2 * batch["bias"]).sum(), len(out))


def _batch(**changes):
    n = 4
    whole = {"x": torch.ones(n, 3), "poison": torch.zeros(n, 1), "root": torch.ones(n), "bias": torch.zeros(n)}
    return {**whole, **changes}


def _state(module):
    state = ps.init(module, ps.sgd(0.1), ps.key(0))
    for leaf in state.params.values():
        (leaf.to_local() if hasattr(leaf, "to_local") else leaf).fill_(0.1)
    return state


def _cases(state):
    bad = {name: leaf.clone() for name, leaf in state.buffers.items()}
    bad["layers.2.shift"][1] = float("inf")
    poison, root, x = torch.zeros(4, 1), torch.ones(4), torch.ones(4, 3)
    poison[3], root[0], x[1, 1] = 1.0, 0.0, float("nan")
    return {
        "nothing": (state, _batch()),
        "buffer": (state.replace(buffers=bad), _batch()),
        "batch": (state, _batch(x=x)),
        "output": (state, _batch(poison=poison)),
        "loss": (state, _batch(bias=torch.full((4,), 3e38))),
        "gradient": (state, _batch(root=root)),
    }


def _found(topology, accumulate):
    with runtime_on(topology) as runtime:
        module = ps.shard(_Net(), runtime=runtime)
        state = _state(module)
        digest, find = state.digest(), find_nonfinite(module, _loss, accumulate=accumulate)
        rows = slice(runtime.dp_rank * 4 // runtime.dp_size, (runtime.dp_rank + 1) * 4 // runtime.dp_size)
        said = {}
        for name, (of, batch) in _cases(state).items():
            said[name] = find(of, {key: x[rows] for key, x in batch.items()})
        assert state.digest() == digest
        return said


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_each_is_found_where_it_is(topology):
    accumulate = 2 if topology == (1, 1) else 1
    first, *others = run_on(topology, _found, accumulate)
    assert all(other == first for other in others)
    ranks = topology[0] * topology[1]
    assert first["nothing"] is None
    assert (first["buffer"].what, first["buffer"].name, first["buffer"].num_inf) == ("buffer", "layers.2.shift", 1)
    assert (first["batch"].what, first["batch"].name, first["batch"].num_nan) == ("batch", "['x']", 1)
    assert first["batch"].rank == ranks // 4
    output = first["output"]
    assert (output.what, output.name, output.rank) == ("output", "layers.2.linear", ranks - 1)
    assert output.microbatch == (1 if topology == (1, 1) else 0)
    assert (first["loss"].what, first["loss"].name) == ("loss", "")
    assert (first["gradient"].what, first["gradient"].name) == ("gradient", "layers.0.linear.weight")
    assert str(first["loss"]).startswith("step 0: loss has 0 nan, 1 inf (rank 0, microbatch 0)")


def test_the_random_numbers_are_those_of_the_step():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.linear(x))

    masks = []

    def loss(model, x, key):
        out = model(x)
        masks.append((out == 0).clone())
        return out.sum() / 0.0 if len(masks) == 2 else out.sum()

    module, optimizer = ps.shard(Dropped()), ps.sgd(0.1)
    state = ps.init(module, optimizer, ps.key(0))
    ps.train_step(module, loss, optimizer)(state, torch.ones(2, 8))
    found = find_nonfinite(module, loss)(state, torch.ones(2, 8))
    assert found.what == "loss"
    assert torch.equal(*masks)

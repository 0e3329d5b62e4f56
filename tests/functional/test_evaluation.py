"""`ps.evaluate`: every sample once and equally, however they are cut into batches and dealt to ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.evaluation import evaluate
from tests.ranks import run_on
from tests.toys import Net, error_of, net_loss, runtime_on


def _scalar_loss(model, batch, key):
    x, y = batch
    error = model(x) - y
    return error.square().mean(), {"mae": error.abs().mean(), "first": ps.Mean(x[0, 0], 1)}


def _data(rows=23):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)


def _cut(data, sizes):
    return list(zip(*(x.split(sizes) for x in data), strict=True))


@pytest.mark.parametrize("sizes", [[23], [8, 8, 7], [1] * 23, [20, 3]])
def test_it_does_not_depend_on_how_samples_are_batched(sizes):
    module = ps.shard(Net(batchnorm=True).double())
    state = ps.init(module, ps.sgd(0.1), ps.key(0))
    data = tuple(x.double() for x in _data())
    out = evaluate(module, _scalar_loss)(state, iter(_cut(data, sizes)))
    model = Net(batchnorm=True).double().eval()
    model.load_state_dict({**state.params, **state.buffers})
    error = (model(data[0]) - data[1]).detach()
    assert float(out["loss"]) == pytest.approx(float(error.square().mean()), rel=1e-12)
    assert float(out["mae"]) == pytest.approx(float(error.abs().mean()), rel=1e-12)
    assert float(out["loss"].weight) == 23
    assert float(out["first"].weight) == len(sizes)  # a Mean brings its own weight


def test_the_state_and_the_ambient_rng_are_left_alone():
    module = ps.shard(Net(dropout=0.5, batchnorm=True))
    state = ps.init(module, ps.sgd(0.1), ps.key(0))
    digest, ambient = state.digest(), torch.get_rng_state()
    first, second = (evaluate(module, net_loss)(state, _cut(_data(), [8, 8, 7])) for _ in range(2))
    assert float(first["loss"]) == float(second["loss"])
    assert state.digest() == digest
    assert torch.equal(torch.get_rng_state(), ambient)


def test_nothing_to_evaluate_is_an_error():
    module = ps.shard(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="no rank has a batch"):
        evaluate(module, net_loss)(ps.init(module, ps.sgd(0.1), ps.key(0)), [])


def _on_ranks(topology, deals):
    said = []
    with runtime_on(topology) as runtime:
        module = ps.shard(Net(), runtime=runtime)
        state = ps.init(module, ps.sgd(0.1), ps.key(0))
        run = evaluate(module, _scalar_loss)
        for deal in deals:
            data = tuple(x.split([sum(sizes) for sizes in deal])[runtime.dp_rank] for x in _data())
            batches = _cut(data, deal[runtime.dp_rank]) if deal[runtime.dp_rank] else []
            try:
                out = run(state, batches)
                said.append({name: (float(mean), float(mean.weight)) for name, mean in out.items()})
            except ValueError as error:
                said.append(str(error))
        said.append(error_of(run, state, []))
    return said


DEALS = [[[12], [11]], [[4, 4, 4, 4, 4], [3]], [[1], [11, 11]], [[23], []]]


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_it_does_not_depend_on_how_samples_are_dealt_to_ranks(topology):
    first, second = run_on(topology, _on_ranks, DEALS)
    assert first == second
    module = ps.shard(Net())
    local = evaluate(module, _scalar_loss)(ps.init(module, ps.sgd(0.1), ps.key(0)), _cut(_data(), [23]))
    *even, one_sided, nothing = first
    if topology == (1, 2):
        assert "a rank has no batch at all" in one_sided
    else:
        even.append(one_sided)
    for out in even:
        assert out["loss"] == (pytest.approx(float(local["loss"]), rel=1e-5), 23)
        assert out["mae"] == (pytest.approx(float(local["mae"]), rel=1e-5), 23)
    assert "no rank has a batch" in nothing[1]

"""An evaluation counts every sample once, whatever the number of ranks and whatever is left over."""

import pytest
import torch

import purestep as ps
from purestep.training.evaluation import evaluator, rank_shares
from tests.ranks import run_on


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("batch_size", [1, 4, 6])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_sample_counts_once_and_ranks_go_together(num_samples, batch_size, num_ranks):
    shares = [list(rank_shares(num_samples, batch_size, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    counted = sorted(index for share in shares for indices, counts in share if counts for index in indices)
    assert counted == list(range(num_samples))
    sizes = [[len(indices) for indices, _ in share] for share in shares]
    assert all(size == sizes[0] for size in sizes)
    assert max(sizes[0]) <= max(1, batch_size // num_ranks)


def _mean_loss(model, batch, key):
    errors = (model(batch) - 1).square()
    return ps.Mean(errors.sum(), len(errors)), {"rows": ps.Mean(float(len(batch)), 1.0)}


def _scalar_loss(model, batch, key):
    return (model(batch) - 1).square().mean()


def _evaluate(topology, losses, num_samples, batch_size):
    config = ps.ParallelismConfig(*topology)
    data = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(0))
    results = []
    with ps.start(config, ps.AcceleratorConfig(device="cpu")) as runtime:
        module = ps.shard(torch.nn.Linear(3, 1), runtime=runtime)
        state = ps.init(module, ps.sgd(0.1), ps.key(0))
        before = torch.get_rng_state()
        for loss in losses:
            results.append(float(evaluator(module, loss, data, batch_size=batch_size)(state)["loss"]))
        assert torch.equal(torch.get_rng_state(), before)
    return results


@pytest.mark.parametrize("batch_size", [2, 4, 8])
def test_the_loss_is_the_mean_over_samples(batch_size):
    whole = _evaluate((1, 1), [_mean_loss], 7, 7)
    assert _evaluate((1, 1), [_mean_loss, _scalar_loss], 7, batch_size) == pytest.approx(whole * 2, rel=1e-6)


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)])
def test_ranks_share_an_evaluation(topology):
    whole = _evaluate((1, 1), [_mean_loss], 7, 7)
    for results in run_on(topology, _evaluate, [_mean_loss, _scalar_loss], 7, 4):
        assert results == pytest.approx(whole * 2, rel=1e-6)

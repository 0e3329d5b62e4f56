"""`BatchOrder` and `loader`: which samples, in which order, under which random numbers."""

import collections
import json
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import purestep as ps
from purestep.functional.data import _permuted, _round_keys

# Python 3.12 and later warn about what DataLoader does by default on Linux.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

GEOMETRIES = [(10, 2), (11, 2), (10, 4), (7, 3), (3, 8), (1, 2), (2, 2), (1000, 96)]


def stream(order, start, stop, num_ranks=1):
    """Sample ids of the steps from `start` to `stop`, ranks put together in their order."""
    parts = [order.indices(k, rank=r, num_ranks=num_ranks) for k in range(start, stop) for r in range(num_ranks)]
    return torch.cat(parts).tolist() if parts else []


@pytest.mark.parametrize(("num_samples", "batch_size"), GEOMETRIES)
def test_every_epoch_is_a_permutation_and_every_batch_is_full(num_samples, batch_size):
    order = ps.BatchOrder(num_samples, batch_size, ps.key(0))
    steps = math.ceil(4 * num_samples / batch_size)
    ids = stream(order, 0, steps)
    assert len(ids) == steps * batch_size
    for epoch in range(4):
        assert sorted(ids[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert order.indices(0).dtype == torch.int64


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_one_global_order(num_ranks):
    order = ps.BatchOrder(11, 4, ps.key(0))
    for step in range(9):
        parts = [order.indices(step, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), order.indices(step))


def test_epoch_counts_whole_passes():
    order = ps.BatchOrder(10, 4, ps.key(0))
    assert [order.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


def test_seeking_is_as_quick_far_out_and_exact():
    order = ps.BatchOrder(1_000_003, 64, ps.key(0))
    far = 10**12
    step = far * 1_000_003 // 64
    assert order.epoch(step) in (far - 1, far)
    assert len(set(order.indices(step).tolist())) == 64
    epoch_start = 64 * 1_000_003  # the step where epoch 64 * 64 starts
    first = order.indices(epoch_start)
    assert torch.equal(first, torch.from_numpy(_permuted(np.arange(64), 1_000_003, _round_keys(ps.key(0), 64 * 64))))


def test_orders_differ_by_key_and_by_epoch():
    num = 100
    epochs = {tuple(stream(ps.BatchOrder(num, num, ps.key(seed)), k, k + 1)) for seed in range(20) for k in range(20)}
    assert len(epochs) == 400


def chi_square(counts):
    counts = np.asarray(counts, dtype=float)
    mean = counts.mean()
    degrees = len(counts) - 1
    return (((counts - mean) ** 2 / mean).sum() - degrees) / math.sqrt(2 * degrees)  # about standard normal


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_samples_are_equally_likely(num_samples):
    key, trials = ps.key(123), 3000
    counts = collections.Counter(
        tuple(_permuted(np.arange(num_samples), num_samples, _round_keys(key, epoch)).tolist())
        for epoch in range(trials)
    )
    seen = [*counts.values(), *[0] * (math.factorial(num_samples) - len(counts))]
    assert abs(chi_square(seen)) < 5


@pytest.mark.parametrize("num_samples", [10, 97, 1024])
def test_where_a_sample_lands_is_uniform_and_pairs_are_independent(num_samples):
    trials = 2000
    first, last, distance = (np.zeros(num_samples) for _ in range(3))
    for seed in range(trials):
        values = _permuted(np.array([0, 1, num_samples - 1]), num_samples, _round_keys(ps.key(seed), 0))
        first[values[0]] += 1
        last[values[2]] += 1
        distance[(values[1] - values[0]) % num_samples] += 1
    assert distance[0] == 0
    assert max(abs(chi_square(first)), abs(chi_square(last)), abs(chi_square(distance[1:]))) < 5


def test_neighbours_do_not_stay_together():
    ids = np.array(stream(ps.BatchOrder(10_000, 10_000, ps.key(0)), 0, 1))
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(ids)) == 1).sum() < 20  # 2 expected


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.BatchOrder(0, 1, ps.key(0)), ValueError, "BatchOrder.num_samples must be at least 1, got 0"),
        (lambda: ps.BatchOrder(5, 0, ps.key(0)), ValueError, "BatchOrder.batch_size must be at least 1, got 0"),
        (lambda: ps.BatchOrder(5.0, 1, ps.key(0)), TypeError, "BatchOrder.num_samples must be an integer, got 5.0"),
        (lambda: ps.BatchOrder(5, 1, 0), TypeError, r"must be a Key, got int; make one with ps.key\(seed\)"),
        (lambda: ps.BatchOrder(5, 2, ps.key(0)).indices(-1), ValueError, "step must be at least 0, got -1"),
        (lambda: ps.BatchOrder(5, 2, ps.key(0)).indices(0, rank=2, num_ranks=2), ValueError, "rank must be .* got 2"),
        (
            lambda: ps.BatchOrder(10, 4, ps.key(0)).indices(0, num_ranks=3),
            ValueError,
            "global batch of 4 samples cannot be shared evenly by 3 ranks",
        ),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_resumed_run_with_another_geometry_is_told_what_changed():
    order = ps.BatchOrder(10, 2, ps.key(0))
    saved = json.loads(json.dumps(order.describe()))
    order.check(saved)
    with pytest.raises(ValueError, match=r"num_samples was 10, is 11 \(resume with the data .*\)$"):
        ps.BatchOrder(11, 2, ps.key(0)).check(saved)
    with pytest.raises(ValueError, match=r"batch_size was 2, is 4 .*; key was '.*', is '.*' .resume with the old seed"):
        ps.BatchOrder(10, 4, ps.key(1)).check(saved)
    with pytest.raises(ValueError, match="batch_size was None, is 2"):
        order.check({"num_samples": 10, "key": ps.key(0).hex()})


class Ids(Dataset):
    """A sample is its number."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Augmented(Ids):
    """A sample is its number and what each random number generator says."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def ids_of(batches):
    return torch.cat([torch.as_tensor(batch) for batch in batches]).tolist()


@pytest.mark.parametrize("num_samples", [10, 11])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stopped_after_any_step_and_resumed_the_ids_are_those_of_an_uninterrupted_run(num_samples, num_ranks):
    order = ps.BatchOrder(num_samples, 2, ps.key(7))
    steps = math.ceil(3 * num_samples / 2)
    for rank in range(num_ranks):
        where = {"rank": rank, "num_ranks": num_ranks}
        whole = ids_of(ps.loader(Ids(num_samples), order, stop=steps, **where))
        assert whole == torch.cat([order.indices(step, **where) for step in range(steps)]).tolist()
        for stop in range(1, steps):
            before = ids_of(ps.loader(Ids(num_samples), order, stop=stop, **where))
            after = ids_of(ps.loader(Ids(num_samples), order, start=stop, stop=steps, **where))
            assert before + after == whole


def test_what_workers_prefetched_is_not_lost():
    order = ps.BatchOrder(11, 2, ps.key(7))
    whole = ids_of(ps.loader(Ids(11), order, stop=16))
    batches = iter(ps.loader(Ids(11), order, num_workers=2))
    before = ids_of([next(batches) for _ in range(5)])  # the workers are ahead by now
    del batches
    after = ids_of(ps.loader(Ids(11), order, start=5, stop=16, num_workers=1))
    assert before + after == whole


def augmented_batches(num_workers=0, num_ranks=1, start=0, stop=4, dataset=None):
    order = ps.BatchOrder(10, 4, ps.key(3))
    dataset = dataset or Augmented(10)
    parts = [
        list(ps.loader(dataset, order, start=start, stop=stop, rank=r, num_ranks=num_ranks, num_workers=num_workers))
        for r in range(num_ranks)
    ]
    return torch.stack([torch.cat(step) for step in zip(*parts, strict=True)])


def test_augmentation_is_a_function_of_key_step_and_place():
    wanted = augmented_batches()
    assert len(wanted[..., 1:].flatten().unique()) == 4 * 4 * 3  # another number for every sample, step and generator
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert torch.equal(augmented_batches(), wanted)
    assert torch.equal(augmented_batches(num_ranks=2), wanted)
    assert torch.equal(augmented_batches(num_workers=1), wanted)
    assert torch.equal(augmented_batches(num_workers=2, num_ranks=4), wanted)
    assert torch.equal(augmented_batches(start=2), wanted[2:])
    # Subset fetches whole batches through __getitems__ when asked to; it must not be asked.
    assert torch.equal(augmented_batches(num_ranks=2, dataset=Subset(Augmented(10), range(10))), wanted)


def test_a_sample_is_fetched_in_the_scope_of_its_key():
    order = ps.BatchOrder(10, 4, ps.key(3))
    with ps.key(3).fold_in("data", 2, 1).scope():
        wanted = torch.rand(())
    assert next(iter(ps.loader(Augmented(10), order, start=2)))[1, 1] == wanted


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_ambient_generators_are_left_alone(num_workers):
    def draw():
        return torch.rand(()).item(), np.random.rand(), random.random()

    def seeded():
        torch.manual_seed(5), np.random.seed(5), random.seed(5)

    seeded()
    wanted = [draw() for _ in range(3)]
    seeded()
    got = [draw() for _ in ps.loader(Augmented(10), ps.BatchOrder(10, 2, ps.key(0)), stop=3, num_workers=num_workers)]
    assert got == wanted


def test_the_ambient_generators_survive_a_failing_sample():
    class Broken(Augmented):
        def __getitem__(self, index):
            torch.rand(())
            raise OSError("planted")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="planted"):
        next(iter(ps.loader(Broken(10), ps.BatchOrder(10, 2, ps.key(0)))))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_has_a_length_if_it_ends_and_starts_over_when_iterated_again():
    order = ps.BatchOrder(10, 2, ps.key(0))
    ending = ps.loader(Ids(10), order, start=3, stop=8)
    assert len(ending) == 5
    assert ids_of(ending) == ids_of(ending)
    assert list(ps.loader(Ids(10), order, start=3, stop=3)) == []
    with pytest.raises(TypeError, match=r"goes on forever .* pass stop="):
        len(ps.loader(Ids(10), order))


def test_collate_fn_gets_the_samples_in_order():
    order = ps.BatchOrder(10, 5, ps.key(0))
    assert next(iter(ps.loader(Ids(10), order, collate_fn=list))) == order.indices(0).tolist()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "arguments", "error", "message"),
    [
        (Stream(), {}, TypeError, "Stream is an IterableDataset, .* Use a map-style dataset"),
        (iter([1]), {}, TypeError, "expected a map-style dataset, .* got list_iterator"),
        (TensorDataset(torch.ones(9)), {}, ValueError, "dataset has 9 samples, but .* num_samples=10"),
        (Ids(10), {"num_ranks": 4}, ValueError, "batch of 2 samples cannot be shared evenly by 4 ranks"),
        (Ids(10), {"rank": 1}, ValueError, "rank must be from 0 to num_ranks - 1 = 0, got 1"),
        (Ids(10), {"start": -1}, ValueError, "start must be at least 0"),
        (Ids(10), {"start": 5, "stop": 4}, ValueError, "stop must be at least 5, got 4"),
    ],
)
def test_a_loader_that_cannot_be_is_refused_at_once(dataset, arguments, error, message):
    with pytest.raises(error, match=message):
        ps.loader(dataset, ps.BatchOrder(10, 2, ps.key(0)), **arguments)

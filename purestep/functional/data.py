"""Which samples make the batch of step k: a pure function, and a loader that follows it."""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from purestep.state.keys import Key

_ROUNDS = 20  # even; permutations of few samples are uniform only after about 16
_MIX1, _MIX2 = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)  # of splitmix64 (Vigna, public domain)
_HALF, _DROPPED = np.uint64(32), np.uint64(11)


@dataclass(frozen=True)
class BatchOrder:
    """The order in which a run sees its samples: a pure function of the step.

    The samples come as one stream, epoch after epoch, each epoch a permutation of its own. Step k takes places
    k * batch_size up to (k + 1) * batch_size of the stream, so every batch is full, every sample comes exactly once an
    epoch, and a batch may hold the end of one epoch and the start of the next. Finding a batch takes the same time
    wherever it is, so resuming needs no more than the step.

    Args:
        num_samples: size of the dataset, at least 1.
        batch_size: samples in a global batch (over all ranks and microbatches), at least 1.
        key: what the order is drawn from.

    Raises:
        TypeError: a size is not an integer, or the key no Key.
        ValueError: a size is less than 1.

    >>> import purestep as ps
    >>> order = ps.BatchOrder(num_samples=6, batch_size=4, key=ps.key(0))
    >>> stream = [i for step in range(3) for i in order.indices(step).tolist()]
    >>> sorted(stream[:6]), sorted(stream[6:])
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    >>> order.indices(1, rank=1, num_ranks=2).equal(order.indices(1)[2:])
    True
    """

    num_samples: int
    batch_size: int
    key: Key

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size"):
            object.__setattr__(self, name, _count(f"BatchOrder.{name}", getattr(self, name), least=1))
        if not isinstance(self.key, Key):
            raise TypeError(f"BatchOrder.key must be a Key, got {type(self.key).__name__}; make one with ps.key(seed)")

    def indices(self, step: int, *, rank: int = 0, num_ranks: int = 1) -> Tensor:
        """The samples of `step`: int64, shape (batch_size / num_ranks,), the rank's contiguous part of the batch.

        Raises:
            ValueError: a negative step, a rank out of range, or a batch that the ranks cannot share evenly.
        """
        step = _count("step", step)
        first, size = self._share(rank, num_ranks)
        places = np.arange(size, dtype=np.int64) + (step * self.batch_size + first)
        epochs, places = np.divmod(places, self.num_samples)
        indices = np.empty(size, dtype=np.int64)
        for epoch in range(epochs[0], epochs[-1] + 1):
            here = epochs == epoch
            indices[here] = _permuted(places[here], self.num_samples, _round_keys(self.key, epoch))
        return torch.from_numpy(indices)

    def epoch(self, step: int) -> int:
        """The epoch that the first sample of `step` belongs to, from 0."""
        return _count("step", step) * self.batch_size // self.num_samples

    def describe(self) -> dict[str, Any]:
        """What a checkpoint records of the order, as JSON values; `check` compares it."""
        return {"num_samples": self.num_samples, "batch_size": self.batch_size, "key": self.key.hex()}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise unless a run recorded as `saved` (by `describe`) continues with this order.

        The number of ranks is no part of it: the global batches do not depend on it.

        Raises:
            ValueError: something differs; it says what, and what to do.
        """
        changes = [
            f"{name} was {saved.get(name)!r}, is {value!r} ({_REMEDIES[name]})"
            for name, value in self.describe().items()
            if saved.get(name) != value
        ]
        if changes:
            raise ValueError(f"this run cannot continue in the order it was started with: {'; '.join(changes)}")

    def _share(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """(first place in the batch, number of places) of a rank."""
        num_ranks = _count("num_ranks", num_ranks, least=1)
        if not 0 <= _count("rank", rank) < num_ranks:
            raise ValueError(f"rank must be from 0 to num_ranks - 1 = {num_ranks - 1}, got {rank}")
        if self.batch_size % num_ranks:
            raise ValueError(
                f"a global batch of {self.batch_size} samples cannot be shared evenly by {num_ranks} ranks; make "
                "batch_size a multiple of num_ranks"
            )
        size = self.batch_size // num_ranks
        return rank * size, size


_REMEDIES = {
    "num_samples": "resume with the data the run was started on, or start a new run from its weights",
    "batch_size": "resume with the old global batch size",
    "key": "resume with the old seed",
}


def loader(
    dataset: Dataset,
    order: BatchOrder,
    *,
    start: int = 0,
    stop: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    num_workers: int = 0,
    collate_fn: Callable[[list], Any] | None = None,
    pin_memory: bool = False,
) -> DataLoader:
    """The batches of steps `start`, ..., `stop` - 1: a torch DataLoader that follows `order`.

    To resume, pass `start=state.step`: batches that workers had prefetched but no step had used come again. Each
    iteration starts at `start`.

    `dataset[i]` is called once a sample, with the random number generators of torch (CPU), NumPy and Python's `random`
    seeded from the order's key, the step and the sample's place in the global batch. So random augmentation is
    reproducible and the same for any number of workers and ranks, and the generators outside are left as they were.
    (`dataset.__getitems__` is not used: its random numbers would depend on how a batch is split.)

    Args:
        dataset: map-style: `len(dataset)` samples, `dataset[i]` gives one.
        order: which samples make a batch.
        start: first step.
        stop: step to stop before; None to go on forever.
        rank: this process, from 0.
        num_ranks: processes that share each global batch.
        num_workers: worker processes that load ahead; 0 loads in this process.
        collate_fn: makes a batch from a list of samples; default: torch's, which stacks tensors.
        pin_memory: copy batches to page-locked memory, for faster transfer to a device.

    Raises:
        TypeError: an iterable-style dataset, or one without a length.
        ValueError: the dataset's size is not the order's; steps or ranks out of range.

    >>> import torch, purestep as ps
    >>> dataset = torch.utils.data.TensorDataset(torch.arange(10.0))
    >>> order = ps.BatchOrder(10, batch_size=4, key=ps.key(0))
    >>> batches = [batch for (batch,) in ps.loader(dataset, order, stop=5)]
    >>> resumed = [batch for (batch,) in ps.loader(dataset, order, start=3, stop=5)]
    >>> torch.equal(torch.cat(batches[3:]), torch.cat(resumed))
    True
    """
    _check_dataset(dataset, order)
    start = _count("start", start)
    if stop is not None:
        stop = _count("stop", stop, least=start)
    order._share(rank, num_ranks)
    return DataLoader(
        _Keyed(dataset, order.key.fold_in("data")),  # type: ignore[arg-type]
        batch_sampler=_Requests(order, start, stop, rank, num_ranks),  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        worker_init_fn=_outlive_a_sigterm,
        # DataLoader draws its workers' seeds from this generator; without it, from the ambient one.
        generator=order.key.fold_in("loader").generator(),
    )


def _outlive_a_sigterm(worker: int) -> None:
    """Launchers send SIGTERM to workers as well, which have to last until the run has saved and ends them itself."""

    def ignore(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ignore)


@dataclass(frozen=True)
class _Request:
    """One rank's part of a batch: `indices[j]` is the sample at place `first + j` of the batch of `step`."""

    step: int
    first: int
    indices: list[int]


@dataclass(frozen=True)
class _Requests:
    """What DataLoader takes for a batch sampler."""

    order: BatchOrder
    start: int
    stop: int | None
    rank: int
    num_ranks: int

    def __iter__(self) -> Iterator[_Request]:
        first, _ = self.order._share(self.rank, self.num_ranks)
        step = self.start
        while self.stop is None or step < self.stop:
            indices = self.order.indices(step, rank=self.rank, num_ranks=self.num_ranks)
            yield _Request(step, first, indices.tolist())
            step += 1

    def __len__(self) -> int:
        if self.stop is None:
            raise TypeError("this loader goes on forever and has no length; pass stop=")
        return self.stop - self.start


@dataclass(frozen=True)
class _Keyed:
    """A dataset whose every sample is fetched under a key of its own."""

    dataset: Any
    key: Key

    def __getitems__(self, request: _Request) -> list[Any]:
        # DataLoader hands what the batch sampler yields to this method, whole.
        key = self.key.fold_in(request.step)
        samples = []
        with _ambient_randomness_kept():
            for place, index in enumerate(request.indices, start=request.first):
                _seed_randomness(key.fold_in(place))
                samples.append(self.dataset[index])
        return samples


@contextmanager
def _ambient_randomness_kept() -> Iterator[None]:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _seed_randomness(key: Key) -> None:
    """Set torch's CPU generator as `key.scope()` does, and those of NumPy and Python from the same key."""
    torch.default_generator.set_state(key.generator().get_state())
    np.random.seed(np.frombuffer(key.data, dtype=np.uint32))
    random.seed(key.data)


def _check_dataset(dataset: Any, order: BatchOrder) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is an IterableDataset, which cannot give the samples of step k without reading "
            "all before them; a resumed run could not continue. Use a map-style dataset, with __len__ and __getitem__"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"expected a map-style dataset, with __len__ and __getitem__, got {type(dataset).__name__}")
    if len(dataset) != order.num_samples:
        raise ValueError(
            f"the dataset has {len(dataset)} samples, but the order was made for num_samples={order.num_samples}; make "
            "it with BatchOrder(len(dataset), ...)"
        )


def _permuted(places: np.ndarray, size: int, round_keys: Sequence[np.uint64]) -> np.ndarray:
    """The values at `places` of a keyed permutation of range(size), each computed on its own.

    A Feistel network over pairs (left, right) of a grid of rows x cols cells, a little larger than `size`; a value
    outside is sent through again until it is inside, which makes it a permutation of range(size) (Black and Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002). One side of the grid is even: with both odd every round would
    be an even permutation, and small samples would notice.
    """
    rows = math.isqrt(size) + 1
    rows += rows % 2
    cols = size // rows + 1
    values = _walked(places.astype(np.uint64), rows, cols, round_keys)
    while (outside := values >= size).any():
        values[outside] = _walked(values[outside], rows, cols, round_keys)
    return values.astype(np.int64)


def _walked(values: np.ndarray, rows: int, cols: int, round_keys: Sequence[np.uint64]) -> np.ndarray:
    """One pass of the network: uint64 values below rows * cols, permuted."""
    moving, other = np.divmod(values, np.uint64(cols))
    size, other_size = np.uint64(rows), np.uint64(cols)
    for round_key in round_keys:
        mixed = (other + round_key) * _MIX1
        mixed ^= mixed >> _HALF
        mixed *= _MIX2
        mixed >>= _DROPPED  # the upper bits are the best mixed, and leave room for the sum
        moving = (moving + mixed) % size
        moving, other, size, other_size = other, moving, other_size, size
    # An even number of rounds puts the sides back where they were.
    return moving * other_size + other


@functools.lru_cache(maxsize=64)
def _round_keys(key: Key, epoch: int) -> tuple[np.uint64, ...]:
    stream = hashlib.shake_128(key.fold_in("epoch", epoch).data).digest(8 * _ROUNDS)
    return tuple(np.frombuffer(stream, dtype="<u8").astype(np.uint64))


def _count(name: str, value: Any, *, least: int = 0) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value

"""The loss over a whole dataset: every sample once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from purestep.functional.means import Mean
from purestep.functional.steps import eval_step
from purestep.sharding.pure_module import PureModule
from purestep.state.keys import Key
from purestep.state.train_state import TrainState

Share = tuple[list[int], bool]
"""Indices of a batch's samples, and whether they count."""


def evaluator(
    module: PureModule,
    loss: Callable[..., Any],
    dataset: Any,
    *,
    batch_size: int,
    num_workers: int = 0,
    collate_fn: Callable[[list], Any] | None = None,
) -> Callable[[TrainState], dict[str, Mean]]:
    """`state -> {name: Mean}` of the loss (under "loss") and its metrics over all of `dataset`.

    Unlike in training, where it counts with weight 1, a plain scalar counts with the number of samples it is of: the
    last batches may be smaller.

    Args:
        module: from `ps.shard`.
        loss: as for `train_step`.
        dataset: map-style.
        batch_size: samples a batch over all ranks, at least one a rank.
        num_workers: see torch's `DataLoader`.
        collate_fn: see torch's `DataLoader`.
    """
    runtime = module.runtime
    shares = list(rank_shares(len(dataset), batch_size, rank=runtime.dp_rank, num_ranks=runtime.dp_size))
    step = eval_step(module, _counting(loss))

    def evaluate(state: TrainState) -> dict[str, Mean]:
        batches = DataLoader(
            dataset,
            batch_sampler=[indices for indices, _ in shares],
            num_workers=num_workers,
            collate_fn=collate_fn or default_collate,
            generator=torch.Generator(),  # else starting the loader advances the program's own generator
        )
        sums: dict[str, Mean] = {}
        for batch, (indices, counts) in zip(batches, shares, strict=True):
            counted = torch.full((len(indices),), float(counts))
            means = step(state, to_device((batch, counted), runtime.device))
            sums = {name: sums[name] + mean if name in sums else mean for name, mean in means.items()}
        return sums

    return evaluate


def rank_shares(num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> Iterator[Share]:
    """The batches of one rank. Over all ranks each sample counts once, and every rank has equally many batches.

    Where fewer samples are left than ranks, the others compute a sample that does not count, since a sharded forward
    needs every rank.

    >>> [list(rank_shares(5, 2, rank=r, num_ranks=2)) for r in (0, 1)]
    [[([0], True), ([2], True), ([4], True)], [([1], True), ([3], True), ([4], False)]]
    """
    per_rank = max(1, batch_size // num_ranks)
    start = 0
    while start < num_samples:
        left = num_samples - start
        size = min(per_rank, max(1, left // num_ranks))
        first = start + rank * size
        if first < num_samples:
            yield list(range(first, first + size)), True
        else:
            yield [num_samples - 1], False
        start += size * num_ranks


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch on `device`."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def _counting(loss: Callable[..., Any]) -> Callable[..., Any]:
    """`loss` over (batch, counted), where `counted` is 1 for each sample, or 0 for each."""

    def counted_loss(model: Any, batch: tuple[Any, Tensor], key: Key) -> Any:
        samples, counted = batch
        result = loss(model, samples, key)
        value, metrics = result if isinstance(result, tuple) else (result, {})

        def weighted(value: Any) -> Mean:
            if isinstance(value, Mean):
                return Mean(value.total * counted[0], value.weight * counted[0])
            return Mean(value * counted.sum(), counted.sum())

        return weighted(value), {name: weighted(metric) for name, metric in metrics.items()}

    return counted_loss

"""What may change when a run goes on, and what must not. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from purestep.sharding.config import ConfigError, ParallelismConfig

_ORDER = {
    "num_samples": ("--data.path", "number of samples", "resume with the data the run was started on"),
    "batch_size": ("--batch-size", "global batch", "drop the flag"),
    "key": ("--seed", "order of the samples", "drop the flag"),
}


def refit(saved: ParallelismConfig, world_size: int) -> tuple[ParallelismConfig, str | None]:
    """The degrees with which a run saved with `saved` goes on, on `world_size` processes, and a line that says so.

    A state can be restored on any topology, so the number of processes is free to change: a sharded run stays sharded,
    a replicated one replicated. With both degrees set there is no one way to divide another number.

    Raises:
        ConfigError: `saved` does not fit, and has both degrees.

    >>> refit(ParallelismConfig(dp_shard=4), 2)[0]
    ParallelismConfig(dp_replicate=1, dp_shard=-1, tp=1, cp=1)
    """
    try:
        saved.resolve(world_size)
        return saved, None
    except ConfigError as error:
        if saved.dp_shard == 1:
            degrees = {"dp_replicate": -1, "dp_shard": 1}
        elif saved.dp_replicate == 1:
            degrees = {"dp_replicate": 1, "dp_shard": -1}
        elif world_size == 1:
            degrees = {"dp_replicate": 1, "dp_shard": 1}
        else:
            raise ConfigError(f"--resume: the run's own degrees do not fit: {error}") from None
    new = dataclasses.replace(saved, **degrees)
    return new, (
        f"resuming on {world_size} process{'es' * (world_size != 1)} as {new.resolve(world_size)}; the run had "
        f"--parallelism.dp-replicate {saved.dp_replicate} --parallelism.dp-shard {saved.dp_shard}"
    )


def check_order(saved: Mapping[str, Any], order: Mapping[str, Any]) -> None:
    """Raise unless a run whose checkpoint recorded the batch order `saved` goes on in the same global order.

    Args:
        saved: `BatchOrder.describe()` of the run so far.
        order: of the run to be.

    Raises:
        ConfigError: names each flag that would change which samples a step sees.
    """
    problems = []
    for name in dict.fromkeys([*saved, *order]):
        if saved.get(name) != order.get(name):
            flag, what, remedy = _ORDER.get(name, ("the batch order", name, "start a new run"))
            values = "" if name == "key" else f" ({saved.get(name)} then, {order.get(name)} now)"
            problems.append(f"{flag}: another {what}{values}; {remedy}")
    if problems:
        raise ConfigError(f"--resume: the run cannot go on with batches unlike its first: {'; '.join(problems)}")

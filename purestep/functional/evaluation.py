"""`evaluate`: the loss over a whole data set, exactly, however it is cut into batches and dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.functional.gradients import Loss, add_means, ambient, call_loss, reduce_means
from purestep.functional.means import Mean
from purestep.sharding.pure_module import PureModule
from purestep.sharding.runtime import Runtime
from purestep.state.collective import gather_objects
from purestep.state.keys import Key
from purestep.state.train_state import TrainState


def evaluate(module: PureModule, loss: Loss) -> Callable[[TrainState, Iterable[Any]], dict[str, Mean]]:
    """A loss and its metrics over all batches of all ranks: `(state, batches) -> {name: Mean}`, in eval mode.

    Every sample counts once, and equally. A `Mean` brings its own weight; a plain scalar is taken for the mean over the
    samples of its batch, and weighs as many as there are (in training it weighs 1). Batches may differ in size, and
    ranks in how many they have: in a sharded topology a rank that has no more computes along with the others, on what
    it had last, and that does not count. Collective where there are several processes.

    Args:
        module: from `ps.shard`.
        loss: see `value_and_grad`. Its key is `state.key.fold_in(state.step, "eval", i, rank)` for batch i.

    Returns:
        A function of a state and this rank's batches, any iterable of them; it returns Means over all ranks, equal on
        every rank. The loss is under "loss".

    Raises:
        ValueError: no rank has a batch; or, in a sharded topology, one has none to compute along with; when called.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> evaluate = ps.evaluate(module, lambda model, x, key: model(x).mean())
    >>> state = ps.init(module, ps.sgd(0.1), ps.key(0)).replace(params={"weight": torch.ones(1, 1)})
    >>> out = evaluate(state, [torch.tensor([[1.0], [3.0]]), torch.tensor([[8.0]])])
    >>> float(out["loss"]), float(out["loss"].weight)
    (4.0, 3.0)
    """
    runtime = module.runtime

    def over_batches(state: TrainState, batches: Iterable[Any]) -> dict[str, Mean]:
        key = state.key.fold_in(state.step, "eval")
        sums: dict[str, Mean] = {}
        dealt = _together(runtime, batches) if module.topology.is_sharded else ((batch, True) for batch in batches)
        with module.evaluation(state.params, state.buffers) as session:
            for i, (batch, counts) in enumerate(dealt):
                means = _means(loss, session.model, batch, key.fold_in(i, runtime.dp_rank), runtime)
                if not counts:
                    means = {name: Mean(mean.total * 0, mean.weight * 0) for name, mean in means.items()}
                sums = add_means(sums, {name: Mean(_wide(m.total), _wide(m.weight)) for name, m in means.items()})
        # Ranks without a batch know no names.
        names = {name: None for of_rank in gather_objects(list(sums)) for name in of_rank}
        if not names:
            raise ValueError("there is nothing to evaluate: no rank has a batch")
        reduced, check = reduce_means(module, {name: sums.get(name, Mean(0.0, 0.0)) for name in names})
        check()
        return {name or "loss": mean for name, mean in reduced.items()}

    return over_batches


def _means(loss: Loss, model: Any, batch: Any, key: Key, runtime: Runtime) -> dict[str, Mean]:
    rows = next((x.shape[0] for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim), 1)

    def weighed(model: Any, batch: Any, key: Key) -> Any:
        result = loss(model, batch, key)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        return weigh(value), {name: weigh(metric) for name, metric in metrics.items()}

    def weigh(value: Any) -> Mean:
        return value if isinstance(value, Mean) else Mean(value * rows, rows)

    with ambient(key).scope(runtime.device), runtime.autocast():
        return call_loss(weighed, model, batch, key)


def _together(runtime: Runtime, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """(batch, whether it counts): as many on every rank as the one with the most batches has."""
    nothing = object()
    iterator, last = iter(batches), nothing
    while True:
        batch = next(iterator, nothing)
        waiting = torch.tensor([batch is not nothing, batch is nothing and last is nothing], dtype=torch.float32)
        some_have, some_have_none = runtime.all_reduce(waiting.to(runtime.device), op="max").bool().tolist()
        if not some_have:
            return
        if some_have_none:
            raise ValueError(
                "a rank has no batch at all, but a sharded forward needs every rank: give each rank at least one "
                "(repeat one with weight 0, say)"
            )
        if batch is not nothing:
            last = batch
        yield last, batch is not nothing


def _wide(value: Any) -> Any:
    """In fp64 where the device has it, as sums over a whole data set should be."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.device.type != "mps":
        return value.double()
    return value

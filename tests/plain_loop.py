"""Cases that are trained in every topology, and compared with a loop as one writes it without this library."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import purestep as ps
from purestep.sharding.runtime import local_runtime
from tests.ranks import RanksFailed, run_ranks
from tests.sharding.models import on_meta
from tests.toys import TOPOLOGIES, leaf_table, rank_slice, runtime_on

LR, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how to train it."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any, Any], ps.Mean]
    batch: Callable[[int], Any]
    """The global batch of a step."""
    spec: ps.ShardingSpec | None = None
    meta: bool = True
    """Whether it can be built on the meta device, too."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of AcceleratorConfig."""


def everywhere(load: Callable[..., dict[str, Case]], *args: Any, steps: int, quiet: bool = False) -> Everywhere:
    """Train the cases that `load(*args)`, a module-level function, gives, in every topology; when first asked for.

    Args:
        load: gives cases by name.
        args: its arguments.
        steps: updates of each case.
        quiet: let warnings be, which are not ours to fix.
    """
    return Everywhere(load, args, steps, quiet)


class Everywhere:
    """What `compare` found, by topology and case. Processes cost more than cases do: two groups of them run it all."""

    def __init__(self, load: Callable[..., dict[str, Case]], args: tuple, steps: int, quiet: bool):
        self._run = functools.cache(functools.partial(_run, load, args, steps, quiet))

    def results(self, topology: str, name: str) -> list[dict[str, Any]]:
        """What each rank found."""
        found = self._run(("hsdp",) if topology == "hsdp" else ("local", "ddp", "fsdp2"))
        if isinstance(found, Exception):
            raise found
        everyone = [results[topology, name] for results in found]
        for results in everyone:
            assert not isinstance(results, str), results
        return everyone


def _run(load: Any, args: tuple, steps: int, quiet: bool, topologies: tuple[str, ...]) -> list[Any] | Exception:
    world_size = max(replicate * shard for replicate, shard in map(TOPOLOGIES.__getitem__, topologies))
    try:
        return run_ranks(_on_rank, world_size, load, args, steps, quiet, topologies, timeout=200)
    except RanksFailed as error:
        return error


def _on_rank(load: Any, args: tuple, steps: int, quiet: bool, topologies: tuple[str, ...]) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        cases = load(*args)
        for topology in topologies:
            groups: dict[str, list[str]] = {}
            for name, case in cases.items():
                groups.setdefault(repr(case.settings), []).append(name)
            for names in groups.values():
                settings = cases[names[0]].settings
                is_local = topology == "local"
                with local_runtime() if is_local else runtime_on(TOPOLOGIES[topology], **settings) as runtime:
                    for name in names:
                        try:
                            results[topology, name] = compare(cases[name], runtime, steps)
                        except Exception:
                            results[topology, name] = traceback.format_exc()
    return results


def compare(case: Case, runtime: ps.Runtime, steps: int) -> dict[str, Any]:
    """Train a case here, and in a plain loop over the whole batch, from the same values.

    Returns:
        The initial digests of the model built on a real device and on meta, the losses of either loop, how far its
        parameters and buffers are from each other in the end, by name, and how far the parameters have moved.
    """
    torch.manual_seed(runtime.rank)  # ambient draws have no say
    optimizer = ps.sgd(LR, momentum=MOMENTUM)
    models = [case.build(), *([on_meta(case.build)] if case.meta else [])]
    modules = [ps.shard(model, case.spec, runtime) for model in models]
    states = [ps.init(module, optimizer, ps.key(7)) for module in modules]
    digests = {state.digest() for state in states}
    module, state = modules[-1], states[-1]
    plain = _PlainLoop(case, state, runtime.dp_size)
    step = ps.train_step(module, case.loss, optimizer, donate=True)
    losses, expected = [], []
    for k in range(steps):
        state, metrics = step(state, rank_slice(runtime, case.batch(k)))
        losses.append(float(metrics["loss"]))
        expected.append(plain.step(case.batch(k)))
    ps.check_replicas(state)
    table = leaf_table(state)
    return {
        "digests": digests,
        "losses": losses,
        "expected": expected,
        "params": {name: _distance(table[f"params/{name}"], value) for name, value in plain.params.items()},
        "buffers": {name: _distance(table[f"buffers/{name}"], value) for name, value in plain.buffers.items()},
        "moved": {name: _distance(plain.start[name], value) for name, value in plain.params.items()},
    }


class _PlainLoop:
    def __init__(self, case: Case, state: ps.TrainState, num_slices: int):
        self.case, self.num_slices = case, num_slices
        self.model = case.build().train()
        table = leaf_table(state)
        self.params, self.buffers = dict(self.model.named_parameters()), self._state_buffers()
        with torch.no_grad():
            for name, parameter in self.params.items():
                parameter.copy_(table[f"params/{name}"])
            for name, buffer in self.buffers.items():
                buffer.copy_(table[f"buffers/{name}"])
        self.start = {name: parameter.detach().clone() for name, parameter in self.params.items()}
        trainable = [parameter for parameter in self.params.values() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, LR, momentum=MOMENTUM)

    def step(self, batch: Any) -> float:
        """One update. Every slice starts from the same buffers, and they become the mean over slices."""
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        leaves, structure = pytree.tree_flatten(batch)
        parts = zip(*(leaf.chunk(self.num_slices) for leaf in leaves), strict=True)
        means, after = [], []
        for part in parts:
            self._set_buffers(before)
            means.append(self.case.loss(self.model, pytree.tree_unflatten(list(part), structure), None))
            after.append({name: buffer.clone() for name, buffer in self.buffers.items()})
        self._set_buffers({name: _mean([buffers[name] for buffers in after]) for name in before})
        loss = sum(mean.total for mean in means) / sum(mean.weight for mean in means)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            module, _, attr = name.rpartition(".")
            self.model.get_submodule(module)._buffers[attr] = value.clone()  # backward may hold the old one
        self.buffers = self._state_buffers()

    def _state_buffers(self) -> dict[str, Tensor]:
        persistent = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().mean(0).to(tensors[0].dtype)


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b.detach()).abs().max().item() if a.numel() else 0.0

"""One step as a ledger of what is alive, to find its worst moment. Torch-free.

The peak covers what the run keeps (parameters, optimizer state, averages, buffers), gradients, gathered parameters and
the buffers of collectives. It does not cover activations, which depend on the batch, nor what kernels and communication
libraries allocate for themselves. It is that of a step that donates its state; one that does not also holds new
parameters and new optimizer state beside the old, and a second set of gradients if a transform changes them.

The ledger follows FSDP2: forward runs the units in module order, each gathered into a flat buffer, which is kept until
the next unit is gathered, and copied out of it; backward runs them in reverse and gathers one unit ahead (or as many as
`prefetch` says). A unit's whole gradients are copied into the buffer of the reduce-scatter, which lives until the next
one's. What depends on the order of a unit's own operations is bounded from above: its gradients count from the start
of the backward of what is inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from purestep.sharding.plan import Plan, PlanUnit


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step on one rank's device."""

    bytes: int
    """All that is alive then."""
    at: str
    """When it is."""
    gathered: int
    """Most bytes of gathered parameters, and of the buffers they are gathered into, alive at once (at its own worst
    moment)."""


@dataclass(frozen=True)
class UnitSizes:
    """Bytes that a unit takes on its way through a step."""

    gathered: int
    """Its parameters, gathered."""
    staged: int
    """A copy of the shards that is gathered from, where they have another dtype or place."""
    whole_grads: int
    """Gradients of its sharded parameters, before they are reduced."""
    reduced: int
    """The buffer they are reduced from."""
    shard_reduced: int
    """The shard that is left of it."""
    shard_grads: int
    """The same in the dtype of the parameters."""
    other_grads: int
    """Gradients of parameters that are not sharded."""


def peak_of(plan: Plan, kept: int, sizes: Sequence[UnitSizes]) -> Peak:
    """The worst moment of a step.

    Args:
        plan: whose step.
        kept: bytes on the device all the time.
        sizes: of each unit of the plan.
    """
    if not plan.topology.is_sharded:
        grads = sum(size.other_grads + size.shard_grads for size in sizes)
        # DDP keeps its buckets, as large as the gradients, from step to step.
        buckets = grads if plan.topology.kind == "ddp" else 0
        return Peak(kept + grads + buckets, "the end of backward", 0)
    ledger = _Ledger(kept)
    step = _ShardedStep(plan, sizes, ledger)
    for microbatch in range(min(plan.step.microbatches, 2)):  # later ones are like the second
        step.run(last=microbatch == plan.step.microbatches - 1 or microbatch == 1)
    return Peak(ledger.peak, ledger.at, ledger.most_gathered)


@dataclass
class _Ledger:
    """What is alive, by kind and unit, and the most there was."""

    kept: int
    now: str = "between steps"
    entries: dict[tuple[str, str], int] = field(default_factory=dict)
    peak: int = 0
    at: str = ""
    most_gathered: int = 0

    def __post_init__(self) -> None:
        self.live = self.peak = self.kept
        self.gathered, self.at = 0, self.now

    def put(self, kind: str, unit: str, num_bytes: int) -> None:
        """Have `num_bytes` of a kind for a unit; none, if there are some already."""
        if (kind, unit) not in self.entries:
            self.entries[kind, unit] = num_bytes
            self._change(kind, num_bytes)

    def drop(self, kind: str, unit: str) -> None:
        """Free them, if there are any."""
        self._change(kind, -self.entries.pop((kind, unit), 0))

    def has(self, kind: str, unit: str) -> bool:
        """Whether there are any."""
        return (kind, unit) in self.entries

    def _change(self, kind: str, num_bytes: int) -> None:
        self.live += num_bytes
        if kind in ("params", "flat", "staged"):
            self.gathered += num_bytes
        self.most_gathered = max(self.most_gathered, self.gathered)
        if self.live > self.peak:
            self.peak, self.at = self.live, self.now


class _ShardedStep:
    """Forward and backward of a sharded plan, as entries in a ledger."""

    def __init__(self, plan: Plan, sizes: Sequence[UnitSizes], ledger: _Ledger):
        self.plan, self.ledger = plan, ledger
        self.sizes = {unit.path: size for unit, size in zip(plan.units, sizes, strict=True)}
        self.units = {unit.path: unit for unit in plan.units}
        self.inside: dict[str, list[str]] = {path: [] for path in self.units}
        for path in self.units:
            if path:
                self.inside[_around(path, self.units)].append(path)
        self.order: list[str] = []  # as forward enters them
        self.done: list[str] = []  # as it leaves them
        self._enter("")
        self.flat = ""  # whose flat buffer forward keeps
        self.reducing = ""  # whose reduce-scatter buffer backward keeps

    def run(self, *, last: bool) -> None:
        """One microbatch."""
        self._forward("")
        self.ledger.drop("flat", self.flat)
        self._backward("", reduces=last or self.plan.step.policy != "defer_all")
        self.ledger.drop("reduce", self.reducing)
        for path in self.units:
            self.ledger.drop("cast", path)

    def _enter(self, path: str) -> None:
        self.order.append(path)
        for child in self.inside[path]:
            self._enter(child)
        self.done.append(path)

    def _forward(self, path: str) -> None:
        ledger, unit = self.ledger, self.units[path]
        ledger.now = f"forward of {path or 'the root'}"
        self._gather(path)
        if self.flat != path:
            ledger.drop("flat", self.flat)
        self.flat = path
        ledger.put("params", path, self.sizes[path].gathered)
        ahead = self.order.index(path) + 1
        for other in self.order[ahead : ahead + (unit.settings.prefetch or 0)]:
            self._gather(other)
        for child in self.inside[path]:
            self._forward(child)
        reshard = unit.settings.reshard_after_forward
        if reshard is not False:
            ledger.drop("params", path)
        if _is_number(reshard):
            ledger.put("part", path, self.sizes[path].gathered // int(reshard))

    def _backward(self, path: str, *, reduces: bool) -> None:
        ledger, size, unit = self.ledger, self.sizes[path], self.units[path]
        ledger.now = f"backward of {path or 'the root'}"
        self._gather(path)
        ledger.put("params", path, size.gathered)
        ledger.drop("flat", path)
        ledger.drop("part", path)
        before = self.done.index(path)
        depth = 1 if unit.settings.prefetch is None else unit.settings.prefetch
        for other in self.done[max(0, before - depth) : before][::-1]:
            self._gather(other)
        if ledger.has("grads", path):  # of earlier microbatches, not reduced yet
            ledger.put("added", path, size.whole_grads)
        ledger.put("grads", path, size.whole_grads)
        ledger.put("other", path, size.other_grads)
        for child in reversed(self.inside[path]):
            self._backward(child, reduces=reduces)
        ledger.now = f"backward of {path or 'the root'}"
        ledger.drop("added", path)
        ledger.drop("params", path)
        if reduces:
            self._reduce(path, unit)

    def _gather(self, path: str) -> None:
        if not self.ledger.has("params", path) and not self.ledger.has("flat", path):
            self.ledger.put("staged", path, self.sizes[path].staged)
            self.ledger.put("flat", path, self.sizes[path].gathered)
            self.ledger.drop("staged", path)

    def _reduce(self, path: str, unit: PlanUnit) -> None:
        ledger, size = self.ledger, self.sizes[path]
        if size.reduced == 0:
            return
        ledger.drop("reduce", self.reducing)
        ledger.put("reduce", path, size.reduced)
        self.reducing = path
        ledger.drop("grads", path)
        if size.shard_reduced != size.shard_grads or ledger.has("shard", path):  # to be cast, or added to the last
            ledger.put("cast", path, size.shard_reduced)
        ledger.put("shard", path, size.shard_grads)
        if self.plan.topology.replicate == 1 or self.plan.step.policy != "sync_each":
            ledger.drop("cast", path)  # else it is what was reduced over the copies, which stays until backward ends
        if unit.settings.cpu_offload:
            ledger.drop("shard", path)


def _around(path: str, units: dict[str, PlanUnit]) -> str:
    """The innermost unit around a unit."""
    while path:
        path = path.rpartition(".")[0]
        if path in units:
            return path
    return ""


def _is_number(reshard: bool | int) -> bool:
    return not isinstance(reshard, bool)

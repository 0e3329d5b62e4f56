"""What a plan costs each rank: bytes it keeps, bytes alive at the worst moment, bytes it sends. Arithmetic, torch-free.

Bytes kept are exact: they are what `ps.init` allocates on the rank that holds most, rank 0 (`account(plan, rank=...)`
for another), and what a donated step keeps them at. Parameters and gradients are padded to the largest shard, as FSDP2
stores them; the optimizer's own tensors are not.

Bytes sent are those of ring algorithms, by each rank and step. With S shards, R copies, W = R x S ranks and m
microbatches, for a unit of P bytes as gathered, G bytes as gradients in the dtype they are reduced in:

    all-gather       (S - 1) / S x P     a forward, and a backward if the unit was freed after forward:   x m
    reduce-scatter   (S - 1) / S x G     a backward: x m, or once a step with `defer_all`
    all-reduce       2 (R - 1) / R x G/S of HSDP, x m with `sync_each`, else once a step
                     2 (W - 1) / W x G   of DDP and of ignored parameters, once a step
                     2 (W - 1) / W x B   of the B bytes of buffers, once a step

A rank receives as much. Scalars (loss, metrics, the norm of gradients), evaluation and checkpoints are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from purestep.sharding.plan import Plan, PlanLeaf, PlanParam, PlanUnit
from purestep.sharding.timeline import Peak, UnitSizes, peak_of

_SIXTEEN_BITS = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Traffic:
    """Bytes a rank sends in one step."""

    gather_forward: int = 0
    gather_backward: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.gather_forward + self.gather_backward + self.reduce_scatter + self.all_reduce


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit on one rank."""

    params: int
    grads: int
    """Between backward and update."""
    opt_state: int
    ema: int
    gathered: int
    """Its parameters while gathered; 0 where nothing is sharded."""
    traffic: Traffic
    on_host: bool = False
    """Whether params, grads, opt_state and ema are on the host (CPU offload)."""

    @property
    def kept(self) -> int:
        """What of the state the rank keeps of this unit."""
        return self.params + self.opt_state + self.ema


@dataclass(frozen=True)
class Account:
    """Bytes of a plan on one rank. Made by `account`."""

    units: tuple[UnitBytes, ...]
    """As the plan's units."""
    buffers: int
    """Buffers, non-persistent ones included: whole on every rank."""
    other_opt_state: int
    """Tensors of the optimizer that belong to no parameter."""
    buffer_traffic: int
    """Bytes sent to make the buffers equal on every rank."""
    peak: Peak

    @property
    def params(self) -> int:
        """Bytes of parameters."""
        return sum(unit.params for unit in self.units)

    @property
    def grads(self) -> int:
        """Bytes of gradients between backward and update."""
        return sum(unit.grads for unit in self.units)

    @property
    def opt_state(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(unit.opt_state for unit in self.units) + self.other_opt_state

    @property
    def ema(self) -> int:
        """Bytes of averaged parameters."""
        return sum(unit.ema for unit in self.units)

    @property
    def kept(self) -> int:
        """Bytes of the whole state, on device and host."""
        return self.params + self.opt_state + self.ema + self.buffers

    @property
    def on_host(self) -> int:
        """Bytes of the state that are on the host (CPU offload)."""
        return sum(unit.kept for unit in self.units if unit.on_host)

    @property
    def sent(self) -> int:
        """Bytes the rank sends in a step."""
        return sum(unit.traffic.total for unit in self.units) + self.buffer_traffic

    @property
    def traffic(self) -> Traffic:
        """Bytes the rank sends in a step, by kind; buffers are all-reduced."""
        fields = {f.name: sum(getattr(u.traffic, f.name) for u in self.units) for f in dataclasses.fields(Traffic)}
        return Traffic(**{**fields, "all_reduce": fields["all_reduce"] + self.buffer_traffic})

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        totals = ("params", "grads", "opt_state", "ema", "buffers", "kept", "on_host", "sent")
        return {
            **{name: getattr(self, name) for name in totals},
            "traffic": dataclasses.asdict(self.traffic),
            "peak": dataclasses.asdict(self.peak),
            "units": [dataclasses.asdict(unit) for unit in self.units],
        }


def account(plan: Plan, rank: int = 0) -> Account:
    """Bytes of `plan` on one rank.

    Args:
        plan: from `ShardingSpec.resolve`; with an optimizer if its state is to count (`plan.with_optimizer`).
        rank: whose bytes. Rank 0 holds most; later ranks may hold less of the optimizer's state, or none.

    Raises:
        ValueError: the topology has no such rank.
    """
    if not 0 <= rank < plan.topology.world_size:
        raise ValueError(f"rank must be 0 to {plan.topology.world_size - 1} in {plan.topology}, got {rank}")
    shard = rank % plan.topology.shard
    units = tuple(_unit_bytes(plan, unit, shard) for unit in plan.units)
    buffers = sum(buffer.nbytes for buffer in plan.buffers)
    written = sum(buffer.nbytes for buffer in plan.buffers if buffer.persistent)  # a step computes new ones
    other = sum(slot.nbytes for slot in plan.step.other_slots)
    on_device = sum(unit.kept for unit in units if not unit.on_host) + buffers + written + other
    sizes = [_sizes(plan, unit) for unit in plan.units]
    return Account(
        units=units,
        buffers=buffers,
        other_opt_state=other,
        buffer_traffic=_all_reduce(_reduced_buffers(plan.buffers), plan.topology.world_size),
        peak=peak_of(plan, on_device, sizes),
    )


def replicated(plan: Plan, limit: int | None = None) -> list[tuple[str, int]]:
    """(name, bytes) of parameters and buffers that every rank holds whole, largest first.

    In a sharded topology: buffers and ignored parameters. In DDP: everything.
    """
    whole = [(buffer.name, buffer.nbytes) for buffer in plan.buffers]
    if plan.topology.world_size == 1:
        return []
    for unit in plan.units:
        whole += [(p.name, p.nbytes) for p in unit.params if p.ignored or not plan.topology.is_sharded]
    return sorted((leaf for leaf in whole if leaf[1]), key=lambda leaf: (-leaf[1], leaf[0]))[:limit]


def _unit_bytes(plan: Plan, unit: PlanUnit, shard: int) -> UnitBytes:
    params = unit.bytes_per_rank
    return UnitBytes(
        params=params,
        grads=sum(param.bytes_per_rank(unit.shards) for param in unit.params if param.trainable),
        opt_state=sum(_slot_bytes(param, unit.shards, shard) for param in unit.params),
        ema=params if plan.step.ema else 0,
        gathered=_gathered(unit),
        traffic=_traffic(plan, unit),
        on_host=unit.settings.cpu_offload and unit.shards > 1,
    )


def _slot_bytes(param: PlanParam, shards: int, shard: int) -> int:
    """Bytes of the optimizer for one parameter: what is shaped like it lives as it does, the rest is whole."""
    rows = param.rows_of(shards, shard)
    share = rows * math.prod(param.shape[1:]) if rows is not None else param.numel
    return sum(slot.itemsize * share if slot.shape == param.shape else slot.nbytes for slot in param.slots)


def _gathered(unit: PlanUnit) -> int:
    return _padded(unit, lambda param: True, lambda param: _gather_itemsize(param, unit))


def _padded(unit: PlanUnit, wanted: Callable[[PlanParam], bool], itemsize: Callable[[PlanParam], int]) -> int:
    """Bytes of a unit's sharded parameters over all ranks, padding included."""
    if unit.shards == 1:
        return 0
    sharded = [param for param in unit.params if wanted(param) and not param.ignored]
    return sum(param.padded_numel(unit.shards) * itemsize(param) for param in sharded)


def _gather_itemsize(param: PlanParam, unit: PlanUnit) -> int:
    is_floating = "float" in param.dtype
    return _SIXTEEN_BITS.get(unit.settings.param_dtype, param.itemsize) if is_floating else param.itemsize


def _reduce_itemsize(param: PlanParam, unit: PlanUnit) -> int:
    if unit.settings.reduce_dtype in _SIXTEEN_BITS:
        return 2
    return 4 if unit.settings.param_dtype in _SIXTEEN_BITS else param.itemsize


def _traffic(plan: Plan, unit: PlanUnit) -> Traffic:
    topology, step = plan.topology, plan.step
    trainable = [param for param in unit.params if param.trainable]
    if not topology.is_sharded:
        itemsize = _SIXTEEN_BITS.get(step.ddp_reduce_dtype)
        grads = sum(param.numel * (itemsize or param.itemsize) for param in trainable)
        return Traffic(all_reduce=_all_reduce(grads, topology.world_size))
    gathered, reduced = _gathered(unit), _reduced(unit)
    reduces = 1 if step.policy == "defer_all" else step.microbatches
    copies = step.microbatches if step.policy == "sync_each" else 1
    kept = unit.settings.reshard_after_forward
    again = 0 if kept is False else topology.shard if kept is True else kept
    ignored = sum(param.nbytes for param in trainable if param.ignored)
    return Traffic(
        gather_forward=_one_way(gathered, topology.shard) * step.microbatches,
        gather_backward=_one_way(gathered, again) * step.microbatches if again else 0,
        reduce_scatter=_one_way(reduced, topology.shard) * reduces,
        all_reduce=_all_reduce(reduced // topology.shard, topology.replicate) * copies
        + _all_reduce(ignored, topology.world_size),
    )


def _reduced(unit: PlanUnit) -> int:
    return _padded(unit, lambda param: param.trainable, lambda param: _reduce_itemsize(param, unit))


def _one_way(num_bytes: int, ranks: int) -> int:
    """What a rank sends in an all-gather to, or a reduce-scatter from, `num_bytes`."""
    return num_bytes * (ranks - 1) // ranks


def _all_reduce(num_bytes: int, ranks: int) -> int:
    return 2 * num_bytes * (ranks - 1) // ranks


def _reduced_buffers(buffers: Iterable[PlanLeaf]) -> int:
    """Bytes in which buffers are reduced: at least fp32, integers as int64."""
    wide = {True: lambda buffer: max(4, buffer.itemsize), False: lambda buffer: 8}
    persistent = [buffer for buffer in buffers if buffer.persistent]
    floating = ("float", "complex")
    return sum(b.numel * wide[any(kind in b.dtype for kind in floating)](b) for b in persistent)


def _sizes(plan: Plan, unit: PlanUnit) -> UnitSizes:
    """What a unit needs while it is gathered and reduced."""
    sharded = [param for param in unit.params if param.trainable and not param.ignored]
    shard_grads = sum(param.bytes_per_rank(unit.shards) for param in sharded)
    own_dtype = unit.settings.param_dtype not in _SIXTEEN_BITS
    gathered, reduced = _gathered(unit), _reduced(unit)
    return UnitSizes(
        gathered=gathered,
        staged=0 if own_dtype and not unit.settings.cpu_offload else gathered // unit.shards,
        whole_grads=sum(param.numel * _gather_itemsize(param, unit) for param in sharded),
        reduced=reduced,
        shard_reduced=reduced // unit.shards,
        shard_grads=shard_grads,
        other_grads=sum(param.nbytes for param in unit.params if param.trainable and param not in sharded),
    )

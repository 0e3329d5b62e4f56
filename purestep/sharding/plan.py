"""`Plan`: a spec applied to a model, as data that prints, compares and serializes. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from purestep.sharding.config import Topology
from purestep.sharding.rules import ActivationCheckpointing, Dtype

if TYPE_CHECKING:
    from purestep.sharding.accounting import Account


@dataclass(frozen=True)
class PlanLeaf:
    """A tensor in a plan: a buffer, or a slot of the optimizer."""

    name: str
    """A buffer's name; a slot's place in the optimizer's state, `adamw/exp_avg`."""
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    """Bytes an element."""
    persistent: bool = True
    """Whether it is a leaf of the state."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class PlanParam:
    """A parameter in a plan."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    """Bytes an element."""
    trainable: bool
    ignored: bool = False
    """Whether it stays whole on every rank of a sharded topology."""
    slots: tuple[PlanLeaf, ...] = ()
    """What the optimizer keeps for it."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.itemsize

    def rows_of(self, shards: int, shard: int) -> int | None:
        """Rows of dim 0 that one of `shards` ranks holds, as `torch.chunk` cuts them; None where it holds it whole."""
        if shards == 1 or not self.shape or self.ignored:
            return None
        most = -(-self.shape[0] // shards)
        return max(0, min(most, self.shape[0] - shard * most))

    def padded_numel(self, shards: int) -> int:
        """Elements over all ranks, each rank's rows padded to the largest shard's."""
        rows = self.rows_of(shards, 0)
        return self.numel if rows is None else rows * shards * math.prod(self.shape[1:])

    def bytes_per_rank(self, shards: int) -> int:
        """Bytes a rank stores: a slice of dim 0, padded to the largest (rank 0's), as FSDP2 keeps it."""
        rows = self.rows_of(shards, 0)
        return self.nbytes if rows is None else rows * math.prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True)
class UnitSettings:
    """What `Unit` says, with nothing left open."""

    reshard_after_forward: bool | int = True
    param_dtype: Dtype = "fp32"
    reduce_dtype: Dtype = "fp32"
    output_dtype: Dtype | None = None
    """None: as computed."""
    activation_checkpointing: ActivationCheckpointing = dataclasses.field(default_factory=ActivationCheckpointing)
    compile: bool = False
    cpu_offload: bool = False
    prefetch: int | None = None
    """None: as FSDP2 does by itself."""

    def __str__(self) -> str:
        other = [f for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != getattr(UnitSettings(), f.name)]
        said = [f"reshard={self.reshard_after_forward}", *(f"{f.name}={getattr(self, f.name)}" for f in other)]
        return " ".join(said)


@dataclass(frozen=True)
class PlanUnit:
    """A module whose parameters are gathered and freed together."""

    path: str
    """Module path; "" is the root unit: everything no rule took."""
    module_class: str
    params: tuple[PlanParam, ...]
    settings: UnitSettings
    shards: int
    note: str = ""
    """Why it is a unit, when no rule says so."""

    @property
    def reshard_after_forward(self) -> bool | int:
        """Whether its gathered parameters are freed between forward and backward; see `Unit`."""
        return self.settings.reshard_after_forward

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(param.numel for param in self.params)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters a rank stores."""
        return sum(param.bytes_per_rank(self.shards) for param in self.params)


@dataclass(frozen=True)
class PlanStep:
    """What one step does with the units, as far as it costs bytes."""

    optimizer: str = ""
    """What the optimizer is called; empty: none was given, and its state is not counted."""
    ema: bool = False
    """Whether the state holds averaged parameters."""
    microbatches: int = 1
    policy: Literal["sync_each", "defer_all_reduce", "defer_all"] = "sync_each"
    """See `GradientAccumulationConfig`."""
    ddp_reduce_dtype: Dtype = "fp32"
    """See `DDPConfig`."""
    other_slots: tuple[PlanLeaf, ...] = ()
    """What the optimizer keeps beside what it keeps for each parameter."""


@dataclass(frozen=True)
class Plan:
    """What each rank will hold, gather and send. `print(plan)` is a table.

    >>> import torch, purestep as ps
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False))
    >>> plan = ps.ShardingSpec(units=("0",)).resolve(model, ps.Topology(replicate=1, shard=2))
    >>> plan = plan.with_optimizer(ps.adamw(1e-3))
    >>> plan.bytes_per_rank, plan.account().opt_state
    (48, 104)
    """

    topology: Topology
    units: tuple[PlanUnit, ...]
    """In module order, the root unit last."""
    forward_methods: tuple[str, ...] = ()
    source: str = ""
    """Where its rules came from."""
    buffers: tuple[PlanLeaf, ...] = ()
    """Whole on every rank."""
    step: PlanStep = dataclasses.field(default_factory=PlanStep)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters a rank stores."""
        return sum(unit.bytes_per_rank for unit in self.units)

    @property
    def gather_peak(self) -> int:
        """Most bytes of gathered parameters alive at once, with the buffers they are gathered into."""
        return self.account().peak.gathered

    def with_optimizer(self, optimizer: Any, *, ema: bool = False) -> Plan:
        """The same plan, which also counts what an optimizer keeps.

        Args:
            optimizer: anything with `init(params) -> opt_state`, which is asked with meta tensors. What is shaped like
                its parameter is taken to be sharded as the parameter is; anything else, to be whole on every rank.
            ema: also count averaged parameters, which live as the parameters do.
        """
        from purestep.sharding.plan_leaves import slots_of

        trainable = [param for unit in self.units for param in unit.params if param.trainable]
        slots, others = slots_of(optimizer, trainable)
        units = [
            dataclasses.replace(
                unit, params=tuple(dataclasses.replace(p, slots=slots.get(p.name, ())) for p in unit.params)
            )
            for unit in self.units
        ]
        parts = getattr(optimizer, "parts", {"": optimizer}).values()
        name = ", ".join(type(part).__name__ for part in parts)
        step = dataclasses.replace(self.step, optimizer=name, ema=ema, other_slots=others)
        return dataclasses.replace(self, units=tuple(units), step=step)

    def account(self, rank: int = 0) -> Account:
        """Bytes on one rank: kept, alive at the peak, and sent. See `purestep.sharding.accounting`.

        Args:
            rank: whose; rank 0 holds most.
        """
        from purestep.sharding.accounting import account

        return account(self, rank)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types; `Plan.from_dict` reads it back. Under "rank_0" is what it comes to in bytes."""
        return {**dataclasses.asdict(self), "rank_0": self.account().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote.

        Raises:
            ValueError: the table is not that of a plan.
        """
        try:
            return cls(
                topology=Topology(**data["topology"]),
                units=tuple(_unit(unit) for unit in data["units"]),
                forward_methods=tuple(data["forward_methods"]),
                source=data["source"],
                buffers=_leaves(data["buffers"]),
                step=PlanStep(**{**data["step"], "other_slots": _leaves(data["step"]["other_slots"])}),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a plan as Plan.to_dict writes it: {error!r}") from None

    def diff(self, other: Plan) -> str:
        """A line diff of the two plans, parameters and bytes included; empty when they are equal."""
        from purestep.sharding.plan_text import diff

        return diff(self, other)

    def __str__(self) -> str:
        from purestep.sharding.plan_text import table

        return table(self)


def _leaves(data: list[dict[str, Any]]) -> tuple[PlanLeaf, ...]:
    return tuple(PlanLeaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in data)


def _unit(data: dict[str, Any]) -> PlanUnit:
    params = tuple(
        PlanParam(**{**param, "shape": tuple(param["shape"]), "slots": _leaves(param["slots"])})
        for param in data["params"]
    )
    recompute = ActivationCheckpointing(**data["settings"]["activation_checkpointing"])
    settings = UnitSettings(**{**data["settings"], "activation_checkpointing": recompute})
    return PlanUnit(**{**data, "params": params, "settings": settings})

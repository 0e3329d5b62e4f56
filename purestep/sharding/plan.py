"""`Plan`: a spec applied to a model, as a table that prints, compares and serializes. Torch-free."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

from purestep.sharding.config import Topology


@dataclass(frozen=True)
class PlanParam:
    """A parameter in a plan."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    """Bytes an element."""
    trainable: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def bytes_per_rank(self, shards: int) -> int:
        """Bytes a rank stores: a slice of dim 0, padded to the largest (rank 0's), as FSDP2 keeps it."""
        if shards == 1 or not self.shape:
            return self.numel * self.itemsize
        return math.ceil(self.shape[0] / shards) * math.prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True)
class PlanUnit:
    """A module whose parameters are gathered and freed together."""

    path: str
    """Module path; "" is the root unit: everything no rule took."""
    module_class: str
    params: tuple[PlanParam, ...]
    reshard_after_forward: bool
    shards: int

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(param.numel for param in self.params)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters a rank stores."""
        return sum(param.bytes_per_rank(self.shards) for param in self.params)

    @property
    def gather_bytes(self) -> int:
        """Bytes of its parameters while gathered (0 when nothing is sharded)."""
        if self.shards == 1:
            return 0
        return sum(param.bytes_per_rank(self.shards) * self.shards for param in self.params)


@dataclass(frozen=True)
class Plan:
    """What each rank will hold and gather. `print(plan)` is a table."""

    topology: Topology
    units: tuple[PlanUnit, ...]
    """In module order, the root unit last."""
    forward_methods: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters a rank stores."""
        return sum(unit.bytes_per_rank for unit in self.units)

    @property
    def gather_peak(self) -> int:
        """Bytes of gathered parameters alive at once, at most: what is never freed, and two units (one ahead)."""
        kept = sum(unit.gather_bytes for unit in self.units if not unit.reshard_after_forward)
        freed = sorted((unit.gather_bytes for unit in self.units if unit.reshard_after_forward), reverse=True)
        return kept + sum(freed[:2])

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON types; `Plan.from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that `to_dict` wrote."""
        units = tuple(
            PlanUnit(**{**u, "params": tuple(PlanParam(**{**p, "shape": tuple(p["shape"])}) for p in u["params"])})
            for u in data["units"]
        )
        return cls(Topology(**data["topology"]), units, tuple(data["forward_methods"]))

    def diff(self, other: Plan) -> str:
        """A line diff of the two tables, parameters included; empty when the plans are equal."""
        return "\n".join(
            difflib.unified_diff(self._lines(), other._lines(), fromfile="self", tofile="other", lineterm="", n=1)
        )

    def _lines(self) -> list[str]:
        lines = [str(self.topology), f"forward methods: {', '.join(self.forward_methods) or 'forward only'}"]
        for unit in self.units:
            lines.append(f"unit {unit.path or '(root)'} {unit.module_class} reshard={unit.reshard_after_forward}")
            lines += [f"  {p.name} {p.dtype}{list(p.shape)}{'' if p.trainable else ' frozen'}" for p in unit.params]
        return lines

    def __str__(self) -> str:
        rows = [("unit", "class", "params", "bytes/rank", "gathered", "reshard")]
        for unit in self.units:
            reshard = "-" if unit.shards == 1 else "yes" if unit.reshard_after_forward else "no"
            name = unit.path or "(root)"
            sizes = (f"{unit.numel:,}", f"{unit.bytes_per_rank:,}", f"{unit.gather_bytes:,}")
            rows.append((name, unit.module_class, *sizes, reshard))
        total = sum(unit.numel for unit in self.units)
        rows.append(("total", "", f"{total:,}", f"{self.bytes_per_rank:,}", f"peak {self.gather_peak:,}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        align = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust)
        table = ["  ".join(f(c, w) for f, c, w in zip(align, row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([str(self.topology), *table])

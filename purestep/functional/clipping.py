"""Clipping by value, and by the norm of groups of parameters; by the norm of all see `clip_by_global_norm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from purestep.functional.param_rules import Groups, labelled, labelled_pairs, param_table
from purestep.functional.rescaling import overwritten
from purestep.functional.transforms import GradientTransform, Leaves, Slots, clip_by_global_norm
from purestep.state.mappings import FrozenDict


@dataclass(frozen=True)
class clip_by_value(GradientTransform):  # noqa: N801 - written and printed as a call
    """Bring every element of every gradient into [-limit, limit]. NaN stays NaN.

    Args:
        limit: positive.

    Raises:
        ValueError: it is not.

    >>> import torch, purestep as ps
    >>> ps.clip_by_value(1.0).update({"w": torch.tensor([-3.0, 0.5, 2.0])}, {}, {}, step=0)[0]
    {'w': tensor([-1.0000,  0.5000,  1.0000])}
    """

    limit: float

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"clip_by_value: limit must be positive, got {self.limit!r}")

    def init(self, params: Leaves) -> Slots:
        """No state."""
        return {}

    def update(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """Clipped gradients; see `GradientTransform.update`."""
        return overwritten(grads, self._clamp, inplace), slots

    def _clamp(self, tensors: list[Tensor]) -> None:
        torch._foreach_clamp_min_(tensors, -self.limit)
        torch._foreach_clamp_max_(tensors, self.limit)


@dataclass(frozen=True)
class clip_by_group(GradientTransform):  # noqa: N801 - written and printed as a call
    """Clip groups of gradients by rules, each to a global norm of its own; what no rule takes is not clipped.

    Reports the norms before clipping as `grad_norm/<label>`. Each group clips as `clip_by_global_norm` does.

    Args:
        groups: label -> (rule or rules, max_norm), in the order in which rules are tried.
        module: the model, or what `ps.shard` made of it, for rules about classes of modules.

    Raises:
        TypeError: a group is no such pair.
        ValueError: a `max_norm` that is not positive; at `init`, a rule that takes no parameter.

    >>> import torch, purestep as ps
    >>> clip, metrics = ps.clip_by_group({"biases": ("*.bias", 1.0)}), {}
    >>> grads = {"a.bias": torch.tensor([3.0]), "b.bias": torch.tensor([4.0]), "a.weight": torch.tensor([[9.0]])}
    >>> grads, _ = clip.update(grads, clip.init(grads), grads, step=0, metrics=metrics)
    >>> grads["b.bias"], grads["a.weight"], metrics
    (tensor([0.8000]), tensor([[9.]]), {'grad_norm/biases': tensor(5.)})
    """

    groups: Mapping[str, Any]
    _: KW_ONLY
    module: Any = None
    _groups: Groups = field(init=False, repr=False, compare=False)
    _clips: Mapping[str, clip_by_global_norm] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = labelled_pairs(self.groups, "clip_by_group", "max_norm")
        rules = labelled({label: pair[0] for label, pair in pairs.items()}, "clip_by_group")
        table, clips = param_table(self.module), {label: clip_by_global_norm(pair[1]) for label, pair in pairs.items()}
        object.__setattr__(self, "module", table)
        object.__setattr__(self, "groups", pairs)
        object.__setattr__(self, "_groups", Groups(rules, table))
        object.__setattr__(self, "_clips", FrozenDict(clips))

    def __hash__(self) -> int:
        return hash((self._groups, tuple(self._clips.items())))

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that `update` writes."""
        return tuple(f"grad_norm/{label}" for label in self.groups)

    def init(self, params: Leaves) -> Slots:
        """No state, but the rules are held against the parameters."""
        self._groups.check(params, "clip_by_group")
        return {}

    def update(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """Clipped gradients; see `GradientTransform.update`."""
        clipped = dict(grads)
        parts = self._groups.split(grads, params)
        for label, clip in self._clips.items():
            report: dict[str, Any] = {}
            clipped.update(clip.update(parts[label], {}, params, step=step, inplace=inplace, metrics=report)[0])
            if metrics is not None:
                metrics[f"grad_norm/{label}"] = report["grad_norm"]
        return clipped, slots

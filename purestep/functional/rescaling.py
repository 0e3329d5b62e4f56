"""Transforms that change each gradient by itself: `scale` and `centralize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purestep.functional.schedules import Schedule, value_at
from purestep.functional.shards import copies_of, local_tensors
from purestep.functional.transforms import GradientTransform, Leaves, Slots
from purestep.state.placement import is_dtensor, local_tensor


@dataclass(frozen=True)
class scale(GradientTransform):  # noqa: N801 - written and printed as a call
    """Multiply every gradient by one number.

    Args:
        factor: a finite number, or a schedule of the step.

    Raises:
        ValueError: the number is not finite.

    >>> import torch, purestep as ps
    >>> ps.scale(ps.linear(1.0, 0.0, 4)).update({"w": torch.tensor([2.0])}, {}, {}, step=1)[0]
    {'w': tensor([1.5000])}
    """

    factor: float | Schedule

    def __post_init__(self) -> None:
        if not callable(self.factor) and not (isinstance(self.factor, int | float) and abs(self.factor) < float("inf")):
            raise ValueError(f"scale: factor must be a finite number, or a schedule, got {self.factor!r}")

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
        """Scaled gradients; see `GradientTransform.update`."""
        factor = value_at(self.factor, step)
        if isinstance(factor, Tensor):
            return overwritten(grads, lambda tensors: [tensor.mul_(factor) for tensor in tensors], inplace), slots
        return overwritten(grads, lambda tensors: torch._foreach_mul_(tensors, factor), inplace), slots


@dataclass(frozen=True)
class centralize(GradientTransform):  # noqa: N801 - written and printed as a call
    """Subtract from each gradient its mean over all dims but the first (arXiv:2004.01461).

    Gradients of fewer than 2 dims stay as they are. The first dim of a weight is that of its outputs, in `nn.Linear`
    and convolutions alike; the mean is one for each output. Computed in fp32 or wider.

    >>> import torch, purestep as ps
    >>> grads = {"w": torch.tensor([[1.0, 3.0], [0.0, 1.0]]), "b": torch.tensor([1.0])}
    >>> ps.centralize().update(grads, {}, {}, step=0)[0]
    {'w': tensor([[-1.0000,  1.0000], [-0.5000,  0.5000]]), 'b': tensor([1.])}
    """

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
        """Centralized gradients; see `GradientTransform.update`."""
        with torch.no_grad():
            return {name: _centralized(grad, inplace) if grad.ndim > 1 else grad for name, grad in grads.items()}, slots


def _centralized(grad: Tensor, inplace: bool) -> Tensor:
    target = grad if inplace else copies_of([grad])[0]
    local = local_tensor(target)
    if local.numel():
        local.sub_(_mean_of_rows(grad).to(local.dtype))
    return target


def _mean_of_rows(grad: Tensor) -> Tensor:
    """Means over all dims but the first, of this rank's rows."""
    dims = tuple(range(1, grad.ndim))
    wide = torch.promote_types(grad.dtype, torch.float32)
    if is_dtensor(grad) and any(p.is_shard() and p.dim != 0 for p in grad.placements):  # type: ignore[attr-defined]
        from torch.distributed.tensor import Replicate

        # Rows are cut too: DTensor knows how to add up the pieces.
        rows = [p if p.is_shard() and p.dim == 0 else Replicate() for p in grad.placements]  # type: ignore[attr-defined]
        means = grad.to(wide).mean(dims, keepdim=True).redistribute(placements=rows)  # type: ignore[attr-defined]
        return local_tensor(means)
    # In one order in memory, so that the layout of a gradient does not change how its sums are rounded.
    return local_tensor(grad).contiguous().to(wide).mean(dims, keepdim=True)


def overwritten(grads: Leaves, write: Callable[[list[Tensor]], Any], inplace: bool) -> Leaves:
    """`grads` after `write` has overwritten their local tensors; copies of them unless `inplace`."""
    if not grads:
        return grads
    targets = list(grads.values()) if inplace else copies_of(grads.values())
    with torch.no_grad():
        write([tensor for tensor in local_tensors(targets) if tensor.numel()] or [torch.empty(0)])
    return dict(zip(grads, targets, strict=True))

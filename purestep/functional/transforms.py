"""What an optimizer and a gradient transform are: the contract, and the transforms that come with it.

Both are values with two pure functions. `init` makes the state they keep between updates, as a tree of mappings whose
leaves are tensors; `update` maps gradients and that state to new ones. Anything with these two methods works in
`ps.chain` and `ps.train_step`; inheriting from the classes below is not needed, but lets `chain` notice one that stands
in the wrong place.

What you must guarantee when you write one:

- *Pure.* The result depends on the arguments only, and the arguments are not changed (unless `inplace=True`, below).
- *Any subset.* `grads` may lack names that `params` has. A leaf without a gradient, and its part of the state, are
  returned as they are: no gradient is not a zero gradient.
- *Any placement.* Leaves may be DTensors; results have the placement, shape and dtype of what they replace. Every rank
  calls `update` with the same names in the same order, and takes the same decisions.
- *Abstract `init`.* `init` may be given meta tensors and then returns meta tensors. It draws no random numbers.
- *Named reports.* A class attribute `reports` lists the metrics that `update` writes, if any, so that nobody computes
  them twice.
- *Two optional arguments.* `inplace` and `metrics` are passed only to an `update` that names them or takes `**kwargs`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from purestep.functional.shards import are_plain, local_tensors, with_local
from purestep.state.placement import shard_groups

Leaves = Mapping[str, Tensor]
Slots = Mapping[str, Any]


class GradientTransform(Protocol):
    """A pure function of gradients, with state if it needs any.

    >>> import torch, purestep as ps
    >>> class Signs:
    ...     def init(self, params):
    ...         return {}
    ...
    ...     def update(self, grads, slots, params, *, step):
    ...         return {name: grad.sign() for name, grad in grads.items()}, slots
    >>> optimizer = ps.chain(signs=Signs(), sgd=ps.sgd(0.5))
    >>> params, _ = optimizer.update({"w": torch.tensor(3.0)}, {}, {"w": torch.tensor(1.0)}, step=0)
    >>> params["w"]
    tensor(0.5000)
    """

    def init(self, params: Leaves) -> Slots:
        """The state before the first update.

        Args:
            params: the trainable parameters by name; tensors, DTensors or meta tensors.

        Returns:
            {slot name: {parameter name: tensor}}, or another tree of mappings; `{}` if there is nothing to keep.
        """

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
        """Transformed gradients, and the state after this update.

        Args:
            grads: gradients by parameter name; a name may be missing.
            slots: what `init` or the last `update` returned. Read-only.
            params: the parameters before the update.
            step: number of updates done before this one.
            inplace: whether the storage of `grads` and `slots` may be overwritten.
            metrics: a dict to report numbers in, as floats or 0-d tensors equal on every rank; None if nobody listens.
        """


class Optimizer(Protocol):
    """What turns gradients into new parameters: the last part of a chain, or the whole of it."""

    def init(self, params: Leaves) -> Slots:
        """The state before the first update; see `GradientTransform.init`."""

    def update(
        self,
        grads: Leaves,
        opt_state: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """New parameters (every name of `params`), and the state after this update.

        Args:
            grads: gradients by parameter name; a name may be missing.
            opt_state: what `init` or the last `update` returned. Read-only.
            params: the parameters before the update.
            step: number of updates done before this one; schedules are evaluated at it.
            inplace: whether the storage of `grads`, `opt_state` and `params` may be overwritten.
            metrics: a dict to report numbers in, as floats or 0-d tensors equal on every rank; None if nobody listens.
        """


def call_update(part: Any, grads: Leaves, slots: Slots, params: Leaves, **arguments: Any) -> tuple[Leaves, Slots]:
    """`part.update(...)`; of the arguments `inplace` and `metrics`, those it takes."""
    return call(part.update, grads, slots, params, **arguments)


def call(
    update: Callable[..., tuple[Leaves, Slots]],
    grads: Leaves,
    slots: Slots,
    params: Leaves,
    *,
    step: int,
    inplace: bool = False,
    metrics: dict[str, Any] | None = None,
) -> tuple[Leaves, Slots]:
    """Call an `update`, with `inplace` and `metrics` only if its signature takes them."""
    offered = {"inplace": inplace, "metrics": metrics}
    taken = _optional_arguments(getattr(update, "__func__", update))
    return update(grads, slots, params, step=step, **{name: offered[name] for name in taken})


@functools.lru_cache(maxsize=512)
def _optional_arguments(function: Callable) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(name for name in ("inplace", "metrics") if takes_all or name in parameters)


@dataclass(frozen=True)
class clip_by_global_norm(GradientTransform):  # noqa: N801 - written and printed as a call
    """Scale all gradients down together when their global norm exceeds `max_norm`.

    The factor is `max_norm / max(norm, max_norm)`, so gradients within the limit are left exactly as they are
    (`torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6 instead). Reports `grad_norm`, the norm before clipping. A
    norm that is not finite gives gradients that are not finite, or zero.

    Args:
        max_norm: the limit, positive.
        ord: which norm; `math.inf` for the largest absolute value.

    Raises:
        ValueError: `max_norm` or `ord` is not positive.

    >>> import torch, purestep as ps
    >>> clip = ps.clip_by_global_norm(1.0)
    >>> grads, _ = clip.update({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, {}, {}, step=0)
    >>> [round(grad.item(), 4) for grad in grads.values()]
    [0.6, 0.8]
    """

    max_norm: float
    ord: float = 2.0

    reports: ClassVar[tuple[str, ...]] = ("grad_norm",)

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {self.max_norm!r}")
        _check_ord(self.ord)

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
        norm = global_norm(grads, self.ord)
        if metrics is not None:
            metrics.setdefault("grad_norm", norm)
        scale = self.max_norm / norm.clamp(min=self.max_norm)
        return _scaled(grads, scale, inplace=inplace), slots


def global_norm(grads: Leaves, ord: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector: a plain 0-d tensor, the same on every rank.

    Collective when a leaf is sharded. Elements held by several ranks count once. Computed in fp32, or fp64 for fp64
    leaves; shards are combined in fp64 where the device has it.

    Args:
        grads: gradients by name; tensors (the same on every rank), DTensors, or both. May be empty.
        ord: a positive number; `math.inf` for the largest absolute value.

    Raises:
        ValueError: `ord` is not positive, or a DTensor is a partial sum.

    >>> import torch, purestep as ps
    >>> ps.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0], [12.0]])})
    tensor(13.)
    """
    _check_ord(ord)
    leaves = list(grads.values())
    wide = torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32
    if are_plain(leaves):
        return _norm(leaves, ord).to(wide)
    by_groups: dict[tuple, list[Tensor]] = {}
    for leaf in leaves:
        by_groups.setdefault(shard_groups(leaf), []).append(leaf)
    device = local_tensors(leaves[:1])[0].device
    powers = []
    for groups, members in by_groups.items():
        norm = _norm(local_tensors(members), ord).to(device)
        power = norm if ord == math.inf else norm.pow(ord)
        for group in groups:
            reduce = torch.distributed.ReduceOp.MAX if ord == math.inf else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(power, reduce, group=group)
        powers.append(power)
    stacked = torch.stack(powers)
    return (stacked.amax() if ord == math.inf else stacked.sum().pow(1.0 / ord)).to(wide)


def _norm(tensors: Sequence[Tensor], ord: float) -> Tensor:
    """The norm of the tensors as one vector, 0-d, in fp64 where the device has it."""
    device = tensors[0].device if tensors else torch.device("cpu")
    tensors = [tensor for tensor in tensors if tensor.numel()]  # the maximum of nothing is an error
    wide = torch.float32 if device.type == "mps" else torch.float64
    if not tensors:
        return torch.zeros((), dtype=wide, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    norms = []
    for dtype, same in by_dtype.items():
        low_precision = dtype.is_floating_point and dtype.itemsize < 4
        of_each = torch._foreach_norm(same, ord, dtype=torch.float32 if low_precision else None)
        norms.append(torch.linalg.vector_norm(torch.stack(of_each), ord, dtype=wide))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), ord)


def _scaled(grads: Leaves, scale: Tensor, *, inplace: bool) -> Leaves:
    leaves = list(grads.values())
    if not leaves:
        return grads
    with torch.no_grad():
        if inplace:
            torch._foreach_mul_(local_tensors(leaves), scale)
            return grads
        scaled = torch._foreach_mul(local_tensors(leaves), scale)
    # A 0-d gradient in 16 bits times the factor, 0-d too, would be promoted to the factor's dtype.
    kept = (local.to(leaf.dtype) for leaf, local in zip(leaves, scaled, strict=True))
    return {name: with_local(leaf, local) for (name, leaf), local in zip(grads.items(), kept, strict=True)}


def _check_ord(ord: float) -> None:
    if not ord > 0:
        raise ValueError(f"the order of a norm must be positive (2.0, math.inf, ...), got {ord!r}")

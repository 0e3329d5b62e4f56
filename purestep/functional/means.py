"""`Mean`: a weighted mean in progress."""

from __future__ import annotations

import functools
import numbers
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A weighted mean that is not divided yet, so that means add.

    What a loss returns: the sum over its tokens, and how many there were. The mean over microbatches, batches and ranks
    is then the mean over all their tokens, however they are grouped. A registered pytree.

    Args:
        total: the weighted sum, a 0-d tensor or a number.
        weight: the sum of the weights (e.g. the number of tokens), a 0-d tensor or a number, not negative.

    Raises:
        TypeError: total or weight is neither a tensor nor a real number.
        ValueError: a tensor that is not 0-d (its shape is named), or a negative number as weight.

    >>> import purestep as ps
    >>> left, right = ps.Mean(6.0, 3), ps.Mean(10.0, 1)
    >>> left.value, right.value, (left + right).value
    (2.0, 10.0, 4.0)
    >>> sum([left, right]) == ps.Mean(16.0, 4)
    True
    >>> ps.Mean(0.0, 0).value
    0.0
    """

    total: Tensor | float
    """Weighted sum."""
    weight: Tensor | float = 1.0
    """Sum of the weights."""

    __hash__ = None  # type: ignore[assignment]  # tensors hash by identity and compare by value

    def __post_init__(self) -> None:
        _check_scalar("total", self.total)
        _check_scalar("weight", self.weight)
        if not isinstance(self.weight, Tensor) and not self.weight >= 0:
            raise ValueError(f"Mean.weight must not be negative, got {self.weight!r}")

    @classmethod
    def of(cls, value: Any) -> Mean:
        """`value` itself if it is a Mean; a plain scalar or 0-d tensor counts with weight 1.

        >>> import purestep as ps
        >>> ps.Mean.of(3.0)
        Mean(total=3.0, weight=1.0)
        """
        return value if isinstance(value, Mean) else cls(value, 1.0)

    @property
    def value(self) -> Tensor | float:
        """total / weight, in fp32 or wider; 0 when the weight is 0.

        A tensor if either part is one, without waiting for the device. A total that is not finite stays visible at
        weight 0: the mean is then NaN.
        """
        if not isinstance(self.weight, Tensor):  # known without asking the device
            total = _in_fp32(self.total) if isinstance(self.total, Tensor) else self.total
            return total / self.weight if self.weight else total * 0.0
        total, weight = self._as_tensors()
        empty = weight == 0
        # The divisor is made safe before dividing: NaN in the branch not taken would still reach the gradient.
        return torch.where(empty, total * 0, total / torch.where(empty, 1, weight))

    def __add__(self, other: Any) -> Mean:
        if isinstance(other, Mean):
            return Mean(self.total + other.total, self.weight + other.weight)
        # `sum` starts from 0
        return self if isinstance(other, int) and other == 0 else NotImplemented

    __radd__ = __add__

    def __float__(self) -> float:
        return float(self.value)

    def _as_tensors(self) -> tuple[Tensor, Tensor]:
        """Both parts in one dtype of at least fp32, a number on the device of the other part."""
        parts = (self.total, self.weight)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in tensors), torch.float32)
        total, weight = (
            part.to(dtype) if isinstance(part, Tensor) else torch.full_like(tensors[0], part, dtype=dtype)
            for part in parts
        )
        return total, weight


def _in_fp32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _check_scalar(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise ValueError(
                f"Mean.{name} must be a scalar, got a tensor of shape {tuple(value.shape)}; reduce it first, e.g. "
                "ps.Mean(losses.sum(), losses.numel())"
            )
    elif not isinstance(value, numbers.Real):
        raise TypeError(f"Mean.{name} must be a 0-d tensor or a number, got {type(value).__name__}")


def _unflatten(values: Any, _: None) -> Mean:
    # Unchecked: tree maps may put anything at a leaf.
    mean = object.__new__(Mean)
    for name, value in zip(("total", "weight"), values, strict=True):
        object.__setattr__(mean, name, value)
    return mean


pytree.register_pytree_node(
    Mean,
    lambda mean: ([mean.total, mean.weight], None),
    _unflatten,
    serialized_type_name="purestep.Mean",
    flatten_with_keys_fn=lambda mean: (
        [(pytree.GetAttrKey("total"), mean.total), (pytree.GetAttrKey("weight"), mean.weight)],
        None,
    ),
)

"""Which changes of a dtype a restore may make, and making them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from purestep.state.blocks import Target

_POWERS_OF_TWO = getattr(torch, "float8_e8m0fnu", None)


def refusal(stored: str, asked: torch.dtype) -> str | None:
    """Why values of dtype `stored` (torch's name for it) must not become `asked`; None if they may.

    Rounding of floating-point numbers is the only loss that is let through.

    >>> refusal("float32", torch.bfloat16), refusal("int32", torch.int64), refusal("float32", torch.int64)
    (None, None, 'fractions would be lost')
    """
    source = getattr(torch, stored, None)
    if not isinstance(source, torch.dtype):
        return f"this torch has no {stored}"
    if source == torch.bool:
        return None if asked != _POWERS_OF_TWO else "0 cannot be kept"
    if asked == torch.bool:
        return "a bool keeps no numbers"
    if source.is_complex and not asked.is_complex:
        return "imaginary parts would be lost"
    if source.is_complex or source.is_floating_point:
        if not (asked.is_complex or asked.is_floating_point):
            return "fractions would be lost"
        return None if asked != _POWERS_OF_TWO else "it keeps powers of two only"
    return None if _holds(asked, torch.iinfo(source)) else f"it cannot hold every {stored}"


def cast_into(target: Target, source: Target) -> None:
    """Fill `target` with the values of `source`, the same block of a leaf in another dtype.

    Raises:
        ValueError: a finite value is out of the target's range.
    """
    for ours, theirs in zip(_rows(target.local), _rows(source.local), strict=True):
        ours.copy_(theirs)
        if torch.isfinite(_wide(theirs)).logical_and_(torch.isfinite(_wide(ours)).logical_not_()).any():
            raise ValueError(f"it has values that {ours.dtype} cannot hold: they would become infinite")


def _holds(dtype: torch.dtype, integers: torch.iinfo) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return integers.max < 2 / torch.finfo(dtype).eps and integers.max < torch.finfo(dtype).max
    return torch.iinfo(dtype).min <= integers.min and integers.max <= torch.iinfo(dtype).max


def _rows(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor cut along its first dim into parts of about a million elements, for temporaries that stay small."""
    if tensor.ndim == 0 or tensor.numel() <= 1 << 20:
        return (tensor,)
    return tensor.split(max(1, (1 << 20) // math.prod(tensor.shape[1:])))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor

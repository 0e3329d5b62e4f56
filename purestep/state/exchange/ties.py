"""Tied weights: one leaf in a state, and sometimes two tensors in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from purestep.state.blocks import flat_bytes


def resolve_ties(tensors: Mapping[str, Tensor], ties: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """One tensor a tie, under its first name: what a state holds.

    Args:
        tensors: what a file holds, by name; under all names of a tie, some, or one.
        ties: the names of each tie, the first being the one a state uses.

    Returns:
        `tensors` without the other names.

    Raises:
        ValueError: a tie whose names hold different values; names them. Equal means bit for bit.

    >>> import torch
    >>> file = {"head.weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    >>> sorted(resolve_ties(file, [("embed.weight", "head.weight")]))
    ['bias', 'embed.weight']
    """
    resolved = dict(tensors)
    for first, *others in ties:
        for other in others:
            if other not in resolved:
                continue
            value = resolved.pop(other)
            if not _same(resolved.setdefault(first, value), value):
                raise ValueError(
                    f"{first!r} and {other!r} are one tied weight, but hold different values: "
                    "keep the right one, or use a model that does not tie them"
                )
    return resolved


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat_bytes(a), flat_bytes(b)))

"""`lookahead`: slow weights that follow an optimizer's fast ones."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from purestep.functional.shards import copies_of, local_tensors
from purestep.functional.transforms import Leaves, Slots
from purestep.functional.wrapping import Init, Update, Wrapper


@dataclass(frozen=True)
class lookahead(Wrapper):  # noqa: N801 - written and printed as a call
    """Every few updates, go back part of the way to where the last such update ended (arXiv:1907.08610).

    `slow += alpha * (params - slow); params = slow` after the updates that make `step + 1` a multiple of `every`, for
    parameters that got a gradient in that update. The optimizer's own state goes on. The slow weights are
    `opt_state/lookahead/slow/...`, one more copy of what is trained.

    Args:
        optimizer: any, chains too.
        every: updates between two synchronizations, at least 1.
        alpha: how far the slow weights follow, in (0, 1].

    Raises:
        TypeError: something is no optimizer.
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer, params = ps.lookahead(ps.sgd(1.0), every=2, alpha=0.5), {"w": torch.tensor([8.0])}
    >>> opt_state = optimizer.init(params)
    >>> for step in range(2):
    ...     params, opt_state = optimizer.update({"w": torch.tensor([2.0])}, opt_state, params, step=step)
    >>> params["w"], opt_state["lookahead"]["slow"]["w"]
    (tensor([6.]), tensor([6.]))
    """

    _: KW_ONLY
    every: int = 5
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"lookahead: every must be an integer of at least 1, got {self.every!r}")
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha <= 1:
            raise ValueError(f"lookahead: alpha must be in (0, 1], got {self.alpha!r}")

    def wrapped_init(self, init: Init, params: Leaves) -> Slots:
        """The inner state, and the slow weights: copies of `params`."""
        slow = dict(zip(params, copies_of(leaf.detach() for leaf in params.values()), strict=True))
        return self.with_own(init(params), {"slow": slow})

    def wrapped_update(
        self,
        update: Update,
        grads: Leaves,
        opt_state: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool,
        metrics: dict[str, Any] | None,
    ) -> tuple[Leaves, Slots]:
        """The inner update, and now and then a step back."""
        rest, own = self.own(opt_state)
        new, rest = update(grads, rest, params, step=step, inplace=inplace, metrics=metrics)
        names = [name for name in grads if name in own["slow"]]
        if (step + 1) % self.every or not names:
            return new, self.with_own(rest, own)
        slow, fast = [own["slow"][name] for name in names], [new[name] for name in names]
        if not inplace:
            # What the update made is ours to overwrite; what it returned as it got it is not.
            fast = [copies_of([leaf])[0] if leaf is params[n] else leaf for n, leaf in zip(names, fast, strict=True)]
            slow = copies_of(slow)
        with torch.no_grad():
            torch._foreach_lerp_(local_tensors(slow), local_tensors(fast), self.alpha)
            torch._foreach_copy_(local_tensors(fast), local_tensors(slow))
        kept = {**own["slow"], **dict(zip(names, slow, strict=True))}
        return {**new, **dict(zip(names, fast, strict=True))}, self.with_own(rest, {"slow": kept})

"""Lion: the sign of an interpolated momentum."""
# ruff: noqa: N801 - an optimizer is written and printed as a call: lion(lr=0.0001, ...)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from purestep.functional.elementwise import Elementwise


@dataclass(frozen=True)
class lion(Elementwise):
    """Lion, with decoupled weight decay (arXiv:2302.06675).

    Every element moves by exactly `lr`: `p <- p * (1 - lr * weight_decay) - lr * sign(b1 * m + (1 - b1) * g)`, then
    `m <- b2 * m + (1 - b2) * g`. Learning rates are 3 to 10 times smaller than those of `adamw`, weight decay as much
    larger. torch has no Lion; the operations and their order are those of the paper's code, so that other
    implementations of them give the same bits.

    Slot: exp_avg.

    Args:
        lr: learning rate, a number or a schedule.
        betas: weight of the momentum in the update, and its decay rate, in [0, 1).
        weight_decay: decay rate, relative to the learning rate.
        implementation: auto, foreach or for-loop; all give the same bits.

    Raises:
        ValueError: an argument out of range, or a complex parameter, which has no sign.

    >>> import torch, purestep as ps
    >>> optimizer, params = ps.lion(0.25), {"w": torch.tensor([1.0, 1.0, 1.0])}
    >>> grads = {"w": torch.tensor([1e-4, 0.0, -300.0])}
    >>> optimizer.update(grads, optimizer.init(params), params, step=0)[0]["w"]
    tensor([0.7500, 1.0000, 1.2500])
    """

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))
        self.check("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)")
        self.check_not_negative("weight_decay")

    def _why_not_fused(self, params: Sequence[Tensor]) -> str | None:
        return "does not exist in torch"

    def _kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        slots: dict[str, list[Tensor]],
        lr: Any,
        flags: dict,
        inplace: bool,
    ) -> None:
        if any(map(torch.is_complex, params)):
            raise ValueError("lion: a complex parameter has no sign; use another optimizer for it")
        momenta = slots["exp_avg"]
        if flags["foreach"]:
            self._step(params, grads, momenta, lr)
            return
        for param, grad, momentum in zip(params, grads, momenta, strict=True):
            self._step([param], [grad], [momentum], lr)

    def _step(self, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], lr: float) -> None:
        beta1, beta2 = self.betas
        if self.weight_decay:
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        updates = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(updates, grads, alpha=1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-lr)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, grads, alpha=1 - beta2)

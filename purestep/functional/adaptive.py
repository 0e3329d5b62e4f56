"""Adagrad, RMSprop, NAdam and RAdam as values, on torch.optim's own kernels: bit for bit what torch's classes give.

As in `purestep.functional.optimizers`, whose conventions hold here too: the result is that of the torch.optim class of
the same name, stepped by hand with the same implementation.
"""
# ruff: noqa: N801 - an optimizer is written and printed as a call: rmsprop(lr=0.01, ...)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad as _adagrad_kernel
from torch.optim.nadam import nadam as _nadam_kernel
from torch.optim.radam import radam as _radam_kernel
from torch.optim.rmsprop import rmsprop as _rmsprop_kernel

from purestep.functional.elementwise import Elementwise
from purestep.functional.named import not_negative
from purestep.functional.shards import filled_like
from purestep.functional.transforms import Leaves, Slots


@dataclass(frozen=True)
class Counting(Elementwise):
    """An elementwise optimizer with a count of updates for each parameter, read on the host unless fused."""

    _has_fused: ClassVar[bool] = False
    """Whether torch has a fused kernel for it."""

    def _counts_steps(self) -> bool:
        return True

    def _why_not_fused(self, params: Sequence[Tensor]) -> str | None:
        if not self._has_fused:
            return "does not exist in torch"
        return super()._why_not_fused(params)

    def _kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        slots: dict[str, list[Tensor]],
        lr: Any,
        flags: dict,
        inplace: bool,
    ) -> None:
        scalars = [name for name in slots if name not in self.slot_names or name in self._scalar_names]
        if flags["fused"] or all(_is_on_host(tensor) for name in scalars for tensor in slots[name]):
            self._call(params, grads, slots, lr, flags)
            return
        # torch's kernels read these numbers one by one on the host: fetch each column at once instead.
        on_host = {name: list(torch.stack(slots[name]).cpu().unbind()) for name in scalars}
        self._call(params, grads, {**slots, **on_host}, lr, flags)
        for name, values in on_host.items():
            torch._foreach_copy_(slots[name], list(torch.stack(values).to(params[0].device).unbind()))

    _scalar_names: ClassVar[tuple[str, ...]] = ()
    """Slots besides `step` with one number a parameter."""

    def _call(
        self, params: list[Tensor], grads: list[Tensor], slots: dict[str, list[Tensor]], lr: Any, flags: dict
    ) -> None:
        """Call torch's kernel, which overwrites `params` and `slots`."""
        raise NotImplementedError


@dataclass(frozen=True)
class adagrad(Counting):
    """Adagrad (`torch.optim.Adagrad`; Duchi et al. 2011, JMLR 12).

    Slots: sum, and step, an fp32 scalar for each parameter.

    Args:
        lr: learning rate, a number or a schedule.
        lr_decay: update number k of a parameter uses `lr / (1 + k * lr_decay)`, k counting from 0.
        weight_decay: factor of the parameter that is added to its gradient.
        initial_accumulator_value: where the sum of squares starts.
        eps: added to the denominator.
        implementation: auto, fused, foreach or for-loop.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer, params = ps.adagrad(0.1), {"w": torch.tensor([1.0])}
    >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0])}, optimizer.init(params), params, step=0)
    >>> params["w"], opt_state["adagrad"]["sum"]["w"]
    (tensor([0.9000]), tensor([9.]))
    """

    _: KW_ONLY
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    slot_names: ClassVar[tuple[str, ...]] = ("sum",)
    _has_fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_not_negative("lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def _first_value(self, leaf: Tensor) -> Tensor:
        value = self.initial_accumulator_value
        return filled_like(leaf, complex(value, value) if leaf.is_complex() else value)  # type: ignore[arg-type]

    def _call(
        self, params: list[Tensor], grads: list[Tensor], slots: dict[str, list[Tensor]], lr: Any, flags: dict
    ) -> None:
        _adagrad_kernel(
            params,
            grads,
            slots["sum"],
            slots["step"],
            **flags,
            has_sparse_grad=False,
            has_complex=any(map(torch.is_complex, params)),
            lr=lr,
            weight_decay=self.weight_decay,
            lr_decay=self.lr_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class rmsprop(Counting):
    """RMSprop, with momentum and centering if asked (`torch.optim.RMSprop`).

    Slots: square_avg, momentum_buffer if `momentum`, grad_avg if `centered`, and step, which nothing depends on.

    Args:
        lr: learning rate, a number or a schedule.
        alpha: decay rate of the running averages, in [0, 1].
        eps: added to the denominator.
        weight_decay: factor of the parameter that is added to its gradient.
        momentum: decay rate of the momentum buffer; 0 for none.
        centered: divide by an estimate of the gradient's standard deviation (arXiv:1308.0850).
        implementation: auto, foreach or for-loop.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer, params = ps.rmsprop(0.1, alpha=0.0), {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0])}, optimizer.init(params), params, step=0)[0]["w"]
    tensor([0.9000])
    """

    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", not_negative(self.alpha) and self.alpha <= 1, "a number in [0, 1]")
        self.check_not_negative("eps", "weight_decay", "momentum")

    @property
    def slot_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Slots with one tensor shaped like the parameter."""
        momentum = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *momentum, *(("grad_avg",) if self.centered else ()))

    def _call(
        self, params: list[Tensor], grads: list[Tensor], slots: dict[str, list[Tensor]], lr: Any, flags: dict
    ) -> None:
        _rmsprop_kernel(
            params,
            grads,
            slots["square_avg"],
            slots.get("grad_avg", []),
            slots.get("momentum_buffer", []),
            slots["step"],
            foreach=flags["foreach"],
            has_complex=any(map(torch.is_complex, params)),
            lr=lr,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            centered=self.centered,
        )


@dataclass(frozen=True)
class _AdamVariant(Counting):
    """What NAdam and RAdam have in common."""

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False

    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))
        self.check("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)")
        self.check_not_negative("eps", "weight_decay")

    def _shared(self, params: list[Tensor], lr: Any, flags: dict) -> dict[str, Any]:
        """Arguments of both kernels."""
        return {
            "decoupled_weight_decay": self.decoupled_weight_decay,
            "foreach": flags["foreach"],
            "has_complex": any(map(torch.is_complex, params)),
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "lr": lr,
            "weight_decay": self.weight_decay,
            "eps": self.eps,
        }


@dataclass(frozen=True)
class nadam(_AdamVariant):
    """Adam with Nesterov momentum (`torch.optim.NAdam`; Dozat 2016).

    Slots: exp_avg, exp_avg_sq, and two fp32 scalars for each parameter: mu_product, the product of the momentum factors
    so far, and step.

    Args:
        lr: learning rate, a number or a schedule.
        betas: decay rates of the running averages of the gradient and of its square, in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the parameter that is added to its gradient.
        decoupled_weight_decay: multiply the parameter by `1 - lr * weight_decay` instead, as `adamw` does.
        momentum_decay: how fast the momentum factor grows to its full value.
        implementation: auto, foreach or for-loop.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> ps.nadam(0.1).init({"w": torch.tensor([1.0])})["nadam"]["mu_product"]
    {'w': tensor(1.)}
    """

    _: KW_ONLY
    momentum_decay: float = 4e-3

    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "mu_product")
    _scalar_names: ClassVar[tuple[str, ...]] = ("mu_product",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_not_negative("momentum_decay")

    def init_slots(self, params: Leaves) -> Slots:
        """`init` without the level of the name."""
        moments = {slot: {name: filled_like(leaf, 0.0) for name, leaf in params.items()} for slot in super().slot_names}
        mu_product, step = (
            {name: torch.full((), value, dtype=torch.float32, device=leaf.device) for name, leaf in params.items()}
            for value in (1.0, 0.0)
        )
        return {**moments, "mu_product": mu_product, "step": step}

    def _call(
        self, params: list[Tensor], grads: list[Tensor], slots: dict[str, list[Tensor]], lr: Any, flags: dict
    ) -> None:
        moments = slots["exp_avg"], slots["exp_avg_sq"], slots["mu_product"]
        arguments = self._shared(params, lr, flags)
        _nadam_kernel(params, grads, *moments, slots["step"], momentum_decay=self.momentum_decay, **arguments)


@dataclass(frozen=True)
class radam(_AdamVariant):
    """Adam with a rectified variance (`torch.optim.RAdam`; arXiv:1908.03265).

    Slots: exp_avg, exp_avg_sq, and step, an fp32 scalar for each parameter.

    Args:
        lr: learning rate, a number or a schedule.
        betas: decay rates of the running averages of the gradient and of its square, in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the parameter that is added to its gradient.
        decoupled_weight_decay: multiply the parameter by `1 - lr * weight_decay` instead, as `adamw` does.
        implementation: auto, foreach or for-loop.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer, params = ps.radam(0.1), {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0])}, optimizer.init(params), params, step=0)[0]["w"]
    tensor([0.7000])
    """

    def _call(
        self, params: list[Tensor], grads: list[Tensor], slots: dict[str, list[Tensor]], lr: Any, flags: dict
    ) -> None:
        moments = slots["exp_avg"], slots["exp_avg_sq"]
        _radam_kernel(params, grads, *moments, slots["step"], **self._shared(params, lr, flags))


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu

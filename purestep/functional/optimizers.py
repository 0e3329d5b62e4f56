"""AdamW, Adam and SGD as values, on torch.optim's own kernels.

Each gives, bit for bit, what the torch.optim class of the same name gives when stepped by hand with the same
implementation (on contiguous tensors: the fused kernels round by place in memory, which `Elementwise` therefore fixes).
"""
# ruff: noqa: N801 - an optimizer is written and printed as a call: adamw(lr=0.001, ...)

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam as _adam_kernel
from torch.optim.sgd import sgd as _sgd_kernel

from purestep.functional.elementwise import Elementwise
from purestep.functional.named import not_negative
from purestep.functional.shards import filled_like


@dataclass(frozen=True)
class adam(Elementwise):
    """Adam, with weight decay as an L2 penalty (`torch.optim.Adam`; arXiv:1412.6980).

    Slots: exp_avg, exp_avg_sq, max_exp_avg_sq if `amsgrad`, and step, an fp32 scalar for each parameter: the bias
    correction counts the updates of that parameter, not those of the run.

    Args:
        lr: learning rate, a number or a schedule.
        betas: decay rates of the running averages of the gradient and of its square, in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the parameter that is added to its gradient.
        amsgrad: divide by the largest average of squares so far (arXiv:1904.09237).
        implementation: auto, fused, foreach or for-loop.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer = ps.adam(0.1)
    >>> params = {"w": torch.tensor([1.0])}
    >>> new, opt_state = optimizer.update({"w": torch.tensor([5.0])}, optimizer.init(params), params, step=0)
    >>> new["w"], params["w"]
    (tensor([0.9000]), tensor([1.]))
    """

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    _decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(self.betas))
        self.check("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)")
        self.check("eps", not_negative(self.eps), "a finite number of at least 0")
        self.check("weight_decay", not_negative(self.weight_decay), "a finite number of at least 0")

    @property
    def slot_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Slots with one tensor shaped like the parameter."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def _counts_steps(self) -> bool:
        return True

    def _kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        slots: dict[str, list[Tensor]],
        lr: Any,
        flags: dict,
        inplace: bool,
    ) -> None:
        steps = slots["step"]
        # Off the fused path torch's kernels read each count on the host: fetch them at once, not one by one.
        on_host = steps if flags["fused"] else _on_host(steps)
        _adam_kernel(
            params,
            grads,
            slots["exp_avg"],
            slots["exp_avg_sq"],
            slots.get("max_exp_avg_sq", []),
            on_host,
            **flags,
            has_complex=any(map(torch.is_complex, params)),
            decoupled_weight_decay=self._decoupled,
            amsgrad=self.amsgrad,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )
        if on_host is not steps:
            torch._foreach_add_(steps, 1)


@dataclass(frozen=True)
class adamw(adam):
    """Adam with decoupled weight decay (`torch.optim.AdamW`; arXiv:1711.05101).

    Each update first multiplies the parameter by `1 - lr * weight_decay`. Slots as for `adam`.

    Args:
        lr: learning rate, a number or a schedule.
        betas: decay rates of the running averages of the gradient and of its square, in [0, 1).
        eps: added to the denominator.
        weight_decay: decay rate, relative to the learning rate.
        amsgrad: divide by the largest average of squares so far.
        implementation: auto, fused, foreach or for-loop.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer = ps.adamw(ps.warmup_cosine(0.2, 2, 100), weight_decay=0.5)
    >>> params, metrics = {"w": torch.tensor([1.0])}, {}
    >>> grads = {"w": torch.tensor([5.0])}
    >>> params, opt_state = optimizer.update(grads, optimizer.init(params), params, step=0, metrics=metrics)
    >>> params["w"], metrics["lr"], list(opt_state["adamw"])
    (tensor([0.8500]), 0.1, ['exp_avg', 'exp_avg_sq', 'step'])
    """

    _: KW_ONLY
    weight_decay: float = 0.01

    _decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class sgd(Elementwise):
    """Stochastic gradient descent, with momentum if asked (`torch.optim.SGD`).

    Slots: momentum_buffer if `momentum`; step, as for `adam`, if also `dampening`, which spares the first update of a
    parameter. A fresh buffer is filled with -0.0: adding a gradient to it gives exactly that gradient, as torch's
    first update does, which +0.0 would not (it turns -0.0 into 0.0).

    Args:
        lr: learning rate, a number or a schedule.
        momentum: decay rate of the momentum buffer; 0 for none.
        nesterov: look ahead along the new momentum; needs momentum and no dampening.
        dampening: the gradient enters the momentum with the factor `1 - dampening`.
        weight_decay: factor of the parameter that is added to its gradient.
        implementation: auto, fused, foreach or for-loop. Up to torch 2.13 the fused kernel skips 16-bit parameters on
            the CPU (pytorch#191763): there auto takes foreach, and asking for fused is an error.

    Raises:
        ValueError: an argument out of range.

    >>> import torch, purestep as ps
    >>> optimizer = ps.sgd(0.1, momentum=0.9)
    >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0])}
    >>> opt_state = optimizer.init(params)
    >>> for step in range(2):
    ...     params, opt_state = optimizer.update(grads, opt_state, params, step=step)
    >>> params["w"]
    tensor([0.7100])
    """

    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "weight_decay"):
            self.check(name, not_negative(getattr(self, name)), "a finite number of at least 0")
        self.check("dampening", math.isfinite(self.dampening), "a finite number")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"sgd: nesterov needs momentum and no dampening, got momentum {self.momentum} and "
                f"dampening {self.dampening}"
            )

    @property
    def slot_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Slots with one tensor shaped like the parameter."""
        return ("momentum_buffer",) if self.momentum else ()

    def _why_not_fused(self, params: Sequence[Tensor]) -> str | None:
        if any(param.is_cpu and param.dtype.itemsize < 4 for param in params) and not _fused_sgd_is_sound():
            return f"does not work for 16-bit parameters on the CPU in torch {torch.__version__} (pytorch#191763)"
        return super()._why_not_fused(params)

    def _counts_steps(self) -> bool:
        return self.momentum != 0 and self.dampening != 0

    def _first_value(self, leaf: Tensor) -> Tensor:
        return filled_like(leaf, -0.0)

    def _kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        slots: dict[str, list[Tensor]],
        lr: Any,
        flags: dict,
        inplace: bool,
    ) -> None:
        if flags["foreach"] and self.nesterov and not self.weight_decay and not inplace:
            grads = [grad.clone() for grad in grads]  # torch's foreach kernel adds the momentum into the gradients
        buffers = slots.get("momentum_buffer", [])
        if not self._counts_steps():
            self._call(params, grads, list(buffers), lr, flags)
            return
        steps = slots["step"]
        first = [count == 0 for count in torch.stack(steps).tolist()]
        torch._foreach_add_(steps, 1)
        for fresh in (True, False):
            rows = [i for i, is_first in enumerate(first) if is_first == fresh]
            chosen: list[Tensor | None] = [None if fresh else buffers[i] for i in rows]
            self._call([params[i] for i in rows], [grads[i] for i in rows], chosen, lr, flags)
            if fresh and rows:  # the kernel made new buffers
                torch._foreach_copy_([buffers[i] for i in rows], chosen)  # type: ignore[arg-type]

    def _call(
        self, params: list[Tensor], grads: list[Tensor], buffers: Sequence[Tensor | None], lr: Any, flags: dict
    ) -> None:
        _sgd_kernel(
            params,
            grads,
            buffers if self.momentum else [None] * len(params),  # type: ignore[arg-type]
            **flags,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=False,
        )


def _on_host(steps: list[Tensor]) -> list[Tensor]:
    return steps if steps[0].device.type == "cpu" else list(torch.stack(steps).cpu().unbind())


@functools.cache
def _fused_sgd_is_sound() -> bool:
    """Whether this torch's fused SGD updates bf16 on the CPU at all (pytorch#191763: up to 2.13 it does not)."""
    param = torch.zeros(64, dtype=torch.bfloat16)
    _sgd_kernel(
        [param],
        [torch.ones_like(param)],
        [None],
        fused=True,
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    return bool((param == -1).all())

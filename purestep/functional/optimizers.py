"""AdamW, Adam and SGD as values, on torch.optim's own kernels.

Each gives, bit for bit, what the torch.optim class of the same name gives when stepped by hand with the same
implementation. They are elementwise, so they run on local shards and need no communication.
"""
# ruff: noqa: N801 - an optimizer is written and printed as a call: adamw(lr=0.001, ...)

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam as _adam_kernel
from torch.optim.sgd import sgd as _sgd_kernel

from purestep.functional.schedules import Schedule, value_at
from purestep.functional.shards import copies_of, filled_like, geometry, local_tensors, match
from purestep.functional.transforms import Leaves, Optimizer, Slots

Implementation = Literal["auto", "fused", "foreach", "for-loop"]
"""Which of torch's implementations runs. They differ in the last bits. auto: fused where device and dtype allow it for
every parameter (and work: see `sgd`), else foreach."""

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class _Elementwise(Optimizer):
    """An optimizer that treats every element alike.

    `init` and `update` are the optimizer on its own: its state sits under its name, `{"adamw": {"exp_avg": {...}}}`.
    `init_slots` and `update_slots` are the same without that level; a chain calls these and puts its own name there.
    """

    reports: ClassVar[tuple[str, ...]] = ("lr",)
    slot_names: ClassVar[tuple[str, ...]] = ()
    """Slots with one tensor shaped like the parameter."""

    lr: float | Schedule
    _: KW_ONLY
    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        if not callable(self.lr):
            self._check("lr", 0 <= self.lr < math.inf, "a finite number of at least 0, or a schedule")
        choices = Implementation.__args__  # type: ignore[attr-defined]
        self._check("implementation", self.implementation in choices, f"one of {', '.join(choices)}")

    def init(self, params: Leaves) -> Slots:
        """The state before the first update, under this optimizer's name; see `GradientTransform.init`."""
        slots = self.init_slots(params)
        return {type(self).__name__: slots} if slots else {}

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
        """New parameters and state; see `Optimizer.update`. Reports `lr`.

        Raises:
            ValueError: a gradient without a parameter, or unlike it in shape, dtype, device or placement; a parameter
                without state; an implementation that does not support a parameter.
        """
        name = type(self).__name__
        slots = opt_state.get(name, {})
        params, slots = self.update_slots(grads, slots, params, step=step, inplace=inplace, metrics=metrics)
        return params, {name: slots} if slots else {}

    def init_slots(self, params: Leaves) -> Slots:
        """`init` without the level of the name."""
        slots: dict[str, Any] = {
            slot: {name: self._first_value(leaf) for name, leaf in params.items()} for slot in self.slot_names
        }
        if self._counts_steps():
            slots["step"] = {name: _step_zero(leaf) for name, leaf in params.items()}
        return slots

    def update_slots(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """`update` without the level of the name."""
        lr = value_at(self.lr, step)
        if metrics is not None:
            metrics["lr"] = lr
        names = list(grads)
        if not names:
            return params, slots
        wanted = (*self.slot_names, "step") if self._counts_steps() else self.slot_names
        self._check_leaves(names, grads, slots, params, wanted)
        with torch.no_grad():
            rows = [[params[name] for name in names]] + [[slots[slot][name] for name in names] for slot in wanted]
            if not inplace:
                rows = [copies_of(row) for row in rows]
            locals_ = [local_tensors(row) for row in rows]
            gradients = local_tensors(grads.values())
            self._run(locals_[0], gradients, dict(zip(wanted, locals_[1:], strict=True)), lr, inplace)
        if inplace:
            return params, slots
        new = [dict(zip(names, row, strict=True)) for row in rows]
        return {**params, **new[0]}, {**slots, **{s: {**slots[s], **n} for s, n in zip(wanted, new[1:], strict=True)}}

    def _run(
        self, params: list[Tensor], grads: list[Tensor], slots: dict[str, list[Tensor]], lr: Any, inplace: bool
    ) -> None:
        """Overwrite `params` and `slots`; `grads` too if `inplace`."""
        flags = self._flags(params)
        if isinstance(lr, Tensor):
            lr = _lr_for_kernel(lr, params[0].device, fused=flags["fused"])
        written: list[tuple[Tensor, Tensor]] = []
        if flags["fused"]:
            grads = _contiguous([grads])[0][0]
            shaped = [params, *(slots[name] for name in self.slot_names)]
            (params, *shaped), written = _contiguous(shaped)
            slots = {**slots, **dict(zip(self.slot_names, shaped, strict=True))}
        self._kernel(params, grads, slots, lr, flags, inplace)
        for original, copy in written:
            original.copy_(copy)

    def _kernel(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        slots: dict[str, list[Tensor]],
        lr: Any,
        flags: dict,
        inplace: bool,
    ) -> None:
        raise NotImplementedError

    def _flags(self, params: Sequence[Tensor]) -> dict[str, bool]:
        """torch's arguments `fused` and `foreach`."""
        if self.implementation in ("foreach", "for-loop"):
            return {"fused": False, "foreach": self.implementation == "foreach"}
        problem = self._why_not_fused(params)
        if self.implementation == "fused" and problem:
            raise ValueError(f"{type(self).__name__}: implementation='fused' {problem}; use implementation='auto'")
        return {"fused": problem is None, "foreach": problem is not None}

    def _why_not_fused(self, params: Sequence[Tensor]) -> str | None:
        devices = {param.device for param in params}
        if all(map(torch.is_floating_point, params)) and all(device.type in _FUSED_DEVICES for device in devices):
            return None
        given = sorted({f"{param.dtype} on {param.device.type}" for param in params})
        return f"needs floating-point parameters on {'/'.join(_FUSED_DEVICES)}, got {', '.join(given)}"

    def _counts_steps(self) -> bool:
        return False

    def _first_value(self, leaf: Tensor) -> Tensor:
        return filled_like(leaf, 0.0)

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"{type(self).__name__}: {name} must be {expected}, got {getattr(self, name)!r}")

    def _check_leaves(
        self, names: Sequence[str], grads: Leaves, slots: Slots, params: Leaves, wanted: Sequence[str]
    ) -> None:
        """Raise unless every gradient has a parameter like it, and that parameter its state."""
        if not grads.keys() <= params.keys():
            unknown = [name for name in names if name not in params]
            raise ValueError(f"gradients for unknown parameters {_some(unknown)}; the parameters are {_some(params)}")
        for slot in wanted:
            kept = slots.get(slot, {})
            if not grads.keys() <= kept.keys():
                missing = [name for name in names if name not in kept]
                raise ValueError(
                    f"{type(self).__name__} has no {slot!r} for {_some(missing)}: the state was made without "
                    "these parameters, or for another optimizer; opt_state must come from this optimizer's init, "
                    "given every parameter that gets a gradient"
                )
        theirs, ours = list(grads.values()), [params[name] for name in names]
        if not match(theirs, ours):
            for name, grad, leaf in zip(names, theirs, ours, strict=True):
                if geometry(grad) != geometry(leaf):
                    raise ValueError(
                        f"the gradient of {name!r} must be like its parameter: expected {_described(leaf)}; "
                        f"got {_described(grad)}"
                    )


@dataclass(frozen=True)
class adam(_Elementwise):
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
        self._check("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)")
        self._check("eps", 0 <= self.eps < math.inf, "a finite number of at least 0")
        self._check("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number of at least 0")

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
class sgd(_Elementwise):
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
            self._check(name, 0 <= getattr(self, name) < math.inf, "a finite number of at least 0")
        self._check("dampening", math.isfinite(self.dampening), "a finite number")
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


def _step_zero(leaf: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=leaf.device)


def _lr_for_kernel(lr: Tensor, device: torch.device, *, fused: bool) -> Any:
    if not fused:
        return lr.item()
    return lr if device.type == "cpu" else lr.to(device, torch.float32)  # device kernels read fp32


def _on_host(steps: list[Tensor]) -> list[Tensor]:
    return steps if steps[0].device.type == "cpu" else list(torch.stack(steps).cpu().unbind())


def _contiguous(columns: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Contiguous stand-ins for tensors that are not, and (original, stand-in) pairs to write back afterwards.

    torch's fused CPU kernels pair elements by their place in memory and do not look at strides: a transposed gradient
    would update the wrong elements, without an error. And they round differently in and after their vector loops, so
    only one order in memory gives one result for one value.
    """
    if all(all(map(Tensor.is_contiguous, column)) for column in columns):
        return columns, []
    new = [[tensor.contiguous() for tensor in column] for column in columns]
    pairs = zip(itertools.chain(*columns), itertools.chain(*new), strict=True)
    return new, [(tensor, copy) for tensor, copy in pairs if copy is not tensor]


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


def _described(leaf: Tensor) -> str:
    shape, dtype, device, placements = geometry(leaf)
    where = f", placed as {placements}" if placements is not None else ""
    return f"shape {tuple(shape)}, {dtype} on {device}{where}"


def _some(names: Any, limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more

"""Adafactor as a value, on torch.optim's own kernel."""
# ruff: noqa: N801 - an optimizer is written and printed as a call: adafactor(lr=0.01, ...)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor as _adafactor_kernel

from purestep.functional.named import not_negative
from purestep.functional.schedules import Schedule
from purestep.functional.shards import filled_like
from purestep.functional.transforms import Leaves
from purestep.functional.whole_leaf import WholeLeaf


@dataclass(frozen=True)
class adafactor(WholeLeaf):
    """Adafactor: second moments of a matrix as a row and a column (`torch.optim.Adafactor`; arXiv:1804.04235).

    Bit for bit torch's class stepped by hand. The size of an update depends on the norm of its leaf, so sharded leaves
    are gathered, one at a time; see `purestep.functional.whole_leaf`.

    Slots: row_var and col_var of parameters with two dims or more (the factors are of the last two), variance of the
    others, and step, an fp32 scalar for each parameter. row_var and col_var are small and whole on every rank.

    Args:
        lr: a number or a schedule: the largest relative step size, and the rate of weight decay.
        beta2_decay: exponent, not positive: the second moment's weight of update t is `1 - t ** beta2_decay`.
        eps: two numbers: what the denominator is at least (None for the dtype's epsilon), and the least parameter norm
            (root mean square) that steps are relative to.
        d: updates are scaled down to this root mean square; at least 1.
        weight_decay: decay rate, relative to the learning rate.
        implementation: for-loop (torch's default here) or foreach, which differ in the last bits.

    Raises:
        ValueError: an argument out of range, or a complex parameter.

    >>> import torch, purestep as ps
    >>> slots = ps.adafactor().init({"w": torch.ones(3, 2), "b": torch.ones(3)})["adafactor"]
    >>> {slot: {name: tuple(leaf.shape) for name, leaf in leaves.items()} for slot, leaves in slots.items()}
    {'step': {'w': (), 'b': ()}, 'row_var': {'w': (3, 1)}, 'col_var': {'w': (1, 2)}, 'variance': {'b': (3,)}}
    """

    lr: float | Schedule = 1e-2
    _: KW_ONLY
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    implementation: Literal["for-loop", "foreach"] = "for-loop"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "eps", tuple(self.eps))
        self.check("beta2_decay", not_negative(-self.beta2_decay), "a finite number of at most 0")
        ok = len(self.eps) == 2 and (self.eps[0] is None or not_negative(self.eps[0])) and not_negative(self.eps[1])
        self.check("eps", ok, "two finite numbers of at least 0 (the first may be None)")
        self.check("d", not_negative(self.d) and self.d >= 1, "a finite number of at least 1")
        self.check_not_negative("weight_decay")
        choices = ("for-loop", "foreach")
        self.check("implementation", self.implementation in choices, f"one of {', '.join(choices)}")

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which implementation runs; see `purestep.functional.implementations`."""
        return {"": self.implementation}

    def slots_of(self, leaf: Tensor) -> Sequence[str]:
        """The names of `first_slots(leaf)`."""
        return ("step", "row_var", "col_var") if leaf.ndim > 1 else ("step", "variance")

    def first_slots(self, leaf: Tensor) -> Mapping[str, Tensor]:
        """The slots of one parameter before its first update."""
        if leaf.is_complex():
            raise ValueError("adafactor does not support complex parameters; use another optimizer for them")
        step = torch.zeros((), dtype=torch.float32, device=leaf.device)
        if leaf.ndim <= 1:
            return {"step": step, "variance": filled_like(leaf, 0.0)}
        *others, rows, columns = leaf.shape
        row_var = torch.zeros((*others, rows, 1), dtype=leaf.dtype, device=leaf.device)
        return {"step": step, "row_var": row_var, "col_var": row_var.new_zeros((*others, 1, columns))}

    def kernel(self, params: list[Tensor], grads: list[Tensor], slots: list[dict[str, Tensor]], lr: float) -> None:
        """Call torch's kernel on whole leaves of one dtype; it reads the counts of updates on the host."""
        steps = [kept["step"] for kept in slots]
        on_host = steps if steps[0].is_cpu else list(torch.stack(steps).cpu().unbind())
        row_vars, col_vars, variances = (
            [kept.get(name) for kept in slots] for name in ("row_var", "col_var", "variance")
        )
        _adafactor_kernel(
            params,
            grads,
            row_vars,
            col_vars,
            variances,
            on_host,
            foreach=self.implementation == "foreach",
            d=self.d,
            lr=lr,
            beta2_decay=self.beta2_decay,
            weight_decay=self.weight_decay,
            eps1=self.eps[0],  # type: ignore[arg-type]  # torch's own class passes None here
            eps2=self.eps[1],
            maximize=False,
        )
        if on_host is not steps:
            torch._foreach_add_(steps, 1)

"""What optimizers that treat every element alike have in common: copies, local shards, choice of implementation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from purestep.functional.named import NamedOptimizer
from purestep.functional.schedules import value_at
from purestep.functional.shards import copies_of, filled_like, local_tensors
from purestep.functional.transforms import Leaves, Slots

Implementation = Literal["auto", "fused", "foreach", "for-loop"]
"""Which of torch's implementations runs. They differ in the last bits. auto: fused where device and dtype allow it for
every parameter (and it works: see `sgd`), else foreach."""

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class Elementwise(NamedOptimizer):
    """An optimizer that treats every element alike, and so works on local shards."""

    slot_names: ClassVar[tuple[str, ...]] = ()
    """Slots with one tensor shaped like the parameter."""

    _: KW_ONLY
    implementation: Implementation = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = get_args(Implementation)
        self.check("implementation", self.implementation in choices, f"one of {', '.join(choices)}")

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which implementation runs for these parameters; see `purestep.functional.implementations`."""
        flags = self._flags(local_tensors(params.values()))
        return {"": next((name for name, chosen in flags.items() if chosen), "for-loop")}

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
        self.check_gradients(grads, params)
        for slot in wanted:
            if not grads.keys() <= slots.get(slot, {}).keys():
                self.check_slot(slot, slots, names)
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
        """`_kernel`, given what it can digest."""
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
        """Call torch's kernel on plain tensors: overwrite `params` and `slots`; `grads` too if `inplace`."""
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
        """What keeps the fused kernel from these parameters; None if nothing does."""
        devices = {param.device for param in params}
        if all(map(torch.is_floating_point, params)) and all(device.type in _FUSED_DEVICES for device in devices):
            return None
        given = sorted({f"{param.dtype} on {param.device.type}" for param in params})
        return f"needs floating-point parameters on {'/'.join(_FUSED_DEVICES)}, got {', '.join(given)}"

    def _counts_steps(self) -> bool:
        """Whether there is a slot `step`: an fp32 scalar a parameter, the number of its updates."""
        return False

    def _first_value(self, leaf: Tensor) -> Tensor:
        """What a slot holds before the first update."""
        return filled_like(leaf, 0.0)


def _step_zero(leaf: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=leaf.device)


def _lr_for_kernel(lr: Tensor, device: torch.device, *, fused: bool) -> Any:
    if not fused:
        return lr.item()
    return lr if device.type == "cpu" else lr.to(device, torch.float32)  # device kernels read fp32


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

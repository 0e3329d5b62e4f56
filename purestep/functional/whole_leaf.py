"""What optimizers that look at a whole leaf at a time have in common: gathering it, and keeping this rank's shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purestep.functional.named import NamedOptimizer
from purestep.functional.schedules import value_at
from purestep.functional.shards import copies_of
from purestep.functional.transforms import Leaves, Slots
from purestep.state.placement import copy_block, is_dtensor, local_tensor


@dataclass(frozen=True)
class WholeLeaf(NamedOptimizer):
    """An optimizer whose update of a leaf depends on that leaf as a whole: its rows, its norms, its singular vectors.

    Sharded leaves are gathered one after the other: parameter, gradient, and slots shaped like the parameter. Every
    rank computes the same update of the whole leaf and keeps its shard, so sharded results are the local ones, bit for
    bit, and at most one whole leaf is in memory at a time.
    """

    def first_slots(self, leaf: Tensor) -> Mapping[str, Tensor]:
        """The slots of one parameter before its first update, those shaped like it placed like it."""
        raise NotImplementedError

    def slots_of(self, leaf: Tensor) -> Sequence[str]:
        """The names of `first_slots(leaf)`."""
        raise NotImplementedError

    def kernel(self, params: list[Tensor], grads: list[Tensor], slots: list[dict[str, Tensor]], lr: float) -> None:
        """Overwrite whole `params` of one dtype and their slots; leave the gradients as they are."""
        raise NotImplementedError

    def init_slots(self, params: Leaves) -> Slots:
        """`init` without the level of the name."""
        slots: dict[str, dict[str, Tensor]] = {}
        for name, leaf in params.items():
            for slot, value in self.first_slots(leaf).items():
                slots.setdefault(slot, {})[name] = value
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
        self.check_gradients(grads, params)
        wanted = {name: self.slots_of(params[name]) for name in grads}
        for slot in dict.fromkeys(slot for names in wanted.values() for slot in names):
            self.check_slot(slot, slots, [name for name, names in wanted.items() if slot in names])
        number = lr.item() if isinstance(lr, Tensor) else lr
        new_params, new_slots = dict(params), {slot: dict(kept) for slot, kept in slots.items()}
        with torch.no_grad():
            for names in _rounds(params, list(grads)):
                own = copies_of if not inplace else list
                leaves = own([params[name] for name in names])
                kept = [
                    dict(zip(wanted[name], own([slots[slot][name] for slot in wanted[name]]), strict=True))
                    for name in names
                ]
                self._on_whole(leaves, [grads[name] for name in names], kept, number)
                new_params.update(zip(names, leaves, strict=True))
                for name, made in zip(names, kept, strict=True):
                    for slot, value in made.items():
                        new_slots[slot][name] = value
        return (params, slots) if inplace else (new_params, new_slots)

    def _on_whole(self, leaves: list[Tensor], grads: list[Tensor], slots: list[dict[str, Tensor]], lr: float) -> None:
        whole_slots = [{name: whole(value) for name, value in kept.items()} for kept in slots]
        wholes = [whole(leaf) for leaf in leaves]
        self.kernel(wholes, [whole(grad) for grad in grads], whole_slots, lr)
        for leaf, value in zip(leaves, wholes, strict=True):
            keep(leaf, value)
        for kept, values in zip(slots, whole_slots, strict=True):
            for name, leaf in kept.items():
                keep(leaf, values[name])


def whole(leaf: Tensor) -> Tensor:
    """The global tensor, contiguous. Collective for a sharded leaf; `leaf` itself (or its memory) otherwise."""
    return (leaf.full_tensor() if is_dtensor(leaf) else leaf.detach()).contiguous()  # type: ignore[attr-defined]


def keep(leaf: Tensor, value: Tensor) -> None:
    """Write this rank's block of `value`, the global tensor, into `leaf`, unless it is there already."""
    local = local_tensor(leaf)
    if local.data_ptr() != value.data_ptr() or local.shape != value.shape:
        copy_block(leaf.detach() if not is_dtensor(leaf) else leaf, value)


def _rounds(params: Leaves, names: Sequence[str]) -> Iterator[list[str]]:
    """Leaves to update together: sharded ones alone, others with those of their dtype; never those without elements."""
    together: dict[torch.dtype, list[str]] = {}
    for name in names:
        if is_dtensor(params[name]) and params[name].numel():
            yield [name]
        elif params[name].numel():
            together.setdefault(params[name].dtype, []).append(name)
    yield from together.values()

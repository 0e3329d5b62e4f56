"""What a torch.optim.Optimizer class keeps for a parameter, found out by stepping it twice on a stand-in.

torch's classes create their state in their first step, and nothing says beforehand what it will be. But a state must
have its leaves from the start, meta ones too, or no checkpoint could be asked for them by name.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from purestep.state.keys import Key

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""How Python numbers are stored."""
TORCHS_OWN = frozenset({"state", "param_groups", "_need_device_dtype_check_for_fused", "_opt_called"})
"""Attributes of an optimizer that are its state or torch's bookkeeping."""
_TORCHS_OPTIONS = ("params", "lr", "initial_lr")


@dataclass(frozen=True)
class Kept:
    """One value that an optimizer keeps."""

    name: str
    """Its key in the optimizer's state; in lists and dicts within, the path: `GG.0`."""
    kind: type
    """Tensor, or the type of a number, which a state holds as a 0-d tensor."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """What an optimizer keeps for one parameter: a tree whose leaves are described, and constants in between."""

    kept: tuple[Kept | None, ...]
    """For each leaf of the tree: what it is, or None for a None."""
    structure: pytree.TreeSpec
    """The tree, as torch's pytrees describe it."""

    @functools.cached_property
    def leaves(self) -> tuple[Kept, ...]:
        """The leaves that are values."""
        return tuple(kept for kept in self.kept if kept is not None)

    @functools.cached_property
    def _flat_keys(self) -> tuple[str, ...] | None:
        """The keys, where the tree is a plain dict of values: almost always, and pytrees are slow."""
        names = tuple(kept.name for kept in self.leaves)
        flat = len(names) == len(self.kept) and pytree.tree_structure(dict.fromkeys(names, 0)) == self.structure
        return names if flat else None

    def flatten(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Values by name; None if `state` is another tree, or of other types. (Shapes depend on the shard.)"""
        if self._flat_keys is not None:
            if tuple(state) != self._flat_keys:
                return None
            return dict(state) if all(map(_fits, self.leaves, state.values())) else None
        leaves, structure = pytree.tree_flatten(dict(state))
        if structure != self.structure or not all(map(_fits, self.kept, leaves)):
            return None
        return {kept.name: value for kept, value in zip(self.kept, leaves, strict=True) if kept is not None}

    def unflatten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's own state for a parameter."""
        if self._flat_keys is not None:
            return {key: values[key] for key in self._flat_keys}
        return pytree.tree_unflatten([kept and values[kept.name] for kept in self.kept], self.structure)


@dataclass(frozen=True)
class Probe:
    """What stepping a stand-in has shown."""

    layout: Layout
    """What is kept for the parameter."""
    group: Mapping[str, Any]
    """Values in its param_group that steps change, as they are before the first: counters, for instance."""


def probe(
    build: Callable[[list[Tensor]], torch.optim.Optimizer], leaf: Tensor, what: str, arguments: Iterable[str]
) -> Probe:
    """Step an optimizer twice on a stand-in for `leaf`.

    Args:
        build: makes the optimizer, with one group, of a list of parameters.
        leaf: its shape, dtype and device are those of the stand-in. Meta tensors are tried first, which cost nothing;
            then real ones on the leaf's own device, on the CPU, on an accelerator.
        what: what it is called in messages.
        arguments: of the class. Other numbers in its param_groups are its own, and kept even if no step changes them
            here: some do so later.

    Raises:
        TypeError: the class cannot be lifted; says why.
    """
    failures: list[tuple[str, Exception]] = []
    for device in _devices(leaf):
        try:
            with Key(b"\0" * 16).scope("cpu" if device == "meta" else device):
                return _probe(build, leaf, torch.device(device), what, {*arguments, *_TORCHS_OPTIONS})
        except TypeError as error:
            if getattr(error, "_purestep_final", False):
                raise
            failures.append((device, error))
        except Exception as error:
            failures.append((device, error))
    said = "; ".join(f"on {device}: {type(error).__name__}: {error}" for device, error in failures)
    raise TypeError(
        f"{what} cannot be lifted: stepping it on a parameter of shape {tuple(leaf.shape)} and {leaf.dtype} with a "
        f"gradient like it failed ({said})"
    ) from failures[-1][1]


def _devices(leaf: Tensor) -> Iterable[str]:
    own = leaf.device.type
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return dict.fromkeys(("meta", own, "cpu", *([accelerator.type] if accelerator else [])))


def _probe(build: Callable, leaf: Tensor, device: torch.device, what: str, options: set[str]) -> Probe:
    param = nn.Parameter(_ramp(leaf, device))
    optimizer = build([param])
    _refuse(any(isinstance(v, torch.optim.Optimizer) for v in vars(optimizer).values()), what, "it holds another one")
    before, (group,) = snapshot(vars(optimizer), skip=TORCHS_OWN), optimizer.param_groups
    group_before = snapshot(group, skip={"params"})
    layouts = []
    for _ in range(2):
        param.grad = _ramp(leaf, device)
        optimizer.step()
        layouts.append(_layout(optimizer.state.get(param, {}), what))
    others = [key for key in optimizer.state if key is not param]
    _refuse(bool(others), what, f"it keeps {others!r:.200} besides what it keeps for each parameter")
    moved = changed(before, vars(optimizer), skip=TORCHS_OWN)
    _refuse(bool(moved), what, f"its attributes {', '.join(moved)} change in a step, which are in no state_dict")
    _refuse(layouts[0] != layouts[1], what, f"what it keeps changes: {_told(layouts[0])}, then {_told(layouts[1])}")
    moving = changed(group_before, group, skip={"params"})
    moving += [key for key, value in group.items() if key not in {*options, *moving} and type(value) in (int, float)]
    return Probe(layouts[1], {key: _first(key, group_before.get(key), group.get(key), what) for key in moving})


def _first(key: str, before: Any, after: Any, what: str) -> Any:
    """What a group's value is before the first step, in the type it has afterwards."""
    if type(before) in NUMBERS and type(after) in NUMBERS:
        return type(after)(before)
    _refuse(
        not (isinstance(before, Tensor) and isinstance(after, Tensor)),
        what,
        f"steps change {key!r} in its param_groups from {before!r:.80} to {after!r:.80}, and only numbers and tensors "
        "can be kept",
    )
    return before


def _layout(state: Any, what: str) -> Layout:
    leaves, structure = pytree.tree_flatten_with_path(dict(state))
    kept: list[Kept | None] = []
    for path, value in leaves:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if value is None:
            kept.append(None)
        elif isinstance(value, Tensor):
            kept.append(Kept(name, Tensor, tuple(value.shape), value.dtype))
        else:
            _refuse(
                type(value) not in NUMBERS,
                what,
                f"it keeps {name!r} for each parameter, a {type(value).__name__}, and only tensors and numbers can be "
                "kept in a state",
            )
            kept.append(Kept(name, type(value), (), NUMBERS[type(value)]))
    return Layout(tuple(kept), structure)


def _fits(kept: Kept | None, value: Any) -> bool:
    if kept is None:
        return value is None
    return isinstance(value, Tensor) if kept.kind is Tensor else type(value) is kept.kind


def _told(layout: Layout) -> str:
    return ", ".join(f"{kept.name} {kept.dtype} {kept.shape}" for kept in layout.leaves) or "nothing"


def _ramp(leaf: Tensor, device: torch.device) -> Tensor:
    """Values that differ, so that no norm is zero and no matrix quite singular."""
    if device.type == "meta":
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    values = torch.linspace(0.5, 1.5, max(leaf.numel(), 1), device=device).square()[: leaf.numel()]
    return values.reshape(leaf.shape).to(leaf.dtype)


def snapshot(values: Mapping[str, Any], skip: Iterable[str]) -> dict[str, Any]:
    """What these values are now; for `changed`.

    Raises:
        RuntimeError: one is a meta tensor, of which nobody can say whether it changes.
    """
    if any(isinstance(value, Tensor) and value.is_meta for name, value in values.items() if name not in skip):
        raise RuntimeError("it keeps meta tensors besides what it keeps for each parameter")
    plain = (bool, int, float, str, Tensor, list, tuple, dict, type(None))
    return {
        name: copy.deepcopy(value) if isinstance(value, plain) and not callable(value) else value
        for name, value in values.items()
        if name not in skip
    }


def changed(before: Mapping[str, Any], after: Mapping[str, Any], skip: Iterable[str]) -> list[str]:
    """Names of values that appeared, vanished or became others since the `snapshot` before."""
    names = dict.fromkeys((*before, *after))
    return [
        name
        for name in names
        if name not in skip and (name not in before or name not in after or not _same(before[name], after[name]))
    ]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return not b.is_meta and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or bool(a == b) or (a != a and b != b)


def _refuse(problem: bool, what: str, why: str) -> None:
    if problem:
        error = TypeError(f"{what} cannot be lifted: {why}")
        error._purestep_final = True  # type: ignore[attr-defined]
        raise error

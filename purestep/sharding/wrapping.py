"""Activation checkpointing and compilation of units, in every topology, without wrapper modules.

A module's `forward` is replaced on the instance: parameter names stay, a state is bound as before, and FSDP2's hooks
run around it, so that a recomputation finds its unit gathered.
"""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from purestep.sharding.config import ConfigError
from purestep.sharding.rules import ActivationCheckpointing, pattern

if TYPE_CHECKING:
    from purestep.sharding.plan import Plan

SAVED_OPS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_dot_product*",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "flex_attention",
    "_c10d_functional.*",
)
"""What selective checkpointing keeps unless told otherwise: matmuls, attention, collectives."""


def wrap_units(model: nn.Module, plan: Plan, *, compile_mode: str = "default") -> None:
    """Give the units of `plan` the checkpointing and compilation that their settings ask for. In place, before an
    engine takes the model.

    Args:
        model: not yet sharded.
        plan: of this model.
        compile_mode: `torch.compile(mode=...)`.

    Raises:
        ConfigError: a glob for submodules or operators matches nothing.
    """
    modules = dict(model.named_modules())
    matched: dict[ActivationCheckpointing, bool] = {}
    for unit in plan.units:
        asked = unit.settings.activation_checkpointing
        if asked.mode == "none":
            continue
        targets = _targets(modules[unit.path], asked)
        matched[asked] = matched.get(asked, False) or bool(targets)
        for target in targets:
            # Where FSDP2 owns the parameters, they are in place again before backward asks for a recomputation.
            _checkpoint(target, asked, holds_params=not plan.topology.is_sharded)
    for asked, found in matched.items():
        if not found:
            raise ConfigError(
                f"activation checkpointing of modules {', '.join(map(repr, asked.modules))}: no unit has such "
                "submodules; globs are relative to the unit, such as 'attention' or '*.mlp'"
            )
    for unit in plan.units:
        if unit.settings.compile:
            module = modules[unit.path]
            # Not module.compile(): that would trace through FSDP2's hooks, which belong around the graph.
            module.__dict__["forward"] = _compiled(module.forward, compile_mode)


def _compiled(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's own, on its first import
        return torch.compile(forward, mode=mode)


def _targets(unit: nn.Module, asked: ActivationCheckpointing) -> list[nn.Module]:
    """The modules of a unit to recompute; none inside another."""
    if not asked.modules:
        return [unit]
    chosen: list[str] = []
    for path, _ in unit.named_modules():
        inside = any(path.startswith(outer + ".") for outer in chosen)
        if path and not inside and any(pattern(glob).fullmatch(path) for glob in asked.modules):
            chosen.append(path)
    return [unit.get_submodule(path) for path in chosen]


def _checkpoint(module: nn.Module, asked: ActivationCheckpointing, *, holds_params: bool) -> None:
    forward = module.forward
    contexts: Callable[[], Any] = noop_context_fn
    if asked.mode == "selective":
        policy = _saving(_operators(asked.save_ops or SAVED_OPS, strict=bool(asked.save_ops)))
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # parameters and buffers are inputs of the graph there
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        call = _Call(module, forward, holds_params=holds_params)
        # As positional arguments, so that the RNG state of every device they are on is kept.
        return checkpoint(call, args, kwargs, use_reentrant=False, context_fn=contexts)

    module.__dict__["forward"] = checkpointed


class _Call:
    """One call of a module that may run again: later runs see what the first one saw, and leave no trace.

    Otherwise BatchNorm would count a batch twice, and a backward after the end of a session would recompute with
    another state, or in another mode.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], *, holds_params: bool):
        self._forward = forward
        self._modes = [(m, m.training) for m in module.modules()]
        self._params = [
            (m._parameters, attr, tensor)
            for m, _ in self._modes
            if holds_params
            for attr, tensor in m._parameters.items()
        ]
        self._buffers = [
            (m._buffers, attr, None if tensor is None else tensor.clone())
            for m, _ in self._modes
            for attr, tensor in m._buffers.items()
            if attr not in m._non_persistent_buffers_set  # those do not change
        ]
        self._again = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._again:
            self._again = True
            return self._forward(*args, **kwargs)
        with self._as_before():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with _disable_current_modes():  # selective checkpointing counts operations; the first run had none of these
            copies = [(table, attr, None if x is None else x.clone()) for table, attr, x in self._buffers]
        held: list[tuple[Any, str, Tensor | None]] = [*self._params, *copies]
        old = [table[attr] for table, attr, _ in held]
        modes = [m.training for m, _ in self._modes]
        try:
            for table, attr, tensor in held:
                table[attr] = tensor
            for module, mode in self._modes:
                module.__dict__["training"] = mode
            yield
        finally:
            for (table, attr, _), tensor in zip(held, old, strict=True):
                table[attr] = tensor
            for (module, _), mode in zip(self._modes, modes, strict=True):
                module.__dict__["training"] = mode


def _operators(globs: tuple[str, ...], *, strict: bool) -> re.Pattern[str]:
    """What the globs for operators take, as one pattern over names with overload, `aten.mm.default`.

    Raises:
        ConfigError: `strict`, and a glob takes no operator of this torch.
    """
    for glob in globs if strict else ():
        known = _known_operators()
        if not any(fnmatchcase(name, glob) for name in known):
            near = difflib.get_close_matches(glob, known, n=3)
            raise ConfigError(
                f"activation checkpointing keeps outputs of {glob!r}, but torch has no such operator"
                + (f"; near: {', '.join(near)}" if near else "; names are such as 'aten.mm' or 'aten._scaled_dot*'")
            )
    parts = [f"{_translate(glob)}(\\.[^.]+)?" for glob in globs]
    return re.compile("|".join(parts))


def _translate(glob: str) -> str:
    table = {"*": ".*", "?": "."}
    return "".join(table.get(part, re.escape(part)) for part in re.split(r"(\*|\?)", glob))


@functools.cache
def _known_operators() -> tuple[str, ...]:
    """Names of all operators, with and without overload."""
    names: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.replace("::", ".").partition(".")[2].partition(".")
        namespace = name.partition("::")[0]
        names.update((f"{namespace}.{packet}", f"{namespace}.{packet}.{overload or 'default'}"))
    return tuple(sorted(names))


def _saving(wanted: re.Pattern[str]) -> Callable[..., CheckpointPolicy]:
    matches: dict[Any, bool] = {}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in matches:
            matches[op] = wanted.fullmatch(str(op)) is not None
        keep = matches[op] and not _draws_random(op, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _draws_random(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator advances the random numbers: were it not run again, later ones would see other numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":  # attention, which is tagged even where it drops nothing
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return True

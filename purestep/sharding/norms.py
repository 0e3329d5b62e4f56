"""Normalization in fp32 inside units that are gathered in 16 bits.

Autocast leaves the weights of normalization layers alone, so in a module with fp32 parameters they enter the kernel as
fp32. A unit gathered in 16 bits has 16-bit ones, which kernels refuse together with fp32 inputs or statistics, or
compute with in 16 bits. Here they are cast back for the call: rounded on the way, but used as everywhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from purestep.sharding.plan import Plan


def compute_in_fp32(model: nn.Module, plan: Plan) -> None:
    """Have the normalization layers of 16-bit units compute with fp32 parameters. In place, before units are sharded.

    Args:
        model: of the plan, not yet sharded.
        plan: says which units are gathered in which dtype.
    """
    in_16_bits = {unit.path: unit.settings.param_dtype != "fp32" for unit in plan.units}
    for path, module in model.named_modules():
        if _is_norm(module) and in_16_bits.get(_unit_of(path, in_16_bits), False):
            _wrap(module)


def _unit_of(path: str, units: dict[str, bool]) -> str:
    """The innermost unit around a module."""
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path


def _is_norm(module: nn.Module) -> bool:
    """Whether this is a normalization layer, of torch or of anybody (LlamaRMSNorm, T5LayerNorm, ...)."""
    return "norm" in type(module).__name__.lower() and any(p is not None for p in module._parameters.values())


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        with _cast_up(module):
            return forward(*args, **kwargs)

    module.__dict__["forward"] = in_fp32


@contextmanager
def _cast_up(module: nn.Module) -> Iterator[None]:
    gathered = dict(module._parameters)
    try:
        for name, parameter in gathered.items():
            if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16):
                module._parameters[name] = parameter.float()  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(gathered)

"""The dynamic loss scale of fp16: two leaves of the state, and how they change from step to step.

fp16 ends at 6e-8 below and at 65504 above. Gradients are computed of `scale * loss` to keep them between the two, and
divided by the scale in fp32 afterwards. A step whose gradients are not finite is not taken, and the scale backs off;
after many steps in a row that were, it grows. Everything is in `state.extra["loss_scale"]`, so a resumed run scales as
the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from purestep.sharding.config import LossScaleConfig
from purestep.sharding.finiteness import nonfinite_here
from purestep.sharding.runtime import Runtime

NAME = "loss_scale"
"""Where in `state.extra` it is."""


def initial_loss_scale(config: LossScaleConfig | None = None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The loss scale before the first step: `ps.init` puts it into `state.extra["loss_scale"]` when computing in fp16.

    Args:
        config: default `LossScaleConfig()`.
        device: where to put it; "meta" for an abstract state.

    Returns:
        `scale`, fp32, and `good_steps`, int64: the steps taken since the scale last changed. Both 0-d.

    >>> import purestep as ps
    >>> ps.initial_loss_scale(ps.LossScaleConfig(init=1024.0))
    {'scale': tensor(1024.), 'good_steps': tensor(0)}
    """
    config = config or LossScaleConfig()
    return {
        "scale": torch.full((), config.init, dtype=torch.float32, device=device),
        "good_steps": torch.zeros((), dtype=torch.int64, device=device),
    }


def next_loss_scale(
    loss_scale: Mapping[str, Tensor], *, is_finite: bool, config: LossScaleConfig | None = None
) -> dict[str, Tensor]:
    """The loss scale after a step, as a pure function.

    Args:
        loss_scale: before it.
        is_finite: whether all gradients were, on every rank: `Gradients.is_finite`.
        config: default `LossScaleConfig()`.

    Returns:
        Smaller by `backoff_factor`, but not below `min`, after gradients that were not finite; larger by
        `growth_factor` after `growth_interval` steps in a row with finite ones.

    >>> import purestep as ps
    >>> ps.next_loss_scale(ps.initial_loss_scale(), is_finite=False)
    {'scale': tensor(32768.), 'good_steps': tensor(0)}
    >>> ps.next_loss_scale(ps.initial_loss_scale(), is_finite=True)
    {'scale': tensor(65536.), 'good_steps': tensor(1)}
    """
    config = config or LossScaleConfig()
    scale, good_steps = loss_scale["scale"], loss_scale["good_steps"]
    if not is_finite:
        return {
            "scale": (scale * config.backoff_factor).clamp(min=config.min),
            "good_steps": torch.zeros_like(good_steps),
        }
    # On the device, so that nobody waits for a number that only the next step needs.
    good_steps = good_steps + 1
    grows = good_steps >= config.growth_interval
    larger = scale * config.growth_factor
    larger = torch.where(larger.isfinite(), larger, scale)  # gradients that are all zero never overflow
    return {"scale": torch.where(grows, larger, scale), "good_steps": torch.where(grows, 0, good_steps)}


def initial_extra(runtime: Runtime, device: torch.device | str | None = None) -> dict[str, Any]:
    """What the precision of a runtime keeps in `state.extra`: the loss scale for fp16, else nothing.

    Args:
        runtime: where the run lives.
        device: default the runtime's; "meta" for an abstract state.
    """
    if runtime.config.mixed_precision != "fp16":
        return {}
    return {NAME: initial_loss_scale(runtime.config.loss_scale, runtime.device if device is None else device)}


def seed_of_backward(runtime: Runtime, scale: Tensor | float, weight: Tensor | float, microbatches: int) -> Tensor:
    """What to multiply a microbatch's total with, so that fp16 has `scale` times the gradient of a mean to hold.

    A sum over tokens would overflow by their number. It is divided by about that number: by a power of two, which
    rounds nothing, estimated from the first microbatch. Collective.

    Args:
        runtime: where the run lives.
        scale: the loss scale.
        weight: of the first microbatch on this rank.
        microbatches: how many there will be.

    Returns:
        A 0-d fp32 tensor, the same on every rank.
    """
    # frexp is not everywhere.
    device = runtime.device if runtime.device.type in ("cpu", "cuda", "xpu") else torch.device("cpu")
    total = torch.as_tensor(weight, dtype=torch.float32, device=runtime.device).detach().clone()
    expected = runtime.all_reduce(total).to(device) * (microbatches / runtime.dp_size)
    exponent = torch.frexp(expected).exponent  # 0 of 0
    seed = torch.ldexp(torch.as_tensor(scale, dtype=torch.float32, device=device), -exponent)
    return seed.to(runtime.device)


def all_finite(runtime: Runtime, grads: Iterable[Tensor]) -> bool:
    """Whether every element of every gradient is finite, on every rank. Collective; waits for the device."""
    return runtime.all_reduce(nonfinite_here(grads, runtime.device), "max").item() == 0

"""Schedule-free optimizers, through the package `schedulefree`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from purestep.functional.lifted import Lifted, from_torch
from purestep.functional.schedules import Schedule

_CLASSES = {"adamw": "AdamWScheduleFree", "radam": "RAdamScheduleFree", "sgd": "SGDScheduleFree"}


def schedule_free(
    base: Literal["adamw", "radam", "sgd"] = "adamw",
    *,
    lr: float | Schedule | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    **hparams: Any,
) -> Lifted:
    """An optimizer that needs no learning-rate schedule (arXiv:2405.15682), bit for bit as its authors' package.

    What is trained (`state.params`) is not what is evaluated: `ps.eval_params(state, optimizer)` gives the averaged
    parameters. Works on local shards. See `from_torch` for the slots.

    Args:
        base: which class: AdamWScheduleFree, RAdamScheduleFree or SGDScheduleFree.
        lr: a number or a schedule; None for the class's default. It should be constant: `warmup_steps=` warms up.
        groups: options of their own for some parameters, as in `from_torch`.
        hparams: the other arguments of the class.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: `base` is none of the three.

    >>> import torch, purestep as ps
    >>> optimizer = ps.schedule_free("sgd", lr=0.5, momentum=0.9)  # doctest: +SKIP
    """
    if base not in _CLASSES:
        raise ValueError(f"schedule_free: base must be one of {', '.join(_CLASSES)}, got {base!r}")
    try:
        import schedulefree
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ps.schedule_free needs the package schedulefree: pip install 'purestep[schedulefree]'", name=error.name
        ) from error
    return from_torch(getattr(schedulefree, _CLASSES[base]), lr=lr, groups=groups, elementwise=True, **hparams)

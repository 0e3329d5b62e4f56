"""The `deterministic` switch: what torch offers for the same bits in every run. docs/determinism.md says what that is.

What it sets is set for the whole process, since torch knows no smaller scope, and put back when the runtime closes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from purestep.sharding.config import ConfigError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":4096:8", ":16:8")  # the two with which cuBLAS promises the same bits


@contextmanager
def deterministic_algorithms(device_type: str) -> Iterator[None]:
    """Let torch use deterministic algorithms only, for the length of a block.

    Raises:
        ConfigError: on CUDA, the environment says that cuBLAS may do otherwise, or it is too late to tell it not to.
    """
    cublas = _cublas_workspace(device_type)
    inductor = _inductor_config()
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    compiled = getattr(inductor, "deterministic", None)
    try:
        os.environ.update(cublas)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        if inductor is not None:
            inductor.deterministic = True
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if inductor is not None:
            inductor.deterministic = compiled
        for name in cublas:
            os.environ.pop(name, None)


def _cublas_workspace(device_type: str) -> dict[str, str]:
    """The variable to set for cuBLAS; none if it is set, or not needed."""
    if device_type != "cuda":
        return {}
    value = os.environ.get(_CUBLAS)
    if value in _CUBLAS_VALUES:
        return {}
    if value is not None:
        raise ConfigError(
            f"--accelerator.deterministic: {_CUBLAS}={value} lets cuBLAS give different bits in each run; "
            f"unset it, or set it to {' or '.join(_CUBLAS_VALUES)}"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"--accelerator.deterministic: {_CUBLAS} has to be set before CUDA is first used, and it was used already; "
            f"set {_CUBLAS}={_CUBLAS_VALUES[0]} when you start the program, or call ps.start earlier"
        )
    return {_CUBLAS: _CUBLAS_VALUES[0]}


def _inductor_config() -> Any:
    """Where compiled code is told not to choose its kernels by measuring them; None where torch has no such switch."""
    import torch._inductor.config as config

    return config if hasattr(config, "deterministic") else None

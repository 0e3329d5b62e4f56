"""Which of torch's implementations an optimizer runs: recorded with a run, since they differ in the last bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from purestep.functional.chaining import chain
from purestep.functional.transforms import Leaves


def implementations(optimizer: Any, params: Leaves) -> dict[str, str]:
    """The implementation that each part of an optimizer runs for these parameters.

    A part answers by a method `implementations(params)` of the same form, in which its own name is ""; wrappers forward
    to what they wrap. Parts without that method have no choice and are left out.

    Args:
        optimizer: an optimizer, transform, wrapper or chain.
        params: the trainable parameters, real ones: what `auto` means depends on their devices and dtypes.

    Returns:
        path of the part -> "fused", "foreach" or "for-loop"; for a lifted class that chooses by itself, "default" and
        the device. JSON as it is.

    >>> import torch, purestep as ps
    >>> params = {"w": torch.ones(2)}
    >>> implementations(ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(1e-3)), params)
    {'adamw': 'fused'}
    >>> implementations(ps.rmsprop(1e-3), params)
    {'rmsprop': 'foreach'}
    """
    if isinstance(optimizer, chain):
        return {path: kind for name, part in optimizer.parts.items() for path, kind in part_of(name, part, params)}
    return dict(part_of(getattr(optimizer, "name", type(optimizer).__name__), optimizer, params))


def part_of(name: str, part: Any, params: Leaves) -> list[tuple[str, str]]:
    """(path, implementation) of what is in a part called `name`."""
    if isinstance(part, chain):
        found: Mapping[str, str] = implementations(part, params)
    else:
        ask = getattr(part, "implementations", None)
        found = ask(params) if callable(ask) else {}
    return [(f"{name}/{path}" if path else name, kind) for path, kind in found.items()]


def implementation_change(saved: Mapping[str, str] | None, current: Mapping[str, str]) -> str | None:
    """What to tell who resumes a run with other implementations than it was saved with; None if nothing changed.

    Args:
        saved: what `implementations` returned when the checkpoint was saved; None if it was not recorded.
        current: what it returns now.

    >>> implementation_change({"adamw": "fused"}, {"adamw": "foreach"})
    "the optimizer runs other kernels than before the checkpoint (adamw: 'fused' -> 'foreach'): results will ... bits"
    >>> implementation_change({"adamw": "fused"}, {"adamw": "fused"})
    """
    if saved is None:
        return None
    changed = [path for path, kind in current.items() if saved.get(path, kind) != kind]
    changes = [f"{path}: {saved[path]!r} -> {current[path]!r}" for path in changed]
    if not changes:
        return None
    return (
        f"the optimizer runs other kernels than before the checkpoint ({'; '.join(changes)}): results will differ in "
        "the last bits"
    )

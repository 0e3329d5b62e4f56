"""`donate`: a pure step that gives its old state's memory away."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from purestep.state.placement import local_tensor
from purestep.state.train_state import TrainState, discard, hand_over, is_consumed


def donate(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of your own that consumes the state it is given, as `train_step(..., donate=True)` does.

    Nobody can use the old state afterwards: it raises `ConsumedStateError`, and what the new state does not share of
    its memory is freed. A step that names an argument `donate` is called with `donate=True`, and may pass it on to
    where memory is reused, leaf by leaf: `optimizer.update(..., inplace=donate)`. The other calls of such a step, with
    its own default, stay pure.

    What the step returns beside the state, and what it was given beside it, must not share memory with the new state,
    which the next call may overwrite; that is checked at the first call.

    Args:
        step: `(state, *rest) -> state` or `-> (state, ...)`.

    Returns:
        The same function of its arguments, but for the consumed state. If the step fails after it began to write into
        the old state, that state is consumed too; if it fails before, the state is as it was.

    Raises:
        TypeError: what comes in or out first is no TrainState; when called.
        ValueError: something else shares memory with the new state; names both; when called.

    >>> import torch, purestep as ps
    >>> def decay(state, factor, *, donate=False):
    ...     old = state.params["w"]
    ...     return state.replace(step=state.step + 1, params={"w": old.mul_(factor) if donate else old * factor})
    >>> state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> pure, donated = decay(state, 0.5), ps.donate(decay)(state, 0.5)
    >>> pure.digest() == donated.digest()
    True
    >>> state.params
    Traceback (most recent call last):
    ...
    purestep.state.mappings.ConsumedStateError: TrainState.params: this state was donated to decay, step 0, ...
    """
    if not callable(step):
        raise TypeError(f"ps.donate takes a step, a function of a state, got {step!r}")
    options = {"donate": True} if _takes_donate(step) else {}
    name = getattr(step, "__name__", type(step).__name__)
    checked = False

    @functools.wraps(step, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    def donated(state: TrainState, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if not isinstance(state, TrainState):
            raise TypeError(f"{name}: a donated step takes a TrainState first, got {type(state).__name__}")
        consumer = f"{name}, step {state.step}"
        before = _versions(state) if options else None
        try:
            out = step(state, *args, **{**kwargs, **options})
        except BaseException:
            if before is not None and not is_consumed(state) and _versions(state) != before:
                discard(state, f"{consumer}, which failed while it was writing into it")
            raise
        new, *others = out if isinstance(out, tuple) else (out,)
        if not isinstance(new, TrainState):
            raise TypeError(f"{name}: a donated step returns a TrainState first, got {type(new).__name__}")
        if not checked:
            _refuse_sharing(name, new, {"returned": others, "arguments": (args, kwargs)})
            checked = True
        if not is_consumed(state):  # else by a donated step inside this one
            new = hand_over(state, new, consumer)
        return (new, *others) if isinstance(out, tuple) else new

    return donated


def _takes_donate(step: Callable[..., Any]) -> bool:
    try:
        return "donate" in inspect.signature(step).parameters
    except ValueError:  # built in C
        return False


def _versions(state: TrainState) -> list[int]:
    """How often each leaf was written."""
    return [local_tensor(leaf)._version for leaf in state.leaves().values()]


def _refuse_sharing(name: str, state: TrainState, others: Mapping[str, Any]) -> None:
    owners = {_storage(leaf): leaf_name for leaf_name, leaf in state.leaves().items() if local_tensor(leaf).numel()}
    for path, value in pytree.tree_flatten_with_path(dict(others))[0]:
        if isinstance(value, Tensor) and (owner := owners.get(_storage(value))):
            what = pytree.keystr(path).replace("['returned']", "what it returns ").replace("['arguments']", "argument ")
            raise ValueError(
                f"{name}: {what} shares memory with leaf {owner!r} of the new state, which the next donated step may "
                "overwrite; clone one of them"
            )


def _storage(tensor: Tensor) -> tuple[int, int]:
    local = local_tensor(tensor)
    return local.untyped_storage()._cdata, local.get_device()

"""Assertions for your own reproducibility tests. In a process group each is collective: every rank calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.collective import from_rank_zero, gather_objects
from purestep.state.digests import check_replicas, leaf_digests
from purestep.state.placement import default_rank
from purestep.state.train_state import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, Any]]

__all__ = ["assert_pure", "assert_replicas_equal", "assert_resume_exact", "assert_states_equal"]


def assert_states_equal(actual: TrainState, expected: TrainState) -> None:
    """Raise unless two states are bitwise equal, wherever their leaves live.

    Raises:
        AssertionError: names what differs: the step, the key, leaves that only one has, leaves with other values.

    >>> import torch, purestep as ps
    >>> state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> ps.testing.assert_states_equal(state, state.clone())
    >>> ps.testing.assert_states_equal(state, state.replace(params={"w": torch.zeros(2)}))
    Traceback (most recent call last):
    AssertionError: states differ: params/w has other values
    """
    differences = []
    if actual.step != expected.step:
        differences.append(f"step is {actual.step}, expected {expected.step}")
    if actual.key != expected.key:
        differences.append("key differs")
    ours, theirs = actual.leaves(), expected.leaves()
    differences += [f"{name} is not expected" for name in ours if name not in theirs]
    differences += [f"{name} is missing" for name in theirs if name not in ours]
    both = [name for name in ours if name in theirs]
    sums = [leaf_digests({name: leaves[name] for name in both}) for leaves in (ours, theirs)]
    for name in both:
        if _kind(ours[name]) != _kind(theirs[name]):
            differences.append(f"{name} is {_kind(ours[name])}, expected {_kind(theirs[name])}")
        elif sums[0][name] != sums[1][name]:
            differences.append(f"{name} has other values")
    if not differences and actual.digest() != expected.digest():
        differences.append("plain values in extra differ")
    _raise_everywhere(f"states differ: {', '.join(differences)}" if differences else None)


def assert_pure(step: Step, state: TrainState, batch: Any) -> TrainState:
    """Raise unless `step(state, batch)` gives the same bits twice and leaves `state` as it was.

    Args:
        step: a step built without donation.
        state: any state it takes.
        batch: any batch it takes (this rank's slice).

    Returns:
        The new state.

    Raises:
        AssertionError: says which of the promises is broken, and the leaves that differ.

    >>> import torch, purestep as ps
    >>> module, optimizer = ps.shard(torch.nn.Linear(1, 1)), ps.sgd(0.1)
    >>> step = ps.train_step(module, lambda model, x, key: model(x).mean(), optimizer)
    >>> new = ps.testing.assert_pure(step, ps.init(module, optimizer, ps.key(0)), torch.ones(2, 1))
    >>> new.step
    1
    """
    before = state.clone()
    first, metrics = step(state, batch)
    _same("the step changed its input", state, before)
    kept = first.clone()
    second, again = step(state, batch)
    _same("two calls gave different states", second, kept)
    _same("the second call changed what the first returned", first, kept)
    difference = _first_difference(metrics, again)
    _raise_everywhere(f"two calls gave different metrics: {difference}" if difference else None)
    return second


def assert_resume_exact(
    step: Step,
    state: TrainState,
    batches: Sequence[Any],
    *,
    abstract_state: TrainState | None = None,
    format: str = "safetensors",
) -> TrainState:
    """Raise unless a run that is saved and restored before each batch ends as the uninterrupted one, bit for bit.

    Args:
        step: a step, donating or not.
        state: the state to start from; it is not consumed.
        batches: what to train on, in order (this rank's slices).
        abstract_state: what to restore into; default the structure and placement of `state`.
        format: of the checkpoints.

    Returns:
        The last state.

    Raises:
        AssertionError: names the leaves that differ.

    >>> import torch, purestep as ps
    >>> module, optimizer = ps.shard(torch.nn.Linear(1, 1)), ps.adamw(0.1)
    >>> step = ps.train_step(module, lambda model, x, key: model(x).mean(), optimizer, donate=True)
    >>> state = ps.init(module, optimizer, ps.key(0))
    >>> ps.testing.assert_resume_exact(step, state, [torch.ones(2, 1)] * 3).step
    3
    """
    abstract_state = state.clone() if abstract_state is None else abstract_state
    uninterrupted, resumed = state.clone(), state.clone()
    for batch in batches:
        uninterrupted, _ = step(uninterrupted, batch)
    directory = from_rank_zero(lambda: tempfile.mkdtemp(prefix="purestep-"))
    try:
        for index, batch in enumerate(batches):
            path = Path(directory, str(index))
            save(path, resumed, format=format)
            resumed, _ = step(restore(path, abstract_state), batch)
        _same("the resumed run differs from the uninterrupted one", resumed, uninterrupted)
    finally:
        from_rank_zero(lambda: _remove(directory))
    return resumed


def assert_replicas_equal(state: TrainState) -> None:
    """Raise unless every rank holds the same replicated values.

    Raises:
        AssertionError: names the leaves that differ.
    """
    try:
        check_replicas(state)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None


def _same(what: str, actual: TrainState, expected: TrainState) -> None:
    try:
        assert_states_equal(actual, expected)
    except AssertionError as error:
        raise AssertionError(f"{what}: {str(error).removeprefix('states differ: ')}") from None


def _kind(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def _first_difference(a: Any, b: Any) -> str | None:
    if a.keys() != b.keys():
        return f"{sorted(a.keys() ^ b.keys())} in one of them"
    differing = [name for name in a if float(a[name]) != float(b[name])]
    return f"{differing[0]} is {float(a[differing[0]])} and {float(b[differing[0]])}" if differing else None


def _raise_everywhere(message: str | None) -> None:
    for rank, found in enumerate(gather_objects(message)):
        if found is not None:
            where = "" if rank == default_rank() else f" (rank {rank})"
            raise AssertionError(found + where)


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory)

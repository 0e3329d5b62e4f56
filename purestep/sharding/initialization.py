"""Initial values: the same bits for a key, whatever the topology, the world size, or the ambient RNG.

A module's own initializers draw them (`initializers.py`), one after the other, on the CPU, each under a key derived
from its module's path. Only this rank's block of each value is kept, so the peak is the state plus what one initializer
reaches, and a meta-device model is never in memory as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from purestep.sharding.initializers import initialize
from purestep.sharding.leaves import Leaf, ModuleLeaves
from purestep.sharding.loss_scale import initial_extra
from purestep.state.collective import gather_objects
from purestep.state.digests import block_digest
from purestep.state.keys import Key
from purestep.state.placement import block_of, copy_block, empty_leaf, is_dtensor, local_tensor
from purestep.state.train_state import TrainState, clone_leaf, make_state

if TYPE_CHECKING:
    from purestep.sharding.pure_module import PureModule

_log = logging.getLogger("purestep")


def init(
    module: PureModule,
    optimizer: Any,
    key: Key,
    *,
    params: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> TrainState:
    """The first state of a run. Collective where there are several processes.

    Args:
        module: from `ps.shard`.
        optimizer: anything with `init(params) -> opt_state`.
        key: the run's base key. Parameters come from `key.fold_in("init", module path)`.
        params: parameters by name that are used as they are (from `ps.load_params`, say); the others are initialized.
            They become leaves of the state, not copies.
        buffers: likewise for buffers.

    Returns:
        A state at step 0, on the runtime's device, placed as the module is. Its `digest()` depends on the key, the
        model and what was given alone. What no initializer of the model sets keeps the value the constructor gave it.

    Raises:
        ValueError: a meta-device leaf that nothing initializes; a leaf the constructor set differently on each rank;
            a given leaf that the module does not have, or that does not fit.
        TypeError: `key` is no Key.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(2, 1))
    >>> a, b = (ps.init(module, ps.sgd(0.1), ps.key(0)) for _ in range(2))
    >>> a.digest() == b.digest()
    True
    >>> ps.init(module, ps.sgd(0.1), ps.key(0), params={"bias": torch.ones(1)}).params["bias"]
    tensor([1.])
    """
    if not isinstance(key, Key):
        raise TypeError(f"ps.init takes a Key, got {type(key).__name__}; make one with ps.key(seed)")
    abstract = {"params": module.abstract_params(), "buffers": module.abstract_buffers()}
    given = {"params": dict(params or {}), "buffers": dict(buffers or {})}
    for what, tensors in given.items():
        for name, tensor in tensors.items():
            _check_given(f"{what}[{name!r}]", tensor, abstract[what].get(name), module.runtime.device)
    values = {**given["params"], **given["buffers"]}
    _draw(module, {**abstract["params"], **abstract["buffers"]}, values, key.fold_in("init"))
    _keep_the_rest(module, values)
    placed = {name: values[name] for name in module.leaves.params}
    trained = {name: placed[name] for name in module.trainable}
    return make_state(
        step=0,
        params=placed,
        buffers={name: values[name] for name in module.leaves.buffers},
        opt_state=optimizer.init(trained),
        key=key,
        ema=_averages(optimizer, trained),
        extra=initial_extra(module.runtime),
    )


def abstract_state(module: PureModule, optimizer: Any) -> TrainState:
    """The state `ps.init` would make, as meta tensors: what `ps.restore` needs to know.

    >>> import torch, purestep as ps
    >>> ps.abstract_state(ps.shard(torch.nn.Linear(2, 1)), ps.adamw(1e-3)).params["weight"]
    tensor(..., device='meta', size=(1, 2))
    """
    params = module.abstract_params()
    trained = {name: params[name] for name in module.trainable}
    return make_state(
        step=0,
        params=params,
        buffers=module.abstract_buffers(),
        opt_state=optimizer.init(trained),
        key=Key(b"\0" * 16),
        ema=_averages(optimizer, trained),
        extra=initial_extra(module.runtime, device="meta"),
    )


def _averages(optimizer: Any, params: dict[str, Tensor]) -> Mapping[str, Tensor] | None:
    """What an optimizer such as `with_ema` averages the parameters into."""
    method = getattr(optimizer, "init_ema", None)
    return None if method is None else method(params)


def initialize_constants(model: nn.Module, leaves: ModuleLeaves, device: torch.device) -> None:
    """Give meta-device non-persistent buffers the values their modules compute, and move all to `device`."""
    missing = {name: leaf for name, leaf in leaves.constants.items() if _tensor_of(leaf).is_meta}
    if missing:
        values: dict[str, Tensor] = {}
        everything = {**leaves.params, **leaves.buffers, **leaves.constants}
        holders = {id(leaf.slots[0].module) for leaf in missing.values()}
        # Their own modules first: a module further up may touch all there is.
        for within in (lambda call: id(call.module) in holders, lambda call: True):
            if values.keys() != missing.keys():
                initialize(model, everything, set(missing), Key(b"\0" * 16), values.__setitem__, within=within)
        for name, leaf in missing.items():
            if name not in values:
                raise ValueError(_unset_message(leaf))
            for place in leaf.slots:
                place.module._buffers[place.attr] = values[name]
    for leaf in leaves.constants.values():
        moved = _tensor_of(leaf).to(device)
        for place in leaf.slots:
            place.module._buffers[place.attr] = moved


def kept_digests(model: nn.Module, leaves: ModuleLeaves) -> dict[str, int]:
    """Content sums of what the constructor set, to be compared between ranks if `init` has to keep it."""
    everything = {**leaves.params, **leaves.buffers, **leaves.constants}
    real = {name: _tensor_of(leaf) for name, leaf in everything.items()}
    return {name: block_digest(block_of(tensor.detach())) for name, tensor in real.items() if not tensor.is_meta}


def constructed_values(leaves: ModuleLeaves) -> dict[str, Tensor]:
    """The leaves of a state as the constructor set them, placed as they are now; without those on the meta device."""
    real = {name: leaf for name, leaf in {**leaves.params, **leaves.buffers}.items() if not leaf.is_meta}
    return {name: _tensor_of(leaf).detach() for name, leaf in real.items()}


def _draw(module: PureModule, abstract: Mapping[str, Tensor], values: dict[str, Tensor], key: Key) -> None:
    """Add to `values`, which holds what was given, all that the model's initializers set."""
    leaves = {**module.leaves.params, **module.leaves.buffers}
    given = set(values)

    def take(name: str, value: Tensor) -> None:
        if name not in values:
            values[name] = empty_leaf(abstract[name], module.runtime.device)
        copy_block(values[name], value)

    wanted = set(leaves) - given
    if wanted:
        initialize(module.module, {**leaves, **module.leaves.constants}, wanted, key, take)
    _report_other_distributions(module, {name: value for name, value in values.items() if name not in given})


def _keep_the_rest(module: PureModule, values: dict[str, Tensor]) -> None:
    """Leaves that nothing initialized keep the constructor's value, which must be one value on all ranks."""
    leaves = {**module.leaves.params, **module.leaves.buffers}
    kept = [name for name in leaves if name not in values]
    tables = gather_objects({name: module.kept.get(name) for name in (*kept, *module.leaves.constants)})
    for name in kept:
        if leaves[name].is_meta:
            raise ValueError(_unset_message(leaves[name]))
    for name in tables[0]:
        if any(table[name] != tables[0][name] for table in tables):
            raise ValueError(
                f"{name!r} was set by the constructor to different values on different ranks, and no "
                "reset_parameters() "
                "sets it; give its module one (then ps.init derives it from the key), or seed the constructors alike"
            )
    module.constructed = {name: module.constructed[name] for name in kept}  # the others are never asked for
    for name in kept:
        current = module.constructed[name]
        values[name] = clone_leaf(current if is_dtensor(current) else current.to(module.runtime.device))


def _check_given(what: str, tensor: Tensor, wanted: Tensor | None, device: torch.device) -> None:
    if wanted is None:
        raise ValueError(f"{what} is no leaf of this module; a tied one is given under its first name (module.ties)")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}; ps.init takes tensors")
    found, expected = _geometry(tensor), _geometry(wanted)
    if found != expected:
        raise ValueError(f"{what} does not fit this module: got {found}, expected {expected}")
    if local_tensor(tensor).device.type != device.type:
        raise ValueError(
            f"{what} is on {local_tensor(tensor).device}, and the module computes on {device}; move it there"
        )


def _geometry(tensor: Tensor) -> str:
    placement = f" placed as {tensor.placements}" if is_dtensor(tensor) else ""  # type: ignore[attr-defined]
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{placement}"


def _report_other_distributions(module: PureModule, drawn: Mapping[str, Tensor]) -> None:
    """Say which leaves the constructor had filled in another way than the initializers that were run.

    A model that is built on a real device may owe its values to its constructor (or to a file), and its layers'
    `reset_parameters()` are not where they come from.
    """
    built = module.constructed
    names = [n for n in drawn if n in built and _other_distribution(local_tensor(drawn[n]), local_tensor(built[n]))]
    if names:
        _log.warning(
            "ps.init drew %d parameters of %s otherwise than its constructor had: %s. The initializers of its modules "
            "(reset_parameters(), init_weights(), _init_weights(module)) were run; values that only the constructor, "
            "or a file, gave it are kept by ps.init(..., params=ps.load_params(module)[0])",
            len(names),
            type(module.module).__name__,
            _some(names),
        )


def _other_distribution(drawn: Tensor, built: Tensor) -> bool:
    """Whether two samples cannot well be of one distribution: one is constant, or the spread is another."""
    if drawn.numel() < 2 or not drawn.is_floating_point():
        return False
    drawn, built = drawn.detach().float().flatten(), built.detach().float().flatten().to(drawn.device)
    constant = [bool((x == x[0]).all()) for x in (drawn, built)]
    if any(constant):
        return constant != [True, True] or bool(drawn[0] != built[0])
    ratio = float(drawn.std() / built.std())
    return drawn.numel() >= 1024 and not 0.75 < ratio < 1.33  # ten standard errors and more


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")


def _tensor_of(leaf: Leaf) -> Tensor:
    slot = leaf.slots[0]
    table = slot.module._parameters if slot.attr in slot.module._parameters else slot.module._buffers
    tensor = table[slot.attr]
    assert tensor is not None
    return tensor


def _unset_message(leaf: Leaf) -> str:
    slot = leaf.slots[0]
    return (
        f"nothing initializes {leaf.name!r}: its module {slot.path or 'the root'} "
        f"({type(slot.module).__name__}) was built on "
        f"the meta device and its reset_parameters() does not set {slot.attr!r}, nor does another initializer of the "
        "model (init_weights(), _init_weights(module)); write one that does, or build the model on a real device"
    )

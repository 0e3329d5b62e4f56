"""Initial values: the same bits for a key, whatever the topology, the world size, or the ambient RNG.

Modules are initialized one by one, each under a key derived from its path, on the CPU, by its own `reset_parameters()`
(the convention of torch.nn), then by the root's `_init_weights(module)` where it has one (the convention of nanoGPT and
transformers). A module whose children hold parameters and which has a `reset_parameters()` of its own is initialized
as a whole, children first. Only this rank's block of each value is kept, so the peak is the state plus one such module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from purestep.sharding.leaves import Leaf, ModuleLeaves, Slot
from purestep.state.collective import gather_objects
from purestep.state.digests import block_digest
from purestep.state.keys import Key
from purestep.state.placement import block_of, copy_block, empty_leaf, is_dtensor
from purestep.state.train_state import TrainState, clone_leaf, make_state

if TYPE_CHECKING:
    from purestep.sharding.pure_module import PureModule

_UNSET = 0xA5  # every byte of a tensor before its module initializes it
_StandIns = dict[int, tuple[Tensor, int, Tensor | None]]  # by id: itself, its version, a copy if it was not blank


def init(module: PureModule, optimizer: Any, key: Key) -> TrainState:
    """The first state of a run. Collective where there are several processes.

    Args:
        module: from `ps.shard`.
        optimizer: anything with `init(params) -> opt_state`.
        key: the run's base key. Parameters come from `key.fold_in("init", module path)`.

    Returns:
        A state at step 0, on the runtime's device, placed as the module is. Its `digest()` depends on the key and the
        model alone. What no `reset_parameters()` sets keeps the value the constructor gave it.

    Raises:
        ValueError: a meta-device leaf that nothing initializes; a leaf the constructor set differently on each rank.
        TypeError: `key` is no Key.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(2, 1))
    >>> a, b = (ps.init(module, ps.sgd(0.1), ps.key(0)) for _ in range(2))
    >>> a.digest() == b.digest()
    True
    """
    if not isinstance(key, Key):
        raise TypeError(f"ps.init takes a Key, got {type(key).__name__}; make one with ps.key(seed)")
    wanted = {**module.abstract_params(), **module.abstract_buffers()}
    leaves = {**module.leaves.params, **module.leaves.buffers}
    values: dict[str, Tensor] = {}
    device = module.runtime.device
    for slot, value in _initial_values(module.module, leaves, key.fold_in("init")):
        leaf = empty_leaf(wanted[slot.name], device)
        copy_block(leaf, value)
        values[slot.name] = leaf
        del value  # before the next module's are made
    _keep_the_rest(module, leaves, values)
    params = {name: values[name] for name in module.leaves.params}
    buffers = {name: values[name] for name in module.leaves.buffers}
    opt_state = optimizer.init({name: params[name] for name in module.trainable})
    return make_state(step=0, params=params, buffers=buffers, opt_state=opt_state, key=key, ema=None, extra={})


def abstract_state(module: PureModule, optimizer: Any) -> TrainState:
    """The state `ps.init` would make, as meta tensors: what `ps.restore` needs to know.

    >>> import torch, purestep as ps
    >>> ps.abstract_state(ps.shard(torch.nn.Linear(2, 1)), ps.adamw(1e-3)).params["weight"]
    tensor(..., device='meta', size=(1, 2))
    """
    params = module.abstract_params()
    opt_state = optimizer.init({name: params[name] for name in module.trainable})
    return make_state(
        step=0,
        params=params,
        buffers=module.abstract_buffers(),
        opt_state=opt_state,
        key=Key(b"\0" * 16),
        ema=None,
        extra={},
    )


def initialize_constants(model: nn.Module, leaves: ModuleLeaves, device: torch.device) -> None:
    """Give meta-device non-persistent buffers the values their modules compute, and move all to `device`."""
    missing = {name: leaf for name, leaf in leaves.constants.items() if _tensor_at(leaf.slots[0]).is_meta}
    # All before the first is placed: a module being initialized gets its own tensors back afterwards.
    values = {slot.name: value for slot, value in _initial_values(model, missing, Key(b"\0" * 16))}
    for name, leaf in missing.items():
        if name not in values:
            raise ValueError(_unset_message(leaf))
        for place in leaf.slots:
            place.module._buffers[place.attr] = values[name]
    for leaf in leaves.constants.values():
        moved = _tensor_at(leaf.slots[0]).to(device)
        for place in leaf.slots:
            place.module._buffers[place.attr] = moved


def kept_digests(model: nn.Module, leaves: ModuleLeaves) -> dict[str, int]:
    """Content sums of what the constructor set, to be compared between ranks if `init` has to keep it."""
    everything = {**leaves.params, **leaves.buffers, **leaves.constants}
    real = {name: _tensor_at(leaf.slots[0]) for name, leaf in everything.items()}
    return {name: block_digest(block_of(tensor.detach())) for name, tensor in real.items() if not tensor.is_meta}


def constructed_values(leaves: ModuleLeaves) -> dict[str, Tensor]:
    """The leaves of a state as the constructor set them, placed as they are now; without those on the meta device."""
    real = {name: leaf for name, leaf in {**leaves.params, **leaves.buffers}.items() if not leaf.is_meta}
    return {name: _tensor_at(leaf.slots[0]).detach() for name, leaf in real.items()}


def _keep_the_rest(module: PureModule, leaves: Mapping[str, Leaf], values: dict[str, Tensor]) -> None:
    """Leaves that nothing initialized keep the constructor's value, which must be one value on all ranks."""
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


def _initial_values(model: nn.Module, leaves: Mapping[str, Leaf], key: Key) -> Iterator[tuple[Slot, Tensor]]:
    """(first slot, whole CPU value) of each of `leaves` that its module, or one around it, initializes."""
    # A tied leaf takes the value of its first place; what the others draw is dropped.
    wanted = {leaf.slots[0].name for leaf in leaves.values()}
    holders = {id(leaf.slots[0].module) for leaf in leaves.values()}
    for members in _groups("", model, holders):
        slots = [Slot(m, path, attr) for path, m in members for table in (m._parameters, m._buffers) for attr in table]
        slots = [slot for slot in slots if _table(slot)[slot.attr] is not None]
        with _blank(slots) as before:
            for path, member in members:
                _run_initializers(model, member, key.fold_in(path))
            for slot in slots:
                if slot.name in wanted and _was_set(_tensor_at(slot), before):
                    yield slot, _tensor_at(slot).detach()
        del before, slots  # not kept while the next group gets its own


def _groups(path: str, module: nn.Module, holders: set[int]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Modules to initialize together, children first: those under one that initializes itself, else one by one."""
    if not any(id(m) in holders for m in module.modules()):
        return
    if _initializer(module) is not None:
        yield [(_join(path, p), m) for p, m in module.named_modules()][::-1]
        return
    if id(module) in holders:
        yield [(path, module)]
    for name, child in module._modules.items():
        if child is not None:
            yield from _groups(_join(path, name), child, holders)


def _initializer(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the latter: nn.MultiheadAttention, nn.Transformer
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _run_initializers(root: nn.Module, module: nn.Module, key: Key) -> None:
    with key.scope("cpu"), torch.no_grad():
        method = _initializer(module)
        if method is not None:
            method()
        convention = getattr(root, "_init_weights", None)
        if callable(convention):
            convention(module)


@contextmanager
def _blank(slots: list[Slot]) -> Iterator[_StandIns]:
    """Put whole CPU stand-ins into `slots`, and what was there back afterwards.

    Parameters start blank, buffers with the constructor's value where there is one (a `reset_parameters` may read it).

    Yields:
        The stand-ins as they are at the start, for `_was_set`.
    """
    old = [(slot, _tensor_at(slot)) for slot in slots]
    stand_ins: dict[int, Tensor] = {}
    before: _StandIns = {}
    try:
        for slot, tensor in old:
            if id(tensor) not in stand_ins:
                keep = slot.attr in slot.module._buffers and not tensor.is_meta
                stand_in = _stand_in(tensor.detach(), keep=keep)
                copy = stand_in.clone() if keep else None
                if slot.attr in slot.module._parameters:
                    stand_in = nn.Parameter(stand_in, tensor.requires_grad)
                stand_ins[id(tensor)] = stand_in
                before[id(stand_in)] = (stand_in, stand_in._version, copy)
            _table(slot)[slot.attr] = stand_ins[id(tensor)]
        yield before
    finally:
        for slot, tensor in old:
            _table(slot)[slot.attr] = tensor


def _stand_in(tensor: Tensor, *, keep: bool) -> Tensor:
    if keep:
        return tensor.to("cpu", copy=True)
    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if blank.numel():
        blank.view(-1).view(torch.uint8).fill_(_UNSET)
    return blank


def _was_set(value: Tensor, before: _StandIns) -> bool:
    if id(value) not in before:
        return True  # replaced by an assignment
    _, version, copy = before[id(value)]
    if value.numel() == 0 or value._version != version:
        return True
    # Writes through .data leave the version alone, hence the values.
    bits = _bits(value.detach())
    return not bool((bits == _UNSET).all()) if copy is None else not torch.equal(bits, _bits(copy))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _table(slot: Slot) -> dict[str, Any]:
    return slot.module._parameters if slot.attr in slot.module._parameters else slot.module._buffers


def _tensor_at(slot: Slot) -> Tensor:
    tensor = _table(slot)[slot.attr]
    assert tensor is not None
    return tensor


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _unset_message(leaf: Leaf) -> str:
    slot = leaf.slots[0]
    return (
        f"nothing initializes {leaf.name!r}: its module {slot.path or 'the root'} "
        f"({type(slot.module).__name__}) was built on "
        f"the meta device and its reset_parameters() does not set {slot.attr!r}; write one that does, or build the "
        "model on a real device"
    )

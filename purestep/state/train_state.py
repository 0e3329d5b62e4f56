"""`TrainState`: everything of a run that must survive, as one immutable value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.state.keys import Key
from purestep.state.mappings import ConsumedStateError, consume, freeze, frozen_dicts, rebuild
from purestep.state.names import join
from purestep.state.placement import from_local, is_dtensor, local_tensor


@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """The state of a run: leaves only, read-only, the same class for tensors, DTensors and meta tensors.

    What is not a leaf (module, optimizer, loss, precision policy) is closed over by the step, never stored here. States
    are compared by `digest()`. A registered pytree: `torch.utils._pytree.tree_map_only(torch.Tensor, f, state)` works.

    Raises:
        TypeError: a field has the wrong type, a leaf of a tensor field is no tensor, a leaf of `extra` is neither a
            tensor nor a plain value, or a key is neither a string nor an integer.
        ValueError: two leaves share memory; the names are given.

    >>> import torch, purestep as ps
    >>> state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> state.replace(step=1).step, state.step
    (1, 0)
    >>> list(state.leaves())
    ['params/w']
    """

    step: int
    """Optimizer updates done; the only counter."""
    params: Mapping[str, Tensor]
    """Module path -> tensor or DTensor; a tied weight is one leaf."""
    buffers: Mapping[str, Tensor]
    """Module path -> tensor (BatchNorm statistics etc.); replicated."""
    opt_state: Mapping[str, Mapping]
    """Transform name -> slot -> parameter path -> tensor."""
    key: Key
    """Base key of the run; step k uses `key.fold_in(k)`."""
    # A factory, because a plain default would stay behind as a class attribute and answer for a consumed state.
    ema: Mapping[str, Tensor] | None = dataclasses.field(default_factory=lambda: None)
    """Averaged parameters, or None."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """A user's own leaves: any tree of dicts, lists and tuples of tensors, numbers, strings and None."""

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"TrainState.step must be an int, got {self.step!r}")
        if self.step < 0:
            raise ValueError(f"TrainState.step counts updates done, got {self.step}")
        if not isinstance(self.key, Key):
            raise TypeError(f"TrainState.key must be a Key, got {type(self.key).__name__}; make one with ps.key(seed)")
        for name in _TREES:
            value = getattr(self, name)
            if name == "ema" and value is None:
                continue
            if not isinstance(value, Mapping):
                raise TypeError(f"TrainState.{name} must be a mapping, got {type(value).__name__}")
            object.__setattr__(self, name, freeze(value))
        _refuse_non_tensors(self)
        refuse_aliases(self.leaves())

    def replace(self, **changes: Any) -> TrainState:
        """A state with some fields changed; the others are shared, not copied."""
        return dataclasses.replace(self, **changes)

    def clone(self) -> TrainState:
        """A state with the same values in storage of its own."""
        return pytree.tree_map_only(Tensor, clone_leaf, self)

    def leaves(self) -> dict[str, Tensor]:
        """Every tensor by its name: `params/blocks.0.mlp.weight`, `opt_state/adamw/exp_avg/blocks.0.mlp.weight`.

        Keys that hold a slash or a tilde, are empty or are integers are marked, so that no two leaves have one name:
        see `purestep.state.names`.
        """
        return {name: leaf for name, leaf in named_leaves(self) if isinstance(leaf, Tensor)}

    def digest(self) -> str:
        """SHA-256 (hex) over names, dtypes, shapes and values: equal for equal states whatever the topology.

        With sharded leaves this is a collective call: every rank makes it, and every rank gets the same answer.
        """
        from purestep.state.digests import digest

        return digest(self)

    def __getattr__(self, name: str) -> Any:
        # Reached only when ordinary lookup fails, so a live state pays nothing for this.
        message = self.__dict__.get("_consumed")
        if message is not None and name in _FIELDS:
            raise ConsumedStateError(f"TrainState.{name}: {message}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        if "_consumed" in self.__dict__:
            return "TrainState(<consumed>)"
        counts = []
        for name in _TREES:
            try:
                leaves = [x for x in pytree.tree_leaves(getattr(self, name)) if isinstance(x, Tensor)]
            except ConsumedStateError:  # shared with a state that was donated
                counts.append(f"{name}=<consumed>")
                continue
            if leaves:
                counts.append(f"{name}={len(leaves)} leaves ({sum(x.numel() for x in leaves):,} elements)")
        return f"TrainState(step={self.step}, {', '.join(counts)}, key={self.key.hex()})"


_FIELDS = tuple(field.name for field in dataclasses.fields(TrainState))
_TREES = ("params", "buffers", "opt_state", "ema", "extra")


def make_state(**fields: Any) -> TrainState:
    """A `TrainState` whose leaves are known to be sound: containers are frozen, nothing is checked."""
    state = object.__new__(TrainState)
    for name in _FIELDS:
        value = fields[name]
        object.__setattr__(state, name, freeze(value) if name in _TREES else value)
    return state


def named_leaves(state: TrainState) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything inside the state's trees, tensors and plain values alike."""
    for name in _TREES:
        yield from _walk(name, getattr(state, name))


def map_leaves(function: Callable[[str, Any], Any], state: TrainState, **changes: Any) -> TrainState:
    """A state of the same structure whose every leaf is `function(name, leaf)`; `changes` replace other fields."""
    trees = {name: _map(function, name, getattr(state, name)) for name in _TREES}
    return make_state(**{"step": state.step, "key": state.key, **trees, **changes})


def hand_over(state: TrainState, new: TrainState, consumer: str) -> TrainState:
    """Consume `state`, whose storage now belongs to `new`, which `consumer` (e.g. "train_step, step 3") made of it.

    Returns:
        `new` in containers of its own: those it shared with `state` raise from now on, whoever holds them.
    """
    trees = {name: rebuild(getattr(new, name)) for name in _TREES}
    owned = make_state(step=new.step, key=new.key, **trees)
    discard(state, f"{consumer}, which reused its memory")
    return owned


def discard(state: TrainState, consumer: str) -> None:
    """Consume `state`: it, and the containers it holds, raise from now on whoever reads them."""
    message = (
        f"this state was donated to {consumer}; keep what it returned, or hold on to the old "
        "values with state.clone() before the call, or build the step with donate=False"
    )
    old = [mapping for name in _TREES for mapping in frozen_dicts(getattr(state, name))]
    for name in _FIELDS:
        object.__delattr__(state, name)
    object.__setattr__(state, "_consumed", message)
    for mapping in old:
        if mapping:  # an empty one, which other states may share, has nothing that could be overwritten
            consume(mapping, message)


def is_consumed(state: TrainState) -> bool:
    """Whether `state` was donated."""
    return "_consumed" in state.__dict__


def clone_leaf(leaf: Tensor) -> Tensor:
    """A copy of `leaf` in storage of its own, layout and (for uneven shards) the padding behind it kept."""
    if not is_dtensor(leaf):
        return leaf.detach().clone()
    local = local_tensor(leaf)
    padded = padded_storage(local)
    copy = local.clone() if padded is None else padded.clone().narrow(0, 0, local.shape[0])
    return from_local(copy, leaf._spec)  # type: ignore[attr-defined]


def padded_storage(local: Tensor) -> Tensor | None:
    """The whole storage of a shard that is a leading slice of it, shaped as rows; None when there is no padding.

    FSDP2 pads uneven shards along dim 0 to one size and computes on the storage behind them.
    """
    if local.device.type == "meta" or local.ndim == 0 or not local.is_contiguous() or local.storage_offset() != 0:
        return None
    row = local[0].numel() if local.shape[0] else _row_size(local)
    size = local.untyped_storage().nbytes() // local.element_size()
    if row == 0 or size == local.numel() or size % row:
        return None
    return local.as_strided((size // row, *local.shape[1:]), (row, *local.stride()[1:]))


def _row_size(local: Tensor) -> int:
    size = 1
    for length in local.shape[1:]:
        size *= length
    return size


def refuse_aliases(leaves: Mapping[str, Tensor]) -> None:
    """Raise when two leaves share memory: a donated step would write one through the other."""
    by_storage: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for name, leaf in leaves.items():
        local = local_tensor(leaf)
        if local.numel() == 0:
            continue
        storage = local.untyped_storage()
        start = storage.data_ptr() if local.device.type != "meta" else storage._cdata
        by_storage.setdefault((start, local.get_device()), []).append((*_extent(local), name))
    for extents in by_storage.values():
        extents.sort()
        for i, (_, end, first) in enumerate(extents):
            for start, _, second in extents[i + 1 :]:
                if start >= end:
                    break
                if _overlap(local_tensor(leaves[first]), local_tensor(leaves[second])):
                    raise ValueError(
                        f"leaves {first!r} and {second!r} share memory; a state owns each buffer once: "
                        "clone one of them (tensor.clone())"
                    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor touches, and one past the last."""
    first = int(tensor.storage_offset())
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (first + reach + 1) * tensor.itemsize


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage, whose extents overlap, have a byte in common: strided ones may interleave."""
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    if all(x.numel() * x.itemsize == end - start for x, start, end in ((a, a_start, a_end), (b, b_start, b_end))):
        return True
    base, word = min(a_start, b_start), min(a.itemsize, b.itemsize)
    cells = torch.arange((max(a_end, b_end) - base) // word)
    ours, theirs = (
        cells.as_strided(
            (*x.shape, x.itemsize // word),
            (*(stride * x.itemsize // word for stride in x.stride()), 1),
            (start - base) // word,
        ).flatten()
        for x, start in ((a, a_start), (b, b_start))
    )
    return bool(torch.isin(ours, theirs).any())


def _refuse_non_tensors(state: TrainState) -> None:
    for name, leaf in named_leaves(state):
        if isinstance(leaf, Tensor):
            continue
        if not name.startswith("extra/"):
            raise TypeError(f"TrainState leaf {name!r} must be a tensor, got {type(leaf).__name__}")
        if leaf is not None and type(leaf) not in (bool, int, float, str):
            raise TypeError(
                f"TrainState leaf {name!r} must be a tensor, a number, a string or None, got {type(leaf).__name__}: "
                "what a state holds is digested and saved, and that type cannot be; store what it consists of"
            )


def _walk(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _walk(join(prefix, key), value)
    elif type(tree) in (list, tuple):
        for i, value in enumerate(tree):
            yield from _walk(f"{prefix}/{i}", value)
    elif not (tree is None and prefix == "ema"):
        yield prefix, tree


def _map(function: Callable[[str, Any], Any], prefix: str, tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(function, join(prefix, key), value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map(function, f"{prefix}/{i}", value) for i, value in enumerate(tree))
    return tree if tree is None and prefix == "ema" else function(prefix, tree)


def _flatten(state: TrainState) -> tuple[list, None]:
    return [getattr(state, name) for name in _FIELDS], None


def _flatten_with_keys(state: TrainState) -> tuple[list, None]:
    return [(pytree.GetAttrKey(name), getattr(state, name)) for name in _FIELDS], None


def _unflatten(values: Iterable[Any], _: None) -> TrainState:
    return make_state(**dict(zip(_FIELDS, values, strict=True)))


pytree.register_pytree_node(
    TrainState,
    _flatten,
    _unflatten,
    serialized_type_name="purestep.TrainState",
    flatten_with_keys_fn=_flatten_with_keys,
)

"""Read-only mappings: the containers a `TrainState` is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch.utils._pytree as pytree
from torch import Tensor


class ConsumedStateError(RuntimeError):
    """A donated state was used after the step that consumed it."""


class FrozenDict(dict):
    """A dict that refuses to change.

    It *is* a dict, so reading it costs what a dict costs. A changed copy is an ordinary dict expression.
    `torch.func.functional_call` writes into a dict it is given alone: pass it a tuple, `(params, buffers)`.

    >>> params = FrozenDict(weight=1.0)
    >>> {**params, "bias": 0.0}
    {'weight': 1.0, 'bias': 0.0}
    >>> params["weight"] = 2.0
    Traceback (most recent call last):
    TypeError: this mapping is read-only; build a changed copy, {**mapping, name: value}, ... to state.replace(...)
    """

    __slots__ = ("_consumed",)
    _consumed: str

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "this mapping is read-only; build a changed copy, {**mapping, name: value}, "
            "and pass it to state.replace(...)"
        )

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict]]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self


class _ConsumedDict(FrozenDict):
    """What a `FrozenDict` turns into when its tensors are donated: every way of reading it raises."""

    __slots__ = ()

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConsumedStateError(self._consumed)

    __getitem__ = __iter__ = __len__ = __contains__ = __reversed__ = __eq__ = __ne__ = __or__ = __ror__ = _raise
    keys = values = items = get = copy = __reduce__ = __copy__ = _raise
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<consumed mapping>"


_CONTAINERS = {FrozenDict, _ConsumedDict, list, tuple}  # of a frozen tree


def freeze(tree: Any) -> Any:
    """Copy the containers of `tree` (not its leaves), every mapping becoming a `FrozenDict`."""
    if isinstance(tree, FrozenDict):
        return tree
    if isinstance(tree, Mapping):
        return FrozenDict({name: _leaf_or(freeze, value) for name, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(freeze(value) for value in tree)
    return tree


def rebuild(tree: Any) -> Any:
    """Copy every container of `tree`, frozen ones too; the leaves are shared."""
    if isinstance(tree, FrozenDict):
        return FrozenDict(tree if _holds_leaves(tree) else {name: rebuild(value) for name, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(rebuild(value) for value in tree)
    return tree


def frozen_dicts(tree: Any) -> Iterable[FrozenDict]:
    """Every `FrozenDict` in `tree`, outermost first; consumed ones are passed over."""
    if isinstance(tree, FrozenDict) and not isinstance(tree, _ConsumedDict):
        yield tree
        if not _holds_leaves(tree):
            for value in tree.values():
                yield from frozen_dicts(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from frozen_dicts(value)


def _holds_leaves(tree: FrozenDict) -> bool:
    """Whether no value of a frozen mapping is a container: one look at the types, in C, instead of a call a leaf."""
    return _CONTAINERS.isdisjoint(map(type, tree.values()))


def _leaf_or(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` if it is a plain tensor, as most are in a step's hot path, else `function(value)`."""
    return value if type(value) is Tensor else function(value)


def consume(mapping: FrozenDict, message: str) -> None:
    """Make every later read of `mapping`, also through names somebody still holds, raise `ConsumedStateError`."""
    mapping._consumed = message
    mapping.__class__ = _ConsumedDict


def _flatten(mapping: FrozenDict) -> tuple[list, list]:
    return list(mapping.values()), list(mapping)


def _flatten_with_keys(mapping: FrozenDict) -> tuple[list, list]:
    return [(pytree.MappingKey(name), value) for name, value in mapping.items()], list(mapping)


def _unflatten(values: Iterable[Any], names: list) -> FrozenDict:
    return FrozenDict(zip(names, values, strict=True))


def _refuse_consumed(mapping: _ConsumedDict, *args: Any) -> NoReturn:
    raise ConsumedStateError(mapping._consumed)


pytree.register_pytree_node(
    FrozenDict,
    _flatten,
    _unflatten,
    serialized_type_name="purestep.FrozenDict",
    flatten_with_keys_fn=_flatten_with_keys,
)
# Without this a consumed mapping would pass through tree_map unseen, as a leaf.
pytree.register_pytree_node(
    _ConsumedDict,
    _refuse_consumed,
    _refuse_consumed,  # type: ignore[arg-type]
    serialized_type_name="purestep.ConsumedDict",
    flatten_with_keys_fn=_refuse_consumed,
)

"""Run a module's own initializers, each with no more than the leaves it touches.

Which these are: `reset_parameters()` and `_reset_parameters()` (torch.nn), `init_weights()` (timm), and a module's
`_init_weights(module)`, which speaks for the modules below it (transformers, nanoGPT).

What an initializer touches is nowhere declared: a block may rescale the weights of its layers, a model those of its
blocks. So it is rehearsed with its own leaves in memory and those of the modules below as zeros that take no memory
until they are touched, while a dispatch mode notes which of them it computes with. If there are any, it runs again
with these in memory too, after the initializers that had touched them before. A leaf is thus set by every initializer
that reaches it, in the order of the module tree, children first; and the peak is what one initializer reaches, not the
model.
"""

from __future__ import annotations

import functools
import inspect
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from purestep.sharding.leaves import Leaf, Slot
from purestep.state.keys import Key

_UNSET = 0xA5  # every byte of a parameter before an initializer writes it


@dataclass(frozen=True)
class Initializer:
    """What sets the leaves of one module: its own methods, and those of the modules around it."""

    path: str
    module: nn.Module
    functions: tuple[Callable[[], Any], ...]

    def __call__(self, key: Key) -> None:
        """Run them under the key of this module."""
        with key.fold_in(self.path).scope("cpu"), torch.no_grad():
            for function in self.functions:
                function()


def initializers_of(model: nn.Module) -> list[Initializer]:
    """Every module that can be initialized, children first, a shared one once."""
    return list(_initializers("", model, (), set()))


def initialize(
    model: nn.Module,
    leaves: Mapping[str, Leaf],
    wanted: set[str],
    key: Key,
    take: Callable[[str, Tensor], None],
    *,
    within: Callable[[Initializer], bool] = lambda initializer: True,
) -> None:
    """Let `model` set the `wanted` ones of its leaves.

    Args:
        model: as it was before afterwards.
        leaves: all of its leaves by name.
        wanted: names of those whose values are asked for.
        key: an initializer runs under `key.fold_in(module path)`.
        take: called with the name and the whole CPU value of a leaf that was set, right after; again if an initializer
            of a module further up changes it.
        within: which initializers to run.
    """
    calls = [call for call in initializers_of(model) if within(call)]
    touched_by: dict[str, set[int]] = {}
    with _Stage(calls, leaves) as stage:
        for index, call in enumerate(calls):
            own, below = stage.own(call), stage.below(call)
            if not own & wanted and below <= own:  # sets nothing that is asked for, unless others build on it
                for name in own:
                    touched_by.setdefault(name, set()).add(index)
                continue
            on_stage = own if own & wanted else set()
            while True:
                members = sorted({index}.union(*(touched_by.get(name, ()) for name in on_stage)))
                touched, error = stage.run([calls[member] for member in members], on_stage, key)
                reached = set().union(*touched)
                if (reached <= on_stage and error is None) or not (reached | on_stage) & wanted:
                    break
                if error is not None and reached <= on_stage:
                    where = f"{call.path or 'the root'} ({type(call.module).__name__})"
                    error.add_note(f"in the initialization of {where}")
                    raise error
                on_stage = on_stage | reached
            for member, names in zip(members, touched, strict=False):
                for name in names:
                    touched_by.setdefault(name, set()).add(member)
            for name in sorted(on_stage & wanted):
                if stage.was_set(name):
                    take(name, stage.value(name))
            stage.clear()


_Convention = tuple[bool, Callable[[nn.Module], Any]]


def _initializers(
    path: str, module: nn.Module, conventions: tuple[_Convention, ...], seen: set[int]
) -> Iterator[Initializer]:
    if id(module) in seen:
        return
    seen.add(id(module))
    conventions = _around(module, conventions)
    for name, child in module._modules.items():
        if child is not None:
            yield from _initializers(f"{path}.{name}" if path else name, child, conventions, seen)
    reset = [method for name in ("reset_parameters", "_reset_parameters") if (method := _method(module, name, 0))]
    last = [] if _is_transformers(module) else [method for name in _WHOLE if (method := _method(module, name, 0))]
    inherited = [functools.partial(convention, module) for _, convention in conventions]
    functions: tuple[Callable[[], Any], ...] = (*reset[:1], *inherited, *last)
    if functions:
        yield Initializer(path, module, functions)


_WHOLE = ("init_weights", "_init_weights")  # names of either convention: with a module as argument, or without


def _around(module: nn.Module, outer: tuple[_Convention, ...]) -> tuple[_Convention, ...]:
    """The conventions that speak for `module`, the innermost first, as constructors apply them."""
    for name in reversed(_WHOLE):
        method = _method(module, name, 1)
        if method is not None:
            ours = _is_transformers(module)
            # A model within a model of transformers is left to its own convention by the outer one.
            return ((ours, method), *(entry for entry in outer if not (ours and entry[0])))
    return outer


def _method(module: nn.Module, name: str, num_args: int) -> Callable[..., Any] | None:
    """The method if it is called with so many arguments: with a module where it requires one, else with none."""
    method = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)
    ]
    fits = len(required) == num_args and all(p.kind in positional for p in required)
    return method if fits else None


def _is_transformers(module: nn.Module) -> bool:
    """Whether its `init_weights()` is nothing but its `_init_weights(module)` everywhere, and tying."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


class _Stage:
    """A model whose leaves are stand-ins: blank CPU tensors for those on stage, meta tensors for those far away.

    What is below a module that is initialized must not be seen to be on the meta device (`nn.init.trunc_normal_` does
    nothing there): see `_zeros`.
    """

    def __init__(self, calls: list[Initializer], leaves: Mapping[str, Leaf]):
        self._leaves = leaves
        self._old = [(slot, _read(slot)) for leaf in leaves.values() for slot in leaf.slots]
        self._real = {slot.name: tensor for slot, tensor in self._old}
        self._absent = {
            name: self._as_leaf(leaf, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
            for name, leaf in leaves.items()
        }
        self._current = dict(self._absent)
        self._storage_of = {name: _storage(tensor) for name, tensor in self._absent.items()}
        self._storages = {storage: name for name, storage in self._storage_of.items()}
        self._before: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        self._own: dict[int, set[str]] = {}
        self._places: dict[int, list[tuple[Slot, str]]] = {}
        for name, leaf in leaves.items():
            self._own.setdefault(id(leaf.slots[0].module), set()).add(name)
            for slot in leaf.slots:
                self._places.setdefault(id(slot.module), []).append((slot, name))
        self._below = {
            id(call.module): frozenset(name for m in call.module.modules() for _, name in self._places.get(id(m), ()))
            for call in calls
        }

    def __enter__(self) -> _Stage:
        for name in self._leaves:
            self._put(name, self._absent[name])
        return self

    def __exit__(self, *exc: object) -> None:
        for slot, tensor in self._old:
            _write(slot, tensor)

    def own(self, call: Initializer) -> set[str]:
        """The leaves that sit in the call's module, tied ones at their first place only."""
        return set(self._own.get(id(call.module), ()))

    def below(self, call: Initializer) -> frozenset[str]:
        """The leaves of the call's module and of all modules in it."""
        return self._below[id(call.module)]

    def run(
        self, calls: list[Initializer], on_stage: set[str], key: Key
    ) -> tuple[list[set[str]], BaseException | None]:
        """Run `calls` with the leaves `on_stage` blank and in memory.

        Returns:
            What each touched, and the error that ended it, if any.
        """
        self.clear()
        for name in on_stage:
            self._before[name] = self._blank(name)
            self._put(name, self._before[name][0])
        touched: list[set[str]] = []
        for call in calls:
            for name in self.below(call) - on_stage:
                self._put(name, self._as_leaf(self._leaves[name], _zeros(self._leaves[name])))
            watch = _Watch(self._storages)
            touched.append(watch.touched)
            try:
                with self._scratch_for_ties(call), watch:
                    call(key)
            except Exception as error:
                return touched, error
            finally:
                watch.touched |= self._assigned(call)
                for name in self.below(call) - on_stage:
                    self._put(name, self._absent[name])
        return touched, None

    def was_set(self, name: str) -> bool:
        """Whether an initializer gave the leaf a value."""
        stand_in, version, copy = self._before[name]
        value = self._current[name]
        if value is not stand_in or value.numel() == 0 or value._version != version:
            return True
        # Writes through .data leave the version alone, hence the values.
        bits = _bits(value.detach())
        return not bool((bits == _UNSET).all()) if copy is None else not torch.equal(bits, _bits(copy))

    def value(self, name: str) -> Tensor:
        """The leaf's value, whole."""
        return self._current[name].detach()

    def clear(self) -> None:
        """Take everything off the stage."""
        for name in self._before:
            self._put(name, self._absent[name])
        self._before.clear()

    def _assigned(self, call: Initializer) -> set[str]:
        """Leaves that are another tensor than before the call; it becomes the leaf if that is on stage."""
        names = set()
        for module in call.module.modules():
            for slot, name in self._places.get(id(module), ()):
                tensor = _read(slot)
                if tensor is self._current[name] and _storage(tensor) == self._storage_of[name]:
                    continue  # neither replaced nor pointed at other memory (weight.data = ...)
                names.add(name)
                on_stage = name in self._before and slot is self._leaves[name].slots[0] and tensor is not None
                self._put(name, tensor if on_stage else self._current[name])
        return names

    def _scratch_for_ties(self, call: Initializer) -> _Scratch:
        """What a module draws for a tied leaf that has its first place elsewhere is dropped."""
        return _Scratch(
            [
                (slot, self._as_leaf(self._leaves[name], _zeros(self._leaves[name])), self._current[name])
                for slot, name in self._places.get(id(call.module), ())
                if slot.module is not self._leaves[name].slots[0].module
            ]
        )

    def _put(self, name: str, tensor: Tensor) -> None:
        self._storages.pop(self._storage_of[name], None)
        self._storage_of[name] = _storage(tensor)
        self._storages[self._storage_of[name]] = name
        self._current[name] = tensor
        for slot in self._leaves[name].slots:
            _write(slot, tensor)

    def _blank(self, name: str) -> tuple[Tensor, int, Tensor | None]:
        """A stand-in, its version, and a copy of it if it starts with a value.

        Buffers start with the constructor's, if there is one: an initializer may read it.
        """
        leaf, real = self._leaves[name], self._real[name]
        keep = leaf.slots[0].attr in leaf.slots[0].module._buffers and not real.is_meta
        if keep:
            blank = real.detach().to("cpu", copy=True)
        else:
            blank = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            if blank.numel():
                blank.view(-1).view(torch.uint8).fill_(_UNSET)
        copy = blank.clone() if keep else None
        stand_in = self._as_leaf(leaf, blank)
        return stand_in, stand_in._version, copy

    def _as_leaf(self, leaf: Leaf, tensor: Tensor) -> Tensor:
        slot = leaf.slots[0]
        return nn.Parameter(tensor, leaf.trainable) if slot.attr in slot.module._parameters else tensor


class _Scratch:
    """Other tensors in some places, for the length of a block."""

    def __init__(self, places: list[tuple[Slot, Tensor, Tensor]]):
        self._places = places

    def __enter__(self) -> None:
        for slot, scratch, _ in self._places:
            _write(slot, scratch)

    def __exit__(self, *exc: object) -> None:
        for slot, _, tensor in self._places:
            _write(slot, tensor)


class _Watch(TorchDispatchMode):
    """Notes which of some storages operators are called with."""

    def __init__(self, names: Mapping[int, str]):
        super().__init__()
        self._names = names
        self.touched: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in _tensors((*args, *kwargs.values())):
            name = self._names.get(_storage(x))
            if name is not None:
                self.touched.add(name)
        return func(*args, **kwargs)


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, which are values and lists of values."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _zeros(leaf: Leaf) -> Tensor:
    """A CPU tensor of zeros; a large one is in memory only where it has been written."""
    size = leaf.numel * leaf.dtype.itemsize
    if size < mmap.PAGESIZE * 16:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, size), dtype=leaf.dtype).view(leaf.shape)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _table(slot: Slot) -> dict[str, Any]:
    return slot.module._parameters if slot.attr in slot.module._parameters else slot.module._buffers


def _read(slot: Slot) -> Any:
    return _table(slot).get(slot.attr)


def _write(slot: Slot, tensor: Any) -> None:
    _table(slot)[slot.attr] = tensor

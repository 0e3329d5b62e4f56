"""`from_torch`: any torch.optim.Optimizer class as a pure function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from purestep.functional.named import NamedOptimizer
from purestep.functional.probing import NUMBERS, TORCHS_OWN, Kept, Layout, Probe, changed, probe, snapshot
from purestep.functional.schedules import Schedule, value_at
from purestep.functional.shards import copies_of, filled_like
from purestep.functional.transforms import Leaves, Slots
from purestep.functional.whole_leaf import keep, whole
from purestep.sharding.rules import near, pattern
from purestep.state.keys import Key
from purestep.state.mappings import FrozenDict
from purestep.state.names import some
from purestep.state.placement import from_local, is_dtensor, local_tensor

_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_STARTED, _GROUPS = "started", "groups"


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    lr: float | Schedule | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    elementwise: bool | None = None,
    **hparams: Any,
) -> Lifted:
    """Any optimizer class of torch's kind, third-party ones too, as a pure function.

    The class does the work: at each update one is made around copies of parameters and state, stepped, and taken apart
    again. So the result is bit for bit what the class gives when it is stepped by hand (on contiguous tensors).

    Slots are what the class keeps for each parameter, under its own names (`exp_avg`); Python numbers become 0-d
    tensors there and numbers again for the class. `started` says for each parameter whether the class has made that
    state yet, which it does in the parameter's first update; `groups/<number>/<name>` are values that the class keeps
    in its param_groups and changes. Random numbers that the class draws derive from the step.

    Args:
        cls: a subclass of `torch.optim.Optimizer` whose `step` needs no closure. If it has a method `train`, that is
            called first, as schedule-free optimizers want it.
        lr: a number or a schedule; None for the class's default.
        groups: options of their own for some parameters: `{"**.bias": {"weight_decay": 0.0}}`. Globs on parameter
            names (`*` stays within one segment, `**` does not); the first that matches counts. `lr` may be a schedule.
        elementwise: whether every element of a parameter is updated by itself, given only numbers besides: then local
            shards are updated where they are. If not, shards are gathered, all of them at once, since the class may
            relate parameters to each other, and each rank computes everything and keeps its shards: right for any
            class, and slow. By default true for torch's own classes of which it is true, false for all others.
        hparams: the other arguments of the class.

    Raises:
        TypeError: not such a class; it needs a closure; it keeps state that is neither a tensor nor a number, or keeps
            state outside of its `state` and `param_groups` (from `init`).
        ValueError: a glob that matches no parameter (from `init`), an option that only `lr=` can set.

    >>> import torch, purestep as ps
    >>> optimizer = ps.from_torch(torch.optim.Adamax, lr=ps.linear(0.1, 0.0, 100), betas=(0.8, 0.99))
    >>> params = {"w": torch.tensor([1.0])}
    >>> opt_state = optimizer.init(params)
    >>> list(opt_state["Adamax"])
    ['step', 'exp_avg', 'exp_inf', 'started']
    >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0])}, opt_state, params, step=0)
    >>> params["w"]
    tensor([0.9000])
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a subclass of torch.optim.Optimizer, got {cls!r}; pass its arguments by name"
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{cls.__name__} needs a closure that computes the loss again within a step, so it is no function of "
            "gradients and cannot be lifted; write the step by hand with ps.value_and_grad"
        )
    if elementwise is None:
        elementwise = cls in {getattr(torch.optim, name) for name in _ELEMENTWISE}
    for glob, options in (groups or {}).items():
        if not isinstance(options, Mapping) or "params" in options:
            raise TypeError(f"from_torch: groups maps globs to options, got {options!r} for {glob!r}")
    rules = tuple((glob, FrozenDict(options)) for glob, options in (groups or {}).items())
    return Lifted(lr, cls=cls, options=FrozenDict(hparams), groups=rules, elementwise=elementwise)


@dataclass(frozen=True, repr=False)
class Lifted(NamedOptimizer):
    """An optimizer class as a pure function; made by `from_torch`."""

    lr: float | Schedule | None  # type: ignore[assignment]
    _: KW_ONLY
    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    groups: tuple[tuple[str, Mapping[str, Any]], ...]
    elementwise: bool
    _probes: dict[Any, Probe] = dataclasses.field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.lr is not None:
            super().__post_init__()

    @property
    def name(self) -> str:
        """What it is called in `opt_state` and in messages: the name of the class."""
        return self.cls.__name__

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which implementation runs; see `purestep.functional.implementations`."""
        for option, name in (("fused", "fused"), ("foreach", "foreach")):
            if self.options.get(option):
                return {"": name}
        if self.options.get("foreach") is False:
            return {"": "for-loop"}
        return {"": f"default ({' and '.join(sorted({leaf.device.type for leaf in params.values()}))})"}

    def without_weight_decay(self) -> Lifted:
        """The same optimizer without weight decay.

        Raises:
            TypeError: the class has no argument `weight_decay`.
        """
        if "weight_decay" not in inspect.signature(self.cls).parameters:
            raise TypeError(f"{self.name} has no argument weight_decay, so none can be taken away from it")
        none = {"weight_decay": 0.0}
        groups = tuple((glob, FrozenDict({**own, **none})) for glob, own in self.groups)
        return dataclasses.replace(self, options=FrozenDict({**self.options, **none}), groups=groups)

    def init_slots(self, params: Leaves) -> Slots:
        """`init` without the level of the name."""
        for glob, _ in self.groups:
            if not any(pattern(glob).fullmatch(name) for name in params):
                raise ValueError(f"{self.name}: the group {glob!r} matches no parameter{near(glob, params)}")
        slots: dict[str, Any] = {}
        shared: dict[str, dict[str, Tensor]] = {}
        for name, leaf in params.items():
            group = self._group_of(name)
            probed = self._probe(group, leaf)
            for kept in probed.layout.leaves:
                slots.setdefault(kept.name, {})[name] = self._zeros(kept, leaf)
            if probed.layout.leaves:
                slots.setdefault(_STARTED, {})[name] = torch.zeros((), dtype=torch.bool, device=leaf.device)
            if str(group) not in shared:
                values = {key: _stored(value, leaf.device) for key, value in probed.group.items()}
                shared.update({str(group): values} if values else {})
        return {**slots, _GROUPS: shared} if shared else slots

    def update_slots(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """`update` without the level of the name."""
        self.check_gradients(grads, params)
        names = [name for name in params if name in grads]
        if metrics is not None and self.lr is not None:
            metrics["lr"] = value_at(self.lr, step)
        if not names:
            return params, slots
        device = local_tensor(params[names[0]]).device
        with torch.no_grad(), _RANDOM.fold_in(int(step)).scope(device):
            loans = self._lend(names, slots, params, copy=not inplace)
            optimizer, numbers = self._assemble(loans, slots, step)
            for loan in loans:
                grad = self._seen(grads[loan.name])
                loan.param.grad = grad.clone() if not inplace and _shares(grad, grads[loan.name]) else grad
            self._step(optimizer, numbers)
            if metrics is not None:
                metrics.setdefault("lr", optimizer.param_groups[0].get("lr", 0.0))
            for loan in loans:
                self._take_back(loan, optimizer.state.get(loan.param, {}))
        shared = self._shared(optimizer, numbers, slots)
        return self._collected(loans, slots, params, shared)

    def eval_params(self, params: Leaves, slots: Slots) -> Leaves:
        """The parameters to evaluate with, of a class whose `eval` method says which they are (schedule-free ones).

        Args:
            params: the parameters that are trained.
            slots: this optimizer's own level of `opt_state`.

        Raises:
            TypeError: the class has no method `eval`.
        """
        if not callable(getattr(self.cls, "eval", None)):
            raise TypeError(f"{self.name} evaluates with the parameters it trains: it has no method eval")
        names = [name for name in params if name in slots.get(_STARTED, {})]
        with torch.no_grad():
            loans = self._lend(names, slots, params, copy=True)
            optimizer, _ = self._assemble(loans, slots, 0)
            optimizer.eval()  # type: ignore[attr-defined]
            for loan in loans:
                self._keep(loan.leaf, loan.param)
        return {**params, **{loan.name: loan.leaf for loan in loans}}

    def _group_of(self, name: str) -> int:
        """Number of a parameter's group: 0 for those without options of their own."""
        return _first_match(tuple(glob for glob, _ in self.groups), name) if self.groups else 0

    def _probe(self, group: int, leaf: Tensor) -> Probe:
        key = (group, tuple(leaf.shape), leaf.dtype, leaf.device.type)
        if key not in self._probes:
            arguments = inspect.signature(self.cls).parameters
            probed = probe(lambda params: self._construct({group: params}, 0), leaf, self.name, arguments)
            for kept in probed.layout.leaves:
                if kept.name in (_STARTED, _GROUPS):
                    raise TypeError(f"{self.name} cannot be lifted: it keeps {kept.name!r}, a name of from_torch's own")
                if self.elementwise and kept.shape not in (tuple(leaf.shape), (), (1,)):
                    raise TypeError(
                        f"{self.name} keeps {kept.name!r} of shape {kept.shape} for a parameter of shape "
                        f"{tuple(leaf.shape)}, so it is not elementwise; lift it with elementwise=False"
                    )
            if "lr" in probed.group and (callable(self.lr) or any(callable(o.get("lr")) for _, o in self.groups)):
                raise TypeError(f"{self.name} changes its learning rate itself: give a number for it, not a schedule")
            self._probes[key] = probed
        return self._probes[key]

    def _construct(self, groups: Mapping[int, list[Tensor]], step: Any) -> torch.optim.Optimizer:
        """The optimizer of these parameters by group, as it is before its first step."""
        param_groups = []
        for number, params in groups.items():
            own = dict(self.groups[number - 1][1]) if number else {}
            if "lr" in own:
                own["lr"] = _number(value_at(own["lr"], step))
            param_groups.append({"params": params, **own})
        lr = {} if self.lr is None else {"lr": _number(value_at(self.lr, step))}
        optimizer = self.cls(param_groups, **lr, **self.options)
        train = getattr(optimizer, "train", None)
        if callable(train):
            train()
        return optimizer

    def _lend(self, names: Sequence[str], slots: Slots, params: Leaves, *, copy: bool) -> list[_Loan]:
        """Parameters and state for an optimizer to overwrite."""
        own = copies_of if copy else list
        loans = []
        for name, leaf in zip(names, own([params[name] for name in names]), strict=True):
            group = self._group_of(name)
            layout = self._probe(group, params[name]).layout
            kept_names = [kept.name for kept in layout.leaves]
            for slot in (*kept_names, *((_STARTED,) if kept_names else ())):
                if name not in slots.get(slot, {}):
                    self.check_slot(slot, slots, [name])
            kept = dict(zip(kept_names, own([slots[slot][name] for slot in kept_names]), strict=True))
            loans.append(_Loan(name, group, layout, leaf, nn.Parameter(self._seen(leaf)), kept))
        return loans

    def _assemble(self, loans: Sequence[_Loan], slots: Slots, step: Any) -> tuple[torch.optim.Optimizer, list[int]]:
        """An optimizer in the state of `slots`, and the numbers of its groups."""
        by_group: dict[int, list[Tensor]] = {}
        for loan in loans:
            by_group.setdefault(loan.group, []).append(loan.param)
        numbers = sorted(by_group)
        optimizer = self._construct({number: by_group[number] for number in numbers}, step)
        started = _read([slots[_STARTED][loan.name] for loan in loans if loan.slots])
        flags = dict(zip([loan.name for loan in loans if loan.slots], started, strict=True))
        for number, group in zip(numbers, optimizer.param_groups, strict=True):
            kept = slots.get(_GROUPS, {}).get(str(number), {})
            for key, value in kept.items():
                first = next(loan for loan in loans if loan.group == number)
                was = self._probe(number, first.leaf).group[key]
                group[key] = value.clone() if isinstance(was, Tensor) else type(was)(value.item())
        for loan, state in zip(loans, self._states(loans, optimizer), strict=True):
            if flags.get(loan.name):
                optimizer.state[loan.param] = state
        return optimizer, numbers

    def _states(self, loans: Sequence[_Loan], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """What the class keeps for each parameter, made of its slots. Numbers are fetched from a device at once."""
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        rows = [(loan, kept) for loan in loans for kept in loan.layout.leaves]
        numbers = [(loan, kept) for loan, kept in rows if kept.kind is not Tensor]
        read = _read([loan.slots[kept.name] for loan, kept in numbers])
        values = {(loan.name, kept.name): kept.kind(number) for (loan, kept), number in zip(numbers, read, strict=True)}
        # As in torch's own load_state_dict: counts of steps are read on the host, unless the kernel reads them.
        steps = [(loan, kept) for loan, kept in rows if kept.kind is Tensor and kept.name == "step" and not kept.shape]
        if steps and not on_device and not steps[0][0].slots["step"].is_cpu:
            on_host = torch.stack([loan.slots["step"] for loan, _ in steps]).cpu().unbind()
            values.update({(loan.name, "step"): value for (loan, _), value in zip(steps, on_host, strict=True)})
        states = []
        for loan in loans:
            state = {kept.name: values.get((loan.name, kept.name)) for kept in loan.layout.leaves}
            seen = {name: self._seen(loan.slots[name]) if value is None else value for name, value in state.items()}
            states.append(loan.layout.unflatten(seen))
        return states

    def _step(self, optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> None:
        """Step it, and raise if something changes that no probe has shown."""
        skips = [{"params", *self._moving(number)} for number in numbers]
        groups = [snapshot(group, skip) for group, skip in zip(optimizer.param_groups, skips, strict=True)]
        attributes = snapshot(vars(optimizer), TORCHS_OWN)
        optimizer.step()
        lost = changed(attributes, vars(optimizer), TORCHS_OWN)
        for before, group, skip in zip(groups, optimizer.param_groups, skips, strict=True):
            lost += changed(before, group, skip)
        if lost:
            raise TypeError(
                f"{self.name} cannot be lifted: this step changed {', '.join(lost)}, which its first two do not, so "
                "that no state holds it"
            )

    def _moving(self, number: int) -> set[str]:
        """Options of a group that steps change."""
        return {key for (group, *_), probed in self._probes.items() if group == number for key in probed.group}

    def _take_back(self, loan: _Loan, state: Mapping[str, Any]) -> None:
        """Write what the optimizer has made into what was lent to it."""
        self._keep(loan.leaf, loan.param)
        values = loan.layout.flatten(state)
        if values is None or any(self._unlike(values[name], leaf) for name, leaf in loan.slots.items()):
            raise TypeError(
                f"{self.name} cannot be lifted: what it keeps for {loan.name!r} is laid out otherwise than two "
                f"steps on a stand-in have shown: {some(state)} instead of {some(loan.slots)}"
            )
        for name, leaf in loan.slots.items():
            if isinstance(values[name], Tensor):
                self._keep(leaf, values[name])
            else:
                leaf.fill_(values[name])

    def _shared(self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], slots: Slots) -> dict[str, Any]:
        """The values that the groups keep, after a step."""
        shared = dict(slots.get(_GROUPS, {}))
        for number, group in zip(numbers, optimizer.param_groups, strict=True):
            kept = shared.get(str(number), {})
            made = {key: _stored(group[key], value.device) for key, value in kept.items()}
            for key, value in kept.items():
                if (made[key].dtype, made[key].shape) != (value.dtype, value.shape):
                    raise TypeError(
                        f"{self.name} cannot be lifted: it changed {key!r} in its param_groups from {value!r} to "
                        f"{made[key]!r}, which is of another type or shape"
                    )
            shared.update({str(number): made} if made else {})
        return shared

    def _collected(
        self, loans: Sequence[_Loan], slots: Slots, params: Leaves, shared: dict[str, Any]
    ) -> tuple[Leaves, Slots]:
        new_params, new_slots = dict(params), {slot: dict(kept) for slot, kept in slots.items()}
        for loan in loans:
            new_params[loan.name] = loan.leaf
            for slot, leaf in loan.slots.items():
                new_slots[slot][loan.name] = leaf
            if loan.slots:
                new_slots[_STARTED][loan.name] = torch.ones_like(slots[_STARTED][loan.name])
        return new_params, {**new_slots, _GROUPS: shared} if shared else new_slots

    def _zeros(self, kept: Kept, leaf: Tensor) -> Tensor:
        """A slot before the class has made its state."""
        if kept.kind is not Tensor or kept.shape != tuple(leaf.shape):
            return torch.zeros(kept.shape, dtype=kept.dtype, device=leaf.device)
        if kept.dtype == leaf.dtype:
            return filled_like(leaf, 0.0)
        local = torch.zeros_like(local_tensor(leaf).detach(), dtype=kept.dtype)
        return from_local(local, _spec(leaf, kept.dtype)) if is_dtensor(leaf) else local

    def _seen(self, leaf: Tensor) -> Tensor:
        """What the class gets to see of a leaf: this rank's shard, or the whole of it; contiguous."""
        return local_tensor(leaf).detach().contiguous() if self.elementwise else whole(leaf)

    def _keep(self, leaf: Tensor, value: Tensor) -> None:
        """Write into `leaf` what the class made of what it saw, unless it is there already."""
        value = value.detach()
        if not self.elementwise:
            keep(leaf, value)
        elif not _shares(value, leaf):
            local_tensor(leaf).detach().copy_(value)

    def _unlike(self, value: Any, leaf: Tensor) -> bool:
        """Whether a tensor that the class made does not fit the leaf it is kept in."""
        shape = local_tensor(leaf).shape if self.elementwise else leaf.shape
        return isinstance(value, Tensor) and (value.shape != shape or value.dtype != leaf.dtype)

    def __hash__(self) -> int:
        options = [tuple(options.items()) for options in (self.options, *(own for _, own in self.groups))]
        return hash((self.cls, self.lr, tuple(options), self.elementwise))

    def __repr__(self) -> str:
        lr = {} if self.lr is None else {"lr": self.lr}
        groups = {"groups": dict(self.groups)} if self.groups else {}
        arguments = {**lr, **self.options, **groups, "elementwise": self.elementwise}
        return f"from_torch({self.name}, {', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


@dataclass(frozen=True)
class _Loan:
    """What an optimizer is given to overwrite for one parameter."""

    name: str
    group: int
    layout: Layout
    leaf: Tensor
    """The parameter, placed as in the state."""
    param: nn.Parameter
    """What the class sees of it."""
    slots: dict[str, Tensor]
    """The state of it by name, placed as in the state."""


_RANDOM = Key(b"ps.from_torch\0\0\0")
"""Where the random numbers of classes come from that draw some: the same on every rank and when a step is repeated."""


def _stored(value: Any, device: torch.device | str) -> Tensor:
    """A value that a group keeps, as a leaf."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return torch.tensor(value, dtype=NUMBERS[type(value)], device=device)


def _read(tensors: Sequence[Tensor]) -> list[Any]:
    """0-d tensors as Python numbers, fetched at once for each dtype."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    numbers: list[Any] = [None] * len(tensors)
    for rows in by_dtype.values():
        for i, number in zip(rows, torch.stack([tensors[i] for i in rows]).tolist(), strict=True):
            numbers[i] = number
    return numbers


@functools.lru_cache(maxsize=65536)
def _first_match(globs: tuple[str, ...], name: str) -> int:
    """Number of the first glob that matches, from 1; 0 if none does."""
    return next((i for i, glob in enumerate(globs, 1) if pattern(glob).fullmatch(name)), 0)


def _number(lr: Any) -> Any:
    return lr.item() if isinstance(lr, Tensor) else lr


def _shares(value: Tensor, leaf: Tensor) -> bool:
    """Whether `value` is the memory of `leaf` on this rank."""
    local = local_tensor(leaf)
    return value.data_ptr() == local.data_ptr() and value.shape == local.shape and value.stride() == local.stride()


def _spec(leaf: Tensor, dtype: torch.dtype) -> Any:
    """The DTensor spec of a leaf placed like `leaf` in another dtype."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = leaf._spec  # type: ignore[attr-defined]
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(leaf.shape, leaf.stride(), dtype))

"""The engine of shards: FSDP2 units, with the state's own shards bound in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from purestep.sharding import _fsdp
from purestep.sharding.engines import Engine, Session
from purestep.sharding.leaves import ModuleLeaves
from purestep.sharding.lockstep import Lockstep
from purestep.sharding.norms import compute_in_fp32
from purestep.sharding.plan import Plan, PlanUnit
from purestep.sharding.runtime import Runtime
from purestep.state.placement import is_dtensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_engines = itertools.count()  # made in one order on all ranks


class FSDPEngine(Engine):
    """Shards of the state: FSDP2 units, with the state's own shards bound in.

    Parameters that the plan ignores are whole on every rank: bound as the local engine binds them, their gradients
    averaged over the ranks at the end of a step.
    """

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime, plan: Plan):
        super().__init__(model, leaves, runtime)
        ignored = {param.name for unit in plan.units for param in unit.params if param.ignored}
        self._places = [
            (slot.module._parameters, slot.attr, name)
            for name, leaf in leaves.params.items()
            if name in ignored
            for slot in leaf.slots
        ]
        self._policy = runtime.config.gradient_accumulation.policy
        units = _fully_shard(model, plan, runtime, {table[attr] for table, attr, _ in self._places})  # type: ignore[misc]
        _fsdp.leave_meta(model, runtime.device)
        by_id = _fsdp.fsdp_params(model)
        self.params = {
            name: by_id[id(leaf.slots[0].module._parameters[leaf.slots[0].attr])]
            for name, leaf in leaves.params.items()
            if name not in ignored
        }
        self._bound: dict[str, Tensor | None] = dict.fromkeys(self.params)
        self._whole: dict[str, Tensor] = {}  # the ignored parameters, while they are differentiated
        self._asked: Any = None  # a message on its way, whose answer is not needed
        self._root: FSDPModule = model  # type: ignore[assignment]
        store = torch.distributed.distributed_c10d._get_default_store()
        prefixed = torch.distributed.PrefixStore(f"purestep/lockstep/{next(_engines)}", store)
        self._lockstep = Lockstep(prefixed, runtime.rank, runtime.world_size)
        names = {id(param): name for name, param in self.params.items()}
        self._groups: dict[str, list[_fsdp.Group]] = {
            path: [_fsdp.Group(path, group, names, self._lockstep.note) for group in _fsdp.groups_of(unit)]
            for path, unit in units.items()
        }
        for path, unit in units.items():
            unit.register_forward_pre_hook(self._forward_of(path), prepend=True)  # type: ignore[attr-defined]
            unit.register_forward_hook(lambda module, args, output: _fsdp.hook_hidden_outputs(module, output))  # type: ignore[attr-defined]
        for method in ("forward", *plan.forward_methods):
            self._watch(method)

    @contextmanager
    def applying(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool
    ) -> Iterator[Session]:
        self._refuse_grad(params)
        with torch.no_grad(), super().applying(params, buffers, train=train) as session:
            yield session

    @contextmanager
    def bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Iterator[None]:
        self._refuse_nesting()
        for name, param in self.params.items():
            leaf = params[name]
            if leaf is not self._bound[name]:
                self._check(name, leaf, param.sharded_param)
                self._bound[name] = leaf if _fsdp.bind(param, leaf) else None
        for group in itertools.chain(*self._groups.values()):
            group.used.clear()
            group.pending = False
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
        self._entered = False
        self._lockstep.begin((grad, self._train))
        try:
            with self._whole_bound(params, grad=grad):
                yield
            self._lockstep.end()
        except BaseException as error:
            self._lockstep.abandon()
            if "DTensor" in str(error):
                error.add_note(self._advice_on_dtensors())
            _fsdp.recover(self.model)
            raise
        _fsdp.reshard(self.model)

    def window(self, *, last: bool) -> Any:
        if self._policy == "defer_all":
            self._root.set_requires_gradient_sync(last)
        elif self._policy == "defer_all_reduce":
            self._root.set_requires_all_reduce(last)
        return super().window(last=last)

    def backward(self, total: Tensor, *, last: bool) -> None:
        self._refuse_bypass()
        total.backward()
        if last:
            lost = next(filter(None, (group.lost() for group in itertools.chain(*self._groups.values()))), None)
            if lost is not None:
                raise RuntimeError(
                    f"the gradient of {lost!r} was not reduced over ranks: its weights were used outside of the call "
                    "of its unit; let the module that uses them belong to the same unit"
                )

    def gradients(self) -> dict[str, Tensor]:
        used = {name for groups in self._groups.values() for group in groups for name in group.used}
        used |= {name for name, leaf in self._whole.items() if leaf.grad is not None}
        used = self._used_anywhere(used)
        sharded = _fsdp.take_gradients(self.params.items())
        whole = self._mean_of_whole([name for name in self._whole if name in used])
        found = {**sharded, **whole}
        return {name: found[name] for name in self.trainable if name in used}

    def _used_anywhere(self, used: set[str]) -> set[str]:
        """Of the trainable parameters, those that some rank used; `used` is what this one did.

        One that some ranks used has the mean with zeros for the others as its gradient; one that none did has none.
        """
        flags = torch.tensor([float(name in used) for name in self.trainable], device=self.runtime.device)
        work = torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, async_op=True)
        if len(used) == len(self.trainable):  # the others cannot add to that: no need to wait for them here
            self._asked = work
            return used
        work.wait()
        return {name for name, flag in zip(self.trainable, flags.tolist(), strict=True) if flag}

    def abstract_params(self) -> dict[str, Tensor]:
        whole = super().abstract_params()
        return {name: _fsdp.abstract(self.params[name]) if name in self.params else whole[name] for name in whole}

    @contextmanager
    def _whole_bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Iterator[None]:
        """Context in which the ignored parameters are those of the state."""
        if not self._places:
            yield
            return
        bound: dict[str, Tensor] = {}
        for _, _, name in self._places:
            if is_dtensor(params[name]):
                raise TypeError(f"params[{name!r}] is a DTensor, but this module keeps it whole on every rank")
            trained = grad and name in self.trainable
            bound[name] = params[name].detach().requires_grad_() if trained else params[name].detach()
        self._whole = {name: leaf for name, leaf in bound.items() if leaf.requires_grad}
        old = [table[attr] for table, attr, _ in self._places]
        try:
            for table, attr, name in self._places:
                table[attr] = bound[name]  # type: ignore[assignment]
            yield
        finally:
            self._whole = {}
            for (table, attr, _), tensor in zip(self._places, old, strict=True):
                table[attr] = tensor

    def _mean_of_whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The mean over ranks of the gradients of ignored parameters."""
        grads: dict[str, Tensor] = {}
        for name in names:
            own = self._whole[name].grad
            grads[name] = torch.zeros_like(self._whole[name]) if own is None else own
        for dtype in {grad.dtype for grad in grads.values()}:
            same = [grad for grad in grads.values() if grad.dtype == dtype]
            flat = torch.cat([torch.view_as_real(x).reshape(-1) if x.is_complex() else x.reshape(-1) for x in same])
            flat = self.runtime.all_reduce(flat.to(torch.promote_types(flat.dtype, torch.float32)))
            flat /= self.runtime.world_size
            start = 0
            for grad in same:
                size = grad.numel() * (2 if grad.is_complex() else 1)
                piece = flat[start : start + size]
                piece = torch.view_as_complex(piece.view(-1, 2)) if grad.is_complex() else piece
                grad.copy_(piece.view_as(grad))
                start += size
        return grads

    def _forward_of(self, path: str) -> Callable[..., None]:
        """A hook for the forward of a unit, before it is gathered."""
        event = f"forward of unit {path!r}" if path else "forward of the root unit"

        def before_forward(*_: Any) -> None:
            self._lockstep.note(event)
            if torch.is_grad_enabled():
                for group in self._groups[path]:
                    group.pending = True

        return before_forward

    def _watch(self, method: str) -> None:
        """Note calls of `model.method`."""
        original = getattr(self.model, method)
        before = self._forward_of("") if method != "forward" else lambda: None  # forward has the root's own hook

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._entered = True
            before()
            return original(*args, **kwargs)

        self.model.__dict__[method] = watched

    def _advice_on_dtensors(self) -> str:
        if not self._entered:
            return f"parameters were used without calling the model; {self._entry_advice()}"
        return (
            "a parameter was used while its unit was not gathered: a unit is gathered when it is called; let a module "
            "whose weights others use belong to the unit that uses them (change the rule that takes it)"
        )

    def _check(self, name: str, leaf: Tensor, expected: Any) -> None:
        kind = self.runtime.topology.kind
        if not is_dtensor(leaf):
            raise TypeError(
                f"params[{name!r}] is a plain tensor, but this module is {kind}: its states hold DTensors; "
                "make them with ps.init(module, ...) or ps.restore(path, ps.abstract_state(module, ...))"
            )
        given = (tuple(leaf.shape), leaf.dtype, leaf.placements, leaf.device_mesh)  # type: ignore[attr-defined]
        wanted = (tuple(expected.shape), expected.dtype, expected.placements, expected.device_mesh)
        if given != wanted:
            raise ValueError(f"params[{name!r}] does not fit this {kind} module: got {given}, expected {wanted}")


def _fully_shard(model: nn.Module, plan: Plan, runtime: Runtime, ignored: set[nn.Parameter]) -> dict[str, FSDPModule]:
    """Make the plan's units FSDP2 modules, children first. By path, in the plan's order."""
    compute_in_fp32(model, plan)
    modules = dict(model.named_modules())
    for unit in sorted(plan.units, key=lambda unit: -unit.path.count(".") if unit.path else 1):
        fully_shard(
            modules[unit.path],
            mesh=runtime.mesh,
            reshard_after_forward=unit.settings.reshard_after_forward,
            mp_policy=_precision(unit, autocast=runtime.config.mixed_precision != "no"),
            offload_policy=_offload(unit, runtime),
            ignored_params=ignored or None,
        )
    for method in plan.forward_methods:
        register_fsdp_forward_method(model, method)
    units: dict[str, FSDPModule] = {unit.path: modules[unit.path] for unit in plan.units}
    _prefetch(plan, units)
    return units


def _precision(unit: PlanUnit, *, autocast: bool) -> MixedPrecisionPolicy:
    asked = unit.settings
    own = {param.dtype for param in unit.params}
    # None where nothing is to be cast: parameters of other dtypes than fp32 keep theirs.
    param_dtype = None if asked.param_dtype == "fp32" else _DTYPES[asked.param_dtype]
    reduce_dtype = None if asked.reduce_dtype == "fp32" and param_dtype is None else _DTYPES[asked.reduce_dtype]
    if own and own <= {"float64", "complex64", "complex128"}:
        reduce_dtype = None if param_dtype is None else reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=None if asked.output_dtype is None else _DTYPES[asked.output_dtype],
        cast_forward_inputs=not autocast,  # autocast has its own rules
    )


def _offload(unit: PlanUnit, runtime: Runtime) -> OffloadPolicy:
    if not unit.settings.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=runtime.device.type == "cuda")


def _prefetch(plan: Plan, units: Mapping[str, FSDPModule]) -> None:
    """Which units are gathered ahead of each: the next ones in forward, those before it in backward."""
    inner = [unit for unit in plan.units if unit.path]
    for i, unit in enumerate(inner):
        ahead = unit.settings.prefetch
        if ahead is None:
            continue
        module = units[unit.path]
        after = [units[other.path] for other in inner[i + 1 : i + 1 + ahead]]
        before = [units[other.path] for other in reversed(inner[max(0, i - ahead) : i])]
        module.set_modules_to_forward_prefetch(after)
        # An empty list would mean FSDP2's own choice, which is one unit ahead. A unit does not gather itself twice.
        module.set_modules_to_backward_prefetch(before or [module])

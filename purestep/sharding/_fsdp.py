"""The private parts of FSDP2 that zero-copy binding and exact gradients need, all behind this module.

`FSDPParam` keeps a parameter's shard twice: as the DTensor parameter of the module (`sharded_param`) and as the flat,
padded storage that all-gathers read (`_sharded_param_data`). Pointing both at a state's shard binds it in two
assignments; the public way, `load_state_dict(assign=True)`, does the same through a new Parameter and about 45 us.

`FSDPParamGroup`, the parameters of a unit, runs `pre_backward` and `post_backward` around the backward of the unit. The
second reduces what has a gradient on this rank; `Group` makes that every parameter of the unit, so that ranks which use
different ones reduce the same message.

tests/distributed/test_fsdp_canaries.py fails by name if a torch release changes what is relied on here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed.fsdp._common_utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from purestep.state.placement import empty_leaf, from_local, local_tensor


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """The FSDP2 units of `root`, parents first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def fsdp_params(root: nn.Module) -> dict[int, Any]:
    """`FSDPParam` by the id of its sharded parameter."""
    return {id(param.sharded_param): param for group in _groups(root) for param in group.fsdp_params}


def leave_meta(root: nn.Module, device: torch.device) -> None:
    """Give meta-device parameters an identity on `device`, which a DTensor keeps from its birth, but no values yet."""
    for group in _groups(root):
        for param in group.fsdp_params:
            old = param.sharded_param
            if old.is_meta:
                place = torch.device("cpu") if param.offload_to_cpu else device
                new = nn.Parameter(empty_leaf(old, place), requires_grad=old.requires_grad)
                param.sharded_param = new
                param._setattr_on_modules(new)
                param.reset_sharded_param()
                # Nothing reads it before `bind` puts a state's shard in its place.
                param._sharded_param_data.untyped_storage().resize_(0)


def bind(param: Any, leaf: Tensor) -> bool:
    """Make FSDP compute with the shard of `leaf`, a DTensor placed as `param` is.

    Returns:
        Whether memory is shared. It is not when an uneven shard lacks the padding behind it: then FSDP has a copy.
    """
    local = local_tensor(leaf)
    size = math.prod(param.padded_sharded_param_size)
    shared = local.is_contiguous() and _room(local) >= size
    if not shared:
        padded = local_tensor(empty_leaf(leaf))
        padded.copy_(local)
        local = padded
    flat = local.as_strided((size,), (1,))
    param.sharded_param._local_tensor = local
    param._sharded_param_data = flat
    return shared


def abstract(param: Any) -> Tensor:
    """The parameter as a meta DTensor."""
    local = local_tensor(param.sharded_param)
    return from_local(torch.empty(local.shape, dtype=local.dtype, device="meta"), param.sharded_param._spec)


def take_gradients(params: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """The sharded gradients backward left, removed from the module; a parameter without one is absent."""
    grads = {}
    for name, param in params:
        grad = param.sharded_param.grad
        if grad is not None:
            grads[name] = grad
            param.sharded_param.grad = None
    return grads


def reshard(root: nn.Module) -> None:
    """Free every gathered parameter, so that nothing stale can be computed with after a rebind."""
    for group in _groups(root):
        _drop_prefetched(group)
    for module in fsdp_modules(root):
        module.reshard()


def _drop_prefetched(group: Any) -> None:
    """A unit that was gathered ahead but did not run would compute with that when it runs next, with another state."""
    result = group._all_gather_result
    if result is not None:
        if hasattr(result.all_gather_work, "wait"):
            result.all_gather_work.wait()
        if result.all_gather_event is not None:
            torch.get_device_module(group.device).current_stream().wait_event(result.all_gather_event)
        group._all_gather_result = None


def recover(root: nn.Module) -> None:
    """Put a module whose forward or backward raised back into a usable state."""
    for module in fsdp_modules(root):
        # torch >= 2.13 has it. Before the first forward there is nothing to reset, and it would fail.
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root is not None:
            module.reset_iter_state()
            break
    for group in _groups(root):
        for param in group.fsdp_params:
            param.sharded_param.grad = None
            param.unsharded_accumulated_grad = None
            group._partial_reduce_output = None
            # reset_iter_state leaves what an aborted backward did not reduce yet: the next one would add to it.
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
    reshard(root)


class Group:
    """The parameters of one unit as backward sees them: what it does is announced, and they are reduced all or none."""

    def __init__(self, path: str, group: Any, names: Mapping[int, str], announce: Callable[[str], None]):
        """
        Args:
            path: of the unit.
            group: its `FSDPParamGroup`.
            names: leaf name by the id of a `FSDPParam`.
            announce: called with what is about to happen, before it does.
        """
        self.used: set[str] = set()
        """Names of the parameters that had a gradient on this rank, since it was emptied."""
        self.pending = False
        """Whether the unit ran forward since its gradients were last reduced over all ranks."""
        self._unit = f"unit {path!r}" if path else "the root unit"
        self._group = group
        self._params = [(names[id(param)], param) for param in group.fsdp_params]
        self._announce = announce
        self._pre_backward, self._post_backward = group.pre_backward, group.post_backward
        group.pre_backward, group.post_backward = self._before_backward, self._after_backward

    def lost(self) -> str | None:
        """A parameter whose gradient stayed on this rank, if there is one."""
        for name, param in self._params:
            if param.unsharded_accumulated_grad is not None or _whole_grad(param) is not None:
                return name
        return None

    def _before_backward(self, *args: Any) -> None:
        if self._group._training_state.name != "PRE_BACKWARD":
            self._announce(f"backward of {self._unit}")
        self._pre_backward(*args)

    def _after_backward(self, *args: Any) -> None:
        self._announce(f"reduction of {self._unit}")
        self.used.update(
            name
            for name, param in self._params
            if param.unsharded_accumulated_grad is not None or _whole_grad(param) is not None
        )
        if self.pending and self._group.reduce_grads:
            self._complete()
            self.pending = not self._group.all_reduce_grads
        self._post_backward(*args)

    def _complete(self) -> None:
        """Give every trainable parameter a gradient, all in one dtype."""
        params = [p for _, p in self._params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
        # After microbatches without reduction some are partial sums in the reduce dtype, others were used first now.
        sums = any(param.unsharded_accumulated_grad is not None for param in params)
        for param in params:
            grad = param._unsharded_param.grad
            if sums and param.unsharded_accumulated_grad is None:
                dtype = param.reduce_dtype or param._unsharded_param.dtype
                zeros = torch.zeros_like(param._unsharded_param, dtype=dtype, requires_grad=False)
                param.unsharded_accumulated_grad = zeros if grad is None else grad.to(dtype)
                param._unsharded_param.grad = None
            elif not sums and grad is None:
                param._unsharded_param.grad = torch.zeros_like(param._unsharded_param, requires_grad=False)


def groups_of(module: FSDPModule) -> Iterator[Any]:
    """The `FSDPParamGroup`s of one unit."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.13
    yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def hook_hidden_outputs(module: FSDPModule, output: Any) -> None:
    """Have backward through tensors that FSDP did not find in an output gather the unit as the others do."""
    if torch.is_grad_enabled() and type(output) is not Tensor:
        before_backward = module._get_fsdp_state()._pre_backward
        for tensor in hidden_tensors(output):
            tensor.register_hook(before_backward)


def hidden_tensors(output: Any, *, opaque: bool = False, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors with a gradient inside objects of an output that FSDP does not look into."""
    seen = set() if seen is None else seen
    if id(output) in seen or output is None or isinstance(output, _PLAIN):
        return
    seen.add(id(output))
    if isinstance(output, Tensor):
        if opaque and output.requires_grad:
            yield output
        return
    inside: list[Any] = []
    if isinstance(output, Mapping):
        inside += output.values()
    elif isinstance(output, list | tuple | set | frozenset):
        opaque = opaque or isinstance(output, set | frozenset)
        inside += output
    else:
        opaque = opaque or not (_LOOKS_INTO_DATACLASSES and dataclasses.is_dataclass(output))
        slots = (name for cls in type(output).__mro__ for name in getattr(cls, "__slots__", ()) if name != "__dict__")
        inside += [*vars(output).values()] if hasattr(output, "__dict__") else []
        inside += [getattr(output, name) for name in slots if hasattr(output, name)]
    for item in inside:
        yield from hidden_tensors(item, opaque=opaque, seen=seen)


_PLAIN = (str, bytes, bool, int, float, complex, torch.dtype, torch.device, nn.Module, type, ModuleType, FunctionType)
_LOOKS_INTO_DATACLASSES = hasattr(torch.distributed.fsdp._common_utils, "collect_grad_tensors")  # since torch 2.13


def _whole_grad(param: Any) -> Tensor | None:
    return param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None


def _groups(root: nn.Module) -> Iterator[Any]:
    for module in fsdp_modules(root):
        yield from groups_of(module)


def _room(local: Tensor) -> int:
    """Elements from the first of `local` to the end of its storage."""
    return int(local.untyped_storage().nbytes() // local.element_size() - local.storage_offset())

"""The private parts of FSDP2 that zero-copy binding needs, all behind this module.

`FSDPParam` keeps a parameter's shard twice: as the DTensor parameter of the module (`sharded_param`) and as the flat,
padded storage that all-gathers read (`_sharded_param_data`). Pointing both at a state's shard binds it in two
assignments; the public way, `load_state_dict(assign=True)`, does the same through a new Parameter and about 45 us.
tests/distributed/test_fsdp_canaries.py fails by name if a torch release changes what is relied on here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
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
                new = nn.Parameter(empty_leaf(old, device), requires_grad=old.requires_grad)
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
    for module in fsdp_modules(root):
        module.reshard()


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
            # reset_iter_state leaves what an aborted backward did not reduce yet: the next one would add to it.
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
    reshard(root)


def _groups(root: nn.Module) -> Iterator[Any]:
    for module in fsdp_modules(root):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.13
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def _room(local: Tensor) -> int:
    """Elements from the first of `local` to the end of its storage."""
    return int(local.untyped_storage().nbytes() // local.element_size() - local.storage_offset())

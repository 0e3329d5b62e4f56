"""Where numbers stop being finite: a step is pure, so it can be run again and watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from purestep.functional.accumulation import accumulate as accumulate_gradients
from purestep.functional.gradients import Loss, call_loss, value_and_grad
from purestep.sharding.pure_module import PureModule
from purestep.state.collective import gather_objects
from purestep.state.keys import Key
from purestep.state.placement import local_tensor
from purestep.state.train_state import TrainState


@dataclass(frozen=True)
class NonFinite:
    """The first thing in a step that is not finite. `print` it."""

    step: int
    """The state's step."""
    what: str
    """`parameter`, `buffer`, `batch`, `output`, `loss` or `gradient`: in this order they are looked at."""
    name: str
    """Leaf of the state, path in the batch, or module path; "" for the loss, and for the root module."""
    rank: int
    """Where: the first rank, if several."""
    microbatch: int | None
    """Which microbatch; None for what does not belong to one."""
    num_nan: int
    """Elements that are NaN, of what this rank holds of it."""
    num_inf: int
    """Elements that are infinite."""

    def __str__(self) -> str:
        named = f" {self.name!r}" if self.name else " of the model" if self.what == "output" else ""
        window = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        count = f"{self.num_nan} nan, {self.num_inf} inf"
        return f"step {self.step}: {self.what}{named} has {count} (rank {self.rank}{window})"


def find_nonfinite(
    module: PureModule, loss: Loss, *, accumulate: int = 1
) -> Callable[[TrainState, Any], NonFinite | None]:
    """Replay the gradient of a step and say what is not finite first: `(state, batch) -> NonFinite | None`.

    Looked at in this order: parameters, buffers, the batch, the output of each module as it returns (so the innermost
    module that makes the first NaN or infinity is named), the loss, and the gradient of each parameter. The state is
    not changed, and random numbers are those of the step. Several times slower than the step. Collective where there
    are several processes; every rank gets the answer.

    Args:
        module: as given to the step.
        loss: as given to the step.
        accumulate: as given to the step.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False)))
    >>> state = ps.init(module, ps.sgd(0.1), ps.key(0)).replace(params={"0.weight": torch.ones(1, 1)})
    >>> find = ps.find_nonfinite(module, lambda model, x, key: model(x).sqrt().mean())
    >>> print(find(state, torch.ones(2, 1)))
    None
    >>> print(find(state, torch.zeros(2, 1)))
    step 0: gradient '0.weight' has 1 nan, 0 inf (rank 0)
    >>> print(find(state, torch.full((2, 1), 3e38) * torch.tensor([[1.0], [2.0]])))
    step 0: batch has 0 nan, 1 inf (rank 0)
    """
    runtime = module.runtime

    def find(state: TrainState, batch: Any) -> NonFinite | None:
        seen: list[tuple[str, str, int | None, Tensor]] = []
        watched = accumulate_gradients(value_and_grad(module, _watched(loss, seen)), accumulate)
        held = [("parameter", state.params), ("buffer", state.buffers)]
        for what, leaves in held:
            seen += [(what, name, None, local_tensor(leaf)) for name, leaf in leaves.items()]
        paths = pytree.tree_flatten_with_path(batch)[0]
        seen += [("batch", pytree.keystr(path), None, x) for path, x in paths if isinstance(x, Tensor)]
        first = _first(seen)
        seen.clear()
        scale = {"scale": 1.0} if runtime.config.mixed_precision == "fp16" else {}
        out = watched(state.params, state.buffers, batch, state.key.fold_in(state.step), **scale)
        grads = [("gradient", name, None, local_tensor(grad)) for name, grad in out.grads.items()]
        first = first or _first(seen) or _first(grads)
        return _agreed(state.step, first)

    return find


_ORDER = ("parameter", "buffer", "batch", "output", "loss", "gradient")
_Found = tuple[str, str, int | None, int, int]


def _watched(loss: Loss, seen: list[tuple[str, str, int | None, Tensor]]) -> Loss:
    """`loss`, noting (what, name, microbatch, tensor) of each module's output, and of the loss, if it is not finite."""
    calls = 0

    def watched(model: Any, batch: Any, key: Key) -> Any:
        nonlocal calls
        microbatch, calls = calls, calls + 1

        def note(what: str, name: str, value: Any) -> None:
            for x in pytree.tree_leaves(value):
                if isinstance(x, Tensor) and not seen and not _is_finite(x):
                    seen.append((what, name, microbatch, x.detach()))

        with _hooks(model, lambda name, output: note("output", name, output)):
            result = loss(model, batch, key)
        note("loss", "", call_loss(lambda *_: result, model, batch, key)[""])
        return result

    return watched


@contextmanager
def _hooks(model: nn.Module, note: Callable[[str, Any], None]) -> Iterator[None]:
    def hook_of(name: str) -> Callable[..., None]:
        return lambda module, arguments, output: note(name, output)

    handles = [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor.detach()).all())


def _first(seen: Sequence[tuple[str, str, int | None, Tensor]]) -> _Found | None:
    for what, name, microbatch, tensor in seen:
        if not _is_finite(tensor):
            num_nan, num_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            return what, name, microbatch, num_nan, num_inf
    return None


def _agreed(step: int, mine: _Found | None) -> NonFinite | None:
    """The first of all ranks': by what it is, then by microbatch, then by rank."""
    found: Mapping[int, _Found] = {rank: item for rank, item in enumerate(gather_objects(mine)) if item is not None}
    if not found:
        return None
    rank = min(found, key=lambda r: (_ORDER.index(found[r][0]), found[r][2] or 0, r))
    what, name, microbatch, num_nan, num_inf = found[rank]
    return NonFinite(step, what, name, rank, microbatch, num_nan, num_inf)

"""Every optimizer and gradient transform by name: what joins here gets the tests of test_properties.py and
tests/distributed/test_properties_ranks.py.

To join, add a line to `CASES`: a function without arguments that makes the optimizer or transform. Choose
hyperparameters with which 300 steps on a small quadratic converge. If its result depends on norms over shards, or on a
fused kernel, which round differently when a leaf is cut, add its name to `ROUNDED`; otherwise shards must give the same
bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep.functional.param_rules import ParamTable
from purestep.functional.transforms import GradientTransform


class CountingNormalized(torch.optim.Optimizer):
    """As third parties write them: Python numbers as state, a count in the group, a norm over all parameters, state
    that starts as a copy of the parameter, and state that is replaced instead of written."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr, "count": 0, "largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.float().square().sum() for p in used).sqrt().item() if used else 1.0
            group["largest"] = max(group["largest"], norm)
            group["count"] += 1
            for p in used:
                state = self.state[p]
                if not state:
                    state.update(steps=0, start=p.detach().clone(), pair=[torch.zeros_like(p), None])
                state["steps"] += 1
                state["pair"][0] = 0.9 * state["pair"][0] + p.grad / max(norm, 0.1)
                p.grad.zero_()  # some do
                p.data = p.data - group["lr"] * state["pair"][0]


DECAY = ps.linear(0.1, 0.0, 300)


def _adamw() -> Any:
    return ps.adamw(0.05, implementation="foreach")


def _is_vector(param: ps.Param) -> bool:
    return param.ndim < 2


CASES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: ps.adamw(0.05, implementation="foreach"),
    "adamw fused": lambda: ps.adamw(0.05, implementation="fused"),
    "adam amsgrad": lambda: ps.adam(0.05, amsgrad=True, weight_decay=0.01, implementation="foreach"),
    "sgd": lambda: ps.sgd(0.05),
    "sgd momentum": lambda: ps.sgd(0.02, momentum=0.9, nesterov=True, implementation="foreach"),
    "sgd dampening": lambda: ps.sgd(0.05, momentum=0.9, dampening=0.4, implementation="for-loop"),
    "adagrad": lambda: ps.adagrad(0.5, lr_decay=1e-3, weight_decay=1e-3, implementation="foreach"),
    "rmsprop": lambda: ps.rmsprop(DECAY, momentum=0.5, centered=True),
    "nadam": lambda: ps.nadam(0.05, decoupled_weight_decay=True, weight_decay=1e-3),
    "radam": lambda: ps.radam(0.05, implementation="for-loop"),
    "lion": lambda: ps.lion(DECAY, weight_decay=1e-3),
    "adafactor": lambda: ps.adafactor(ps.linear(1.0, 0.0, 300)),
    "muon": lambda: ps.muon(DECAY, owns=("blocks.**",), companion=ps.adamw(0.05, implementation="foreach")),
    "lifted AdamW": lambda: ps.from_torch(torch.optim.AdamW, lr=0.05, foreach=True),
    "lifted Rprop": lambda: ps.from_torch(torch.optim.Rprop, lr=0.05),
    "lifted ASGD": lambda: ps.from_torch(torch.optim.ASGD, lr=DECAY, groups={"**.bias": {"lr": 0.02}}),
    "lifted Adafactor": lambda: ps.from_torch(torch.optim.Adafactor, lr=ps.linear(1.0, 0.0, 300)),
    "lifted third-party": lambda: ps.from_torch(CountingNormalized, lr=DECAY),
    "chain": lambda: ps.chain(clip=ps.clip_by_global_norm(5.0), adamw=ps.adamw(DECAY, implementation="foreach")),
    "clip_by_global_norm": lambda: ps.clip_by_global_norm(5.0),
    "clip_by_value": lambda: ps.clip_by_value(2.0),
    "clip_by_group": lambda: ps.clip_by_group({"vectors": (_is_vector, 2.0), "blocks": ("blocks.**", 3.0)}),
    "scale": lambda: ps.scale(ps.linear(1.5, 0.5, 300)),
    "add_noise": lambda: ps.add_noise(ps.key(5), ps.linear(0.3, 0.0, 250)),
    "monitor_norms": lambda: ps.monitor_norms({"blocks": "blocks.**"}, params=True),
    "partition": lambda: ps.partition({"vectors": (_is_vector, ps.sgd(0.05)), "rest": ("**", _adamw())}),
    "freeze": lambda: ps.freeze(_adamw(), "scale"),
    "decay_mask": lambda: ps.decay_mask(ps.adamw(0.05, weight_decay=1e-3, implementation="foreach"), _TABLE),
    "skip_nonfinite": lambda: ps.skip_nonfinite(_adamw()),
    "lookahead": lambda: ps.lookahead(_adamw(), every=2),
    "with_ema": lambda: ps.with_ema(_adamw(), 0.99),
    "with_hyperparameters": lambda: ps.with_hyperparameters(ps.adamw, lr=0.05, eps=1e-8, implementation="foreach"),
    "wrappers": lambda: ps.chain(
        noise=ps.add_noise(ps.key(1), 1e-4), main=ps.skip_nonfinite(ps.lookahead(ps.with_ema(_adamw(), 0.9)))
    ),
}

if importlib.util.find_spec("schedulefree"):
    CASES["schedule_free adamw"] = lambda: ps.schedule_free("adamw", lr=0.1, warmup_steps=2)
    CASES["schedule_free sgd"] = lambda: ps.schedule_free("sgd", lr=0.1, foreach=False)

ROUNDED = {"adamw fused", "chain", "clip_by_global_norm", "clip_by_group"}
"""Cases whose result on shards equals the local one to rounding only."""

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (6, 4),
    "blocks.0.attn.weight": (5, 3),  # uneven on two ranks
    "blocks.0.attn.bias": (5,),
    "blocks.0.norm.weight": (3,),
    "blocks.0.one_row.weight": (1, 3),  # nothing on the second rank
    "conv.weight": (2, 3, 3, 2),
    "scale": (),
}
"""Parameters as models have them: matrices, vectors, a convolution, a scalar."""

_TABLE = ParamTable(tuple(ps.Param(name, shape) for name, shape in SHAPES.items()))

Leaves = dict[str, Tensor]


def is_transform(case: str) -> bool:
    """Whether the case only transforms gradients."""
    return GradientTransform in type(CASES[case]()).__mro__


def optimizer_of(case: str) -> Any:
    """The case as an optimizer: a transform in front of plain SGD."""
    made = CASES[case]()
    return ps.chain(tested=made, sgd=ps.sgd(0.05, implementation="foreach")) if is_transform(case) else made


def random_leaves(seed: int, dtype: torch.dtype = torch.float32) -> Leaves:
    """One random leaf for each of `SHAPES`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> Leaves:
    """The gradients of a step: all of them, but for one leaf at the second step and two at the third."""
    absent = {1: {"blocks.0.attn.bias"}, 2: {"embed.weight", "conv.weight"}}.get(step, set())
    return {name: leaf for name, leaf in random_leaves(100 + step, dtype).items() if name not in absent}


def run(optimizer: Any, params: Mapping[str, Tensor], steps: int = 4, **arguments: Any) -> tuple[Any, Any]:
    """Parameters and state after some updates from the first state."""
    opt_state = optimizer.init(params)
    return advance(optimizer, params, opt_state, range(steps), **arguments)


def advance(optimizer: Any, params: Any, opt_state: Any, steps: Any, **arguments: Any) -> tuple[Any, Any]:
    """Parameters and state after the updates of `steps`."""
    dtype = next(iter(params.values())).dtype
    for step in steps:
        params, opt_state = optimizer.update(gradients(step, dtype), opt_state, params, step=step, **arguments)
    return params, opt_state


def flat(tree: Any, prefix: str = "") -> Leaves:
    """Every tensor in a tree of mappings by its path."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {path: leaf for key, value in tree.items() for path, leaf in flat(value, f"{prefix}/{key}").items()}


def copied(tree: Any) -> Any:
    """The same tree in storage of its own, in the same layouts."""
    return {key: copied(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree.clone()


def bits(leaf: Tensor) -> Tensor:
    """The leaf as bytes: equal only when every bit is, the sign of zero and NaNs included."""
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)


def differences(got: Any, wanted: Any) -> list[str]:
    """Paths whose bits, shape or dtype differ, or which only one tree has."""
    ours, theirs = flat(got), flat(wanted)
    return sorted(ours.keys() ^ theirs.keys()) + [
        f"{path}: {theirs[path].dtype} {theirs[path].tolist()} became {leaf.dtype} {leaf.tolist()}"
        for path, leaf in ours.items()
        if path in theirs
        and (
            (leaf.shape, leaf.dtype) != (theirs[path].shape, theirs[path].dtype)
            or not torch.equal(bits(leaf), bits(theirs[path]))
        )
    ]

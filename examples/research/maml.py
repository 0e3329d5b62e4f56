"""Model-agnostic meta-learning (arXiv:1703.03400) of sines: `python examples/research/maml.py`.

The loss of a task is that after one step of gradient descent on five of its points; its gradient goes through that
step, second derivatives included. All of it is a loss function: the outer step is `ps.train_step`, accumulation and
donation come with it. Tasks are rows of a batch, so more processes (DDP) share them.
"""

from __future__ import annotations

import dataclasses

import torch
import tyro
from torch import Tensor, nn

import purestep as ps


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 600
    """Outer updates."""
    tasks: int = 16
    """Sines a batch, over all processes."""
    points: int = 5
    """Points of a sine that the inner step sees, and as many that it is judged by."""
    inner_lr: float = 0.05
    """Of the inner step."""
    lr: float = 3e-3
    """Of the outer one."""
    first_order: bool = False
    """Do not differentiate through the inner gradient."""
    seed: int = 0


def network(width: int = 32) -> nn.Module:
    """(points, 1) -> (points, 1)."""
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def sines(key: ps.Key, tasks: int, points: int) -> dict[str, Tensor]:
    """(tasks, 2 * points, 1) of x and of y = amplitude * sin(x + phase), by random amplitudes and phases."""
    generator = key.generator("cpu")
    amplitude = 0.5 + 1.5 * torch.rand(tasks, 1, 1, generator=generator)
    phase = torch.pi * torch.rand(tasks, 1, 1, generator=generator)
    x = 6 * torch.rand(tasks, 2 * points, 1, generator=generator) - 3
    return {"x": x, "y": amplitude * torch.sin(x + phase)}


def adapted(model: nn.Module, x: Tensor, y: Tensor, lr: float, *, create_graph: bool) -> dict[str, Tensor]:
    """The model's parameters after one step of gradient descent on a task's points."""
    params = dict(model.named_parameters())
    error = (torch.func.functional_call(model, params, (x,)) - y).square().mean()
    grads = torch.autograd.grad(error, list(params.values()), create_graph=create_graph)
    return {name: param - lr * grad for (name, param), grad in zip(params.items(), grads, strict=True)}


def maml_loss(config: Config) -> object:
    """Squared error after adaptation, and before it as a metric."""

    def loss(model: nn.Module, batch: dict[str, Tensor], key: ps.Key) -> tuple[ps.Mean, dict[str, ps.Mean]]:
        after, before, n = 0.0, 0.0, config.points
        for x, y in zip(batch["x"], batch["y"], strict=True):
            with torch.enable_grad():  # an evaluation adapts, too
                fast = adapted(model, x[:n], y[:n], config.inner_lr, create_graph=not config.first_order)
            after = after + (torch.func.functional_call(model, fast, (x[n:],)) - y[n:]).square().mean()
            before = before + (model(x[n:]) - y[n:]).square().mean().detach()
        return ps.Mean(after, len(batch["x"])), {"before": ps.Mean(before, len(batch["x"]))}

    return loss


def main(config: Config) -> dict[str, float]:
    module, key = ps.shard(network()), ps.key(config.seed)
    optimizer = ps.chain(clip=ps.clip_by_global_norm(10.0), adam=ps.adam(ps.warmup_cosine(config.lr, 20, config.steps)))
    state = ps.init(module, optimizer, key)
    step = ps.train_step(module, maml_loss(config), optimizer, donate=True)
    for i in range(config.steps):
        state, _ = step(state, sines(key.fold_in("train", i), config.tasks, config.points))
    grad_fn = ps.value_and_grad(module, maml_loss(config))  # of tasks that were not trained on; nothing is updated
    out = grad_fn(state.params, state.buffers, sines(key.fold_in("test"), 200, config.points), key)
    result = {"before": float(out.metrics["before"]), "after": float(out.loss)}
    print(f"squared error on new tasks: {result['before']:.3f} before one step, {result['after']:.3f} after")
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))

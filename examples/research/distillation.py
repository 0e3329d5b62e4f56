"""A small network learns from a large one: `python examples/research/distillation.py`.

The teacher is a module of its own, whose parameters travel in `TrainState.extra`: they are saved, restored and digested
with the student's, and no optimizer sees them. The step is composed by hand from `value_and_grad` and an optimizer.
Runs in every topology: `torchrun --nproc-per-node 2 examples/research/distillation.py --parallelism.dp-shard 2`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import purestep as ps


@dataclasses.dataclass(frozen=True)
class Config:
    teacher_steps: int = 150
    """Updates of the teacher on the labels."""
    steps: int = 300
    """Updates of the student on the teacher's answers."""
    temperature: float = 2.0
    """Softens the teacher's answers: what it takes for similar shows."""
    batch_size: int = 64
    seed: int = 0
    parallelism: ps.ParallelismConfig = dataclasses.field(default_factory=ps.ParallelismConfig)
    accelerator: ps.AcceleratorConfig = dataclasses.field(default_factory=ps.AcceleratorConfig)


def classifier(width: int) -> nn.Module:
    """(rows, 2) -> (rows, 3) logits."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def spirals(key: ps.Key, rows: int) -> dict[str, Tensor]:
    """Points (rows, 2) on three arms of a spiral, and which arm (rows,) each is on: a function of the key."""
    generator = key.generator("cpu")
    arm = torch.randint(3, (rows,), generator=generator)
    radius = torch.rand(rows, generator=generator)
    angle = 4 * radius + arm * (2 * torch.pi / 3) + 0.1 * torch.randn(rows, generator=generator)
    return {"x": torch.stack([radius * angle.cos(), radius * angle.sin()], 1), "arm": arm}


def label_loss(model: nn.Module, batch: dict[str, Tensor], key: ps.Key) -> tuple[ps.Mean, dict[str, ps.Mean]]:
    """Cross-entropy with the labels."""
    logits = model(batch["x"])
    right = (logits.argmax(1) == batch["arm"]).sum()
    loss = F.cross_entropy(logits, batch["arm"], reduction="sum")
    return ps.Mean(loss, len(logits)), {"accuracy": ps.Mean(right, len(logits))}


def distillation_step(student: ps.PureModule, teacher: ps.PureModule, optimizer: Any, temperature: float) -> Any:
    """A pure step: the student's answers move towards the teacher's."""

    def loss(model: nn.Module, batch: dict[str, Tensor], key: ps.Key) -> ps.Mean:
        ours = F.log_softmax(model(batch["x"]) / temperature, 1)
        return ps.Mean(F.kl_div(ours, batch["theirs"], reduction="sum") * temperature**2, len(ours))

    grad_fn = ps.value_and_grad(student, loss)

    def step(state: ps.TrainState, batch: dict[str, Tensor], *, donate: bool = False) -> tuple[ps.TrainState, dict]:
        logits, _ = teacher.apply(state.extra["teacher"], {}, batch["x"])
        theirs = F.softmax(logits.detach() / temperature, 1)
        out = grad_fn(state.params, state.buffers, {**batch, "theirs": theirs}, state.key.fold_in(state.step))
        params, opt_state = optimizer.update(out.grads, state.opt_state, state.params, step=state.step, inplace=donate)
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": out.loss.value}

    return step


def main(config: Config) -> dict[str, float]:
    with ps.start(config.parallelism, config.accelerator) as runtime:
        key = ps.key(config.seed)

        def batch(name: str, step: int) -> dict[str, Tensor]:
            rows = spirals(key.fold_in(name, step), config.batch_size)
            mine = slice(runtime.dp_rank, None, runtime.dp_size)
            return {name: x[mine].to(runtime.device) for name, x in rows.items()}

        teacher, student = (ps.shard(classifier(width), runtime=runtime) for width in (64, 16))
        optimizer = ps.adamw(ps.warmup_cosine(1e-2, 10, config.teacher_steps))
        taught = ps.init(teacher, optimizer, key.fold_in("teacher"))
        learn = ps.train_step(teacher, label_loss, optimizer, donate=True)
        for i in range(config.teacher_steps):
            taught, _ = learn(taught, batch("labels", i))
        test = [batch("test", i) for i in range(8)]
        accuracy = {"teacher": float(ps.evaluate(teacher, label_loss)(taught, test)["accuracy"])}

        optimizer = ps.adamw(ps.warmup_cosine(3e-2, 10, config.steps))
        # The teacher's values now belong to the student's state, which the step consumes: `taught` is not used again.
        state = ps.init(student, optimizer, key).replace(extra={"teacher": taught.params})
        step = ps.donate(distillation_step(student, teacher, optimizer, config.temperature))
        for i in range(config.steps):
            state, metrics = step(state, batch("distillation", i))
        accuracy["student"] = float(ps.evaluate(student, label_loss)(state, test)["accuracy"])
        said = f"loss {float(metrics['loss']):.4f}, accuracy {accuracy}, digest {state.digest()[:12]}"  # by all ranks
        if runtime.is_main:
            print(said)
        return {"loss": float(metrics["loss"]), **accuracy}


if __name__ == "__main__":
    main(tyro.cli(Config))

"""The research examples, shortened: they learn what they are about, and are what their docstrings say."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import purestep as ps

DIRECTORY = Path(__file__).parent.parent / "examples" / "research"
CPU = ps.AcceleratorConfig(device="cpu")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"research_{name}", DIRECTORY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.py")), ids=lambda path: path.stem)
def test_each_is_short(path):
    assert len(path.read_text().splitlines()) < 120


def test_a_student_learns_from_a_frozen_teacher():
    example = load("distillation")
    result = example.main(example.Config(accelerator=CPU))
    assert result["teacher"] > 0.85
    assert result["student"] > result["teacher"] - 0.05


def test_distillation_leaves_the_teacher_alone():
    example = load("distillation")
    teacher, student = ps.shard(example.classifier(8)), ps.shard(example.classifier(4))
    optimizer = ps.adamw(1e-2)
    frozen = ps.init(teacher, optimizer, ps.key(1)).params
    state = ps.init(student, optimizer, ps.key(0)).replace(extra={"teacher": frozen})
    step = example.distillation_step(student, teacher, optimizer, 2.0)
    batch = example.spirals(ps.key(2), 8)
    new, _ = step(state, batch)
    moved = [name for name, leaf in new.leaves().items() if not leaf.equal(state.leaves()[name])]
    assert not [name for name in moved if name.startswith("extra/")]
    assert [name for name in moved if name.startswith("params/")]
    donated, _ = ps.donate(step)(state.clone(), batch)
    assert donated.digest() == new.digest()


def test_one_step_is_enough_after_meta_learning():
    example = load("maml")
    short = example.Config(steps=150, tasks=8)
    result = example.main(short)
    assert result["after"] < 0.75 * result["before"]


def test_second_derivatives_count():
    example = load("maml")
    config = example.Config(tasks=2)
    module = ps.shard(example.network(4))
    state, batch = ps.init(module, ps.sgd(0.1), ps.key(0)), example.sines(ps.key(1), 2, 5)
    grads = [
        ps.value_and_grad(module, example.maml_loss(dataclasses.replace(config, first_order=first_order)))(
            state.params, {}, batch, ps.key(0)
        ).grads
        for first_order in (False, True)
    ]
    assert not grads[0]["0.weight"].equal(grads[1]["0.weight"])
    # and they are right: the loss after adaptation, moved a little along the gradient, changes as it says
    direction = {
        name: grad / sum(g.square().sum() for g in grads[0].values()).sqrt() for name, grad in grads[0].items()
    }

    def loss_at(by):
        params = {name: leaf.double() + by * direction[name].double() for name, leaf in state.params.items()}
        double = ps.shard(example.network(4).double())
        data = {name: x.double() for name, x in batch.items()}
        out = ps.value_and_grad(double, example.maml_loss(config))(params, {}, data, ps.key(0))
        return float(out.loss)

    slope = sum((grads[0][name].double() * direction[name].double()).sum() for name in direction)
    assert (loss_at(1e-4) - loss_at(-1e-4)) / 2e-4 == pytest.approx(float(slope), rel=1e-3)

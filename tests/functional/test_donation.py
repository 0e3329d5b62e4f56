"""`ps.donate`: what a donated step may write, and what nobody can get wrong unnoticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.donation import donate


def _pieces():
    module, optimizer = ps.shard(nn.Linear(3, 2)), ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.1))
    grad_fn = ps.value_and_grad(module, lambda model, x, key: model(x).square().mean())

    def step(state, batch, *, donate=False):
        out = grad_fn(state.params, state.buffers, batch, state.key.fold_in(state.step))
        params, opt_state = optimizer.update(out.grads, state.opt_state, state.params, step=state.step, inplace=donate)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": out.loss.value}

    return step, ps.init(module, optimizer, ps.key(0))


def test_a_donated_step_is_the_pure_one_in_place():
    step, state = _pieces()
    donated, batch = donate(step), torch.randn(4, 3)
    pure = state
    ours = state.clone()
    addresses = {name: leaf.data_ptr() for name, leaf in ours.leaves().items()}
    for _ in range(3):
        pure, expected = step(pure, batch)
        old = ours
        ours, metrics = donated(ours, batch)
        assert torch.equal(metrics["loss"], expected["loss"])
        with pytest.raises(ps.ConsumedStateError, match="donated to step, step"):
            _ = old.params
    assert ours.digest() == pure.digest()
    assert {name: leaf.data_ptr() for name, leaf in ours.leaves().items()} == addresses
    assert donated.__name__ == "step"


def test_a_step_that_reuses_nothing_still_gives_its_state_away():
    state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    kept = state.params
    new = donate(lambda state: state.replace(step=1, params={"w": state.params["w"] + 1}))(state)
    assert torch.equal(new.params["w"], torch.full((2,), 2.0))
    for read in (lambda: state.params, lambda: kept["w"]):
        with pytest.raises(ps.ConsumedStateError, match="donated to <lambda>, step 0"):
            read()


def test_a_donated_step_inside_one():
    module, optimizer = ps.shard(nn.Linear(3, 2)), ps.sgd(0.1)
    inner = ps.train_step(module, lambda model, x, key: model(x).mean(), optimizer, donate=True)

    def outer(state, batch):
        state, metrics = inner(state, batch)
        return state.replace(extra={"seen": 1}), metrics

    state = ps.init(module, optimizer, ps.key(0))
    new, _ = donate(outer)(state, torch.ones(2, 3))
    assert (new.step, new.extra["seen"]) == (1, 1)
    with pytest.raises(ps.ConsumedStateError, match="donated to train_step, step 0"):
        _ = state.params


def test_what_fails_before_writing_leaves_the_state_and_what_fails_after_consumes_it():
    state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))

    def fails(state, late, *, donate=False):
        if late:
            state.params["w"].mul_(2)
        raise RuntimeError("the disk is full")

    digest = state.digest()
    with pytest.raises(RuntimeError, match="disk"):
        donate(fails)(state, False)
    assert state.digest() == digest
    with pytest.raises(RuntimeError, match="disk"):
        donate(fails)(state, True)
    with pytest.raises(ps.ConsumedStateError, match="failed while it was writing"):
        _ = state.params


def _with(returned):
    def step(state, batch):
        new = state.replace(params={"w": batch if returned == "batch" else state.params["w"] * 2})
        return new, {"norm": torch.ones(()), "w": new.params["w"][0] if returned == "metric" else 1.0}

    return step


@pytest.mark.parametrize(
    ("returned", "said"), [("metric", r"what it returns \[0\]\['w'\]"), ("batch", r"argument \[0\]\[0\]")]
)
def test_memory_of_the_new_state_belongs_to_it_alone(returned, said):
    state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    with pytest.raises(ValueError, match=rf"{said} shares memory with leaf 'params/w'"):
        donate(_with(returned))(state, torch.ones(2))
    donate(_with("nothing"))(state, torch.ones(2))


def test_only_states_are_donated():
    state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    with pytest.raises(TypeError, match="takes a TrainState first, got dict"):
        donate(lambda state: state)({})
    with pytest.raises(TypeError, match="returns a TrainState first, got int"):
        donate(lambda state: 3)(state)
    with pytest.raises(TypeError, match="takes a step"):
        donate(3)

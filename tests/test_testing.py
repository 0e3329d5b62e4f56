"""The assertions that users' tests rely on: each passes on a good step and fails on the fault it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from tests.ranks import run_on
from tests.toys import Net, error_of, net_batch, net_loss, net_optimizer, rank_slice, runtime_on

testing = ps.testing


def _pieces(runtime: ps.Runtime | None = None, **options: Any) -> tuple[Any, ps.TrainState]:
    module, optimizer = ps.shard(Net(dropout=0.5), runtime=runtime), net_optimizer()
    return ps.train_step(module, net_loss, optimizer, **options), ps.init(module, optimizer, ps.key(0))


def test_a_good_step_passes():
    step, state = _pieces()
    assert testing.assert_pure(step, state, net_batch(0)).step == 1
    donating, _ = _pieces(donate=True)
    batches = [net_batch(k) for k in range(3)]
    for format in ("safetensors", "dcp"):
        assert testing.assert_resume_exact(donating, state, batches, format=format).step == 3
    assert state.step == 0


def test_a_step_that_writes_its_input_is_found():
    step, state = _pieces()

    def impure(state: ps.TrainState, batch: Any) -> Any:
        state.params["head.bias"].add_(1)
        return step(state, batch)

    with pytest.raises(AssertionError, match=r"the step changed its input: params/head\.bias has other values"):
        testing.assert_pure(impure, state, net_batch(0))


def test_a_step_that_draws_from_the_ambient_generator_is_found():
    step, state = _pieces()

    def ambient(state: ps.TrainState, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new.replace(extra={"noise": torch.rand(2)}), metrics

    with pytest.raises(AssertionError, match="two calls gave different states: extra/noise has other values"):
        testing.assert_pure(ambient, state, net_batch(0))
    counter = iter(range(9))
    with pytest.raises(AssertionError, match=r"different metrics: loss is 0\.0 and 1\.0"):
        testing.assert_pure(lambda s, b: (step(s, b)[0], {"loss": float(next(counter))}), state, net_batch(0))


def test_hidden_state_that_no_checkpoint_holds_is_found():
    step, state = _pieces()
    hidden = iter(range(99))

    def counting(state: ps.TrainState, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new.replace(extra={"count": torch.tensor(next(hidden))}), metrics

    with pytest.raises(AssertionError, match="the resumed run differs from the uninterrupted one: extra/count"):
        testing.assert_resume_exact(
            counting,
            state.replace(extra={"count": torch.tensor(0)}),
            [net_batch(k) for k in range(2)],
        )


def test_differences_are_named():
    _, state = _pieces()
    other = state.replace(step=3, key=ps.key(1), extra={"note": 1}, buffers={"b": torch.ones(1)})
    with pytest.raises(AssertionError, match="step is 0, expected 3, key differs, buffers/b is missing"):
        testing.assert_states_equal(state, other)
    with pytest.raises(AssertionError, match="buffers/b is not expected"):
        testing.assert_states_equal(other, state)
    with pytest.raises(AssertionError, match="plain values in extra differ"):
        testing.assert_states_equal(state.replace(extra={"note": 1}), state.replace(extra={"note": 2}))
    wide = {**state.params, "head.bias": state.params["head.bias"].double()}
    with pytest.raises(AssertionError, match=r"params/head\.bias is float64\[1\], expected float32\[1\]"):
        testing.assert_states_equal(state.replace(params=wide), state)


def _on_ranks(topology: tuple[int, int]) -> list[Any]:
    with runtime_on(topology) as runtime:
        step, state = _pieces(runtime)
        batches = [rank_slice(runtime, net_batch(k)) for k in range(2)]
        testing.assert_pure(step, state, batches[0])
        testing.assert_resume_exact(step, state, batches)
        testing.assert_replicas_equal(state)
        moved = state.clone()
        if runtime.rank == 1:
            local = getattr(moved.params["embed.weight"], "_local_tensor", moved.params["embed.weight"])
            local.add_(1)
        return [
            error_of(testing.assert_states_equal, moved, state),
            error_of(testing.assert_replicas_equal, moved),
        ]


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_on_ranks_all_raise_what_one_found(topology):
    for equal, replicas in run_on(topology, _on_ranks):
        assert equal[0] == "AssertionError"
        assert "params/embed.weight has other values" in equal[1]
        assert (replicas is None) == (topology == (1, 2))

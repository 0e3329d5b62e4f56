"""Schedule-free optimizers against their authors' package stepped by hand."""

import sys

import pytest
import torch

import purestep as ps
from tests.functional.by_hand import random_leaves, run, some_gradients, stepped
from tests.functional.properties import copied, differences

CLASSES = {"adamw": "AdamWScheduleFree", "radam": "RAdamScheduleFree", "sgd": "SGDScheduleFree"}
ARGUMENTS = {"adamw": {"weight_decay": 0.1, "warmup_steps": 3}, "radam": {}, "sgd": {"momentum": 0.8, "foreach": False}}


def training(cls, leaves, arguments):
    optimizer = cls(leaves, lr=0.1, **arguments)
    optimizer.train()
    return optimizer


@pytest.fixture
def package():
    return pytest.importorskip("schedulefree")


@pytest.mark.parametrize("base", CLASSES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_it_is_the_package_stepped_by_hand_and_evaluates_like_it(package, base, inplace):
    cls, arguments = getattr(package, CLASSES[base]), ARGUMENTS[base]
    params, all_grads = random_leaves(0), some_gradients() * 3  # RAdam is silent for some steps
    wanted, slots, optimizer = stepped(
        lambda leaves: training(cls, leaves, arguments), params, [copied(g) for g in all_grads], [0.1] * 15
    )
    lifted = ps.schedule_free(base, lr=0.1, **arguments)
    got, state = run(lifted, copied(params), [copied(g) for g in all_grads], inplace=inplace)
    assert not differences(got, wanted)
    kept = state[CLASSES[base]]
    for slot, values in slots.items():
        assert not differences({name: kept[slot][name] for name in values}, values)
    assert kept["groups"]["0"]["k"].item() == optimizer.param_groups[0]["k"] == 15
    before = copied({"params": got, "state": state})
    evaluated = lifted.eval_params(got, kept)
    assert not differences({"params": got, "state": state}, before)
    optimizer.eval()
    leaves = optimizer.param_groups[0]["params"]
    assert not differences(evaluated, {name: leaf.detach() for name, leaf in zip(params, leaves, strict=True)})
    assert differences(evaluated, got)


def test_a_state_is_evaluated_with_the_averages_of_its_optimizer(package):
    inner = ps.schedule_free("sgd", lr=0.5)
    optimizer = ps.chain(clip=ps.clip_by_global_norm(100.0), free=inner)
    params, opt_state = run(optimizer, random_leaves(0), some_gradients())
    state = ps.TrainState(step=5, params=params, buffers={}, opt_state=opt_state, key=ps.key(0))
    averaged = inner.eval_params(params, opt_state["free"])
    assert not differences(ps.eval_params(state, optimizer), averaged)
    assert differences(averaged, params)


def test_before_the_first_step_it_evaluates_what_it_trains(package):
    lifted, params = ps.schedule_free(lr=0.1), random_leaves(0)
    evaluated = lifted.eval_params(params, lifted.init(params)[lifted.name])
    assert not differences(evaluated, params)


def test_a_class_without_eval_says_so():
    lifted, params = ps.from_torch(torch.optim.SGD, lr=0.1), random_leaves(0)
    with pytest.raises(TypeError, match="SGD evaluates with the parameters it trains"):
        lifted.eval_params(params, {})


def test_it_says_what_to_install_and_what_to_choose_from(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'purestep\[schedulefree\]'"):
        ps.schedule_free()
    with pytest.raises(ValueError, match="base must be one of adamw, radam, sgd, got 'lion'"):
        ps.schedule_free("lion")

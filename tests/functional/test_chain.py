"""`chain`: order, names, and parts that users write."""

import pytest
import torch

import purestep as ps


class Scale:
    """A transform with nothing but what the protocol asks for."""

    def __init__(self, factor):
        self.factor = factor

    def init(self, params):
        return {}

    def update(self, grads, slots, params, *, step):
        return {name: grad * self.factor for name, grad in grads.items()}, slots


class AddOne(Scale):
    def update(self, grads, slots, params, *, step):
        return {name: grad + 1 for name, grad in grads.items()}, slots


class Count(Scale):
    """A transform that keeps state."""

    def init(self, params):
        return {"calls": {name: torch.zeros(()) for name in params}}

    def update(self, grads, slots, params, *, step):
        return grads, {"calls": {name: n + (name in grads) for name, n in slots["calls"].items()}}


class Descent:
    """An optimizer with nothing but what the protocol asks for."""

    def init(self, params):
        return {"mean": {name: torch.zeros_like(leaf) for name, leaf in params.items()}}

    def update(self, grads, opt_state, params, *, step):
        mean = {**opt_state["mean"], **{name: 0.5 * opt_state["mean"][name] + grad for name, grad in grads.items()}}
        return {**params, **{name: params[name] - mean[name] for name in grads}}, {"mean": mean}


def one(value):
    return {"w": torch.tensor(float(value))}


def after(optimizer, gradient=3.0, steps=1, **options):
    params = one(1)
    opt_state = optimizer.init(params)
    for step in range(steps):
        params, opt_state = optimizer.update(one(gradient), opt_state, params, step=step, **options)
    return params["w"].item(), opt_state


def test_the_order_of_names_is_the_order_of_application():
    assert after(ps.chain(scale=Scale(2), add=AddOne(0), sgd=ps.sgd(1.0)))[0] == 1 - (3 * 2 + 1)
    assert after(ps.chain(add=AddOne(0), scale=Scale(2), sgd=ps.sgd(1.0)))[0] == 1 - (3 + 1) * 2


def test_names_are_the_levels_of_opt_state_and_only_parts_with_state_have_one():
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), seen=Count(0), main=ps.adamw(0.1))
    _, opt_state = after(optimizer, steps=2)
    assert list(opt_state) == ["seen", "main"]
    assert opt_state["seen"]["calls"]["w"] == 2
    assert list(opt_state["main"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert after(ps.chain(sgd=ps.sgd(0.1)))[1] == {}


def test_adding_a_clip_changes_no_leaf_names():
    params = one(1)

    def names(optimizer):
        return list(ps.TrainState(0, params, {}, optimizer.init(params), ps.key(0)).leaves())

    assert names(ps.chain(adamw=ps.adamw(0.1))) == names(
        ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.1))
    )


@pytest.mark.parametrize("make", [ps.adamw, ps.adam, lambda lr: ps.sgd(lr, momentum=0.9)])
def test_an_optimizer_on_its_own_is_a_chain_of_itself_under_its_own_name(make):
    optimizer = make(0.1)
    alone, in_chain = after(optimizer, steps=3), after(ps.chain(**{type(optimizer).__name__: optimizer}), steps=3)
    assert alone == in_chain


def test_a_users_optimizer_gets_back_what_its_init_returned():
    alone, state = after(Descent(), steps=3)
    in_chain, chained = after(ps.chain(mine=Descent()), steps=3)
    assert alone == in_chain
    assert chained == {"mine": state}
    clipped, _ = after(ps.chain(scale=Scale(0.5), mine=Descent()), gradient=6.0, steps=3)
    assert clipped == alone


def test_a_chain_in_a_chain():
    inner = ps.chain(scale=Scale(2), adamw=ps.adamw(0.1))
    value, state = after(ps.chain(add=AddOne(0), inner=inner))
    assert list(state) == ["inner"]
    assert list(state["inner"]) == ["adamw"]
    assert value == after(ps.chain(add=AddOne(0), scale=Scale(2), adamw=ps.adamw(0.1)))[0]


def test_everything_reported_comes_together():
    metrics = {}
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), again=ps.clip_by_global_norm(0.5), adamw=ps.adamw(0.1))
    after(optimizer, metrics=metrics)
    assert optimizer.reports == ("grad_norm", "lr")
    assert metrics == {"grad_norm": 3.0, "lr": 0.1}  # the first clip saw the gradients as they came


def test_in_place_reaches_the_parts():
    params = one(1)
    optimizer = ps.chain(scale=Scale(1.0), sgd=ps.sgd(1.0))
    new, _ = optimizer.update(one(3), {}, params, step=0, inplace=True)
    assert new["w"] is params["w"]
    assert params["w"] == -2
    params = one(1)
    optimizer.update(one(3), {}, params, step=0)
    assert params["w"] == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.chain(), ValueError, "at least an optimizer"),
        (lambda: ps.chain(**{"a/b": ps.sgd(0.1)}), ValueError, "'a/b' cannot name a part"),
        (lambda: ps.chain(**{"a.b": ps.sgd(0.1)}), ValueError, "'a.b' cannot name a part"),
        (lambda: ps.chain(**{"": ps.sgd(0.1)}), ValueError, "'' cannot name a part"),
        (lambda: ps.chain(clip=1.0), TypeError, r"'clip': expected a gradient transform .* got 1.0"),
        (lambda: ps.chain(adam=torch.optim.Adam), TypeError, "'adam': expected a gradient transform"),
        (lambda: ps.chain(adam=ps.adam), TypeError, "'adam': expected an object, got the class adam; call it first"),
        (
            lambda: ps.chain(clip=ps.clip_by_global_norm(1.0)),
            ValueError,
            "'clip' only transforms gradients; add one after",
        ),
        (
            lambda: ps.chain(adamw=ps.adamw(0.1), clip=Scale(1.0)),
            ValueError,
            "'adamw' is an optimizer and must be the last part of the chain, not before 'clip'",
        ),
        (
            lambda: ps.chain(adamw=ps.adamw(0.1)).update({}, {"sgd": {}}, one(1), step=0),
            ValueError,
            "opt_state has 'sgd', but this chain has 'adamw'",
        ),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_chain_is_a_value():
    make = lambda: ps.chain(clip=ps.clip_by_global_norm(1.0), sgd=ps.sgd(0.1))  # noqa: E731
    assert make() == make() != ps.chain(sgd=ps.sgd(0.1))
    assert hash(make()) == hash(make())
    assert repr(make()).startswith("chain(clip=clip_by_global_norm(max_norm=1.0, ord=2.0), sgd=sgd(lr=0.1, ")
    with pytest.raises(AttributeError, match="cannot be changed"):
        make().parts = {}

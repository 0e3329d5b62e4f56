"""Optimizers around optimizers: partition, freeze, skip_nonfinite, lookahead, with_ema, with_hyperparameters."""

import math

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.implementations import implementations

NAMES = ("body.weight", "body.bias", "head.weight")


def random_leaves(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"body.weight": (3, 2), "body.bias": (3,), "head.weight": (1, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def advance(optimizer, params, opt_state, steps, **arguments):
    for step in steps:
        params, opt_state = optimizer.update(random_leaves(100 + step), opt_state, params, step=step, **arguments)
    return params, opt_state


def run(optimizer, steps=4, **arguments):
    params = random_leaves(0)
    return advance(optimizer, params, optimizer.init(params), range(steps), **arguments)


def assert_same(ours, wanted):
    assert ours.keys() == wanted.keys()
    for name, leaf in wanted.items():
        if isinstance(leaf, dict):
            assert_same(ours[name], leaf)
        else:
            assert torch.equal(ours[name], leaf), name


class UserDescent:
    """What a user writes: nothing but the protocol."""

    def init(self, params):
        return {"count": {name: torch.zeros(()) for name in params}}

    def update(self, grads, opt_state, params, *, step):
        count = {name: n + (name in grads) for name, n in opt_state["count"].items()}
        return {**params, **{name: params[name] - 0.1 * grads[name] for name in grads}}, {"count": count}


WRAPPERS = {
    "freeze": lambda inner: ps.freeze(inner, "body.bias"),
    "skip_nonfinite": ps.skip_nonfinite,
    "lookahead": lambda inner: ps.lookahead(inner, every=2),
    "with_ema": lambda inner: ps.with_ema(inner, 0.9),
    "partition": lambda inner: ps.partition({"all": ("**", inner)}),
    "with_hyperparameters": lambda inner: ps.with_hyperparameters(lambda unused: inner, unused=1.0),
}
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


@every_wrapper
def test_wrappers_work_around_chains_and_inside_them_with_parts_of_the_users(wrapper):
    wrap = WRAPPERS[wrapper]
    for inner in (UserDescent(), ps.adamw(0.1), ps.chain(clip=ps.clip_by_global_norm(1.0), mine=UserDescent())):
        alone, _ = run(wrap(inner))
        in_chain, opt_state = run(ps.chain(main=wrap(inner)))
        assert_same(in_chain, alone)
        assert list(opt_state) == ["main"]


@every_wrapper
def test_wrapping_changes_no_name_of_the_optimizers_own_leaves(wrapper):
    def names(optimizer):
        params = random_leaves(0)
        return set(ps.TrainState(0, params, {}, optimizer.init(params), ps.key(0)).leaves())

    label = "/all" if wrapper == "partition" else ""
    for inner, prefix in ((ps.adamw(0.1), "" if label else "/adamw"), (ps.chain(main=ps.adamw(0.1)), "/main")):
        wrapped = names(WRAPPERS[wrapper](inner))
        for name in ("body.weight", "head.weight"):
            assert f"opt_state{label}{prefix}/exp_avg/{name}" in wrapped
    in_chain = names(ps.chain(main=WRAPPERS[wrapper](ps.adamw(0.1))))
    assert f"opt_state/main{label}/exp_avg/body.weight" in in_chain


@every_wrapper
def test_wrappers_are_values_and_refuse_what_is_no_optimizer(wrapper):
    wrap = WRAPPERS[wrapper]
    if wrapper != "with_hyperparameters":  # made of a function, which is equal to itself only
        assert wrap(ps.adamw(0.1)) == wrap(ps.adamw(0.1)) != wrap(ps.adamw(0.2))
        assert hash(wrap(ps.adamw(0.1))) == hash(wrap(ps.adamw(0.1)))
    for wrong in (3, ps.adamw):
        with pytest.raises(TypeError, match=r"optimizer"):
            wrap(wrong)


@every_wrapper
def test_what_is_inside_is_reported(wrapper):
    metrics = {}
    optimizer = WRAPPERS[wrapper](ps.chain(clip=ps.clip_by_global_norm(1.0), sgd=ps.sgd(0.1)))
    params = random_leaves(0)
    optimizer.update(random_leaves(1), optimizer.init(params), params, step=0, metrics=metrics)
    assert set(metrics) == set(optimizer.reports)
    assert metrics["lr"] == 0.1


@every_wrapper
def test_which_implementation_runs_is_told_through_wrappers(wrapper):
    params, label = random_leaves(0), "all/" if wrapper == "partition" else ""
    inner = ps.adamw(0.1, implementation="foreach")
    alone = implementations(WRAPPERS[wrapper](inner), params)
    assert alone == {"/".join(filter(None, [wrapper, label.strip("/")])): "foreach"}
    chained = implementations(ps.chain(main=WRAPPERS[wrapper](ps.chain(inner=inner))), params)
    assert chained == {f"main/{label}inner": "foreach"}


class Elsewhere(torch.optim.SGD):
    """Evaluates at zero, as an optimizer of the schedule-free kind evaluates elsewhere than it trains."""

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.zero_()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: inner,
        lambda inner: ps.chain(clip=ps.clip_by_global_norm(1.0), main=inner),
        lambda inner: ps.skip_nonfinite(ps.chain(main=ps.lookahead(inner))),
        lambda inner: ps.partition({"it": ("**", inner)}),
    ],
)
def test_optimizers_that_evaluate_elsewhere_are_found(wrap):
    optimizer = wrap(ps.from_torch(Elsewhere, lr=0.1, momentum=0.9))
    params, opt_state = run(optimizer, 2)
    state = ps.TrainState(step=2, params=params, buffers={}, opt_state=opt_state, key=ps.key(0))
    assert all(bool((leaf == 0).all()) for leaf in ps.eval_params(state, optimizer).values())
    assert_same(dict(state.params), params)
    with pytest.raises(ValueError, match="no averaged parameters"):
        ps.eval_params(state, wrap(ps.sgd(0.1)))


def test_two_of_a_kind_are_refused():
    for wrap in (ps.skip_nonfinite, lambda inner: ps.lookahead(inner)):
        with pytest.raises(ValueError, match="one of them is enough"):
            wrap(wrap(ps.sgd(0.1))).init(random_leaves(0))
    with pytest.raises(ValueError, match="with_ema around with_ema"):
        ps.with_ema(ps.skip_nonfinite(ps.with_ema(ps.sgd(0.1), 0.9)), 0.9)
    with pytest.raises(ValueError, match="with_ema goes around the partition"):
        ps.partition({"a": ("**", ps.with_ema(ps.sgd(0.1), 0.9))})


@pytest.mark.parametrize("wrapper", ["skip_nonfinite", "lookahead"])
def test_a_state_of_another_optimizer_is_refused(wrapper):
    params = random_leaves(0)
    with pytest.raises(ValueError, match=f"{wrapper} has no state in opt_state, which has 'adamw'.*switch_optimizer"):
        WRAPPERS[wrapper](ps.adamw(0.1)).update({}, ps.adamw(0.1).init(params), params, step=0)


# partition


def test_a_partition_gives_what_its_parts_give_alone():
    optimizer = ps.partition({"body": ("body.*", ps.adamw(0.1)), "head": ("head.*", ps.sgd(0.1, momentum=0.9))})
    got, opt_state = run(optimizer)
    for label, alone in (("body", ps.adamw(0.1)), ("head", ps.sgd(0.1, momentum=0.9))):
        mine = {name: leaf for name, leaf in random_leaves(0).items() if name.startswith(label)}
        wanted, state = mine, alone.init(mine)
        for step in range(4):
            grads = {name: leaf for name, leaf in random_leaves(100 + step).items() if name.startswith(label)}
            wanted, state = alone.update(grads, state, wanted, step=step)
        assert_same({name: got[name] for name in mine}, wanted)
        assert_same(opt_state[label], next(iter(state.values())))


def test_a_partition_reports_by_label():
    metrics, params = {}, random_leaves(0)
    clipped = ps.chain(clip=ps.clip_by_global_norm(1.0), sgd=ps.sgd(0.3))
    optimizer = ps.partition({"body": ("body.*", clipped), "head": ("head.*", ps.sgd(0.2))})
    optimizer.update(random_leaves(1), optimizer.init(params), params, step=0, metrics=metrics)
    body = {name: leaf for name, leaf in random_leaves(1).items() if name.startswith("body")}
    assert metrics == {"grad_norm/body": ps.global_norm(body), "lr/body": 0.3, "lr": 0.3, "lr/head": 0.2}


def test_a_partition_refuses_what_it_cannot_place():
    optimizer = ps.partition({"body": ("body.*", ps.sgd(0.1))})
    with pytest.raises(ValueError, match=r"partition: no rule takes 'head\.weight'"):
        optimizer.init(random_leaves(0))
    with pytest.raises(ValueError, match=r"partition: no rule takes 'head\.weight'"):
        optimizer.update(random_leaves(1), {}, random_leaves(0), step=0)
    with pytest.raises(ValueError, match="opt_state has 'tail', but this partition has 'body'"):
        optimizer.update({}, {"tail": {}}, random_leaves(0), step=0)


# freeze (B04, B22 in one process; on ranks in tests/distributed/test_wrappers_ranks.py)


def test_frozen_leaves_stay_and_have_no_moments():
    optimizer = ps.freeze(ps.adamw(0.1, weight_decay=0.1), "body.*")
    params, opt_state = run(optimizer)
    for name in ("body.weight", "body.bias"):
        assert torch.equal(params[name], random_leaves(0)[name])
    assert {name for slots in opt_state["adamw"].values() for name in slots} == {"head.weight"}
    wanted, _ = run(ps.adamw(0.1, weight_decay=0.1))
    assert torch.equal(params["head.weight"], wanted["head.weight"])


def test_norms_and_clipping_see_what_is_trained():
    metrics, grads = {}, random_leaves(1)
    head = {"head.weight": grads["head.weight"]}
    for inner in (ps.sgd(0.1), ps.chain(clip=ps.clip_by_global_norm(0.01), sgd=ps.sgd(0.1))):
        params, optimizer = random_leaves(0), ps.freeze(inner, "body.*")
        metrics.clear()
        new, _ = optimizer.update(grads, optimizer.init(params), params, step=0, metrics=metrics)
        assert metrics["grad_norm"] == ps.global_norm(head)
        wanted, _ = inner.update(head, {}, {"head.weight": params["head.weight"]}, step=0)
        assert torch.equal(new["head.weight"], wanted["head.weight"])


def test_nothing_to_train():
    with pytest.raises(ValueError, match=r"nothing to train: freeze takes every parameter \('body.weight', "):
        ps.freeze(ps.sgd(0.1), "**").init(random_leaves(0))


def test_freezing_on_the_way_leaves_moments_untouched_and_unfreezing_goes_on_with_them():
    plain, frozen = ps.adamw(0.1), ps.freeze(ps.adamw(0.1), "body.*")
    params, opt_state = run(plain, 2)
    still, kept = advance(frozen, params, opt_state, range(2, 4))
    for name in ("body.weight", "body.bias"):
        assert still[name] is params[name]
        assert all(kept["adamw"][slot][name] is opt_state["adamw"][slot][name] for slot in kept["adamw"])
    got, _ = advance(plain, still, kept, range(4, 6))
    # torch's optimizer, whose frozen parameters have no gradient
    model = {name: nn.Parameter(leaf) for name, leaf in random_leaves(0).items()}
    reference = torch.optim.AdamW(model.values(), lr=0.1, fused=True)
    for step in range(6):
        for name, leaf in model.items():
            leaf.grad = None if 2 <= step < 4 and name != "head.weight" else random_leaves(100 + step)[name]
        reference.step()
    assert_same(got, {name: leaf.detach() for name, leaf in model.items()})


def test_unfreezing_what_had_no_moments_is_an_error_that_says_so():
    params, opt_state = run(ps.freeze(ps.adamw(0.1), "body.*"), 2)
    with pytest.raises(ValueError, match=r"adamw has no 'exp_avg' for 'body\.weight', 'body\.bias'"):
        advance(ps.adamw(0.1), params, opt_state, [2])


def test_keep_state_makes_the_names_independent_of_what_is_frozen():
    params = random_leaves(0)
    kept = ps.freeze(ps.adamw(0.1), "body.*", keep_state=True)
    assert_same(kept.init(params), ps.adamw(0.1).init(params))
    once, opt_state = run(kept, 2)
    got, _ = advance(ps.adamw(0.1), once, opt_state, [2])
    fresh = ps.adamw(0.1)
    wanted, _ = fresh.update(random_leaves(102), fresh.init(params), params, step=2)
    assert torch.equal(got["body.weight"], wanted["body.weight"])  # its own first update


# skip_nonfinite


def bad_gradients(value=math.nan, name="body.bias"):
    grads = random_leaves(1)
    grads[name][-1] = value
    return grads


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_update_is_not_taken(value, inplace):
    optimizer = ps.skip_nonfinite(ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.1)), max_consecutive=3)
    params, opt_state = run(optimizer, 2)
    before = {name: leaf.clone() for name, leaf in params.items()}
    moments = {name: leaf.clone() for name, leaf in opt_state["adamw"]["exp_avg"].items()}
    metrics = {}
    new, state = optimizer.update(bad_gradients(value), opt_state, params, step=2, inplace=inplace, metrics=metrics)
    assert_same(new, before)
    assert_same(state["adamw"]["exp_avg"], moments)
    assert (metrics["skipped"], int(state["skip_nonfinite"]["in_a_row"])) == (1.0, 1)
    assert not metrics["grad_norm"].isfinite()
    # and afterwards all goes on as if that step had not been
    metrics = {}
    got, state = optimizer.update(random_leaves(102), state, new, step=3, inplace=inplace, metrics=metrics)
    wanted, _ = run(ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(0.1)), 3)
    assert_same(got, wanted)
    assert (metrics["skipped"], int(state["skip_nonfinite"]["in_a_row"])) == (0.0, 0)


def test_large_but_finite_gradients_are_taken():
    optimizer, metrics, params = ps.skip_nonfinite(ps.sgd(1e-30)), {}, random_leaves(0)
    grads = {name: torch.full_like(leaf, 3e38) for name, leaf in params.items()}  # whose squares overflow
    optimizer.update(grads, optimizer.init(params), params, step=0, metrics=metrics)
    assert metrics["skipped"] == 0.0


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_past_the_limit_it_raises_with_step_and_leaf_and_changes_nothing(limit):
    optimizer = ps.skip_nonfinite(ps.adamw(0.1), max_consecutive=limit)
    params = random_leaves(0)
    opt_state = optimizer.init(params)
    bad = bad_gradients()
    bad["head.weight"][0, 0] = math.inf
    for step in range(limit):
        params, opt_state = optimizer.update(bad, opt_state, params, step=step, inplace=True)
    with pytest.raises(ps.NonFiniteError, match=rf"step {limit}: the gradient of 'body\.bias' \(and those of 1 more\)"):
        optimizer.update(bad, opt_state, params, step=limit, inplace=True)
    assert_same(params, random_leaves(0))
    assert int(opt_state["skip_nonfinite"]["in_a_row"]) == limit


def test_a_good_step_in_between_starts_the_count_again():
    optimizer = ps.skip_nonfinite(ps.sgd(0.1), max_consecutive=1)
    params = random_leaves(0)
    opt_state = optimizer.init(params)
    for step, grads in enumerate([bad_gradients(), random_leaves(1)] * 3):
        params, opt_state = optimizer.update(grads, opt_state, params, step=step)


# lookahead


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "donated"])
def test_lookahead_by_hand(inplace):
    optimizer = ps.lookahead(ps.sgd(0.1, momentum=0.9), every=3, alpha=0.25)
    got, opt_state = run(optimizer, 7, inplace=inplace)
    inner, fast, slow = ps.sgd(0.1, momentum=0.9), random_leaves(0), random_leaves(0)
    state = inner.init(fast)
    for step in range(7):
        fast, state = inner.update(random_leaves(100 + step), state, fast, step=step)
        if step in (2, 5):
            slow = {name: slow[name] + 0.25 * (fast[name] - slow[name]) for name in fast}
            fast = {name: leaf.clone() for name, leaf in slow.items()}
    for name in NAMES:
        torch.testing.assert_close(got[name], fast[name])
        torch.testing.assert_close(opt_state["lookahead"]["slow"][name], slow[name])


# with_ema


def averaged(optimizer, steps, dtype=torch.float32, inplace=False):
    params = random_leaves(0, dtype)
    opt_state, ema = optimizer.init(params), optimizer.init_ema(params)
    for step in range(steps):
        grads = random_leaves(100 + step, dtype)
        params, opt_state = optimizer.update(grads, opt_state, params, step=step, inplace=inplace)
        ema = optimizer.update_ema(ema, params, step=step, inplace=inplace)
    return params, ema


@pytest.mark.parametrize("inplace", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize(("decay", "warmup"), [(0.9, 0.0), (0.9, 10.0), (ps.linear(0.0, 0.9, 4), 0.0)])
def test_averages_by_hand(decay, warmup, inplace):
    _, ema = averaged(ps.with_ema(ps.sgd(0.1), decay, warmup=warmup), 6, inplace=inplace)
    params, wanted = random_leaves(0), {name: leaf.double() for name, leaf in random_leaves(0).items()}
    for step in range(6):
        params, _ = ps.sgd(0.1).update(random_leaves(100 + step), {}, params, step=step)
        d = decay(step) if callable(decay) else decay
        d = min(d, (1 + step) / (10 + step)) if warmup else d
        wanted = {name: d * wanted[name] + (1 - d) * params[name].double() for name in params}
    for name, leaf in wanted.items():
        torch.testing.assert_close(ema[name].double(), leaf, rtol=1e-6, atol=1e-7)


def test_averages_of_16_bit_parameters_are_wide_and_evaluate_as_the_parameters():
    _, ema = averaged(ps.with_ema(ps.sgd(0.1), 0.999), 3, torch.bfloat16)
    assert {leaf.dtype for leaf in ema.values()} == {torch.float32}
    params = random_leaves(0, torch.bfloat16)
    state = ps.TrainState(step=3, params=params, buffers={}, opt_state={}, key=ps.key(0), ema=ema)
    assert {leaf.dtype for leaf in ps.eval_params(state).values()} == {torch.bfloat16}


def test_averages_are_found_through_wrappers_and_chains():
    inner = ps.with_ema(ps.sgd(0.1), 0.5)
    wanted = averaged(inner, 3)
    for optimizer in (
        ps.chain(clip=ps.clip_by_global_norm(1e6), main=inner),
        ps.skip_nonfinite(ps.chain(main=ps.lookahead(inner, every=100))),
        ps.with_hyperparameters(lambda lr: ps.with_ema(ps.sgd(lr), 0.5), lr=0.1),
    ):
        got = averaged(optimizer, 3)
        assert_same(got[0], wanted[0])
        assert_same(got[1], wanted[1])
    frozen = averaged(ps.freeze(inner, "body.*"), 3)
    assert_same(frozen[1], {"head.weight": wanted[1]["head.weight"]})
    assert ps.chain(sgd=ps.sgd(0.1)).init_ema(random_leaves(0)) is None


def small_run(optimizer, **arguments):
    module = ps.shard(nn.Linear(1, 1, bias=False))
    step = ps.train_step(module, lambda model, x, key: ps.Mean(model(x).sum(), len(x)), optimizer, **arguments)
    return module, step, ps.init(module, optimizer, ps.key(0))


def test_a_step_without_averages_to_update_says_what_to_do():
    _, step, state = small_run(ps.with_ema(ps.sgd(0.1), 0.9))
    with pytest.raises(ValueError, match="this state has no averages: make it with"):
        step(state.replace(ema=None), torch.ones(1, 1))
    with pytest.raises(ValueError, match="this state has no averaged parameters"):
        ps.eval_params(state.replace(ema=None))


def test_abstract_state_and_switching_know_about_averages():
    module, _, state = small_run(ps.sgd(0.1))
    optimizer = ps.with_ema(ps.adamw(0.1), 0.9)
    assert ps.abstract_state(module, optimizer).ema["weight"].is_meta
    switched = ps.switch_optimizer(state, module, optimizer)
    assert torch.equal(switched.ema["weight"], state.params["weight"])
    assert list(switched.opt_state) == ["adamw"]
    assert ps.switch_optimizer(switched, module, ps.sgd(0.1)).ema is None


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_nothing_moves_when_an_update_is_skipped_not_even_averages_and_buffers(donate):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(2), nn.Linear(2, 1)

        def forward(self, x):
            return self.out(self.norm(x))

    module = ps.shard(Net())
    optimizer = ps.skip_nonfinite(ps.with_ema(ps.adamw(0.1), 0.5))
    step = ps.train_step(module, lambda m, x, key: ps.Mean(m(x).sum(), len(x)), optimizer, donate=donate)
    state, metrics = step(ps.init(module, optimizer, ps.key(0)), torch.randn(4, 2))
    assert metrics["skipped"] == 0
    old = state.clone()
    state, metrics = step(state, torch.tensor([[1.0, math.nan], [2.0, 3.0]]))
    assert metrics["skipped"] == 1
    assert set(metrics) >= {"loss", "weight", "grad_norm", "skipped"}
    count = {**state.opt_state["skip_nonfinite"]}
    assert int(count["in_a_row"]) == 1
    same = state.replace(
        step=old.step, opt_state={**state.opt_state, "skip_nonfinite": old.opt_state["skip_nonfinite"]}
    )
    assert same.digest() == old.digest()
    state, metrics = step(state, torch.randn(4, 2))
    assert metrics["skipped"] == 0
    assert all(bool(leaf.isfinite().all()) for leaf in state.leaves().values())


# with_hyperparameters


def test_hyperparameters_in_the_state_change_no_bit():
    for kwargs in ({"lr": 0.1, "weight_decay": 0.3}, {"lr": 3e-4, "eps": 1e-7, "betas": (0.8, 0.9)}):
        got, opt_state = run(ps.with_hyperparameters(ps.adamw, **kwargs))
        wanted, plain = run(ps.adamw(**kwargs))
        assert_same(got, wanted)
        assert_same({"adamw": opt_state["adamw"]}, plain)
        assert set(opt_state["hyperparameters"]) == {name for name, v in kwargs.items() if isinstance(v, float)}


def test_they_may_be_replaced_between_steps_and_resume(tmp_path):
    optimizer = ps.chain(
        clip=ps.clip_by_global_norm(10.0), main=ps.with_hyperparameters(ps.sgd, lr=0.5, weight_decay=0.0)
    )
    module, step, state = small_run(optimizer)
    x = torch.ones(1, 1)
    state, metrics = step(state, x)
    assert metrics["lr"] == 0.5
    changed = ps.set_hyperparameters(state, lr=0.25)
    assert step(state, x)[1]["lr"] == 0.5  # the old state is as it was
    restored = ps.restore(ps.save(tmp_path / "state", changed), ps.abstract_state(module, optimizer))
    assert restored.digest() == changed.digest()
    for one in (changed, restored):
        new, metrics = step(one, x)
        assert metrics["lr"] == 0.25
        torch.testing.assert_close(new.params["weight"], state.params["weight"] - 0.25)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ps.with_hyperparameters(ps.sgd, lr=ps.constant(0.1)), ValueError, "none of 'lr' is a number"),
        (lambda: ps.with_hyperparameters(ps.sgd, lr=-1.0), ValueError, "lr must be a finite number"),
        (lambda: ps.with_hyperparameters(ps.sgd, rate=0.1), TypeError, "rate"),
        (lambda: ps.with_hyperparameters(lambda lr: lr, lr=0.1), TypeError, "made no optimizer, but 0.1"),
        (
            lambda: ps.set_hyperparameters(small_run(ps.with_hyperparameters(ps.sgd, lr=0.1))[2], rl=0.1),
            ValueError,
            "no optimizer of this state have a hyperparameter 'rl'; the hyperparameters are 'lr'",
        ),
        (
            lambda: ps.with_hyperparameters(ps.sgd, lr=0.1).update({}, {}, random_leaves(0), step=0),
            ValueError,
            "opt_state has the hyperparameters none, and the optimizer 'lr'",
        ),
        (lambda: ps.skip_nonfinite(ps.sgd(0.1), max_consecutive=-1), ValueError, "max_consecutive must be an integer"),
        (lambda: ps.lookahead(ps.sgd(0.1), every=0), ValueError, "every must be an integer of at least 1, got 0"),
        (lambda: ps.lookahead(ps.sgd(0.1), alpha=0.0), ValueError, r"alpha must be in \(0, 1\], got 0.0"),
        (lambda: ps.with_ema(ps.sgd(0.1), 1.0), ValueError, r"decay must be a number in \[0, 1\)"),
        (lambda: ps.with_ema(ps.sgd(0.1), 0.9, warmup=-1), ValueError, "warmup must be a number of at least 0, got -1"),
        (lambda: ps.with_ema(ps.sgd(0.1), 0.9).update_ema({"x": torch.ones(1)}, {}, step=0), ValueError, "unknown"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_switching_keeps_what_fits_and_makes_the_rest_anew():
    module, step, state = small_run(ps.adamw(0.1))
    state, _ = step(state, torch.ones(1, 1))
    switched = ps.switch_optimizer(state, module, ps.adam(0.1, amsgrad=True))
    assert list(switched.opt_state) == ["adam"]
    assert float(switched.opt_state["adam"]["exp_avg"]["weight"]) == 0.0
    same = ps.switch_optimizer(state, module, ps.skip_nonfinite(ps.adamw(0.2, amsgrad=True)))
    assert same.opt_state["adamw"]["exp_avg"]["weight"] is state.opt_state["adamw"]["exp_avg"]["weight"]
    assert float(same.opt_state["adamw"]["max_exp_avg_sq"]["weight"]) == 0.0
    assert int(same.opt_state["skip_nonfinite"]["in_a_row"]) == 0

"""What every optimizer and transform promises, for each of `properties.CASES`, in one process."""

import cProfile

import pytest
import torch

import purestep as ps
from tests.functional.properties import (
    CASES,
    advance,
    copied,
    differences,
    flat,
    gradients,
    is_transform,
    optimizer_of,
    random_leaves,
    run,
)

every_case = pytest.mark.parametrize("case", CASES)


def meta(tree):
    return {name: leaf.to("meta") for name, leaf in tree.items()}


def state_of(params, opt_state, step=0):
    return ps.TrainState(step=step, params=params, buffers={}, opt_state=opt_state, key=ps.key(0))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_abstract_init_names_the_leaves_of_every_later_state(case, dtype):
    params = random_leaves(0, dtype)
    abstract = flat(optimizer_of(case).init(meta(params)))
    assert all(leaf.is_meta for leaf in abstract.values())
    wanted = {path: (leaf.shape, leaf.dtype) for path, leaf in abstract.items()}
    for opt_state in (optimizer_of(case).init(params), run(optimizer_of(case), params)[1]):
        assert {path: (leaf.shape, leaf.dtype) for path, leaf in flat(opt_state).items()} == wanted


@every_case
def test_init_copies_the_parameters_and_is_the_same_every_time(case):
    params = random_leaves(0)
    first, second = optimizer_of(case).init(params), optimizer_of(case).init(params)
    assert not differences(first, second)
    state_of(params, {"first": first, "second": second})  # refuses shared memory


@every_case
@pytest.mark.parametrize("inplace", [False, True])
def test_dtype_and_layout_are_kept(case, inplace):
    for dtype in (torch.float32, torch.bfloat16):
        params = random_leaves(0, dtype)
        params["embed.weight"] = params["embed.weight"].t().contiguous().t()
        params["conv.weight"] = params["conv.weight"].contiguous(memory_format=torch.channels_last)
        layouts = {name: (leaf.dtype, leaf.stride()) for name, leaf in params.items()}
        opt_state = optimizer_of(case).init(params)
        kept = {path: (leaf.dtype, leaf.stride()) for path, leaf in flat(opt_state).items()}
        params, opt_state = advance(optimizer_of(case), params, opt_state, range(4), inplace=inplace)
        assert {name: (leaf.dtype, leaf.stride()) for name, leaf in params.items()} == layouts
        assert {path: (leaf.dtype, leaf.stride()) for path, leaf in flat(opt_state).items()} == kept


@every_case
def test_layout_changes_no_value(case):
    params, optimizer = random_leaves(0), optimizer_of(case)
    laid_out = {**params, "embed.weight": params["embed.weight"].t().contiguous().t()}
    assert not differences(run(optimizer, laid_out)[0], run(optimizer, params)[0])


@every_case
def test_pure_changes_no_argument_and_donation_gives_the_same_bits(case):
    optimizer = optimizer_of(case)
    params = random_leaves(0)
    pure_state, donated = optimizer.init(params), copied(params)
    donated_state = optimizer.init(donated)
    for step in range(4):
        grads, before = gradients(step), copied({"params": params, "state": pure_state, "grads": gradients(step)})
        new, new_state = optimizer.update(grads, pure_state, params, step=step)
        assert not differences({"params": params, "state": pure_state, "grads": grads}, before)
        changed = {name: leaf for name, leaf in new.items() if leaf is not params[name]}
        state_of({**params, **{f"new.{name}": leaf for name, leaf in changed.items()}}, {})  # refuses shared memory
        donated, donated_state = optimizer.update(gradients(step), donated_state, donated, step=step, inplace=True)
        assert not differences({"params": donated, "state": donated_state}, {"params": new, "state": new_state})
        params, pure_state = new, new_state
        state_of(params, pure_state)  # no leaf twice


@every_case
@pytest.mark.parametrize("inplace", [False, True])
def test_no_gradient_is_not_a_zero_gradient(case, inplace):
    optimizer, params = optimizer_of(case), random_leaves(0)
    params, opt_state = run(optimizer, params, 1)
    before = copied({"params": params, "state": opt_state})
    grads = {"blocks.0.attn.bias": torch.ones(5), "scale": torch.ones(())}
    new, new_state = optimizer.update(dict(grads), opt_state, params, step=1, inplace=inplace)
    assert list(new) == list(params)
    after, old = flat({"params": new, "state": new_state}), flat(before)
    untouched = [path for path in old if any(path.endswith(f"/{name}") for name in params if name not in grads)]
    assert len(untouched) >= len(params) - len(grads)
    assert not differences({path: after[path] for path in untouched}, {path: old[path] for path in untouched})


@every_case
def test_no_gradient_at_all_is_fine(case):
    optimizer, params = optimizer_of(case), random_leaves(0)
    opt_state = optimizer.init(params)
    new, new_state = optimizer.update({}, opt_state, params, step=0)
    assert not differences(new, params)
    assert flat(new_state).keys() == flat(opt_state).keys()


@every_case
def test_it_converges(case):
    optimizer = optimizer_of(case)
    params, target = random_leaves(0), random_leaves(1)
    opt_state = optimizer.init(params)

    def loss():
        return sum((params[name] - target[name]).square().sum().item() for name in params)

    first = loss()
    for step in range(300):
        grads = {name: 2 * (params[name] - target[name]) for name in params}
        params, opt_state = optimizer.update(grads, opt_state, params, step=step)
    assert loss() < 0.02 * first


@every_case
def test_it_resumes_from_a_checkpoint_bit_for_bit(case, tmp_path):
    wanted, wanted_state = run(optimizer_of(case), random_leaves(0), 4)
    params, opt_state = run(optimizer_of(case), random_leaves(0), 2)
    saved = state_of(params, opt_state, step=2)
    path = ps.save(tmp_path / "two", saved)
    leaves = meta(random_leaves(0))
    restored = ps.restore(path, state_of(leaves, optimizer_of(case).init(leaves)))
    assert restored.digest() == saved.digest()
    params, opt_state = advance(optimizer_of(case), restored.params, restored.opt_state, range(2, 4))
    assert not differences({"params": params, "state": opt_state}, {"params": wanted, "state": wanted_state})


@every_case
def test_an_old_checkpoint_restores_after_a_transform_is_added(case, tmp_path):
    # The tested transform joins a chain without it; a tested optimizer gets a clip in front.
    if is_transform(case):
        before = ps.chain(adamw=ps.adamw(0.01))
        after = ps.chain(tested=CASES[case](), adamw=ps.adamw(0.01))
    else:
        before = ps.chain(tested=CASES[case]())
        after = ps.chain(clip=ps.clip_by_global_norm(1.0), tested=CASES[case]())
    params, opt_state = run(before, random_leaves(0), 2)
    old = state_of(params, opt_state, step=2)
    path = ps.save(tmp_path / "old", old)
    params = random_leaves(3)
    fresh = after.init(params)
    added = {name: slots for name, slots in fresh.items() if name not in old.opt_state}
    if added:  # new state starts as it would in a new run; everything else is what was saved
        restored = ps.restore(path, state_of(params, fresh), strict="partial", include=("*",))
    else:
        leaves = meta(params)
        restored = ps.restore(path, state_of(leaves, after.init(leaves)))
    assert restored.step == 2
    kept = {name: restored.opt_state[name] for name in old.opt_state}
    assert not differences({"params": restored.params, **kept}, {"params": old.params, **old.opt_state})
    assert not differences({name: restored.opt_state[name] for name in added}, added)
    advance(after, restored.params, restored.opt_state, range(2, 4))


@every_case
def test_the_work_grows_linearly_with_the_number_of_leaves(case):
    few, many = calls_of_an_update(case, 30), calls_of_an_update(case, 300)
    assert many < 10.5 * few


def calls_of_an_update(case, count):
    """Function calls in the second update of a state with `count` more leaves: unlike times, the same every time."""
    optimizer = optimizer_of(case)
    more = {f"blocks.{i}.more.weight": torch.ones(2, 2) for i in range(count)}
    params = {**random_leaves(0), **more}
    grads = {**random_leaves(1), **more}
    params, opt_state = optimizer.update(grads, optimizer.init(params), params, step=0)
    profile = cProfile.Profile()
    profile.runcall(optimizer.update, grads, opt_state, params, step=1)
    return sum(entry.callcount for entry in profile.getstats())

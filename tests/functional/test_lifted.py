"""from_torch against the class it lifts, stepped by hand, bit for bit; and what it refuses."""

import itertools

import pytest
import torch

import purestep as ps
from tests.functional.by_hand import random_leaves, run, some_gradients, stepped
from tests.functional.properties import CountingNormalized, copied, differences, flat

CASES = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.2}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.3}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 2, "lambd": 0.1}),
    (torch.optim.NAdam, {"foreach": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.Adafactor, {"weight_decay": 0.1}),
    (CountingNormalized, {}),
]
every_case = pytest.mark.parametrize(("cls", "arguments"), CASES, ids=lambda x: str(getattr(x, "__name__", x)))


def rate(step):
    return 0.1 / (step + 1)


def numbers_as_tensors(slots):
    kinds = {int: torch.int64, float: torch.float64, bool: torch.bool}
    return {
        slot: {n: v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=kinds[type(v)]) for n, v in kept.items()}
        for slot, kept in slots.items()
        if not any(isinstance(value, list) or value is None for value in kept.values())
    }


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_it_is_the_class_stepped_by_hand(cls, arguments, dtype, inplace):
    params, all_grads = random_leaves(0, dtype), some_gradients(dtype)
    if arguments.get("fused"):
        all_grads = [random_leaves(step, dtype) for step in range(1, 6)]
    wanted, slots, _ = stepped(
        lambda leaves: cls(leaves, lr=0.1, **arguments), params, all_grads, list(map(rate, range(5)))
    )
    got, state = run(ps.from_torch(cls, lr=rate, **arguments), copied(params), copied_all(all_grads), inplace=inplace)
    assert not differences(got, wanted)
    for slot, kept in numbers_as_tensors(slots).items():
        assert not differences({name: state[cls.__name__][slot][name] for name in kept}, kept)


def copied_all(all_grads):
    return [copied(grads) for grads in all_grads]


def test_two_dimensional_ones_too():
    shapes = {"w": (3, 4), "v": (5, 2)}
    params, all_grads = random_leaves(0, shapes=shapes), [random_leaves(step, shapes=shapes) for step in range(1, 4)]
    wanted, _, _ = stepped(lambda leaves: torch.optim.Muon(leaves, lr=0.1), params, all_grads, [0.1] * 3)
    assert not differences(run(ps.from_torch(torch.optim.Muon, lr=0.1), params, all_grads)[0], wanted)


def test_groups_are_torchs_param_groups():
    params, all_grads = random_leaves(0), some_gradients()
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [leaves["w"], leaves["scalar"]]},
            {"params": [leaves["conv"]], "weight_decay": 0.0},
            {"params": [leaves["b"]], "betas": (0.5, 0.6)},
        ],
        lr=0.1,
        weight_decay=0.2,
    )
    for step, grads in enumerate(all_grads):
        optimizer.param_groups[2]["lr"] = rate(step)
        for name, leaf in leaves.items():
            leaf.grad = grads.get(name)
        optimizer.step()
    groups = {"co*": {"weight_decay": 0.0}, "b": {"betas": (0.5, 0.6), "lr": rate}}
    lifted = ps.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.2, groups=groups)
    metrics = {}
    got, _ = run(lifted, params, all_grads, metrics=metrics)
    assert not differences(got, {name: leaf.detach() for name, leaf in leaves.items()})
    assert metrics["lr"] == 0.1


def test_the_first_glob_that_matches_counts():
    lifted = ps.from_torch(torch.optim.SGD, lr=1.0, groups={"b": {"lr": 0.5}, "*": {"lr": 0.25}})
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    new, _ = run(lifted, params, [{"a": torch.ones(1), "b": torch.ones(1)}])
    assert [leaf.item() for leaf in new.values()] == [-0.25, -0.5]


def test_python_numbers_come_back_as_what_they_were():
    seen = []

    class Watching(CountingNormalized):
        def step(self, closure=None):
            seen.append([type(state["steps"]) for state in self.state.values()] + [type(self.param_groups[0]["count"])])
            return super().step()

    params, all_grads = random_leaves(0), [random_leaves(step) for step in range(1, 4)]
    optimizer = ps.from_torch(Watching, lr=0.1)
    opt_state = optimizer.init(params)
    seen.clear()
    for step, grads in enumerate(all_grads):
        params, opt_state = optimizer.update(grads, opt_state, params, step=step)
    assert seen == [[int], [int] * 5, [int] * 5]
    slots = opt_state["Watching"]
    assert {name: (leaf.item(), leaf.dtype) for name, leaf in slots["steps"].items()} == dict.fromkeys(
        params, (3, torch.int64)
    )
    assert slots["groups"]["0"]["count"].item() == 3
    assert slots["groups"]["0"]["largest"].dtype == torch.float64
    assert list(slots) == ["steps", "start", "pair.0", "started", "groups"]


def test_state_that_starts_as_a_copy_of_the_parameter_is_made_at_its_first_update():
    params = {"w": torch.tensor([2.0]), "v": torch.tensor([5.0])}
    optimizer = ps.from_torch(CountingNormalized, lr=0.5)
    opt_state = optimizer.init(params)
    assert not opt_state["CountingNormalized"]["started"]["w"]
    changed = {**params, "v": torch.tensor([7.0])}  # between init and the first update
    _, opt_state = optimizer.update({"v": torch.ones(1)}, opt_state, changed, step=0)
    assert opt_state["CountingNormalized"]["start"]["v"].item() == 7.0
    assert {name: leaf.item() for name, leaf in opt_state["CountingNormalized"]["started"].items()} == {
        "w": False, "v": True
    }  # fmt: skip


class Noisy(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.add_(torch.randn_like(p), alpha=-self.param_groups[0]["lr"])


def test_random_numbers_of_a_class_derive_from_the_step():
    params, grads = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    optimizer = ps.from_torch(Noisy)
    torch.manual_seed(0)
    ambient = torch.get_rng_state()
    first, second = (optimizer.update(grads, {}, params, step=step)[0]["w"] for step in (0, 1))
    optimizer.init(params)
    assert torch.equal(torch.get_rng_state(), ambient)
    torch.manual_seed(1)
    assert torch.equal(optimizer.update(grads, {}, params, step=0)[0]["w"], first)
    assert not torch.equal(first, second)


def test_branches_from_one_state_do_not_meet():
    optimizer, params = ps.from_torch(CountingNormalized, lr=0.1), random_leaves(0)
    params, opt_state = run(optimizer, params, some_gradients())
    before = copied(opt_state)
    branches = [optimizer.update(random_leaves(9), opt_state, params, step=5) for _ in range(3)]
    for (left, left_state), (right, right_state) in itertools.pairwise(branches):
        assert not differences(left, right)
        assert not differences(left_state, right_state)
    assert not differences(opt_state, before)


def test_two_lifted_optimizers_in_a_chain_of_calls_share_nothing():
    make = lambda: ps.from_torch(torch.optim.AdamW, lr=0.1)  # noqa: E731
    params = random_leaves(0)
    left, right = make(), make()
    assert left == right
    assert hash(left) == hash(right)
    _, left_state = run(left, params, some_gradients())
    _, right_state = run(right, params, some_gradients()[:1])
    again, _ = run(make(), params, some_gradients()[:1])
    assert not differences(run(right, params, some_gradients()[:1])[0], again)
    state = {"left": left_state, "right": right_state}
    ps.TrainState(step=0, params=params, buffers={}, opt_state=state, key=ps.key(0))  # refuses shared memory


def test_repr_names_the_call():
    optimizer = ps.from_torch(torch.optim.Adamax, lr=0.1, betas=(0.8, 0.9), groups={"*.bias": {"lr": 0.2}})
    assert repr(optimizer) == (
        "from_torch(Adamax, lr=0.1, betas=(0.8, 0.9), groups={'*.bias': {'lr': 0.2}}, elementwise=True)"
    )


def test_the_class_default_is_the_rate_when_none_is_given():
    metrics = {}
    optimizer = ps.from_torch(torch.optim.Adamax)
    run(optimizer, {"w": torch.ones(1)}, [{"w": torch.ones(1)}], metrics=metrics)
    assert metrics == {"lr": 2e-3}


def test_without_weight_decay():
    groups = {"w": {"weight_decay": 0.5}}
    optimizer = ps.from_torch(torch.optim.AdamW, weight_decay=0.1, groups=groups).without_weight_decay()
    assert optimizer == ps.from_torch(torch.optim.AdamW, weight_decay=0.0, groups={"w": {"weight_decay": 0.0}})
    with pytest.raises(TypeError, match="Rprop has no argument weight_decay"):
        ps.from_torch(torch.optim.Rprop).without_weight_decay()


class Base(torch.optim.Optimizer):
    """A class that is to be refused: `keep` does what is wrong with it, once a step."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})
        self.calls, self.log = 0, []

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.keep(p, self.state[p], group)

    def keep(self, p, state, group):
        raise NotImplementedError


class KeepsText(Base):
    def keep(self, p, state, group):
        state["mode"] = "warm"


class KeepsAttribute(Base):
    def keep(self, p, state, group):
        self.calls += 1


class KeepsList(Base):
    def keep(self, p, state, group):
        self.log.append(1)


class KeepsForAll(Base):
    def keep(self, p, state, group):
        self.state["global"]["step"] = torch.ones(1)


class KeepsMoreLater(Base):
    def keep(self, p, state, group):
        if "m" in state:
            state["v"] = torch.zeros_like(p)
        state["m"] = torch.zeros_like(p)


class KeepsTextInGroup(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, phase="first")

    def keep(self, p, state, group):
        group["phase"] = "second"


class ChangesItsRate(Base):
    def keep(self, p, state, group):
        group["lr"] *= 0.5


class Wraps(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.inner = torch.optim.SGD([p for group in self.param_groups for p in group["params"]], lr=lr)

    def keep(self, p, state, group):
        self.inner.step()


class KeepsOwnName(Base):
    def keep(self, p, state, group):
        state["started"] = torch.ones(())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.from_torch(torch.nn.Linear), "takes a subclass of torch.optim.Optimizer, got <class"),
        (lambda: ps.from_torch(torch.optim.LBFGS), "LBFGS needs a closure that computes the loss again"),
        (lambda: ps.from_torch(torch.optim.SGD, groups={"w": 0.1}), "groups maps globs to options, got 0.1 for 'w'"),
        (lambda: ps.from_torch(torch.optim.SparseAdam), "SparseAdam does not support dense gradients"),
        (lambda: ps.from_torch(KeepsText), "it keeps 'mode' for each parameter, a str, and only tensors and numbers"),
        (lambda: ps.from_torch(KeepsAttribute), "its attributes calls change in a step, which are in no state_dict"),
        (lambda: ps.from_torch(KeepsList), "its attributes log change in a step"),
        (lambda: ps.from_torch(KeepsForAll), r"it keeps \['global'\] besides what it keeps for each parameter"),
        (lambda: ps.from_torch(KeepsMoreLater), r"what it keeps changes: m torch.float32 \(2, 3\), then m "),
        (lambda: ps.from_torch(KeepsTextInGroup), "steps change 'phase' in its param_groups from 'first' to 'second'"),
        (lambda: ps.from_torch(ChangesItsRate, lr=ps.constant(0.1)), "changes its learning rate itself: give a number"),
        (lambda: ps.from_torch(Wraps), "Wraps cannot be lifted: it holds another one"),
        (lambda: ps.from_torch(KeepsOwnName), "it keeps 'started', a name of from_torch's own"),
        (lambda: ps.from_torch(torch.optim.Adafactor, elementwise=True), "so it is not elementwise"),
        (lambda: ps.from_torch(torch.optim.SGD, momentun=0.9), "momentun"),
    ],
)
def test_what_cannot_be_lifted_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make().init({"w": torch.ones(2, 3)})


def test_a_glob_that_matches_nothing_is_an_error():
    lifted = ps.from_torch(torch.optim.SGD, groups={"blcoks.*": {"lr": 0.1}})
    with pytest.raises(ValueError, match=r"SGD: the group 'blcoks.\*' matches no parameter.*did you mean 'blocks.\*'"):
        lifted.init({"blocks.0": torch.ones(2)})


class ChangesLate(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, phase="first")

    def keep(self, p, state, group):
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 4:
            group["phase"] = "second"


class GrowsLate(Base):
    def keep(self, p, state, group):
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 4:
            state["more"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("cls", "message"),
    [(ChangesLate, "this step changed phase, which its first two do not"), (GrowsLate, "laid out otherwise than two")],
)
def test_what_shows_only_later_is_refused_then(cls, message):
    params = {"w": torch.ones(2)}
    optimizer = ps.from_torch(cls)
    params, opt_state = run(optimizer, params, [params] * 3)
    before = copied({"params": params, "state": opt_state})
    with pytest.raises(TypeError, match=message):
        optimizer.update(params, opt_state, params, step=3)
    assert not differences({"params": params, "state": opt_state}, before)


def test_a_number_given_as_rate_may_be_changed_by_the_class():
    params = {"w": torch.ones(1)}
    _, opt_state = run(ps.from_torch(ChangesItsRate, lr=0.1), params, [params] * 3)
    assert opt_state["ChangesItsRate"]["groups"]["0"]["lr"].item() == 0.1 * 0.5**3


def test_missing_state_is_named():
    optimizer = ps.from_torch(torch.optim.Adamax)
    with pytest.raises(ValueError, match="Adamax has no 'step' for 'w': the state was made without"):
        optimizer.update({"w": torch.ones(1)}, {}, {"w": torch.ones(1)}, step=0)
    with pytest.raises(ValueError, match="gradients for unknown parameters 'v'"):
        optimizer.update({"v": torch.ones(1)}, {}, {"w": torch.ones(1)}, step=0)


def test_the_probe_needs_no_memory_for_torchs_classes():
    huge = {"w": torch.empty(2**20, 2**20, device="meta")}
    slots = flat(ps.from_torch(torch.optim.AdamW).init(huge))
    assert {leaf.device.type for leaf in slots.values()} == {"meta"}
    assert slots["/AdamW/exp_avg/w"].shape == (2**20, 2**20)


class CountsLate(Base):
    """Numbers of the class's own in its group, one of which changes only in the third step."""

    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, lr, scale=scale, rounds=0, boost=1.0)

    def keep(self, p, state, group):
        group["rounds"] += 1
        if group["rounds"] >= 3:
            group["boost"] *= 2.0
        p.data.add_(p.grad, alpha=-group["lr"] * group["scale"] * group["boost"])


def test_numbers_of_a_group_that_change_only_later_are_kept_too():
    params, all_grads = {"w": torch.ones(2)}, [{"w": torch.ones(2)}] * 5
    wanted, *_ = stepped(lambda leaves: CountsLate(leaves, scale=0.5), params, all_grads, [0.1] * 5)
    got, opt_state = run(ps.from_torch(CountsLate, lr=0.1, scale=0.5), params, all_grads)
    assert not differences(got, wanted)
    kept = opt_state["CountsLate"]["groups"]["0"]
    assert {key: leaf.item() for key, leaf in kept.items()} == {"rounds": 5, "boost": 8.0}

"""Schedules: what they promise at their corners, and the same numbers for an int and a tensor step."""

import itertools
import math

import pytest
import torch

import purestep as ps

SCHEDULES = [
    ps.constant(0.3),
    ps.linear(1.0, 0.1, 7),
    ps.cosine(2.0, 9, final=0.5),
    ps.warmup_cosine(3e-4, 5, 20),
    ps.warmup_cosine(3e-4, 0, 20, final=1e-5),
    ps.warmup_stable_decay(1.0, 3, 15, 4, final=0.1),
    ps.join([ps.linear(0.0, 1.0, 4), ps.constant(1.0), ps.cosine(1.0, 5)], [4, 8]),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_an_int_gives_a_float_and_a_tensor_the_same_number(schedule):
    for step in range(25):
        number, tensor = schedule(step), schedule(torch.tensor(step))
        assert isinstance(number, float)
        assert tensor.shape == ()
        assert tensor.dtype == torch.float64
        assert tensor.item() == pytest.approx(number, rel=1e-14, abs=1e-18)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_prints_as_the_call_that_makes_it(schedule):
    assert eval(
        repr(schedule), vars(ps) | {name: getattr(ps, name) for name in ps.__all__[1:] if hasattr(ps, name)}
    ) == (schedule)
    assert hash(schedule) == hash(schedule)


@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_the_first_update_of_a_warmup_learns_and_the_last_reaches_the_peak(warmup):
    for schedule in (ps.warmup_cosine(1.0, warmup, 30), ps.warmup_stable_decay(1.0, warmup, 30, 10)):
        rates = [schedule(step) for step in range(warmup)]
        assert rates == pytest.approx([(k + 1) / warmup for k in range(warmup)])
        assert schedule(warmup) == 1.0


def test_decay_reaches_final_after_the_last_update_and_stays():
    for schedule in (ps.warmup_cosine(1.0, 5, 20, final=0.25), ps.warmup_stable_decay(1.0, 5, 20, 7, final=0.25)):
        assert schedule(19) > 0.25
        assert schedule(20) == schedule(1000) == 0.25
        after_warmup = [schedule(step) for step in range(5, 21)]
        assert all(a >= b for a, b in itertools.pairwise(after_warmup))


def test_stable_means_stable():
    schedule = ps.warmup_stable_decay(0.7, 5, 100, 10)
    assert {schedule(step) for step in range(5, 91)} == {0.7}
    assert schedule(91) < 0.7


def test_cosine_is_half_a_cosine():
    for step in range(11):
        assert ps.cosine(3.0, 10, final=1.0)(step) == pytest.approx(2.0 + math.cos(math.pi * step / 10))


def test_join_counts_from_the_boundary():
    schedule = ps.join([lambda step: 100 + step, lambda step: 200 + step, lambda step: 300 + step], [3, 5])
    assert [schedule(step) for step in range(7)] == [100, 101, 102, 200, 201, 300, 301]
    assert [schedule(torch.tensor(step)).item() for step in range(7)] == [100, 101, 102, 200, 201, 300, 301]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.constant(math.nan), "constant: value must be a finite number, got nan"),
        (lambda: ps.constant("0.1"), "constant: value must be a finite number, got '0.1'"),
        (lambda: ps.linear(0.0, 1.0, 0), "linear: steps must be an integer of at least 1, got 0"),
        (lambda: ps.cosine(1.0, 10.0), "cosine: steps must be an integer of at least 1, got 10.0"),
        (lambda: ps.warmup_cosine(1.0, -1, 10), "warmup_cosine: warmup_steps must be an integer of at least 0, got -1"),
        (lambda: ps.warmup_cosine(1.0, 10, 10), "warmup_steps 10 must be less than total_steps 10"),
        (
            lambda: ps.warmup_stable_decay(1.0, 6, 10, 5),
            "warmup_steps 6 \\+ decay_steps 5 must not exceed total_steps 10",
        ),
        (lambda: ps.join([ps.constant(1.0)], [3]), "got 1 schedules and 1 boundaries"),
        (lambda: ps.join([], []), "got 0 schedules"),
        (lambda: ps.join([ps.constant(1.0)] * 3, [5, 5]), "increasing positive integers, got \\[5, 5\\]"),
    ],
)
def test_bad_arguments_are_errors_when_the_schedule_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_is_no_schedule_to_join():
    with pytest.raises(TypeError, match=r"got 0.1; use constant\(value\)"):
        ps.join([ps.constant(1.0), 0.1], [5])

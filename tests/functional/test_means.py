"""`Mean`: means add, and nothing divides by zero."""

import pytest
import torch
import torch.utils._pytree as pytree

import purestep as ps


def tensors(total, weight):
    return ps.Mean(torch.tensor(total), torch.tensor(weight))


@pytest.mark.parametrize("make", [ps.Mean, tensors, lambda t, w: ps.Mean(torch.tensor(t), w)])
def test_the_mean_of_all_tokens_does_not_depend_on_their_grouping(make):
    tokens = [1.0, 2.0, 3.0, 10.0]
    whole = make(sum(tokens), 4)
    for split in range(5):
        left, right = tokens[:split], tokens[split:]
        assert (make(sum(left), len(left)) + make(sum(right), len(right))).value == whole.value == 4.0
    assert sum([make(x, 1) for x in tokens]).value == 4.0


@pytest.mark.parametrize("make", [ps.Mean, tensors, lambda t, w: ps.Mean(t, torch.tensor(w))])
def test_no_weight_gives_zero_not_nan(make):
    mean = make(0.0, 0)
    assert float(mean) == 0.0
    assert float(mean + make(6.0, 3)) == 2.0


def test_a_total_that_is_not_finite_stays_visible_without_weight():
    assert torch.isnan(tensors(float("nan"), 0).value)
    assert torch.isnan(tensors(float("inf"), 0).value)


def test_the_gradient_of_an_empty_mean_is_zero():
    total = torch.zeros((), requires_grad=True)
    ps.Mean(total * 3, torch.tensor(0)).value.backward()
    assert total.grad == 0


def test_value_has_at_least_fp32():
    assert tensors(3.0, 2).value.dtype == torch.float32
    assert ps.Mean(torch.tensor(3.0, dtype=torch.bfloat16), 2).value.dtype == torch.float32
    assert ps.Mean(torch.tensor(3.0, dtype=torch.float64), torch.tensor(2)).value.dtype == torch.float64
    assert ps.Mean(torch.tensor(3), torch.tensor(2)).value == 1.5


def test_of_leaves_means_alone_and_wraps_scalars():
    mean = ps.Mean(6.0, 3)
    assert ps.Mean.of(mean) is mean
    assert ps.Mean.of(torch.tensor(3.0)) == ps.Mean(3.0, 1)
    assert ps.Mean.of(3) == ps.Mean(3.0)


def test_a_mean_is_a_pytree_with_named_leaves():
    doubled = pytree.tree_map(lambda x: 2 * x, {"loss": ps.Mean(1.0, 2.0)})
    assert doubled == {"loss": ps.Mean(2.0, 4.0)}
    paths, _ = pytree.tree_flatten_with_path(ps.Mean(1.0, 2.0))
    assert [pytree.keystr(path) for path, _ in paths] == [".total", ".weight"]
    assert pytree.tree_map(lambda x: None, ps.Mean(1.0)).total is None  # unflattening does not judge


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.Mean.of(torch.ones(2, 3)), ValueError, r"scalar, got a tensor of shape \(2, 3\); reduce it first"),
        (
            lambda: ps.Mean(1.0, torch.ones(1)),
            ValueError,
            r"Mean.weight must be a scalar, got a tensor of shape \(1,\)",
        ),
        (lambda: ps.Mean("3"), TypeError, "Mean.total must be a 0-d tensor or a number, got str"),
        (lambda: ps.Mean.of(None), TypeError, "got NoneType"),
        (lambda: ps.Mean(1.0, -1), ValueError, "must not be negative, got -1"),
        (lambda: ps.Mean(1.0, float("nan")), ValueError, "must not be negative, got nan"),
        (lambda: ps.Mean(1.0) + 1, TypeError, "unsupported operand"),
    ],
)
def test_what_is_no_mean_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()

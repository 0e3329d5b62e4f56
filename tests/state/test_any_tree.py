"""Trees with names and containers of any kind: they come back as they were, with their types, or are refused."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, namedtuple

import pytest
import torch
from safetensors.torch import load_file

from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from tests.state.test_checkpoint import abstract_of, all_formats, assert_same, make_state

# --- trees of any kind -----------------------------------------------------------------------------------------------

AWKWARD = [
    "a.b",
    "a/b",
    "a~1b",
    "\u00e9",
    "e\u0301",
    "\U0001f600",
    "",
    ".",
    "..",
    "/",
    "x" * 300,
    "__metadata__",
    " ",
    "\n\0",
]
AWKWARD += ["step", "~", "~i1", "1", '"', "\\", "%2F", "*", "[a]"]


def typed(tree):
    """A tree in which types, key order, nan and -0.0 can be compared."""
    if isinstance(tree, dict):
        return ["dict", *((type(k).__name__, k, typed(v)) for k, v in tree.items())]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *map(typed, tree)]
    if isinstance(tree, torch.Tensor):
        return [str(tree.dtype), tree.shape, repr(tree)]
    return [type(tree).__name__, repr(tree)]


@pytest.mark.parametrize("tree", ["params", "buffers", "opt_state", "ema", "extra"])
@all_formats
def test_awkward_names_survive_in_every_tree(tmp_path, format, tree):
    names = [name for name in AWKWARD if format == "dcp" or name != "__metadata__" or tree not in ("params", "buffers")]
    leaves = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    if tree == "extra":
        leaves |= {1: torch.tensor(-1.0), -7: {2**63: torch.tensor(-2.0)}, "a": {"b": torch.tensor(-3.0)}}
    state = make_state(**({tree: {"o": {"s": leaves}} if tree == "opt_state" else leaves}))
    restored = restore(save(tmp_path / "x", state, format=format), abstract_of(state))
    assert_same(restored, state)
    assert typed(getattr(restored, tree)) == typed(getattr(state, tree))
    if format != "dcp" and tree == "params":
        assert load_file(tmp_path / "x/model/model.safetensors").keys() == {*names, "mean"}


@all_formats
def test_any_container_survives_in_extra(tmp_path, format):
    scalars = [None, True, False, 0, 1, -1, 2**64, -(2**2000), 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan]
    scalars += ["", "nan", "\u00fc\0\U0001f600", "1e-4", "None", "~i1"]
    extra = {
        "scalars": scalars,
        "tuple": tuple(scalars),
        1: {"1": 1, 1: "1", "~i1": {}, "": []},
        "nested": [[], (), {}, [()], ({}, [torch.tensor(1)])],
        "ordered": OrderedDict(b=1, a=2),
        "deep": [[[[{"x": (1, [2, (3,)])}]]]],
    }
    state = make_state(extra=extra)
    restored = restore(save(tmp_path / "x", state, format=format), state)
    assert_same(restored, state)
    assert typed(restored.extra) == typed(extra)
    assert typed(restored.extra) != typed({**extra, "tuple": list(scalars)})


@pytest.mark.parametrize(
    "value", [namedtuple("Point", "x y")(1, 2), dataclasses.make_dataclass("D", ["x"])(1), {1, 2}, b"x", 1j, object()]
)
def test_what_is_no_plain_value_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"'extra/a/0' must be a tensor, a number, a string or None, got"):
        make_state(extra={"a": [value]})

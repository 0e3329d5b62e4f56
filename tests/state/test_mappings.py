"""Read-only mappings: they read as dicts, refuse to change, and can be consumed under whoever holds them."""

import copy
import json
import pickle

import pytest
import torch
import torch.utils._pytree as pytree

from purestep.state import ConsumedStateError, FrozenDict
from purestep.state.mappings import consume, freeze, frozen_dicts

CHANGES = {
    "set": lambda d: d.__setitem__("a", 2),
    "delete": lambda d: d.__delitem__("a"),
    "clear": lambda d: d.clear(),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("b", 2),
    "update": lambda d: d.update(b=2),
    "ior": lambda d: d.__ior__({"b": 2}),
}

READS = {
    "item": lambda d: d["a"],
    "iter": list,
    "len": len,
    "bool": bool,
    "contains": lambda d: "a" in d,
    "reversed": lambda d: list(reversed(d)),
    "keys": lambda d: d.keys(),
    "values": lambda d: d.values(),
    "items": lambda d: d.items(),
    "get": lambda d: d.get("a"),
    "copy method": lambda d: d.copy(),
    "equal": lambda d: d == {"a": 1},
    "not equal": lambda d: d != {"a": 1},
    "or": lambda d: d | {},
    "ror": lambda d: {} | d,
    "unpack": lambda d: {**d},
    "call": lambda d: dict(**d),
    "dict": dict,
    "dict update": lambda d: {}.update(d),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "sorted": sorted,
    "json": json.dumps,
    "match": lambda d: match_a(d),
    "tree_leaves": pytree.tree_leaves,
    "tree_map": lambda d: pytree.tree_map(lambda x: x, {"outer": d}),
    "functional_call": lambda d: torch.func.functional_call(torch.nn.Linear(1, 1), (d, {}), torch.ones(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_way_to_change_is_refused(name):
    frozen = FrozenDict(a=1)
    with pytest.raises(TypeError, match=r"read-only; build a changed copy.*state\.replace"):
        CHANGES[name](frozen)
    assert frozen == {"a": 1}


def test_augmented_or_is_refused_and_leaves_the_name_alone():
    frozen = held = FrozenDict(a=1)
    with pytest.raises(TypeError, match="read-only"):
        frozen |= {"b": 2}
    assert frozen is held
    assert held == {"a": 1}


@pytest.mark.parametrize("name", READS)
def test_every_way_to_read_a_consumed_mapping_raises(name):
    live = FrozenDict(a=1) if name != "functional_call" else FrozenDict(torch.nn.Linear(1, 1).named_parameters())
    READS[name](live)  # the read itself is sound: what raises below is the consuming
    held = live
    consume(live, "donated to a test")
    with pytest.raises(ConsumedStateError, match="donated to a test"):
        READS[name](held)


def test_a_consumed_mapping_still_has_a_repr_and_refuses_change():
    frozen = FrozenDict(a=1)
    consume(frozen, "donated")
    assert repr(frozen) == str(frozen) == "<consumed mapping>"
    with pytest.raises(TypeError, match="read-only"):
        frozen["a"] = 2


def test_consuming_one_mapping_leaves_others_alone():
    first, second = FrozenDict(a=1), FrozenDict(a=1)
    consume(first, "donated")
    assert second["a"] == 1
    assert type(FrozenDict(a=1)) is FrozenDict


def test_it_is_a_dict_in_every_reading_way():
    frozen = FrozenDict(b=1, a=2)
    assert isinstance(frozen, dict)
    assert list(frozen) == ["b", "a"]
    assert frozen == {"a": 2, "b": 1}
    assert type(frozen | {"c": 3}) is dict
    assert {**frozen, "c": 3} == {"b": 1, "a": 2, "c": 3}
    assert json.loads(json.dumps(frozen)) == frozen


def test_copies_are_frozen_too():
    frozen = FrozenDict(a=FrozenDict(b=[1]))
    assert copy.copy(frozen) is frozen
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert other == frozen
        assert type(other) is type(other["a"]) is FrozenDict
        assert other["a"]["b"] is not frozen["a"]["b"]


def test_freeze_copies_containers_and_not_leaves():
    leaf = torch.ones(2)
    source = {"a": {"b": leaf}, "c": [1, {"d": 2}], "e": ({"f": 3},)}
    frozen = freeze(source)
    source["a"]["b"] = None
    source["c"].append(5)
    assert frozen["a"]["b"] is leaf
    assert frozen["c"] == [1, {"d": 2}]
    assert [type(x) for x in (frozen, frozen["a"], frozen["c"][1], frozen["e"][0])] == [FrozenDict] * 4
    assert freeze(frozen) is frozen
    assert len(list(frozen_dicts(frozen))) == 4


def test_frozen_dicts_passes_consumed_ones_over():
    frozen = freeze({"a": {"b": 1}})
    inner = frozen["a"]
    consume(inner, "donated")
    assert [id(x) for x in frozen_dicts(frozen)] == [id(frozen)]


def test_pytree_round_trip_keeps_type_order_and_paths():
    frozen = freeze({"b": {"x": 1}, "a": 2})
    leaves, spec = pytree.tree_flatten(frozen)
    assert leaves == [1, 2]
    again = pytree.tree_unflatten([10, 20], spec)
    assert again == {"b": {"x": 10}, "a": 20}
    assert list(again) == ["b", "a"]
    assert type(again) is type(again["b"]) is FrozenDict
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(frozen)[0]]
    assert paths == ["['b']['x']", "['a']"]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_functional_call_takes_one_in_a_tuple():
    linear = torch.nn.Linear(2, 1)
    params = FrozenDict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    assert torch.func.functional_call(linear, (params, FrozenDict()), torch.tensor([1.0, 2.0])).item() == 3.0


def match_a(mapping):
    match mapping:
        case {"a": value}:
            return value

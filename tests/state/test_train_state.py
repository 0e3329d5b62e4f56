"""TrainState: read-only, one owner a buffer, consumed when donated, a pytree."""

import copy
import pickle

import pytest
import torch
import torch.utils._pytree as pytree

from purestep.state import ConsumedStateError, FrozenDict, TrainState, key
from purestep.state.names import unescape
from purestep.state.train_state import clone_leaf, hand_over, make_state, map_leaves, named_leaves, padded_storage
from tests.ranks import run_ranks

FIELDS = ("step", "params", "buffers", "opt_state", "key", "ema", "extra")


def example_state(**changes) -> TrainState:
    fields = {
        "step": 3,
        "params": {"blocks.0.weight": torch.ones(2, 3), "head.weight": torch.zeros(3)},
        "buffers": {"norm.count": torch.tensor(7)},
        "opt_state": {"adamw": {"exp_avg": {"head.weight": torch.ones(3)}}},
        "key": key(0),
        "ema": {"head.weight": torch.ones(3)},
        "extra": {"scale": torch.tensor(2.0), "notes": [1, ("a", None)], "nested": {"t": torch.ones(1)}},
    }
    return TrainState(**(fields | changes))


NAMES = [
    "params/blocks.0.weight",
    "params/head.weight",
    "buffers/norm.count",
    "opt_state/adamw/exp_avg/head.weight",
    "ema/head.weight",
    "extra/scale",
    "extra/nested/t",
]


# --- leaves ----------------------------------------------------------------------------------------------------------


def test_leaves_are_named_by_their_path():
    state = example_state()
    assert list(state.leaves()) == NAMES
    assert state.leaves()["opt_state/adamw/exp_avg/head.weight"] is state.opt_state["adamw"]["exp_avg"]["head.weight"]
    assert ("extra/notes/1/0", "a") in list(named_leaves(state))


def test_no_two_leaves_have_one_name():
    keys = ["a", "a/b", "a~1b", "a~b", "a~0b", "", "~", "/", "//", "1", 1, "~i1", -1, 2**63, "i1", "..", "__metadata__"]
    keys += ["\u00e9", "e\u0301", "x" * 300, "blocks.0.weight"]
    extra = {key: torch.tensor(i) for i, key in enumerate(keys)} | {"a": {"b": torch.tensor(-1), "": torch.tensor(-2)}}
    state = example_state(extra=extra)
    names = [name for name in state.leaves() if name.startswith("extra/")]
    assert len(set(names)) == len(keys) + 1
    for name in names:
        key, *inner = [unescape(part) for part in name.split("/")[1:]]
        assert state.leaves()[name] is (extra[key][inner[0]] if inner else extra[key]), name
        assert type(key) is type(next(other for other in keys if other == key)), name
    assert {"extra/blocks.0.weight", "extra/a~1b", "extra/~", "extra/~i1", "extra/1", "extra/a/b", "extra/a/~"} <= set(
        names
    )
    assert [name for name, _ in map_leaves(lambda name, leaf: name, state).extra["a"].items()] == ["b", ""]


def test_an_escape_that_stands_for_nothing_is_refused():
    for part in ("", "a~", "~2", "~i", "~i01", "~i-0", "~ix", "a~i5"):
        with pytest.raises(ValueError, match="is no part of a leaf name"):
            unescape(part)


def test_no_ema_is_no_leaf_and_an_empty_one_stays_empty():
    assert example_state(ema=None).ema is None
    assert not any(name.startswith("ema") for name, _ in named_leaves(example_state(ema=None)))
    assert example_state(ema={}).ema == {}
    assert map_leaves(lambda name, leaf: leaf, example_state(ema=None)).ema is None


def test_map_leaves_sees_every_leaf_with_its_name():
    state = example_state()
    mapped = map_leaves(lambda name, leaf: name, state, step=9)
    assert mapped.step == 9
    assert mapped.key == state.key
    assert mapped.params["head.weight"] == "params/head.weight"
    assert mapped.extra["notes"] == ["extra/notes/0", ("extra/notes/1/0", "extra/notes/1/1")]
    assert [leaf for _, leaf in named_leaves(mapped)] == [name for name, _ in named_leaves(state)]


# --- read-only -------------------------------------------------------------------------------------------------------


def test_fields_and_mappings_are_read_only():
    state = example_state()
    with pytest.raises(AttributeError):
        state.step = 4
    with pytest.raises(AttributeError):
        del state.params
    for mapping in (state.params, state.opt_state["adamw"]["exp_avg"], state.ema, state.extra["nested"]):
        with pytest.raises(TypeError, match="read-only"):
            mapping["head.weight"] = torch.ones(3)


def test_a_state_does_not_see_later_changes_of_what_it_was_made_from():
    params, slots = {"w": torch.ones(1)}, {"sgd": {"momentum": {"w": torch.ones(1)}}}
    state = example_state(params=params, opt_state=slots)
    params["extra"] = torch.ones(1)
    slots["sgd"]["momentum"].clear()
    assert list(state.params) == ["w"]
    assert list(state.opt_state["sgd"]["momentum"]) == ["w"]


def test_replace_shares_what_it_does_not_change():
    state = example_state()
    later = state.replace(step=4, params={**state.params, "head.weight": torch.ones(3)})
    assert (state.step, later.step) == (3, 4)
    assert later.params["blocks.0.weight"] is state.params["blocks.0.weight"]
    assert later.opt_state is state.opt_state
    assert state.params["head.weight"].sum() == 0
    with pytest.raises(TypeError, match="parms"):
        state.replace(parms={})


def test_clone_owns_its_memory():
    state = example_state()
    other = state.clone()
    assert other.digest() == state.digest()
    for name, leaf in state.leaves().items():
        assert other.leaves()[name].untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
    other.params["head.weight"].add_(1)
    assert other.digest() != state.digest()
    assert other.extra["notes"] == state.extra["notes"]


def test_states_survive_pickle_and_deepcopy():
    state = example_state()
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.digest() == state.digest()
        assert type(other.params) is FrozenDict


# --- what is refused -------------------------------------------------------------------------------------------------

WRONG_TYPES = {
    "step is a bool": ({"step": True}, r"TrainState\.step must be an int, got True"),
    "step is a float": ({"step": 1.0}, r"TrainState\.step must be an int, got 1\.0"),
    "step is a tensor": ({"step": torch.tensor(1)}, r"TrainState\.step must be an int"),
    "key is a seed": ({"key": 0}, r"TrainState\.key must be a Key, got int; make one with ps\.key"),
    "params is a list": ({"params": [torch.ones(1)]}, r"TrainState\.params must be a mapping, got list"),
    "buffers is None": ({"buffers": None}, r"TrainState\.buffers must be a mapping, got NoneType"),
    "a number in params": ({"params": {"w": 1.0}}, r"'params/w' must be a tensor, got float"),
    "None in opt_state": ({"opt_state": {"a": {"m": {"w": None}}}}, r"'opt_state/a/m/w' must be a tensor, got None"),
    "a set in extra": ({"extra": {"a": {1, 2}}}, r"'extra/a' must be a tensor, a number, a string or None, got set"),
    "a key in extra": ({"extra": {"k": key(0)}}, r"'extra/k' must be a tensor, .*got Key"),
    "a bool as key": (
        {"extra": {"a": {True: 1}}},
        r"'extra/a' has the key True \(bool\): keys are strings, or integers",
    ),
    "a tuple as key": ({"opt_state": {("a", 1): {}}}, r"'opt_state' has the key \('a', 1\) \(tuple\)"),
    "a number as key": ({"extra": {1.5: 1}}, r"'extra' has the key 1\.5 \(float\)"),
    "an endless key": ({"extra": {2**64: 1}}, r"'extra' has the key 18446744073709551616 \(int\).* up to 64 bits"),
    "an object in extra": ({"extra": {"a": [torch.nn.Linear(1, 1)]}}, r"'extra/a/0' must be .*got Linear"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_refused_by_name(name):
    changes, message = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=message):
        example_state(**changes)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="counts updates done, got -1"):
        example_state(step=-1)


def aliases() -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    flat, grid = torch.zeros(12), torch.zeros(3, 4)
    words = torch.zeros(4, dtype=torch.int64)
    meta = torch.zeros(4, 4, device="meta")
    return {
        "the same tensor": (flat, flat, True),
        "a view of all": (flat, flat.view(3, 4), True),
        "a transposed view": (grid, grid.T, True),
        "a part of it": (flat, flat[6:9], True),
        "parts that meet": (flat[:6], flat[5:], True),
        "parts that touch": (flat[:6], flat[6:], False),
        "columns that interleave": (grid[:, ::2], grid[:, 1::2], False),
        "columns that cross": (grid[:, 1], grid[:, 1:3], True),
        "a row and a column that cross": (grid[1], grid[:, 2], True),
        "a column and rows below": (grid[:2, 0], grid[2], False),
        "another dtype, apart": (words[:2].view(torch.float32), words[2:], False),
        "another dtype, meeting": (words[:2], words.view(torch.float32)[3:], True),
        "another dtype, interleaved": (words[::2], words.view(torch.float32)[2::4], False),
        "another dtype, crossing": (words[::2], words.view(torch.float32)[1::4], True),
        "an expanded one and its source": (torch.zeros(1).expand(4), torch.zeros(1), False),
        "two expansions of one": (flat[:1].expand(4), flat[:1].expand(2, 2), True),
        "empty parts": (flat[:0], flat[:0], False),
        "a meta tensor and its view": (meta, meta.T, True),
        "meta rows apart": (meta[:2], meta[2:], False),
        "two meta tensors": (meta, torch.zeros(4, 4, device="meta"), False),
    }


@pytest.mark.parametrize("name", aliases())
def test_leaves_that_share_memory_are_refused_and_only_those(name):
    first, second, shared = aliases()[name]
    for one, two in ((first, second), (second, first)):
        if not shared:
            TrainState(step=0, params={"a": one}, buffers={"b": two}, opt_state={}, key=key(0))
            continue
        with pytest.raises(ValueError, match=r"leaves '\S+' and '\S+' share memory.*clone one of them") as caught:
            TrainState(step=0, params={"a": one}, buffers={"b": two}, opt_state={}, key=key(0))
        assert "'params/a'" in str(caught.value)
        assert "'buffers/b'" in str(caught.value)


def test_aliases_are_found_among_many_slices_of_one_buffer():
    flat = torch.zeros(10_000)
    parts = {f"w{i}": flat[4 * i : 4 * i + 4] for i in range(2_500)}
    example_state(params=parts)
    with pytest.raises(ValueError, match=r"'params/w1200' and 'params/late' share memory"):
        example_state(params={**parts, "late": flat[4_803:4_804]})


# --- consumed --------------------------------------------------------------------------------------------------------


def consumed() -> tuple[TrainState, TrainState]:
    """A state that a step consumed, and what the step returned: it kept most of the old leaves and mappings."""
    old = example_state()
    new = make_state(step=4, params=dict(old.params), buffers=old.buffers, opt_state=old.opt_state, key=old.key,
                     ema=None, extra={})  # fmt: skip
    return old, hand_over(old, new, "train_step, step 3")


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_a_consumed_state_raises_with_the_ways_out(field):
    old, _ = consumed()
    with pytest.raises(ConsumedStateError, match=rf"TrainState\.{field}: .*donated to train_step, step 3") as caught:
        getattr(old, field)
    assert "state.clone()" in str(caught.value)
    assert "donate=False" in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [
        TrainState.leaves,
        TrainState.clone,
        TrainState.digest,
        lambda state: state.replace(step=1),
        pytree.tree_leaves,
        lambda state: pytree.tree_map(lambda x: x, state),
        lambda state: map_leaves(lambda name, leaf: leaf, state),
    ],
    ids=["leaves", "clone", "digest", "replace", "tree_leaves", "tree_map", "map_leaves"],
)
@pytest.mark.parametrize("which", ["the consumed state", "a sibling that shares its mappings"])
def test_every_use_of_a_consumed_state_raises(use, which):
    old = example_state()
    sibling = old.replace(step=50)
    hand_over(old, example_state(), "a step")
    with pytest.raises(ConsumedStateError, match="donated to a step"):
        use(old if which == "the consumed state" else sibling)


def test_a_mapping_that_was_held_is_consumed_with_its_state():
    old = example_state()
    held, deep = old.params, old.opt_state["adamw"]["exp_avg"]
    hand_over(old, example_state(), "a step")
    for mapping in (held, deep):
        with pytest.raises(ConsumedStateError, match="donated to a step"):
            mapping["head.weight"]


def test_the_new_state_has_mappings_of_its_own_and_the_same_leaves():
    old = example_state()
    held, leaf = old.buffers, old.opt_state["adamw"]["exp_avg"]["head.weight"]
    new = hand_over(old, old.replace(step=4, ema=None, extra={}), "a step")
    with pytest.raises(ConsumedStateError):
        _ = held["norm.count"]
    assert new.step == 4
    assert new.buffers["norm.count"] == 7
    assert new.opt_state["adamw"]["exp_avg"]["head.weight"] is leaf
    assert list(new.leaves()) == [name for name in NAMES if not name.startswith(("ema", "extra"))]
    assert type(new.opt_state["adamw"]["exp_avg"]) is FrozenDict


def test_a_state_is_consumed_once():
    old, new = consumed()
    with pytest.raises(ConsumedStateError, match="train_step, step 3"):
        hand_over(old, new, "another step")
    with pytest.raises(ConsumedStateError, match="train_step, step 3"):
        _ = old.step
    with pytest.raises(AttributeError, match="has no attribute 'parms'"):
        _ = old.parms
    assert not hasattr(example_state(), "parms")
    assert new.leaves()


def test_repr_never_raises_and_says_what_is_there():
    state = example_state()
    assert repr(state).startswith("TrainState(step=3, params=2 leaves (9 elements), buffers=1 leaves")
    sibling = state.replace(params={"w": torch.ones(1)})
    hand_over(state, sibling.replace(ema={}), "a step")
    assert repr(state) == "TrainState(<consumed>)"
    assert "params=1 leaves (1 elements)" in repr(sibling)
    assert "ema=<consumed>" in repr(sibling)


# --- pytree ----------------------------------------------------------------------------------------------------------


def test_pytree_round_trip():
    state = example_state()
    leaves, spec = pytree.tree_flatten(state)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.digest() == state.digest()
    assert type(again.opt_state["adamw"]) is FrozenDict
    assert again.key == state.key
    assert again.extra == state.extra


def test_tree_map_over_tensors_keeps_the_rest():
    abstract = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), example_state())
    assert isinstance(abstract, TrainState)
    assert abstract.step == 3
    assert all(leaf.is_meta for leaf in abstract.leaves().values())
    assert list(abstract.leaves()) == NAMES
    with pytest.raises(ValueError, match="no values to digest"):
        abstract.digest()


def test_paths_of_a_state_name_its_fields():
    paths = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(example_state())[0]}
    assert paths[".step"] == 3
    assert torch.equal(paths[".params['head.weight']"], torch.zeros(3))


# --- storage of uneven shards ----------------------------------------------------------------------------------------


def test_padded_storage_is_seen_only_behind_leading_rows():
    whole = torch.arange(8.0).view(4, 2)
    assert torch.equal(padded_storage(whole[:3]), whole)
    assert torch.equal(padded_storage(whole[:0]), whole)
    for tensor in (whole, whole[1:], whole[:, :1], whole.T, torch.tensor(1.0), torch.empty(0, 2), whole[:3].to("meta")):
        assert padded_storage(tensor) is None


def _clone_keeps_padding() -> list:
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    linear = nn.Linear(2, 3, bias=False)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    leaf = linear.weight.detach()
    copied = clone_leaf(leaf)
    sizes = [x._local_tensor.untyped_storage().nbytes() for x in (leaf, copied)]
    rebound = torch.equal(copied.full_tensor(), leaf.full_tensor())
    separate = copied._local_tensor.untyped_storage().data_ptr() != leaf._local_tensor.untyped_storage().data_ptr()
    return [tuple(copied._local_tensor.shape), sizes[0] == sizes[1], rebound, separate]


def test_clones_of_uneven_shards_keep_the_padding_behind_them():
    assert run_ranks(_clone_keeps_padding, 2) == [[(2, 2), True, True, True], [(1, 2), True, True, True]]

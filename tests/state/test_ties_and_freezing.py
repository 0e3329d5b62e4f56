"""Cases B19 and B22: tied weights, and weights frozen for a while, across a checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import nn

import purestep as ps
from purestep.state import key
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.exchange.importing import import_params
from purestep.state.exchange.ties import resolve_ties
from purestep.state.files.manifest import CheckpointError
from tests.state.test_checkpoint import assert_same

# --- B19 -------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """As in Hugging Face's models: the head's weight is the embedding's."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_b19_a_tie_is_one_leaf_for_every_reader(tmp_path):
    module = ps.shard(Tied())
    state = ps.init(module, ps.sgd(0.1), key(0))
    assert list(state.params) == ["embed.weight"]
    path = save(tmp_path / "x", state)
    assert_same(restore(path, ps.abstract_state(ps.shard(Tied()), ps.sgd(0.1))), state)
    plain = Tied()
    load_model(plain, path / "model/model.safetensors")
    assert plain.head.weight is plain.embed.weight
    assert torch.equal(plain.head.weight, state.params["embed.weight"])
    untied = ps.abstract_state(ps.shard(Tied(tie=False)), ps.sgd(0.1))
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: params/head\.weight"):
        restore(path, untied)
    both = restore(path, untied, rename={"embed.weight": ["embed.weight", "head.weight"]})
    assert both.params.keys() == {"embed.weight", "head.weight"}
    assert torch.equal(both.params["head.weight"], state.params["embed.weight"])
    assert both.params["head.weight"].data_ptr() != both.params["embed.weight"].data_ptr()

    # And back: two names of one value are one leaf again, two values are not.
    again = save(tmp_path / "both", both)
    assert_same(restore(again, state, rename={"head.weight": "embed.weight"}), state)
    other = {**both.params, "head.weight": both.params["head.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"params/embed.weight and params/head.weight would both become"):
        restore(save(again, both.replace(params=other)), state, rename={"head.weight": "embed.weight"})


@pytest.mark.parametrize("format", ["safetensors", "dcp", "safetensors_dcp"])
def test_b19_ties_are_recorded_and_a_module_without_them_is_given_both(tmp_path, format):
    module, optimizer = ps.shard(Tied()), ps.adamw(0.1)
    assert module.ties == (("embed.weight", "head.weight"),)
    state = ps.init(module, optimizer, key(0))
    path = save(tmp_path / "x", state, format=format, ties=module.ties)
    assert ps.describe(path).ties == module.ties
    if format != "dcp":
        with safe_open(path / "model/model.safetensors", "pt") as file:  # as safetensors.torch.save_model says it
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    untied = ps.abstract_state(ps.shard(Tied(tie=False)), optimizer)
    both, report = restore(path, untied, with_report=True)
    for name in ("params", "opt_state/adamw/exp_avg", "opt_state/adamw/exp_avg_sq"):
        assert (f"{name}/embed.weight", f"{name}/head.weight") in report.renamed
        assert torch.equal(both.leaves()[f"{name}/embed.weight"], both.leaves()[f"{name}/head.weight"])
    assert both.params["head.weight"].data_ptr() != both.params["embed.weight"].data_ptr()

    # Back into the module that ties: equal values are one leaf again, different ones are refused.
    again = save(tmp_path / "both", both, format=format)
    assert_same(restore(again, state, ties=module.ties), state)
    moved = {**both.params, "head.weight": both.params["head.weight"] + 1}
    other = save(tmp_path / "moved", both.replace(params=moved), format=format)
    with pytest.raises(CheckpointError, match=r"params/embed.weight and params/head.weight would both become"):
        restore(other, state, ties=module.ties)
    with pytest.raises(CheckpointError, match=r"not in the state asked for: params/head.weight"):
        restore(again, state)


def test_ties_that_cannot_be_are_refused(tmp_path):
    state = ps.init(ps.shard(Tied(tie=False)), ps.sgd(0.1), key(0))
    for ties, kind, said in (
        ([("embed.weight", "head.weight")], ValueError, "holds 'head.weight' as well"),
        ([("embedding", "x")], ValueError, "no such parameter"),
        ([("embed.weight",)], ValueError, "two names or more"),
        ([("embed.weight", "x"), ("head.weight", "x")], ValueError, "belongs to one"),
        (["embed.weight"], TypeError, "tuples of module paths"),
    ):
        with pytest.raises(kind, match=said):
            save(tmp_path / "x", state, ties=ties)
        assert not list(tmp_path.iterdir())


def test_checkpoints_keep_the_ties_of_their_run(tmp_path):
    module, optimizer = ps.shard(Tied()), ps.adamw(0.1)
    state = ps.init(module, optimizer, key(0))
    with ps.Checkpoints(tmp_path, ties=module.ties, async_save=True) as checkpoints:
        path = checkpoints.save(state)
        checkpoints.wait()
        assert ps.describe(path).ties == module.ties
    untied = ps.abstract_state(ps.shard(Tied(tie=False)), optimizer)
    both = ps.Checkpoints(tmp_path).restore_latest(untied)
    save(tmp_path / "step-00000001", both)
    assert_same(ps.Checkpoints(tmp_path, ties=module.ties).restore_latest(state), state)


def test_b19_a_file_with_both_names_of_a_tie(tmp_path):
    weight, ties = torch.randn(3, 2), [("embed.weight", "head.weight")]
    path = tmp_path / "model.safetensors"
    for file in (
        {"embed.weight": weight, "head.weight": weight.clone()},
        {"embed.weight": weight},
        {"head.weight": weight},
    ):
        resolved = resolve_ties(file, ties)
        assert list(resolved) == ["embed.weight"]
        assert torch.equal(resolved["embed.weight"], weight)
        save_file(file, path)
        with import_params(path, ties=ties) as params:
            assert list(params) == ["embed.weight"]
            assert torch.equal(params["embed.weight"].read(), weight)
    for wrong in (weight + 1, weight.double(), weight.clone().reshape(2, 3), weight.view(torch.int32) ^ 1):
        file = {"embed.weight": weight, "head.weight": wrong}
        with pytest.raises(ValueError, match=r"'embed\.weight' and 'head\.weight' are one tied weight, but"):
            resolve_ties(file, ties)
        save_file(file, path)
        with pytest.raises(CheckpointError, match="are one tied weight, but hold different values"):
            import_params(path, ties=ties)
    assert resolve_ties({"a": weight, "b": weight}, [("b", "a", "c")]).keys() == {"b"}
    assert resolve_ties({"a": weight}, [("x", "y")]) == {"a": weight}


# --- B22 -------------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.first.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def two(frozen: bool):
    module, optimizer = ps.shard(Two(frozen)), ps.adamw(0.1, weight_decay=0.0)
    return module, optimizer, ps.train_step(module, lambda model, x, key: ps.Mean(model(x).sum(), len(x)), optimizer)


def test_b22_frozen_and_unfrozen_across_a_checkpoint(tmp_path):
    x = torch.ones(2, 1)
    free, optimizer, step_free = two(frozen=False)
    icy, icy_optimizer, step_icy = two(frozen=True)
    start = ps.init(free, optimizer, key(0))
    trained, _ = step_free(start, x)

    # Frozen for a step, with the moments it had: they are carried along, saved and used again.
    between, _ = step_icy(trained, x)
    assert torch.equal(between.params["first.weight"], trained.params["first.weight"])
    restored = restore(save(tmp_path / "kept", between), ps.abstract_state(free, optimizer))
    assert_same(restored, between)
    assert step_free(restored, x)[0].digest() == step_free(between, x)[0].digest()

    # Frozen from the start: no moments are in the checkpoint, which is said; fresh ones have their own bias correction.
    cold = ps.init(icy, icy_optimizer, key(0))
    assert not any("first" in name for name in cold.leaves() if name.startswith("opt_state"))
    for _ in range(3):
        cold, _ = step_icy(cold, x)
    path = save(tmp_path / "cold", cold)
    assert_same(restore(path, ps.abstract_state(icy, icy_optimizer)), cold)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: opt_state/adamw/exp_avg/first\.weight"):
        restore(path, ps.abstract_state(free, optimizer))
    thawed, report = restore(path, start, strict="partial", with_report=True)
    assert set(report.missing) == {f"opt_state/adamw/{slot}/first.weight" for slot in ("exp_avg", "exp_avg_sq", "step")}
    after, _ = step_free(thawed, x)
    first_step = start.params["first.weight"] - after.params["first.weight"]
    assert first_step.item() == pytest.approx(0.1, rel=1e-5)  # what Adam's first step is, whatever the gradient
    with pytest.raises(ValueError, match=r"has no 'exp_avg' for 'first\.weight'"):
        step_free(cold, x)


@pytest.mark.parametrize("saves", [False, True])
def test_b22_the_first_step_is_the_same_with_and_without_saving(tmp_path, saves):
    module, optimizer, step = two(frozen=True)
    state = ps.init(module, optimizer, key(0))
    state = state.replace(params={name: torch.ones(1, 1) for name in state.params})
    if saves:
        state = restore(save(tmp_path / "x", state), ps.abstract_state(module, optimizer))
    state, _ = step(state, torch.ones(1, 1))
    assert state.params["second.weight"].item() == pytest.approx(0.9, rel=1e-6)
    assert state.params["first.weight"].item() == 1

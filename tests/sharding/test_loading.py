"""Weights from wherever they are kept into a module: exactly, or an error that says what does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

import purestep as ps
from purestep.sharding import loading
from tests.sharding.models import Recurrent, Rotary, Tied, on_meta
from tests.toys import Net


def values_of(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Random values for what the model keeps, tied leaves once."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: leaf for name, leaf in leaves.items() if name in model.state_dict()}
    return {
        name: torch.randn(leaf.shape, generator=generator) if leaf.is_floating_point() else torch.full(leaf.shape, 7)
        for name, leaf in kept.items()
    }


def assert_holds(loaded: tuple[dict[str, Tensor], dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    found = {**loaded[0], **loaded[1]}
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype, name
        assert torch.equal(found[name], leaf), name


def write(kind: str, folder: Path, values: dict[str, Tensor]) -> Path:
    """Keep the values in one of the ways of the field."""
    folder.mkdir(parents=True, exist_ok=True)
    params = {name: leaf for name, leaf in values.items() if "running" not in name and "num_batches" not in name}
    state = ps.TrainState(
        step=3,
        params=params,
        buffers={name: leaf for name, leaf in values.items() if name not in params},
        opt_state={"adamw": {"exp_avg": {name: torch.zeros_like(leaf) for name, leaf in params.items()}}},
        key=ps.key(0),
    )
    if kind == "file":
        save_file(values, folder / "weights.safetensors")
        return folder / "weights.safetensors"
    if kind == "folder":
        save_torch_state_dict(values, folder, max_shard_size=300)
    elif kind == "dcp folder":
        dcp.save({"model": values}, storage_writer=dcp.FileSystemWriter(str(folder)), no_dist=True)
    elif kind == "dcp shards":
        dcp.save(values, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)
    elif kind == "run":
        ps.Checkpoints(folder / "checkpoints").save(state.replace(step=2, params=values_of(nn.Linear(1, 1))))
        ps.Checkpoints(folder / "checkpoints").save(state)
    else:
        return ps.save(folder / "step-00000003", state, format=kind.removeprefix("checkpoint "))
    return folder


KINDS = ("file", "folder", "dcp folder", "dcp shards", "run", *(f"checkpoint {f}" for f in ("safetensors", "dcp")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_kind_of_source(kind, tmp_path):
    model = Net(batchnorm=True)
    values = values_of(model)
    path = write(kind, tmp_path / "x", values)
    module = ps.shard(on_meta(lambda: Net(batchnorm=True)))
    *loaded, report = ps.load_params(module, path, with_report=True)
    assert_holds(loaded, values)
    assert (set(report.loaded), report.missing, report.unexpected) == (set(values), (), ())
    state = ps.init(module, ps.sgd(0.1), ps.key(1), params=loaded[0], buffers=loaded[1])
    assert torch.equal(state.params["head.weight"], values["head.weight"])
    if kind == "folder":
        assert_holds(ps.load_params(module, str(path / "model.safetensors.index.json")), values)


def refused(module: ps.PureModule, source: Any, **options: Any) -> str:
    with pytest.raises(ps.CheckpointError) as caught:
        ps.load_params(module, source, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["file", "checkpoint safetensors"])
def test_one_error_names_everything_that_does_not_fit(kind, tmp_path):
    values = values_of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    values["1.weight"] = values["1.weight"].bfloat16()
    values["0.weight"] = values["0.weight"][:, :2].contiguous()
    values["extra"] = values.pop("1.bias")
    path = write(kind, tmp_path, values)
    module = ps.shard(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    said = refused(module, path)
    for line in (
        "missing in it: 1.bias",
        "not in the module: extra",
        "shape of 0.weight: (2, 2) in it, (2, 3) in the module",
        "dtype of 1.weight: bfloat16 in it, float32 in the module",
        "to cast, use strict='exact_but_dtype'",
    ):
        assert f"\n  {line}" in said
    assert "dtype" not in refused(module, path, strict="exact_but_dtype")
    partial = refused(module, path, strict="partial")
    assert "shape of 0.weight" in partial
    assert "1.bias" not in partial


@pytest.mark.parametrize("kind", ["file", "checkpoint safetensors"])
def test_a_part_is_loaded_when_asked_for_and_the_rest_is_initialized(kind, tmp_path):
    module = ps.shard(on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))))
    values = values_of(nn.Sequential(nn.Linear(3, 2)))
    path = write(kind, tmp_path, values | {"unused": torch.ones(1)})
    params, buffers, report = ps.load_params(module, path, strict="partial", with_report=True)
    assert_holds((params, buffers), values)
    assert (report.missing, report.unexpected) == (("1.weight", "1.bias"), ("unused",))
    assert "missing: 2: 1.weight, 1.bias" in str(report)
    drawn = ps.init(module, ps.sgd(0.1), ps.key(0))
    state = ps.init(module, ps.sgd(0.1), ps.key(0), params=params)
    assert torch.equal(state.params["1.weight"], drawn.params["1.weight"])
    assert torch.equal(state.params["0.weight"], values["0.weight"])
    assert "nothing in it is a leaf" in refused(ps.shard(Tied()), path, strict="partial")


@pytest.mark.parametrize("kind", ["file", "checkpoint dcp"])
def test_casts_are_reported_and_those_that_lose_numbers_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 64)  # so that leaves come in several parts
    values = {name: leaf.double() for name, leaf in values_of(nn.Linear(5, 7)).items()}
    module = ps.shard(nn.Linear(5, 7))
    path = write(kind, tmp_path / "a", values)
    *loaded, report = ps.load_params(module, path, strict="exact_but_dtype", with_report=True)
    assert_holds(loaded, {name: leaf.float() for name, leaf in values.items()})
    assert report.cast == dict.fromkeys(("weight", "bias"), ("float64", "float32"))
    values["bias"][6] = 1e300
    assert "they would become infinite" in refused(
        module, write(kind, tmp_path / "b", values), strict="exact_but_dtype"
    )
    whole = {name: leaf.to(torch.complex64) for name, leaf in values.items()}
    assert "imaginary parts would be lost" in refused(
        module, write(kind, tmp_path / "c", whole), strict="exact_but_dtype"
    )


@pytest.mark.parametrize("kind", ["file", "checkpoint safetensors"])
def test_prefixes_are_taken_off_and_put_on_by_patterns_which_errors_suggest(kind, tmp_path):
    values = values_of(Net())
    module = ps.shard(Net())
    path = write(kind, tmp_path, {f"model.{name}": leaf for name, leaf in values.items()})
    assert "did you mean rename={'model.*': '*'}?" in refused(module, path)
    *loaded, report = ps.load_params(module, path, rename={"model.*": "*"}, with_report=True)
    assert_holds(loaded, values)
    assert ("model.head.bias", "head.bias") in report.renamed
    assert "rename 'nothing.*' matches no leaf" in refused(module, path, rename={"nothing.*": "*"})


@pytest.mark.parametrize("kind", ["file", "folder", "checkpoint safetensors"])
def test_a_tie_takes_either_name_and_both_if_they_are_equal(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 8)
    value, module = values_of(Tied())["embed.weight"], ps.shard(on_meta(Tied))
    for names in (("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")):
        path = write(kind, tmp_path / "-".join(names), {name: value.clone() for name in names})
        assert_holds(ps.load_params(module, path), {"embed.weight": value})
    other = value.clone()
    other[2, 1] = -other[2, 1]
    path = write(kind, tmp_path / "different", {"embed.weight": value, "head.weight": other})
    said = refused(module, path)
    assert "embed.weight" in said
    assert "head.weight" in said
    assert "values" in said
    path = write(kind, tmp_path / "dtypes", {"embed.weight": value, "head.weight": value.double()})
    assert "embed.weight" in refused(module, path, strict="exact_but_dtype")


def test_a_module_that_does_not_tie_gets_both_names(tmp_path):
    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)

    value, module = values_of(Tied())["embed.weight"], ps.shard(Untied())
    both = {"embed.weight": value, "head.weight": value}
    path = write("file", tmp_path, {"embed.weight": value})
    assert "missing in it: head.weight" in refused(module, path)
    assert_holds(ps.load_params(module, path, rename={"embed.*": ["embed.*", "head.*"]}), both)
    tied = ps.shard(Tied())
    saved = ps.save(
        tmp_path / "x", ps.init(tied, ps.sgd(0.1), ps.key(0), params={"embed.weight": value}), ties=tied.ties
    )
    assert_holds(ps.load_params(module, saved), both)


def test_what_a_module_computes_itself_is_passed_over(tmp_path):
    values = values_of(Rotary())
    assert "frequencies" not in values
    path = write("file", tmp_path, values | {"frequencies": torch.zeros(4)})
    module = ps.shard(on_meta(Rotary))
    *loaded, report = ps.load_params(module, path, with_report=True)
    assert_holds(loaded, values)
    assert report.recomputed == ("frequencies",)
    assert module.module.frequencies[1] > 0


def test_a_shared_block_is_loaded_once(tmp_path):
    values = values_of(Recurrent())
    path = write("file", tmp_path, values | {"blocks.2.weight": values["blocks.0.weight"].clone()})
    assert_holds(ps.load_params(ps.shard(on_meta(Recurrent)), path), values)


def test_the_newest_undamaged_checkpoint_of_a_run_is_taken(tmp_path, caplog):
    values = values_of(Net())
    path = write("run", tmp_path / "run", values)
    module = ps.shard(Net())
    assert_holds(ps.load_params(module, path / "checkpoints"), values)
    shutil.copytree(path / "checkpoints/step-00000003", path / "checkpoints/step-00000009")
    file = path / "checkpoints/step-00000009/model/model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_holds(ps.load_params(module, path), values)
    assert "skipping" in caplog.text
    assert "step-00000009" in caplog.text
    assert "is damaged" in refused(module, path / "checkpoints/step-00000009")
    file = path / "checkpoints/step-00000003/model/model.safetensors"
    file.unlink()
    assert "missing in it" in refused(module, path)  # step 2 is of another model


def test_nothing_is_unpickled_and_nothing_is_guessed(tmp_path):
    module = ps.shard(nn.Linear(2, 1))
    torch.save(module.module.state_dict(), tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin: pickles are not opened" in refused(module, tmp_path)
    assert "pickles are not opened" in refused(module, tmp_path / "pytorch_model.bin")
    assert "there is nothing at" in refused(module, tmp_path / "nowhere")
    assert "there is nothing at missing.safetensors" in refused(module, "missing.safetensors")
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for size in (0, 4, 20, len(whole) - 1):
        (tmp_path / "x.safetensors").write_bytes(whole[:size])
        assert "x.safetensors: cannot read" in refused(module, tmp_path / "x.safetensors")


ARGUMENTS = [
    ({"strict": "sloppy"}, ValueError, "strict must be one of 'exact'"),
    ({"rename": "x"}, TypeError, "rename takes a mapping"),
    ({"source": 7}, TypeError, "source must be a path"),
    ({"source": b"x"}, TypeError, "source must be a path"),
    ({"source": ".", "revision": "main"}, ValueError, "revision='main' is for a model on the Hub"),
    ({"source": None, "rename": {"a": "b"}}, ValueError, "rename is for what is read"),
]


@pytest.mark.parametrize(("options", "error", "message"), ARGUMENTS)
def test_arguments_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        ps.load_params(ps.shard(nn.Linear(2, 1)), **{"source": ".", **options})


def test_without_a_source_the_values_are_those_the_module_was_built_with():
    model = Net(batchnorm=True)
    values = {name: leaf.detach().clone() for name, leaf in model.state_dict().items()}
    module = ps.shard(model)
    loaded = ps.load_params(module)
    assert_holds(loaded, values)
    loaded[0]["head.weight"].zero_()  # a copy
    assert_holds(ps.load_params(module), values)
    state = ps.init(module, ps.sgd(0.1), ps.key(0), params=ps.load_params(module)[0])
    assert torch.equal(state.params["embed.weight"], values["embed.weight"])
    with pytest.raises(ValueError, match=r"'weight' was built on the meta device and has no values; name a source"):
        ps.load_params(ps.shard(on_meta(lambda: nn.Linear(2, 1))))
    assert ps.load_params(ps.shard(on_meta(lambda: nn.Linear(2, 1))), strict="partial") == ({}, {})

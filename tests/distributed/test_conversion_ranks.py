"""What two FSDP2 ranks wrote, by us and by others, becomes one model that plain safetensors reads."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import purestep as ps
from tests.ranks import run_ranks
from tests.toys import Net

OURS = ("safetensors", "dcp", "safetensors_dcp")
BY_OTHERS = ("accelerate", "accelerate/pytorch_model_fsdp_0", "huggingface_writer")


def _model() -> Net:
    torch.manual_seed(0)
    return Net(width=5, batchnorm=True)


def _save_all(directory: str) -> None:
    import torch.distributed.checkpoint as dcp
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    model = _model()
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    leaves = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    params = {name: leaves[name] for name, _ in model.named_parameters()}
    state = ps.TrainState(
        step=3,
        params=params,
        buffers={name: leaves[name] for name in leaves if name not in params},
        opt_state={"adamw": {"exp_avg": {name: torch.zeros_like(p) for name, p in params.items()}}},
        key=ps.key(0),
        ema={name: p * 2 for name, p in params.items() if name != "head.weight"},
    )
    for format in OURS:
        ps.save(f"{directory}/{format}", state, format=format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        save_fsdp_model(plugin, accelerator, model, f"{directory}/accelerate")
        writer = HuggingFaceStorageWriter(f"{directory}/huggingface_writer", save_distributed=True)
        dcp.save(dict(leaves), storage_writer=writer)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 3)).sum().backward()
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, f"{directory}/accelerate")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(_save_all, 2, str(directory))
    return directory


@pytest.mark.parametrize("source", [*OURS, *BY_OTHERS])
def test_the_model_is_the_one_that_was_sharded(saved, source, tmp_path):
    report = ps.convert(saved / source, tmp_path / "out")
    read = load_file(tmp_path / "out/model.safetensors")
    expected = _model().state_dict()
    assert sorted(read) == sorted(expected)
    for name, tensor in expected.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(read[name], tensor), name
    assert report.left_out == ()
    other = _model()
    torch.nn.init.zeros_(other.head.weight)
    other.load_state_dict(read, strict=True)


@pytest.mark.parametrize("format", OURS)
def test_averages_in_pieces_are_put_together(saved, format, tmp_path):
    ps.convert(saved / format, tmp_path / "out", include_ema=True, max_shard_size=300)
    averaged = {}
    for file in (tmp_path / "out/ema").glob("*.safetensors"):
        averaged |= load_file(file)
    params = dict(_model().named_parameters())
    for name, tensor in _model().state_dict().items():
        times = 2 if name in params and name != "head.weight" else 1
        assert torch.equal(averaged[name], tensor * times), name
    assert len(list((tmp_path / "out/ema").glob("*.safetensors"))) > 1


def test_the_optimizer_alone_is_no_model(saved):
    with pytest.raises(ps.CheckpointError, match="holds no 'model', only optimizer"):
        ps.import_params(saved / "accelerate/optimizer_0")


def test_a_shard_that_is_missing_is_noticed_where_it_can_be(saved, tmp_path):
    shutil.copytree(saved / "huggingface_writer", tmp_path / "x")
    first, second = sorted((tmp_path / "x").glob("*.safetensors"))
    with pytest.raises(ps.CheckpointError, match="and others may hold the rest: name its folder"):
        ps.import_params(first)
    moved = first.rename(tmp_path / first.name)
    with pytest.raises(ps.CheckpointError, match="the files shard-00001-"):
        ps.import_params(tmp_path / "x")
    second.rename(tmp_path / "x/renamed.safetensors")
    with pytest.raises(ps.CheckpointError, match="cannot be put together: the pieces do not add up"):
        ps.import_params(tmp_path / "x")
    save_file(load_file(moved), first)  # the same tensors without the note that says where they belong
    with pytest.raises(ps.CheckpointError, match="holds several safetensors files and no"):
        ps.import_params(tmp_path / "x")

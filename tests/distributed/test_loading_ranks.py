"""Weights streamed into shards: the same in every topology, each rank reading and holding no more than its own."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import purestep as ps
from purestep.sharding import loading
from purestep.state.patience import with_patience
from purestep.state.placement import default_rank, local_tensor
from tests.ranks import run_on, run_ranks
from tests.sharding.models import Tied, on_meta
from tests.sharding.test_loading import values_of, write
from tests.toys import TOPOLOGIES, Net, error_of, runtime_on, whole


class Model(nn.Module):
    """Uneven shards, empty ones, BatchNorm's buffers and a tie."""

    sharding_spec = ps.ShardingSpec(units=("net.blocks.*",))

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(batchnorm=True)
        self.tied = Tied()
        self.one = nn.Linear(3, 1)


KINDS = ("file", "folder", "dcp folder", "run", "checkpoint dcp")


def _digest(topology: tuple[int, int], folder: str, meta: bool) -> dict[str, str]:
    """The digest of a state made of each source, and of one that was cast."""
    digests = {}
    with runtime_on(topology) as runtime:
        loading._CHUNK_BYTES = 16  # many parts
        module = ps.shard(on_meta(Model) if meta else Model(), runtime=runtime)
        for source in (*KINDS, "half"):
            path = Path(folder, source)
            path = next(path.iterdir()) if source in ("file", "half", "checkpoint dcp") else path
            strict = "exact_but_dtype" if source == "half" else "exact"
            params, buffers = ps.load_params(module, path, strict=strict)
            state = ps.init(module, ps.sgd(0.1), ps.key(0), params=params, buffers=buffers)
            assert all(state.params[name] is params[name] for name in params)
            digests[source] = state.digest()
    return digests


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_source_gives_the_same_state_in_every_topology(name, meta, tmp_path):
    values = values_of(Model())
    for kind in KINDS:
        write(kind, tmp_path / kind, values)
    halves = {name: leaf.bfloat16() if leaf.is_floating_point() else leaf for name, leaf in values.items()}
    write("file", tmp_path / "half", halves | {"tied.head.weight": halves["tied.embed.weight"].clone()})
    expected = {}
    module = ps.shard(Model())
    for source, given in (("whole", values), ("half", {n: x.to(values[n].dtype) for n, x in halves.items()})):
        trees = [{n: given[n].clone() for n in leaves} for leaves in (module.leaves.params, module.leaves.buffers)]
        expected[source] = ps.init(module, ps.sgd(0.1), ps.key(0), params=trees[0], buffers=trees[1]).digest()
    for digests in run_on(TOPOLOGIES[name], _digest, str(tmp_path), meta):
        assert digests == {source: expected["half" if source == "half" else "whole"] for source in digests}


# What a rank holds and reads


class Wide(nn.Module):
    """64 MiB in fp32: eight layers, and an embedding that is larger than all else and tied."""

    sharding_spec = ps.ShardingSpec(units=("layers.*",))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
        self.head = nn.Linear(1024, 8192, bias=False)
        self.head.weight = self.embed.weight


def _status(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def _measured(topology: tuple[int, int], folder: str, source: str) -> dict[str, int]:
    with runtime_on(topology) as runtime:
        loading._CHUNK_BYTES = 1 << 20
        # What the first load imports is not counted.
        warm = ps.shard(nn.Linear(3, 3), runtime=runtime)
        ps.load_params(warm, Path(folder, "warm.safetensors"), strict="exact_but_dtype")
        module = ps.shard(on_meta(Wide), runtime=runtime)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        held, read = _status("VmRSS"), _bytes_read()
        params, _ = ps.load_params(module, Path(folder, f"{source}.safetensors"), strict="exact_but_dtype")
        return {
            "shards": sum(local_tensor(leaf).nbytes for leaf in params.values()),
            "peak": _status("VmHWM") - held,
            "read": _bytes_read() - read,
        }


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("source", ["plain", "half and tied"])
@pytest.mark.parametrize("topology", [(1, 2), (1, 4)], ids=str)
def test_a_rank_reads_and_holds_its_shards_and_little_more(topology, source, tmp_path):
    values = values_of(Wide())
    total, largest = sum(leaf.nbytes for leaf in values.values()), values["embed.weight"].nbytes
    stored = total if source == "plain" else (total + largest) // 2
    if source != "plain":
        values = {name: leaf.bfloat16() for name, leaf in values.items()}
        values["head.weight"] = values["embed.weight"].clone()
    save_file({n: x.double() for n, x in values_of(nn.Linear(3, 3)).items()}, tmp_path / "warm.safetensors")
    save_file(values, tmp_path / f"{source}.safetensors")
    for rank, found in enumerate(run_on(topology, _measured, str(tmp_path), source)):
        assert found["shards"] == total // topology[1]
        assert stored // topology[1] <= found["read"] < stored // topology[1] + (1 << 20), (rank, found)
        # Beside the shards 1 MiB of a file, or twice that where two are compared, and what casting them takes.
        assert found["shards"] <= found["peak"] < found["shards"] + (24 << 20), (rank, found)  # far from the whole


# All ranks or none


def _refusals(topology: tuple[int, int], folder: str) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        rank, module = runtime.rank, ps.shard(on_meta(Net), runtime=runtime)
        load = ps.load_params
        said = {
            "misfit": error_of(load, module, Path(folder, "misfit.safetensors")),
            "elsewhere": error_of(
                load, module, Path(folder, "x.safetensors") if rank else Path(folder, "y.safetensors")
            ),
            "nothing there": error_of(load, module, "only/here/x.safetensors"),
            "strict": error_of(load, module, Path(folder, "x.safetensors"), strict="exact" if rank else "partial"),
            "meta": error_of(load, module),
        }
        torch.manual_seed(rank)
        said["seeds"] = error_of(load, ps.shard(Net(), runtime=runtime))
        torch.manual_seed(7)
        model = Net()
        built = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
        params, _ = load(ps.shard(model, runtime=runtime))
        said["built"] = all(torch.equal(whole(params[name]), leaf) for name, leaf in built.items())
        module = ps.shard(on_meta(Tied), runtime=runtime)
        said["ties"] = error_of(load, module, Path(folder, "ties.safetensors"))
    return said


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_what_one_rank_finds_wrong_all_raise(name, tmp_path):
    values = values_of(Net())
    save_file(values, tmp_path / "x.safetensors")
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    save_file({**values, "more": torch.ones(1)}, tmp_path / "misfit.safetensors")
    tied = values_of(Tied())["embed.weight"]
    other = tied.clone()
    other[-1, -1] += 1  # a row that only the last rank reads
    save_file({"embed.weight": tied, "head.weight": other}, tmp_path / "ties.safetensors")
    everyone = run_on(TOPOLOGIES[name], _refusals, str(tmp_path))
    for said in everyone:
        assert "not in the module: more" in said["misfit"][1]
        assert "source of rank 1 is not that of rank 0" in said["elsewhere"][1]
        assert "strict of rank 1" in said["strict"][1]
        assert "there is nothing at only/here" in said["nothing there"][1]
        assert "built on the meta device" in said["meta"][1]
        assert "was built with different values on different ranks" in said["seeds"][1]
        assert said["built"]
        assert "are one tied weight, 'embed.weight', but hold different values" in said["ties"][1]
    assert everyone[0] == everyone[1]


def _patience() -> dict[str, Any]:
    config = ps.AcceleratorConfig(device="cpu", process_group=ps.ProcessGroupConfig(timeout_s=2))
    with ps.start(ps.ParallelismConfig(-1), config):
        rank, began = default_rank(), time.monotonic()

        def slow() -> int:
            time.sleep(5 * rank)  # longer than any collective call may wait
            return rank

        def failing() -> None:
            if rank == 1:
                raise ValueError("the disk is full")

        return {
            "result": with_patience(slow),
            "took": time.monotonic() - began,
            "error": error_of(with_patience, failing),
        }


def test_a_call_that_takes_long_on_one_rank_does_not_run_into_the_timeout():
    for rank, said in enumerate(run_ranks(_patience, 2)):
        assert said["result"] == rank
        assert said["took"] > 4.5
        assert said["error"] == ("ValueError", "the disk is full")

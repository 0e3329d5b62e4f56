"""Saving and restoring, verification included, against raw DCP and raw safetensors: `python -m benchmarks.checkpoint`.

All contenders keep the same tensors, those of a GPT with AdamW; DCP and safetensors as one flat dict. They take turns.
Every save ends with its files on the disk: DCP and purestep call fsync themselves, `save_file` is followed by one.
Restores find the files in the page cache and end with every byte in new memory: `load_file` maps lazily, so what it
loads is summed up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import tyro
from safetensors.torch import load_file, save_file
from torch import Tensor

import purestep as ps
from benchmarks.models import GPT
from benchmarks.timing import interleave, report
from purestep.state.digests import leaf_digests
from purestep.state.files.integrity import hash_file
from purestep.state.workers import in_parallel, num_workers


@dataclasses.dataclass(frozen=True)
class Options:
    size_gb: float = 1.0
    """Bytes of the state, parameters and both moments, in 10**9."""
    rounds: int = 5
    format: str = "safetensors"
    """What purestep writes: safetensors, dcp or safetensors_dcp."""
    leaves: int = 20_000
    """Leaves of the state of many leaves, of two floats each; 0: skip it."""
    directory: Path = Path(tempfile.gettempdir())
    """Where files are written; they are removed."""


def gpt_state(size_gb: float) -> ps.TrainState:
    """Random values in the shapes of a GPT of 12 layers, and of AdamW's moments of it."""
    layers, vocab = 12, 8192
    width = 64
    while 3 * 4 * (12 * layers * (width + 64) ** 2 + 2 * vocab * (width + 64)) <= size_gb * 1e9:
        width += 64
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(vocab, width, layers, heads=width // 64).named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def tree() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    return _state(tree(), {"adamw": {"exp_avg": tree(), "exp_avg_sq": tree()}})


def tiny_state(num: int) -> ps.TrainState:
    """A state of `num` leaves of two floats."""
    return _state({f"layers.{i}.scale": torch.randn(2) for i in range(num)}, {})


def _state(params: dict[str, Tensor], opt_state: dict[str, dict[str, dict[str, Tensor]]]) -> ps.TrainState:
    return ps.TrainState(step=1, params=params, buffers={}, opt_state=opt_state, key=ps.key(0))


@dataclasses.dataclass(frozen=True)
class Contenders:
    """How each saves a state to a directory and gets it back."""

    state: ps.TrainState
    root: Path
    format: str

    def saves(self) -> dict[str, Callable[[], object]]:
        flat = self.state.leaves()
        return {
            "DCP": lambda: dcp.save(flat, checkpoint_id=self.root / "dcp", no_dist=True),
            "safetensors": lambda: (save_file(flat, self.root / "flat"), _sync(self.root / "flat")),
            "purestep": lambda: ps.save(self.root / "purestep", self.state, format=self.format),
        }

    def restores(self) -> dict[str, Callable[[], object]]:
        return {
            "DCP": self._load_dcp,
            "safetensors": lambda: [x.view(torch.int32).sum() for x in load_file(self.root / "flat").values()],
            "purestep": lambda: ps.restore(self.root / "purestep", self.state),
        }

    def remove(self) -> None:
        shutil.rmtree(self.root)
        self.root.mkdir()

    def _load_dcp(self) -> object:
        flat = {name: torch.empty_like(leaf) for name, leaf in self.state.leaves().items()}
        dcp.load(flat, checkpoint_id=self.root / "dcp", no_dist=True)
        return flat


def throughput(options: Options, root: Path) -> dict[str, float]:
    state = gpt_state(options.size_gb)
    num_bytes = sum(leaf.nbytes for leaf in state.leaves().values())
    contenders = Contenders(state, root, options.format)
    print(
        f"{num_bytes / 1e9:.2f} GB in {len(state.leaves())} leaves, format {options.format!r}, {num_workers()} threads"
    )
    ratios = {}
    for what, turns in (("save", contenders.saves()), ("restore", contenders.restores())):
        before = (lambda: (contenders.remove(), os.sync())) if what == "save" else os.sync
        print(f"\n{what}")
        seconds = interleave(turns, rounds=options.rounds, steps=1, warmups=1, before=before)
        report(seconds, "DCP")
        for other in ("DCP", "safetensors"):
            of_rounds = [theirs / ours for theirs, ours in zip(seconds[other], seconds["purestep"], strict=True)]
            ratios[f"{what}, throughput over {other}'s"] = statistics.median(of_rounds)
        if what == "save":  # the last turn removed what the others had written
            contenders.remove()
            for save in turns.values():
                save()
    print("\nphases of purestep, each on its own")
    for name, seconds_of_phase in phases(contenders).items():
        print(f"{name:26}  {seconds_of_phase * 1e3:8.0f} ms  {num_bytes / seconds_of_phase / 1e9:5.2f} GB/s")
    return ratios


def async_stall(options: Options, root: Path) -> dict[str, float]:
    """How long an asynchronous save holds up the caller, against a synchronous one.

    The first save also makes the host buffers that later ones reuse; it is given apart.
    """
    contenders = Contenders(gpt_state(options.size_gb), root, options.format)
    contenders.remove()
    whole, held_up = [], []
    with ps.Checkpoints(root / "run", async_save=True, keep_last=1, format=options.format) as checkpoints:
        for i in range(options.rounds + 1):
            os.sync()
            whole.append(_seconds(contenders.saves()["purestep"]))
            shutil.rmtree(root / "purestep")
            os.sync()
            held_up.append(_seconds(lambda i=i: checkpoints.save(contenders.state.replace(step=i))))  # type: ignore[misc]
            checkpoints.wait()
    shares = [stall / save for stall, save in zip(held_up[1:], whole[1:], strict=True)]
    print(f"\nasynchronous save, format {options.format!r}")
    print(f"synchronous              {statistics.median(whole[1:]) * 1e3:8.0f} ms")
    print(f"held up, first save      {held_up[0] * 1e3:8.0f} ms")
    print(f"held up, later ones      {statistics.median(held_up[1:]) * 1e3:8.0f} ms")
    return {
        "stall of an asynchronous save over a synchronous one": statistics.median(shares),
        "stall of the first asynchronous save over a synchronous one": held_up[0] / statistics.median(whole),
    }


def phases(contenders: Contenders) -> dict[str, float]:
    """Seconds that the parts of a save and of a restore take when they have the machine to themselves."""
    state, files = contenders.state, [p for p in (contenders.root / "purestep").rglob("*") if p.is_file()]
    plain = contenders.root / "plain"

    def write() -> None:
        with open(plain, "wb", buffering=0) as file:
            for leaf in state.leaves().values():
                file.write(leaf.numpy().data)

    os.sync()
    return {
        "digests": _seconds(lambda: leaf_digests(state.leaves())),
        "SHA-256 of the files": _seconds(lambda: in_parallel(hash_file, files)),
        "writing": _seconds(write),
        "fsync": _seconds(lambda: _sync(plain)),
        "reading, nothing verified": _seconds(
            lambda: ps.restore(contenders.root / "purestep", contenders.state, verify=False)
        ),
    }


def many_leaves(options: Options, root: Path) -> dict[str, float]:
    contenders = Contenders(tiny_state(options.leaves), root, options.format)
    contenders.remove()
    print(f"\n{options.leaves} leaves of two floats, format {options.format!r}")
    seconds = {
        f"{what} {name}": _seconds(turn)
        for what, turns in (("save", contenders.saves()), ("restore", contenders.restores()))
        for name, turn in turns.items()
    }
    for name, taken in seconds.items():
        print(f"{name:20}  {taken:6.2f} s")
    sizes = {path.name: sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) for path in [root / "purestep"]}
    print(f"{sizes['purestep'] / 1e6:.2f} MB on disk")
    return {
        f"seconds to save {options.leaves} leaves": seconds["save purestep"],
        f"seconds to restore {options.leaves} leaves": seconds["restore purestep"],
        f"MB of {options.leaves} leaves": sizes["purestep"] / 1e6,
    }


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=parent) as directory:
        yield Path(directory, "files")


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    with _scratch(options.directory) as root:
        root.mkdir()
        figures = throughput(options, root)
        figures |= async_stall(options, root)
        if options.leaves:
            figures |= many_leaves(options, root)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Case B14: a state saved on one topology goes on, on every other, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from tests.ranks import run_on
from tests.toys import TOPOLOGIES, rank_slice, runtime_on

FORMATS = ("safetensors", "dcp", "safetensors_dcp")


class _Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.single = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.single(self.norm(self.tall(x)))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], key: ps.Key) -> ps.Mean:
    x, y = batch
    return ps.Mean((model(x) - y).square().sum(), len(x))


def _pieces(runtime: ps.Runtime) -> tuple[Any, Any, Any]:
    with torch.device("meta"):
        model = _Uneven()
    model.norm.eval()  # statistics of a rank's slice would differ between topologies, whatever the checkpoint
    module = ps.shard(model, ps.ShardingSpec(units=("tall",)), runtime)
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(ps.warmup_cosine(0.1, 2, 10)))
    return module, optimizer, ps.train_step(module, _loss, optimizer, donate=True)


def _batch(order: ps.BatchOrder, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator)
    rows = order.indices(step)
    return x[rows], y[rows]


def _go_on(runtime: ps.Runtime, state: ps.TrainState, step: Any, steps: int) -> tuple[ps.TrainState, list[float]]:
    order, losses = ps.BatchOrder(32, 8, state.key), []
    for _ in range(steps):
        state, metrics = step(state, rank_slice(runtime, _batch(order, state.step)))
        losses.append(float(metrics["loss"]))
    return state, losses


def _save(topology: tuple[int, int], directory: str) -> tuple[str, list[float]]:
    with runtime_on(topology) as runtime:
        module, optimizer, step = _pieces(runtime)
        state, _ = _go_on(runtime, ps.init(module, optimizer, ps.key(7)), step, 3)
        for format in FORMATS:
            ps.save(Path(directory, format), state, format=format)
        digest = state.digest()
        return digest, _go_on(runtime, state, step, 2)[1]


def _load(topology: tuple[int, int], directories: list[str]) -> list[tuple[str, str, int, list[float]]]:
    with runtime_on(topology) as runtime:
        module, optimizer, step = _pieces(runtime)
        results = []
        for directory in directories:
            for format in FORMATS:
                state = ps.restore(Path(directory, format), ps.abstract_state(module, optimizer))
                digest, key, at = state.digest(), state.key.hex(), state.step
                ps.check_replicas(state)
                results.append((digest, key, at, _go_on(runtime, state, step, 2)[1]))
        return results


def test_b14_any_topology_resumes_any_other_in_every_format(tmp_path):
    saved = {name: run_on(topology, _save, str(tmp_path / name))[0] for name, topology in TOPOLOGIES.items()}
    directories = [str(tmp_path / name) for name in TOPOLOGIES]
    for target, topology in TOPOLOGIES.items():
        for everyone in run_on(topology, _load, directories):
            results = iter(everyone)
            for source, (digest, losses) in saved.items():
                for format in FORMATS:
                    restored = next(results)
                    assert restored[0] == digest, (source, target, format)
                    assert restored[1:3] == (ps.key(7).hex(), 3)
                    assert restored[3] == pytest.approx(losses, rel=1e-5), (source, target, format)
                    if source == target:
                        assert restored[3] == losses

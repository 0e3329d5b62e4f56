"""Case B24: every random number of a run is a pure function of key, step, microbatch and rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from tests.ranks import run_on
from tests.toys import runtime_on


class _TwoDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 64) -> (2, rows, 64)
        return torch.stack([self.first(x), self.second(x)]) * self.scale.weight.sum().abs().clamp(min=1.0)


class _Recorder:
    """A loss that keeps the masks it saw: which of 64 ones each dropout kept."""

    def __init__(self) -> None:
        self.masks: list[list[bool]] = []

    def __call__(self, model: nn.Module, x: Tensor, key: ps.Key) -> ps.Mean:
        model(x[:, :1])  # a first call must not line the next one up with another microbatch
        out = model(x)
        self.masks += [(out[layer] != 0).flatten().tolist() for layer in (0, 1)]
        return ps.Mean(out.sum(), x.shape[0])


def _masks(topology: tuple[int, int], directory: str, seed: int, disturb: bool) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        record = _Recorder()
        module = ps.shard(_TwoDropouts(), runtime=runtime)
        optimizer = ps.sgd(0.1)
        state = ps.init(module, optimizer, ps.key(seed))
        step = ps.train_step(module, record, optimizer, accumulate=2, donate=True)
        path = Path(directory, "at-2")
        for k in range(3):
            if k == 2 and not path.exists():
                ps.save(path, state)
            if disturb:
                torch.manual_seed(k)
                torch.rand(5 + runtime.rank)
            state, _ = step(state, torch.ones(2, 64))
        return {"masks": record.masks, "digest": state.digest()}


def _resumed(topology: tuple[int, int], directory: str) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        record = _Recorder()
        module, optimizer = ps.shard(_TwoDropouts(), runtime=runtime), ps.sgd(0.1)
        state = ps.restore(Path(directory, "at-2"), ps.abstract_state(module, optimizer))
        torch.rand(11)
        state, _ = ps.train_step(module, record, optimizer, accumulate=2)(state, torch.ones(2, 64))
        return {"masks": record.masks, "digest": state.digest()}


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_b24_dropout_is_a_pure_function_of_key_step_microbatch_and_rank(topology, tmp_path):
    ranks = run_on(topology, _masks, str(tmp_path), 0, False)
    masks = [tuple(mask) for rank in ranks for mask in rank["masks"]]
    assert len(masks) == 2 * 3 * 2 * 2  # ranks, steps, microbatches, layers
    assert len(set(masks)) == len(masks)
    assert all(20 <= sum(mask) <= 44 for mask in masks)  # 64 fair coins: 6 standard deviations are 24
    assert run_on(topology, _masks, str(tmp_path), 0, True) == ranks
    for resumed, rank in zip(run_on(topology, _resumed, str(tmp_path)), ranks, strict=True):
        assert resumed["masks"] == rank["masks"][-4:]
        assert resumed["digest"] == rank["digest"]
    other = run_on(topology, _masks, str(tmp_path), 1, False)
    assert not {tuple(mask) for mask in other[0]["masks"]} & {tuple(mask) for mask in ranks[1]["masks"]}

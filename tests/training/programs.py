"""A small program on the library, for the tests of this folder: run as a script, or in a test's own process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import purestep as ps


@dataclass(frozen=True, kw_only=True)
class Config(ps.TrainConfig):
    """A regression on forty samples."""

    width: int = 6
    """Units of the hidden layer."""
    learning_rate: float = 0.02
    """Peak learning rate."""
    dropout: float = 0.2
    """Probability of dropping a unit."""
    loss: Literal["mean", "scalar", "nothing"] = "mean"
    """How the loss is reported. nothing: no sample counts."""
    units: str = "blocks.*"
    """Rule of the sharding spec."""
    kill_at: int = -1
    """Sample at which the process kills itself, counted from its start; -1: never."""
    fail: str = ""
    """Where the program fails: build, loss, or interrupt (in the loss, as Ctrl-C does)."""
    samples: int = 40
    """Size of the data."""


class Samples:
    """`num` samples of four inputs and a target."""

    def __init__(self, num: int, kill_at: int = -1) -> None:
        import torch

        inputs = torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
        self._data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self._reads, self._kill_at = 0, kill_at

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if self._reads == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._reads += 1
        return self._data[index]


def build_model(width: int, dropout: float) -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            return x + self.dropout(self.linear(x).tanh())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, width)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.leave = nn.Linear(width, 1)

        def forward(self, x):
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.leave(x)

    return Net()


def build(config: Config, on_end: Callable[[Any], None] | None = None) -> ps.Experiment:
    if config.data.path is not None:
        Path(config.data.path).read_text()
    if config.fail == "build":
        raise KeyError("planted")

    def loss(model, batch, key):
        if config.fail == "loss":
            raise KeyError("planted")
        if config.fail == "interrupt":
            raise KeyboardInterrupt
        inputs, targets = batch
        errors = model(inputs) - targets
        if config.loss == "scalar":
            return errors.square().mean()
        if config.loss == "nothing":
            return ps.Mean(errors.sum() * 0, 0.0)
        return ps.Mean(errors.square().sum(), len(errors)), {"mae": ps.Mean(errors.abs().sum(), len(errors))}

    def tell(run: Any) -> None:
        digest = run.state.digest()
        if run.runtime.is_main:
            print(f"step {run.state.step} digest {digest}")

    return ps.Experiment(
        model=build_model(config.width, config.dropout),
        loss=loss,
        optimizer=ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(ps.linear(config.learning_rate, 0.0, 100))),
        data=Samples(config.samples, config.kill_at),
        eval=Samples(7),
        spec=ps.ShardingSpec(units=(config.units,)),
        on_end=on_end or tell,
    )


if __name__ == "__main__":
    ps.main(Config, build, sys.argv[1:])

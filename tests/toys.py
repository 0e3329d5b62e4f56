"""Small models and batches that tests of several areas share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import purestep as ps

TOPOLOGIES = {"local": (1, 1), "ddp": (2, 1), "fsdp2": (1, 2), "hsdp": (2, 2)}
"""(replicate, shard) by name: what "all topologies" means in these tests."""


@contextmanager
def runtime_on(topology: tuple[int, int], **accelerator: Any) -> Iterator[ps.Runtime]:
    """A CPU runtime of that topology, in the processes that `run_on` started."""
    config = ps.AcceleratorConfig(device="cpu", **accelerator)
    with ps.start(ps.ParallelismConfig(*topology), config) as runtime:
        yield runtime


def rank_slice(runtime: ps.Runtime, batch: Any) -> Any:
    """This rank's rows of a global batch."""
    rows = torch.utils._pytree.tree_leaves(batch)[0].shape[0] // runtime.dp_size
    start = runtime.dp_rank * rows
    return torch.utils._pytree.tree_map(lambda x: x[start : start + rows], batch)


def whole(tensor: Tensor) -> Tensor:
    """The global tensor, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ToyT(nn.Module):
    """`Linear(1, 2, bias=False)`: the toy of CASES. The loss of a token is the sum of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (...,) -> (..., 2)
        return self.linear(x.unsqueeze(-1))


def toy_loss(model: nn.Module, batch: tuple[Tensor, Tensor], key: ps.Key) -> ps.Mean:
    """Token mean over the tokens whose mask is 1; tokens and mask have shape (rows, length)."""
    tokens, mask = batch
    return ps.Mean((model(tokens).sum(-1) * mask).sum(), mask.sum())


def toy_batch(*rows: list[float], length: int | None = None, pad: float = 99.0) -> tuple[Tensor, Tensor]:
    """Rows of valid tokens, padded to one length."""
    length = length or max(1, max(map(len, rows)))
    tokens = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows], dtype=torch.float32)
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in rows])
    return tokens, mask


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # odd, so that shards are uneven
        self.down = nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A small residual network with uneven shards, a second entry point, and dropout or BatchNorm if asked."""

    sharding_spec = ps.ShardingSpec(units=("blocks.*",), forward_methods=("encode",))

    def __init__(self, width: int = 5, depth: int = 2, dropout: float = 0.0, batchnorm: bool = False):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width) if batchnorm else nn.Identity()
        self.head = nn.Linear(width, 1)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3) -> (rows, 1)
        return self.head(self.encode(x))


def net_loss(model: nn.Module, batch: tuple[Tensor, Tensor], key: ps.Key) -> tuple[ps.Mean, dict[str, ps.Mean]]:
    """Squared error, and the mean absolute error as a metric."""
    x, y = batch
    error = model(x) - y
    return ps.Mean(error.square().sum(), error.numel()), {"mae": ps.Mean(error.detach().abs().sum(), error.numel())}


def net_batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)


def net_optimizer() -> Any:
    """Clip and AdamW under a schedule."""
    return ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(ps.warmup_cosine(1e-2, 2, 30)))


def leaf_table(state: ps.TrainState) -> dict[str, Tensor]:
    """Every leaf, whole, on every rank."""
    return {name: whole(leaf).detach().clone() for name, leaf in state.leaves().items()}


def error_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """(class name, message) of what a call raises, None if it returns."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None

"""Small models with one peculiarity each, for the tests of specs, plans and initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def on_meta(build: Callable[[], M]) -> M:
    """The model, built on the meta device."""
    with torch.device("meta"):
        return build()


class Layer(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.mlp = nn.Linear(width, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x))[..., :-1].clone()  # FSDP2 warns of views


class Stack(nn.Module):
    """Two lists of blocks between an embedding and a head."""

    def __init__(self, depth: int = 2, width: int = 4):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.encoder = nn.ModuleList(Layer(width) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.encoder:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3) -> (rows, 1)
        x = self.encode(x)
        for layer in self.decoder:
            x = layer(x)
        return self.head(x)


class Tied(nn.Module):
    """B07: Embedding(3, 2) tied to Linear(2, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:  # (rows,) -> (rows, 3)
        return self.head(self.embed(x))


class Wrapped(nn.Module):
    """A model inside another module."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.inner(x)[..., :1])


class Recurrent(nn.Module):
    """One block, applied at three places."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([block, block, block])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Crossed(nn.Module):
    """Two branches that call one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
        self.right.append(self.left[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Scale(nn.Module):
    """Parameters and buffers that only the constructor sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf]))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x * self.scale + self.table) + self.mask).softmax(-1)


class Rotary(nn.Module):
    """A non-persistent table that reset_parameters computes, so that it survives the meta device."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.register_buffer("frequencies", torch.empty(size), persistent=False)
        self.linear = nn.Linear(size, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.frequencies.is_meta:
            self.frequencies.copy_(10.0 ** -torch.arange(len(self.frequencies)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.frequencies)

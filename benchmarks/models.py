"""The models that are timed, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purestep as ps


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level GPT: 4 layers, width 128, context 64 unless said otherwise."""

    sharding_spec = ps.ShardingSpec(units=("blocks.*",))

    def __init__(self, vocab: int = 256, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, vocab)
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def purestep_loop(
    tokens: Tensor, *, donate: bool, clip: bool = True, runtime: ps.Runtime | None = None
) -> Callable[[], None]:
    """A step of purestep on a fresh GPT, to be called again and again."""
    module = ps.shard(GPT(), runtime=runtime)
    parts = {"clip": ps.clip_by_global_norm(1.0)} if clip else {}
    optimizer = ps.chain(**parts, adamw=ps.adamw(1e-3))
    train = ps.train_step(module, mean_cross_entropy, optimizer, donate=donate)
    state = ps.init(module, optimizer, ps.key(0))

    def step() -> None:
        nonlocal state
        state, _ = train(state, tokens)

    return step


def batch_of_tokens(batch: int = 8, context: int = 64, seed: int = 0) -> Tensor:
    """Random tokens, shape (batch, context + 1)."""
    return torch.randint(256, (batch, context + 1), generator=torch.Generator().manual_seed(seed))


def cross_entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss per token, as a hand-written loop has it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def mean_cross_entropy(model: nn.Module, tokens: Tensor, key: ps.Key) -> ps.Mean:
    """The same as a Mean in progress."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return ps.Mean(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())

"""A byte-level GPT: pre-norm blocks, rotary positions, an untied head. Nothing here knows how it will be sharded.

Shapes are in the names: B sequences, T positions, V byte values (256), D width, H heads, K = D / H width of a head.
"""
# ruff: noqa: N803, N806 (capitals in names are dimensions)

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import purestep as ps

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = rearrange(self.qkv(x_BTD), "B T (three H K) -> three B H T K", three=3, H=self.heads)
        y_BHTK = F.scaled_dot_product_attention(
            rotate(q_BHTK, angles_TK),
            rotate(k_BHTK, angles_TK),
            v_BHTK,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(rearrange(y_BHTK, "B H T K -> B T (H K)"))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, angles_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), angles_TK))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT(nn.Module):
    # Each block is gathered, computed and let go by itself; embedding, last norm and head are the root unit.
    sharding_spec = ps.ShardingSpec(units=("blocks.*",))

    def __init__(self, *, layers: int, heads: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        angles_TK = rotary_angles(tokens_BT.shape[1], self.head_width, tokens_BT.device)
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, angles_TK)
        return self.head(self.norm(x_BTD))  # logits_BTV


def rotary_angles(length: int, width: int, device: torch.device) -> Tensor:
    """Angle of each position and channel, shape (T, K): RoPE (arXiv:2104.09864), wavelengths from 2 pi to 20000 pi."""
    frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / width, device=device)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return torch.cat([angles, angles], dim=-1)


def rotate(x_BHTK: Tensor, angles_TK: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + K/2) by its position's angle."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_BHTK * angles_TK.cos() + turned * angles_TK.sin()).type_as(x_BHTK)


def loss(model: nn.Module, tokens_BT: Tensor, key: ps.Key) -> tuple[ps.Mean, dict[str, ps.Mean]]:
    """Cross entropy of each next byte, in nats, as the sum over all of them and their number."""
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    logits_BTV = model(inputs_BT).float()
    nats = F.cross_entropy(rearrange(logits_BTV, "B T V -> (B T) V"), targets_BT.flatten(), reduction="sum")
    num_bytes = targets_BT.numel()
    return ps.Mean(nats, num_bytes), {"bits_per_byte": ps.Mean(nats.detach() / math.log(2), num_bytes)}


@torch.no_grad()
def generate(
    predict: Callable[[Tensor], Tensor], prompt: bytes, num_bytes: int, context: int, key: ps.Key, temperature: float
) -> bytes:
    """`prompt` and `num_bytes` more, each drawn given the `context` bytes before it.

    Args:
        predict: tokens_BT -> logits_BTV.
        prompt: at least one byte.
        num_bytes: bytes to draw.
        context: most bytes to look back on.
        key: what the draws are a function of.
        temperature: divides the logits.
    """
    generator = key.generator()  # on the CPU: one stream, whatever computes the logits
    text = list(prompt)
    for _ in range(num_bytes):
        logits_V = predict(torch.tensor([text[-context:]]))[0, -1].float().cpu()
        text += torch.multinomial((logits_V / temperature).softmax(dim=-1), 1, generator=generator).tolist()
    return bytes(text)

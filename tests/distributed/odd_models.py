"""Modules that are legal and unusual, each with a batch and a loss: what `test_modules.py` trains everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purestep as ps
from tests.plain_loop import Case

ROWS = 8
"""Rows of a global batch: a multiple of every world size."""


class _Regression(nn.Module):
    """Maps (rows, 4) to (rows, 4)."""


class Tied(_Regression):
    """One matrix embeds and projects, around blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight


class Small(_Regression):
    """Parameters with fewer rows than there are ranks, and one without any."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(1, 4))
        self.one = nn.Parameter(torch.empty(1))
        self.three = nn.Parameter(torch.empty(3, 4))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(4, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.row, self.one, self.three, self.none):
            nn.init.uniform_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.row + self.one * self.linear(x) + self.three.sum(0) + self.none.sum(0)


class Scalar(_Regression):
    """A 0-d parameter, as CLIP's temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = Temperature()

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature(self.linear(x))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


class LoRA(_Regression):
    """Blocks of frozen bf16 weights with trainable fp32 adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LoRALinear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class LoRALinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight.float(), self.base.bias.float()) + self.up(self.down(x))


class Mixed(_Regression):
    """Trainable parameters of two dtypes in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(self.single(x).double()).float())


class Crossed(_Regression):
    """One submodule under two names, and one block applied at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        self.right.append(self.left[0])
        block = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block, block, block])

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x) + self.right(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Lists(_Regression):
    """ParameterList and ParameterDict, in a unit and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Listed() for _ in range(2))
        self.scales = nn.ParameterDict({"a": torch.ones(4), "b.c".replace(".", "_"): torch.full((4,), 2.0)})

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x * self.scales["a"] + self.scales["b_c"]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(4, 4) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weights:  # touches leaves of the list, which is a module of its own
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Rotary(_Regression):
    """A table that is no leaf of the state, computed by the module that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rope = Rope()

    def forward(self, x: Tensor) -> Tensor:
        return self.rope(self.linear(x))


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(0.1 * torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos() + x.roll(1, -1) * self.angles.sin()


class Normed(_Regression):
    """BatchNorm, in blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Uncalled(_Regression):
    """Weights that are used without calling the module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UncalledBlock() for _ in range(2))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.out.weight) + self.out.bias


class UncalledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.linear.weight, self.linear.bias))


class Switch(_Regression):
    """Experts of which each rank uses its own: a row of even index goes to one, of odd index to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SwitchBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SwitchBlock(nn.Module):
    """The expert of a batch is that of its first row's last element: the first half of the rows has the one sign."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for sign, expert in zip((1, -1), self.experts, strict=True):
            rows = x[:, -1].sign() == sign
            if rows.any():
                parts.append((rows.nonzero()[:, 0], expert(x[rows])))
        out = torch.zeros_like(x)
        for index, part in parts:
            out = out.index_put((index,), part)
        return torch.cat([torch.tanh(out[:, :-1]), x[:, -1:]], -1)


@dataclass
class Record:
    """What a block takes and returns: a plain dataclass."""

    hidden: Tensor
    extra: Any = None


class Records(_Regression):
    """Blocks, and the model, that speak in dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecordBlock() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Record | Tensor) -> Record:
        record = x if isinstance(x, Record) else Record(x)
        for block in self.blocks:
            record = block(record)
        return dataclasses.replace(record, hidden=self.head(record.hidden))


class RecordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, record: Record) -> Record:
        return Record(torch.tanh(self.linear(record.hidden)), {"mean": record.hidden.mean()})


class Layouts(_Regression):
    """Convolutions in channels_last, and weights stored transposed or as every other row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.deconv = nn.ConvTranspose2d(4, 2, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.linspace(-1, 1, 8).view(2, 4).t())
        self.strided = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4)[::2])

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 2, 2).expand(-1, 2, -1, -1).contiguous(memory_format=torch.channels_last)
        out = self.deconv(torch.tanh(self.conv(image))).flatten(1)
        return out @ self.transposed.new_ones(8, 4) * 0.1 + x @ self.transposed @ self.strided


class Complex(_Regression):
    """A complex filter in a unit of its own, beside an integer table that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.filter = Filter()
        self.order = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(self.mix(x))[:, self.order]


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step; the last column of x is positive in its first half and negative in the other."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 4, generator=generator)
    x[:, -1] = x[:, -1].abs()
    x[ROWS // 2 :, -1] *= -1
    return x, y


def _case(
    build: Callable[[], nn.Module],
    spec: ps.ShardingSpec | None = None,
    *,
    inputs: Callable[[Tensor], Any] = lambda x: x,
    output: Callable[[Any], Tensor] = lambda out: out,
    **fields: Any,
) -> Case:
    def loss(model: Any, batch: tuple[Tensor, Tensor], key: Any) -> ps.Mean:
        x, y = batch
        error = output(model(inputs(x))) - y
        return ps.Mean(error.square().sum(), error.numel())

    return Case(build, loss, batch_of, spec or ps.ShardingSpec(), **fields)


BLOCKS = ps.ShardingSpec(units=("blocks.*",))
UNUSED = {"ddp": ps.DDPConfig(find_unused_parameters=True)}
CASES = {
    "tied": _case(Tied, BLOCKS),
    "small": _case(Small),
    "scalar": _case(Scalar, meta=False),
    "lora": _case(LoRA, BLOCKS),
    "mixed": _case(Mixed, BLOCKS),
    "crossed": _case(Crossed, ps.ShardingSpec(units=("blocks.0",))),
    "lists": _case(Lists, ps.ShardingSpec(units=("experts.*",)), meta=False),
    "rotary": _case(Rotary),
    "uncalled": _case(Uncalled, BLOCKS),
    "switch": _case(Switch, BLOCKS, settings=UNUSED),
    "records": _case(Records, BLOCKS, output=lambda out: out.hidden),
    "records given": _case(Records, BLOCKS, output=lambda out: out.hidden, inputs=Record),
    "layouts": _case(Layouts, meta=False),
    "complex": _case(Complex, ps.ShardingSpec(units=("filter",)), meta=False),
    "batchnorm": _case(Normed, BLOCKS),
}


def all_cases() -> dict[str, Case]:
    """For `tests.plain_loop.everywhere`."""
    return CASES

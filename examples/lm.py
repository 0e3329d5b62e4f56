"""Train a byte-level GPT on source code: `python examples/lm.py`, or `torchrun --nproc-per-node 2 examples/lm.py ...`.

By default the text is Python's own standard library, which every machine that runs this has. `--data.path` takes any
file or folder. A run leaves its config, metrics, loss curve and checkpoints in --output-dir, and can be continued from
there with --resume on any number of processes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import purestep as ps
from purestep.training import CheckpointConfig, DataConfig

# --- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextConfig(DataConfig):
    max_bytes: int = 16_000_000
    """Read no more text than this."""
    eval_windows: int = 512
    """Windows of the validation text that each evaluation is over, evenly spaced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "data", "max_bytes", "eval_windows")


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads a block."""
    width: int = 128
    """Channels of the residual stream, divided evenly over the heads."""
    context: int = 128
    """Bytes a window of text has, and the most that a prediction looks back on."""
    dropout: float = 0.0
    """Probability of dropping an attention weight or an output of a block."""

    def __post_init__(self) -> None:
        require_positive(self, "model", "layers", "heads", "width", "context")
        if self.width % (2 * self.heads):
            raise ps.ConfigError(
                f"--model.width {self.width}: must be a multiple of {2 * self.heads}, twice --model.heads, "
                "so that each head has pairs of channels to rotate"
            )
        if not 0 <= self.dropout < 1:
            raise ps.ConfigError(f"--model.dropout {self.dropout}: must be at least 0 and less than 1")


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises to its peak."""
    decay_steps: int = 1000
    """Steps, warmup included, after which a cosine has taken the learning rate to a tenth of the peak, where it stays.
    Not tied to --steps, so that a run of several legs (--resume --steps MORE) is the run it would have been in one."""
    weight_decay: float = 0.1
    """Decoupled weight decay, relative to the learning rate."""
    clip: float = 1.0
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        require_positive(self, "optimizer", "lr", "clip")
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ps.ConfigError(
                f"--optimizer.warmup-steps {self.warmup_steps}: must be at least 0 and less than "
                f"--optimizer.decay-steps {self.decay_steps}"
            )
        if not 0 <= self.weight_decay < float("inf"):
            raise ps.ConfigError(f"--optimizer.weight-decay {self.weight_decay}: must be at least 0")


@dataclass(frozen=True)
class SampleConfig:
    prompt: str = "def "
    """Text to continue when training is done."""
    num_bytes: int = 300
    """Bytes to continue it with."""
    temperature: float = 0.8
    """Below 1, likely bytes are made likelier."""

    def __post_init__(self) -> None:
        require_positive(self, "sample", "temperature")
        if not self.prompt:
            raise ps.ConfigError("--sample.prompt: must not be empty")


@dataclass(frozen=True, kw_only=True)
class Config(ps.TrainConfig):
    output_dir: Path = Path("runs/lm")
    """The run's directory: config, metrics, plot and checkpoints. Must not exist yet, unless --resume."""
    batch_size: int = 16
    """Windows a step, over all processes and microbatches: the global batch."""
    eval_every: int = 250
    """Steps between evaluations; there is always one after the last step. 0: only that one."""
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=250))
    data: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


def require_positive(config: object, group: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ps.ConfigError(f"--{group}.{name.replace('_', '-')} {value}: must be positive")


# --- text ------------------------------------------------------------------------------------------------------------


class Windows:
    """`text` cut into windows of `context` bytes, each with the byte after it: the next one to predict at the end."""

    def __init__(self, text: np.ndarray, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, i: int) -> np.ndarray:
        start = i * self.context
        return self.text[start : start + self.context + 1].astype(np.int64)


class Part:
    """`num` samples of a dataset, evenly spaced; all, if it has no more."""

    def __init__(self, dataset: Windows, num: int) -> None:
        self.dataset, self.num = dataset, min(num, len(dataset))

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> np.ndarray:
        return self.dataset[i * len(self.dataset) // self.num]


def read_text(config: TextConfig, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation text: of each file the first 95 % and the rest. The same bytes on every process."""
    path = config.path or Path(sysconfig.get_paths()["stdlib"])
    train, validation, room = bytearray(), bytearray(), config.max_bytes
    try:
        for file in text_files(path, is_stdlib=config.path is None):
            content = file.read_bytes()[:room]
            room -= len(content)
            cut = len(content) - len(content) // 20
            train += content[:cut]
            validation += content[cut:]
    except OSError as error:
        raise ps.ConfigError(f"--data.path {path}: cannot be read: {error}") from error
    if not train:
        raise ps.ConfigError(f"--data.path {path}: there is no text in it; give a file or folder with some")
    if min(len(train), len(validation)) < context + 1:
        raise ps.ConfigError(
            f"--data.path {path}: {len(train) + len(validation):,} bytes are too few: the validation text, the last "
            f"5 % of each file, needs a window of {context + 1} bytes; give more text or lower --model.context"
        )
    return np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8)


def text_files(path: Path, *, is_stdlib: bool) -> Iterator[Path]:
    """The files to read in an order that is the same everywhere: all but hidden ones, or the library's own modules."""
    if not path.exists():
        raise ps.ConfigError(f"--data.path {path}: no such file or folder")
    if path.is_file():
        yield path
        return
    skipped = {"__pycache__"}
    if is_stdlib:
        skipped |= {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    for file in sorted(path.rglob("*.py" if is_stdlib else "*"), key=lambda file: file.relative_to(path).parts):
        parts = file.relative_to(path).parts
        if file.is_file() and not skipped.intersection(parts) and not any(part.startswith(".") for part in parts):
            yield file


# --- the run ---------------------------------------------------------------------------------------------------------


def build(config: Config) -> ps.Experiment:
    train, validation = read_text(config.data, config.model.context)

    import torch
    from lm_model import GPT, loss

    model, optimizer = config.model, config.optimizer
    with torch.device("meta"):  # no memory and no values: ps.init makes those, from the seed
        gpt = GPT(layers=model.layers, heads=model.heads, width=model.width, dropout=model.dropout)
    lr = ps.warmup_cosine(optimizer.lr, optimizer.warmup_steps, optimizer.decay_steps, final=0.1 * optimizer.lr)
    return ps.Experiment(
        model=gpt,
        loss=loss,
        optimizer=ps.chain(
            clip=ps.clip_by_global_norm(optimizer.clip),
            adamw=ps.adamw(lr, betas=(0.9, 0.95), weight_decay=optimizer.weight_decay),
        ),
        data=Windows(train, model.context),
        eval=Part(Windows(validation, model.context), config.data.eval_windows),
        on_end=show,
    )


def show(run: ps.Run) -> None:
    """Print what was learned. Every process takes part in the model's forward; the main one prints."""
    from lm_model import generate

    def predict(tokens_BT):  # noqa: N803
        return run.module.apply(run.state.params, run.state.buffers, tokens_BT.to(run.runtime.device), train=False)[0]

    sample, context = run.config.sample, run.config.model.context
    key = run.state.key.fold_in("sample")
    text = generate(predict, sample.prompt.encode(), sample.num_bytes, context, key, sample.temperature)
    if run.runtime.is_main:
        print(f"\n{text.decode(errors='replace')}\n")
        print(f"validation: {run.metrics['eval/bits_per_byte']:.3f} bits per byte after {run.state.step} steps")
        print(f"everything is in {run.config.output_dir}")


if __name__ == "__main__":
    ps.main(Config, build)

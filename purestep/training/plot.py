"""The loss curve of a run as a picture. Needs matplotlib (the `plot` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purestep.training.run_directory import read_metrics, replace_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTHING = 50  # the smoothed curve forgets over a fiftieth of the run


def plot_losses(metrics: Path, picture: Path, *, title: str = "") -> bool:
    """Draw the losses of a metrics file: each logged step, their running mean, and the evaluations.

    Args:
        metrics: a `metrics.jsonl`.
        picture: PNG to write.
        title: above the axes.

    Returns:
        Whether there was anything to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no pyplot: a library has no business with the program's open figures

    records = read_metrics(metrics)
    train = _points(records, "loss")
    evaluations = _points(records, "eval/loss")
    if not train and not evaluations:
        return False
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, train, evaluations)
    axes.set(xlabel="step", ylabel="loss", title=title)
    replace_atomically(picture, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential running mean, corrected for its start from nothing (Kingma & Ba 2015, section 3).

    >>> smoothed([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    decay = 1 - 1 / max(1.0, len(losses) / _SMOOTHING)
    means, total, weight = [], 0.0, 0.0
    for loss in losses:
        if loss - loss == 0:  # finite
            total, weight = decay * total + (1 - decay) * loss, decay * weight + (1 - decay)
        means.append(total / weight if weight else loss)
    return means


def _draw(axes: Axes, train: list[tuple[int, float]], evaluations: list[tuple[int, float]]) -> None:
    if train:
        steps, losses = zip(*train, strict=True)
        many = len(train) > _SMOOTHING
        axes.plot(
            steps, losses, color="C0", alpha=0.35 if many else 1.0, lw=1, marker="" if many else ".", label="train"
        )
        if many:
            axes.plot(steps, smoothed(losses), color="C0", lw=1.8, label="train, smoothed")
    if evaluations:
        steps, losses = zip(*evaluations, strict=True)
        axes.plot(steps, losses, color="C3", marker="o", ms=4, lw=1.2, label="eval")
    finite = [loss for _, loss in train + evaluations if loss - loss == 0]
    if finite and min(finite) > 0 and max(finite) > 30 * min(finite):
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _points(records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(record["step"], float(record[name])) for record in records if name in record]

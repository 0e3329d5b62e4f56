"""Records, the clock, the curve."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

import purestep as ps
from purestep.training import metrics
from purestep.training.metrics import (
    MetricsFile,
    StepClock,
    eval_record,
    format_line,
    peak_memory,
    step_record,
    to_floats,
)
from purestep.training.plot import plot_losses, smoothed
from purestep.training.run_directory import read_metrics
from tests.ranks import run_ranks

LOCAL = ps.Runtime(topology=ps.Topology(1, 1), device=torch.device("cpu"))


def test_a_line_keeps_every_bit_and_any_reader_takes_it():
    losses = [*torch.rand(100).tolist(), 5e-324, 1e300, float("nan"), float("inf"), float("-inf")]
    for loss in losses:
        back = json.loads(format_line({"loss": loss}), parse_constant=pytest.fail)["loss"]
        assert repr(float(back)) == repr(loss)


def test_a_record_has_the_promised_fields():
    values = to_floats({"loss": torch.tensor(0.5), "weight": 8.0, "grad_norm": torch.tensor(2.0), "lr": 0.1})
    costs = {"tokens_per_s": 1.0, "step_time": 1.0, "data_time": 0.0, "memory": 1}
    record = step_record(3, 8, values, costs)
    assert list(record) == ["step", "samples", "loss", "weight", "grad_norm", "lr", *costs]
    assert (record["step"], record["samples"], record["loss"]) == (3, 24, 0.5)
    assert eval_record({"loss": ps.Mean(6.0, 3)}) == {"eval/loss": 2.0}


@pytest.mark.parametrize("name", ["step", "samples", "memory", "step_time"])
def test_a_metric_may_not_hide_a_field_of_the_record(name):
    with pytest.raises(ValueError, match=f"metric named '{name}'"):
        step_record(1, 1, {"loss": 1.0, name: 2.0}, {})


def test_the_clock_divides_time_between_data_and_steps_and_skips_the_rest(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def after(seconds: float, event, *args):
        now[0] += seconds
        event(*args)

    clock = StepClock()
    for _ in range(4):
        after(0.25, clock.data_ready)
        after(1.0, clock.step_done, torch.tensor(5.0))
        after(100.0, clock.skip)
    costs = clock.take(LOCAL)
    assert (costs["data_time"], costs["step_time"], costs["tokens_per_s"]) == (0.25, 1.25, 4.0)
    after(0.5, clock.data_ready)
    after(1.5, clock.step_done, 8.0)
    assert clock.take(LOCAL)["tokens_per_s"] == 4.0  # a record starts the next window


def _peaks() -> tuple[int, int, int]:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(40_000_000)
    return before, block.nbytes, peak_memory(torch.device("cpu"))


def test_peak_memory_is_of_this_process_in_bytes():
    ((before, size, after),) = run_ranks(_peaks, 1)
    assert size // 2 < after - before < 3 * size
    assert 30e6 < before < 1e11


def _costs_of_rank() -> dict:
    with ps.start() as runtime:
        clock = StepClock()
        time.sleep(0.2 * runtime.rank)
        clock.data_ready()
        clock.step_done(3.0)
        return clock.take(runtime)


def test_costs_are_the_slowest_ranks_on_every_rank():
    first, second = run_ranks(_costs_of_rank, 2)
    assert first == second
    assert first["data_time"] >= 0.2


def test_a_metrics_file_appends_lines_that_are_there_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        file = MetricsFile(path)
        file.write({"step": step})
        assert [record["step"] for record in read_metrics(path)] == list(range(1, step + 1))
        file.sync()
        file.close()


def test_smoothing_forgets_its_start_and_steps_over_what_is_not_finite():
    losses = [8.0] * 10 + [float("nan")] + [2.0] * 290
    means = smoothed(losses)
    assert means[0] == means[10] == 8.0
    assert 2.0 < means[12] < 8.0
    assert means[-1] == pytest.approx(2.0, abs=1e-6)
    assert smoothed([]) == []


@pytest.mark.parametrize("num", [1, 10, 200])
def test_the_curve_is_a_picture(tmp_path, num):
    pytest.importorskip("matplotlib")
    from PIL import Image

    records = [{"step": i, "loss": 100.0 * 0.97**i if i != 5 else "NaN"} for i in range(1, num + 1)]
    records.append({"step": num, "eval/loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="a run")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (1050, 630)
        assert len(picture.convert("RGB").getcolors(100_000)) > 50
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_no_records_no_picture(tmp_path):
    pytest.importorskip("matplotlib")
    assert not plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []

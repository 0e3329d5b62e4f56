"""`ps.fit`: what a run leaves behind, and that interrupted and resumed is the same as never interrupted."""

import dataclasses
import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

import purestep as ps
from purestep.training import loop
from purestep.training.run_directory import read_metrics
from tests.ranks import RanksFailed, run_on, run_ranks
from tests.training.programs import Config, Samples, build

CPU = ps.AcceleratorConfig(device="cpu")
TIMES = ("tokens_per_s", "step_time", "data_time", "memory")


@pytest.fixture(autouse=True)
def _few_pictures(request, monkeypatch):
    """Drawing takes longer than these runs: one test looks at the picture."""
    if "leaves_its_directory" not in request.node.name:
        monkeypatch.setattr(loop, "_plot", lambda directory, runtime: None)


def _config(path: Path, **changes) -> Config:
    config = Config(output_dir=path, steps=9, batch_size=4, log_every=1, eval_every=4, accelerator=CPU)
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=2), **changes)


def _fit(config: Config) -> dict:
    """What a run ended with: step, digest, and the values of its metrics.jsonl that do not depend on the clock."""
    digests = []
    run = ps.fit(config, build(config, on_end=lambda run: digests.append(run.state.digest())))
    if not digests:  # there was nothing to do
        digests.append(run.state.digest())
    return {"step": run.state.step, "digest": digests[0], "metrics": _lines(config.output_dir)}


def _lines(path: Path) -> list[dict]:
    records = read_metrics(path / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


class _Interrupted(Exception):
    pass


class _Failing(Samples):
    def __getitem__(self, index: int):
        if self._reads == self._kill_at:
            raise _Interrupted
        return super().__getitem__(index)


def _fit_until(config: Config, sample: int) -> None:
    """A run that ends with an error when it reads its `sample`-th sample."""
    experiment = dataclasses.replace(build(config), data=_Failing(config.samples, sample))
    with pytest.raises(_Interrupted):
        ps.fit(config, experiment)


def test_a_run_leaves_its_directory(tmp_path, capsys):
    config = _config(tmp_path / "run", log_every=2)
    result = _fit(config)
    path = config.output_dir
    assert sorted(p.name for p in path.iterdir()) == ["checkpoints", "loss.png", "metrics.jsonl", "train_config.json"]
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == [f"step-{i:08d}" for i in (2, 4, 6, 8, 9)]
    records = read_metrics(path / "metrics.jsonl")
    assert [record["step"] for record in records] == [2, 4, 6, 8, 9]  # one line a logged step
    fields = {"step", "samples", "loss", "weight", "mae", "lr", "grad_norm", *TIMES}
    for record in records:
        evaluated = {"eval/loss", "eval/mae"} if record["step"] in (4, 8, 9) else set()
        assert set(record) == fields | evaluated
    assert [record["samples"] for record in records] == [4 * record["step"] for record in records]
    assert all(record["weight"] == 4.0 and record["memory"] > 1e6 and record["step_time"] > 0 for record in records)
    assert records[0]["lr"] == pytest.approx(0.02 * 0.99)
    assert result["step"] == 9
    assert "9/9" in capsys.readouterr().err


def test_the_metrics_of_a_run_are_the_last_of_each(tmp_path):
    config = _config(tmp_path / "run")
    run = ps.fit(config, build(config))
    records = read_metrics(config.output_dir / "metrics.jsonl")
    assert run.metrics["loss"] == records[-1]["loss"]
    assert run.metrics["eval/loss"] == records[-1]["eval/loss"]


def test_the_curve_falls(tmp_path):
    config = _config(tmp_path / "run", steps=60, dropout=0.0)
    losses = [record["loss"] for record in _fit(config)["metrics"] if "loss" in record]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.parametrize("sample", [0, 4, 7, 8, 17, 35])
def test_interrupted_and_resumed_is_never_interrupted(tmp_path, sample):
    whole = _fit(_config(tmp_path / "whole"))
    config = _config(tmp_path / "parts")
    _fit_until(config, sample)
    assert _fit(dataclasses.replace(config, resume=True)) == whole


def test_interrupted_again_and_again(tmp_path):
    whole = _fit(_config(tmp_path / "whole"))
    config = _config(tmp_path / "parts")
    _fit_until(config, 9)
    for _ in range(2):
        _fit_until(dataclasses.replace(config, resume=True), 10)
    assert _fit(dataclasses.replace(config, resume=True)) == whole
    steps = [json.loads(line)["step"] for line in (config.output_dir / "resumes.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6]


def _fit_and_die(config: Config, delay: float) -> dict:
    """`_fit`, but this process is killed after `delay` seconds."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    result = _fit(config)
    timer.cancel()
    return result


def test_killed_at_random_moments(tmp_path):
    """SIGKILL wherever it hits: in a step, in a save, while the directory is made."""
    whole = _fit(_config(tmp_path / "whole", steps=20))
    path, delays = tmp_path / "parts", random.Random(os.urandom(8))
    kills = 0
    for attempt in range(60):
        config = _config(path, steps=20, resume=(path / "train_config.json").exists())
        try:
            (result,) = run_ranks(_fit_and_die, 1, config, delays.uniform(0.0, 0.05 * (attempt + 1)))
            break
        except RanksFailed as error:
            kills += "died without a word" in str(error)
            assert kills == attempt + 1, error  # noqa: PT017 - a kill is expected, anything else is not
    assert result == whole
    assert kills > 0


def _fit_on(topology: tuple[int, int], config: Config) -> dict:
    config = dataclasses.replace(config, parallelism=ps.ParallelismConfig(*topology))
    return _fit(config)


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)])
def test_ranks_killed_and_resumed(tmp_path, topology):
    config = _config(tmp_path / "parts", accelerator=dataclasses.replace(CPU, gradient_accumulation=_TWO))
    first, second = run_on(topology, _fit_on, dataclasses.replace(config, output_dir=tmp_path / "whole"))
    assert first == second
    with pytest.raises(RanksFailed, match="died without a word"):
        run_on(topology, _fit_on, dataclasses.replace(config, kill_at=9))
    assert run_on(topology, _fit_on, dataclasses.replace(config, resume=True)) == [first, first]


_TWO = dataclasses.replace(CPU.gradient_accumulation, steps=2)


def test_a_run_goes_on_elsewhere(tmp_path):
    """Local, then sharded on two ranks, then local again: the losses of a run that stayed local."""
    whole = _fit(_config(tmp_path / "whole", dropout=0.0))["metrics"]
    config = _config(tmp_path / "parts", dropout=0.0)
    _fit(dataclasses.replace(config, steps=3))
    run_on((1, 2), _fit_on, dataclasses.replace(config, steps=6, resume=True))
    parts = _fit(dataclasses.replace(config, resume=True))["metrics"]
    by_step = {record["step"]: record for record in parts if "loss" in record}
    for expected in (record for record in whole if "loss" in record):
        record = by_step[expected["step"]]  # where a part ended it was evaluated as well
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    records = [json.loads(line) for line in (config.output_dir / "resumes.jsonl").read_text().splitlines()]
    assert [record["topology"] for record in records] == [
        "fsdp2 (replicate 1 x shard 2)",
        "local (replicate 1 x shard 1)",
    ]
    assert records[0]["changed"]["parallelism.dp_shard"] == [1, 2]


def test_a_finished_run_has_nothing_to_do(tmp_path, capsys):
    config = _config(tmp_path / "run")
    first = _fit(config)
    before = {p: p.read_bytes() for p in config.output_dir.rglob("*") if p.is_file()}
    for steps in (9, 5):
        capsys.readouterr()
        assert _fit(dataclasses.replace(config, resume=True, steps=steps)) == first
        err = capsys.readouterr().err
        assert f"nothing to do: {config.output_dir} is at step 9 and --steps is {steps}" in err
    assert {p: p.read_bytes() for p in config.output_dir.rglob("*") if p.is_file()} == before


def test_a_finished_run_goes_on_to_more_steps(tmp_path, capsys):
    config = _config(tmp_path / "run", eval_every=3)
    whole = _fit(dataclasses.replace(config, output_dir=tmp_path / "whole", steps=12))
    _fit(config)
    result = _fit(dataclasses.replace(config, resume=True, steps=12))
    assert result == whole
    assert "  steps: 9 -> 12" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_starts_again_and_says_so(tmp_path, capsys):
    config = _config(tmp_path / "run")
    _fit_until(config, 5)
    capsys.readouterr()
    _fit(dataclasses.replace(config, resume=True))
    assert f"{config.output_dir} has no checkpoint yet: starting from step 0" in capsys.readouterr().err


def _damage(path: Path) -> None:
    (file,) = (path / "model").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, caplog):
    config = _config(tmp_path / "run")
    whole = _fit(config)
    _damage(config.output_dir / "checkpoints" / "step-00000009")
    (config.output_dir / "checkpoints" / "step-00000008" / "SHA256SUMS").unlink()
    assert _fit(dataclasses.replace(config, resume=True)) == whole
    assert "step-00000009" in caplog.text
    assert "model.safetensors" in caplog.text


def test_only_damaged_checkpoints_are_an_error_that_changes_nothing(tmp_path):
    config = _config(tmp_path / "run", steps=2)
    _fit(config)
    _damage(config.output_dir / "checkpoints" / "step-00000002")
    before = {p: p.read_bytes() for p in config.output_dir.rglob("*") if p.is_file()}
    with pytest.raises(ps.CheckpointError, match=r"(?s)no undamaged checkpoint.*step-00000002.*model.safetensors"):
        _fit(dataclasses.replace(config, resume=True, steps=5))
    (config.output_dir / "checkpoints" / "step-00000002" / "SHA256SUMS").unlink()
    del before[config.output_dir / "checkpoints" / "step-00000002" / "SHA256SUMS"]
    with pytest.raises(ps.CheckpointError, match="step-00000002 has no SHA256SUMS"):
        _fit(dataclasses.replace(config, resume=True, steps=5))
    assert {p: p.read_bytes() for p in config.output_dir.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 5}, r"--batch-size: another global batch \(4 then, 5 now\); drop the flag"),
        ({"seed": 1}, "--seed: another order of the samples; drop the flag"),
        ({"samples": 41}, r"--data.path: another number of samples \(40 then, 41 now\)"),
    ],
)
def test_what_decides_the_batches_cannot_change(tmp_path, changes, message):
    config = _config(tmp_path / "run")
    _fit_until(config, 20)
    before = {p: p.read_bytes() for p in config.output_dir.rglob("*") if p.is_file()}
    with pytest.raises(ps.ConfigError, match=message):
        _fit(dataclasses.replace(config, resume=True, **changes))
    assert {p: p.read_bytes() for p in config.output_dir.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("format", ["safetensors", "dcp", "safetensors_dcp"])
def test_formats(tmp_path, format):
    config = _config(tmp_path / "run", checkpoint_format=format)
    whole = _fit(config)
    _fit_until(dataclasses.replace(config, output_dir=tmp_path / "parts"), 20)
    assert _fit(dataclasses.replace(config, output_dir=tmp_path / "parts", resume=True)) == whole


def test_another_implementation_of_the_optimizer_is_told(tmp_path, capsys):
    config = _config(tmp_path / "run", steps=4)
    _fit(config)
    assert ps.describe(config.output_dir / "checkpoints/step-00000004").metadata["implementations"] == {
        "adamw": "fused"
    }
    said = []
    for steps in (6, 8):
        resumed = dataclasses.replace(config, resume=True, steps=steps)
        experiment = build(resumed)
        adamw = dataclasses.replace(experiment.optimizer.parts["adamw"], implementation="foreach")
        capsys.readouterr()
        ps.fit(resumed, dataclasses.replace(experiment, optimizer=ps.chain(adamw=adamw)))
        said.append("".join(capsys.readouterr()))
    assert (
        "warning: the optimizer runs other kernels than before the checkpoint (adamw: 'fused' -> 'foreach')" in said[0]
    )
    assert "other kernels" not in said[1]


def test_batches_that_do_not_count_are_logged_as_such(tmp_path):
    records = _fit(_config(tmp_path / "run", loss="nothing", steps=2))["metrics"]
    assert [record["weight"] for record in records if "loss" in record] == [0.0, 0.0]


def test_ambient_randomness_has_no_influence(tmp_path):
    digests = set()
    for i in range(2):
        torch.manual_seed(i)
        digests.add(_fit(_config(tmp_path / str(i)))["digest"])
    assert len(digests) == 1


def test_a_runtime_of_another_config_is_refused(tmp_path):
    config = _config(tmp_path / "run")
    bf16 = dataclasses.replace(CPU, mixed_precision="bf16")
    with ps.start(accelerator=bf16) as runtime, pytest.raises(ps.ConfigError, match="was not started from this config"):
        ps.fit(config, build(config), runtime)
    assert list(tmp_path.iterdir()) == []


def test_trackers_get_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = _config(tmp_path / "run", log_with=("tensorboard",))
    metrics = _fit(config)["metrics"]
    (folder,) = {p.parent for p in config.output_dir.glob("purestep/events*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    assert logged == {r["step"]: pytest.approx(r["loss"], rel=1e-6) for r in metrics if "loss" in r}


def test_a_tracker_the_runtime_does_not_have_is_refused(tmp_path):
    pytest.importorskip("tensorboard")
    config = _config(tmp_path / "run", log_with=("tensorboard",))
    with (
        ps.start(accelerator=CPU) as runtime,
        pytest.raises(ps.ConfigError, match="--log-with tensorboard: the runtime"),
    ):
        ps.fit(config, build(config), runtime)
    assert list(tmp_path.iterdir()) == []


def _fit_with_replicas_that_drift(topology: tuple[int, int], config: Config) -> str:
    config = dataclasses.replace(config, parallelism=ps.ParallelismConfig(*topology))
    experiment = dataclasses.replace(build(config), optimizer=ps.sgd(0.1 + 0.01 * int(os.environ["RANK"])))
    with pytest.raises(ps.CheckpointError) as caught:
        ps.fit(config, experiment)
    return str(caught.value)


def test_replicas_that_differ_are_not_saved(tmp_path):
    config = _config(tmp_path / "run")
    first, second = run_on((2, 1), _fit_with_replicas_that_drift, config)
    assert first == second
    assert first.startswith("step 2: replicas differ between ranks in 'params/")
    assert first.endswith("no checkpoint was written")
    assert list((config.output_dir).glob("checkpoints/*")) == []

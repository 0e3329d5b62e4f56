"""Which checkpoints stay, and that removing the others is never noticed by anybody who reads or is killed."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from purestep.state.checkpoint import restoring
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.retention import Retention, best_first, decode_metrics, encode_metrics
from purestep.state.files import commit
from purestep.state.files.integrity import describe
from purestep.state.files.manifest import CheckpointError
from purestep.state.keys import key
from purestep.state.train_state import TrainState

NAN, INF = math.nan, math.inf


def _state(step: int, value: float = 0.0) -> TrainState:
    return TrainState(step=step, params={"w": torch.full((3,), value)}, buffers={}, opt_state={}, key=key(0))


# (rules, loss by step, step that was just saved, steps that stay)
TABLE = [
    ({}, {1: 0.0, 2: 0.0, 3: 0.0}, 3, [1, 2, 3]),
    ({"keep_last": 1}, {1: 0.0, 2: 0.0, 3: 0.0}, 3, [3]),
    ({"keep_last": 2}, {1: 0.0, 2: 0.0, 3: 0.0}, 3, [2, 3]),
    ({"keep_last": 9}, {1: 0.0, 2: 0.0, 3: 0.0}, 3, [1, 2, 3]),
    ({"keep_every": 2}, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0}, 5, [0, 2, 4, 5]),
    ({"keep_best": ("loss", "min")}, {1: 2.0, 2: 1.0, 3: 3.0}, 3, [2, 3]),
    ({"keep_best": ("loss", "max")}, {1: 2.0, 2: 1.0, 3: 1.5}, 3, [1, 3]),
    ({"keep_best": ("loss", "min")}, {1: 1.0, 2: 1.0, 3: 3.0}, 3, [1, 3]),  # of equals, the earlier
    ({"keep_best": ("loss", "min")}, {1: 2.0, 2: 1.0, 3: 0.5}, 3, [3]),
    ({"keep_best": ("loss", "min")}, {1: NAN, 2: 1.0, 3: NAN}, 3, [2, 3]),
    ({"keep_best": ("loss", "max")}, {1: NAN, 2: 1.0, 3: NAN}, 3, [2, 3]),
    ({"keep_best": ("loss", "min")}, {1: -INF, 2: 1.0, 3: INF}, 3, [2, 3]),
    ({"keep_best": ("loss", "min")}, {1: NAN, 2: NAN, 3: NAN}, 3, [3]),
    ({"keep_best": ("other", "min")}, {1: 1.0, 2: 1.0, 3: 1.0}, 3, [3]),
    ({"keep_last": 2, "keep_every": 3}, dict.fromkeys(range(1, 9), 0.0), 8, [3, 6, 7, 8]),
    (
        {"keep_last": 2, "keep_every": 4, "keep_best": ("loss", "min")},
        {1: 5.0, 2: 0.1, 3: 5.0, 4: 5.0, 5: 5.0, 6: 5.0, 7: 5.0},
        7,
        [2, 4, 6, 7],
    ),
    # A run that went back to step 2: what it has yet to reach may be the newest valid one, and stays.
    ({"keep_last": 1}, {1: 0.0, 2: 0.0, 7: 0.0, 9: 0.0}, 2, [2, 7, 9]),
    ({"keep_best": ("loss", "min")}, {1: 2.0, 2: 3.0, 9: 1.0}, 2, [1, 2, 9]),
    # What cannot be read stays, and is not counted.
    ({"keep_last": 2}, {1: 0.0, 2: 0.0, 3: None, 4: 0.0}, 4, [2, 3, 4]),
    ({"keep_last": 1}, {1: None, 2: 0.0, 3: 0.0}, 3, [1, 3]),
]


@pytest.mark.parametrize(("rules", "losses", "saved", "stay"), TABLE)
def test_table(rules, losses, saved, stay):
    metrics = {step: None if loss is None else {"loss": loss} for step, loss in losses.items()}
    gone = Retention(**rules).expired(saved, metrics)
    assert sorted(set(losses) - set(gone)) == stay
    assert gone == sorted(gone)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keep_last": 0}, "keep_last must be a whole number of at least 1, or None for no such rule; got 0"),
        ({"keep_last": True}, "keep_last must be a whole number"),
        ({"keep_every": -1}, "keep_every must be a whole number"),
        ({"keep_every": 2.5}, "keep_every must be a whole number"),
        ({"keep_best": "loss"}, r"keep_best must be \(name of a metric, 'min' or 'max'\).*got 'loss'"),
        ({"keep_best": ("loss", "least")}, "keep_best must be"),
    ],
)
def test_rules_that_are_none_are_refused(tmp_path, rules, message):
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, **rules)


def test_metrics_survive_json():
    metrics = {"a": 0.1, "b": NAN, "c": INF, "d": -INF, "e": torch.tensor(3), "f": 1}
    back = decode_metrics({"metrics": json.loads(json.dumps(encode_metrics(metrics)))})
    assert repr(back) == repr({"a": 0.1, "b": NAN, "c": INF, "d": -INF, "e": 3.0, "f": 1.0})
    for strange in ({}, {"metrics": 3}, {"metrics": {"a": "x", "b": [1], "c": True}}):
        assert decode_metrics(strange) == {}
    with pytest.raises(TypeError, match="metric 'a' must be a number, got 'x'"):
        encode_metrics({"a": "x"})
    assert best_first({1: {"a": 2.0}, 2: {"a": 1.0}, 3: {"a": NAN}, 4: None, 5: {}}, "a", "min") == [2, 1]


def _save_all(checkpoints: Checkpoints, losses: dict[int, float]) -> None:
    for step, loss in losses.items():
        checkpoints.save(_state(step), metrics={"loss": loss})


@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_one_is_known_after_a_restart(tmp_path, async_save):
    rules = {"keep_last": 1, "keep_best": ("loss", "min"), "async_save": async_save}
    with Checkpoints(tmp_path, **rules) as checkpoints:
        assert checkpoints.best() is None
        _save_all(checkpoints, {1: 3.0, 2: 1.0, 3: 2.0})
    with Checkpoints(tmp_path, **rules) as checkpoints:
        assert (checkpoints.steps(), checkpoints.best().name) == ([2, 3], "step-00000002")
        _save_all(checkpoints, {4: NAN, 5: 1.5})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best().name) == ([2, 5], "step-00000002")
        _save_all(checkpoints, {6: 0.5})
    assert (checkpoints.steps(), checkpoints.best().name) == ([6], "step-00000006")
    assert sorted(os.listdir(tmp_path)) == ["step-00000006"]
    assert describe(checkpoints.latest()).metadata == {"metrics": {"loss": 0.5}}


def test_a_damaged_best_one_is_passed_over(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_best=("loss", "min"))
    _save_all(checkpoints, {1: 2.0, 2: 1.0, 3: 3.0})
    (tmp_path / "step-00000002/model/model.safetensors").write_bytes(b"")
    assert checkpoints.best().name == "step-00000001"
    assert "step-00000002" in caplog.text
    with pytest.raises(ValueError, match=r"best\(\) needs to know what is best"):
        Checkpoints(tmp_path).best()


def test_a_step_saved_again_has_its_new_metrics(tmp_path):
    with Checkpoints(tmp_path, keep_best=("loss", "min")) as checkpoints:
        _save_all(checkpoints, {1: 1.0, 2: 2.0})
        assert checkpoints.best().name == "step-00000001"
        _save_all(checkpoints, {1: 9.0})
        assert checkpoints.best().name == "step-00000002"


def test_metrics_that_lack_the_best_are_refused_before_anything_is_written(tmp_path):
    with Checkpoints(tmp_path / "run", keep_best=("loss", "min")) as checkpoints:
        with pytest.raises(ValueError, match="keep_best is by 'loss', which is not among the metrics: lose"):
            checkpoints.save(_state(1), metrics={"lose": 1.0})
        with pytest.raises(ValueError, match="metadata has 'metrics'"):
            checkpoints.save(_state(1), metrics={"loss": 1.0}, metadata={"metrics": 1})
        assert not (tmp_path / "run").exists()
        checkpoints.save(_state(1), metadata={"metrics": 1})  # not measured: does not count
        assert checkpoints.best() is None


def test_one_that_is_being_read_stays_until_later(tmp_path):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        older = checkpoints.save(_state(1))
        with commit.held_for_reading(older), commit.held_for_reading(older):
            checkpoints.save(_state(2))
            assert checkpoints.steps() == [1, 2]
        checkpoints.save(_state(3))
        assert checkpoints.steps() == [3]


def test_one_that_is_being_restored_stays(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        older = checkpoints.save(_state(1, 7.0))
        open_together = restoring.open_together

        def while_another_is_saved(path, **options):
            contents = open_together(path, **options)
            checkpoints.save(_state(2))
            return contents

        monkeypatch.setattr(restoring, "open_together", while_another_is_saved)
        assert restoring.restore(older, _state(0)).params["w"].tolist() == [7.0] * 3
        assert checkpoints.steps() == [1, 2]


def test_one_that_cannot_be_read_stays(tmp_path):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(_state(1))
        (tmp_path / "step-00000001/state.json").write_bytes(b"{}")
        for step in (2, 3):
            checkpoints.save(_state(step))
        assert checkpoints.steps() == [1, 3]


def test_older_steps_saved_after_damaged_newer_ones_stay(tmp_path):
    """The newest valid checkpoint is never removed, wherever it is in the order."""
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(_state(step))
        for step in (20, 30):
            (tmp_path / f"step-000000{step}/model/model.safetensors").write_bytes(b"")
        checkpoints.save(_state(12))
        assert checkpoints.steps() == [10, 12, 20, 30]
        assert checkpoints.latest().name == "step-00000012"


def test_failing_to_remove_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(_state(1))

        def refuse(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("purestep.state.checkpoint.checkpoints.discard", refuse)
        checkpoints.save(_state(2))
        assert "could not remove what is not kept" in caplog.text
        assert checkpoints.latest().name == "step-00000002"


def test_a_linked_checkpoint_is_not_removed(tmp_path):
    with Checkpoints(tmp_path / "run", keep_last=1) as checkpoints:
        checkpoints.save(_state(1))
        shutil.move(tmp_path / "run/step-00000001", tmp_path / "elsewhere")
        (tmp_path / "run/step-00000001").symlink_to(tmp_path / "elsewhere")
        checkpoints.save(_state(2))
    assert checkpoints.steps() == [1, 2]


def test_what_was_moved_aside_by_a_process_that_died_is_put_back(tmp_path):
    """Where a file system cannot exchange two directories, a kill may come between two renames."""
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(_state(1))
        new = tmp_path / ".step-00000001.tmp-0123"
        path.rename(tmp_path / f"{new.name}-old")
        new.mkdir()
        with commit.held_for_reading(new):  # as its writer would hold it, were it alive
            assert checkpoints.steps() == []
        assert checkpoints.steps() == [1]
        assert checkpoints.restore_latest(_state(0)).step == 1
        checkpoints.save(_state(2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_closed_ones_read_and_do_not_save(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(_state(1))
    checkpoints.close()
    assert checkpoints.restore_latest(_state(0)).step == 1
    with pytest.raises(CheckpointError, match="were closed: make new ones to save more"):
        checkpoints.save(_state(2))

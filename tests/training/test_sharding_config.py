"""The sharding spec of a run: flags, `train_config.json`, and what beats what."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import purestep as ps
from purestep.training import config_json
from purestep.training.command_line import main, read_arguments
from purestep.training.flags import parse_flags
from tests.ranks import run_ranks
from tests.training.programs import Config, build

SPEC = ps.ShardingSpec(
    units=(
        ps.Unit("blocks.*", prefetch=1, activation_checkpointing=ps.ActivationCheckpointing("full", every=2)),
        "head",
    ),
    freeze=("embed.*",),
)
AUTO = ps.ShardingSpec(units=("auto",))
FLAGS = [  # flags, default, spec
    ([], None, None),
    ([], SPEC, SPEC),
    (["--sharding.units", "blocks.*", "Embedding"], None, ps.ShardingSpec(units=("blocks.*", "Embedding"))),
    (["--sharding.units"], None, ps.ShardingSpec()),
    (["--sharding.units", "a"], SPEC, dataclasses.replace(SPEC, units=("a",))),
    (["--sharding.freeze", "a.*", "b"], None, dataclasses.replace(AUTO, freeze=("a.*", "b"))),
    (["--sharding.freeze", "a.*"], SPEC, dataclasses.replace(SPEC, freeze=("a.*",))),
    (["--sharding.freeze"], SPEC, dataclasses.replace(SPEC, freeze=())),
    (["--sharding.forward-methods", "encode"], None, dataclasses.replace(AUTO, forward_methods=("encode",))),
    (
        ["--sharding.ignored", "Router", "--sharding.root", "x"],
        None,
        dataclasses.replace(AUTO, ignored=("Router",), root=("x",)),
    ),
]


@pytest.mark.parametrize("config_class", [ps.TrainConfig, Config])
@pytest.mark.parametrize(("flags", "default", "spec"), FLAGS)
def test_flags(flags, default, spec, config_class):
    config = parse_flags(config_class, flags, default=config_class(sharding=default))
    assert config == config_class(sharding=spec)
    assert type(config) is config_class


def test_help_says_what_is_there_and_where_settings_go(capsys):
    with pytest.raises(SystemExit):
        parse_flags(ps.TrainConfig, ["--help"], default=ps.TrainConfig(sharding=SPEC))
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in ("units", "forward-methods", "root", "ignored", "freeze"):
        assert f"--sharding.{flag} " in text
    assert "Settings of single units go into the file for --config. Now: 'blocks.*' 'head'." in text
    assert "Now: 'embed.*'." in text


def test_misspelled_flags_are_suggested():
    with pytest.raises(ps.ConfigError, match=r"unknown flag --sharding.unit; did you mean --sharding.units\?"):
        parse_flags(ps.TrainConfig, ["--sharding.unit", "a"])


@pytest.mark.parametrize("spec", [None, SPEC, AUTO, ps.ShardingSpec()])
def test_a_spec_survives_the_file(spec, tmp_path):
    config = ps.TrainConfig(sharding=spec)
    text = config_json.dumps(config)
    (tmp_path / "train_config.json").write_text(text)
    again = config_json.load(ps.TrainConfig, tmp_path / "train_config.json")
    assert again == config
    assert config_json.dumps(again) == text
    assert read_arguments(ps.TrainConfig, ["--config", str(tmp_path / "train_config.json")]) == config


def _tree(units: list[Any]) -> dict[str, Any]:
    tree = config_json.to_json(ps.TrainConfig(sharding=ps.ShardingSpec()))
    return {**tree, "sharding": {**tree["sharding"], "units": units}}


def test_a_unit_in_a_file_is_a_glob_or_has_the_settings_that_it_has():
    tree = _tree(["head", {"match": "blocks.*", "param_dtype": "bf16"}])
    config = config_json.from_json(ps.TrainConfig, tree)
    assert config.sharding == ps.ShardingSpec(units=("head", ps.Unit("blocks.*", param_dtype="bf16")))
    written = config_json.to_json(config)["sharding"]["units"]
    assert written == [{"match": "head"}, {"match": "blocks.*", "param_dtype": "bf16"}]
    json.dumps(written)


PROBLEMS = [
    ({"match": "a", "prefetched": 1}, r"unknown field `sharding.units\[0\].prefetched`, did you mean"),
    ({"match": "a", "param_dtype": "fp64"}, r"`sharding.units\[0\].param_dtype` is \"fp64\", expected"),
    ({"prefetch": 1}, r"missing field `sharding.units\[0\].match`"),
    ({"match": "a", "prefetch": -1}, "unit rule 'a': prefetch -1: must be at least 0"),
]


@pytest.mark.parametrize(("unit", "message"), PROBLEMS)
def test_mistakes_in_a_unit_are_named(unit, message):
    with pytest.raises(ps.ConfigError, match=message):
        config_json.from_json(ps.TrainConfig, _tree([unit]))


RUN = ["--accelerator.device", "cpu", "--steps", "2", "--batch-size", "4", "--log-every", "1", "--dropout", "0"]


def test_the_config_beats_the_experiment(tmp_path):
    seen: dict[str, ps.Plan] = {}
    for name, flags in {
        "program": [],
        "override": ["--sharding.units", "enter", "--sharding.root", "blocks.*"],
        "addition": ["--sharding.freeze", "enter.*"],
    }.items():
        run = main(Config, build, [*RUN, "--output-dir", str(tmp_path / name), *flags])
        seen[name] = run.module.plan
        recorded = config_json.load(Config, tmp_path / name / "train_config.json")
        assert recorded.sharding == run.config.sharding
        assert ("enter.weight" in run.state.opt_state["adamw"]["exp_avg"]) == (name != "addition")
    assert [unit.path for unit in seen["program"].units] == ["blocks.0", "blocks.1", ""]
    assert [unit.path for unit in seen["override"].units] == ["enter", ""]
    assert [unit.path for unit in seen["addition"].units] == ["blocks.0", "blocks.1", ""]


def _runs_of_rank(folder: str) -> dict[str, Any]:
    """A run with a spec of its own, stopped after two of four steps, resumed without a word about it."""
    flags = [*RUN, "--parallelism.dp-shard", "2"]
    override = ["--sharding.units", "Block", "enter", "--sharding.ignored", "leave"]
    found: dict[str, Any] = {}

    def note(name: str) -> Any:
        def on_end(run: ps.Run) -> None:
            plan = run.module.plan
            found[name] = (run.state.digest(), run.state.step, [unit.path for unit in plan.units], plan.source)

        return lambda config: build(config, on_end)

    path = str(Path(folder) / "run")
    main(Config, note("first"), [*flags, *override, "--output-dir", path])
    main(Config, note("resumed"), ["--resume", "--output-dir", path, "--steps", "4"])
    whole = [*flags, *override, "--output-dir", str(Path(folder) / "whole"), "--steps", "4"]
    main(Config, note("whole"), whole)
    return found


def test_a_run_with_an_override_records_it_and_resumes_with_it(tmp_path):
    for found in run_ranks(_runs_of_rank, 2, str(tmp_path)):
        units = ["enter", "blocks.0", "blocks.1", ""]
        assert found["first"][1:] == (2, units, "config")
        assert found["resumed"] == found["whole"]
        assert found["resumed"][1:] == (4, units, "config")
    recorded = config_json.load(Config, tmp_path / "run" / "train_config.json")
    assert recorded.sharding == ps.ShardingSpec(units=("Block", "enter"), ignored=("leave",))
    assert recorded.steps == 4

"""`purestep plan`: targets, flags, output, comparison with a saved plan, and what it costs for a large model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import purestep as ps
from tests.golden_plans import FOLDER

ROOT = Path(ps.__file__).parent.parent
GPT = ("examples/lm_model.py:GPT", "--arg", "layers=4", "--arg", "heads=4", "--arg", "width=128")
MODELS = """
import torch, purestep as ps
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))

def build():
    return Net(8)

def experiment():
    return ps.Experiment(model=Net(), loss=print, optimizer=ps.sgd(0.1), data=())

def on():
    return nn.Linear(2, 2).weight.device.type == "meta" and nn.Linear(2, 3)

def broken():
    raise RuntimeError("no such\\nsize")

class Config:
    def __init__(self, width=3):
        self.width = width

class Pretrained(nn.Linear):
    config_class = Config
    def __init__(self, config):
        super().__init__(config.width, 1)

class Steps:
    def init(self, params):
        return {"steps": {name: torch.zeros((), device="meta") for name in params}}

net = Net()
number = 3
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The path of a file with builders; its folder is the current one."""
    path = tmp_path / "models_of_a_user.py"
    path.write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield path
    sys.modules.pop("models_of_a_user", None)


def plan_of(run, *arguments) -> ps.Plan:
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err) == (0, [])
    return ps.Plan.from_dict(json.loads(out))


def test_the_example_equals_its_golden_plans(run, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, degrees in {"local": (1, 1), "ddp2": (2, 1), "hsdp2x2": (2, 2)}.items():
        flags = ("--dp-replicate", degrees[0], "--dp-shard", degrees[1])
        golden = ps.Plan.from_dict(json.loads((FOLDER / f"lm-{name}.json").read_text()))
        # The example also clips, which keeps nothing.
        assert [line for line in golden.diff(plan_of(run, *GPT, *flags)).splitlines() if line[0] in "+-"][2:] == [
            "-optimizer clip_by_global_norm, adamw",
            "+optimizer adamw",
        ]


def test_the_text_is_the_plans(run, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, _ = run("plan", *GPT, "--dp-shard", 2, "--ema")
    assert (code, out) == (0, str(plan_of(run, *GPT, "--dp-shard", 2, "--ema")) + "\n")


@pytest.mark.parametrize("target", ["models_of_a_user.py:{}", "models_of_a_user:{}"])
def test_targets(run, models, target):
    def numel(name: str, *arguments: str) -> int:
        return sum(unit.numel for unit in plan_of(run, target.format(name), *arguments).units)

    assert numel("Net") == 3 * (16 + 4)
    assert numel("Net", "--arg", "width=2") == 3 * (4 + 2)
    assert numel("build") == 3 * (64 + 8)
    assert numel("on") == 2 * 3 + 3  # built on the meta device
    assert numel("net") == 60
    assert numel("Pretrained") == 4
    assert numel("Pretrained", "--arg", "width=7") == 8
    assert plan_of(run, target.format("experiment")).step.optimizer == "sgd"
    assert plan_of(run, target.format("experiment"), "--optimizer", "adam").step.optimizer == "adam"


def test_optimizers(run, models):
    def opt_state(*arguments: str) -> int:
        return plan_of(run, "models_of_a_user:Net", *arguments).account().opt_state

    assert opt_state() == opt_state("--optimizer", "adamw") == 2 * 240 + 6 * 4
    assert opt_state("--optimizer-arg", "amsgrad=true") == 3 * 240 + 6 * 4
    assert opt_state("--optimizer", "sgd") == opt_state("--optimizer", "none") == 0
    assert opt_state("--optimizer", "sgd", "--optimizer-arg", "momentum=0.9") == 240
    assert opt_state("--optimizer", "models_of_a_user:Steps") == 6 * 4


def test_flags_reach_the_plan(run, models, tmp_path):
    recompute = ps.ActivationCheckpointing("full")
    spec = ps.ShardingSpec(units=(ps.Unit("blocks.0", activation_checkpointing=recompute), "blocks.*"))
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    flags = "--accumulate 3 --policy defer_all --reshard-after-forward 2 --param-dtype bf16 --reduce-dtype bf16"
    plan = plan_of(run, "models_of_a_user:Net", "--spec", "spec.json", "--dp-shard", 4, *flags.split(), "--cpu-offload")
    assert (plan.step.microbatches, plan.step.policy, plan.source) == (3, "defer_all", "config")
    settings = plan.units[0].settings
    assert (settings.reshard_after_forward, settings.param_dtype, settings.reduce_dtype) == (2, "bf16", "bf16")
    assert settings.cpu_offload
    assert [unit.settings.activation_checkpointing.mode for unit in plan.units] == ["full", "none", "none", "none"]
    assert plan_of(run, "models_of_a_user:Net", "--dp-shard", 4).source.startswith("repeated blocks detected")


def test_a_plan_is_compared_with_a_saved_one(run, models, tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(run("plan", "models_of_a_user:Net", "--json")[1])
    assert run("plan", "models_of_a_user:Net", "--diff", saved) == (0, f"equal to {saved}\n", [])
    code, out, _ = run("plan", "models_of_a_user:Net", "--arg", "width=5", "--diff", saved)
    assert code == 1
    assert "-  blocks.0.0.weight float32[4, 4]" in out
    assert "+  blocks.0.0.weight float32[5, 5]" in out
    code, out, _ = run("plan", "models_of_a_user:Net", "--dp-replicate", 2, "--diff", saved, "--json")
    assert (code, json.loads(out)["equal"]) == (1, False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "missing: TARGET (--help lists all flags)"),
        (("Net",), "'Net': expected package.module:name or path/to/file.py:name"),
        (("nowhere.py:Net",), "there is no file nowhere.py"),
        (("no.where:Net",), "no.where:Net: importing no.where failed: ModuleNotFoundError: No module named 'no'"),
        (("{}:Nat",), "{}:Nat: {} has no 'Nat'; near: Net"),
        (("{}:number",), "{}:number is a int, expected a function or a class that builds a module"),
        (("{}:Config",), "{}:Config gives a Config, expected a torch.nn.Module or a ps.Experiment"),
        (("{}:broken",), "{}:broken failed: RuntimeError: no such size"),
        (
            ("{}:Net", "--arg", "depth=3"),
            "{}:Net: got an unexpected keyword argument 'depth'; arguments are given as --arg KEY=VALUE",
        ),
        (("{}:Net", "--arg", "width"), "--arg width: expected KEY=VALUE"),
        (("{}:Net", "--arg", "width=1", "--arg", "width=2"), "--arg width is given twice"),
        (("{}:Net", "--dp-shard", "0"), "--dp-shard 0: must be at least 1"),
        (("{}:Net", "--dp-replicate", "-1"), "--dp-replicate -1: must be at least 1"),
        (("{}:Net", "--accumulate", "0"), "--accumulate 0: must be at least 1"),
        (
            ("{}:Net", "--reshard-after-forward", "maybe"),
            "--reshard-after-forward maybe: expected yes, no or a number of ranks",
        ),
        (
            ("{}:Net", "--optimizer", "adamv"),
            "--optimizer adamv: expected adamw, adam, sgd, none or package.module:name; did you mean adam?",
        ),
        (
            ("{}:Net", "--optimizer", "sgd", "--optimizer-arg", "momentum=-1"),
            "--optimizer sgd: sgd: momentum must be a finite number of at least 0, got -1",
        ),
        (("{}:Net", "--optimizer", "{}:build"), "--optimizer {}:build: expected something with init(params), got Net("),
        (("{}:Net", "--spec", "none.json"), "--spec none.json: cannot be read: [Errno 2]"),
        (("{}:Net", "--spec", "{}.py"), "--spec {}.py: cannot be read: Expecting value"),
        (("{}:Net", "--diff", "wrong.json"), "--diff wrong.json: this is not a plan as Plan.to_dict writes it"),
        (("{}:Net", "--spec", "wrong.json"), "--spec wrong.json: "),
        (("{}:Net", "--spec", "dead.json", "--dp-shard", "2"), "unit rule 'layers.*' matches no module of Net"),
    ],
)
def test_mistakes_take_one_line_and_end_with_2(run, models, arguments, line):
    Path("wrong.json").write_text('{"unit": 3}')
    Path("dead.json").write_text('{"units": ["layers.*"]}')
    module = models.stem
    code, out, err = run("plan", *(argument.replace("{}", module) for argument in arguments))
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"error: {line.replace('{}', module)}")


LLAMA = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
MEASURE = """
import json, resource, sys, time
start = time.perf_counter()
from purestep.cli import main
code = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"code": code, "seconds": time.perf_counter() - start, "bytes": peak}), file=sys.stderr)
"""


def test_70_billion_parameters_on_512_ranks():
    pytest.importorskip("transformers")
    arguments = [word for key, value in LLAMA.items() for word in ("--arg", f"{key}={value}")]
    flags = ("--dp-shard", "64", "--dp-replicate", "8", "--ema", "--json")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "plan", "transformers:LlamaForCausalLM", *arguments, *flags],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    measured = json.loads(done.stderr.splitlines()[-1])
    assert measured["code"] == 0
    assert measured["seconds"] < 20
    assert measured["bytes"] < 2e9
    plan = ps.Plan.from_dict(json.loads(done.stdout))
    assert plan.source == "_no_split_modules of LlamaForCausalLM: LlamaDecoderLayer"
    assert len(plan.units) == 81
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert [unit.numel for unit in plan.units] == [layer] * 80 + [2 * 128256 * 8192 + 8192]
    # Every dim is a multiple of 64: a rank holds exactly a 64th, twice that in AdamW's averages.
    total = 4 * (80 * layer + 2 * 128256 * 8192 + 8192) // 64
    steps = 4 * (80 * 9 + 3)
    account = plan.account()
    assert (account.params, account.ema, account.opt_state) == (total, total, 2 * total + steps)

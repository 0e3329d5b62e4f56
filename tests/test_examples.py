"""The example as its users run it: one process, several, killed and resumed; and the parts that are its own."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import purestep as ps

ROOT = Path(__file__).parent.parent
LM = ROOT / "examples" / "lm.py"
STEPS = 40
FLAGS = (
    f"--steps {STEPS} --log-every 1 --eval-every 20 --checkpoint.every 5 --batch-size 8 --seed 3 --optimizer.lr 1e-2 "
    "--model.layers 2 --model.heads 2 --model.width 16 --model.context 16 --model.dropout 0.1 --data.eval-windows 8 "
    "--sample.num-bytes 20 --sample.prompt if --accelerator.device cpu"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"if a == {i}:\n    return a + {i}\n" for i in range(500)))
    return path


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> tuple[Path, str]:
    """(directory, stdout) of a run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("runs") / "reference"
    return directory, run(text, directory)


def run(text: Path, directory: Path, *flags: str, processes: int = 1) -> str:
    done = subprocess.run(
        command(text, directory, *flags, processes=processes),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def command(text: Path, directory: Path, *flags: str, processes: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = [sys.executable, *(launcher if processes > 1 else []), str(LM)]
    return [*start, *FLAGS, "--data.path", str(text), "--output-dir", str(directory), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def records(directory: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def digest_at(directory: Path, step: int) -> str:
    return ps.describe(directory / "checkpoints" / f"step-{step:08d}").digest


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_what_it_should(reference):
    directory, stdout = reference
    loss, bits = records(directory, "loss"), records(directory, "eval/bits_per_byte")
    assert list(loss) == list(range(1, STEPS + 1))
    assert list(bits) == [20, 40]
    assert bits[40] < bits[20] < loss[1] / np.log(2)
    assert records(directory, "weight") == dict.fromkeys(loss, 8 * 16)
    assert {path.name for path in directory.iterdir()} == {
        "train_config.json",
        "metrics.jsonl",
        "loss.png",
        "checkpoints",
    }
    assert f"validation: {bits[40]:.3f} bits per byte after {STEPS} steps" in stdout
    assert len(stdout.split("\nvalidation:")[0].strip("\n").encode()) >= 20
    assert stdout.lstrip("\n").startswith("if")


def test_two_processes_give_the_losses_of_one(reference, text, tmp_path):
    stdout = run(
        text, tmp_path / "fsdp", "--parallelism.dp-shard", "2", "--model.dropout", "0", "--steps", "10", processes=2
    )
    run(text, tmp_path / "local", "--model.dropout", "0", "--steps", "10")
    one, two = (records(tmp_path / name, "loss") for name in ("local", "fsdp"))
    assert list(one) == list(two) == list(range(1, 11))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-5)
    assert stdout.count("validation:") == 1
    assert "train_config.json" in {path.name for path in (tmp_path / "fsdp").iterdir()}


def test_killed_and_resumed_is_never_interrupted(reference, text, tmp_path):
    directory = tmp_path / "killed"
    process = subprocess.Popen(
        command(text, directory), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (directory / "checkpoints" / "step-00000010").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run was over before it could be killed"
    stdout = run(text, directory, "--resume")
    uninterrupted, expected_stdout = reference
    for name in ("loss", "grad_norm", "lr", "eval/bits_per_byte"):
        assert records(directory, name) == records(uninterrupted, name)
    assert digest_at(directory, STEPS) == digest_at(uninterrupted, STEPS)
    assert stdout.split("everything is in")[0] == expected_stdout.split("everything is in")[0]


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    return _module("lm")


@pytest.fixture(scope="module")
def lm_model():
    return _module("lm_model")


def _module(name: str):
    sys.path.insert(0, str(LM.parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(LM.parent))


def test_each_file_gives_its_last_part_to_validation(lm, tmp_path):
    for name, byte, size in (("b.txt", b"b", 60), ("a/z.txt", b"z", 100), ("a/y.txt", b"y", 19)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(byte * size)
    for hidden in (".git/config", "a/__pycache__/x.pyc", ".env"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"h" * 100)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    train, validation = lm.read_text(lm.TextConfig(path=tmp_path), 1)
    assert bytes(train) == b"y" * 19 + b"z" * 95 + b"b" * 57
    assert bytes(validation) == b"z" * 5 + b"b" * 3
    train, validation = lm.read_text(lm.TextConfig(path=tmp_path, max_bytes=59), 1)
    assert bytes(train) == b"y" * 19 + b"z" * 38
    assert bytes(validation) == b"z" * 2


def test_the_default_text_is_the_standard_library(lm):
    train, validation = lm.read_text(lm.TextConfig(), 128)
    assert len(train) > 3_000_000
    assert b"class OrderedDict(" in bytes(train)
    assert b"import unittest" not in bytes(train[:1000])
    assert 0.045 < len(validation) / len(train) < 0.06


BAD_TEXT = {
    "missing": (None, "no such file or folder"),
    "empty": (b"", "there is no text in it"),
    "short": (b"a" * 300, r"300 bytes are too few: .* a window of 17 bytes; give more text or lower --model\.context"),
}


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_refused_with_its_path(lm, name, kind, tmp_path):
    content, message = BAD_TEXT[name]
    path = tmp_path / "text" if kind == "file" else tmp_path / "folder" / "text"
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    given = path if kind == "file" else path.parent
    with pytest.raises(ps.ConfigError, match=f"^--data.path {given}: {message}"):
        lm.read_text(lm.TextConfig(path=given), 16)


def test_windows_cover_the_text_and_overlap_by_the_byte_to_predict(lm):
    text = np.arange(50, dtype=np.uint8)
    windows = lm.Windows(text, 7)
    assert len(windows) == 7
    assert all(window.dtype == np.int64 for window in map(windows.__getitem__, range(7)))
    assert np.array_equal(np.concatenate([windows[i][:-1] for i in range(7)]), text[:49])
    assert [windows[i][-1] for i in range(6)] == [windows[i + 1][0] for i in range(6)]
    part = lm.Part(windows, 3)
    assert [part[i][0] for i in range(len(part))] == [0, 14, 28]
    assert len(lm.Part(windows, 100)) == 7


BAD_MODELS = {
    "width": (100, "--model.width 100: must be a multiple of 8"),
    "layers": (0, "--model.layers 0: must be positive"),
    "dropout": (1.0, r"--model.dropout 1\.0: must be at least 0 and less than 1"),
}


@pytest.mark.parametrize("field", BAD_MODELS)
def test_bad_models_are_refused_with_their_flag(lm, field):
    value, message = BAD_MODELS[field]
    with pytest.raises(ps.ConfigError, match=message):
        lm.ModelConfig(**{field: value})


# --- model -----------------------------------------------------------------------------------------------------------


def test_a_prediction_does_not_depend_on_what_comes_later(lm_model):
    torch.manual_seed(0)
    model = lm_model.GPT(layers=2, heads=2, width=16)
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotation_makes_products_depend_on_the_distance_alone(lm_model):
    torch.manual_seed(0)
    angles = lm_model.rotary_angles(20, 8, torch.device("cpu"))
    q, k = (lm_model.rotate(torch.randn(8).expand(1, 1, 20, 8), angles)[0, 0] for _ in range(2))
    products = q @ k.T
    for distance in (0, 1, 7):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))
    torch.testing.assert_close(q.norm(dim=-1), q[0].norm().expand(20))


def test_the_loss_counts_bytes(lm_model):
    torch.manual_seed(0)
    model = lm_model.GPT(layers=1, heads=2, width=8)
    tokens = torch.randint(256, (3, 6))
    mean, metrics = lm_model.loss(model, tokens, ps.key(0))
    parts = sum(lm_model.loss(model, row[None], ps.key(0))[0] for row in tokens)
    assert mean.weight == parts.weight == 15
    torch.testing.assert_close(mean.value, parts.value)
    torch.testing.assert_close(metrics["bits_per_byte"].value, mean.value.detach() / np.log(2), check_dtype=False)


def test_generate_looks_back_on_the_context_and_follows_the_key(lm_model):
    seen = []

    def predict(tokens):
        seen.append(tokens.tolist()[0])
        return torch.zeros(1, tokens.shape[1], 256)

    texts = [lm_model.generate(predict, b"ab", 6, 4, ps.key(seed), 1.0) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert [len(window) for window in seen[:6]] == [2, 3, 4, 4, 4, 4]
    assert seen[5] == list(texts[0][3:7])
    assert texts[0].startswith(b"ab")
    assert len(texts[0]) == 8

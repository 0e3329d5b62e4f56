"""The command line: flags spelled as promised, and errors of one line that name the thing."""

import pytest

from purestep.sharding.config import ConfigError
from purestep.training.config import TrainConfig
from purestep.training.flags import FlagError, is_on, parse_flags, value_of, without
from tests.training.programs import Config

PROMISED = """
--steps 3 --log-every 2 --seed 5 --output-dir out --resume --batch-size 4 --data.path some/file
--checkpoint.every 7 --checkpoint-format safetensors_dcp --parallelism.dp-replicate 2 --parallelism.dp-shard -1
--accelerator.mixed-precision bf16 --accelerator.gradient-accumulation.steps 2 --accelerator.device cpu
--log-with tensorboard wandb --eval-every 4 --data.num-workers 1
"""


def test_promised_flags():
    config = parse_flags(TrainConfig, PROMISED.split())
    assert (config.steps, config.log_every, config.seed, str(config.output_dir)) == (3, 2, 5, "out")
    assert (config.resume, config.batch_size, str(config.data.path)) == (True, 4, "some/file")
    assert (config.checkpoint.every, config.checkpoint_format) == (7, "safetensors_dcp")
    assert (config.parallelism.dp_replicate, config.parallelism.dp_shard) == (2, -1)
    accelerator = config.accelerator
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation.steps, accelerator.device) == (
        "bf16",
        2,
        "cpu",
    )
    assert (config.log_with, config.eval_every, config.data.num_workers) == (("tensorboard", "wandb"), 4, 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--stepz 3", "unknown flag --stepz; did you mean --steps? (--help lists all)"),
        ("--zzz", "unknown flag --zzz (--help lists all)"),
        ("--stepz=3", "unknown flag --stepz; did you mean --steps? (--help lists all)"),
        (
            "--parallelism.dp-shrd 2 --acelerator.device cpu",
            "unknown flag --parallelism.dp-shrd, --acelerator.device; did you mean --parallelism.dp-shard and "
            "--accelerator.device? (--help lists all)",
        ),
        ("extra", "unexpected argument extra (--help lists all flags)"),
        ("--resume True", "unexpected argument True (--help lists all flags)"),
        ("--steps x", "--steps: invalid literal for int() with base 10: 'x'"),
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--data.num-workers -1", "--data.num-workers -1: must be at least 0"),
        (
            "--accelerator.gradient-accumulation.steps 0",
            "--accelerator.gradient-accumulation.steps 0: must be at least 1",
        ),
    ],
)
def test_errors_are_one_line_that_names_the_flag(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse_flags(Config, argv.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--steps", ["--steps"]),
        ("--checkpoint-format foo", ["--checkpoint-format", "foo", "'safetensors_dcp'"]),
        ("--log-with mlflow", ["--log-with", "mlflow", "'trackio'"]),
    ],
)
def test_errors_of_tyros_own_words_are_one_line(argv, words, capsys):
    with pytest.raises(FlagError) as caught:
        parse_flags(Config, argv.split())
    message = str(caught.value)
    assert all(word in message for word in words)
    assert "\n" not in message
    assert not set(message) & set("│─╭╰")
    assert capsys.readouterr() == ("", "")


def test_help_tells_of_files_and_documents_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_flags(Config, ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for words in ("A regression on forty samples.", "--config FILE", "--resume", "Units of the hidden layer."):
        assert words in out
    assert "TrainConfig" not in out


def test_flags_win_over_the_default():
    default = Config(steps=7, width=9)
    config = parse_flags(Config, ["--steps", "8"], default=default)
    assert (config.steps, config.width) == (8, 9)
    with pytest.raises(ConfigError, match="--steps 0"):
        parse_flags(Config, ["--steps", "0"], default=default)


def test_looking_for_a_flag():
    argv = ["--config", "a", "--resume", "--config=b", "--no-resume", "--output_dir", "x"]
    assert (value_of(argv, "config"), value_of(argv, "output-dir"), value_of(argv, "steps")) == ("b", "x", None)
    assert without(argv, "config") == ["--resume", "--no-resume", "--output_dir", "x"]
    assert (is_on(argv, "resume"), is_on(argv[:4], "resume"), is_on([], "resume")) == (False, True, False)

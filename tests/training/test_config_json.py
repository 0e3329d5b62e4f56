"""Case B27: configs survive JSON with their types, bytes and all, and errors carry the field's full path."""

import dataclasses
import enum
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import pytest

from purestep.sharding.config import ConfigError
from purestep.training import config_json
from purestep.training.config import TrainConfig

Rate = NewType("Rate", float)


class Norm(enum.Enum):
    LAYER = "layer_norm"
    RMS = "rms_norm"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Adam:
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-05


@dataclass(frozen=True)
class Sgd:
    momentum: float = 0.9


@dataclass(frozen=True)
class Twin:
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Everything:
    whole: int = 3
    real: float = 1e-05
    infinite: float = math.inf
    lowest: float = -math.inf
    unknown: float = math.nan
    flag: bool = True
    text: str = "None"
    folder: Path = Path("runs/a folder/é")
    norm: Norm = Norm.RMS
    level: Level = Level.HIGH
    size: Literal["small", 1, 2.5, True] = 1
    empty: tuple[str, ...] = ()
    strings: tuple[str, ...] = ("None", "no", "1e-4", "2024-01-01", "Infinity")
    fixed: tuple[int, float, str] = (1, 1.0, "1")
    none_fixed: tuple[()] = ()
    nested_tuples: tuple[tuple[int, ...], ...] = ((1, 2), ())
    listed: list[int] = field(default_factory=lambda: [1, 2])
    table: dict[str, float] = field(default_factory=lambda: {"a.b": 1.0, "inf": math.inf})
    maybe: int | None = None
    maybe_path: Path | None = None
    maybe_text: str | None = "null"
    number: int | float = 1
    number_or_text: float | str = "Infinity"
    path_or_text: Path | str = "a/b"
    enum_or_text: Norm | str = "RMS"
    optimizer: Adam | Sgd = Adam()
    twin: Sgd | Twin = Twin()
    maybe_nested: Adam | None = None
    nested: Adam = field(default_factory=Adam)
    annotated: Annotated[int, "a note"] = 4
    rate: Rate = Rate(0.1)


def _types(value: Any) -> Any:
    """The value with its type, at every depth; NaN equal to itself."""
    if dataclasses.is_dataclass(value):
        return type(value), [(f.name, _types(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        return type(value), [_types(item) for item in value]
    if isinstance(value, dict):
        return dict, [(key, _types(item)) for key, item in value.items()]
    return type(value), repr(value)


def _round_trip(config: Any, path: Path) -> Any:
    path.write_text(config_json.dumps(config), encoding="utf-8")
    loaded = config_json.load(type(config), path)
    assert config_json.dumps(loaded).encode() == path.read_bytes()
    return loaded


VARIANTS = [
    Everything(),
    Everything(maybe=0, maybe_path=Path("None"), maybe_text=None, number=1.0, number_or_text=math.inf),
    Everything(number_or_text=math.nan, path_or_text=Path("a/b"), enum_or_text=Norm.RMS, size=True),
    Everything(number_or_text=0.1, enum_or_text="other", size="small", optimizer=Sgd(0.0), twin=Sgd()),
    Everything(size=2.5, maybe_nested=Adam(betas=(0.0, 1.0)), strings=(), real=1e300, whole=2**70, text=""),
    Everything(text='quotes " and \n and \u2028', level=Level.LOW, real=-0.0),
    TrainConfig(),
    TrainConfig(output_dir=Path("/a b"), seed=2**64 - 1, log_with=("tensorboard", "wandb")),
]


@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_load_gives_back_what_was_saved_with_its_types(config, tmp_path):
    loaded = _round_trip(config, tmp_path / "config.json")
    assert _types(loaded) == _types(config)


@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_any_json_reader_takes_the_file(config):
    def refuse(name):
        raise AssertionError(name)

    json.loads(config_json.dumps(config), parse_constant=refuse)


def test_an_int_in_a_float_field_is_that_float(tmp_path):
    loaded = _round_trip(Adam(betas=(0, 1), eps=1), tmp_path / "config.json")
    assert _types(loaded) == _types(Adam(betas=(0.0, 1.0), eps=1.0))


def _changed(**changes: Any) -> dict[str, Any]:
    return {**config_json.to_json(Everything()), **changes}


WRONG = [
    ({"whole": 1.0}, "`whole` is 1.0, expected int"),
    ({"whole": True}, "`whole` is true, expected int"),
    ({"whole": "3"}, '`whole` is "3", expected int'),
    ({"real": "1e-05"}, '`real` is "1e-05", expected a number, "Infinity"'),
    ({"real": True}, "`real` is true, expected a number"),
    ({"real": None}, "`real` is null, expected a number"),
    ({"flag": 1}, "`flag` is 1, expected bool"),
    ({"text": None}, "`text` is null, expected str"),
    ({"folder": 3}, "`folder` is 3, expected a path"),
    ({"norm": "rms_norm"}, '`norm` is "rms_norm", expected one of "LAYER", "RMS"'),
    ({"norm": "RMSS"}, 'expected one of "LAYER", "RMS", did you mean `RMS`?'),
    ({"size": "1"}, '`size` is "1", expected one of "small", 1, 2.5, true'),
    ({"strings": "no"}, '`strings` is "no", expected a list of: str'),
    ({"strings": ["a", 1]}, r"`strings\[1\]` is 1, expected str"),
    ({"fixed": [1, 1.0]}, r"`fixed` is \[1, 1.0\], expected a list of 3: \(int; a number"),
    ({"nested_tuples": [[1], ["2"]]}, r"`nested_tuples\[1\]\[0\]` is \"2\", expected int"),
    ({"table": {"a": "x"}}, '`table.a` is "x", expected a number'),
    ({"maybe": "3"}, '`maybe` is "3", expected int or null'),
    ({"nested": {"betas": [0.9, "x"], "eps": 1.0}}, r"`nested.betas\[1\]` is \"x\", expected a number"),
    ({"nested": {"betas": [0.9], "eps": 1.0}}, r"`nested.betas` is \[0.9\], expected a list of 2"),
    ({"nested": {"beta": [0.9, 0.9], "eps": 1.0}}, "unknown field `nested.beta`, did you mean `nested.betas`?"),
    ({"nested": {"eps": 1.0}}, r'missing field `nested.betas` \(add "betas": \[0.9, 0.95\] for the default'),
    ({"nested": [1]}, r"`nested` is \[1\], expected an object with the fields of Adam"),
    ({"maybe_nested": {"betas": [1.0, 2.0], "eps": "x"}}, '`maybe_nested.eps` is "x"'),
    ({"twin": {"__type__": "os.system", "momentum": 0.9}}, "`twin` is .* expected an object with the fields of Sgd or"),
    ({"wholee": 3}, "unknown field `wholee`, did you mean `whole`?"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_path_the_value_and_what_was_expected(changes, message):
    with pytest.raises(ConfigError, match=f"^file.json: .*{message}"):
        config_json.from_json(Everything, _changed(**changes), source="file.json")


def test_one_error_names_every_problem():
    tree = _changed(whole="x", nested={"betas": 1, "eps": 1.0}, extra=1)
    del tree["flag"]
    with pytest.raises(ConfigError) as caught:
        config_json.from_json(Everything, tree)
    for part in ("`whole`", "`nested.betas`", "unknown field `extra`", "missing field `flag`"):
        assert part in str(caught.value)


def test_the_fields_of_a_subclass_are_unknown_to_its_base(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Config(TrainConfig):
        width: int = 3

    path = tmp_path / "config.json"
    path.write_text(config_json.dumps(Config()))
    with pytest.raises(ConfigError, match="unknown field `width`"):
        config_json.load(TrainConfig, path)
    path.write_text(config_json.dumps(TrainConfig()))
    with pytest.raises(ConfigError, match=r'missing field `width` \(add "width": 3'):
        config_json.load(Config, path)


def test_the_class_validates_what_it_reads():
    tree = config_json.to_json(TrainConfig())
    with pytest.raises(ConfigError, match="--steps 0: must be at least 1"):
        config_json.from_json(TrainConfig, {**tree, "steps": 0})
    with pytest.raises(ConfigError, match=r"--data\.num-workers -1"):
        config_json.from_json(TrainConfig, {**tree, "data": {"path": None, "num_workers": -1}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON config"),
        ("{", "not a JSON config"),
        ('{"momentum": NaN}', "bare NaN is not JSON"),
        ('{"momentum": 0.1, "momentum": 0.2}', "'momentum' is there twice"),
        ("[]", r"`?the file`? is \[\], expected an object with the fields of Sgd"),
        (b"\xff", "not a JSON config"),
    ],
)
def test_files_that_are_no_configs(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        config_json.load(Sgd, path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json: cannot be read \(No such file"):
        config_json.load(Sgd, tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"whole": 1e3}, r"`whole` is 1000.0 \(float\), expected int"),
        ({"strings": ["a"]}, r"`strings` is \['a'\] \(list\)"),
        ({"folder": "runs"}, r"`folder` is 'runs' \(str\), expected a path"),
        ({"nested": Sgd()}, r"`nested` is Sgd\(momentum=0.9\) \(Sgd\), expected an object with the fields of Adam"),
        ({"size": 1.0}, r"`size` is 1.0 \(float\)"),
    ],
)
def test_a_config_of_wrong_types_is_not_written(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_json.dumps(dataclasses.replace(Everything(), **changes))


def test_an_annotation_without_a_json_form_is_named():
    @dataclass
    class Config:
        thing: complex = 1j

    with pytest.raises(ConfigError, match="`thing` is annotated complex, which has no JSON form"):
        config_json.dumps(Config())


def test_changes_tell_types_apart():
    old, new = {"a": 1, "b": {"c": True, "d": "x"}}, {"a": 1.0, "b": {"c": 1, "d": "x"}, "e": None}
    assert config_json.changes(old, new) == {"a": [1, 1.0], "b.c": [True, 1]}

"""docs/transforms.md: its examples run, and its table names what there is."""

import re
from pathlib import Path

import pytest

import purestep as ps

PAGE = Path(__file__).parents[2] / "docs" / "transforms.md"
NAMES = re.findall(r"^\| `(\w+)\(", PAGE.read_text(), re.MULTILINE)


def test_the_examples_run_one_after_the_other():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    # The page shows the head of this table.
    shown = re.search(r"```\n(parameter.*?)\.\.\.\n```", PAGE.read_text(), re.DOTALL)[1]
    described = ps.decay_mask(ps.adamw(0.1), names["model"]).describe()
    assert described.startswith(shown)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_table_names_exists(name):
    assert callable(getattr(ps, name))


def test_the_table_is_complete():
    bases = (ps.GradientTransform, ps.Optimizer)
    public = [getattr(ps, name) for name in ps.__all__]
    ours = {x.__name__ for x in public if isinstance(x, type) and any(b in x.__mro__[1:] for b in bases)}
    lone = {"adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "radam", "lion", "adafactor", "muon", "from_torch"}
    assert ours - lone == set(NAMES)

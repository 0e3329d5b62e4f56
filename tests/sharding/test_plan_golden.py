"""The examples' plans are those in tests/golden. Not so by intention? `python -m tests.golden_plans` writes them."""

from __future__ import annotations

import json

import pytest

import purestep as ps
from tests.golden_plans import FOLDER, TOPOLOGIES, plan_of_lm, text_of

REWRITE = "the example's plan changed; if that is meant, run python -m tests.golden_plans and review the difference"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_plan_of_the_example_is_the_golden_one(topology):
    golden = (FOLDER / f"lm-{topology}.json").read_text(encoding="utf-8")
    plan = plan_of_lm(topology)
    assert ps.Plan.from_dict(json.loads(golden)).diff(plan) == "", REWRITE
    assert text_of(plan) == golden, REWRITE


def test_every_golden_plan_is_checked():
    assert {path.name for path in FOLDER.iterdir()} == {f"lm-{topology}.json" for topology in TOPOLOGIES}

"""Right for every module: legal, unusual ones train in every topology as in a plain torch loop, from the same bits."""

from __future__ import annotations

import math

import pytest

from tests.distributed.odd_models import CASES, all_cases
from tests.plain_loop import everywhere
from tests.toys import TOPOLOGIES

STEPS = 3
EVERYWHERE = everywhere(all_cases, steps=STEPS)
pytestmark = pytest.mark.xdist_group("odd modules")


@pytest.mark.parametrize(("topology", "case"), [(topology, name) for topology in TOPOLOGIES for name in CASES])
def test_it_trains_as_in_a_plain_loop(topology, case):
    for results in EVERYWHERE.results(topology, case):
        assert results["losses"] == pytest.approx(results["expected"], rel=1e-5)
        assert max(results["params"].values()) < 1e-5
        assert max(results["buffers"].values(), default=0) < 1e-5
        assert all(math.isfinite(loss) for loss in results["losses"])
        assert len(set(results["losses"])) == STEPS
        assert max(results["moved"].values()) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_it_starts_from_the_same_bits(case):
    ranks = [results for topology in TOPOLOGIES for results in EVERYWHERE.results(topology, case)]
    assert len({digest for results in ranks for digest in results["digests"]}) == 1

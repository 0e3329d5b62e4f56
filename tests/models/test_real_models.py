"""Models that other packages ship train in every topology as in a plain torch loop, from the same initial bits.

The packages are in the extra `models`; tests of those that are not installed are skipped.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import pytest

from tests.models.real_models import CASES, cases_of
from tests.plain_loop import Everywhere, everywhere
from tests.toys import TOPOLOGIES

NAMES = [(package, name) for package, cases in CASES.items() for name in cases]
pytestmark = pytest.mark.xdist_group("real models")


@functools.cache
def _why_not(package: str) -> str | None:
    """Why a package cannot be used here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit this torch
        return f"{package}: {error}"
    return None


@functools.cache
def _everywhere() -> Everywhere:
    usable = [package for package in CASES if _why_not(package) is None]
    return everywhere(cases_of, usable, steps=5, quiet=True)


def _results(topology: str, package: str, name: str) -> list[dict[str, Any]]:
    reason = _why_not(package)
    if reason is not None:
        pytest.skip(reason)
    return _everywhere().results(topology, name)


@pytest.mark.parametrize(("package", "name"), NAMES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_it_trains_as_in_a_plain_loop(topology, package, name):
    for results in _results(topology, package, name):
        assert results["losses"] == pytest.approx(results["expected"], rel=1e-5)
        assert max(results["params"].values()) < 1e-4
        assert max(results["buffers"].values(), default=0) < 1e-4
        assert min(results["losses"]) > 0
        assert max(results["moved"].values()) > 1e-3


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_topologies_agree(package, name):
    everyone = [results for topology in TOPOLOGIES for results in _results(topology, package, name)]
    assert len({digest for results in everyone for digest in results["digests"]}) == 1
    if name != "resnet":  # BatchNorm sees one rank's slice at a time
        for results in everyone:
            assert results["losses"] == pytest.approx(everyone[0]["losses"], rel=1e-5)

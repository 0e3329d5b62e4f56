"""Agreement between ranks: one rank's error is everybody's, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from purestep.state.collective import from_rank_zero, gather_objects, on_every_rank
from purestep.state.placement import default_rank
from tests.ranks import run_ranks
from tests.toys import error_of


class _Unportable(Exception):
    """Pickles, but cannot be rebuilt from its arguments; or does not pickle at all."""

    def __init__(self, first: str, second: Any):
        super().__init__(first)
        self.second = second


def _fail_on(rank: int, error: Exception) -> Any:
    if default_rank() == rank:
        raise error
    return default_rank()


def _agree() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    errors = (ValueError("plain"), _Unportable("two arguments", 1), _Unportable("a function", lambda: 0))
    return {
        "every": [error_of(on_every_rank, lambda error=error: _fail_on(1, error)) for error in errors],
        "zero": [error_of(from_rank_zero, lambda error=error: _fail_on(0, error)) for error in errors],
        "results": (on_every_rank(default_rank), from_rank_zero(default_rank), gather_objects("x" * default_rank())),
    }


def test_all_ranks_raise_what_one_raised():
    expected = [
        ("ValueError", "plain"),
        ("RuntimeError", "_Unportable: two arguments"),
        ("RuntimeError", "_Unportable: a function"),
    ]
    for results in run_ranks(_agree, 2, timeout=60):
        assert results["every"] == results["zero"] == expected
        assert results["results"] == ([0, 1], 0, ["", "x"])


def test_one_process_keeps_its_own_error():
    with pytest.raises(_Unportable):
        on_every_rank(lambda: _fail_on(0, _Unportable("kept", lambda: 0)))

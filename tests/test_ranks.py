"""The harness itself: what it promises the other tests."""

import os
import time

import pytest
import torch

from tests.ranks import RanksFailed, run_ranks


def _sum_of_ranks() -> float:
    torch.distributed.init_process_group("gloo")
    value = torch.tensor(float(os.environ["RANK"]))
    torch.distributed.all_reduce(value)
    return value.item()


def _fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("planted")


def _hang() -> None:
    time.sleep(60)


def _die() -> None:
    os._exit(9)


def test_results_come_back_in_rank_order():
    assert run_ranks(_sum_of_ranks, 3) == [3.0, 3.0, 3.0]


def test_an_error_on_one_rank_is_a_failure_with_its_traceback():
    with pytest.raises(RanksFailed, match=r"rank 1: (.|\n)*ValueError: planted"):
        run_ranks(_fail_on_one, 2)


def test_a_hang_is_a_failure():
    with pytest.raises(RanksFailed, match="did not end in time"):
        run_ranks(_hang, 1, timeout=3)


def test_a_dead_rank_is_a_failure():
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(_die, 1)

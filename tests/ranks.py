"""Run a function on several gloo ranks, with a time limit, so that a hang is a failure."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "accelerate"])


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds every rank's traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`function(*args)` on each of `world_size` processes: what each returned, in rank order.

    The processes see what torchrun would set (RANK, WORLD_SIZE, ...); they start with one thread and with warnings as
    errors. `function` is a module-level function of a test module; arguments and results are pickled.
    """
    # As torchrun does, the launcher keeps the store: on a port that nobody else can get, and until the last rank ends.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as logs:
        receivers, processes = [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = Path(logs, f"rank{rank}.log")
            process = _context.Process(target=_rank, args=(sender, function, args, env, str(log), timeout), daemon=True)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            outcomes = _collect(receivers, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = [f"rank {r}: {o[1]}{_tail(logs, r)}" for r, o in enumerate(outcomes) if o[0] != "ok"]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [value for _, value in outcomes]


def run_on(topology: tuple[int, int], function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """`run_ranks` on as many processes as `topology` = (replicate, shard) has, `function(topology, *args)` on each."""
    return run_ranks(function, topology[0] * topology[1], topology, *args, timeout=timeout)


def _rank(sender: Connection, function: Callable, args: tuple, env: dict[str, str], log: str, timeout: float) -> None:
    os.environ.update(env)
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
        faulthandler.enable(stream)
        faulthandler.dump_traceback_later(max(timeout - 5, 1), file=stream)
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("error")
            result = ("ok", function(*args))
        except BaseException:
            result = ("error", traceback.format_exc())
        try:
            sender.send(result)
        except Exception:
            sender.send(("error", f"the result could not be sent: {traceback.format_exc()}"))
        sender.close()
        faulthandler.cancel_dump_traceback_later()
        # A rank whose peers failed must not wait for them in an exit handler.
        if torch.distributed.is_initialized() and result[0] == "ok":
            torch.distributed.destroy_process_group()
        os._exit(0)


def _collect(receivers: list[Connection], deadline: float) -> list[tuple[str, Any]]:
    outcomes: list[tuple[str, Any]] = [("error", "did not end in time")] * len(receivers)
    open_ranks = {receiver: rank for rank, receiver in enumerate(receivers)}
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = open_ranks.pop(receiver)
            try:
                outcomes[rank] = receiver.recv()
            except EOFError:
                outcomes[rank] = ("error", "died without a word")
            if outcomes[rank][0] != "ok":  # the others may now wait for this one: give them a moment, not the limit
                deadline = min(deadline, time.monotonic() + 15)
    return outcomes


def _tail(logs: str, rank: int, size: int = 4000) -> str:
    log = Path(logs, f"rank{rank}.log")
    text = log.read_text(errors="replace")[-size:] if log.exists() else ""
    return f"\n--- stderr of rank {rank} ---\n{text}" if text.strip() else ""

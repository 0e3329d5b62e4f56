"""How this process was launched: as which of how many, and where they meet. Read from the environment, and checked.

torchrun, `accelerate launch` and people set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Where neither of
the first two is set and the process is a task of a SLURM step with several tasks (`srun`), SLURM's variables say the
same. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from purestep.sharding.config import ConfigError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and `accelerate launch` set for a run of several processes."""

# accelerate would make a process group of these.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below what systems hand out for outgoing connections


@dataclass(frozen=True)
class Launch:
    """One process among those of a run."""

    launcher: Literal["none", "variables", "slurm"] = "none"
    """What said so: nothing, torchrun's variables (whoever set them), or SLURM's."""
    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Which of the processes of this machine."""
    local_world_size: int = 1
    """Processes on this machine, as far as is known; else 1."""
    master_addr: str = ""
    """The machine of rank 0."""
    master_port: int = 0

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Let the environment say for the length of a block what torchrun would, and put it back afterwards.

        accelerate and torch read it. For one process the variables are hidden: it needs no process group.
        """
        before = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
        try:
            if self.world_size > 1:
                os.environ.update(before | self._variables())
            yield
        finally:
            for name in LAUNCHER_VARIABLES:
                os.environ.pop(name, None)
            os.environ.update(before)

    def _variables(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def launch_of(environ: Mapping[str, str] | None = None) -> Launch:
    """How this process was launched.

    Raises:
        ConfigError: the launcher's variables are half set or contradict each other, which would make the start hang;
            or another launcher started several processes.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ or "RANK" in environ:
        return _from_variables(environ)
    if any(environ.get(name, default) != default for name, default in _ALONE.items()):
        raise _half_set(environ, "RANK and WORLD_SIZE are missing")
    if "SLURM_PROCID" in environ and (num_tasks := _slurm_tasks(environ)) > 1:
        return _from_slurm(environ, num_tasks)
    for name in _MPI_SIZES:
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"started by MPI ({name}={environ[name]}), which is no launcher of purestep; start several "
                f"processes with torchrun, accelerate launch or srun, or unset {name} for one"
            )
    _refuse_lonely_accelerate(environ)
    return Launch()


def launched_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Number of processes the launcher started; 1 without a launcher.

    Raises:
        ConfigError: see `launch_of`.
    """
    return launch_of(environ).world_size


def _refuse_lonely_accelerate(environ: Mapping[str, str]) -> None:
    """`accelerate launch --cpu --num_processes 2` sets where they meet, and starts one process."""
    meeting = all(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if meeting and "ACCELERATE_MIXED_PRECISION" in environ:
        raise ConfigError(
            "accelerate launch was asked for several processes on the CPU and started one, which it leaves to MPI; use "
            "torchrun --nproc-per-node N, or accelerate launch --multi_gpu --num_processes N, which needs no GPU (or "
            "unset MASTER_ADDR and MASTER_PORT for one process)"
        )


# What a process that is alone may still find.
_ALONE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _from_variables(environ: Mapping[str, str]) -> Launch:
    numbers = {name: _number(environ, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    world_size, rank, local_rank = numbers.values()
    _refuse_outside(environ, "RANK", rank, "WORLD_SIZE", world_size)
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world_size
    _refuse_outside(environ, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    if local_size > world_size:
        raise ConfigError(f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={world_size}; use torchrun")
    if world_size == 1:
        return Launch("variables")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ConfigError(f"WORLD_SIZE={world_size} but {' and '.join(missing)} missing; use torchrun")
    if "LOCAL_WORLD_SIZE" not in environ:
        local_size = world_size if environ["MASTER_ADDR"] in _THIS_MACHINE else 1
    return Launch("variables", world_size, rank, local_rank, local_size, environ["MASTER_ADDR"], _port(environ))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not re.fullmatch(r"-?\d+", text.strip()):
        raise _half_set(environ, f"{name} is {'missing' if text is None else repr(text)}")
    return int(text)


def _half_set(environ: Mapping[str, str], what: str) -> ConfigError:
    there = ", ".join(f"{name}={environ[name]}" for name in LAUNCHER_VARIABLES if name in environ)
    slurm = "SLURM_PROCID" in environ and " (in a step of SLURM they are not needed)"
    return ConfigError(
        f"the launcher's variables are half set: {what} while {there}; start several processes with torchrun, "
        f"accelerate launch or srun, or unset these variables for one{slurm or ''}"
    )


def _refuse_outside(environ: Mapping[str, str], name: str, index: int, size_name: str, size: int) -> None:
    if not 0 <= index < size:
        shown = f"{size_name}={size}" if size_name in environ else f"WORLD_SIZE={size}"
        raise ConfigError(f"{name}={index} is not below {shown}, or negative; use torchrun to start the processes")


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port} is no port; expected 1 to 65535")
    return port


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the step this process is a task of; 1 outside a step, as in a batch script or the shell of `salloc`.

    There SLURM_NTASKS says how many a `srun` would start. Only in a step is this process one of them.
    """
    in_step = any(name in environ for name in _STEP_VARIABLES)
    if not (in_step or all(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))):
        return 1
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return _slurm_number(environ, name) if name in environ else 1


def _from_slurm(environ: Mapping[str, str], num_tasks: int) -> Launch:
    rank, local_rank = (_slurm_number(environ, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    if not 0 <= rank < num_tasks or not 0 <= local_rank <= rank:
        raise ConfigError(
            f"SLURM's variables contradict each other: SLURM_PROCID={rank}, SLURM_LOCALID={local_rank} of {num_tasks} "
            "tasks; start the processes with srun or torchrun"
        )
    local_size = _tasks_here(environ, num_tasks)
    return Launch("slurm", num_tasks, rank, local_rank, local_size, _slurm_master(environ), _slurm_port(environ))


def _slurm_number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d+", environ.get(name, "")):
        found = ", ".join(f"{n}={v}" for n, v in sorted(environ.items()) if n in _SLURM_SHOWN)
        raise ConfigError(
            f"in a step of SLURM {name} is {environ.get(name, 'missing')!r} while {found}; start the processes with "
            "srun or torchrun, or unset SLURM_PROCID for one process"
        )
    return int(environ[name])


_SLURM_SHOWN = (*_STEP_VARIABLES, "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def _tasks_here(environ: Mapping[str, str], num_tasks: int) -> int:
    """Tasks on this machine: the `SLURM_NODEID`-th of a text like `4(x2),3`."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    known = sum(counts) == num_tasks and node.isdigit() and int(node) < len(counts)
    return counts[int(node)] if known else 1


def _slurm_master(environ: Mapping[str, str]) -> str:
    """The machine of task 0: the first of the step's."""
    if address := environ.get("MASTER_ADDR"):
        return address
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return first_host(environ[name])
    raise ConfigError(
        "a step of SLURM with several tasks, but neither SLURM_STEP_NODELIST nor MASTER_ADDR says where task 0 is; "
        "set MASTER_ADDR to its machine"
    )


def _slurm_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT, else one that follows from job and step, so that all tasks know it and two jobs seldom share it."""
    if environ.get("MASTER_PORT"):
        return _port(environ)
    job, step = (int("".join(re.findall(r"\d", environ.get(name, ""))) or 0) for name in _JOB)
    return _FIRST_PORT + (job * 31 + step) % _NUM_PORTS


_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def first_host(nodes: str) -> str:
    """The first machine of one of SLURM's lists.

    >>> first_host("gpu-[003-010,12],cpu7"), first_host("a,b[1-2]"), first_host("rack[2-3]n[07,09]-ib")
    ('gpu-003', 'a', 'rack2n07-ib')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")
    if not re.fullmatch(r"[\w.-]+", host):
        raise ConfigError(f"{nodes!r} is no list of machines; set MASTER_ADDR to the machine of task 0")
    return host

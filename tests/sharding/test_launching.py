"""Launchers: what torchrun, people and SLURM leave in the environment is understood, and half of it is refused."""

from __future__ import annotations

import os

import pytest

from purestep.sharding.config import ConfigError
from purestep.sharding.launching import LAUNCHER_VARIABLES, Launch, first_host, launch_of, launched_world_size

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
STEP = {  # as srun sets them for the third of three tasks on two machines
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_STEP_NODELIST": "gpu-[07,09-10]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}


def changed(environ: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def test_the_number_of_processes_is_what_the_launcher_started():
    assert launched_world_size({}) == 1
    assert launched_world_size(LAUNCHED) == 2
    assert launched_world_size({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == 1
    assert launched_world_size({"LOCAL_RANK": "0", "MASTER_ADDR": "somewhere", "PMI_SIZE": "1"}) == 1


def test_torchruns_variables_are_read():
    assert launch_of(LAUNCHED) == Launch("variables", 2, 1, 1, 2, "127.0.0.1", 1234)
    several_machines = {"MASTER_ADDR": "node1", "WORLD_SIZE": "8", "RANK": "5"}
    assert launch_of(LAUNCHED | several_machines).local_world_size == 1  # nobody said
    assert launch_of(LAUNCHED | several_machines | {"LOCAL_WORLD_SIZE": "4"}).local_world_size == 4


HALF_SET = [  # variables that are missing or wrong, what the message says
    ({"WORLD_SIZE": None}, "WORLD_SIZE is missing while RANK=1, LOCAL_RANK=1"),
    ({"RANK": None}, "RANK is missing while WORLD_SIZE=2"),
    ({"LOCAL_RANK": None}, "LOCAL_RANK is missing while RANK=1"),
    ({"RANK": None, "WORLD_SIZE": None}, "RANK and WORLD_SIZE are missing while LOCAL_RANK=1"),
    ({"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "while LOCAL_RANK=0, LOCAL_WORLD"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE is '2.0'"),
    ({"RANK": ""}, "RANK is ''"),
    ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
    ({"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ({"RANK": "-1"}, "RANK=-1 is not below WORLD_SIZE=2, or negative"),
    ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK=0 is not below WORLD_SIZE=0"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below WORLD_SIZE=2"),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=1"),
    ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
    ({"MASTER_ADDR": None}, "WORLD_SIZE=2 but MASTER_ADDR missing; use torchrun"),
    ({"MASTER_ADDR": ""}, "WORLD_SIZE=2 but MASTER_ADDR missing; use torchrun"),
    ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT missing"),
]


@pytest.mark.parametrize(("changes", "message"), HALF_SET)
def test_a_half_set_launcher_is_an_error_instead_of_a_hang(changes, message):
    with pytest.raises(ConfigError, match=message):
        launched_world_size(changed(LAUNCHED, changes))


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_mpi_alone_is_refused_for_accelerate_would_join_it(name):
    with pytest.raises(ConfigError, match=rf"started by MPI \({name}=2\).*torchrun"):
        launched_world_size({name: "2"})
    assert launched_world_size({name: "2", **LAUNCHED}) == 2
    assert launched_world_size({name: "3", **STEP}) == 3  # srun --mpi=pmi2 sets it too


def test_a_task_of_a_step_is_one_of_its_processes():
    launch = launch_of(STEP)
    assert launch == Launch("slurm", 3, 2, 1, 2, "gpu-07", launch.master_port)
    others = [launch_of(STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}) for rank in (0, 1)]
    assert {other.master_port for other in others} == {launch.master_port}
    assert launch_of(STEP | {"SLURM_STEP_ID": "4"}).master_port != launch.master_port
    assert launch_of(STEP | {"SLURM_JOB_ID": "78"}).master_port != launch.master_port
    given = launch_of(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"})
    assert (given.master_addr, given.master_port) == ("10.0.0.1", 99)
    older = changed(STEP, {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": "a,b", "SLURM_STEP_NUM_TASKS": None})
    assert (launch_of(older).master_addr, launch_of(older).world_size) == ("a", 3)


TASKS_HERE = [("1,2", "0", 1), ("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("2(x8)", "9", 1)]


@pytest.mark.parametrize(("counts", "node", "here"), TASKS_HERE)
def test_tasks_on_this_machine(counts, node, here):
    total = {"1,2": "3", "4(x2),3": "11", "2(x8)": "16"}[counts]
    changes = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node, "SLURM_STEP_NUM_TASKS": total}
    assert launch_of(STEP | changes).local_world_size == here


ALONE = {  # in an allocation, but not one of several tasks
    "a batch script": changed(STEP, dict.fromkeys([n for n in STEP if "STEP" in n]) | {"SLURM_PROCID": "0"}),
    "the shell of salloc": {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "gpu-07"},
    "srun --pty bash": STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "a step of one task": changed(STEP, {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_process_in_an_allocation_is_alone(name):
    assert launch_of(ALONE[name]) == Launch()


def test_a_launcher_inside_a_step_is_the_launcher():
    assert launch_of(STEP | LAUNCHED).launcher == "variables"
    with pytest.raises(ConfigError, match=r"RANK is missing while WORLD_SIZE=3; .*in a step of SLURM they"):
        launch_of(STEP | {"WORLD_SIZE": "3"})


WRONG_STEPS = [
    ({"SLURM_PROCID": "x"}, "in a step of SLURM SLURM_PROCID is 'x' while"),
    ({"SLURM_LOCALID": None}, "SLURM_LOCALID is 'missing' while SLURM_JOB_ID=77"),
    ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS is 'x'"),
    ({"SLURM_PROCID": "3"}, "contradict each other: SLURM_PROCID=3, SLURM_LOCALID=1 of 3 tasks"),
    ({"SLURM_PROCID": "1", "SLURM_LOCALID": "2"}, "SLURM_PROCID=1, SLURM_LOCALID=2"),
    ({"SLURM_STEP_NODELIST": None}, "neither SLURM_STEP_NODELIST nor MASTER_ADDR says where task 0 is"),
    ({"SLURM_STEP_NODELIST": "[1-2"}, "is no list of machines"),
    ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_STEPS)
def test_a_step_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        launch_of(changed(STEP, changes))


HOSTS = [("n1", "n1"), ("a-b.c,d", "a-b.c"), ("n[3]", "n3"), ("n[08-11]", "n08"), ("n[1,5-7]x,m", "n1x")]


@pytest.mark.parametrize(("nodes", "host"), HOSTS)
def test_the_first_machine_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_the_environment_says_what_torchrun_would_for_the_length_of_a_block(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("MASTER_PORT")
    before = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES}
    launch = Launch("slurm", 3, 2, 1, 2, "gpu-07", 99)

    def inside(launch: Launch) -> None:
        with launch.in_environment():
            assert launch_of(os.environ) == (Launch("variables", *list(vars(launch).values())[1:]) if launch.rank else
                                             Launch())  # fmt: skip
            os.environ["MASTER_PORT"] = "5"  # accelerate writes there
            raise KeyError

    for either in (launch, Launch()):
        with pytest.raises(KeyError):
            inside(either)
        assert {name: os.environ.get(name) for name in LAUNCHER_VARIABLES} == before

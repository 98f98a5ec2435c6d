"""Every launcher's environment as a table: variables in, topology or message out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lockstep.errors import SettingError
from lockstep.machine.topology import (
    SCHEDULERS,
    Scheduler,
    Task,
    Topology,
    detect,
    port_of,
)

pytestmark = pytest.mark.unit

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
TORCHRUN = {
    **MASTER,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-1@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def topology(
    ranks: tuple[int, int],
    local: tuple[int, int],
    node: int,
    master: tuple[str | None, int | None],
    source: str,
    *,
    agent_store: bool = False,
    unknown: frozenset[str] = frozenset(),
) -> Topology:
    return Topology(
        rank=ranks[0],
        size=ranks[1],
        local_rank=local[0],
        local_size=local[1],
        node_rank=node,
        master_addr=master[0],
        master_port=master[1],
        source=source,
        agent_store=agent_store,
        unknown=unknown,
    )


BY_HAND = "RANK and WORLD_SIZE"
M = ("10.0.0.1", 29501)
NOTHING_LOCAL = frozenset({"local_rank", "local_size", "node_rank"})


@pytest.mark.parametrize(
    ("environ", "argv", "expected"),
    [
        ({}, [], None),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "PATH": "/bin"}, ["--lr", "1"], None),
        (TORCHRUN, [], topology((5, 8), (1, 4), 1, M, "torchrun", agent_store=True)),
        (
            {**TORCHRUN, "LOCKSTEP_LAUNCHER": "lockstep run"},
            [],
            topology((5, 8), (1, 4), 1, M, "lockstep run", agent_store=True),
        ),
        (
            # torchrun as one task per node of a Slurm step: its own numbers count
            {**TORCHRUN, **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            [],
            topology((5, 8), (1, 4), 1, M, "torchrun", agent_store=True),
        ),
        (
            {**MASTER, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            ["--lr", "1", "--local_rank=1"],
            topology((5, 8), (1, 4), 1, M, BY_HAND),
        ),
        (
            {**MASTER, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"},
            ["--local-rank", "1"],
            topology((5, 8), (1, 4), 1, M, BY_HAND),
        ),
        # by hand: a loopback master means that all ranks are here, another one says nothing
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"},
            [],
            topology((1, 2), (1, 2), 0, ("127.0.0.1", 5), BY_HAND),
        ),
        (
            {**MASTER, "RANK": "1", "WORLD_SIZE": "2"},
            [],
            topology((1, 2), (0, 1), 1, M, BY_HAND, unknown=NOTHING_LOCAL),
        ),
        (
            {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "0"},
            [],
            topology((1, 2), (0, 1), 1, M, BY_HAND, unknown=NOTHING_LOCAL),
        ),
        (
            {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            [],
            topology((1, 2), (1, 2), 1, M, BY_HAND, unknown=NOTHING_LOCAL - {"local_rank"}),
        ),
        (
            {**MASTER, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "1"},
            [],
            topology((3, 4), (1, 2), 1, M, BY_HAND, unknown=frozenset({"local_size"})),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, [], topology((0, 1), (0, 1), 0, (None, None), BY_HAND)),
        (SLURM, [], topology((3, 4), (1, 2), 1, ("gpu07", port_of("77.2")), "Slurm")),
        (
            {**SLURM, **MASTER, "WORLD_SIZE": "4"},
            [],
            topology((3, 4), (1, 2), 1, M, "Slurm"),
        ),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
            | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            [],
            topology((6, 7), (0, 1), 3, ("gpu07", port_of("77.2")), "Slurm"),
        ),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NUM_TASKS"}, [], None),  # batch script
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, [], None),
        (
            {**SLURM, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            [],
            topology((3, 4), (1, 2), 1, (None, None), BY_HAND),
        ),
        (
            OPEN_MPI,
            [],
            topology((1, 2), (1, 2), 0, ("127.0.0.1", port_of("prterun-a-1@1")), "Open MPI"),
        ),
        (
            # mpirun in a Slurm job hands on the variables of its daemon's step
            {**OPEN_MPI, **MASTER, **SLURM, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            [],
            topology((1, 2), (0, 1), 1, M, "Open MPI"),
        ),
        (MPICH, [], topology((1, 2), (1, 2), 0, ("127.0.0.1", 29500), "MPICH")),
        (
            {**SLURM, **MPICH, "PMI_RANK": "3", "PMI_SIZE": "4"},  # srun --mpi=pmi2
            [],
            topology((3, 4), (1, 2), 1, ("gpu07", port_of("77.2")), "Slurm"),
        ),
    ],
)
def test_who_am_i(environ: dict[str, str], argv: list[str], expected: Topology | None) -> None:
    assert detect(environ, argv) == expected


@pytest.mark.parametrize("variables", [["RANK"], ["RANK", "LOCAL_RANK"]])
def test_the_ranks_of_a_machine_are_counted_if_nothing_says_how_many_it_has(
    variables: list[str],
) -> None:
    hosts = ["a", "a", "a", "b", "b"]
    local_ranks = [0, 1, 2, 0, 1]
    for rank, local_rank in enumerate(local_ranks):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        environ = {**MASTER, "WORLD_SIZE": "5"} | {name: numbers[name] for name in variables}
        place = detect(environ)
        assert place is not None
        assert not place.one_node
        node = 0 if rank < 3 else 1
        expected = topology((rank, 5), (local_rank, 3 - node), node, M, BY_HAND)
        assert place.with_hosts(hosts) == expected
        everything_here = place.with_hosts(["a"] * 5)
        assert everything_here.one_node
        assert (everything_here.local_size, everything_here.node_rank) == (5, 0)


def test_what_the_environment_says_is_kept() -> None:
    place = detect({**TORCHRUN})
    assert place is not None
    assert place.with_hosts(["a"] * 8) == place
    # Two containers of one machine that have host names of their own.
    environ = {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    in_container = detect(environ)
    assert in_container is not None
    assert in_container.with_hosts(["a", "b"]) == topology((1, 2), (1, 2), 1, M, BY_HAND)


@pytest.mark.parametrize(
    ("environ", "argv", "words"),
    [
        ({"RANK": "1"}, [], ["RANK=1", "WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, [], ["WORLD_SIZE=2", "RANK is not set"]),
        ({"LOCAL_RANK": "1"}, [], ["LOCAL_RANK=1", "RANK is not set"]),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, [], ["RANK=abc", "not a whole number"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, [], ["RANK=-1"]),
        ({"RANK": "0", "WORLD_SIZE": "1.5"}, [], ["WORLD_SIZE=1.5"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, [], ["rank 2 of world size 2"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, [], ["local rank 4 of 4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, [], ["LOCAL_WORLD_SIZE=9 and WORLD_SIZE=8"]),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, [], ["MASTER_PORT=99999", "1 to 65535"]),
        (TORCHRUN, ["--local_rank=2"], ["LOCAL_RANK=1 and --local_rank=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--local_rank"], ["--local_rank="]),
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "4"},
            [],
            ["RANK=0 and WORLD_SIZE=4", "Slurm says task 3 of 4"],
        ),
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "3"},
            [],
            ["RANK=0 and WORLD_SIZE=3", "Slurm says task 3 of 4"],
        ),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"}, [], ["RANK=0", "Open MPI says task 1 of 2"]),
        ({**SLURM, "WORLD_SIZE": "8"}, [], ["WORLD_SIZE=8", "Slurm says 4 processes"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1"}, [], ["=2,1 means 3 tasks on 2 nodes"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, [], ["'two'", "2(x3),1"]),
        ({**SLURM, "SLURM_LOCALID": ""}, [], ["SLURM_LOCALID is not set"]),
        ({**SLURM, "SLURM_LOCALID": "0", "SLURM_PROCID": "1"}, [], ["--distribution=block"]),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            [],
            ["MASTER_ADDR", "mpirun -x MASTER_ADDR="],
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1"},
            [],
            ["OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not set"],
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, [], ["MPI_LOCALRANKID is not set"]),
        (
            {**MPICH, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            [],
            ["mpirun -genv MASTER_ADDR"],
        ),
    ],
)
def test_half_set_and_contradictory_variables_are_errors_that_show_both_sides(
    environ: dict[str, str], argv: list[str], words: list[str]
) -> None:
    with pytest.raises(SettingError) as caught:
        detect(environ, argv)
    for word in words:
        assert word in str(caught.value)


def test_a_scheduler_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(environ: Mapping[str, str], task: Task) -> Topology:
        return Topology(rank=task.rank, size=task.size, source="MyBatch")

    my_batch = Scheduler(
        name="MyBatch", command="mybatch", rank="MYBATCH_RANK", size="MYBATCH_SIZE", read=read
    )
    monkeypatch.setattr("lockstep.machine.topology.SCHEDULERS", (*SCHEDULERS, my_batch))
    environ = {"MYBATCH_RANK": "3", "MYBATCH_SIZE": "4"}
    place = detect(environ)
    assert place is not None
    assert (place.rank, place.size) == (3, 4)
    assert not place.launcher_has_macro
    with pytest.raises(SettingError, match="MyBatch says task 3 of 4"):
        detect(environ | {"RANK": "0", "WORLD_SIZE": "4"})
    with pytest.raises(SettingError, match="MYBATCH_SIZE is not set beside it"):
        detect({"MYBATCH_RANK": "3"})


def test_the_port_of_a_job_is_stable_and_below_those_the_kernel_hands_out() -> None:
    ports = [port_of(f"{job}.{step}") for job in range(200) for step in range(3)]
    assert ports == [port_of(f"{job}.{step}") for job in range(200) for step in range(3)]
    assert min(ports) > 1023
    assert max(ports) < 32768
    assert len(set(ports)) > 500

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lockstep.errors import SettingError
from lockstep.run.start.machine import Machine
from lockstep.run.start.plan import (
    LaunchSpec,
    choose_nproc,
    make_plan,
    meeting_host,
    threads_per_process,
)
from lockstep.run.start.worker import Script

pytestmark = pytest.mark.launcher

MACHINE = Machine(cores=8, gpus=0, loopback="lo")
SCRIPT = Script(path="t.py")


@pytest.mark.parametrize(
    ("asked", "gpus", "nproc"),
    [("auto", 0, 8), ("auto", 4, 4), ("gpu", 4, 4), ("cpu", 4, 8), ("3", 0, 3), (3, 2, 3)],
)
def test_nproc_is_chosen_by_cores_and_gpus(asked: int | str, gpus: int, nproc: int) -> None:
    assert choose_nproc(asked, cores=8, gpus=gpus) == nproc


@pytest.mark.parametrize("asked", [0, -1, "0", "two", "", "1.5", "gpu"])
def test_a_value_of_nproc_that_is_no_number_of_processes_is_refused(asked: int | str) -> None:
    with pytest.raises(SettingError, match=f"--nproc {asked}"):
        choose_nproc(asked, cores=8, gpus=0)


@pytest.mark.parametrize(
    ("cores", "nproc", "threads"), [(8, 2, 4), (8, 3, 2), (2, 8, 1), (1, 1, 1)]
)
def test_threads_fill_the_cores(cores: int, nproc: int, threads: int) -> None:
    assert threads_per_process(cores, nproc, {}) == threads
    assert threads_per_process(cores, nproc, {"virtual_ranks": 4}) == 1


def test_only_given_settings_reach_the_environment() -> None:
    def variables(**settings: object) -> Mapping[str, str]:
        spec = LaunchSpec(script=SCRIPT, settings=settings)
        environ = {"OMP_NUM_THREADS": "1"}
        return make_plan(spec, MACHINE, environ, nproc=1, one_node=False).environment

    assert variables() == {}
    assert variables(seed=0, join_timeout=2.5) == {
        "LOCKSTEP_SEED": "0",
        "LOCKSTEP_JOIN_TIMEOUT": "2.5",
    }
    given = {
        "strategy": "ddp",
        "precision": "bf16",
        "shares": "1:2",
        "micro_batch_size": 8,
        "backend": "gloo",
        "device": "cpu",
    }
    assert variables(**given) == {
        "LOCKSTEP_STRATEGY": "ddp",
        "LOCKSTEP_PRECISION": "bf16",
        "LOCKSTEP_SHARES": "1:2",
        "LOCKSTEP_MICRO_BATCH_SIZE": "8",
        "LOCKSTEP_BACKEND": "gloo",
        "LOCKSTEP_DEVICE": "cpu",
    }


def test_a_plan_on_one_machine_sets_threads_and_loopback_and_describes_itself() -> None:
    script = Script(path="t.py", arguments=("--lr", "1"))
    spec = LaunchSpec(script=script, nproc="2", settings={"strategy": "ddp"})
    made = make_plan(spec, MACHINE, {}, nproc=2, one_node=True)
    assert made.environment == {
        "LOCKSTEP_STRATEGY": "ddp",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert made.arguments == ("--standalone", "--nproc-per-node=2", "t.py", "--lr", "1")
    assert made.describe().splitlines() == [
        "2 processes on this machine",
        "  4 threads per process (OMP_NUM_THREADS: 8 cores for 2 processes)",
        "  Gloo on lo alone (GLOO_SOCKET_IFNAME: one machine)",
        "variables for every process:",
        "  GLOO_SOCKET_IFNAME=lo",
        "  LOCKSTEP_STRATEGY=ddp",
        "  OMP_NUM_THREADS=4",
        "the same with torchrun:",
        "  torchrun --standalone --nproc-per-node=2 t.py --lr 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "host"),
    [
        (("-im", "tcp://10.10.10.1:12345", "-rn", "0"), "10.10.10.1"),
        (("--dist-url=tcp://[fe80::1]:12345",), "fe80::1"),
        (("+dist.url=tcp://node-1.lan:1",), "node-1.lan"),
        (("--dist-url", "tcp://127.0.0.1:12345"), None),
        (("--dist-url", "tcp://localhost:12345"), None),
        (("--dist-url", "file:///mnt/run"), None),
        (("--proxy", "tcp://"), None),
    ],
)
def test_the_host_at_which_processes_of_several_launchers_meet(
    arguments: tuple[str, ...], host: str | None
) -> None:
    assert meeting_host(arguments) == host


def test_gloo_of_processes_that_meet_elsewhere_is_not_on_loopback() -> None:
    spec = LaunchSpec(script=Script(path="t.py", arguments=("-im", "tcp://10.0.0.5:29500")))
    made = make_plan(spec, MACHINE, {}, nproc=1, one_node=True, meeting_interface="eth0")
    assert made.environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert made.notes[-1] == "Gloo on eth0 (GLOO_SOCKET_IFNAME: it leads to 10.0.0.5)"
    users = {"GLOO_SOCKET_IFNAME": "ib0"}
    made = make_plan(spec, MACHINE, users, nproc=1, one_node=True, meeting_interface="eth0")
    assert "GLOO_SOCKET_IFNAME" not in made.environment


def test_variables_that_the_user_has_set_are_not_changed() -> None:
    environ = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0"}
    made = make_plan(LaunchSpec(script=SCRIPT), MACHINE, environ, nproc=2, one_node=True)
    assert made.environment == {}
    assert made.notes == ()


def test_a_plan_of_one_machine_among_several_chooses_no_interface() -> None:
    spec = LaunchSpec(script=SCRIPT, torchrun=("--nnodes", "2", "--node-rank=1"))
    made = make_plan(spec, MACHINE, {}, nproc=2, one_node=False)
    assert "GLOO_SOCKET_IFNAME" not in made.environment
    assert made.arguments == ("--nnodes", "2", "--node-rank=1", "--nproc-per-node=2", "t.py")


@pytest.mark.parametrize(
    ("torchrun", "environ", "standalone"),
    [
        ((), {}, True),
        (("--log-dir", "standalone"), {}, True),
        (("--max-restarts", "1"), {"PET_MAX_RESTARTS": "2"}, True),
        (("--master-port", "29511"), {}, False),
        (("--master_addr=10.0.0.1",), {}, False),
        (("--rdzv-backend=c10d",), {}, False),
        ((), {"PET_RDZV_ENDPOINT": "host:1"}, False),
        (("--standalone",), {}, False),
    ],
)
def test_the_users_own_rendezvous_is_left_alone(
    torchrun: tuple[str, ...], environ: dict[str, str], standalone: bool
) -> None:
    spec = LaunchSpec(script=SCRIPT, torchrun=torchrun)
    made = make_plan(spec, MACHINE, environ, nproc=1, one_node=True)
    added = made.arguments.count("--standalone") - torchrun.count("--standalone")
    assert added == int(standalone)


def test_a_module_is_planned_with_torchruns_module_flag() -> None:
    spec = LaunchSpec(script=Script(path="pkg.mod", module=True))
    made = make_plan(spec, MACHINE, {}, nproc=1, one_node=True)
    assert made.arguments[-2:] == ("--module", "pkg.mod")

"""`lockstep run` on two machines: network namespaces with a cable, and a host name each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from launched import Launched
from namespaces import THIS_MACHINE, Machine, enter, listening_in, two_machines, until
from ranks import LEAVE_S

pytestmark = pytest.mark.netns

PORT = 29888  # the namespaces have all ports to themselves
Make = Callable[..., Launched]

TRAINS = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(size * step + rank)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("TRAINED", flush=True)
waiting = torch.ones(1)
while len(sys.argv) > 1 and waiting:
    time.sleep(0.01)
    waiting.fill_(rank == 0 and not os.path.exists("go"))
    dist.all_reduce(waiting)
names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
seen = {name: int(os.environ[name]) for name in names}
weights = [p.tolist() for p in model.parameters()]
with open(f"seen-{rank}.json", "w") as file:
    seen |= {"total": total.item(), "weights": weights, "host": os.uname().nodename}
    json.dump(seen, file)
dist.destroy_process_group()
"""
FAULT = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
print("FAULT", flush=True)
"""
LOOP = (
    FAULT
    + """
while True:
    time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
"""
)
TRAINS_ON = """
import sys
import torch, lockstep
from torch.utils.data import TensorDataset
world = lockstep.init(seed=0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
model, optimizer = world.prepare(model, optimizer)
loader = world.loader(data, batch_size=4)
checkpoint = world.checkpoint("checkpoints", model=model, optimizer=optimizer, loader=loader)
resumed = checkpoint.resume()
for epoch in world.epochs(3):
    for (x,) in loader:
        world.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save()
    world.print(f"EPOCH {epoch}")
    if epoch == 1 and not resumed and world.rank == int(sys.argv[1]):
        raise ValueError("its first life")
world.close()
"""
FAILS_LATER = """
import os, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 0:
        with open("pid", "w") as file:
            print(os.getpid(), file=file)
        raise SystemExit
    def ended():
        text = open("pid").read() if os.path.exists("pid") else ""
        return text.endswith("\\n") and not os.path.exists(f"/proc/{text.strip()}")
    while not ended():
        time.sleep(0.02)
    raise ValueError("the other has ended")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("SUM", total.item())
"""

HANGS_ONCE = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    dist.broadcast(total, 1)
    dist.barrier()
# The launchers look at each other in between.
for _ in range(300):
    time.sleep(0.01)
    dist.all_reduce(total.fill_(1))
print("SUM", total.item())
"""

# The second start cannot make its folder.
IN_THE_WAY = """
import os
from pathlib import Path
run = Path(os.environ["LOCKSTEP_RANK_FOLDER"]).parent.parent
(run / "attempt_1" / "rank_0").mkdir(parents=True)
raise ValueError("its first life")
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes runs on machines, each with a host name; at the end nothing may run there."""
    used = set()
    with contextlib.ExitStack() as runs:

        def make_one(
            machine: Machine,
            host: str,
            folder: Path,
            *arguments: str,
            token: str = "a token of the tests",
            fresh: bool = False,
        ) -> Launched:
            used.add(machine)
            run = Launched(
                ["run", *arguments],
                cwd=folder,
                env={**os.environ, "LOCKSTEP_TOKEN": token},
                first=[partial(enter, machine.name, host)],
                merged=True,
                fresh=fresh,
            )
            return runs.enter_context(run)

        yield make_one
    for machine in used - {THIS_MACHINE}:
        until(lambda machine=machine: not machine.processes(), LEAVE_S)


def listening(run: Launched) -> set[tuple[str, int]]:
    """Addresses and ports at which anything on its machine listens."""
    return listening_in(Path(f"/proc/{run.pid}/net"))


def static(machines: tuple[Machine, Machine], rank: int) -> list[str]:
    where = ["--master-addr", machines[0].address, "--master-port", str(PORT)]
    return ["--nnodes", "2", "--node-rank", str(rank), *where]


def dynamic(machines: tuple[Machine, Machine]) -> list[str]:
    endpoint = f"{machines[0].address}:{PORT}"
    return ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id=x"]


def start(
    make: Make,
    machines: tuple[Machine, Machine],
    folder: Path,
    text: str,
    *flags: str,
    argument: str = "",
) -> tuple[Launched, Launched]:
    """The same on both, as hosts `alpha`, which serves, and `beta`."""
    (folder / "script.py").write_text(text)
    script = ["script.py", *([argument] if argument else [])]
    first, second = (
        make(machine, host, folder, *static(machines, rank), *flags, *script)
        for rank, (machine, host) in enumerate(zip(machines, ("alpha", "beta"), strict=True))
    )
    return first, second


def check_training(folder: Path, nproc: int) -> None:
    seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2 * nproc)]
    for rank, its in enumerate(seen):
        assert its["GROUP_RANK"] * nproc + its["LOCAL_RANK"] == rank
        assert (its["LOCAL_WORLD_SIZE"], its["WORLD_SIZE"]) == (nproc, 2 * nproc)
        assert its["total"] == sum(range(1, 2 * nproc + 1))
        assert its["weights"] == seen[0]["weights"]
    assert len({its["host"] for its in seen}) == 2


# Runs that end well.


def test_a_script_that_knows_only_torch_and_comers_that_are_turned_away(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    both = start(make, machines, tmp_path, TRAINS, "--nproc=2", argument="waits")
    server, visitor = both
    for command in both:
        command.until("TRAINED")

    # Nothing listens on all interfaces: one auth proxy, and Gloo between the ranks.
    seen = [listening(command) for command in both]
    assert (machines[0].address, PORT) in seen[0]
    for machine, places in zip(machines, seen, strict=True):
        assert {address for address, _ in places} == {"127.0.0.1", machine.address}

    again = [*static(machines, 1), "script.py"]
    twin = make(machines[1], "gamma", tmp_path, *again)
    stranger = make(machines[1], "delta", tmp_path, *again, token="another token of them")
    assert (twin.wait(), stranger.wait()) == (3, 3)
    came = f"node 1 has already come: process {visitor.pid} on host beta"
    assert came in twin.said
    assert came in server.said
    assert "the token differs: the serving node has another one" in stranger.said
    turned_away = f"a connection from {machines[1].address} was turned away: its token differs"
    assert turned_away in server.said

    (tmp_path / "go").touch()
    assert [command.wait() for command in both] == [0, 0]
    check_training(tmp_path, nproc=2)


@pytest.mark.thorough
def test_fresh_interpreters_meet_by_c10d(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    both = [
        make(machine, host, tmp_path, *dynamic(machines), "--no-warm", "script.py", fresh=True)
        for machine, host in zip(machines, ("alpha", "beta"), strict=True)
    ]
    assert [command.wait() for command in both] == [0, 0], both[0].said
    check_training(tmp_path, nproc=1)


@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.thorough), "c10d"])
def test_all_ranks_start_again_and_go_on_from_the_checkpoint(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "script.py").write_text(TRAINS_ON)
    # c10d gives rank 0 to the first name: here to the node that does not serve.
    hosts, failing = (("alpha", "beta"), 1) if kind == "static" else (("beta", "alpha"), 0)
    flags = (
        [static(machines, 0), static(machines, 1)] if kind == "static" else [dynamic(machines)] * 2
    )
    both = [
        make(machine, host, tmp_path, *own, "--max-restarts=1", "script.py", str(failing))
        for machine, host, own in zip(machines, hosts, flags, strict=True)
    ]
    assert [command.wait() for command in both] == [0, 0], both[0].said
    root = ("beta", "alpha")[failing == 0]
    for command in both:
        assert f"lockstep: FIRST FAILURE: rank {failing} on host {root}" in command.said
        assert "starting all ranks again (--max-restarts: 0 left after this)" in command.said
    epochs = re.findall(r"EPOCH (\d)", both[0].said + both[1].said)
    assert epochs == ["0", "1", "2"]


@pytest.mark.thorough
def test_a_start_after_a_hang_is_one_of_its_own(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    both = start(make, machines, tmp_path, HANGS_ONCE, "--hang-after=3", "--max-restarts=1")
    assert [command.wait() for command in both] == [0, 0], both[0].said
    for command in both:
        assert command.said.count("FIRST FAILURE") == 1
        assert "deadlock" in command.said
        assert "SUM 2.0" in command.said


def test_ranks_that_have_ended_well_start_again_with_one_that_fails_later(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    both = start(make, machines, tmp_path, FAILS_LATER, "--max-restarts=1")
    assert [command.wait() for command in both] == [0, 0], both[1].said
    for command in both:
        assert "ValueError: the other has ended" in command.said
        assert "SUM 2.0" in command.said


def test_a_run_by_a_rendezvous_of_torchs_own_comes_to_its_end(make: Make, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nprint('WORLD', os.environ['WORLD_SIZE'])\n")
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/store", "--rdzv-id=x"]
    flags = [*where, "--rdzv-conf=store_type=file", "--nnodes=2", "--local-addr=127.0.0.1"]
    both = [make(THIS_MACHINE, host, tmp_path, *flags, "script.py") for host in ("one", "two")]
    assert [command.wait() for command in both] == [0, 0], both[0].said
    for command in both:
        assert "torch's own rendezvous" in command.said
        assert "WORLD 2" in command.said


def test_on_one_machine_everything_listens_on_loopback(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(LOOP)
    command = make(machines[0], "alpha", tmp_path, "--nproc=2", "script.py")
    command.until("[rank 0] FAULT")
    command.until("[rank 1] FAULT")
    assert {address for address, _ in listening(command)} == {"127.0.0.1"}
    command.send_signal(signal.SIGINT)
    assert command.wait() == 130


# Runs that do not.

RAISES = (
    FAULT
    + """
if rank == 1:
    raise ValueError("sample 17 is broken")
dist.all_reduce(torch.ones(1))
"""
)
KILLED = (
    FAULT
    + """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""
)
# Waits outside any collective: nothing but the other launcher can tell it.
BUSY = (
    FAULT
    + """
if rank == 1:
    sys.exit(3)
time.sleep(300)
"""
)
PARTED = (
    FAULT
    + """
if rank == 1:
    dist.barrier()
dist.all_reduce(torch.ones(1))
"""
)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (
            RAISES,
            1,
            r"FIRST FAILURE: rank 1 on host beta\n  ValueError: sample 17 is broken\n"
            r"  script\.py:\d+: raise .*consequences: rank 0 \(Connection",
        ),
        (
            KILLED,
            71,
            r"FIRST FAILURE: rank 1 on host beta\n  killed by SIGKILL.*rank 0 \(Connection",
        ),
        pytest.param(
            BUSY,
            3,
            r"FIRST FAILURE: rank 1 on host beta\n  sys\.exit\(3\).*ended by lockstep: rank 0",
            marks=pytest.mark.thorough,
        ),
        (
            PARTED,
            70,
            r"FIRST FAILURE: ranks 0-1\n  deadlock: .*rank 0 on alpha: waits in all_reduce.*"
            r"script\.py:\d+: dist\.all_reduce.*rank 1 on beta: waits in barrier.*"
            r"script\.py:\d+: dist\.barrier.*first mismatch: call 2",
        ),
    ],
    ids=["exception", "SIGKILL", "exit code, unnoticed elsewhere", "deadlock"],
)
def test_both_launchers_name_the_same_first_failure(
    machines: tuple[Machine, Machine],
    make: Make,
    tmp_path: Path,
    text: str,
    code: int,
    says: str,
) -> None:
    flags = "--hang-after=2", "--monitor-interval=600"  # which the launchers do not wait for
    both = start(make, machines, tmp_path, text, *flags)
    for command in both:
        command.until("FAULT")
    assert [command.wait() for command in both] == [code, code], both[0].said
    for command in both:
        assert re.search(says, command.last_block, re.DOTALL), command.said


def test_a_launcher_that_is_killed_ends_the_run(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    both = start(make, machines, tmp_path, LOOP)
    for command in both:
        command.until("FAULT")
    both[1].send_signal(signal.SIGKILL)
    assert both[0].wait() == 71
    says = r"FIRST FAILURE: rank 1 on host beta\n  the machine has left the run: its connection"
    assert re.search(says, both[0].last_block)
    assert "consequences: rank 0 (Connection" in both[0].last_block


def test_what_failed_first_is_said_last_where_no_restart_is_possible(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    both = start(make, machines, tmp_path, LOOP, "--max-restarts=1")
    for command in both:
        command.until("FAULT")
    both[0].send_signal(signal.SIGKILL)  # it serves
    assert both[1].wait() == 71
    assert "the ranks cannot be started again: --nnodes 2" in both[1].said
    says = r"FIRST FAILURE: rank 0 on host alpha\n  the machine has left the run: its connection"
    assert re.search(says, both[1].last_block)


def test_ctrl_c_on_one_machine_ends_the_run_on_both(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    both = start(make, machines, tmp_path, LOOP)
    for command in both:
        command.until("FAULT")
    both[1].send_signal(signal.SIGINT)
    assert [command.wait() for command in both] == [130, 130]
    said = "INTERRUPTED: lockstep was sent SIGINT (Ctrl-C)"
    assert f"{said} on host beta\n" in both[0].last_block
    assert f"{said}\n" in both[1].last_block


def test_a_node_that_never_comes_is_named(
    machines: tuple[Machine, Machine], make: Make, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(LOOP)
    flags = [*static(machines, 0), "--rdzv-conf=timeout=1"]
    command = make(machines[0], "alpha", tmp_path, *flags, "script.py")
    assert command.wait() == 3
    assert "node 1 of 2 has not joined; here: node 0 on host alpha (waited 1 s)" in command.said


def test_ranks_that_cannot_be_started_are_not_waited_for(make: Make, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_THE_WAY)
    command = make(THIS_MACHINE, "one", tmp_path, "--max-restarts=1", "script.py")
    assert command.wait() == 1
    assert "FileExistsError" in command.said

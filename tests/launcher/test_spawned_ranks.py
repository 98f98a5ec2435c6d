"""Programs that start their ranks themselves: as under plain Python, and watched where they can be.

Their forms are those of torch's tutorials, of pytorch/examples' `imagenet/main.py`, and of programs
that start others by hand.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch
from launched import launch

from lockstep.errors import SettingError
from lockstep.run.watch import meeting

pytestmark = pytest.mark.launcher

TRAINING = """
import psutil, socket, torch, torch.distributed as dist

reserved = []  # they stay bound, so that nobody else gets the ports; a rank may listen there

def free_port():
    holder = socket.socket()
    reserved.append(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]

def train():
    rank, sockets = dist.get_rank(), psutil.Process().net_connections("inet")
    if dist.get_world_size() == 1:
        assert {s.laddr.ip for s in sockets if s.status == "LISTEN"} == {"127.0.0.1"}
    weight = torch.ones(2)
    for _ in range(2):
        gradient = weight * (rank + 1)
        dist.all_reduce(gradient)
        weight = weight - 0.1 * gradient
    with open(f"rank{rank}of{dist.get_world_size()}", "w") as file:
        file.write(repr(weight.tolist()))
    dist.destroy_process_group()
"""

TUTORIAL = """
import os, torch.distributed as dist, torch.multiprocessing as mp
from training import free_port, train

def setup(rank, size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(size)
    dist.init_process_group("gloo")

def work(rank, size, port):
    setup(rank, size, port)
    train()

def main():
    size = int(os.environ.get("WORLD_SIZE", 2))
    mp.spawn(work, args=(size, free_port()), nprocs=size, join=True)

if __name__ == "__main__":
    main()
"""

IMAGENET = """
import argparse, os, torch.distributed as dist, torch.multiprocessing as mp
from training import free_port, train

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--multiprocessing-distributed", action="store_true")

def main():
    args = parser.parse_args()
    args.dist_url = args.dist_url.replace("PORT", str(free_port()))
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    ngpus = 2
    if args.multiprocessing_distributed:
        args.world_size = ngpus * args.world_size
        mp.spawn(main_worker, nprocs=ngpus, args=(ngpus, args))
    else:
        main_worker(0, ngpus, args)

def main_worker(gpu, ngpus, args):
    if args.dist_url == "env://" and args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.multiprocessing_distributed:
        args.rank = args.rank * ngpus + gpu
    dist.init_process_group("gloo", args.dist_url, world_size=args.world_size, rank=args.rank)
    train()

if __name__ == "__main__":
    main()
"""

LAUNCH = """
import torch.multiprocessing as mp

def launch(function, size, *args):
    mp.start_processes(function, args=(size, *args), nprocs=size, start_method="fork")
"""

# The launcher is in a module of its own, as in many libraries, and the port a default.
LIBRARY = """
import os, torch.distributed as dist
from launching import launch
from training import free_port, train

def work(rank, size, port):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train()

if __name__ == "__main__":
    launch(work, 2, free_port())
"""

BY_HAND = """
import os, subprocess, sys, torch.distributed as dist
from training import free_port, train

if sys.argv[1:] == ["rank"]:
    dist.init_process_group("gloo")
    train()
else:
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank"], env={**given, "RANK": str(r), "WORLD_SIZE": "2"}
        )
        for r in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
"""

PROCESSES = """
import multiprocessing, os, torch.distributed as dist
from training import free_port, train

def work(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train()

if __name__ == "__main__":
    context, port = multiprocessing.get_context("spawn"), free_port()
    ranks = [context.Process(target=work, args=(rank, 2, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""

URL = ("--dist-url", "tcp://127.0.0.1:PORT", "--world-size", "1", "--rank", "0")


def folder_with(folder: Path, source: str) -> Path:
    folder.mkdir()
    for name, text in (("train", source), ("training", TRAINING), ("launching", LAUNCH)):
        (folder / f"{name}.py").write_text(text)
    return folder


def results(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank*")}


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        (TUTORIAL, ()),
        pytest.param(IMAGENET, ("--multiprocessing-distributed", *URL), marks=pytest.mark.thorough),
        (LIBRARY, ()),
        pytest.param(BY_HAND, (), marks=pytest.mark.thorough),
        pytest.param(PROCESSES, (), marks=pytest.mark.thorough),
    ],
    ids=["tutorial", "imagenet", "library", "by hand", "processes"],
)
def test_ranks_that_a_script_spawns_train_as_under_python(
    tmp_path: Path, source: str, arguments: tuple[str, ...]
) -> None:
    ours = folder_with(tmp_path / "ours", source)
    ran = launch(["run", "train.py", *arguments], ours)
    assert ran.returncode == 0, ran.stderr
    weight = torch.ones(2)
    for _ in range(2):
        weight = weight - 0.1 * (weight * 1 + weight * 2)
    assert results(ours) == dict.fromkeys(("rank0of2", "rank1of2"), repr(weight.tolist()))


@pytest.mark.parametrize("warm", ["--warm", "--no-warm"])
def test_a_script_that_spawns_no_ranks_after_all_is_the_only_rank(
    tmp_path: Path, warm: str
) -> None:
    """What does not start processes after all finds its place in the environment."""
    folder = folder_with(tmp_path / "ours", IMAGENET)
    ran = launch(["run", warm, "train.py"], folder)
    assert ran.returncode == 0, ran.stderr
    assert set(results(folder)) == {"rank0of1"}


DEADLOCK = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from training import free_port

def once(rank):
    torch.ones(1)

def work(rank, port):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.barrier()

if __name__ == "__main__":
    mp.spawn(once, nprocs=1)
    mp.start_processes(work, args=(free_port(),), nprocs=2, start_method="fork")
"""


# Torch's tutorial "Writing distributed applications"; before them a process that is no rank.
BY_PROCESS = """
    context, port = mp.get_context("METHOD"), free_port()
    early = context.Process(target=print)
    early.start()
    early.join()
    early.close()
    waits = context.Event()
    processes = [context.Process(target=waits.wait, daemon=True)]
    processes += [context.Process(target=work, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes[1:]:
        process.join()
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("mp.start_processes", marks=pytest.mark.thorough),
        pytest.param("fork", marks=pytest.mark.thorough),
        "spawn",
    ],
)
def test_a_deadlock_among_spawned_ranks_is_reported(tmp_path: Path, how: str) -> None:
    source, call = DEADLOCK, DEADLOCK.splitlines()[-1]
    if how != "mp.start_processes":
        source = source.replace(call, BY_PROCESS.replace("METHOD", how).strip("\n"))
    folder = folder_with(tmp_path / "ours", source)
    ran = launch(["run", "--log-dir", "logs", "train.py"], folder)
    assert ran.returncode == 70, ran.stderr
    assert "deadlock: ranks 0-1 wait in collectives that do not match" in ran.stderr
    assert re.search(
        r"rank 0.*all_reduce.*\n.*train.py:\d+: dist.all_reduce\(torch.ones\(3\)\)", ran.stderr
    )
    assert re.search(r"train.py:\d+: dist.barrier\(\)", ran.stderr)


KILLED = """
import os, signal, torch.multiprocessing as mp

def work(rank):
    os.kill(os.getpid(), signal.SIGKILL)

mp.start_processes(work, nprocs=1, start_method="fork")
"""


def test_the_line_that_spawned_a_rank_which_is_killed_is_named(tmp_path: Path) -> None:
    ran = launch(["run", "train.py"], folder_with(tmp_path / "ours", KILLED))
    assert ran.returncode == 1
    assert re.search(
        r"process 0 terminated with signal SIGKILL\n  train.py:7: mp.start", ran.stderr
    )


IN_EACH_RANK = """
import os, sys, tempfile, torch.distributed as dist, torch.multiprocessing as mp
from lockstep.run.watch import meeting

meeting.SERVED_WITHIN_S = 0.5
tempfile.tempdir = os.getcwd()  # torch leaves the files with the errors of processes there

def work(number, size, url):
    rank = int(os.environ["RANK"]) * 2 + number if size == 4 else number
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    method, size, url = sys.argv[1:]
    if method == "none":
        work(int(os.environ["RANK"]), int(size), url)
    else:
        mp.start_processes(work, args=(int(size), url), nprocs=2, start_method=method)
"""


@pytest.mark.parametrize(
    ("method", "url", "found"),
    [
        ("fork", "tcp", "the script has started this process itself, in a rank of lockstep run"),
        pytest.param(
            *("spawn", "tcp", "the script has started this process itself, in a rank of"),
            marks=pytest.mark.thorough,
        ),
        ("fork", "env://", "with this rank: in rank 0 and in rank 1 of lockstep run"),
        ("none", "tcp", "as lockstep run serves the store of its ranks elsewhere"),
    ],
    ids=["address", "mp.spawn", "rank", "address of ranks"],
)
def test_ranks_that_cannot_meet_are_told(tmp_path: Path, method: str, url: str, found: str) -> None:
    """Torch would wait for its timeout: nobody serves a store, or two processes are one rank."""
    folder = folder_with(tmp_path / "ours", IN_EACH_RANK)
    with socket.socket() as reserving:  # nothing listens at the port
        reserving.bind(("127.0.0.1", 0))
        if url == "tcp":
            url = f"tcp://127.0.0.1:{reserving.getsockname()[1]}"
        ran = launch(["run", "--nproc", "2", "train.py", method, "2", url], folder)
    assert ran.returncode != 0
    assert found in ran.stderr


def test_the_only_rank_of_a_machine_may_start_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rank on each of two machines, the processes can meet at the launcher's store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with socket.socket() as reserving:  # nothing listens at the port
        reserving.bind(("127.0.0.1", 0))
        port = reserving.getsockname()[1]
        monkeypatch.setattr(meeting, "SERVED_WITHIN_S", 0.0)
        with pytest.raises(SettingError) as raised:
            meeting._create_checked_store(os.getppid(), pytest.fail, "127.0.0.1", port, 0, 2)
    assert raised.value.do.startswith("leave init_method out")


MEET_IN_THEIR_OWN_WAY = """
import os, socket, torch.distributed as dist, torch.multiprocessing as mp

RANK = int(os.environ["RANK"])

def meets_nobody(number):
    dist.init_process_group("gloo", rank=0, world_size=1)
    dist.destroy_process_group()

def has_a_prefix_for_its_group(number):
    store, *_ = next(dist.rendezvous("env://", rank=number, world_size=2))
    own_store = dist.PrefixStore(f"group of {RANK}", store)
    dist.init_process_group("gloo", store=own_store, rank=number, world_size=2)
    dist.barrier()
    dist.destroy_process_group()

def meets_at_a_store_of_rank_1(url):
    dist.init_process_group("gloo", init_method=url, rank=RANK, world_size=2)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(meets_nobody, nprocs=1, start_method="fork")
    mp.start_processes(has_a_prefix_for_its_group, nprocs=2, start_method="fork")

    # Rank 1 reserves a port, and serves it once rank 0 is there: it has connected in vain by then.
    launchers_store, *_ = next(dist.rendezvous("env://"))
    if RANK == 1:
        with socket.socket() as reserving:
            reserving.bind(("127.0.0.1", 0))
            port = reserving.getsockname()[1]
            launchers_store.set("port", str(port))
            launchers_store.wait(["rank 0 was refused"])
        server = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    else:
        port = int(launchers_store.get("port"))
        try:
            socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            launchers_store.set("rank 0 was refused", "")
    meets_at_a_store_of_rank_1(f"tcp://127.0.0.1:{port}")
"""


def test_programs_that_meet_in_their_own_way_are_left_alone(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "ours", MEET_IN_THEIR_OWN_WAY)
    ran = launch(["run", "--nproc", "2", "train.py"], folder)
    assert ran.returncode == 0, ran.stderr


def test_processes_of_several_ranks_meet_at_the_launchers_store(tmp_path: Path) -> None:
    """Each rank starts two processes, which together are ranks 0 to 3."""
    folder = folder_with(tmp_path / "ours", IN_EACH_RANK)
    ran = launch(["run", "--nproc", "2", "train.py", "fork", "4", "env://"], folder)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("init", ["dist.init_process_group('gloo')", "lockstep.init(**given)"])
def test_spawned_processes_without_an_address_are_told_what_to_do(
    tmp_path: Path, init: str
) -> None:
    source = f"""
import os, tempfile, lockstep, torch.distributed as dist, torch.multiprocessing as mp

tempfile.tempdir = os.getcwd()

def work(number):
    given = {{"rank": number, "world_size": 2}}
    {init}

if __name__ == "__main__":
    mp.start_processes(work, nprocs=2, start_method="fork")
"""
    ran = launch(["run", "train.py"], folder_with(tmp_path / "ours", source))
    assert ran.returncode == 1
    assert "call the function without torch.multiprocessing.spawn" in ran.stderr

"""Real runs of small scripts, each a command as a user types it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
from launched import Launched, ignoring, launch, with_files
from ranks import LEAVE_S

pytestmark = pytest.mark.launcher

# Knows nothing of Lockstep.
PLAIN = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS",
         "GLOO_SOCKET_IFNAME", "LOCKSTEP_STRATEGY", "LOCKSTEP_SEED")
seen = {name: os.environ.get(name) for name in names}
with open(f"seen-{dist.get_rank()}.json", "w") as file:
    json.dump({**seen, "total": total.item(), "argv": sys.argv, "main": __name__,
               "threads": torch.get_num_threads()}, file)
dist.destroy_process_group()
"""

WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(os.getpid(), child.pid)
time.sleep(300)
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {
        n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    }
    return {**kept, **changes}


def lockstep_run(
    folder: Path, text: str, *arguments: str, **changes: str
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return launch(["run", *arguments], folder, env=environment(**changes))


def test_a_script_that_uses_torch_alone_trains_on_several_ranks(tmp_path: Path) -> None:
    flags = ["--nproc", "2", "--strategy", "ddp", "--seed", "5", "--max-restarts=0"]
    done = lockstep_run(tmp_path, PLAIN, *flags, "script.py", "--seed", "9", "--n", "--", "a b")
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert "OMP_NUM_THREADS" in done.stderr.splitlines()[0]
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": seen["OMP_NUM_THREADS"],
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCKSTEP_STRATEGY": "ddp",
            "LOCKSTEP_SEED": "5",
            "total": 3.0,
            "argv": ["script.py", "--seed", "9", "--n", "--", "a b"],
            "main": "__main__",
            "threads": int(seen["OMP_NUM_THREADS"]),
        }
        assert 1 <= seen["threads"] <= max(1, cores // 2)


def test_a_module_is_run_with_the_users_own_variables(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "3", "PET_NPROC_PER_NODE": "1"}
    done = lockstep_run(tmp_path, PLAIN, "-m", "script", **own)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen-0.json").read_text())
    assert (seen["OMP_NUM_THREADS"], seen["WORLD_SIZE"]) == ("3", "1")


@pytest.mark.parametrize("warm", ["--warm", pytest.param("--no-warm", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals, warm: str) -> None:
    with started(tmp_path, WAITS, warm, "--nproc=2") as (launcher, processes):
        launcher.send_signal(number)
        done = launcher.finish()
        assert done.returncode == 128 + number
        assert f"INTERRUPTED: lockstep was sent {number.name}" in done.stderr
        assert psutil.wait_procs(processes, timeout=LEAVE_S)[1] == []


_INTERRUPTS = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


def test_ctrl_c_ends_the_launcher_while_torch_is_imported(tmp_path: Path) -> None:
    """Torch passes over all that goes wrong while it imports numpy."""
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS)
    (tmp_path / "script.py").touch()
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environ = os.environ | {"PYTHONPATH": path.strip(os.pathsep)}
    done = launch(["run", "--standalone", "script.py"], tmp_path, env=environ, fresh=True)
    assert done.returncode == 130, done.stderr


def test_a_second_signal_kills_ranks_that_do_not_listen(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)"
    with started(tmp_path, deaf + WAITS, "--nproc=2") as (launcher, processes):
        launcher.send_signal(signal.SIGINT)
        # Not a fixed time: again and again, as a user does, until it has been heard twice.
        while launcher.wait(0.2) is None:
            launcher.send_signal(signal.SIGINT)
        assert launcher.wait() == 130
        assert psutil.wait_procs(processes, timeout=LEAVE_S)[1] == []


@pytest.mark.parametrize("own_session", [False, True])
def test_nothing_outlives_a_launcher_that_was_killed(tmp_path: Path, own_session: bool) -> None:
    text = WAITS.replace('300)"])', f'300)"], start_new_session={own_session})')
    with started(tmp_path, text, "--nproc=2") as (launcher, processes):
        fork_server = psutil.Process(launcher.pid).children()
        launcher.kill()
        assert psutil.wait_procs([*fork_server, *processes], timeout=LEAVE_S)[1] == []


LEAVES = """
import os, signal, subprocess, sys, time

if os.fork() == 0:  # a daemon, as programs make them
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(300)
    os._exit(0)
os.wait()
sleeps = [sys.executable, "-c", "import time; time.sleep(300)"]
helper = subprocess.Popen(sleeps, start_new_session=True)
os.write(1, b"%d\\n" % helper.pid)
"""


def test_helpers_in_sessions_of_their_own_end_with_a_run_that_fails_or_starts_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(LEAVES + "raise ValueError('once more')\n")
    done = launch(["run", "--nproc", "1", "--max-restarts", "1", "script.py"], tmp_path)
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 4
    assert done.returncode == 1
    before, after = done.stderr.split("starting all ranks again")
    assert "once more" in before
    assert "once more" in after
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_helpers_in_sessions_of_their_own_end_with_a_run_that_is_interrupted(
    tmp_path: Path, number: int
) -> None:
    (tmp_path / "script.py").write_text(LEAVES + "time.sleep(300)\n")
    with Launched(["run", "--nproc", "2", "script.py"], cwd=tmp_path) as launcher:
        lines = [launcher.stdout.readline() for _ in range(4)]
        launcher.send_signal(number)
        assert launcher.finish().returncode == 128 + number
    pids = [int(line.split("] ")[1]) for line in lines]
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_a_helper_that_a_run_leaves_which_ends_well_goes_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVES)
    done = launch(["run", "--nproc", "1", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    processes = [psutil.Process(int(line)) for line in done.stdout.split()]
    assert len(processes) == 2
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=LEAVE_S)


@pytest.mark.parametrize("files", [10, 12, 14, 16, 18])
def test_a_limit_of_open_files_that_is_too_low_is_named(tmp_path: Path, files: int) -> None:
    (tmp_path / "script.py").write_text(PLAIN)
    done = launch(
        ["run", "--nproc", "2", "script.py"], tmp_path, first=[partial(with_files, files)]
    )
    assert done.returncode == 2, done.stderr
    assert "Too many open files" in done.stderr
    assert "raise the limits" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_more_ranks_start_than_fit_the_socket_to_the_fork_server(tmp_path: Path) -> None:
    """They hold 277 messages in each direction, with the kernel's default of 208 KiB."""
    done = launch(["run", "--no-python", "--nproc", "700", "true"], tmp_path)
    assert done.returncode == 0, done.stderr


KILLS_THE_FORK_SERVER = """
import os, signal, sys
is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if is_first_attempt and os.environ["RANK"] == "0":
    worker = os.fork()  # as a worker of a DataLoader, it does not end with its parent
    if worker != 0:
        with open("worker", "w") as file:
            file.write(str(worker))
        os.kill(os.getppid(), signal.SIGKILL)
if is_first_attempt:
    signal.pause()
with open("worker") as file:
    worker = file.read()
try:
    with open(f"/proc/{worker}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
except FileNotFoundError:
    state = "gone"
if state not in ("gone", "Z"):
    print("the worker is in state", state)
print("again", *sys.argv[1:], __name__, flush=True)
"""


@pytest.mark.parametrize("warm", ["--warm", pytest.param("--no-warm", marks=pytest.mark.thorough)])
def test_another_process_starts_the_ranks_if_the_first_was_killed(
    tmp_path: Path, warm: str
) -> None:
    (tmp_path / "script.py").write_text(KILLS_THE_FORK_SERVER)
    flags = [warm, "--nproc", "2", "--max-restarts", "1"]
    done = launch(["run", *flags, "script.py", "a", "b"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FIRST FAILURE: ranks 0-1" in done.stderr
    assert re.search(
        r"  the fork server \(process \d+, which starts the ranks\) ended first: killed by "
        r"SIGKILL; the kernel then kills its ranks\n",
        done.stderr,
    )
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] again a b __main__",
        "[rank 1] again a b __main__",
    ]
    assert "Traceback" not in done.stderr


def test_an_inherited_ignore_of_sighup_is_respected(tmp_path: Path) -> None:
    first = partial(ignoring, signal.SIGHUP)
    with started(tmp_path, WAITS, "--nproc=2", first=[first]) as (launcher, processes):
        for pid in [launcher.pid, *(process.pid for process in processes)]:
            os.kill(pid, signal.SIGHUP)
        assert launcher.wait(1.0) is None
        assert all(process.is_running() for process in processes)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143


@contextlib.contextmanager
def started(
    folder: Path, text: str, *flags: str, first: Sequence[Callable[[], object]] = ()
) -> Iterator[tuple[Launched, list[psutil.Process]]]:
    """A run of two ranks which each have a child; the launcher and those four processes."""
    (folder / "script.py").write_text(text)
    arguments = ["run", *flags, "script.py"]
    with Launched(arguments, cwd=folder, env=environment(), first=first) as launcher:
        lines = [launcher.stdout.readline().split("] ")[1] for _ in range(2)]
        processes = [psutil.Process(int(pid)) for line in lines for pid in line.split()]
        assert len(processes) == 4
        yield launcher, processes

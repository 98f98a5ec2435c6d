"""Every test is checked for what it leaves behind: processes, threads, shared memory, variables.

Every file says in `pytestmark` what its tests need. Only `unit` starts no process (checked here).
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each command compiles Lockstep again
# Before torch starts its thread pools, and before the fork server is started.
os.environ["OMP_NUM_THREADS"] = "1"
for _name in [
    n for n in os.environ if n.startswith(("LOCKSTEP_", "SLURM_", "OMPI_", "TORCHELASTIC"))
]:
    del os.environ[_name]
os.environ["LOCKSTEP_LANG"] = "en"  # whatever the locale: tests read messages

# Started in the background by a script, this process and all it starts would ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A temporary folder of our own, so that what other programs do in theirs is not counted. Its name
# is short: with pytest-xdist it is in that of another process, and a path to a socket of Ray's in
# it must not be longer than 107 bytes.
_FOLDER = tempfile.mkdtemp(prefix="tests-")
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = _FOLDER

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import LEAVE_S, descendants

torch.set_num_threads(1)


# Ray Client's server has a process for each client, and looks every 30 s for those that it may end.
# It is ended with the cluster.
WORDS_OF_SHARED_PROCESSES = ("forkserver", "resource_tracker", "ray.util.client.server")
"""Command lines with one of these words are of processes that may outlive a test."""


def _processes() -> dict[int, str]:
    processes = {}
    for pid, command in descendants(os.getpid()).items():
        is_shared = any(word in command for word in WORDS_OF_SHARED_PROCESSES)
        if command and not is_shared:
            processes[pid] = command
    return processes


def _shared_memory() -> set[str]:
    """Segments that torch made for processes that are gone."""
    folder = Path("/dev/shm")
    found = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        owner = re.match(r"torch_(\d+)_", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            found.add(path.name)
    return found


def _temporary_files() -> set[str]:
    # Of pytest, the fork server and torch; and the logs of runs, which are kept.
    ours = ("pytest-of-", "pymp-", "torchinductor_", "lockstep-logs-")
    return {p.name for p in Path(_FOLDER).iterdir() if not p.name.startswith(ours)}


FILE_MARKERS = ("launcher", "netns", "ranks", "gpu", "real", "clusters", "unit")
"""What the tests of a file need: each file says it in `pytestmark`. In the order in which they run:
the files that take longest must not be the last ones."""


def _starts_processes(item: pytest.Item) -> bool:
    """Returns True if a test may start processes; its own marker comes before that of its file."""
    for mark in item.iter_markers():
        if mark.name in FILE_MARKERS:
            return mark.name != "unit"
    return True


def _file_marker(item: pytest.Item) -> str:
    """Returns the marker that the file of a test has."""
    module = item.getparent(pytest.Module)
    assert module is not None
    for mark in module.own_markers:
        if mark.name in FILE_MARKERS:
            return mark.name
    raise pytest.UsageError(
        f"{item.path} has no marker: write `pytestmark = pytest.mark.` and one of "
        f"{', '.join(FILE_MARKERS)} below its imports"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FILE_MARKERS.index(_file_marker(item)))


_started: list[str] = []
"""What started processes since the present test began."""


def _watch_forks(event: str, _: object) -> None:
    if event in ("os.fork", "os.posix_spawn", "subprocess.Popen"):
        _started.append(event)


sys.addaudithook(_watch_forks)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    _started.clear()
    threads = set(threading.enumerate())
    variables = dict(os.environ)
    memory, files, processes = _shared_memory(), _temporary_files(), _processes()
    yield
    if not _starts_processes(request.node):
        assert not _started, "a unit test starts no process: import ranks, or subprocess"
    assert not dist.is_initialized(), "the process group was left open"
    left = {pid: text for pid, text in _processes().items() if pid not in processes}
    alive = [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]
    alive = psutil.wait_procs(alive, timeout=LEAVE_S)[1]
    assert not alive, f"processes left behind: {[left[p.pid] for p in alive]}"
    started = {
        thread
        for thread in set(threading.enumerate()) - threads
        if not isinstance(
            thread, threading._DummyThread
        )  # of torch's own, and not Python's to join
    }
    for thread in started:
        thread.join(timeout=LEAVE_S)  # the queues of loader workers close in their own time
    assert not any(thread.is_alive() for thread in started), f"threads left behind: {started}"
    assert _shared_memory() <= memory, "shared memory left behind"
    assert _temporary_files() <= files, "files left behind in the temporary folder"
    changed = {
        name
        for name in {*os.environ, *variables} - {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
        if os.environ.get(name) != variables.get(name)
    }
    assert not changed, f"environment variables changed: {sorted(changed)}"


@pytest.fixture
def free_port() -> Iterator[Callable[..., int]]:
    """Returns a function that reserves a port of a loopback address until the test ends.

    The port is bound, so that the kernel gives it to nobody else, but nothing listens on it. With
    SO_REUSEADDR, which all servers of these tests set, another socket may be bound to it as well
    and listen there.
    """
    reserved: list[socket.socket] = []

    def reserve(address: str = "127.0.0.1") -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        holder = socket.socket(family)
        reserved.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        return int(holder.getsockname()[1])

    yield reserve
    for holder in reserved:
        holder.close()

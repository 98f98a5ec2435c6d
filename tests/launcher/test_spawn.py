from __future__ import annotations

import atexit
import ctypes
import errno
import multiprocessing
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import HANG_S, LEAVE_S, in_clean_process
from torch import nn

import lockstep
import lockstep.run.start.plan
from lockstep.checkpoint import bits
from lockstep.errors import RankFailedError, SettingError, UsageError
from lockstep.run.start import openblas, spawn
from lockstep.run.start.machine import Machine
from lockstep.run.start.spawn import launch

pytestmark = pytest.mark.launcher


def folders() -> set[str]:
    """Those of runs, in the system's temporary folder."""
    root = Path(tempfile.gettempdir()) / f"lockstep-logs-{os.getuid()}"
    return {path.name for path in root.iterdir()} if root.exists() else set()


def sum_of_ranks(offset: float) -> dict[str, Any]:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    dist.destroy_process_group()
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    return {
        "rank": int(os.environ["RANK"]),
        "total": total,
        "variables": {name: os.environ[name] for name in names},
        "name": multiprocessing.current_process().name,
        "module": sys.modules["__main__"].__name__,
    }


def fail_on_rank_1(how: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("a bad sample")
        if how == "exit":
            sys.exit(5)
        os._exit(3)
    dist.barrier()  # rank 0 then fails too: the connection is closed
    dist.barrier()


def test_values_come_back_by_rank() -> None:
    before = folders()
    results = launch(sum_of_ranks, (1.5,), nproc=2)
    threads = os.environ["OMP_NUM_THREADS"]  # set by the tests, and left alone
    for rank, result in enumerate(results):
        assert result.pop("total").tolist() == [4.0]
        assert result == {
            "rank": rank,
            "variables": {
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": threads,
            },
            "name": f"lockstep-rank-{rank}",
            "module": "__main__",
        }
    assert folders() == before


def seen(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


@pytest.mark.parametrize("how", [pytest.param("fresh", marks=pytest.mark.thorough), "copies"])
@in_clean_process
def test_processes_get_variables_of_their_own(how: str) -> None:
    names = ("GREETING", "OMP_NUM_THREADS", "PATH")
    call = seen if how == "fresh" else lambda *names: seen(*names)
    found = launch(call, names, nproc=2, env={"GREETING": "hello", "OMP_NUM_THREADS": "2"})
    threads = "2" if how == "fresh" else "1"
    assert found == 2 * [["hello", threads, os.environ["PATH"]]]
    assert "GREETING" not in os.environ


def test_the_function_has_its_name_for_itself() -> None:
    assert "lockstep.run.start.spawn" in sys.modules
    assert lockstep.launch is sys.modules["lockstep.run.start.spawn"].launch


@in_clean_process
def test_a_closure_trains_in_copies_of_a_process_that_has_used_openmp() -> None:
    data = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (data.T @ data).exp().sum()
        nn.Linear(300, 300)(data).sum().backward()

        def train() -> tuple[int, list[float]]:
            dist.init_process_group("gloo")
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(3):
                model(data).square().mean().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
            dist.destroy_process_group()
            return torch.get_num_threads(), model[2].bias.tolist()

        results = launch(train, nproc=2, timeout=HANG_S)
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]
    assert results[0][0] == 1


def openblas_threads() -> list[int]:
    """Returns the number of threads of each OpenBLAS in this process that has NumPy's names."""
    libraries = [ctypes.CDLL(path) for path in openblas._loaded_files()]
    return [library.scipy_openblas_get_num_threads64_() for library in libraries]


@in_clean_process
def test_a_copy_computes_with_one_thread_whatever_is_asked_for() -> None:
    for path in openblas._loaded_files():
        ctypes.CDLL(path).scipy_openblas_set_num_threads64_(2)
    assert 2 in openblas_threads()

    def threads_and_texts() -> tuple[int, list[int], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world = lockstep.init(virtual_ranks=2)
        manifest = {"virtual_ranks": 2, "threads": 2}
        said = bits.restore_threads_and_note_differences(manifest, 2, torch.device("cpu"))
        threads = torch.get_num_threads()
        world.close()
        return threads, openblas_threads(), [*(str(each.message) for each in caught), said]

    variables = {"OMP_NUM_THREADS": "2"}
    ((threads, of_openblas, texts),) = launch(threads_and_texts, nproc=1, env=variables)
    assert threads == 1
    assert set(of_openblas) == {1}
    warning, said = texts
    assert "OMP_NUM_THREADS=2 with virtual_ranks" in warning
    assert "the bits are those of one: OpenMP's threads do not survive" in warning
    assert "bits are not promised: it was saved with 2 threads, and this process" in said


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "ValueError: a bad sample"),
        ("exit", "sys.exit(5)"),
        ("die", "exit code 3; no exception was recorded"),
    ],
)
@in_clean_process
def test_the_first_failure_is_raised_and_the_others_are_ended(how: str, text: str) -> None:
    def run() -> None:  # by fork, which starts at once
        fail_on_rank_1(how)

    with pytest.raises(RankFailedError) as caught:
        launch(run, nproc=3, timeout=HANG_S)
    assert f"rank 1 on host {socket.gethostname()}\n      {text}" in str(caught.value)
    assert caught.value.rank == 1
    assert ("in fail_on_rank_1" in caught.value.remote_traceback) == (how != "die")
    assert "src/lockstep" not in caught.value.remote_traceback
    kept = re.search(r"traceback and logs: (.*)", str(caught.value))
    assert kept is not None
    assert {path.name for path in Path(kept[1]).glob("rank_*")} == {"rank_0", "rank_1", "rank_2"}
    assert list(Path(kept[1]).rglob("result.pickle")) == []


def all_reduce_against_barrier() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.barrier()


@pytest.mark.parametrize("copy", [False, pytest.param(True, marks=pytest.mark.thorough)])
@in_clean_process
def test_a_hang_is_judged_and_names_the_lines(copy: bool) -> None:
    def run() -> None:
        all_reduce_against_barrier()

    with pytest.raises(RankFailedError) as caught:
        launch(run if copy else all_reduce_against_barrier, nproc=2, timeout=HANG_S)
    text = str(caught.value)
    assert "deadlock: ranks 0-1 wait in collectives that do not match" in text
    assert re.search(r"test_spawn.py:\d+: dist.all_reduce\(torch.ones\(3\)\)", text)
    assert re.search(r"test_spawn.py:\d+: dist.barrier\(\)", text)
    assert caught.value.rank == 0


@in_clean_process
def test_a_rank_that_ignores_sigterm_is_killed_when_time_is_over() -> None:
    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.environ["RANK"] == "1":
            time.sleep(1)

    with pytest.raises(RankFailedError, match="rank 1 had not ended in time"):
        launch(run, nproc=2, timeout=1.0)


@in_clean_process
def test_a_value_that_cannot_be_pickled_raises_an_error_that_says_so() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 on host .*\n.*pickle"):
        launch(lambda: lambda: None, nproc=1)


@in_clean_process
def test_a_rank_that_ends_without_returning_raises_an_error() -> None:
    with pytest.raises(RankFailedError, match="ended with exit code 0, but without returning"):
        launch(lambda: os._exit(0), nproc=1)


@in_clean_process
def test_from_another_thread_no_handler_is_set() -> None:
    handlers: list[Any] = []
    found: list[Any] = []

    def look() -> None:
        while not found:
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=lambda: found.append(launch(lambda: [1], nproc=2)))
    thread.start()
    look()
    thread.join()
    assert found == [[[1], [1]]]
    assert set(handlers) == {signal.default_int_handler}


class Preempted(Exception):
    """Raised by the handler of a user."""


@in_clean_process
def test_the_users_own_handler_is_left_in_place() -> None:
    def preempted(number: int, frame: object) -> None:
        raise Preempted

    launcher = os.getpid()

    def run() -> None:
        if os.environ["RANK"] == "0":
            os.kill(launcher, signal.SIGTERM)
        signal.pause()

    before = folders()
    signal.signal(signal.SIGTERM, preempted)
    assert launch(lambda: signal.getsignal(signal.SIGTERM), nproc=1) == [signal.SIG_DFL]
    with pytest.raises(Preempted):
        launch(run, nproc=2)
    assert psutil.Process().children(recursive=True) == []
    assert folders() == before


@in_clean_process
def test_copies_forget_the_children_and_exit_functions_of_the_launching_process() -> None:
    reader, writer = os.pipe()
    atexit.register(os.write, writer, b"a copy has run the exit handlers of its origin")
    child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    child.start()
    assert launch(multiprocessing_children, nproc=2) == [[], []]
    assert launch(lambda: multiprocessing_children(), nproc=2) == [[], []]
    assert child.is_alive()
    child.kill()
    child.join()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 100)


def multiprocessing_children() -> list[Any]:
    return multiprocessing.active_children()


@in_clean_process
def test_launch_closes_its_files_and_ends_its_threads() -> None:
    launch(lambda: None, nproc=2)  # torch opens some files once and for all
    before = os.listdir("/proc/self/fd"), threading.active_count()
    launch(lambda: None, nproc=2)
    launch(os.getpid, nproc=2)
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == before


def say_hello() -> None:
    sys.stdout.write("hello")
    sys.stderr.write("a warning\n")


def test_what_the_ranks_print_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    launch(say_hello, nproc=2)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    assert sorted(err.splitlines()) == ["[rank 0] a warning", "[rank 1] a warning"]


def train_through_a_failure(folder: str) -> str:
    with lockstep.init(seed=0, device="cpu") as world:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(torch.utils.data.TensorDataset(torch.ones(32, 4)), 4)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        resumed = checkpoint.resume()
        for (x,) in loader:
            if world.step == 3 and world.rank == 1 and not resumed:
                os.kill(os.getpid(), signal.SIGKILL)
            world.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return checkpoint.last_resume_note


@pytest.mark.thorough
def test_processes_are_started_again_and_find_what_they_have_kept(tmp_path: Path) -> None:
    for function in (train_through_a_failure, lambda folder: train_through_a_failure(folder)):
        notes = launch(function, (str(tmp_path / "none"),), nproc=2, max_restarts=1)
        assert all(note.startswith("resumed from step 3 in memory") for note in notes)
    with pytest.raises(SettingError, match="max_restarts=-1"):
        launch(train_through_a_failure, ("",), nproc=2, max_restarts=-1)


@in_clean_process
def test_launch_inside_a_rank_is_refused() -> None:
    with pytest.raises(RankFailedError, match=r"UsageError: launch\(\) inside a run") as caught:
        launch(lambda: launch(os.getpid, nproc=1), nproc=1)
    assert "this process is rank 0 of 1 already" in str(caught.value)


@pytest.mark.parametrize("nproc", [0, -1, "many"])
def test_a_wrong_number_of_processes_is_refused(nproc: int | str) -> None:
    with pytest.raises(SettingError, match="not a number of processes"):
        launch(sum_of_ranks, (1,), nproc=nproc)


@in_clean_process
def test_a_limit_of_processes_that_is_too_low_is_named() -> None:
    fork, made = os.fork, []

    def once() -> int:  # the fork server's; it then has none for the ranks
        if made:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        made.append(True)
        return fork()

    os.fork = once
    try:
        with pytest.raises(SettingError) as caught:
            launch(lambda: None, nproc=2)
    finally:
        os.fork = fork
    assert "2 processes on this machine" in str(caught.value)
    assert "Resource temporarily unavailable" in str(caught.value)


def test_copies_are_refused_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(cores=2, gpus=1, loopback="lo")
    monkeypatch.setattr(spawn, "read_machine", lambda: machine)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="torch has used a GPU") as caught:
        launch(lambda: None, nproc=1)
    assert "cannot be sent to a fresh process" in str(caught.value)
    assert launch(lambda: 1, nproc=1, env={"CUDA_VISIBLE_DEVICES": ""}) == [1]
    # Where there is no GPU, no copy misses it.
    machine = Machine(cores=2, gpus=0, loopback="lo")
    assert launch(lambda: 1, nproc=1) == [1]


@in_clean_process
def test_copies_can_use_cuda_after_torch_was_asked_for_gpus() -> None:
    """A torch with CUDA, made up: it refuses CUDA in copies once its C code has been asked."""
    refused = []

    def count_by_cuda() -> int:
        os.register_at_fork(after_in_child=lambda: refused.append(True))
        return 2

    torch._C._cuda_getDeviceCount = count_by_cuda
    torch.backends.cuda.is_built = lambda: True
    torch.cuda._is_in_bad_fork = lambda: bool(refused)
    torch.cuda._device_count_nvml = lambda: 2

    def uses_cuda() -> bool:
        return not torch.cuda._is_in_bad_fork()

    assert torch.cuda.is_available()
    assert launch(uses_cuda, nproc=2) == [True, True]
    # NVML cannot count MIG slices, so another copy does.
    torch.cuda._device_count_nvml = lambda: -1
    assert launch(uses_cuda, nproc="gpu") == [True, True]

    assert torch.cuda.is_available()  # this initialises CUDA
    with pytest.raises(UsageError, match="torch has asked CUDA for its devices") as caught:
        launch(uses_cuda, nproc="gpu")
    assert "import lockstep before anything looks for GPUs" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "module", "fresh"),
    [
        (None, "__main__", False),  # a notebook's own function
        (None, "os", True),  # an imported one
        ("<stdin>", "os", False),
        (__file__, "__main__", True),
    ],
)
def test_a_call_is_pickled_only_if_a_fresh_process_could_import_the_function(
    monkeypatch: pytest.MonkeyPatch, file: str | None, module: str, fresh: bool
) -> None:
    def own() -> None: ...

    own.__module__, own.__qualname__ = "__main__", "own"
    main = ModuleType("__main__")
    main.__dict__.update(__file__=file, own=own)
    monkeypatch.setitem(sys.modules, "__main__", main)
    call = partial(own if module == "__main__" else os.getpid)
    pickled_call, why_not = spawn._pickle_if_possible(call)
    assert isinstance(pickled_call, bytes) == fresh
    assert bool(why_not) != fresh


def test_a_log_folder_that_was_asked_for_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("PET_NNODES", "2")  # of another run
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    launch(say_hello, nproc=2)
    [folder] = tmp_path.iterdir()
    assert [p.read_text() for p in folder.glob("*/*/stdout.log")] == ["hello", "hello"]
    assert list(folder.rglob("result.pickle")) == []


AT_A_TERMINAL = """
import os, sys
from lockstep.run.start.spawn import launch
if __name__ == "__main__":
    print("ranks at a terminal:", launch(lambda: sys.stdout.isatty(), nproc=1))
    print("read here:", input())
"""


@in_clean_process
def test_the_terminals_keys_stay_the_launching_processs() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", AT_A_TERMINAL])
    shown = b""
    while b"terminal: [True]" not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"keys\n")
    while b"read here: keys" not in shown:
        shown += os.read(terminal, 1000)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)


SCRIPT = """
import os, sys, time
from lockstep.run.start.spawn import launch
def main():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(300)
if GUARD:
    launch(CALLED, nproc=2)
"""


def test_a_script_without_the_main_guard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", "True").replace("CALLED", "main"))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert 'if __name__ == "__main__":' in done.stderr
    assert "UsageError" in done.stderr.splitlines()[-4]


@pytest.mark.parametrize(
    "called", ["main", pytest.param("lambda: main()", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, -2, marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough),
        (signal.SIGKILL, -9),
    ],
)
def test_a_signal_to_the_launching_process_ends_all(
    tmp_path: Path, number: signal.Signals, code: int, called: str
) -> None:
    guarded = SCRIPT.replace("GUARD", '__name__ == "__main__"')
    (tmp_path / "script.py").write_text(guarded.replace("CALLED", called))
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        ranks = {int(launcher.stdout.readline().split("] ")[1]) for _ in range(2)}
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) == 3  # the fork server too
        assert ranks < {process.pid for process in started}
        launcher.send_signal(number)
        launcher.wait(timeout=HANG_S)
    assert launcher.returncode == code
    assert psutil.wait_procs(started, timeout=LEAVE_S)[1] == []

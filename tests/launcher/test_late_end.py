"""Ranks that SIGKILL does not end: they hold neither the launcher nor what it has to say."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from held import MAY_BE_HELD, frozen, pid_in, traced
from launched import Launched
from ranks import HANG_S

from lockstep.run.start import fork_server, late_end, local_ranks, machine
from lockstep.run.watch.process_status import (
    ProcessStatus,
    describe_state,
    exit_code_of_ending_process,
)

pytestmark = pytest.mark.launcher

Hold = Callable[[int], AbstractContextManager[None]]

ONE_FAILS = (
    MAY_BE_HELD
    + """
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    place = os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]
    print("AGAIN", place, "on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    raise SystemExit
write_pid("pid-" + os.environ["RANK"])
if os.environ["RANK"] == "1":
    time.sleep(1000)
wait_for("held")
raise ValueError("no data")
"""
)


def wait_only(seconds: float) -> None:
    """Called in the launcher: a process that does not end is given up after some seconds."""
    late_end.GIVE_UP_IDLE_AFTER_S = seconds
    late_end.LATE_AFTER_S = seconds


def with_gpus(count: int) -> None:
    """Called in the launcher: the machine has GPUs."""
    machine.count_gpus = lambda: count


SOON = (partial(wait_only, 1.0),)


def run_held(
    folder: Path, script: str, hold: Hold, *flags: str, gpus: int = 0
) -> tuple[int | None, str]:
    """Runs a script to its end while the process of `pid-1` is held.

    Returns:
        The launcher's exit code, and what it has printed.
    """
    (folder / "train.py").write_text(script)
    arguments = ["run", *flags, "--shutdown-timeout", "1", "train.py"]
    first = (*SOON, partial(with_gpus, gpus))
    with Launched(arguments, cwd=folder, first=first, merged=True) as process:
        with hold(pid_in(folder / "pid-1")):
            (folder / "held").touch()
            code = process.wait()
        return code, process.said


@pytest.mark.parametrize("hold", [traced, pytest.param(frozen, marks=pytest.mark.thorough)])
def test_the_first_failure_is_told_although_another_rank_does_not_end(
    tmp_path: Path, hold: Hold
) -> None:
    code, said = run_held(tmp_path, ONE_FAILS, hold, "--nproc", "2")
    pid = (tmp_path / "pid-1").read_text()
    state = {
        traced: rf"state Z \(ended, but held by process {os.getpid()}, which traces it\)",
        frozen: r"state D \(in the kernel, where no signal reaches it, in \w+\)",
    }[hold]
    text = rf"process {pid} has not ended \d+ s after SIGKILL: {state}"
    assert re.search(f"rank 1: {text}; it is not waited for any longer\n", said), said
    block = said[said.rindex("\nlockstep: ") :]
    assert "FIRST FAILURE: rank 0" in block
    assert "ValueError: no data" in block
    assert re.search(rf"\nnot ended: rank 1 on host \S+: {text}\n", block), block
    assert "what to do: about the process that has not ended: look at the kernel's log" in block
    assert code == 1


EXITS = (
    MAY_BE_HELD
    + """
write_pid("pid-" + os.environ["RANK"])
if os.environ["RANK"] == "1":
    wait_for("held")
    os._exit(int(os.environ["CODE"]))
"""
)


@pytest.mark.thorough
@pytest.mark.parametrize("exit_code", [0, 5])
def test_a_program_that_has_ended_counts_although_its_process_does_not_end(
    tmp_path: Path, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", str(exit_code))
    code, said = run_held(tmp_path, EXITS, traced, "--nproc", "2")
    assert code == exit_code
    assert "s after its program's end: state Z" in said
    assert ("FIRST FAILURE: rank 1" in said) == (exit_code != 0)


@pytest.mark.thorough
def test_without_gpus_all_ranks_start_again(tmp_path: Path) -> None:
    flags = ("--nproc", "2", "--max-restarts", "1")
    code, said = run_held(tmp_path, ONE_FAILS, traced, *flags)
    assert code == 0
    assert "not ended: rank 1" in said
    assert "AGAIN 0 of 2 on None" in said
    assert "AGAIN 1 of 2 on None" in said


@pytest.mark.thorough
@pytest.mark.parametrize("visible", [None, "4,6"])
def test_the_next_attempt_leaves_out_the_gpu_that_is_held(
    tmp_path: Path, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    flags = ("--nproc", "gpu", "--max-restarts", "1")
    code, said = run_held(tmp_path, ONE_FAILS, traced, *flags, gpus=2)
    assert code == 0, said
    assert "this machine goes on with 1 GPU\n" in said
    assert f"AGAIN 0 of 1 on {'4' if visible else '0'}\n" in said


@pytest.mark.thorough
def test_a_run_that_needs_the_gpu_that_is_held_ends(tmp_path: Path) -> None:
    flags = ("--nproc", "2", "--max-restarts", "1")
    code, said = run_held(tmp_path, ONE_FAILS, traced, *flags, gpus=2)
    assert code == 1
    assert "the ranks cannot be started again: " in said
    assert "the process of rank 1 has not ended and may hold its GPU" in said
    assert "AGAIN" not in said
    assert said.count("FIRST FAILURE: rank 0") == 1


ON_TWO_MACHINES = ONE_FAILS.replace('"pid-" + os.environ["RANK"]', '"pid-" + os.environ["PLACE"]')
ON_TWO_MACHINES = ON_TWO_MACHINES.replace('os.environ["RANK"] == "1"', 'os.environ["PLACE"] == "1"')


@pytest.mark.thorough
def test_the_machine_with_the_held_gpu_leaves_the_others(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(ON_TWO_MACHINES)
    flags = ["run", "--nnodes=1:2", "--max-restarts=1", "--shutdown-timeout=1"]
    flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x"]
    flags += ["--local-addr=127.0.0.1"]

    def node(place: int) -> Launched:
        more = f"--rdzv-conf=is_host={1 - place},last_call_timeout=600"
        env = {**os.environ, "LOCKSTEP_TOKEN": "a token of the tests", "PLACE": str(place)}
        first = (*SOON, partial(with_gpus, 1))
        arguments = [*flags, more, "train.py"]
        return Launched(arguments, cwd=tmp_path, env=env, first=first, merged=True)

    with node(0) as server, node(1) as other, traced(pid_in(tmp_path / "pid-1")):
        (tmp_path / "held").touch()
        assert [other.wait(), server.wait()] == [1, 0], server.said
    assert "ValueError: no data" in other.last_block
    assert "not ended: rank " in other.last_block
    assert "the ranks cannot be started again: --nproc 1" in other.said
    assert "ValueError: no data" in server.said
    assert "AGAIN 0 of 1" in server.said


HELPER = (
    MAY_BE_HELD
    + """
if os.fork() == 0:
    os.setsid()
    write_pid("pid-1")
    time.sleep(1000)
wait_for("held")
raise ValueError("no data")
"""
)


@pytest.mark.thorough
def test_a_helper_in_a_session_of_its_own_that_does_not_end_is_named(tmp_path: Path) -> None:
    # One that is traced would end at SIGKILL, and only its exit status would not be collected.
    code, said = run_held(tmp_path, HELPER, frozen, "--nproc", "1")
    assert code == 1
    pid = (tmp_path / "pid-1").read_text()
    told = f"process {pid}, which ranks have left behind, does not end at SIGKILL: state D"
    assert told in said
    assert said.index(told) < said.index("FIRST FAILURE: rank 0")


HELPER_OF_HELD = (
    MAY_BE_HELD
    + """
if os.environ["RANK"] == "1":
    if os.fork() == 0:
        os.setsid()
        write_pid("pid-helper")
        time.sleep(1000)
    wait_for("pid-helper")
    write_pid("pid-1")
    time.sleep(1000)
wait_for("held")
raise ValueError("no data")
"""
)


@pytest.mark.thorough
def test_helpers_of_a_rank_that_does_not_end_are_ended(tmp_path: Path) -> None:
    # A zombie has no children any more, so this takes a rank in state D.
    @contextlib.contextmanager
    def frozen_then_look(pid: int) -> Iterator[None]:
        """At the end it writes down the state of the helper."""
        with frozen(pid):
            yield
            helper = psutil.Process(pid_in(tmp_path / "pid-helper"))
            (tmp_path / "ended").write_text(helper.status())

    code, said = run_held(tmp_path, HELPER_OF_HELD, frozen_then_look, "--nproc", "2")
    assert code == 1
    assert "rank 1: process" in said
    assert (tmp_path / "ended").read_text() == "zombie"
    assert "left behind" not in said


CALLS_LAUNCH = """
import lockstep
from lockstep.errors import RankFailedError
from lockstep.run.start import late_end
def train():
    import train_one
if __name__ == "__main__":
    late_end.GIVE_UP_IDLE_AFTER_S = 1.0
    late_end.LATE_AFTER_S = 1.0
    try:
        lockstep.launch(train, nproc=2)
    except RankFailedError as error:
        print(error)
"""


@pytest.mark.thorough
def test_launch_raises_although_a_process_does_not_end(tmp_path: Path) -> None:
    (tmp_path / "train_one.py").write_text(ONE_FAILS)
    (tmp_path / "script.py").write_text(CALLS_LAUNCH)
    with (
        subprocess.Popen(
            [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        ) as process,
        traced(pid_in(tmp_path / "pid-1")),
    ):
        (tmp_path / "held").touch()
        said, _ = process.communicate()
    assert "ValueError: no data" in said
    assert re.search(r"not ended: rank 1 on host \S+: process \d+ has not ended", said)
    assert process.returncode == 0


@pytest.mark.thorough
def test_the_fork_server_ends_although_a_rank_does_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ONE_FAILS)
    arguments = ["run", "--nproc", "2", "train.py"]
    with Launched(arguments, cwd=tmp_path) as process:
        pids = [pid_in(tmp_path / "pid-0"), pid_in(tmp_path / "pid-1")]
        fork_server = psutil.Process(pids[1]).parent()
        assert fork_server is not None
        with traced(pids[1]):
            process.kill()
            _, alive = psutil.wait_procs([fork_server], timeout=HANG_S)
            assert not alive
            assert not Path(f"/proc/{pids[0]}").exists()


def stop_fork_server(file: Path) -> None:
    """Called in the launcher: the fork server is stopped before the first rank is requested."""
    start = fork_server.ForkServer.start

    def stop_and_start(self: fork_server.ForkServer, *arguments: Any, **options: Any) -> None:
        if not file.exists():
            os.kill(self.pid, signal.SIGSTOP)
            while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            file.write_text(str(self.pid))
        start(self, *arguments, **options)

    fork_server.ForkServer.start = stop_and_start  # type: ignore[method-assign]


def wait_for_starts(seconds: float) -> None:
    """Called in the launcher: how long the fork server may take to start a rank."""
    local_ranks._MAX_START_S = seconds


@pytest.mark.parametrize("ends_by", ["itself", pytest.param("Ctrl-C", marks=pytest.mark.thorough)])
def test_a_fork_server_that_does_not_answer_holds_no_launcher(tmp_path: Path, ends_by: str) -> None:
    (tmp_path / "train.py").write_text("import lockstep")
    file = tmp_path / "pid"
    max_start_s = 1.0 if ends_by == "itself" else 1000.0
    first = (*SOON, partial(stop_fork_server, file), partial(wait_for_starts, max_start_s))
    arguments = ["run", "--nproc", "2", "--shutdown-timeout", "1", "train.py"]
    with Launched(arguments, cwd=tmp_path, first=first, merged=True) as process:
        pid = pid_in(file)
        if ends_by == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        code = process.wait()
        said = process.said
    assert f"the fork server (process {pid}" in said
    assert "state T (stopped" in said
    if ends_by == "itself":
        assert "has not started ranks 0-1 within 1 s: state T" in said
        assert code == 1, said
    else:
        assert code == 130
    assert not Path(f"/proc/{pid}").exists()


def test_what_the_kernel_says_of_a_process(tmp_path: Path) -> None:
    def thread(number: int, state: str, flags: int, wait_channel: str) -> None:
        folder = tmp_path / "7" / "task" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        fields = [state, *["0"] * 5, str(flags), *["0"] * 42, str(3 << 8)]
        (folder / "stat").write_text(f"{number} (a) name) {' '.join(fields)}\n")
        (folder / "wchan").write_text(wait_channel)
        (tmp_path / "7" / "stat").write_text((folder / "stat").read_text())

    assert describe_state(7, tmp_path) == "gone by now"
    assert exit_code_of_ending_process(7, tmp_path) is None
    thread(7, "D", 0x400000, "nfs_wait_bit_killable")
    in_nfs = "state D (in the kernel, where no signal reaches it, in nfs_wait_bit_killable)"
    assert describe_state(7, tmp_path) == in_nfs
    assert exit_code_of_ending_process(7, tmp_path) is None
    # The main thread has ended, and another one is in the driver.
    thread(7, "Z", 0x40000C, "0")
    thread(8, "D", 0x400004, "nvidia_close")
    assert describe_state(7, tmp_path).endswith("in nvidia_close)")
    assert exit_code_of_ending_process(7, tmp_path) == 3
    thread(8, "R", 0x400000, "0")  # a thread that goes on
    assert describe_state(7, tmp_path) == "state R (computing)"
    assert exit_code_of_ending_process(7, tmp_path) is None
    thread(7, "X", 0, "0")
    thread(8, "Z", 0, "0")
    assert describe_state(7, tmp_path) == "state X"
    # The main thread is the one with the number of the process, whatever other numbers there are.
    thread(7, "S", 0, "0")
    thread(10, "R", 0, "0")
    assert describe_state(7, tmp_path) == "state S"


def test_a_process_that_uses_processor_time_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    cpu_s = 0.0

    def read_process(_: int) -> ProcessStatus:
        return ProcessStatus("D", cpu_s, cpu_s, 0, shows_stacks=False)

    monkeypatch.setattr(late_end, "read_process", read_process)
    monkeypatch.setattr(late_end.time, "monotonic", lambda: now)
    idle = late_end.LateEnd(7)
    assert idle.check() is late_end.Progress.IN_TIME
    now += 9.9
    assert idle.check() is late_end.Progress.IN_TIME
    now += 0.1
    assert idle.check() is late_end.Progress.GIVEN_UP
    busy = late_end.LateEnd(7)
    while busy.waited_s < 59:
        is_late = busy.waited_s >= late_end.LATE_AFTER_S
        expected = late_end.Progress.LATE if is_late else late_end.Progress.IN_TIME
        assert busy.check() is expected
        now += 1.0
        cpu_s += 0.01
    now += 1.0
    assert busy.check() is late_end.Progress.GIVEN_UP

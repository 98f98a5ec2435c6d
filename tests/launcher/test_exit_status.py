"""How a process ended: words, counters of the kernel, files of the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from memory_group import memory_group
from ranks import HANG_S

from lockstep.run.start.process import Process, describe_exit_code, exit_status_of
from lockstep.run.start.process_memory import (
    OomCounts,
    oom_between,
    oom_message_of,
    peak_memory,
    read_oom_counts,
)
from lockstep.run.watch.failure_report import render_failure
from lockstep.run.watch.first_failure import first_failure

pytestmark = pytest.mark.launcher

NOTHING = OomCounts(0, 0)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV (segmentation fault)"),
        (-6, "killed by SIGABRT (abort() was called)"),
        (137, "exit code 137 (128 + 9: SIGKILL)"),
        (255, "exit code 255"),
        (-(signal.SIGRTMIN + 3), f"killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_an_exit_code_is_described_with_its_signal(code: int, words: str) -> None:
    assert describe_exit_code(code) == words


def test_oom_kills_are_counted_in_control_groups_of_version_2(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "proc/vmstat": "nr_free 1\noom_kill 7\n",
            "sys/fs/cgroup/job/memory.events": "low 0\noom 2\noom_kill 1\n",
            "sys/fs/cgroup/job/step/memory.events": "low 0\noom 2\noom_kill 1\n",
        },
    )
    before = read_oom_counts(tmp_path)
    assert before == OomCounts(cgroup=2, machine=7)
    write(
        tmp_path,
        {"sys/fs/cgroup/job/memory.events": "oom_kill 2\noom_group_kill 0\n"},
    )
    assert oom_between(before, read_oom_counts(tmp_path)) == "certain"


def test_oom_kills_are_counted_in_control_groups_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/0123\n0::/\n",
            "proc/vmstat": "oom_kill 0\n",
            "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 3\n",
        },
    )
    assert read_oom_counts(tmp_path) == OomCounts(cgroup=3, machine=0)


def test_without_the_kernels_files_nothing_is_known(tmp_path: Path) -> None:
    assert read_oom_counts(tmp_path) == OomCounts(None, None)
    assert peak_memory(1, tmp_path) is None
    assert oom_message_of(1, tmp_path) is None


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (OomCounts(1, 1), OomCounts(1, 1), None),
        (OomCounts(1, 1), OomCounts(2, 2), "certain"),
        (OomCounts(1, 1), OomCounts(1, 2), "likely"),
        (OomCounts(None, 1), OomCounts(None, 2), "likely"),
        (OomCounts(None, None), OomCounts(5, 5), None),
    ],
)
def test_counts_that_grew_mean_that_the_oom_killer_ended_a_process(
    before: OomCounts, after: OomCounts, found: str | None
) -> None:
    assert oom_between(before, after) == found


def test_the_kernels_log_has_the_message_about_one_process(tmp_path: Path) -> None:
    log = (
        "6,100,1000,-;Linux version\n"
        "3,900,99,-;Memory cgroup out of memory: Killed process 42 (python) total-vm:9kB\n"
        "3,901,99,-;Out of memory: Killed process 421 (pt_data) total-vm:1kB, anon-rss:1kB\n"
    )
    write(tmp_path, {"dev/kmsg": log})
    assert oom_message_of(42, tmp_path) == (
        "Memory cgroup out of memory: Killed process 42 (python) total-vm:9kB"
    )
    assert oom_message_of(4, tmp_path) is None


def test_the_files_of_this_machines_kernel_can_be_read() -> None:
    counts = read_oom_counts()
    assert counts.machine is not None
    assert counts.machine >= 0
    peak = peak_memory(os.getpid())
    assert peak is not None
    assert peak > 1 << 20
    assert oom_message_of(2**30) is None


def start(tmp_path: Path, code: str) -> Process:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    with open(tmp_path / "stderr.log", "wb") as log:
        process = subprocess.Popen([sys.executable, str(script)], stderr=log, cwd=tmp_path)
    return Process(rank=1, local_rank=1, folder=tmp_path, pid=process.pid, code=process.wait())


def test_a_segmentation_fault_is_reported_with_the_users_line(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        import faulthandler
        import sys

        faulthandler.enable(open("crash.txt", "w"))

        def step():
            faulthandler._sigsegv()

        print("step 1", file=sys.stderr)
        step()
        """,
    )
    process.ended_at = time.time()
    end = exit_status_of(process, NOTHING, tmp_path)
    assert end.code == -signal.SIGSEGV
    assert end.crash_line == "train.py:8: faulthandler._sigsegv()"
    assert end.last_lines == ("step 1",)
    first = first_failure([end])
    assert first is not None
    assert (first.kind, first.exit_code) == ("signal", 71)
    assert "train.py:8: faulthandler._sigsegv()" in render_failure(first)


DUMP = """\
Thread 0x00007f79cf6286c0 (most recent call first):
  File "/opt/lockstep/run/watch/probe.py", line 214 in _answer_requests

Current thread 0x00007f79ef5deb80 (most recent call first):
  File "/home/me/train.py", line 7 in step
  File "/home/me/train.py", line 9 in <module>
  File "/opt/venv/lib/python3.11/site-packages/click/core.py", line 1653 in __call__

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
SIZES = "  what():  [enforce fail] 200 vs 84. Received data size doesn't match expected size."


@pytest.mark.parametrize("where", ["stderr", "named file"])
def test_a_dump_is_found_where_the_script_lets_faulthandler_write(
    tmp_path: Path, where: str
) -> None:
    """Standard error keeps what was printed before the dump, and after it."""
    dump = f"Fatal Python error: Aborted\n\n{DUMP}"
    own_file = tmp_path / "own.log"
    files = {"stderr.log": f"terminate called\n{SIZES}\n{dump}leaked semaphores\n"}
    if where == "named file":
        files = {"own.log": dump, "stderr.log": f"{SIZES}\n"}
        files["crash.txt"] = f"faulthandler writes into {own_file}\n"
    write(tmp_path, files)

    end = exit_status_of(ended(tmp_path, -signal.SIGABRT), NOTHING, tmp_path)
    assert end.crash_line == "train.py:7"
    first = first_failure([end])
    assert first is not None
    # The text says why it was aborted, so the advice is known.
    assert "pad them" in first.advice[0]
    if where == "named file":
        assert first.advice[1] == f"see the Python stacks of that moment in {own_file}"
    else:
        assert first.advice[1] == "see the Python stacks of that moment in stderr.log"
        assert end.last_lines[1:] == (SIZES, "Fatal Python error: Aborted", "leaked semaphores")


def test_without_a_dump_no_file_of_stacks_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"crash.txt": "", "stderr.log": "step 3\n"})
    end = exit_status_of(ended(tmp_path, -signal.SIGSEGV), NOTHING, tmp_path)
    assert (end.crash_line, end.stacks_file) == (None, "")
    first = first_failure([end])
    assert first is not None
    assert "crash.txt" not in render_failure(first)

    # An earlier dump is not that of a rank which another process has killed.
    write(tmp_path, {"crash.txt": f"Fatal Python error: Aborted\n\n{DUMP}"})
    end = exit_status_of(ended(tmp_path, -signal.SIGKILL), NOTHING, tmp_path)
    assert (end.crash_line, end.stacks_file) == (None, "")


def test_a_timeout_of_faulthandler_is_reported_with_the_users_line(tmp_path: Path) -> None:
    dump = f"Timeout (0:00:03)!\n{DUMP.replace('Current thread', 'Thread')}"
    write(tmp_path, {"stderr.log": f"step 5\n{dump}"})
    end = exit_status_of(ended(tmp_path, 1), NOTHING, tmp_path)
    assert end.crash_line == "train.py:7"
    assert end.last_lines == ("step 5", "Timeout (0:00:03)!")

    # The rank went on after it, so it says nothing about its end.
    write(tmp_path, {"stderr.log": f"{dump}giving up\n"})
    end = exit_status_of(ended(tmp_path, 1), NOTHING, tmp_path)
    assert end.crash_line is None
    assert end.last_lines[-1] == "giving up"


def ended(folder: Path, code: int) -> Process:
    process = Process(rank=1, local_rank=1, folder=folder, pid=0, code=code)
    process.ended_at = 100.0
    return process


def test_a_kill_is_explained_by_oom_counters_and_by_signals_that_were_sent(tmp_path: Path) -> None:
    process = start(tmp_path, "import os; os.kill(os.getpid(), 9)")
    process.ended_at = 100.0
    assert exit_status_of(process, NOTHING, tmp_path).oom is None
    assert exit_status_of(process, NOTHING, tmp_path).asked_to_end is None
    write(tmp_path, {"proc/vmstat": "oom_kill 1\n"})
    assert exit_status_of(process, NOTHING, tmp_path).oom == "likely"
    write(tmp_path, {"dev/kmsg": f"3,1,1,-;Out of memory: Killed process {process.pid} (python)\n"})
    process.peak_bytes = 5 << 30
    end = exit_status_of(process, NOTHING, tmp_path)
    assert (end.oom, end.peak_bytes) == ("certain", 5 << 30)
    assert end.oom_detail == f"Out of memory: Killed process {process.pid} (python)"
    process.signals_sent = {signal.SIGUSR1: 98.0, signal.SIGTERM: 99.0, signal.SIGKILL: 99.5}
    assert exit_status_of(process, NOTHING, tmp_path).asked_to_end == 99.0


def test_a_rank_that_still_runs_has_no_exit_status(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 3 still runs"):
        exit_status_of(Process(rank=3, local_rank=0, folder=tmp_path), NOTHING)


GROUP = """
import subprocess
import sys
from lockstep.run.start.process_memory import oom_message_of, oom_between, read_oom_counts

before = read_oom_counts()
hog = subprocess.Popen([sys.executable, "-c", "x = [bytearray(1 << 20) for _ in range(4096)]"])
code = hog.wait()
print(code, oom_between(before, read_oom_counts()), oom_message_of(hog.pid))
"""


def test_a_kill_by_the_real_oom_killer_is_certain() -> None:
    with memory_group(300 << 20) as group:
        enter = f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"'
        done = subprocess.run(
            ["sh", "-c", enter, sys.executable, "-c", GROUP],
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
    code, found, *log = done.stdout.strip().split(" ", 2)
    assert (code, found) == ("-9", "certain"), done.stderr
    assert "None" in log[0] or "Killed process" in log[0]

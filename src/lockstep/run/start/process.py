"""Describes the ranks' processes as the launcher sees them, and finds out how each of them ended.

A *rank* is a process of the run, and the *launcher* starts the ranks of one machine. An *attempt*
is one start of the ranks. *Evidence* are the files that a rank writes for its launcher: a
heartbeat, the exception that ended it, and its stacks at a fatal signal.
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.errors import EXIT_SIGNAL
from lockstep.run.run_folder import latest_group_folder, log_path
from lockstep.run.start.process_memory import (
    OomCounts,
    oom_between,
    oom_message_of,
    read_oom_counts,
)
from lockstep.run.start.terminal_lines import RecentOutput, read_last_lines
from lockstep.run.watch.error_record import ErrorRecord, read_error
from lockstep.run.watch.evidence import Evidence, EvidenceMemory
from lockstep.run.watch.exit_status import ExitStatus
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.printed_error import PrintedError, printed_error
from lockstep.run.watch.script_processes import NOT_ONE_GROUP_FILE, RETURNED_FILE
from lockstep.run.watch.stack_dump import Crash, find_crash
from lockstep.run.watch.verdict import Verdict

_SIGNAL_MEANINGS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGABRT: "abort() was called",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGXCPU: "limit of processor time",
    signal.SIGXFSZ: "limit of file size",
    signal.SIGPIPE: "it wrote to a pipe that nobody reads",
}
_ENDING_SIGNALS = {signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_MAX_SIGNAL_NUMBER = 64
_REPORTED_LINES = 20
"""The number of lines from the end of a rank's standard error that are reported."""
_SEARCHED_LINES = 100_000
"""The number of lines from the end of its standard error that are searched for a traceback."""


@dataclass(eq=False)
class Process:
    """A rank on this machine."""

    rank: int
    """Its number in the whole run."""
    local_rank: int
    """Its number on this machine."""
    folder: Path
    """The folder of its logs and evidence."""
    pid: int | None = None
    """Its process id; None if it has not been started yet."""
    code: int | None = None
    """Its exit code, or minus the number of the signal that ended it; None while it is running."""
    started_at: float | None = None
    """`time.time()` when its start was noticed."""
    ended_at: float | None = None
    """`time.time()` when its end was noticed."""
    signals_sent: dict[int, float] = field(default_factory=dict)
    """The signals that the launcher has sent to end it, each with the time of the first one."""
    stopped: bool = False
    """True if it was stopped, by a signal or a debugger, when it was sent one of these signals."""
    peak_bytes: int | None = None
    """Its highest resident memory; None if not known."""
    given_up: str = ""
    """Why the launcher gave up waiting for its end. Its `code` is then the one that it would have
    ended with."""
    fork_server_end: str = ""
    """How the fork server ended, if that is why the rank was killed."""
    evidence_memory: EvidenceMemory | None = None
    """The memory that holds its evidence; None if the evidence is in its folder."""
    stderr_tail: RecentOutput = field(default_factory=RecentOutput)
    """The end of its standard error."""

    @property
    def was_killed_with_fork_server(self) -> bool:
        """True if something killed the fork server, and the kernel then killed this rank."""
        return bool(self.fork_server_end)

    @property
    def evidence(self) -> Evidence:
        """The files that it writes for its launcher."""
        if self.evidence_memory is None:
            return Evidence.in_folder(self.folder)
        return self.evidence_memory.evidence


@dataclass(eq=False)
class Attempt:
    """One start of the ranks of this machine."""

    processes: list[Process]
    """The ranks that have been requested and that the system did not refuse to start."""
    world_size: int
    node: int
    """Number of this machine among the machines of the run, from 0."""
    num_nodes: int
    """Number of machines of the run."""
    nproc: int
    """Number of ranks of this machine that are to be started."""
    folder: Path
    logs: list[Path] = field(default_factory=list)
    """The files to which the output of the ranks is written."""
    logs_deleted: bool = False
    """True once the user has been told that one of the logs is gone."""
    hang: Verdict | None = None
    """Why the ranks cannot go on and must be ended; None if they can, as far as is known."""
    timed_out_ranks: tuple[int, ...] = ()
    """The ranks that must be ended because they have run for longer than the plan allows."""
    over: bool = False
    """True once all ranks have ended and `failure` is known."""
    failure: FirstFailure | None = None
    """What failed first; None if nothing did or the attempt is not over."""

    @property
    def running(self) -> list[Process]:
        """The ranks that have not ended."""
        return [process for process in self.processes if process.code is None]


def spawned_ranks(process: Process) -> list[Process]:
    """Returns the ranks that a script has started itself, by `torch.multiprocessing.spawn`.

    The probe in the process that the launcher has started gives each of them a folder with its
    evidence. If the script calls `spawn` for the first time, with 4 processes, the folders are
    `own_000000_4/rank_0` to `own_000000_4/rank_3`.

    Args:
        process: the only process that the launcher has started.

    Returns:
        The ranks that were started last. Empty if there are none, if not all of them have begun, if
        all have returned, or if they are not the ranks of one process group.
    """
    folder_and_size = latest_group_folder(process.folder)
    if folder_and_size is None:
        return []
    group, size = folder_and_size

    processes = []
    for index in range(size):
        folder = group / f"rank_{index}"
        heartbeat = read_heartbeat(Evidence.in_folder(folder).heartbeat)
        if heartbeat is None:  # this rank has not begun yet
            return []
        # The probe creates the file when the program of the rank has returned.
        has_returned = (folder / RETURNED_FILE).exists()
        code = 0 if has_returned else None  # None: it is running

        # On one machine, the rank and the local rank are the same.
        process_of_rank = Process(
            rank=index, local_rank=index, folder=folder, pid=heartbeat.pid, code=code
        )
        processes.append(process_of_rank)

    have_all_returned = all(spawned.code == 0 for spawned in processes)
    are_one_group = not (group / NOT_ONE_GROUP_FILE).exists()
    if have_all_returned or not are_one_group:
        return []
    return processes


def describe_exit_code(code: int) -> str:
    """Describes an exit code: `exit code 3`, `killed by SIGSEGV (segmentation fault)`.

    Args:
        code: exit code, or minus the number of the signal that ended the process.
    """
    if code < 0:
        return f"killed by {_describe_signal(-code)}"

    # If a shell ran a command that was killed, the shell ends with 128 plus the signal's number.
    signal_number = code - EXIT_SIGNAL
    if 0 < signal_number <= _MAX_SIGNAL_NUMBER:
        signal_text = _describe_signal(signal_number)
        is_known_signal = signal_text.startswith("SIG")
        if is_known_signal:
            return f"exit code {code} (128 + {signal_number}: {signal_text})"

    return f"exit code {code}"


def _describe_signal(number: int) -> str:
    """Returns the name of a signal and its meaning: `SIGSEGV (segmentation fault)`."""
    try:
        known_signal = signal.Signals(number)
    except ValueError:  # a real-time signal without a name
        return f"signal {number}"
    meaning = _SIGNAL_MEANINGS.get(known_signal)
    signal_name = known_signal.name
    return f"{signal_name} ({meaning})" if meaning else signal_name


def exit_status_of(process: Process, before: OomCounts, root: Path = Path("/")) -> ExitStatus:
    """Finds out how a rank ended, from its exit code, its evidence, its output and the kernel.

    Args:
        process: a rank that has ended.
        before: the kernel's out-of-memory counters from before the ranks were started.
        root: the root of the file system.

    Raises:
        ValueError: the rank is still running.
    """
    code = process.code
    if code is None or process.ended_at is None:
        raise ValueError(f"rank {process.rank} still runs")

    evidence = process.evidence
    heartbeat = read_heartbeat(evidence.heartbeat)

    error: ErrorRecord | None = None
    printed_traceback: PrintedError | None = None
    crash = Crash()
    oom: Literal["certain", "likely"] | None = None
    oom_detail: str | None = None
    if code != 0:
        error = read_error(evidence)

        # Its last output is kept in memory. If there is none, it may be in its log.
        last_lines = process.stderr_tail.lines()
        if not last_lines:
            last_lines = read_last_lines(process.folder, _SEARCHED_LINES)

        # A program that has recorded no exception may have printed one.
        if error is None and code > 0:
            printed_traceback = printed_error(last_lines)

        # Python may have written its stacks at a fatal signal.
        stderr_log = log_path(process.folder, "stderr")
        crash = find_crash(code, evidence.crash, stderr_log, last_lines)

        # The kernel's counters only say that some process was killed for lack of memory. Its log
        # says which one, but may not be readable.
        oom = oom_between(before, read_oom_counts(root))
        if oom is not None and process.pid:
            oom_detail = oom_message_of(process.pid, root)
            if oom_detail:
                oom = "certain"

    times_asked_to_end = []
    for number, sent_at in process.signals_sent.items():
        if number in _ENDING_SIGNALS:
            times_asked_to_end.append(sent_at)

    return ExitStatus(
        rank=process.rank,
        host=socket.gethostname(),
        time=process.ended_at,
        code=code,
        how=process.given_up or process.fork_server_end or describe_exit_code(code),
        given_up=process.given_up,
        with_fork_server=process.was_killed_with_fork_server,
        error=error,
        oom=oom,
        oom_detail=oom_detail or "",
        crash_line=crash.line,
        stacks_file=crash.stacks_file,
        last_lines=crash.last_lines[-_REPORTED_LINES:],
        printed_traceback=printed_traceback,
        step=heartbeat.steps if heartbeat and heartbeat.steps else None,
        made_no_step=heartbeat is not None and heartbeat.steps == 0,
        ran_s=process.ended_at - process.started_at if process.started_at else None,
        peak_bytes=process.peak_bytes,
        asked_to_end=min(times_asked_to_end, default=None),
        was_suspended=process.stopped,
    )

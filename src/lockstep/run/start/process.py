"""The ranks' processes, seen from the launcher: what is known of each, and how it ended.

And job control: at Ctrl-Z, `fg` and `bg` of the shell the ranks stop and go on together with the
launcher. Ranks are process groups of their own, which the terminal's Ctrl-Z does not reach; a rank
that is alone has the keys instead of the launcher, and then Ctrl-Z does not reach the launcher, for
which the shell waits. See "Job Control" in the manual of the GNU C library, and setpgid(2),
tcsetpgrp(3).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.run.start.machine import OomCounts, kernel_log_on, oom_between, read_oom_counts
from lockstep.run.start.output import RecentOutput, tail
from lockstep.run.start.worker import Script
from lockstep.run.start.zygote import give_terminal
from lockstep.run.watch.error_record import read_error
from lockstep.run.watch.evidence import Evidence, EvidenceMemory
from lockstep.run.watch.exit_status import ExitStatus
from lockstep.run.watch.failure_report import render_failure
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.printed_error import printed_error
from lockstep.run.watch.process_status import read_process
from lockstep.run.watch.script_processes import NOT_ONE_GROUP_FILE, RETURNED_FILE
from lockstep.run.watch.stacks import parse_frames, user_frame
from lockstep.user_code import format_source_line


@dataclass(eq=False)
class Process:
    """A rank on this machine."""

    rank: int
    """In the whole run."""
    local_rank: int
    folder: Path
    """Of its logs and evidence."""
    pid: int | None = None
    code: int | None = None
    """How it ended: its exit code, or minus the signal's number; None: it runs."""
    ended_at: float | None = None
    """`time.time()` when its end was seen."""
    sent: dict[int, float] = field(default_factory=dict)
    """Signals that the launcher has sent, and when first."""
    stopped: bool = False
    """A signal or a debugger had stopped it when the launcher sent them."""
    peak_bytes: int | None = None
    """Its highest resident memory, where that is known."""
    fork_server: str = ""
    """How the process that started it ended, where that has ended it as well."""
    memory: EvidenceMemory | None = None
    """Holds its evidence; None: that is in its folder."""
    errors: RecentOutput = field(default_factory=RecentOutput)
    """The end of its standard error."""

    @property
    def evidence(self) -> Evidence:
        """The files that it writes for its launcher."""
        return Evidence.in_folder(self.folder) if self.memory is None else self.memory.evidence


@dataclass(eq=False)
class Attempt:
    """The ranks of this machine between two rendezvous."""

    processes: list[Process]
    world_size: int
    node: int
    """Rank of this machine among the `nodes` of the run."""
    nodes: int
    folder: Path
    logs: list[Path] = field(default_factory=list)
    """What the ranks print goes to these files."""
    logs_deleted: bool = False
    """One of them is gone, and the user has been told."""
    told: bool = False
    """The other machines know that the ranks of this one have ended."""
    over: bool = False
    """All have ended, and what failed first was found out."""
    failure: FirstFailure | None = None
    """What failed first; None: nothing."""

    @property
    def running(self) -> list[Process]:
        """Those that have not ended."""
        return [process for process in self.processes if process.code is None]


class Journal:
    """What the launcher of this machine writes into the record of a run, see `lockstep report`.

    Args:
        folder: of the record; None: nothing is written. It must be said outside of the script.
        announce: called with what the user should read.
    """

    def __init__(self, folder: str | None, announce: Callable[[str], object]) -> None:
        self._announce = announce
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.launcher.record"
        self._path = Path(folder, name) if folder else None

    def write(self, kind: str, text: str = "", **more: object) -> str:
        """Adds a line; why it could not be written, or nothing.

        Args:
            kind: `start`, `finding`, `restart`; how a start has ended: `end` (well), `failure` or
                `interrupted`.
            text: for people.
            more: `ranks` and `command` of a start, `exit_code` of a failure.
        """
        if self._path is None:
            return ""
        line = {"kind": kind, "text": text, "host": socket.gethostname(), "time": time.time()}
        line |= more
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            return f"{self._path.parent}: {error.strerror}"
        return ""

    def start(self, attempt: Attempt, script: Script) -> None:
        """The ranks are about to be started; the machine of rank 0 writes it down."""
        if attempt.node == 0:
            command = [script.path, *script.arguments]
            # Told here, as a script may be one that says nothing of it.
            if why_not := self.write("start", ranks=attempt.world_size, command=command):
                self._announce(f"no record is written: {why_not}")

    def end(self, failure: FirstFailure | None) -> None:
        """The ranks have ended, and this was why."""
        if failure is None:
            self.write("end")
        else:
            kind = "interrupted" if failure.kind == "interrupted" else "failure"
            self.write(kind, render_failure(failure), exit_code=failure.exit_code)

    def find(self, text: str) -> None:
        """Announces a finding, and adds it."""
        self._announce(text)
        self.write("finding", text)


def started_by(process: Process) -> list[Process]:
    """The processes that a rank which is alone has last started by `torch.multiprocessing`.

    Empty: there are none, not all have come, all have returned, or they are no ranks of one group.
    """
    for folder in sorted(process.folder.glob("own_*"))[-1:]:
        places = [folder / f"rank_{i}" for i in range(int(folder.name.rpartition("_")[2]))]
        evidence = [Evidence.in_folder(place) for place in places]
        beats = [beat for files in evidence if (beat := read_heartbeat(files.heartbeat))]
        codes = [0 if (place / RETURNED_FILE).exists() else None for place in places]
        if (
            None in codes
            and len(beats) == len(places)
            and not (folder / NOT_ONE_GROUP_FILE).exists()
        ):
            made = zip(places, beats, codes, strict=True)
            return [Process(i, i, p, b.pid, code) for i, (p, b, code) in enumerate(made)]
    return []


_WORDS = {
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
_FAILED_THREAD = re.compile(r"(?:Current thread .*|Stack) \(most recent call first\):\n")
_THAT_END = {signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_LAST_LINES = 20
_TAIL_LINES = 100_000
"""In which the last traceback is looked for."""
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that no user has set."""


def in_words(code: int) -> str:
    """`exit code 3`, `killed by SIGSEGV (segmentation fault)`.

    Args:
        code: exit code, or minus the number of the signal that ended the process.
    """
    if code < 0:
        return f"killed by {_signal(-code)}"
    name = _signal(code - 128) if 128 < code <= 128 + 64 else ""
    if name.startswith("SIG"):  # what shells give for a command that was killed
        return f"exit code {code} (128 + {code - 128}: {name})"
    return f"exit code {code}"


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    words = _WORDS.get(signal.Signals(number))
    return f"{name} ({words})" if words else name


def crash_line(crash: Path) -> str | None:
    """The user's own line at a fatal signal, from what faulthandler has written then."""
    try:
        text = crash.read_text(errors="replace")
    except OSError:
        return None
    # Of several dumps the last, and of its threads the one that failed; where that was one of C++
    # alone, such as Gloo's, the last, which is the main thread.
    dump = text.rpartition("Fatal Python error:")[2]
    failed = _FAILED_THREAD.split(dump)
    threads = [failed[-1].partition("\n\n")[0]] if len(failed) > 1 else dump.split("\n\n")
    lines = [user_frame(parse_frames(thread)) for thread in threads]
    return next(
        (format_source_line(line.file, line.line) for line in reversed(lines) if line is not None),
        None,
    )


def exit_status_of(process: Process, before: OomCounts, root: Path = Path("/")) -> ExitStatus:
    """All that can be found out about a rank that has ended.

    Args:
        process: it has a code.
        before: the counters from before the ranks were started.
        root: stands for the root of the file system.

    Raises:
        ValueError: it still runs.
    """
    if process.code is None or process.ended_at is None:
        raise ValueError(f"rank {process.rank} still runs")
    code = process.code
    evidence = process.evidence
    oom = oom_between(before, read_oom_counts(root)) if code else None
    log = kernel_log_on(process.pid, root) if oom and process.pid else None
    heartbeat = read_heartbeat(evidence.heartbeat)
    ends = [at for number, at in process.sent.items() if number in _THAT_END]
    error = read_error(evidence) if code else None
    errors = (process.errors.lines() or tail(process.folder, _TAIL_LINES)) if code else []
    return ExitStatus(
        rank=process.rank,
        host=socket.gethostname(),
        time=process.ended_at,
        code=code,
        how=process.fork_server or in_words(code),
        with_fork_server=bool(process.fork_server),
        error=error,
        oom="certain" if log else oom,
        oom_detail=log or "",
        crash_line=crash_line(evidence.crash) if code < 0 else None,
        last_lines=tuple(errors[-_LAST_LINES:]),
        printed=printed_error(errors) if error is None and code > 0 else None,
        step=heartbeat.steps if heartbeat and heartbeat.steps else None,
        peak_bytes=process.peak_bytes,
        asked_to_end=min(ends, default=None),
        stopped=process.stopped,
    )


@contextlib.contextmanager
def handled(handlers: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
    """Within it signals are answered by these functions.

    One that is ignored, as SIGHUP is under nohup, stays ignored, and one for which the user has set
    a handler keeps it. Elsewhere than in the main thread nothing can be done.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in handlers}
    free = {n: old for n, old in before.items() if old in _DEFAULT_HANDLERS}
    try:
        for number in free:
            signal.signal(number, lambda received, frame: handlers[received](received))
        yield
    finally:
        for number, old in free.items():
            signal.signal(number, old)


def stop_here() -> None:
    """Stops this process as Ctrl-Z would; returns when it goes on."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def in_foreground() -> bool:
    """Whether the terminal's keys reach this process."""
    return _holder() == os.getpgrp()


def follow_keys(group: int, signal_ranks: Callable[[int], object]) -> None:
    """To be called often while a rank that is alone has, or should have, the terminal's keys.

    Args:
        group: the rank's process group.
        signal_ranks: sends it a signal.
    """
    if in_foreground():  # the shell's fg has given them to us
        give_keys(group)
        signal_ranks(signal.SIGCONT)
        return
    process = read_process(group)
    if process is not None and process.state == "T":
        take_keys(group)
        os.killpg(os.getpgrp(), signal.SIGTSTP)  # as Ctrl-Z would: all of the shell's job


def give_keys(group: int) -> None:
    """Lets the terminal's keys reach a group, if they reach ours now."""
    if in_foreground():
        give_terminal(0, group)


def take_keys(group: int) -> None:
    """Lets them reach ours, if they reach the group now."""
    if _holder() == group:
        give_terminal(0, os.getpgrp())


def _holder() -> int | None:
    try:
        return os.tcgetpgrp(0) if os.isatty(0) else None
    except OSError:  # not our terminal, or it is gone
        return None

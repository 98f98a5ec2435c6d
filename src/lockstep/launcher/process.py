"""The ranks' processes, seen from the launcher.

How a process of the run ended, seen from outside: its code, the kernel's counters, its files.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.launcher.machine import own_cgroups
from lockstep.launcher.output import tail
from lockstep.watchdog.exit_status import ExitStatus, read_record, shown
from lockstep.watchdog.probe import read_heartbeat
from lockstep.watchdog.snapshot import Frame, Stack
from lockstep.watchdog.stacks import own_line

if TYPE_CHECKING:
    from lockstep.watchdog.first_failure import FirstFailure


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


@dataclass(eq=False)
class Attempt:
    """The ranks of this machine between two rendezvous."""

    restarts: int
    processes: list[Process]
    world_size: int
    node: int
    """Rank of this machine among the `nodes` of the run."""
    nodes: int
    folder: Path
    failure: FirstFailure | None = None
    """What failed first, once all have ended; None: nothing."""

    @property
    def running(self) -> list[Process]:
        """Those that have not ended."""
        return [process for process in self.processes if process.code is None]


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
_CRASH_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THAT_END = {signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_LAST_LINES = 20
_COUNTERS = {2: "memory.events", 1: "memory.oom_control"}
"""By the version of control groups."""
_KERNEL_LOG_LINES = 100_000


@dataclass(frozen=True)
class OomCounts:
    """How many processes the kernel's out-of-memory killer has ended so far; None: not known."""

    cgroup: int | None
    """In the control groups that this process is in."""
    machine: int | None
    """On the whole machine; in a container that of its host."""


def read_oom_counts(root: Path = Path("/")) -> OomCounts:
    """Reads the counters of now; two of them tell what happened in between.

    Version 2 (`memory.events`) and version 1 (`memory.oom_control`) of control groups, and
    `/proc/vmstat`; see the kernel's "Control Group v2" and "Memory Resource Controller". The
    kernel counts before it sends the signal. `root` stands for the root of the file system.
    """
    groups = own_cgroups("memory", root)
    found = [_field(folder / _COUNTERS[version], "oom_kill") for version, folder in groups]
    known = [count for count in found if count is not None]
    return OomCounts(
        # Those of the parents hold those of the children, so the sum grows when any of them does.
        cgroup=sum(known) if known else None,
        machine=_field(root / "proc/vmstat", "oom_kill"),
    )


def oom_between(before: OomCounts, after: OomCounts) -> Literal["certain", "likely"] | None:
    """Whether the out-of-memory killer was at work: in our own groups, or on the machine."""
    if _grew(before.cgroup, after.cgroup):
        return "certain"
    return "likely" if _grew(before.machine, after.machine) else None


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _field(path: Path, name: str) -> int | None:
    try:
        fields = (line.split() for line in path.read_text().splitlines())
        return next((int(found[1]) for found in fields if found[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def kernel_log_on(pid: int, root: Path = Path("/")) -> str | None:
    """What the kernel's log says of its killing of `pid`; None: nothing, or it may not be read.

    The log has the numbers of the machine itself, which differ from a container's.
    """
    pattern = re.compile(rf"[^;\n]*[Oo]ut of memory: Killed process {pid} .*")
    try:
        descriptor = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    text: list[str] = []
    try:
        while len(text) < _KERNEL_LOG_LINES:
            try:
                record = os.read(descriptor, 8192)  # one message a time
            except BrokenPipeError:  # it was overwritten meanwhile; the next one can be read
                continue
            if not record:
                break
            text.append(record.decode(errors="replace"))
    except OSError:  # BlockingIOError: that was the last one
        pass
    finally:
        os.close(descriptor)
    found = pattern.findall("\n".join(text))
    return str(found[-1]).strip() if found else None


def peak_memory(pid: int, root: Path = Path("/")) -> int | None:
    """Bytes of a running process's highest resident memory (VmHWM, proc(5)); None: not known."""
    kib = _field(root / f"proc/{pid}/status", "VmHWM:")
    return None if kib is None else kib * 1024


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


def crash_line(folder: Path) -> str | None:
    """The user's own line at a fatal signal, from the rank's `crash.txt` (faulthandler)."""
    try:
        text = (folder / "crash.txt").read_text(errors="replace")
    except OSError:
        return None
    # Of several dumps the last, and of its threads the one that failed; where that was one of C++
    # alone, such as Gloo's, the last, which is the main thread.
    dump = text.rpartition("Fatal Python error:")[2]
    failed = _FAILED_THREAD.split(dump)
    threads = [failed[-1].partition("\n\n")[0]] if len(failed) > 1 else dump.split("\n\n")
    lines = [own_line(_stack(thread)) for thread in threads]
    return next((shown(line) for line in reversed(lines) if line is not None), None)


def _stack(dump: str) -> Stack:
    found = map(_CRASH_FRAME.fullmatch, dump.splitlines())
    return tuple(Frame(match[1], int(match[2]), match[3]) for match in found if match)


def exit_status_of(
    process: Process, before: OomCounts, root: Path = Path("/"), *, peak_bytes: int | None = None
) -> ExitStatus:
    """All that can be found out about a rank that has ended.

    Args:
        process: it has a code.
        before: the counters from before the ranks were started.
        root: stands for the root of the file system.
        peak_bytes: its highest resident memory, where that is known.

    Raises:
        ValueError: it still runs.
    """
    if process.code is None or process.ended_at is None:
        raise ValueError(f"rank {process.rank} still runs")
    code, folder = process.code, process.folder
    oom = oom_between(before, read_oom_counts(root)) if code else None
    log = kernel_log_on(process.pid, root) if oom and process.pid else None
    heartbeat = read_heartbeat(folder)
    ends = [at for number, at in process.sent.items() if number in _THAT_END]
    return ExitStatus(
        rank=process.rank,
        host=socket.gethostname(),
        time=process.ended_at,
        code=code,
        how=in_words(code),
        error=read_record(folder) if code else None,
        oom="certain" if log else oom,
        oom_detail=log or "",
        crash_line=crash_line(folder) if code < 0 else None,
        last_lines=tuple(tail(folder, _LAST_LINES, "stderr")) if code else (),
        step=heartbeat.steps if heartbeat and heartbeat.steps else None,
        peak_bytes=peak_bytes,
        asked_to_end=min(ends, default=None),
    )

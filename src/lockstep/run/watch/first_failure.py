"""What failed first, and what only followed from it.

Pure: how the ranks ended goes in, one `FirstFailure` comes out. Three rules decide:

1. What Lockstep itself has ended is never a cause.
2. An error which says that a peer has gone, or did not come, is a consequence wherever another
   rank failed or left before it. A rank's sockets may close seconds before its process is gone,
   and that is noticed later still: "before" allows for `LATE_S`.
3. Of the rest the earliest comes first. Two on one host within `INSTANT_S`, or on two hosts (whose
   clocks differ) within `LATE_S`, cannot be put in order: all of them are named.

Which error texts are the consequence of another rank's end, and what to do about a failure, is
known from tables at the end.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.errors import EXIT_DEADLOCK, EXIT_LOST_RANK
from lockstep.run.watch.exit_status import ErrorRecord, ExitStatus, Interruption
from lockstep.run.watch.messages import Verdict, details
from lockstep.wording import format_ranks, group_by_key, join_first

FailureKind = Literal[
    "exception",
    "exit",  # with a code, and no exception was recorded
    "signal",
    "oom",  # the kernel's out-of-memory killer
    "left",  # exit code 0 while others still waited
    "deadlock",
    "stopped",  # by SIGSTOP or a debugger, while the others' collectives timed out
    "node_lost",
    "interrupted",  # the launcher was asked to end
]

INSTANT_S = 0.2
"""Below this the order of two ends on one host is not known: exits are noticed by polling."""
LATE_S = 5.0
"""How much later than its consequence a cause may be noticed, and how far clocks may differ."""

_MAX_MESSAGE_LINES = 8
_MAX_LAST_LINES = 5
_MOST_ALSO = 8
_MAX_LINE = 1000
"""Characters; a tensor or a whole file may be in a message."""


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The root cause of a run's end."""

    kind: FailureKind
    time: float
    headline: str
    ranks: tuple[int, ...] = ()
    """Those that failed so; several where they failed in the same way."""
    host: str = ""
    exit_code: int = EXIT_LOST_RANK
    """What the launcher ends with."""
    step: int | None = None
    line: str | None = None
    """The user's own line, `file:line: code`."""
    details: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Other failures that cannot be put before or after it."""
    consequences: tuple[str, ...] = ()
    ended_by_us: tuple[int, ...] = ()
    folder: str = ""


def first_failure(
    exits: Sequence[ExitStatus],
    *,
    hang: Verdict | None = None,
    interrupted: Interruption | None = None,
    lost_nodes: Sequence[FirstFailure] = (),
    folder: str = "",
) -> FirstFailure | None:
    """The root cause, with what followed from it; None where nothing failed.

    Args:
        exits: of all ranks that have ended, on all hosts.
        hang: the hang detector's verdict, where it was fatal.
        interrupted: the signal that the launcher was sent.
        lost_nodes: machines that have left the run, see `lost_node`.
        folder: where logs and snapshots are.
    """
    ours = [e for e in exits if e.ended_by_us or _got_the_same(e, interrupted)]
    own = [e for e in exits if e not in ours]
    followers = [e for e in own if e.code != 0 and _lost_peer_text(e)]
    roots = [_of_exit(e) for e in own if e.code != 0 and e not in followers]
    roots += lost_nodes
    if hang is not None and not any(root.time <= hang.found_at + INSTANT_S for root in roots):
        roots += _of_hang(hang, own)
    if interrupted is not None:
        roots.append(_of_interruption(interrupted))
    if followers and not any(_may_cause(root, f) for root in roots for f in followers):
        # Ranks that ended well while others still had use for them, or that stood still.
        missed = min(f.failed_at for f in followers)
        roots += [_of_exit(e) for e in own if e.code == 0 and e.time <= missed + LATE_S]
        roots += [_of_stopped(e, missed) for e in ours if e.stopped]
    unexplained = [f for f in followers if not any(_may_cause(root, f) for root in roots)]
    roots += [_of_exit(f, alone=True) for f in unexplained]
    if not roots:
        return None
    first, *rest = _folded(roots)
    explained = sorted((f for f in followers if f not in unexplained), key=lambda end: end.rank)
    texts = group_by_key((_lost_peer_text(end) or "", end.rank) for end in explained)
    followed = [f"{format_ranks(ranks)} ({text})" for text, ranks in texts.items()]
    also = []
    for root in rest:
        if _cannot_be_ordered(first, root):
            elsewhere = root.ranks and root.host not in ("", first.host)
            where = f" on host {root.host}" if elsewhere else ""
            at = f", {root.line}" if root.line else ""
            also.append(f"{_who(root)}{where}: {root.headline}{at}")
        elif root.kind != "interrupted":
            later = f"{root.time - first.time:.1f} s later"
            followed.append(f"{_who(root)} ({root.headline}, {later})")
    return replace(
        first,
        also=tuple(also),
        consequences=tuple(followed),
        ended_by_us=tuple(sorted(end.rank for end in ours)),
        folder=folder,
    )


def _got_the_same(end: ExitStatus, interrupted: Interruption | None) -> bool:
    """Whether the launcher's signal reached this rank as well (both may be in one terminal)."""
    if interrupted is None or end.time < interrupted.time - INSTANT_S:
        return False
    raised = end.error is not None and end.error.type == "KeyboardInterrupt"
    return raised or end.code in (-interrupted.signal, 128 + interrupted.signal)


def _lost_peer_text(end: ExitStatus) -> str | None:
    """The words by which an end shows itself to be a consequence."""
    if end.error is not None:
        return lost_peer([end.error.message, *end.error.chain])
    if end.code == -signal.SIGABRT:  # C++ in a thread of its own, such as NCCL's watchdog
        return lost_peer(end.last_lines)
    if end.printed is not None:
        return lost_peer(end.printed.text)
    return None


def _may_cause(root: FirstFailure, follower: ExitStatus) -> bool:
    # That a machine has gone is noticed by its silence, long after its connections have broken.
    return root.kind == "node_lost" or root.time <= follower.failed_at + LATE_S


def _of_exit(end: ExitStatus, *, alone: bool = False) -> FirstFailure:
    """An exit as a root; with code 0 it left others that still waited for it.

    Args:
        end: of a rank.
        alone: it says that a peer was lost, but none was.
    """
    error = end.error
    raised = error is not None and error.type != "SystemExit"
    kind: FailureKind = "exception" if raised else "exit" if end.code >= 0 else "signal"
    headline = error.headline if error else _how(end)
    details = _message_lines(error, end) if error is not None and raised else _last_lines(end)
    code = end.code if end.code >= 0 else EXIT_LOST_RANK
    if raised and end.code < 0:  # what a program that ends so, alone, ends with in a shell
        code = error.exit_code if error and error.exit_code > 0 else 128 - end.code
    killed = kind == "signal" and end.code == -signal.SIGKILL
    if killed and end.oom and not end.with_fork_server:
        kind, headline, details = "oom", _oom_headline(end), ()
    if end.code == 0:
        kind, code, details = "left", EXIT_LOST_RANK, ()
        headline = "left early: it ended with exit code 0 while others still waited for it"
    return FirstFailure(
        kind=kind,
        ranks=(end.rank,),
        host=end.host,
        time=end.failed_at,
        headline=headline,
        exit_code=code,
        step=end.step,
        line=_line(end),
        details=details,
        advice=_advice(kind, end, alone),
    )


def _of_stopped(end: ExitStatus, time: float) -> FirstFailure:
    """A rank that stood still until the others' collectives timed out."""
    return FirstFailure(
        kind="stopped",
        ranks=(end.rank,),
        host=end.host,
        time=time,
        headline="was stopped by a signal or a debugger, and the others waited for it in vain",
        step=end.step,
        advice=(_BY_KIND["stopped"],),
    )


def _line(end: ExitStatus) -> str | None:
    if end.error is not None:
        return end.error.line
    return end.printed.line if end.printed is not None else end.crash_line


def _how(end: ExitStatus) -> str:
    if end.code <= 0:
        return end.how
    without = f"{end.how}; no exception was recorded"
    if end.printed is None:
        return without
    return f"{without}. The last traceback in its standard error: {end.printed.headline}"


def _last_lines(end: ExitStatus) -> tuple[str, ...]:
    shown = end.last_lines[-_MAX_LAST_LINES:]
    if end.printed is not None and any(end.printed.headline in text for text in shown):
        return ()  # the headline of the failure has it
    return ("its last lines:", *(f"  {text}" for text in shown)) if shown else ()


def _message_lines(error: ErrorRecord, end: ExitStatus) -> tuple[str, ...]:
    """What of the message does not stand in the headline."""
    lines = [text.rstrip() for text in error.message.splitlines()[1:] if text.strip()]
    if error.from_lockstep:
        lines = [text for text in lines if not text.lstrip().startswith("at:")]
    elif len(lines) > _MAX_MESSAGE_LINES or "Traceback (most recent call last)" in error.message:
        lines = []  # all of it is in the folder
    if end.code < 0:
        lines.append(f"its process was then {end.how}")
    return tuple(lines)


def _oom_headline(end: ExitStatus) -> str:
    sure = "killed" if end.oom == "certain" else "probably killed"
    peak = "" if end.peak_bytes is None else f"; it had used {end.peak_bytes / 2**30:.1f} GiB"
    detail = f": {end.oom_detail}" if end.oom_detail else ""
    return f"{sure} by the kernel's out-of-memory killer (SIGKILL{peak}){detail}"


def lost_node(host: str, ranks: tuple[int, ...], time: float, reason: str = "") -> FirstFailure:
    """A machine whose launcher is no longer heard, as a root cause."""
    return FirstFailure(
        kind="node_lost",
        ranks=ranks,
        host=host,
        time=time,
        headline="the machine has left the run" + (f": {reason}" if reason else ""),
        advice=(_BY_KIND["node_lost"],),
    )


def _of_hang(hang: Verdict, own: Sequence[ExitStatus]) -> list[FirstFailure]:
    rows = tuple(line[2:] for line in details(hang))
    gone = [e for e in own if e.rank in hang.ranks and e.code == 0]
    if hang.kind in ("left", "lost") and gone:
        return [replace(_of_exit(e), details=rows, advice=hang.advice) for e in gone]
    kinds: dict[str, FailureKind] = {"deadlock": "deadlock", "left": "left"}
    kind = kinds.get(hang.kind, "signal")
    hosts = {row.host for row in hang.rows if row.rank in hang.ranks}
    return [
        FirstFailure(
            kind=kind,
            ranks=tuple(sorted(hang.ranks)),
            host=hosts.pop() if len(hosts) == 1 else "",
            time=hang.found_at,
            headline=hang.headline,
            exit_code=EXIT_DEADLOCK if kind == "deadlock" else EXIT_LOST_RANK,
            details=rows,
            advice=hang.advice,
        )
    ]


def _of_interruption(interrupted: Interruption) -> FirstFailure:
    name = signal.Signals(interrupted.signal).name
    key = " (Ctrl-C)" if interrupted.signal == signal.SIGINT else ""
    return FirstFailure(
        kind="interrupted",
        time=interrupted.time,
        headline=f"lockstep was sent {name}{key}",
        exit_code=128 + interrupted.signal,
    )


def _folded(roots: Iterable[FirstFailure]) -> list[FirstFailure]:
    """In the order of time, with those that are alike in one."""
    # Those that differ in numbers alone (a rank, an address, a size) are the same.
    groups = group_by_key(
        ((root.kind, re.sub(r"\d+", "#", root.headline), root.line), root)
        for root in sorted(roots, key=lambda root: (root.time, root.ranks))
    )
    return [
        replace(
            group[0],
            ranks=tuple(sorted({rank for root in group for rank in root.ranks})),
            host=join_first(sorted({root.host for root in group}), 4),
        )
        for group in groups.values()
    ]


def _cannot_be_ordered(first: FirstFailure, other: FirstFailure) -> bool:
    if "interrupted" in (first.kind, other.kind):
        return False
    return other.time - first.time <= (INSTANT_S if first.host == other.host else LATE_S)


def _who(root: FirstFailure) -> str:
    return format_ranks(root.ranks) if root.ranks else f"host {root.host}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}... (all of it is in the logs)"


def render(first: FirstFailure) -> str:
    """The block that closes a failed run; no newline at its end."""
    if first.kind == "interrupted":
        lines = [f"INTERRUPTED: {first.headline}"]
    else:
        where = f" on host{'s' if ',' in first.host else ''} {first.host}"
        where = where if first.host and first.ranks else ""
        step = "" if first.step is None else f", after step {first.step}"
        lines = [f"FIRST FAILURE: {_who(first)}{where}{step}"]
        lines += [f"  {_cut(text)}" for text in (first.headline, *first.details)]
    if first.line:
        lines.append(f"  {first.line}")
    if first.also:
        lines.append("at the same time (their order is not known):")
        lines += [f"  {_cut(text)}" for text in first.also[:_MOST_ALSO]]
        more = len(first.also) - _MOST_ALSO
        lines += [f"  and {more} more, which their logs tell"] * (more > 0)
    lines += [f"what to do: {text}" for text in first.advice]
    ended = [f"ended by lockstep: {format_ranks(first.ended_by_us)}"] * bool(first.ended_by_us)
    if followed := [*first.consequences, *ended]:
        lines.append(_cut("consequences: " + ", ".join(followed)))
    if first.folder:
        lines.append(f"traceback and logs: {first.folder}")
    return "\n".join(lines)


# What Gloo, NCCL, TCPStore, DDP and shared memory say when a peer has gone or has not come. Those
# that name the peer or the reason stand first: of several that match, the first is shown. A
# builtin OSError (`[Errno 32] Broken pipe`) is about a pipe or socket of the script's own.
_LOST_PEER = (
    r"Ranks? [\d, ]+ failed to pass monitoredBarrier",
    r"remote process exited or there was a network error",
    r"Connection closed by (?:remote )?peer",
    r"(?<!\] )[Cc]onnection reset by peer",
    r"Connection was likely closed",
    r"Timed out waiting \d+ms for (?:recv|send) operation",
    r"Watchdog caught collective operation timeout",
    r"Failed to check the .should dump. flag on TCPStore",
    r"(?<!\] )Broken pipe",
    r"recvValue failed",
    r"Application timeout caused pair closure",
    r"connectFullMesh failed",
    r"wait timeout after \d+ms",
    r"The client socket has timed out",
    r"(?:failed to connect|Failed to recv|Failed to send), .*0 bytes",
    r"[Ss]ocket [Tt]imeout",
    r"watchdog got stuck",
    r"Heartbeat monitor timed out",
    r"NCCL communicator (?:was|has been) aborted",
    r"Some NCCL operations have failed or timed out",
    r"ncclRemoteError",
    r"inconsistent 0 params",
    r"\bChildFailedError\b",
    r"rank 0 or its store went away during the join",
    r"its store answered once and then went away",
    r"ranks? [\d, -]+ did not come within [\d.]+ s",
    r"rank 0 \(.*\) came, but stopped answering",
    r"ranks? [\d, -]+ ended while this rank waited",
)


def lost_peer(texts: Iterable[str]) -> str | None:
    """The words by which an error shows itself to be the consequence of another rank's end.

    Whether it is one is for the caller to judge: where no rank has ended, a cable was pulled.

    Args:
        texts: messages of an exception and of those it was raised from, or lines of a log.

    Returns:
        None where there are no such words.
    """
    joined = "\n".join(texts)
    found = (re.search(pattern, joined) for pattern in _LOST_PEER)
    return next((words[0] for words in found if words), None)


_MEMORY = (
    "give the run more memory (look also at the container's or the job's limit), or use less: "
    "fewer DataLoader workers, a smaller --micro-batch-size, data that is read when it is needed"
)
_SHARED_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g, or --ipc=host), or use fewer DataLoader workers"
)
_BY_TEXT = {
    r"'ExactDDP' object (?:has no attribute|is not subscriptable)": (
        "on several processes world.prepare returns a wrapper: keep a name for the bare model, "
        "and use that for everything but calling it in training"
    ),
    r"CUDA out of memory|OutOfMemoryError|HIP out of memory": (
        "use a smaller --micro-batch-size (the global batch and the numbers stay the same), or "
        "activation checkpointing"
    ),
    r"file </torch_\S+>: (No space left|Success)|(?s:No space left.*_multiprocessing\.SemLock\()": (
        f"/dev/shm, shared memory, is full: {_SHARED_MEMORY}"
    ),
    r"Bus error|out of shared memory|No space left.*/dev/shm": _SHARED_MEMORY,
    r"Too many open files|received 0 items of ancdata": (
        "raise the limit of open files (ulimit -n 65536), close what the script has opened and no "
        "longer needs, or let DataLoader workers share tensors by "
        "torch.multiprocessing.set_sharing_strategy('file_system')"
    ),
    r"\bMemoryError\b|DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory": _MEMORY,
    r"Expected to have finished reduction in the prior iteration": (
        "parameters got no gradient in this step: leave them out of the model, use their "
        "output, or pass find_unused_parameters=True to DDP"
    ),
    r"Expected to mark a variable ready only once": (
        "use checkpoint(..., use_reentrant=False), and call each DDP model once per backward"
    ),
    r"EADDRINUSE|[Aa]ddress already in use": (
        "another program has this port: leave the port out, or give each run its own"
    ),
    r"Cannot re-initialize CUDA in forked subprocess": (
        "touch CUDA only in the ranks' own code, not in a Dataset, or start the DataLoader's "
        'workers with multiprocessing_context="spawn"'
    ),
    r"device-side assert triggered|CUDA error: (?:an illegal memory|unspecified launch)": (
        "a GPU says so later than the line that did it, often an index out of range: run it "
        "with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see that line"
    ),
    r"invalid device ordinal|Duplicate GPU detected": (
        "use the device of LOCAL_RANK, and at most as many processes as GPUs are visible"
    ),
    r"collective mismatch in your code|doesn't match expected size": (
        "the ranks came to this collective with tensors of other sizes or types, or to another "
        "collective: pad them, or exchange the sizes first"
    ),
    r"devices=\d+.* not match the world size": "start as many processes: lockstep run --nproc N",
    r"unrecognized arguments: --local[-_]rank": (
        "let the script read os.environ['LOCAL_RANK'] instead"
    ),
}
_BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: "it was sent by another process: a scheduler (time or memory limit), "
    "systemd-oomd, or a user; look at the job's and the machine's log",
    signal.SIGTERM: "it came from outside of this run: a scheduler that ends the job, or a user",
    signal.SIGSEGV: "a library of C or C++ code failed; crash.txt has the Python stack of every "
    "thread",
    signal.SIGABRT: "a library ended the process itself and says why at the end of its output; "
    "crash.txt has the Python stack of every thread",
    signal.SIGBUS: f"if shared memory was full: {_SHARED_MEMORY}; crash.txt has the Python stack",
    signal.SIGFPE: "crash.txt has the Python stack of every thread",
    signal.SIGILL: "a library was built for another processor; crash.txt has the Python stack",
    signal.SIGXCPU: "the limit of processor time (ulimit -t) was reached",
    signal.SIGXFSZ: "the limit of a file's size (ulimit -f) was reached",
}
_BY_KIND = {
    "stopped": "find out who has stopped it: a scheduler, a debugger, Ctrl-Z, or `kill -STOP`",
    "oom": _MEMORY,
    "left": "every rank must take the same number of steps and come to the same collectives: look "
    "for a return, a break or a shorter DataLoader on one rank, and for a collective (world.sum, "
    "checkpoint.save) that only one rank calls",
    "node_lost": "look at that machine: switched off, restarted, or its launcher was killed; "
    "and at the network between it and this one",
}
_NETWORK = (
    "no rank had ended before: look at the network between the machines (cable, firewall, "
    "interface), and whether a rank came to its collective within the timeout"
)


def _advice(kind: FailureKind, end: ExitStatus, alone: bool) -> tuple[str, ...]:
    """What to do about a rank's failure; empty where the failure says it itself."""
    error = end.error
    if error is not None:
        texts = [f"{error.type}: {error.message}", *error.chain]
    else:
        texts = [*(end.printed.text if end.printed else ()), *end.last_lines]
    # The system names no file where there is no room for a semaphore.
    semaphores = re.findall(r"_multiprocessing\.SemLock\(", error.traceback) if error else []
    joined = "\n".join([*texts, *semaphores])
    if kind == "exception" and end.oom and re.search(r"DataLoader worker|signal: Killed", joined):
        return (f"the kernel's out-of-memory killer ended a worker: {_MEMORY}",)
    if end.with_fork_server and end.oom:
        return (f"the kernel's out-of-memory killer has ended a process meanwhile: {_MEMORY}",)
    if kind in _BY_KIND:
        return (_BY_KIND[kind],)
    for pattern, what_to_do in _BY_TEXT.items():
        if re.search(pattern, joined):
            return (what_to_do,)
    if alone:
        return (_NETWORK,)
    by_signal = _BY_SIGNAL.get(-end.code) if kind == "signal" else None
    return () if by_signal is None else (by_signal,)

"""What failed first in a run, and what only followed from it.

An *end* says how one rank's process ended. A *root* is a failure that may be the cause of the run's
end. A *follower* is an end whose error says that a peer was lost. It is a consequence if another
rank failed or left before it; the end of that rank may have been noticed up to `CAUSE_MAX_DELAY_S`
later, as sockets close before a process is gone. What Lockstep itself has ended is never a cause.

Of the roots the earliest is the first failure. Two roots on one host within `SAME_TIME_S`, or on
two hosts (whose clocks differ) within `CAUSE_MAX_DELAY_S`, cannot be put in order: all of them are
named.

Pure functions: how the ranks ended goes in, one `FirstFailure` comes out. `lost_peer` knows the
texts of followers, `failure_advice` what to do, `failure_report` writes the result.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.errors import EXIT_DEADLOCK, EXIT_LOST_RANK
from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.exit_status import ExitStatus, Interruption
from lockstep.run.watch.failure_advice import BY_KIND, GIVEN_UP, advise
from lockstep.run.watch.lost_peer import find_lost_peer_text
from lockstep.run.watch.repeated_failure import failure_key
from lockstep.run.watch.verdict import Verdict
from lockstep.wording import format_ranks, join_first

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

SAME_TIME_S = 0.2
"""Two ends on one host that are closer than this cannot be ordered: ends are noticed by polling."""
CAUSE_MAX_DELAY_S = 5.0
"""How much later than its consequence a cause may be noticed, and how far clocks may differ."""

_MAX_MESSAGE_LINES = 8
_MAX_LAST_LINES = 5
_MAX_HOSTS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The root cause of a run's end."""

    kind: FailureKind
    time: float
    headline: str
    ranks: tuple[int, ...] = ()
    """The ranks that failed in this way."""
    host: str = ""
    exit_code: int = EXIT_LOST_RANK
    """The exit code of the launcher."""
    step: int | None = None
    line: str | None = None
    """The user's own line, `file:line: code`."""
    details: tuple[str, ...] = ()
    hang: Verdict | None = None
    """If it was a hang, what each rank did."""
    advice: tuple[str, ...] = ()
    at_the_same_time: tuple[str, ...] = ()
    """Other failures that cannot be put before or after it."""
    consequences: tuple[str, ...] = ()
    ended_by_lockstep: tuple[int, ...] = ()
    """The ranks that Lockstep has ended because of it."""
    key: str = ""
    """See `repeated_failure.failure_key`."""
    is_repeated: bool = False
    """True if an earlier attempt has failed in the same way in the same step."""
    given_up: tuple[str, ...] = ()
    """The ranks whose processes have not ended, each with the state of its process."""
    folder: str = ""
    """The folder of logs and snapshots."""

    @property
    def subject(self) -> str:
        """The ranks that failed, or the host if it had no ranks yet."""
        return format_ranks(self.ranks) if self.ranks else f"host {self.host}"

    @property
    def likeness(self) -> object:
        """A key that is equal for failures that differ only in numbers, such as an address."""
        headline_without_numbers = re.sub(r"\d+", "#", self.headline)
        return (self.kind, headline_without_numbers, self.line)


@dataclass
class _Ends:
    """How the ranks ended, by what that may mean for the first failure."""

    ended_by_lockstep: list[ExitStatus] = field(default_factory=list)
    """Ended by the launcher, or by the signal that the launcher itself was sent."""
    ended_well: list[ExitStatus] = field(default_factory=list)
    """Ended with exit code 0."""
    failed: list[ExitStatus] = field(default_factory=list)
    followers: list[ExitStatus] = field(default_factory=list)
    """Failed with an error that says that a peer was lost."""


def _sort_ends(exits: Sequence[ExitStatus], interrupted: Interruption | None) -> _Ends:
    """Sorts how the ranks ended by what it may mean for the first failure."""
    ends = _Ends()
    for end in exits:
        if end.ended_by_lockstep or _was_interrupted_too(end, interrupted):
            ends.ended_by_lockstep.append(end)
        elif end.code == 0:
            ends.ended_well.append(end)
        elif _lost_peer_text(end) is not None:
            ends.followers.append(end)
        else:
            ends.failed.append(end)

    return ends


def first_failure(
    exits: Sequence[ExitStatus],
    *,
    hang: Verdict | None = None,
    interrupted: Interruption | None = None,
    lost_nodes: Sequence[FirstFailure] = (),
    earlier_failures: Collection[str] = (),
    folder: str = "",
) -> FirstFailure | None:
    """Finds the root cause of a run's end, and what followed from it.

    Args:
        exits: the ends of all ranks that have ended, on all hosts.
        hang: the verdict on a hang, if it was fatal.
        interrupted: the signal that the launcher was sent.
        lost_nodes: machines that have left the run, see `lost_node`.
        earlier_failures: the keys of what failed first in earlier attempts.
        folder: the folder of logs and snapshots.

    Returns:
        None if nothing failed.
    """
    ends = _sort_ends(exits, interrupted)
    roots = [_root_of_exit(end) for end in ends.failed]
    roots += lost_nodes
    if hang is not None:
        # A hang that was found after a failure is a consequence of it.
        failed_before_hang = any(root.time <= hang.found_at + SAME_TIME_S for root in roots)
        if not failed_before_hang:
            roots += _roots_of_hang(hang, ends)

    if interrupted is not None:
        roots.append(_root_of_interruption(interrupted))

    # If no failure explains the lost peers, perhaps a rank has ended without an error.
    if ends.followers and not any(_has_cause(end, roots) for end in ends.followers):
        roots += _roots_without_error(ends)

    explained = [end for end in ends.followers if _has_cause(end, roots)]
    unexplained = [end for end in ends.followers if not _has_cause(end, roots)]

    # No rank was gone when these lost their connections: the connection itself is the failure.
    for end in unexplained:
        roots.append(_root_of_exit(end, no_peer_was_lost=True))

    if not roots:
        return None

    first = _first_of_roots(roots, explained)
    if first.at_the_same_time:  # another failure may have been the first
        first = replace(first, key="")

    given_up = _describe_given_up(exits)
    if given_up:
        first = replace(first, given_up=given_up, advice=(*first.advice, GIVEN_UP))

    return replace(
        first,
        ended_by_lockstep=tuple(sorted(end.rank for end in ends.ended_by_lockstep)),
        is_repeated=first.key in earlier_failures,
        folder=folder,
    )


def _first_of_roots(roots: Sequence[FirstFailure], followers: Sequence[ExitStatus]) -> FirstFailure:
    """Returns the earliest root, which also says what happened at the same time and after it.

    Args:
        roots: one or more failures, in any order.
        followers: the ends of ranks that have lost a peer because of one of these failures.
    """
    first, *later_roots = _merge_equal_roots(roots)
    at_the_same_time: list[str] = []
    consequences = _describe_followers(followers)

    # A later root is either too close to the first one to be put after it, or a consequence of it.
    for root in later_roots:
        if _cannot_be_ordered(first, root):
            at_the_same_time.append(_describe_root(root, first.host))
        elif root.kind != "interrupted":  # a later Ctrl-C is no consequence, and is not named
            delay = f"{root.time - first.time:.1f} s later"
            consequences.append(f"{root.subject} ({root.headline}, {delay})")

    return replace(
        first, at_the_same_time=tuple(at_the_same_time), consequences=tuple(consequences)
    )


def _was_interrupted_too(end: ExitStatus, interrupted: Interruption | None) -> bool:
    """True if the launcher's signal reached this rank as well.

    Ctrl-C goes to all processes of a terminal, the launcher and its ranks.
    """
    if interrupted is None:
        return False

    ended_before_signal = end.time < interrupted.time - SAME_TIME_S
    if ended_before_signal:
        return False
    if end.error is not None and end.error.type == "KeyboardInterrupt":
        return True

    # Killed by the signal, or ended with the exit code that stands for it in a shell.
    return end.code in (-interrupted.signal, 128 + interrupted.signal)


def _lost_peer_text(end: ExitStatus) -> str | None:
    """Returns the words of a rank's error that say that a peer was lost; None if none do.

    The error that the rank has recorded is the best source. Without one, its output is searched.
    """
    if end.error is not None:
        return find_lost_peer_text([end.error.message, *end.error.chain])
    if end.code == -signal.SIGABRT:
        # An exception in a C++ thread, such as NCCL's watchdog, aborts the process.
        return find_lost_peer_text(end.last_lines)
    if end.printed is not None:
        return find_lost_peer_text(end.printed.text)
    return None


def _has_cause(follower: ExitStatus, roots: Sequence[FirstFailure]) -> bool:
    """True if one of the roots may have caused the follower's end.

    A root is noticed after it has broken the follower's connections: a rank's end up to
    `CAUSE_MAX_DELAY_S` later; a lost machine, by its silence, much later.
    """
    for root in roots:
        if root.kind == "node_lost":
            return True
        if root.time <= follower.failed_at + CAUSE_MAX_DELAY_S:
            return True
    return False


def _cannot_be_ordered(first: FirstFailure, later: FirstFailure) -> bool:
    """True if two failures are so close in time that either may have been the first."""
    if first.kind == "interrupted" or later.kind == "interrupted":
        return False
    on_one_host = first.host == later.host
    max_difference_s = SAME_TIME_S if on_one_host else CAUSE_MAX_DELAY_S
    return later.time - first.time <= max_difference_s


def _merge_equal_roots(roots: Iterable[FirstFailure]) -> list[FirstFailure]:
    """Merges roots that differ only in numbers, such as a rank, an address or a size.

    A merged root has the time and the texts of the earliest one, and the ranks and hosts of all.

    Returns:
        The merged roots in the order of their times.
    """
    groups: dict[object, list[FirstFailure]] = defaultdict(list)
    for root in sorted(roots, key=lambda root: (root.time, root.ranks)):
        groups[root.likeness].append(root)

    merged = []
    for group in groups.values():
        ranks: set[int] = set()
        for root in group:
            ranks.update(root.ranks)

        hosts = sorted({root.host for root in group})
        earliest = group[0]
        merged.append(
            replace(
                earliest,
                ranks=tuple(sorted(ranks)),
                host=join_first(hosts, _MAX_HOSTS_NAMED),
            )
        )

    return merged


def _describe_root(root: FirstFailure, host_of_first: str) -> str:
    """Returns a text such as `rank 1 on host b: ValueError: no data, train.py:12: step()`.

    Args:
        root: the failure.
        host_of_first: the host of the first failure, which need not be named again.
    """
    text = root.subject
    if root.ranks and root.host not in ("", host_of_first):  # "": it is not known
        text += f" on host {root.host}"
    text += f": {root.headline}"
    if root.line:
        text += f", {root.line}"
    return text


def _describe_followers(followers: Sequence[ExitStatus]) -> list[str]:
    """Returns texts such as `ranks 0-3 (Connection closed by peer)`, one for each error."""
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for end in sorted(followers, key=lambda end: end.rank):
        text = _lost_peer_text(end) or ""  # it is what makes it a follower, so it is not None
        ranks_by_text[text].append(end.rank)
    return [f"{format_ranks(ranks)} ({text})" for text, ranks in ranks_by_text.items()]


def _describe_given_up(exits: Iterable[ExitStatus]) -> tuple[str, ...]:
    """Returns a text for each rank whose process has not ended, with its host."""
    texts = []
    for end in sorted(exits, key=lambda end: end.rank):
        if end.given_up:
            texts.append(f"rank {end.rank} on host {end.host}: {end.given_up}")
    return tuple(texts)


# --- The roots


def _root_of_exit(end: ExitStatus, *, no_peer_was_lost: bool = False) -> FirstFailure:
    """Returns the failure of a rank that ended. With code 0 it left others that waited for it.

    Args:
        end: how the rank ended.
        no_peer_was_lost: True if its error names a lost peer, but no rank had ended before.
    """
    error = end.error

    # `oom` says that the out-of-memory killer has ended some process. If the fork server has ended,
    # the kernel kills its ranks by SIGKILL, too: then it was not this rank that needed the memory.
    was_killed_for_memory = (
        end.code == -signal.SIGKILL and end.oom is not None and not end.with_fork_server
    )
    kind: FailureKind
    details: tuple[str, ...] = ()
    if end.code == 0:
        kind = "left"
        headline = "left early: it exited with code 0 while others were still waiting for it"
    elif error is not None and error.type != "SystemExit":  # `sys.exit` is an exit, see below
        kind = "exception"
        headline = error.headline
        details = _rest_of_message(error, end)
    elif was_killed_for_memory:
        kind = "oom"
        headline = _oom_headline(end)
    else:
        kind = "exit" if end.code > 0 else "signal"
        headline = error.headline if error is not None else _headline_without_error(end)
        details = _last_lines(end)

    return FirstFailure(
        kind=kind,
        ranks=(end.rank,),
        host=end.host,
        time=end.failed_at,
        headline=headline,
        exit_code=_launcher_exit_code(end),
        step=end.step,
        line=_user_line(end),
        details=details,
        advice=advise(kind, end, no_peer_was_lost=no_peer_was_lost),
        key=failure_key(end) if kind == "exception" else "",
    )


def _launcher_exit_code(end: ExitStatus) -> int:
    """Returns the exit code with which the launcher ends because of a rank's end."""
    if end.code > 0:  # the rank's own exit code
        return end.code
    if end.code == 0:  # it has left the others
        return EXIT_LOST_RANK

    # Otherwise a signal ended it, and its code is minus the number of the signal.
    signal_number = -end.code
    error = end.error
    if error is None or error.type == "SystemExit":  # it had raised no exception before
        return EXIT_LOST_RANK
    if error.exit_code > 0:  # the code with which it would have ended without the signal
        return error.exit_code

    # The exception is KeyboardInterrupt, for which Python ends itself by SIGINT. A shell reports an
    # end by a signal as 128 plus its number.
    return 128 + signal_number


def _roots_without_error(ends: _Ends) -> list[FirstFailure]:
    """Returns the failures of ranks that ended well, or were stopped, while others needed them.

    Args:
        ends: how the ranks ended. There must be followers: ranks that have lost a peer.
    """
    roots = []
    first_loss = min(end.failed_at for end in ends.followers)
    for end in ends.ended_well:
        # The end of a rank may be noticed some seconds after the others have lost it.
        if end.time <= first_loss + CAUSE_MAX_DELAY_S:
            roots.append(_root_of_exit(end))

    # A rank that is stopped keeps the others waiting until their timeout. Then Lockstep ends it.
    for end in ends.ended_by_lockstep:
        if end.stopped:
            roots.append(_root_of_stopped_rank(end, first_loss))

    return roots


def _root_of_stopped_rank(end: ExitStatus, time: float) -> FirstFailure:
    """Returns the failure of a rank that was stopped until the others' collectives timed out.

    Args:
        end: how the rank ended.
        time: when the first of the others failed. When it was stopped is not known.
    """
    return FirstFailure(
        kind="stopped",
        ranks=(end.rank,),
        host=end.host,
        time=time,
        headline="was stopped by a signal or a debugger, and the others timed out waiting for it",
        step=end.step,
        advice=(BY_KIND["stopped"],),
    )


def lost_node(host: str, ranks: tuple[int, ...], time: float, reason: str = "") -> FirstFailure:
    """Returns the failure of a machine whose launcher is no longer heard."""
    headline = "the machine has left the run"
    if reason:
        headline += f": {reason}"

    return FirstFailure(
        kind="node_lost",
        ranks=ranks,
        host=host,
        time=time,
        headline=headline,
        advice=(BY_KIND["node_lost"],),
    )


def _roots_of_hang(hang: Verdict, ends: _Ends) -> list[FirstFailure]:
    """Returns the failures that a verdict on a hang stands for.

    If the verdict is that ranks have left the others, and they have ended with exit code 0, each of
    their ends is a failure, with the verdict's details and advice. Otherwise the hang itself is the
    one failure.
    """
    if hang.kind in ("left", "lost"):
        left_early = []
        for end in ends.ended_well:
            if end.rank in hang.ranks:
                left_early.append(
                    replace(_root_of_exit(end), details=(), hang=hang, advice=hang.advice)
                )

        if left_early:
            return left_early

    kind: FailureKind
    if hang.kind == "deadlock":
        kind = "deadlock"
    elif hang.kind == "left":
        kind = "left"
    else:  # "lost": the others wait for a rank that has died
        kind = "signal"

    hosts = {row.host for row in hang.rows if row.rank in hang.ranks}
    failure = FirstFailure(
        kind=kind,
        ranks=tuple(sorted(hang.ranks)),
        host=hosts.pop() if len(hosts) == 1 else "",  # of several hosts, none is named
        time=hang.found_at,
        headline=hang.headline,
        exit_code=EXIT_DEADLOCK if kind == "deadlock" else EXIT_LOST_RANK,
        hang=hang,
        advice=hang.advice,
    )
    return [failure]


def _root_of_interruption(interrupted: Interruption) -> FirstFailure:
    """Returns the failure of a run whose launcher was asked to end by a signal."""
    name = signal.Signals(interrupted.signal).name
    if interrupted.signal == signal.SIGINT:
        name += " (Ctrl-C)"

    return FirstFailure(
        kind="interrupted",
        time=interrupted.time,
        headline=f"lockstep was sent {name}",
        exit_code=128 + interrupted.signal,
    )


# --- The texts of a root


def _user_line(end: ExitStatus) -> str | None:
    """Returns the user's own line, `file:line: code`, from the best source; None if there is none.

    The exception that the rank has recorded comes first, then a traceback in its output, then the
    stack that was written when a fatal signal came.
    """
    if end.error is not None:
        return end.error.line
    if end.printed is not None:
        return end.printed.line
    return end.crash_line


def _headline_without_error(end: ExitStatus) -> str:
    """Returns the headline for a rank that has recorded no exception."""
    if end.code <= 0:  # ended by a signal: `killed by SIGKILL`
        return end.how
    headline = f"{end.how}; no exception was recorded"
    if end.printed is not None:
        headline += f". The last traceback in its standard error: {end.printed.headline}"
    return headline


def _oom_headline(end: ExitStatus) -> str:
    """Returns `killed by the kernel's out-of-memory killer (SIGKILL; it had used 3.2 GiB)`."""
    killed = "killed" if end.oom == "certain" else "probably killed"
    signal_and_memory = "SIGKILL"
    if end.peak_bytes is not None:
        peak_gib = end.peak_bytes / 2**30
        signal_and_memory += f"; it had used {peak_gib:.1f} GiB"

    headline = f"{killed} by the kernel's out-of-memory killer ({signal_and_memory})"
    if end.oom_detail:
        headline += f": {end.oom_detail}"

    return headline


def _last_lines(end: ExitStatus) -> tuple[str, ...]:
    """Returns the end of the rank's output, below a heading of its own; empty if the rank's
    headline quotes a traceback that is there.
    """
    lines = end.last_lines[-_MAX_LAST_LINES:]
    if not lines:
        return ()
    if end.printed is not None and any(end.printed.headline in line for line in lines):
        return ()
    return ("its last lines:", *(f"  {line}" for line in lines))


def _rest_of_message(error: ErrorRecord, end: ExitStatus) -> tuple[str, ...]:
    """Returns the lines of an exception's message after the first, which is in the headline.

    They are left out if they are many or contain a traceback, except for Lockstep's own errors.
    A last line is added if a signal ended the process after the exception.
    """
    lines = [line.rstrip() for line in error.message.splitlines()[1:] if line.strip()]
    has_traceback = "Traceback (most recent call last)" in error.message
    if error.from_lockstep:
        # Rank and line, which Lockstep's errors end with, are shown anyway.
        lines = [line for line in lines if not line.lstrip().startswith("at:")]
    elif len(lines) > _MAX_MESSAGE_LINES or has_traceback:
        lines = []  # they are in the logs

    if end.code < 0:
        lines.append(f"its process was then {end.how}")

    return tuple(lines)

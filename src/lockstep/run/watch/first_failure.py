"""Finds the failure that ended a run, and tells it apart from the failures that followed from it.

When one rank of a run fails, the others usually fail too, because they lose their connection to it.
A *root* is a failure that may have ended the run; the earliest root is the *first failure*. A
*follower* is a rank whose error says that it lost a peer (`lost_peer` knows these messages), or
that another rank told it of an error (`LockstepError.of_rank`). The functions are pure: they take
how each rank ended (`ExitStatus`) and return one `FirstFailure`.

A follower is a consequence if a root came before it, or was noticed up to `CAUSE_MAX_DELAY_S`
later: sockets close before a process is gone. Ranks that Lockstep ended itself are never a root.

If there is no such root, a connection has failed, or a rank was waited for in vain. A rank that
gave up waiting ends, and closes its connections: ranks that lost a connection are consequences.

Two roots cannot be put in order if they are within `SAME_TIME_S` on one host, or within
`CAUSE_MAX_DELAY_S` on two hosts, whose clocks differ. Then all of them are named together.

`failure_advice` knows what to do about a failure, and `failure_report` writes the result.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.errors import EXIT_DEADLOCK, EXIT_LOST_RANK, EXIT_SIGNAL, RanksDifferError
from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.exit_status import ExitStatus, Interruption
from lockstep.run.watch.failure_advice import ADVICE_BY_KIND, NOT_ENDED, advise
from lockstep.run.watch.lost_peer import LostPeer, find_lost_peer
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

_RANKS_DIFFER = RanksDifferError.__name__
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
    simultaneous_failures: tuple[FirstFailure, ...] = ()
    """Other failures that cannot be put before or after it."""
    later_failures: tuple[FirstFailure, ...] = ()
    """Failures that came after it, and are taken for consequences."""
    consequences: tuple[str, ...] = ()
    ended_by_lockstep: tuple[int, ...] = ()
    """The ranks that Lockstep has ended because of it."""
    is_from_lockstep: bool = False
    """True for an error of Lockstep's, whose texts may be translated; others stay as they are."""
    key: str = ""
    """See `repeated_failure.failure_key`."""
    is_repeated: bool = False
    """True if an earlier attempt has failed in the same way in the same step."""
    may_be_temporary: bool = True
    """False if it comes again in each attempt; see `LockstepError.may_be_temporary`."""
    not_ended: tuple[str, ...] = ()
    """The ranks whose processes have not ended, each with the state of its process."""
    folder: str = ""
    """The folder of logs and snapshots."""

    @property
    def subject(self) -> str:
        """The ranks that failed, or the host if it had no ranks yet."""
        return format_ranks(self.ranks) if self.ranks else f"host {self.host}"

    @property
    def likeness(self) -> object:
        """A key for grouping: equal for failures that differ only in numbers, such as an
        address.
        """
        headline_without_numbers = re.sub(r"\d+", "#", self.headline)
        return (self.kind, headline_without_numbers, self.line, self.exit_code)


@dataclass
class _Ends:
    """The ends of all ranks, sorted by what they may mean for the first failure."""

    ended_by_lockstep: list[ExitStatus] = field(default_factory=list)
    """Ended by the launcher, or by the signal that the launcher itself was sent."""
    ended_well: list[ExitStatus] = field(default_factory=list)
    """Ended with exit code 0."""
    failed: list[ExitStatus] = field(default_factory=list)
    followers: list[ExitStatus] = field(default_factory=list)
    """Failed with an error that says that a peer was lost, or that another rank has failed."""


def _sort_ends(exits: Sequence[ExitStatus], interrupted: Interruption | None) -> _Ends:
    """Sorts the ends of the ranks by what they may mean for the first failure."""
    ends = _Ends()
    for end in exits:
        # A rank did not fail by itself if Lockstep ended it. Nor did it if a signal such as Ctrl-C
        # was sent to both the rank and the launcher.
        if end.ended_by_lockstep or _was_interrupted_too(end, interrupted):
            ends.ended_by_lockstep.append(end)
        elif end.code == 0:
            ends.ended_well.append(end)
        elif _is_follower(end) or _differs_from_rank_with_error(end, exits):
            # It lost another rank; or another rank told it of an error; or another rank, with an
            # error, called another collective than this one.
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
    """Finds the failure that ended a run, and what followed from it.

    Args:
        exits: the ends of all ranks that have ended, on all hosts.
        hang: the verdict on a hang, if it was fatal.
        interrupted: the signal that asked the launcher to end, if there was one.
        lost_nodes: the failures of machines that have left the run, see `lost_node`.
        earlier_failures: the keys of the first failures of earlier attempts.
        folder: the folder of logs and snapshots.

    Returns:
        The first failure, or None if nothing failed.
    """
    ends = _sort_ends(exits, interrupted)
    roots = _failures_without_lost_peer(ends, hang, interrupted, lost_nodes)

    # If no failure explains why ranks lost a peer, a rank may have ended without an error.
    lost_a_peer = [end for end in ends.followers if not _is_told_of_other_rank(end)]
    some_follower_has_cause = any(_has_cause(end, roots) for end in ends.followers)
    if lost_a_peer and not some_follower_has_cause:
        first_peer_lost_at = min(end.failed_at for end in lost_a_peer)
        roots += _roots_without_error(ends, first_peer_lost_at)

    # A follower that no root explains is a failure itself: it waited in vain, or its connection
    # broke.
    consequences, unexplained_failures = _explain_followers(ends.followers, roots)
    roots += unexplained_failures
    if not roots:
        return None

    first = _first_of_roots(roots, consequences)
    if first.simultaneous_failures:
        # Another failure may have been the first, so this one cannot be recognized in a later
        # attempt.
        first = replace(first, key="")

    not_ended = _describe_not_ended(exits)
    if not_ended:
        first = replace(first, not_ended=not_ended, advice=(*first.advice, NOT_ENDED))

    return replace(
        first,
        ended_by_lockstep=tuple(sorted(end.rank for end in ends.ended_by_lockstep)),
        is_repeated=first.key in earlier_failures,
        folder=folder,
    )


def _failures_without_lost_peer(
    ends: _Ends,
    hang: Verdict | None,
    interrupted: Interruption | None,
    lost_nodes: Sequence[FirstFailure],
) -> list[FirstFailure]:
    """Returns the failures that are not errors about another rank.

    These are the errors of ranks that are no followers, lost machines, a hang, and the signal that
    ended the launcher. The arguments are those of `first_failure`.
    """
    failures = [_root_of_exit(end) for end in ends.failed]
    failures += lost_nodes

    if hang is not None:
        # A hang that was found after a failure, or at about the same time, is a consequence of it.
        latest_cause_at = hang.found_at + SAME_TIME_S
        has_cause = any(failure.time <= latest_cause_at for failure in failures)
        if not has_cause:
            failures += _roots_of_hang(hang, ends)

    if interrupted is not None:
        failures.append(_root_of_interruption(interrupted))
    return failures


def _explain_followers(
    followers: Sequence[ExitStatus], roots: Sequence[FirstFailure]
) -> tuple[list[ExitStatus], list[FirstFailure]]:
    """Tells the followers whose errors a failure explains from those that are failures themselves.

    For example, without any root, rank 1 gave up waiting at 10 s, and rank 2 lost its connection at
    11 s. Rank 1 waited in vain, so it is a failure. It closed its connections when it ended, so the
    end of rank 2 is a consequence.

    Args:
        followers: the ranks whose errors say that a peer was lost, or that another rank has failed.
        roots: the failures that are known so far.

    Returns:
        The ends that are consequences, and the failures of the other ranks.
    """
    explained = [end for end in followers if _has_cause(end, roots)]
    unexplained = [end for end in followers if not _has_cause(end, roots)]

    # 1. A rank that gave up waiting while no other rank was gone is a failure itself.
    gave_up = [end for end in unexplained if not _lost_connection(end)]
    own_failures = [_root_of_unexplained(end) for end in gave_up]

    # 2. A rank that lost a connection may have lost it to a rank that gave up: each of those closed
    # its connections when it ended.
    lost_connection = [end for end in unexplained if _lost_connection(end)]
    possible_causes = [*roots, *own_failures]
    for end in lost_connection:
        if _has_cause(end, possible_causes):
            explained.append(end)
        else:
            own_failures.append(_root_of_unexplained(end))

    return explained, own_failures


def _first_of_roots(roots: Sequence[FirstFailure], followers: Sequence[ExitStatus]) -> FirstFailure:
    """Picks the earliest root, and adds what happened at the same time and what followed from it.

    Args:
        roots: one or more failures, in any order.
        followers: the ends of ranks that lost a peer because of one of these failures.
    """
    first, *later_roots = _merge_and_sort(roots)  # the earliest comes first
    consequences = [*first.consequences, *_describe_followers(followers)]

    # If the user has pressed Ctrl-C after the failure, that is not mentioned.
    other_roots = [root for root in later_roots if root.kind != "interrupted"]

    # Some of them happened so close to the first failure that they may have come before it.
    simultaneous_roots = []
    roots_after_first = []
    for root in other_roots:
        if _cannot_be_ordered(first, root):
            simultaneous_roots.append(root)
        else:
            roots_after_first.append(root)

    # A restart may succeed if one of these failures may pass.
    may_be_temporary = first.may_be_temporary or any(
        root.may_be_temporary for root in simultaneous_roots
    )
    return replace(
        first,
        simultaneous_failures=tuple(simultaneous_roots),
        later_failures=tuple(roots_after_first),
        consequences=tuple(consequences),
        may_be_temporary=may_be_temporary,
    )


def _was_interrupted_too(end: ExitStatus, interrupted: Interruption | None) -> bool:
    """Returns True if a rank was ended by the same signal as the launcher.

    Ctrl-C, for example, is sent to every process of a terminal: to the launcher and to its ranks.
    """
    if interrupted is None:
        return False
    ended_before_signal = end.time < interrupted.time - SAME_TIME_S
    if ended_before_signal:
        return False

    raised_keyboard_interrupt = end.error is not None and end.error.type == "KeyboardInterrupt"
    if raised_keyboard_interrupt:
        return True

    # -2 says that the process was killed by signal 2; a shell reports the same as 128 + 2.
    return end.code in (-interrupted.signal, EXIT_SIGNAL + interrupted.signal)


def _is_follower(end: ExitStatus) -> bool:
    """Returns True if a rank's error says that a peer was lost, or that another rank has failed."""
    return _is_told_of_other_rank(end) or _lost_peer(end) is not None


def _follower_text(end: ExitStatus) -> str:
    """Returns what a follower's error says of the failure of another rank.

    - Another rank told it of an error: "told of the error of rank 1".
    - It lost a peer: the text of `LostPeer`.
    - Another rank called a collective because of an error (`_differs_from_rank_with_error`): "told
      that the ranks called different collectives".
    """
    if _is_told_of_other_rank(end):
        assert end.error is not None
        return f"told of the error of rank {end.error.of_rank}"

    lost_peer = _lost_peer(end)
    if lost_peer is not None:
        return lost_peer.text

    return "told that the ranks called different collectives"


def _is_told_of_other_rank(end: ExitStatus) -> bool:
    """Returns True if a rank only raised what another rank has told all ranks of."""
    return end.error is not None and end.error.of_rank not in (None, end.rank)


def _says_that_ranks_differ(end: ExitStatus) -> bool:
    """Returns True if a rank's error says that the ranks called different collectives."""
    return end.error is not None and end.error.type == _RANKS_DIFFER


def _differs_from_rank_with_error(end: ExitStatus, exits: Sequence[ExitStatus]) -> bool:
    """Returns True if a rank only failed as another one called a collective because of an error.

    For example, rank 1 raises a ValueError and calls a collective in `finally`, while rank 0 calls
    another collective. Both get a RanksDifferError. It is all that rank 0 has, so that rank is a
    follower. The record of rank 1 is of the ValueError.
    """
    if not _says_that_ranks_differ(end):
        return False
    return any(_called_collective_because_of_error(other) for other in exits)


def _called_collective_because_of_error(end: ExitStatus) -> bool:
    """Returns True if a rank got a RanksDifferError while it handled an exception of its own.

    Its record has, for example, the type "ValueError" and, in `raised_meanwhile`, the text
    "RanksDifferError: ...".
    """
    if end.error is None or end.error.type == _RANKS_DIFFER:
        return False
    return any(text.startswith(_RANKS_DIFFER) for text in end.error.raised_meanwhile)


def _lost_connection(end: ExitStatus) -> bool:
    """Returns True if a rank's error says that a connection is gone, and not only a timeout."""
    lost_peer = _lost_peer(end)
    return lost_peer is not None and not lost_peer.timed_out


def _lost_peer(end: ExitStatus) -> LostPeer | None:
    """Returns what a rank's error says of a lost peer, or None if it says nothing of one.

    The exception that the rank recorded is the best source. Without one, its standard error is
    searched: the last lines (`last_lines`) if the process was aborted, and otherwise the last
    traceback in it (`printed_traceback`).
    """
    if end.error is not None:
        return find_lost_peer([end.error.message, *end.error.chain])

    # An exception in a C++ thread, such as NCCL's watchdog, aborts the process.
    was_aborted = end.code == -signal.SIGABRT
    if was_aborted:
        return find_lost_peer(end.last_lines)

    if end.printed_traceback is not None:
        return find_lost_peer(end.printed_traceback.message_lines)
    return None


def _has_cause(follower: ExitStatus, roots: Sequence[FirstFailure]) -> bool:
    """Returns True if one of the roots may be the reason why a follower lost its peer.

    The root need not come first: a rank's connections break before its process is gone, so its end
    may be noticed up to `CAUSE_MAX_DELAY_S` later. A lost machine is noticed only by its silence,
    which takes much longer, so it explains every follower.
    """
    for root in roots:
        if root.kind == "node_lost":
            return True
        if root.time <= follower.failed_at + CAUSE_MAX_DELAY_S:
            return True
    return False


def _cannot_be_ordered(first: FirstFailure, later: FirstFailure) -> bool:
    """Returns True if two failures are so close in time that either may have been the first."""
    if first.kind == "interrupted" or later.kind == "interrupted":
        return False
    on_one_host = first.host == later.host
    max_difference_s = SAME_TIME_S if on_one_host else CAUSE_MAX_DELAY_S
    return later.time - first.time <= max_difference_s


def _merge_and_sort(roots: Iterable[FirstFailure]) -> list[FirstFailure]:
    """Merges roots that differ only in numbers, such as a rank, an address or a size.

    A merged root has the time and the texts of the earliest one, and the ranks and hosts of all.

    Returns:
        The merged roots, the earliest first.
    """
    # As the roots are sorted by time, the earliest of each group is its first, and the group with
    # the earliest root of all comes first.
    similar_roots: dict[object, list[FirstFailure]] = defaultdict(list)
    for root in sorted(roots, key=lambda root: (root.time, root.ranks)):
        similar_roots[root.likeness].append(root)

    merged = []
    for group in similar_roots.values():
        earliest = group[0]
        ranks: set[int] = set()
        for root in group:
            ranks.update(root.ranks)
        hosts = sorted({root.host for root in group})

        merged.append(
            replace(
                earliest,
                ranks=tuple(sorted(ranks)),
                host=join_first(hosts, _MAX_HOSTS_NAMED),
            )
        )
    return merged


def _describe_followers(followers: Sequence[ExitStatus]) -> list[str]:
    """Describes the ranks that lost a peer, one text for each error that they got.

    An example is `ranks 0-3 (Connection closed by peer)`.
    """
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for end in sorted(followers, key=lambda end: end.rank):
        ranks_by_text[_follower_text(end)].append(end.rank)
    return [f"{format_ranks(ranks)} ({text})" for text, ranks in ranks_by_text.items()]


def _describe_not_ended(exits: Iterable[ExitStatus]) -> tuple[str, ...]:
    """Describes each rank whose process has not ended, with its host."""
    texts = []
    for end in sorted(exits, key=lambda end: end.rank):
        if end.given_up:
            texts.append(f"rank {end.rank} on host {end.host}: {end.given_up}")
    return tuple(texts)


# --- The roots


def _root_of_unexplained(end: ExitStatus) -> FirstFailure:
    """Turns the end of a follower into a failure, since no other rank had failed before it."""
    # The rank that it was told of has gone on, so its own connection is not at fault.
    return _root_of_exit(end, network_failed=not _is_told_of_other_rank(end))


def _root_of_exit(end: ExitStatus, *, network_failed: bool = False) -> FirstFailure:
    """Turns the end of one rank into a failure, with its headline and advice.

    A rank that ended with exit code 0 failed too if others were still waiting for it.

    Args:
        end: how the rank ended.
        network_failed: True if the rank lost its connection to another rank, but no other rank had
            ended before.
    """
    error = end.error
    raised_exception = error is not None and error.type != "SystemExit"  # `sys.exit` is an exit

    # `end.oom` only says that the out-of-memory killer ended some process. If that was the fork
    # server, the kernel kills all of its ranks by SIGKILL, and none of them has to be the cause.
    was_killed_for_memory = (
        end.code == -signal.SIGKILL and end.oom is not None and not end.with_fork_server
    )

    kind: FailureKind
    details: tuple[str, ...] = ()
    if end.code == 0:
        kind = "left"
        headline = "left early: it exited with code 0 while others were still waiting for it"
    elif error is not None and raised_exception:
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

    # Only an exception says whether it would come again; any other failure may pass.
    comes_again = kind == "exception" and error is not None and not error.may_be_temporary
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
        consequences=_own_consequences(end),
        advice=advise(kind, end, network_failed=network_failed),
        is_from_lockstep=error is not None and error.from_lockstep,
        key=failure_key(end) if kind == "exception" else "",
        may_be_temporary=not comes_again,
    )


def _launcher_exit_code(end: ExitStatus) -> int:
    """Returns the launcher's own exit code for a run that ended because of this rank's end.

    A code below 0 says that a signal has ended the rank: -9 is SIGKILL, and -2 is SIGINT.

        code   exception before          result
        3      any or none               3
        0      any or none               EXIT_LOST_RANK: it left while others were waiting for it
        -9     none, or a SystemExit     EXIT_LOST_RANK
        -9     ValueError                1, as if the signal had not come while the rank was ending
        -2     KeyboardInterrupt         130, as in a shell: Python then ends itself by SIGINT
        -9     KeyboardInterrupt         137
    """
    if end.code > 0:
        return end.code
    if end.code == 0:
        return EXIT_LOST_RANK

    error = end.error
    if error is None or error.type == "SystemExit":  # `sys.exit` is no failure
        return EXIT_LOST_RANK

    # Python gives any exception an exit code, usually 1, except for KeyboardInterrupt: after that
    # one it ends itself by a signal.
    if error.exit_code > 0:
        return error.exit_code
    signal_number = -end.code
    return EXIT_SIGNAL + signal_number


def _roots_without_error(ends: _Ends, first_peer_lost_at: float) -> list[FirstFailure]:
    """Returns the failures of ranks that reported no error, but without which the others failed.

    These are ranks that ended with exit code 0, and ranks that were suspended.

    Args:
        ends: how the ranks ended.
        first_peer_lost_at: when the first rank lost a peer.
    """
    roots = []

    # If a rank ended before others lost a peer, it is the peer that they lost. Its end may have
    # been noticed some seconds late.
    for end in ends.ended_well:
        if end.time <= first_peer_lost_at + CAUSE_MAX_DELAY_S:
            roots.append(_root_of_exit(end))

    # A suspended rank keeps the others waiting until they time out. Then Lockstep ends it.
    for end in ends.ended_by_lockstep:
        if end.was_suspended:
            roots.append(_root_of_suspended_rank(end, first_peer_lost_at))
    return roots


def _root_of_suspended_rank(end: ExitStatus, time: float) -> FirstFailure:
    """Returns the failure of a rank that was suspended, by SIGSTOP or a debugger, for too long.

    Args:
        end: how the rank ended.
        time: when the first of the others failed. When the rank was suspended is not known.
    """
    return FirstFailure(
        kind="stopped",
        ranks=(end.rank,),
        host=end.host,
        time=time,
        headline="was stopped by a signal or a debugger, and the others timed out waiting for it",
        step=end.step,
        advice=(ADVICE_BY_KIND["stopped"],),
    )


def lost_node(host: str, ranks: tuple[int, ...], time: float, reason: str = "") -> FirstFailure:
    """Returns the failure of a machine whose launcher can no longer be reached."""
    headline = "the machine has left the run"
    if reason:
        headline += f": {reason}"

    return FirstFailure(
        kind="node_lost",
        ranks=ranks,
        host=host,
        time=time,
        headline=headline,
        advice=(ADVICE_BY_KIND["node_lost"],),
    )


def _roots_of_hang(hang: Verdict, ends: _Ends) -> list[FirstFailure]:
    """Turns the verdict on a hang into failures.

    If the verdict says that some ranks are gone, and these ranks ended with exit code 0, there is
    one failure for each of them. Otherwise the hang itself is the one failure.
    """
    if hang.kind in ("left", "lost"):
        failures_of_ranks_that_left = []
        for end in ends.ended_well:
            if end.rank in hang.ranks:
                # The verdict on the hang says more than the details of an end with exit code 0,
                # such as the rank's last lines.
                failure = replace(_root_of_exit(end), details=(), hang=hang, advice=hang.advice)
                failures_of_ranks_that_left.append(failure)
        if failures_of_ranks_that_left:
            return failures_of_ranks_that_left
    return [_root_of_hang(hang)]


def _root_of_hang(hang: Verdict) -> FirstFailure:
    """Turns the verdict on a hang into one failure."""
    kind: FailureKind
    if hang.kind == "deadlock":
        kind = "deadlock"
        exit_code = EXIT_DEADLOCK
    elif hang.kind == "left":
        kind = "left"
        exit_code = EXIT_LOST_RANK
    else:  # "lost": a rank has died. As it has reported no error, a signal has probably ended it.
        kind = "signal"
        exit_code = EXIT_LOST_RANK

    hosts = {row.host for row in hang.rows if row.rank in hang.ranks}
    return FirstFailure(
        kind=kind,
        ranks=tuple(sorted(hang.ranks)),
        host=hosts.pop() if len(hosts) == 1 else "",  # one failure cannot name several hosts
        time=hang.found_at,
        headline=hang.headline,
        exit_code=exit_code,
        hang=hang,
        advice=hang.advice,
        key=hang.key,
    )


def _root_of_interruption(interrupted: Interruption) -> FirstFailure:
    """Returns the failure of a run whose launcher was asked to end by a signal, such as Ctrl-C."""
    name = signal.Signals(interrupted.signal).name
    if interrupted.signal == signal.SIGINT:
        name += " (Ctrl-C)"

    return FirstFailure(
        kind="interrupted",
        time=interrupted.time,
        headline=f"lockstep was sent {name}",
        exit_code=EXIT_SIGNAL + interrupted.signal,
    )


# --- The texts of a root


def _user_line(end: ExitStatus) -> str | None:
    """Returns the line of the user's script at which a rank ended, as `file:line: code`.

    The best source is the exception that the rank recorded, then a traceback in its output, then
    the stack that was written when a fatal signal arrived.

    Returns:
        The line, or None if it is not known.
    """
    if end.error is not None:
        return end.error.line
    if end.printed_traceback is not None:
        return end.printed_traceback.line
    return end.crash_line


def _headline_without_error(end: ExitStatus) -> str:
    """Returns the headline for a rank that recorded no exception."""
    if end.code <= 0:  # ended by a signal: `killed by SIGKILL`
        return end.how
    headline = f"{end.how}; no exception was recorded"
    if end.printed_traceback is not None:
        headline += f". The last traceback in its standard error: {end.printed_traceback.headline}"
    return headline


def _oom_headline(end: ExitStatus) -> str:
    """Writes the headline for a rank that was killed because the machine ran out of memory.

    For example `killed by the kernel's out-of-memory killer (SIGKILL; it had used 3.2 GiB)`.
    """
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
    """Returns the last lines of a rank's output, below a heading.

    Returns:
        The lines. Empty if there are none, or if the headline already quotes a traceback from them.
    """
    lines = end.last_lines[-_MAX_LAST_LINES:]
    if not lines:
        return ()
    if end.printed_traceback is not None and any(
        end.printed_traceback.headline in line for line in lines
    ):
        return ()
    return ("its last lines:", *(f"  {line}" for line in lines))


def _own_consequences(end: ExitStatus) -> tuple[str, ...]:
    """Describes the exceptions that a rank raised while it handled the one that it failed by."""
    if end.error is None:
        return ()
    texts = []
    for later in reversed(end.error.raised_meanwhile):
        texts.append(f"rank {end.rank} itself, while handling it ({later})")
    return tuple(texts)


def _rest_of_message(error: ErrorRecord, end: ExitStatus) -> tuple[str, ...]:
    """Returns the lines about an exception that follow its headline.

    These are the lines of its message after the first one (`_message_lines_to_show`); the exception
    that the script was handling, if any; and the signal that ended the process after it, if any.
    """
    lines = _message_lines_to_show(error)
    if error.handled:
        lines.append(f"while handling {error.handled}")
    if end.code < 0:  # `end.how` is "killed by SIGKILL", for example
        lines.append(f"its process was then {end.how}")
    return tuple(lines)


def _message_lines_to_show(error: ErrorRecord) -> list[str]:
    """Returns the lines of an exception's message after the first one, which is in the headline.

    Long messages, and messages that contain a traceback, are left out: they are in the logs. The
    messages of Lockstep's own errors are always kept.
    """
    lines = [line.rstrip() for line in error.message.splitlines()[1:] if line.strip()]
    if error.from_lockstep:
        # The line "at: ..." names the rank and the user's line, which are shown anyway.
        return [line for line in lines if not line.lstrip().startswith("at:")]

    has_traceback = "Traceback (most recent call last)" in error.message
    is_too_long = len(lines) > _MAX_MESSAGE_LINES
    return [] if is_too_long or has_traceback else lines

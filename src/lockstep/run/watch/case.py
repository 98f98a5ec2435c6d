"""Holds what is known about a run that makes no progress, and puts verdicts on it together.

A `Case` has the activity of each rank ("waits for other ranks", "works on") and the graph of which
rank waits for which. The *roots* are the ranks that others wait for but that do not wait
themselves: the cause is looked for there first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lockstep.run.watch.activity import Activity, Kind
from lockstep.run.watch.call_table import DEFAULT_GROUP, CallTable, Mismatch
from lockstep.run.watch.messages import describe
from lockstep.run.watch.snapshot import CollectiveCall, RankState
from lockstep.run.watch.stacks import is_at_exit
from lockstep.run.watch.verdict import Row, Verdict, VerdictKind
from lockstep.run.watch.wait_graph import WaitGraph
from lockstep.wording import conjugate, format_ranks

ADVICE: dict[VerdictKind, str] = {
    "stopped": "find out who has stopped it: a scheduler, a debugger, Ctrl-Z, or `kill -STOP`; "
    "`kill -CONT` lets it go on",
    "left": "every rank must come to every collective: look why it returned early (fewer batches, "
    "a `return`, a condition on the rank)",
    "lost": "look at its own output first: the others wait for it as a consequence",
    "loading": "look at its DataLoader: slow storage, a worker that is stuck",
    "gil": "wait if the call in its line may take that long; a library that holds the lock can "
    "often be told to use a process of its own",
    "unknown": "`py-spy dump` shows its stack. A rank that has executed another program in its "
    "place (`os.execv`) cannot be asked for it; one that sleeps in C while a thread holds Python's "
    "lock is not asked, as its call could be cut short",
    "transport": "look at the network between the machines (interface, firewall, cable) or at the "
    "GPUs; for broadcast, reduce, gather and scatter, look whether all ranks name the same rank",
}
"""The advice for each kind of verdict. For kinds that are missing, the user can only wait."""


@dataclass(frozen=True)
class Case:
    """What is known about a run that makes no progress."""

    activities: Mapping[int, Activity]
    table: CallTable
    graph: WaitGraph
    since_call_s: Mapping[int, float]
    """The seconds since each waiting rank made the call that it waits in, where known."""
    waited_s: float
    """The seconds for which the run has made no progress."""
    nothing_in_transit: bool
    """True if no data is in transit between any two ranks. Only then is it certain that ranks in a
    send or receive wait in vain."""

    @property
    def since_last_call_s(self) -> float:
        """The seconds since the last waiting rank made its call, which was progress too."""
        return min(self.since_call_s.values(), default=self.waited_s)

    @property
    def waiting(self) -> dict[int, Activity]:
        """The ranks that wait for other ranks."""
        return {rank: self.activities[rank] for rank in self.graph.waits_for}

    @property
    def alive(self) -> dict[int, Activity]:
        """The ranks that have not ended."""
        alive = {}
        for rank, activity in self.activities.items():
            if activity.kind is not Kind.EXITED:
                alive[rank] = activity
        return alive

    @property
    def roots(self) -> dict[int, Activity]:
        """The ranks that others wait for but that do not wait themselves.

        If no other rank waits for such a rank, the result is all ranks that do not wait.
        """
        return self.awaited_but_not_waiting or self._not_waiting

    @property
    def awaited_but_not_waiting(self) -> dict[int, Activity]:
        """The ranks that others wait for but that do not wait themselves; perhaps none."""
        return {
            rank: activity
            for rank, activity in self._not_waiting.items()
            if rank in self.graph.awaited
        }

    @property
    def _not_waiting(self) -> dict[int, Activity]:
        """The ranks that do not wait for others."""
        return {
            rank: activity
            for rank, activity in self.activities.items()
            if rank not in self.graph.waits_for
        }

    def waiting_text(self, what: str, ranks: Collection[int]) -> str:
        """Writes who waits for whom: `rank 1 works on; ranks 0, 2 have waited for it for 5 s`.

        Args:
            what: what the awaited ranks do, beginning with a verb in the singular: `works on`.
            ranks: the awaited ranks.
        """
        subject = f"{format_ranks(ranks)} {conjugate(what, len(ranks))}"

        # The keys are all ranks that wait. Those that wait for another waiting rank are included,
        # as they wait for the awaited ranks in the end.
        waiting = self.graph.waits_for
        if not waiting:
            return f"{subject}, for {self.waited_s:.0f} s"

        has_or_have = conjugate("has", len(waiting))
        it_or_them = "it" if len(ranks) == 1 else "them"
        return (
            f"{subject}; {format_ranks(waiting)} {has_or_have} waited for {it_or_them} for "
            f"{self.waited_s:.0f} s"
        )

    def make_verdict(
        self,
        kind: VerdictKind,
        ranks: Iterable[int],
        headline: str,
        advice: tuple[str, ...] | None = None,
        *,
        fatal: bool = False,
        mismatch: Mismatch | None = None,
        key: str = "",
    ) -> Verdict:
        """Builds a verdict, and adds a row for each rank that says what it does.

        Args:
            kind: the kind of problem.
            ranks: the ranks at fault, or the ranks that the others wait for.
            headline: the verdict in one sentence.
            advice: what the user can do; by default the advice for this kind.
            fatal: True if the run cannot recover by itself.
            mismatch: the first call that differs between the ranks.
            key: identifies the reason of the hang: two attempts of the run with the same key hang
                for the same reason. Empty if a later attempt may well succeed.
        """
        if advice is None:
            usual_advice = ADVICE.get(kind)
            advice = () if usual_advice is None else (usual_advice,)

        mismatched_calls = {} if mismatch is None else dict(mismatch.calls)
        rows = []
        for rank, activity in self.activities.items():
            rows.append(self._row(activity, mismatched_calls.get(rank)))

        return Verdict(
            kind=kind,
            fatal=fatal,
            ranks=tuple(sorted(ranks)),
            headline=headline,
            rows=tuple(rows),
            mismatch=mismatch,
            advice=advice,
            key=key,
            waited_s=self.waited_s,
        )

    def _row(self, activity: Activity, mismatched_call: CollectiveCall | None) -> Row:
        """Returns the row of a verdict that says what one rank does.

        Args:
            activity: what the rank does.
            mismatched_call: the rank's call at the first mismatch, which is shown if the rank may
                wait in it; None if there is no mismatch, or if the rank has not reached it.
        """
        state = activity.state

        # `does` is the text on what the rank does, such as "waits in all_reduce of 25 float".
        if state.rank in self.graph.waits_for:
            # The rank may have several pending calls, of which `activity.call` is one. The call at
            # the mismatch explains most.
            shown_call = activity.call
            if mismatched_call is not None and may_wait_in(activity, mismatched_call):
                shown_call = mismatched_call
            does = self._wait_text(activity, shown_call)
        else:
            does = _text_without_wait(activity)

        if state.steps:
            does += f" (step {state.steps})"
        exception_in_flight = ""
        if state.in_flight is not None:
            exception_in_flight = state.in_flight.describe()
        return Row(
            state.rank,
            state.host,
            does,
            line=activity.line,
            for_s=self.since_call_s.get(state.rank),
            handles=exception_in_flight,
        )

    def _wait_text(self, activity: Activity, call: CollectiveCall | None) -> str:
        """Writes what a rank waits in: `waits in all_reduce of 25 float, in backward`."""
        text = f"waits in {_name_call(call, activity.op)}"

        if call is not None:
            group = self.table.name(call.key)  # such as "group 'tp'"
            if group != DEFAULT_GROUP:
                text += f" of {group}"

        if activity.created_group is not None:  # the rank waits in `new_group`
            text += f" for {activity.created_group.describe()}"

        if activity.wait.context:  # where in torch it waits, such as "in backward"
            text += f", {activity.wait.context}"

        return text


def may_wait_in(activity: Activity, call: CollectiveCall) -> bool:
    """Returns True if a rank may be waiting in this call.

    It may if the call is pending, or if the rank is known to be in this call. Calls are compared by
    group and number: the objects may differ, because only one of two snapshots may have recorded
    the stack of the call.
    """
    candidates = activity.state.pending_calls()
    if activity.call is not None:
        candidates.append(activity.call)
    keys_and_numbers = {(candidate.key, candidate.seq) for candidate in candidates}
    return (call.key, call.seq) in keys_and_numbers


def _text_without_wait(activity: Activity) -> str:
    """Writes what a rank does, for a rank that the graph does not list as waiting.

    The rank may be busy, may have ended, or may wait in a call that has a timeout of its own.
    """
    state = activity.state
    if activity.kind is Kind.EXITED:
        return _text_of_end(state)

    # In state D, a process sleeps in the kernel and cannot be interrupted, see proc(5). Usually it
    # waits for a disk.
    sleeps_in_kernel = state.state == "D"
    if activity.kind is Kind.BLOCKED and sleeps_in_kernel:
        return "is blocked in the kernel, on a disk or a network file system"

    # The rank waits for others, but a timeout that the program has chosen may end the wait.
    if activity.kind is Kind.LIMITED and activity.call is not None:
        call = _name_call(activity.call, activity.op)
        return f"waits in {call}, of a group with a timeout of its own"

    # A rank of any other kind may have come to the end of its script.
    if is_at_exit(state.stack):
        return "has finished, and waits for one of its own threads"

    return str(activity.kind.value)  # such as "waits for data"


def _text_of_end(state: RankState) -> str:
    """Writes how a rank has ended. A code of -9 means that signal 9 has ended it."""
    if state.code is not None and state.code < 0:
        return f"was ended by signal {-state.code}"
    return f"has ended with exit code {state.code}"


def _name_call(call: CollectiveCall | None, op: str) -> str:
    """Names a call: `all_reduce of 25 float`, `broadcast_object_list (broadcast of 8 long)`.

    Args:
        call: the recorded call; None if it is not known.
        op: the function that the user called, which may differ from the recorded one; empty if it
            is not known.
    """
    if call is None:
        return op or "a collective"
    has_one_name = op in ("", call.op)
    if has_one_name:
        return describe(call)
    return f"{op} ({describe(call)})"

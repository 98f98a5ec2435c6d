"""Compares the collectives of all ranks in one table, and finds the first call that differs.

A collective is identified by the *key* of its group (`backend:group`, such as `nccl:0`) and its
number `seq` in the group: call 6 on one rank must match call 6 on every other rank. A call is
*mismatched* if the ranks made different calls under one number. A rank is *missing* from a call
that it has not made yet. The *record* of a rank holds its latest calls, from torch's Flight
Recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from lockstep.run.watch import stacks
from lockstep.run.watch.snapshot import CollectiveCall, Group, Snapshot

# The timeouts that torch gives a group if the program chooses none. The second one is only for
# groups with NCCL as their only backend, and not with Gloo for CPU tensors too
# (`cpu:gloo,cuda:nccl`).
DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_TIMEOUT_OF_NCCL_ALONE_S = 600.0

DEFAULT_GROUP = "the default group"
"""The default process group, as it is named to users."""

# In these operations, all ranks must have the same number of elements. In all others, sizes may
# differ between ranks, or are not recorded on every rank.
_SAME_SIZE_OPS = {"all_reduce", "broadcast", "reduce", "_broadcast_oop", "_reduce_oop"}


class Signature(NamedTuple):
    """What must be equal on all ranks for their calls to match."""

    op: str
    num_elements: int | None = None
    """None if it may differ between the ranks; then `dtypes` is empty."""
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group in which the ranks did not all make the same call."""

    group: str
    """The name of the group, as it is shown to people."""
    seq: int
    calls: tuple[tuple[int, CollectiveCall | None], ...]
    """Each rank of the group and its call; None if the rank has not come to this call."""
    lines_differ_since: int | None = None
    """If the calls just before it match, but come from different lines, the first of these."""


def signature(call: CollectiveCall) -> Signature:
    """Returns what must be equal on all ranks for their calls to match."""
    if call.op not in _SAME_SIZE_OPS:
        return Signature(call.op)
    num_elements = sum(prod(size) for size in call.input_sizes)
    return Signature(call.op, num_elements, call.dtypes)


class CallTable:
    """All collectives by group, number and rank, and the sends and receives that are pending."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.calls: dict[str, dict[int, dict[int, CollectiveCall]]] = {}
        """The calls: `calls[key][seq][rank]`."""
        self._seqs_by_key_and_rank: dict[tuple[str, int], list[int]] = {}
        """The `seq` of each recorded call of a rank, in ascending order, by key and rank."""
        self._groups: dict[str, Group] = {}
        """The groups that ranks have reported, by name."""
        self._longest_timeout_s: dict[str, float] = {}
        """The longest timeout of any group, by backend."""
        self._ranks_without_record: set[int] = set()
        self._missing_ranks: dict[tuple[str, int], set[int]] = {}
        """The results of `missing_ranks` so far, by key and number."""
        self._pending_p2p: dict[tuple[str, int], list[CollectiveCall]] = {}
        """The pending sends and receives of a rank, the oldest first, by key and rank."""

        for state in snapshot.ranks:
            for group in state.groups or ():
                self._groups[group.name] = group

            if state.calls is None:
                self._ranks_without_record.add(state.rank)

            for call in state.calls or ():
                self._add(state.rank, call)

            for call in state.pending_calls():
                if call.p2p:
                    self._pending_p2p.setdefault((call.key, state.rank), []).append(call)

    def _add(self, rank: int, call: CollectiveCall) -> None:
        """Adds a call of a rank to the table, and updates the longest timeout of its backend."""
        # Sends and receives count too: `has_short_timeout` is asked about them as well.
        longest_s = self._longest_timeout_s.get(call.backend, 0.0)
        self._longest_timeout_s[call.backend] = max(longest_s, call.timeout_s or 0.0)

        # Sends and receives are numbered by pair of ranks, not by group, so they are not in the
        # table.
        if call.p2p:
            return

        calls_by_seq = self.calls.setdefault(call.key, {})
        calls_by_seq.setdefault(call.seq, {})[rank] = call
        self._seqs_by_key_and_rank.setdefault((call.key, rank), []).append(call.seq)

    def members(self, key: str) -> set[int]:
        """Returns the ranks of a group; if they were not reported, the ranks that have used it."""
        _, _, name = key.partition(":")  # the key is `backend:name`
        group = self._groups.get(name)
        if group is not None and group.ranks:
            return set(group.ranks)
        return {rank for used_key, rank in self._seqs_by_key_and_rank if used_key == key}

    def name(self, key: str) -> str:
        """Returns the name of a group for users: `the default group` or `group 'tp'`."""
        _, _, torch_name = key.partition(":")  # the key is `backend:name`
        group = self._groups.get(torch_name)

        # Users know a group by the description that the program gave it. Without one, torch
        # describes it as "undefined".
        name = torch_name
        if group is not None and group.description not in ("", "undefined"):
            name = group.description

        # torch names the default group "0", and describes it as "default_pg".
        is_default_group = name in ("0", "default_pg")
        return DEFAULT_GROUP if is_default_group else f"group {name!r}"

    def missing_ranks(self, call: CollectiveCall) -> set[int]:
        """Returns the members of a call's group that have not made this call yet.

        The result is cached, as it is asked for once for every rank.
        """
        key_and_number = (call.key, call.seq)
        if key_and_number not in self._missing_ranks:
            missing = set()
            for rank in self.members(call.key):
                # A rank makes the calls of a group in the order of their numbers, so the number of
                # its latest call shows whether it has reached this one.
                recorded_seqs = self._seqs_by_key_and_rank.get((call.key, rank))
                if recorded_seqs is None or recorded_seqs[-1] < call.seq:
                    missing.add(rank)
            self._missing_ranks[key_and_number] = missing

        return self._missing_ranks[key_and_number]

    def awaited_sender(self, rank: int, call: CollectiveCall) -> int | None:
        """Returns the rank that a pending receive waits for, if that rank has not reached its send.

        A GPU executes the sends and receives of a group in order, and those of one batch (such as
        the calls of one `batch_isend_irecv`) together. So the sender is executing its oldest
        pending batch, and has not reached any later one. Example, of rank 0 that receives from
        rank 1:

            pending on rank 1               rank 0 waits for
            send to 0, then send to 2       nobody: the send to 0 is being executed
            send to 2, then send to 0       rank 1: the send to 2 comes first
            nothing                         rank 1: it has not called its send yet

        Args:
            rank: the rank that called the receive.
            call: the pending receive.

        Returns:
            The sender; None if it has reached its send, or if it is not known.
        """
        # A call names its peer by the peer's number within the group: 1 is the second member.
        members = sorted(self.members(call.key))
        if call.op != "recv" or call.peer is None or call.peer >= len(members):
            return None

        sender = members[call.peer]
        own_number_in_group = members.index(rank)
        pending_on_sender = self._pending_p2p.get((call.key, sender), [])
        executed_by_sender = oldest_batch(pending_on_sender)
        has_reached_send = any(
            executed.op == "send" and executed.peer == own_number_in_group
            for executed in executed_by_sender
        )
        return None if has_reached_send else sender

    @cached_property
    def mismatched_calls(self) -> set[tuple[str, int]]:
        """The key and number of every call that differs between the ranks.

        The set is computed once: thousands of calls may be pending on a GPU, and each of them is
        looked up for every rank.
        """
        mismatched = set()
        for key, calls_by_seq in self.calls.items():
            for seq, calls_by_rank in calls_by_seq.items():
                signatures = {signature(call) for call in calls_by_rank.values()}
                if len(signatures) > 1:
                    mismatched.add((key, seq))
        return mismatched

    def is_mismatched(self, call: CollectiveCall) -> bool:
        """Returns True if another rank made a different call under this number.

        Such a call can never end.
        """
        return (call.key, call.seq) in self.mismatched_calls

    def has_short_timeout(self, call: CollectiveCall) -> bool:
        """Returns True if the program chose a short timeout for the group of a call.

        The program may then expect the call to fail. If a Gloo group has 30 s and another one has
        the default of 1800 s, 30 s is short. If all groups of a backend have 30 s, the program
        chose that for its whole training, and it is not called short.
        """
        if call.timeout_s is None or call.timeout_s >= DEFAULT_TIMEOUT_S:
            return False

        # NCCL has two defaults, so 600 s is not chosen by the program although 1800 s is longer.
        is_nccl = call.backend == "nccl"
        if is_nccl and call.timeout_s == DEFAULT_TIMEOUT_OF_NCCL_ALONE_S:
            return False

        longest_of_backend_s = self._longest_timeout_s[call.backend]
        return call.timeout_s < longest_of_backend_s

    def record_reaches_back_to(self, key: str, seq: int, rank: int) -> bool:
        """Returns True if a rank's record would contain this call if the rank had made it.

        It would not if the rank's recorder did not answer, or only has later calls of the group.

        Args:
            key: the key of the group.
            seq: the number of the call.
            rank: the rank.
        """
        if rank in self._ranks_without_record:
            return False
        recorded_seqs = self._seqs_by_key_and_rank.get((key, rank))
        if recorded_seqs is None:  # the rank has made no call of this group, so none was dropped
            return True
        oldest_recorded_seq = recorded_seqs[0]  # they are in ascending order
        return seq >= oldest_recorded_seq


def oldest_batch(pending_p2p: Sequence[CollectiveCall]) -> list[CollectiveCall]:
    """Returns the oldest of a group's pending sends and receives, and the others of its batch.

    Args:
        pending_p2p: the sends and receives, the oldest first. Those of one batch share one `seq`.
    """
    return [call for call in pending_p2p if call.seq == pending_p2p[0].seq]


def find_mismatch(table: CallTable, ranks: set[int]) -> Mismatch | None:
    """Finds the first collective that the ranks did not all call in the same way.

    Args:
        table: the calls of all ranks.
        ranks: ranks of interest; only groups that contain one of them are examined.

    Returns:
        The mismatch; if several groups have one, that with the earliest call. None if all calls
        match.
    """
    mismatches: list[Mismatch] = []
    for key in table.calls:
        if table.members(key) & ranks:
            mismatch = _first_mismatch_of_group(table, key)
            if mismatch is not None:
                mismatches.append(mismatch)
    return min(mismatches, key=_time_of_first_call, default=None)


def _time_of_first_call(mismatch: Mismatch) -> float:
    return min(call.time_s for _, call in mismatch.calls if call is not None)


def _first_mismatch_of_group(table: CallTable, key: str) -> Mismatch | None:
    """Finds the first call of a group that differs between ranks, or that some ranks did not make.

    Args:
        table: the calls of all ranks.
        key: the key of the group, `backend:name`.

    Returns:
        The mismatch, or None if there is no such call.
    """
    members = sorted(table.members(key))
    for seq, calls_by_rank in sorted(table.calls[key].items()):
        # torch reuses the names of destroyed groups: other ranks may have had a group of this name
        # before. A call that only they made does not belong to this group.
        any_member_made_it = any(rank in calls_by_rank for rank in members)
        if not any_member_made_it:
            continue

        differs = (key, seq) in table.mismatched_calls
        if differs or _some_have_not_made_it(table, key, seq, members):
            # The call of a rank that has not made it is None.
            calls = tuple((rank, calls_by_rank.get(rank)) for rank in members)

            # The cause may lie before the mismatch: where the ranks took different branches, which
            # made equal calls for a while.
            lines_differ_since = _first_call_from_different_lines(table, key, seq)
            return Mismatch(table.name(key), seq, calls, lines_differ_since)

    return None


def _some_have_not_made_it(table: CallTable, key: str, seq: int, members: Sequence[int]) -> bool:
    """Returns True if some members of a group are known not to have made a call of the group.

    A call that is absent from the table may have been made, if a record was lost or has only later
    calls. So the records of all members must reach back to the call.
    """
    calls_by_rank = table.calls[key][seq]
    some_are_absent = any(rank not in calls_by_rank for rank in members)
    all_records_reach_back = all(table.record_reaches_back_to(key, seq, rank) for rank in members)
    return some_are_absent and all_records_reach_back


def _first_call_from_different_lines(table: CallTable, key: str, mismatched_seq: int) -> int | None:
    """Finds where the ranks of a group took different paths through the program.

    That may be some calls before the mismatch, as long as both paths happen to call the same
    collectives. Here they differ since call 5, though only call 7 is a mismatch:

        call    rank 0                    rank 1
        4       all_reduce, train.py:10   all_reduce, train.py:10
        5       all_reduce, train.py:10   all_reduce, eval.py:7
        6       all_reduce, train.py:10   all_reduce, eval.py:9
        7       all_reduce, train.py:10   barrier, eval.py:12

    Args:
        table: the calls of all ranks.
        key: the key of the group.
        mismatched_seq: the number of the mismatched call, 7 in the example.

    Returns:
        The number of the first call from different lines, 5 in the example. None if call 6 was made
        from one line, or if its lines are not known.
    """

    def lines_differ(seq: int) -> bool:
        calls_by_rank = table.calls[key].get(seq, {})
        lines = {stacks.user_frame(call.frames) for call in calls_by_rank.values()}
        all_are_known = None not in lines
        return all_are_known and len(lines) > 1

    # Go back from the mismatch to the last call that all ranks made from one line.
    first_seq = mismatched_seq
    while lines_differ(first_seq - 1):
        first_seq -= 1
    return None if first_seq == mismatched_seq else first_seq

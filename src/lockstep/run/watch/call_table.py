"""All ranks' collectives in one table, and the first one in which the ranks differ.

A collective is identified by its *key* (`backend:group`) and its number `seq`: the call with number
6 on one rank must match the call with number 6 on every other rank of the group. A call is
*mismatched* if they do not match. A rank is *missing* from a call if it has not made it yet. The
*record* of a rank has its latest calls, as torch's Flight Recorder has kept them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from lockstep.run.watch import stacks
from lockstep.run.watch.snapshot import CollectiveCall, Group, Snapshot

# The timeout that torch gives a group for which the program names none: that of NCCL only to a
# group that has NCCL alone, not to one with Gloo for CPU tensors besides (`cpu:gloo,cuda:nccl`).
DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_TIMEOUT_OF_NCCL_ALONE_S = 600.0

# Every rank must bring the same number of elements to these operations. In all others sizes may
# differ by rank, or are not recorded on every rank.
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
    """Every rank's collectives by group and number, and the sends and receives that are pending."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.calls: dict[str, dict[int, dict[int, CollectiveCall]]] = {}
        """`calls[key][seq][rank]` is a rank's call."""
        self._numbers: dict[tuple[str, int], list[int]] = {}
        """The numbers of a rank's recorded calls, the oldest first, by key and rank."""
        self._groups: dict[str, Group] = {}
        """What is known of a group, by its name."""
        self._longest_timeout_s: dict[str, float] = {}
        """The longest timeout of any group, by backend."""
        self._ranks_without_record: set[int] = set()
        self._missing_ranks: dict[tuple[str, int], set[int]] = {}
        """What `missing_ranks` has already computed, by key and number."""
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
        """Adds one call of a rank to `calls` and its number to `_numbers`.

        Its timeout, if it is longer than those before, is put into `_longest_timeout_s`.
        """
        longest_s = self._longest_timeout_s.get(call.backend, 0.0)
        self._longest_timeout_s[call.backend] = max(longest_s, call.timeout_s or 0.0)
        if call.p2p:  # numbered by pair of ranks, not by group, so it has no place in the table
            return

        if call.key not in self.calls:
            self.calls[call.key] = {}

        if call.seq not in self.calls[call.key]:
            self.calls[call.key][call.seq] = {}

        self.calls[call.key][call.seq][rank] = call
        if (call.key, rank) not in self._numbers:
            self._numbers[call.key, rank] = []

        self._numbers[call.key, rank].append(call.seq)

    def members(self, key: str) -> set[int]:
        """Returns the ranks of a group; if torch did not say, the ranks that have used it."""
        _, _, name = key.partition(":")  # the key is `backend:name`
        group = self._groups.get(name)
        if group is not None and group.ranks:
            return set(group.ranks)
        return {rank for used_key, rank in self._numbers if used_key == key}

    def name(self, key: str) -> str:
        """Returns a group's name as it is shown to people: `the default group`, `group 'tp'`."""
        _, _, name = key.partition(":")  # the key is `backend:name`
        group = self._groups.get(name)
        # torch describes a group as "undefined" if the program gave it no description.
        if group is not None and group.description not in ("", "undefined"):
            name = group.description
        if name in ("default_pg", "0"):  # torch's description and name of the default group
            return "the default group"
        return f"group {name!r}"

    def missing_ranks(self, call: CollectiveCall) -> set[int]:
        """Returns the ranks of a call's group that have not made this call yet."""
        key_and_number = (call.key, call.seq)
        if key_and_number not in self._missing_ranks:
            missing = set()
            for rank in self.members(call.key):
                numbers = self._numbers.get((call.key, rank))
                # A rank makes the calls of a group in the order of their numbers, so its latest one
                # says whether it has come to this one.
                if numbers is None or numbers[-1] < call.seq:
                    missing.add(rank)

            # It is remembered, as it is asked for once for every rank.
            self._missing_ranks[key_and_number] = missing

        return self._missing_ranks[key_and_number]

    def awaited_sender(self, rank: int, call: CollectiveCall) -> int | None:
        """Returns the rank that has not come to the send which a pending receive waits for.

        A GPU executes the sends and receives of a group in order. So the receive goes on once its
        send is the first of the sender's that is pending in this group; those of a batch are
        executed together.

        Args:
            rank: which has called the receive.
            call: the receive.

        Returns:
            None if the sender has come to it, or if it is not known who sends.
        """
        members = sorted(self.members(call.key))
        if call.op != "recv" or call.peer is None or call.peer >= len(members):
            return None

        sender = members[call.peer]
        pending = self._pending_p2p.get((call.key, sender), [])
        for other_call in first_batch(pending):
            if other_call.op == "send" and other_call.peer == members.index(rank):
                return None

        return sender

    @cached_property
    def mismatched_calls(self) -> set[tuple[str, int]]:
        """Key and number of all calls that differ between ranks.

        They are found once: thousands of calls may be pending on a GPU, and every rank asks for
        each.
        """
        mismatched = set()
        for key, calls_by_number in self.calls.items():
            for seq, calls_by_rank in calls_by_number.items():
                signatures = {signature(call) for call in calls_by_rank.values()}
                if len(signatures) > 1:
                    mismatched.add((key, seq))
        return mismatched

    def is_mismatched(self, call: CollectiveCall) -> bool:
        """Returns True if another rank has made another call in its place, so that it can never
        end.
        """
        return (call.key, call.seq) in self.mismatched_calls

    def has_short_timeout(self, call: CollectiveCall) -> bool:
        """Returns True if a call's group has a timeout that the program has chosen to be short.

        That is one below the longest that a group of this backend has, and none that torch gives by
        default. The program may then expect that the call fails.
        """
        if call.timeout_s is None:
            return False
        if call.backend == "nccl" and call.timeout_s == DEFAULT_TIMEOUT_OF_NCCL_ALONE_S:
            return False  # torch may have chosen it
        return call.timeout_s < min(DEFAULT_TIMEOUT_S, self._longest_timeout_s[call.backend])

    def would_know(self, key: str, seq: int, rank: int) -> bool:
        """Returns True if a rank's record would have this call, had the rank made it.

        False if the rank's recorder did not answer, or keeps only later calls of the group.
        """
        if rank in self._ranks_without_record:
            return False
        numbers = self._numbers.get((key, rank))
        if numbers is None:  # the rank has made no call of this group, so none has been dropped
            return True
        oldest_kept = numbers[0]
        return seq >= oldest_kept


def first_batch(pending_p2p: Sequence[CollectiveCall]) -> list[CollectiveCall]:
    """Returns the oldest of a group's pending sends and receives, and those of the same batch."""
    return [call for call in pending_p2p if call.seq == pending_p2p[0].seq]


def find_mismatch(table: CallTable, ranks: set[int]) -> Mismatch | None:
    """Returns the first collective in which the ranks did not all make the same call.

    Args:
        table: all calls.
        ranks: only groups with one of these ranks are looked at.

    Returns:
        Of several groups' mismatches, the one with the earliest call; None if all calls match.
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
    """Returns a group's first call that differs, or that some ranks have not made; None if there is
    no such call.
    """
    members = sorted(table.members(key))
    for seq, calls_by_rank in sorted(table.calls[key].items()):
        any_member_made_it = any(rank in calls_by_rank for rank in members)
        if not any_member_made_it:
            continue  # other ranks have made it, in a group of this name that they have destroyed

        # A rank's call may be missing in the table because its record was lost. Only if that is
        # ruled out for all ranks is it known that some have not made the call.
        all_would_know = all(table.would_know(key, seq, rank) for rank in members)
        some_are_missing = any(rank not in calls_by_rank for rank in members)
        differs = (key, seq) in table.mismatched_calls
        if differs or (all_would_know and some_are_missing):
            calls = tuple((rank, calls_by_rank.get(rank)) for rank in members)
            return Mismatch(table.name(key), seq, calls, _lines_differ_since(table, key, seq))

    return None


def _lines_differ_since(table: CallTable, key: str, mismatched_seq: int) -> int | None:
    """Finds the call since which the ranks have called a group's collectives from different lines.

    The ranks may take different ways through the program before their calls differ: an `all_reduce`
    in training and another one in an evaluation match by chance.

    Args:
        table: all calls.
        key: the key of the group.
        mismatched_seq: the number of the mismatched call.

    Returns:
        The number of this call. From it up to the mismatch, no call came from the same line on all
        ranks. None if even the call just before the mismatch did, or if its lines are not known.
    """
    earliest = None
    seq = mismatched_seq - 1
    while seq in table.calls[key]:
        lines = {stacks.user_frame(call.frames) for call in table.calls[key][seq].values()}
        some_line_is_unknown = None in lines
        ranks_are_at_one_line = len(lines) == 1
        if some_line_is_unknown or ranks_are_at_one_line:
            break
        earliest = seq
        seq -= 1

    return earliest

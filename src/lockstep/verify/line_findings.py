"""Describes the lines of a script that may have made two runs differ: its tests and its writes.

A *test* is the condition of an `if` or `while`, identified by its `Place`: file, first line and
last line of the statement. For each update (optimizer step), each rank records in `branch_outcomes`
whether a test was true (1), false (2) or both (3). A *case* is the first difference between two
runs: the update `case.actual` on several ranks, and `case.expected` on one process. Worth a look
are tests whose outcome differs there for the first time, and lines that wrote to a tensor on some
ranks only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lockstep.user_code import format_source_line
from lockstep.verify.cause import Cause, format_by_process, name_ranks, name_reference
from lockstep.verify.divergence import Divergence
from lockstep.verify.training_record import WAS_FALSE, WAS_TRUE, Place
from lockstep.wording import format_ranks

NOT_REACHED = 0
"""The outcome of a test that a rank did not reach."""
OUTCOME_WORDS = {
    NOT_REACHED: "not reached",
    WAS_TRUE: "true",
    WAS_FALSE: "false",
    WAS_TRUE | WAS_FALSE: "both",
}
MAX_SHOWN_TESTS = 2
NOT_KNOWN_CODE = "LS210"
"""The code for a difference whose cause is not known."""

Outcomes = Mapping[Place, int]
"""The outcomes of tests on one rank in one update, combined as bits."""
Location = tuple[str, int]
"""A file and a line."""


def new_branches(case: Divergence, cause: Cause) -> list[str]:
    """Describes tests of the script whose outcome differs from one process for the first time.

    Args:
        case: the difference between the runs.
        cause: cause of the difference. Tests on lines that it already mentions are left out.

    Returns:
        A sentence for each test, at most `MAX_SHOWN_TESTS`.
    """
    if not _can_compare_branches(case, cause):
        return []

    # The text lists the outcome in the run on one process first, and then that of each rank.
    outcomes_of_processes = [record.branch_outcomes for record in (*case.expected, *case.actual)]
    names_of_processes = [
        *name_reference(len(case.expected)),
        *name_ranks(range(len(case.actual))),
    ]

    # The text is, for example: "in this step, and in none before, the test took another branch at
    # train.py:7: if x > 0: true on one process, false on rank 0". There is none before the first.
    is_first_step = case.update_index == 0
    before = "" if is_first_step else ", and in none before,"
    descriptions = []
    for place in _places_of_first_different_tests(case, cause)[:MAX_SHOWN_TESTS]:
        test = _describe_test(place, outcomes_of_processes, names_of_processes)
        descriptions.append(f"in this step{before} the test took another branch at {test}")

    return descriptions


def _can_compare_branches(case: Divergence, cause: Cause) -> bool:
    """True if the outcomes of tests can be compared with one process, and may explain the case."""
    # The ranks of one run were compared with each other, so there is no run on one process.
    if case.reference_run is case.parallel_run:
        return False

    # The runs differ in their lengths, and one of them has no such update.
    if case.update_index >= min(len(case.reference_run), len(case.parallel_run)):
        return False

    # In the first step, no earlier step shows that the outcomes used to be equal, so a difference
    # proves little. It is only reported if the cause is not known.
    is_first_step = case.update_index == 0
    return not is_first_step or cause.code == NOT_KNOWN_CODE


def _places_of_first_different_tests(case: Divergence, cause: Cause) -> list[Place]:
    """Returns the places of tests whose outcome differs from one process for the first time.

    A test that only the ranks reached is left out, since the earlier test that led them there is
    reported instead. Tests on lines that the cause mentions are also left out.
    """
    places = []
    for place in case.expected[0].branch_outcomes:  # the tests that one process reached
        line = _line_of(place)
        is_mentioned = any(line in text for text in cause.evidence)
        if not is_mentioned and _is_new_difference(case, place):
            places.append(place)
    return places


def _is_new_difference(case: Divergence, place: Place) -> bool:
    """True if the outcome of a test differs from one process in this update, but in no earlier one.

    Tests that some rank did not reach are left out, because the test that led there differs as
    well.
    """
    if not all(place in record.branch_outcomes for record in case.actual):
        return False
    if not _outcomes_differ(case, case.update_index, place):
        return False
    earlier_updates = range(case.update_index)
    return not any(_outcomes_differ(case, earlier, place) for earlier in earlier_updates)


def _outcomes_differ(case: Divergence, update_index: int, place: Place) -> bool:
    """True if the outcome of a test in an update differs between the ranks and one process.

    The outcomes of all ranks are combined, since each rank sees other data: a test that is true on
    one rank and false on another agrees with a test that is both on one process.
    """
    outcome_of_ranks = NOT_REACHED  # 0, with which 1 (true) and 2 (false) are combined as bits
    for record in case.parallel_run[update_index]:
        outcome_of_ranks |= record.branch_outcomes.get(place, NOT_REACHED)

    one_process = case.reference_run[update_index][0]
    return outcome_of_ranks != one_process.branch_outcomes.get(place, NOT_REACHED)


def splitting_branches(outcomes_of_ranks: Sequence[Outcomes]) -> list[str]:
    """Describes the last tests that were true on some ranks and false on the others.

    Args:
        outcomes_of_ranks: outcomes of tests on each rank, in the order in which they were reached.

    Returns:
        A sentence for each test, at most `MAX_SHOWN_TESTS`.
    """
    if not outcomes_of_ranks:
        return []

    places = []
    for place in outcomes_of_ranks[0]:
        outcomes_here = {outcomes.get(place, NOT_REACHED) for outcomes in outcomes_of_ranks}
        if outcomes_here == {WAS_TRUE, WAS_FALSE}:
            places.append(place)

    names_of_ranks = name_ranks(range(len(outcomes_of_ranks)))  # "rank 0", "rank 1", ...
    descriptions = []
    for place in places[-MAX_SHOWN_TESTS:]:
        test = _describe_test(place, outcomes_of_ranks, names_of_ranks)
        descriptions.append(f"the ranks went different ways at {test}")

    return descriptions


def describe_writes(case: Divergence, names: Sequence[str]) -> list[str]:
    """Describes the lines that last wrote to tensors outside of optimizer steps.

    Args:
        case: the difference between the runs.
        names: names of the tensors. For each rank, the first of them that was written to is used.

    Returns:
        There are three cases. If no rank wrote, the list is empty. If all ranks wrote, it has a
        text for each line: "ranks 0-1 last wrote to them by train.py:7: weight.zero_()". If only
        some ranks wrote, a single text names all lines, and the ranks that did not write. It may be
        followed by a text about the `if` around a line, which explains why only some ranks wrote.
    """
    # The frames of the script at the write of each rank, the innermost first.
    stack_of_rank = _stacks_of_writes(case, names)
    if not stack_of_rank:
        return []

    ranks_by_location: dict[Location, list[int]] = defaultdict(list)
    for rank, stack in stack_of_rank.items():
        innermost_location = stack[0]  # file and line
        ranks_by_location[innermost_location].append(rank)

    texts_of_writes = []
    for (file, line), ranks in ranks_by_location.items():
        source = format_source_line(file, line)
        texts_of_writes.append(f"{format_ranks(ranks)} last wrote to them by {source}")

    ranks_without_write = []
    for rank in range(len(case.actual)):
        if rank not in stack_of_rank:
            ranks_without_write.append(rank)

    # All ranks wrote.
    if not ranks_without_write:
        return texts_of_writes

    # Some ranks wrote and others did not.
    text_of_others = f"of {format_ranks(ranks_without_write)} no write was seen"
    text_of_all = "; ".join([*texts_of_writes, text_of_others])

    # The ranks that wrote have usually done so by the same line, so one of them is enough.
    stack_of_first_writer = next(iter(stack_of_rank.values()))
    return [text_of_all, *_describe_test_around(case, stack_of_first_writer)]


def _describe_test_around(case: Divergence, stack: Sequence[Location]) -> list[str]:
    """Describes a test around a line that only some ranks reached, such as `if rank == 0`.

    Args:
        case: the difference between the runs.
        stack: frames of the script at the line, the innermost first.

    Returns:
        The text in a list; empty if no test around the line has different outcomes on the ranks.
    """
    outcomes_of_ranks = [record.branch_outcomes for record in case.actual]
    place = _differing_test_around(stack, outcomes_of_ranks)
    if place is None:
        return []
    names_of_ranks = name_ranks(range(len(outcomes_of_ranks)))
    test = _describe_test(place, outcomes_of_ranks, names_of_ranks)
    return [f"that is under {test}"]


def _stacks_of_writes(case: Divergence, names: Sequence[str]) -> dict[int, tuple[Location, ...]]:
    """Returns the frames of the script at the last write of each rank to one of the tensors.

    The innermost frame comes first. If a rank wrote to several of the tensors, the first one in
    `names` is used. Ranks that wrote to none of them are left out.
    """
    stack_of_rank = {}
    for rank, record in enumerate(case.actual):
        for name in names:
            if name in record.write_stacks:
                stack_of_rank[rank] = record.write_stacks[name]
                break
    return stack_of_rank


def _differing_test_around(
    stack: Sequence[Location], outcomes_of_ranks: Sequence[Outcomes]
) -> Place | None:
    """Finds a test around a line of a stack whose outcome differs between the ranks.

    Args:
        stack: frames of the script, the innermost first. Tests around inner frames are preferred.
        outcomes_of_ranks: outcomes of tests on each rank.

    Returns:
        The place of the test, or None if there is none.
    """
    # All tests that some rank reached, in the order in which they were reached.
    places: dict[Place, None] = {}
    for outcomes in outcomes_of_ranks:
        places |= dict.fromkeys(outcomes)

    for file, line in stack:
        for place in places:
            file_of_test, first_line, last_line = place
            is_around = file_of_test == file and first_line <= line <= last_line
            outcomes_here = {outcomes.get(place, NOT_REACHED) for outcomes in outcomes_of_ranks}
            if is_around and len(outcomes_here) > 1:
                return place

    return None


def _describe_test(
    place: Place, outcomes_of_processes: Sequence[Outcomes], processes: Sequence[str]
) -> str:
    """Describes a test: `train.py:7: if rank == 0: true on rank 0, false on rank 1`.

    Args:
        place: place of the test.
        outcomes_of_processes: outcomes of the tests on each process.
        processes: names of these processes, see `format_by_process`.
    """
    words = [OUTCOME_WORDS[outcomes.get(place, NOT_REACHED)] for outcomes in outcomes_of_processes]
    return f"{_line_of(place)}: {format_by_process(words, processes)}"


def _line_of(place: Place) -> str:
    """Returns the first line of a test without its colon: "train.py:7: if rank == 0"."""
    file, first_line, _ = place
    return format_source_line(file, first_line).rstrip(":")

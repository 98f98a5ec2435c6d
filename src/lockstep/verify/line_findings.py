"""Describes which lines of a script made two runs differ: its tests, and its writes to tensors.

A *test* is an `if` or a `while` of the script, known by its `Place`: file, first line, last line of
its body. Each rank records for each update (optimizer step) whether a test was true (1), false (2)
or both (3), in `branch_outcomes`. A *case* is where a run on several ranks first differs from that
on one process: the update `case.actual`, with a record of each rank, from `case.expected`.

A test whose outcome differs there for the first time, or a line that wrote to a tensor on some
ranks only, is worth a look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lockstep.user_code import format_source_line
from lockstep.verify.cause import Cause, format_by_process
from lockstep.verify.compare import Divergence
from lockstep.verify.training_record import WAS_FALSE, WAS_TRUE, Place
from lockstep.wording import format_ranks

NOT_REACHED = 0
"""The outcome of a test that a rank has not recorded."""
OUTCOME_WORDS = {
    NOT_REACHED: "not reached",
    WAS_TRUE: "true",
    WAS_FALSE: "false",
    WAS_TRUE | WAS_FALSE: "both",
}
MAX_SHOWN_TESTS = 2
NOT_KNOWN_CODE = "LS210"
"""The code of a difference whose cause is not known."""

Outcomes = Mapping[Place, int]
"""The outcomes of tests on one rank in one update, added up bit by bit."""
Location = tuple[str, int]
"""A file and a line."""


def new_branches(case: Divergence, cause: Cause) -> list[str]:
    """Describes tests of the script whose outcome is not that of one process for the first time.

    Args:
        case: where the runs part.
        cause: what is said of it already; tests on lines that it names are left out.

    Returns:
        A sentence for each test, at most `MAX_SHOWN_TESTS`.
    """
    if case.reference_run is case.parallel_run:
        return []  # its ranks were compared with each other, and not with one process
    if case.update_index >= min(len(case.reference_run), len(case.parallel_run)):
        return []  # the runs differ in their lengths, and one has no such update

    # In the first step, all outcomes that differ do so for the first time. That is weak evidence,
    # so it is given only if the cause is not known.
    is_first_step = case.update_index == 0
    if is_first_step and cause.code != NOT_KNOWN_CODE:
        return []

    places = []
    for place in case.expected[0].branch_outcomes:
        line = _line_of(place)
        is_named_already = any(line in text for text in cause.evidence)
        if not is_named_already and _is_new_difference(case, place):
            places.append(place)

    outcomes_of_runs = [rank.branch_outcomes for rank in (*case.expected, *case.actual)]
    before = "" if is_first_step else ", and in none before,"
    descriptions = []
    for place in places[:MAX_SHOWN_TESTS]:
        test = _describe_test(place, outcomes_of_runs)
        descriptions.append(f"in this step{before} another way was gone at {test}")

    return descriptions


def _is_new_difference(case: Divergence, place: Place) -> bool:
    """Returns whether a test ends otherwise than on one process in this update, and in none before.

    Tests that some rank did not reach are left out: the test that led there differs as well.
    """
    if not all(place in rank.branch_outcomes for rank in case.actual):
        return False
    if not _ends_otherwise(case, case.update_index, place):
        return False
    earlier_updates = range(case.update_index)
    return not any(_ends_otherwise(case, earlier, place) for earlier in earlier_updates)


def _ends_otherwise(case: Divergence, update_index: int, place: Place) -> bool:
    """Returns whether a test ended on the ranks of an update otherwise than on one process.

    The outcomes of all ranks together count, as each rank sees other data: if a test is true on one
    rank and false on another, that is the same as both on one process.
    """
    outcome_of_ranks = NOT_REACHED  # 0, to which 1 (true) and 2 (false) are added bit by bit
    for rank in case.parallel_run[update_index]:
        outcome_of_ranks |= rank.branch_outcomes.get(place, NOT_REACHED)
    one_process = case.reference_run[update_index][0]
    return outcome_of_ranks != one_process.branch_outcomes.get(place, NOT_REACHED)


def splitting_branches(outcomes_of_ranks: Sequence[Outcomes]) -> list[str]:
    """Describes the last tests that were true on some ranks and false on the others.

    Args:
        outcomes_of_ranks: the outcomes of tests on each rank, in the order in which they were
            reached.

    Returns:
        A sentence for each test, at most `MAX_SHOWN_TESTS`.
    """
    if not outcomes_of_ranks:
        return []

    places = []
    for place in outcomes_of_ranks[0]:
        outcomes = {rank.get(place, NOT_REACHED) for rank in outcomes_of_ranks}
        if outcomes == {WAS_TRUE, WAS_FALSE}:
            places.append(place)

    descriptions = []
    for place in places[-MAX_SHOWN_TESTS:]:
        test = _describe_test(place, outcomes_of_ranks, only_ranks=True)
        descriptions.append(f"the ranks went different ways at {test}")

    return descriptions


def describe_writes(case: Divergence, names: Sequence[str]) -> list[str]:
    """Describes the lines that last wrote to tensors outside of optimizer steps.

    Args:
        case: where the runs part.
        names: of the tensors. On each rank the first one that was written to counts.

    Returns:
        If all ranks wrote, a text for each line: "ranks 0-1 last wrote to them by train.py:7:
        weight.zero_()". If only some ranks wrote, one text with all lines and with the ranks that
        did not write, and another one if a test around the line tells why. Empty if no rank wrote.
    """
    # The frames of the script in which each rank wrote, the innermost first.
    stack_of_rank = _stacks_of_writes(case, names)
    if not stack_of_rank:
        return []

    ranks_by_location: dict[Location, list[int]] = defaultdict(list)
    for number, stack in stack_of_rank.items():
        innermost_line = stack[0]
        ranks_by_location[innermost_line].append(number)

    texts = []
    for (file, line), ranks in ranks_by_location.items():
        source = format_source_line(file, line)
        texts.append(f"{format_ranks(ranks)} last wrote to them by {source}")

    ranks_without_write = []
    for number in range(len(case.actual)):
        if number not in stack_of_rank:
            ranks_without_write.append(number)

    if not ranks_without_write:
        return texts

    texts.append(f"of {format_ranks(ranks_without_write)} no write was seen")
    descriptions = ["; ".join(texts)]

    # Some ranks wrote and others did not: a test around the line may tell why.
    outcomes_of_ranks = [rank.branch_outcomes for rank in case.actual]
    first_stack = next(iter(stack_of_rank.values()))
    place = _splitting_test_around(first_stack, outcomes_of_ranks)
    if place is not None:
        test = _describe_test(place, outcomes_of_ranks, only_ranks=True)
        descriptions.append(f"that is under {test}")

    return descriptions


def _stacks_of_writes(case: Divergence, names: Sequence[str]) -> dict[int, tuple[Location, ...]]:
    """Returns, by rank, the frames of the script in its last write to one of these tensors.

    The innermost frame comes first. If a rank wrote to several of the tensors, the one that `names`
    has first counts. Ranks that wrote to none of them are left out.
    """
    stack_of_rank = {}
    for number, rank in enumerate(case.actual):
        for name in names:
            if name in rank.write_stacks:
                stack_of_rank[number] = rank.write_stacks[name]
                break
    return stack_of_rank


def _splitting_test_around(
    stack: Sequence[Location], outcomes_of_ranks: Sequence[Outcomes]
) -> Place | None:
    """Returns a test with different outcomes on the ranks that decides about a line of a stack.

    Args:
        stack: frames of the script, the innermost first. Tests around it are preferred.
        outcomes_of_ranks: the outcomes of tests on each rank.

    Returns:
        None if there is no such test.
    """
    places: dict[Place, None] = {}  # in the order in which tests were reached
    for outcomes in outcomes_of_ranks:
        places |= dict.fromkeys(outcomes)

    for file, line in stack:
        for place in places:
            file_of_test, first_line, last_line = place
            is_around = file_of_test == file and first_line <= line <= last_line
            outcomes_here = {rank.get(place, NOT_REACHED) for rank in outcomes_of_ranks}
            if is_around and len(outcomes_here) > 1:
                return place

    return None


def _describe_test(
    place: Place, outcomes_of_runs: Sequence[Outcomes], *, only_ranks: bool = False
) -> str:
    """Describes a test as `train.py:7: if rank == 0: true on rank 0, false on rank 1`.

    Args:
        place: of the test.
        outcomes_of_runs: the outcomes of tests on one process, and then on each rank.
        only_ranks: True if they are only those of the ranks.
    """
    words = [OUTCOME_WORDS[outcomes.get(place, NOT_REACHED)] for outcomes in outcomes_of_runs]
    return f"{_line_of(place)}: {format_by_process(words, with_reference=not only_ranks)}"


def _line_of(place: Place) -> str:
    """Returns the first line of a test, as "train.py:7: if rank == 0", without its colon."""
    file, first_line, _ = place
    return format_source_line(file, first_line).rstrip(":")

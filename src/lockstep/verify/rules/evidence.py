"""Sentences of evidence that several rules use.

Each function looks at a difference (`case`) between a run on one process and a run on several
ranks, and returns sentences about it, or an empty list if there is nothing to say. `case.expected`
is the optimizer step on one process, and `case.actual` the same step on the ranks: a `RankUpdate`
(record) for each rank. A *line* is a string such as "train.py:12: loss.backward()".
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from lockstep.verify.algebra import constant_ratio, near
from lockstep.verify.cause import format_items, script_names
from lockstep.verify.divergence import Divergence
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import Update
from lockstep.wording import format_ranks

MAX_KINDS_OF_WRONG_GRADIENTS = 3
MAX_LINES_WITH_STATISTICS = 2


def format_ranks_that_differ(ranks_by_name: Mapping[str, Sequence[int]]) -> str:
    """Lists all ranks on which some tensor differs: "ranks 1-3".

    Args:
        ranks_by_name: ranks on which a tensor differs, by the name of the tensor.
    """
    all_ranks: set[int] = set()
    for ranks in ranks_by_name.values():
        all_ranks |= set(ranks)
    return format_ranks(all_ranks)


def format_ratio(ratio: float, num_ranks: int) -> str:
    """Describes the ratio of gradients to those of one process.

    For two ranks: "1/2 of" for a ratio of 0.5, "3 times" for 3, and "but for rounding" for 1.
    """
    if near(ratio, 1):
        return "but for rounding"
    if near(ratio, 1 / num_ranks):
        return f"1/{num_ranks} of"
    return f"{ratio:.6g} times"


def format_weights(weights: Sequence[float]) -> str:
    """Formats weights as fractions of their sum: "0.25 : 0.75" for 1 and 3."""
    total = sum(weights)
    texts = []
    for weight in weights:
        share = weight / total if total else weight  # the sum may be 0, as for 1 and -1
        texts.append(f"{share:.4g}")
    return " : ".join(texts)


def loss_line(case: Divergence) -> list[str]:
    """Names the line that computed the loss, if some rank has recorded it."""
    line = case.actual.first_on_any_rank("loss_line")
    if not line:
        return []
    return [f"the loss is made by {line}"]


def format_backward_passes(case: Divergence) -> str:
    """Says how many backward passes the step had, on one process and on each rank."""
    on_one_process = case.expected.num_backward_passes
    on_each_rank = case.actual.num_backward_passes
    return (
        f"backward passes for this step: {on_one_process} on one process, "
        f"{on_each_rank} on each rank"
    )


def gradient_patterns(case: Divergence) -> tuple[str, ...]:
    """Says how many gradients are right, and by which factors the others are wrong.

    For example "3 of 6 gradients are right", "2 times: fc.weight, fc.bias" and "in no constant
    ratio: conv.weight".
    """
    # The kind of the difference is also the name of the field: "gradients" or "unclipped".
    expected = case.expected.merged(case.kind)
    actual = case.actual.merged(case.kind)

    # The gradients that differ, without those that only the ranks have.
    wrong_names = [name for name in case.names if name in expected]
    names_by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in wrong_names:
        if name in actual:  # otherwise no rank has this gradient, and there is no factor
            pattern = _pattern_of(expected[name], actual[name], case)
            names_by_pattern[pattern].append(name)

    sentences = []
    if len(wrong_names) < len(expected):
        num_right = len(expected) - len(wrong_names)
        sentences.append(f"{num_right} of {len(expected)} gradients are right")

    for pattern, names in list(names_by_pattern.items())[:MAX_KINDS_OF_WRONG_GRADIENTS]:
        sentences.append(f"{pattern}: {format_items(script_names(names))}")

    return tuple(sentences)


def _pattern_of(expected: Array, actual: Array, case: Divergence) -> str:
    """Says by which factor a gradient is wrong: "2 times", or "in no constant ratio"."""
    ratio = None
    if expected.size > 1:  # a single value has a factor in any case, which means nothing
        ratio = constant_ratio({"gradient": expected}, {"gradient": actual}, case.max_error)

    if ratio is None:
        return "in no constant ratio"
    return format_ratio(ratio, case.num_ranks)


def draws_with_wrong_counts(case: Divergence) -> list[tuple[str, str]]:
    """Returns the draws of random numbers that the ranks did not make as often as they should.

    For their losses, all ranks should draw the numbers of one process. For example, if one process
    draws a noise level once for its whole batch, 3 ranks should draw this level 3 times in total.
    With any other count, the loss of some rank was computed from other levels.

    Returns:
        Each such draw as a pair of its line and a digest of the numbers.
    """
    # How often each run made the same draw: the same numbers at the same line.
    counts_of_one_process: Counter[tuple[str, str]] = Counter()
    for record in case.expected:
        counts_of_one_process.update(record.loss_draws)

    counts_of_ranks: Counter[tuple[str, str]] = Counter()
    for record in case.actual:
        counts_of_ranks.update(record.loss_draws)

    all_draws = {**counts_of_ranks, **counts_of_one_process}  # without duplicates
    draws = []
    for draw in all_draws:
        expected_count = counts_of_one_process[draw] * case.num_ranks
        if counts_of_ranks[draw] != expected_count:
            draws.append(draw)

    return draws


def describe_random_numbers_of_one_run(case: Divergence) -> list[str]:
    """Says that the loss was computed from random numbers that only one of the two runs drew.

    With a loss, only the last draw is recorded. It may differ although both runs drew the same
    numbers: one process draws a, b, c, d for its 4 samples, rank 0 draws a, b for its 2 samples,
    and rank 1 draws c, d. The last draws are d, b and d. Both runs drew b and d, so this is not
    reported.

    The result is one sentence with the line of the first draw that is reported, or an empty list.
    """
    drawn_by_both_runs = _drawn_digests(case.expected) & _drawn_digests(case.actual)
    for line, digest in draws_with_wrong_counts(case):
        if digest not in drawn_by_both_runs:
            return [
                f"the loss is computed from random numbers that were drawn for this step: {line}"
            ]

    return []


def _drawn_digests(update: Update) -> set[str]:
    """Returns digests of all random numbers that a run drew in a step before its losses."""
    digests: set[str] = set()
    for record in update:
        digests |= record.drawn_digests
    return digests


def describe_local_statistics(case: Divergence) -> list[str]:
    """Says that the loss was computed from statistics over each rank's own samples.

    Only statistics that differ from one process on some rank are mentioned. They are not always
    wrong: the maximum length in a batch, for example, does no harm.
    """
    text = "the loss is computed from a statistic over each rank's own samples"
    return _lines_with_other_values(case, "batch_statistics", text)


def describe_local_scalars(case: Divergence) -> list[str]:
    """Says that Python numbers were computed from each rank's own samples, before the loss."""
    text = "before the loss, a number was computed from each rank's own samples"
    return _lines_with_other_values(case, "scalar_statistics", text)


def _lines_with_other_values(case: Divergence, field_name: str, text: str) -> list[str]:
    """Lists the first lines at which some rank recorded another number than one process.

    Args:
        case: the difference.
        field_name: name of a field of `RankUpdate` with a number for each line.
        text: beginning of each sentence, before the line.
    """
    # A single rank has all samples, so another value does not come from how they are split.
    if case.num_ranks <= 1:
        return []

    lines = []
    for line, expected in getattr(case.expected[0], field_name).items():
        for record in case.actual:
            actual = getattr(record, field_name).get(line)
            if actual is None:  # the rank did not run this line
                continue
            # The absolute tolerance covers numbers that are zero but for rounding.
            if not math.isclose(expected, actual, rel_tol=case.max_error, abs_tol=1e-12):
                lines.append(line)
                break

    return [f"{text}: {line}" for line in lines[:MAX_LINES_WITH_STATISTICS]]


def describe_local_comparison(case: Divergence) -> list[str]:
    """Says that the loss compares samples, but each rank only has its own samples."""
    # After a gather, each rank may have compared all samples.
    calls_of_ranks = case.actual.calls  # of all ranks
    some_rank_gathered = any(call.name.startswith("all_gather") for call in calls_of_ranks)
    if some_rank_gathered or case.num_ranks == 1:
        return []

    # Whether samples are compared is recorded only on one process, which has the whole batch.
    samples_are_compared = any(record.loss_compares_samples for record in case.expected)
    if not samples_are_compared:
        return []

    return [
        "the loss compares samples: the gradient of one depends on the output of another",
        "no rank gathered the outputs of the others",
    ]


def first_clip_line(case: Divergence) -> list[str]:
    """Returns the line of the first call that clips gradients; empty if there is none."""
    return [call.line for call in case.actual.clips[:1]]

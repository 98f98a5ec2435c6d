"""Compares a run bit by bit with a run on one process, and gives the verdict.

The *reference* is the run on one process, and the *parallel* run is the one that is judged. Both
use the same *virtual ranks*: parts of every global batch that are computed by themselves. So not a
single bit may differ, because neither dropout nor the order of sums depends on the number of
processes. Both runs have recorded hashes (`lockstep.verify.recording.bit_recorder`), which are
compared in the order in which values follow from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.columns import join_label
from lockstep.language import translate, translate_names
from lockstep.verify.cause import format_items, script_names
from lockstep.verify.finding import Finding, labelled, lines_on_later_steps, verdict_head
from lockstep.verify.run_record import RunRecord
from lockstep.verify.training_record import Update
from lockstep.wording import count_noun, format_ranks

# The kinds of values that are compared, in the order in which they follow from each other, with a
# description. Values of the kinds in `KINDS_OF_PARTS` belong to virtual ranks.
KINDS = {
    "before": "the parameters before the step",
    "samples": "the samples",
    "loss": "the loss",
    "parts": "gradients of virtual ranks",
    "gradients": "gradients",
    "rates": "the learning rates",
    "state": "the optimizer's state after the step",
    "parameters": "the parameters after the step",
    "buffers": "the buffers after the step",
}
KINDS_OF_PARTS = ("samples", "loss", "parts")

ADVICE = (
    "look for what depends on the rank or on the number of processes: an `if` on the rank, a "
    "generator or a seed of your own, another number of threads, a sum over processes by hand"
)


@dataclass(frozen=True)
class BitDifference:
    """Values of one kind whose bits differ in an update."""

    # A key of `KINDS`.
    kind: str
    # Names of the values that differ, in the order of the reference.
    names: Sequence[str]
    num_compared: int
    # Ranks of the parallel run whose bits differ.
    ranks: Sequence[int]

    @property
    def text(self) -> str:
        """What differs: "gradients (1 of 4)"."""
        return f"{KINDS[self.kind]} ({len(self.names)} of {self.num_compared})"


@dataclass(frozen=True)
class FirstDifference:
    """The first update in which bits differ."""

    # Number of the optimizer's step, from 1.
    step: int
    # Number of the optimizer, from 1; None if there is only one.
    optimizer: int | None
    # All kinds that differ in this update; the others may follow from the first one.
    differences: Sequence[BitDifference]

    @property
    def place(self) -> str:
        """Where the bits first differ: "gradients (1 of 4), step 2"."""
        text = f"{self.differences[0].text}, step {self.step}"
        if self.optimizer is not None:
            text += f" of optimizer {self.optimizer}"
        return text


@dataclass(frozen=True)
class BitVerdict:
    """The result of comparing all bits of a run with the reference."""

    reference: RunRecord
    # The parallel run.
    parallel: RunRecord
    # The first update with different bits; None if all bits are equal.
    first_difference: FirstDifference | None = None
    # Findings that are worth knowing, although they make no bits differ.
    notes: Sequence[Finding] = ()

    @property
    def word(self) -> str:
        """The verdict in one word: `EQUAL` or `DIFFERENT`."""
        numbers_differ = len(self.reference.updates) != len(self.parallel.updates)
        bits_differ = self.first_difference is not None
        return "DIFFERENT" if bits_differ or numbers_differ else "EQUAL"

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict as plain values, with the keys that `Verdict.as_json` uses."""
        findings = [note.as_json() for note in self.notes]
        if self.first_difference is not None:
            # Values of several kinds may differ in this update. The first kind is the one that the
            # others follow from, so it is reported in detail.
            differences = self.first_difference.differences
            first_finding = {
                "code": "",
                "title": "the first bits that differ",
                "what": differences[0].kind,
                "step": self.first_difference.step,
                "names": script_names(differences[0].names),
                "ranks": list(differences[0].ranks),
                "seen": [difference.text for difference in differences],
            }
            findings = [first_finding, *findings]

        return {
            "verdict": self.word,  # "EQUAL" or "DIFFERENT"
            "comparison": "bits",
            "virtual_ranks": self.reference.virtual_ranks,
            "way": self.parallel.config.name,  # how the script was run, such as "2 processes"
            "processes": self.parallel.config.nproc,
            "steps": len(self.reference.updates),
            "until": self.reference.stopped_at,  # such as "step 3, batch 3 of 4 of epoch 1"
            "losses": [update.loss for update in self.reference.updates],
            "switched_off": list(self.parallel.switched_off),
            "findings": findings,
        }

    def lines(self) -> list[str]:
        """Returns the lines of the verdict that are printed for the user."""
        head = verdict_head(self.word, self.parallel.config.name)  # "EQUAL  2 processes"
        if self.word == "EQUAL":
            # "EQUAL  2 processes, in every bit: all 4 optimizer steps, losses, ..."
            compared = translate(_describe_compared(self.reference))
            lines = [join_label(head + translate(", in every bit:"), compared)]

            # "  with    virtual_ranks=2, ...": further lines have a column for their label.
            lines.append(labelled("with", translate(self._virtual_ranks_text)))

            lines += lines_on_later_steps(
                stopped_at=self.reference.stopped_at,
                advice_on_more_steps=self.reference.advice_on_more_steps,
            )
        else:
            if self.first_difference is not None:
                lines = self._lines_of_first_difference(head, self.first_difference)
            else:  # no bits differ, but one of the runs made more steps
                lines = [self._line_of_numbers_of_steps(head)]
            lines.append(labelled("with", translate(self._virtual_ranks_text)))
            lines.append(labelled("do", translate(ADVICE)))

        for note in self.notes:
            lines += note.lines(label_of_cause="note")

        return lines

    def _line_of_numbers_of_steps(self, head: str) -> str:
        """Returns the first line of a verdict on runs that only differ in their number of steps.

        It is such as "DIFFERENT  2 processes, in the number of steps: 3 steps, 4 on one process".

        Args:
            head: beginning of the line, such as "DIFFERENT  2 processes".
        """
        steps = f"{len(self.parallel.updates)} steps, {len(self.reference.updates)} on one process"
        return join_label(head + translate(", in the number of steps:"), translate(steps))

    def _lines_of_first_difference(self, head: str, first: FirstDifference) -> list[str]:
        """Returns the lines of a verdict that say where bits differ first.

        For example:

            DIFFERENT  2 processes, bits differ first in gradients (1 of 4), step 2
              where   layer.weight, on rank 1
              then    the parameters after the step (4 of 4)

        Args:
            head: beginning of the first line, such as "DIFFERENT  2 processes".
            first: the first update in which bits differ.
        """
        lines = [head + translate(f", bits differ first in {first.place}")]

        # Several kinds of values may differ in this update, such as gradients and parameters. The
        # other kinds may follow from the first one.
        difference, *later_differences = first.differences

        where = translate_names(format_items(script_names(difference.names)))
        only_some_ranks_differ = len(difference.ranks) < self.parallel.config.nproc
        if only_some_ranks_differ:
            where += translate(f", on {format_ranks(difference.ranks)}")
        lines.append(labelled("where", where))

        if later_differences:
            texts = [translate(later.text) for later in later_differences]
            lines.append(labelled("then", ", ".join(texts)))

        return lines

    @property
    def _virtual_ranks_text(self) -> str:
        """The number of virtual ranks, and whether the script or `verify` has set it."""
        number = self.reference.virtual_ranks
        if self.reference.script_sets_virtual_ranks:
            return f"virtual_ranks={number}, as set for the script"

        text = f"virtual_ranks={number}, set by verify"
        bits_are_equal = self.word == "EQUAL"
        if bits_are_equal:
            text += f"; `lockstep run --virtual-ranks {number}` trains with these bits"
        return text


def judge_bits(reference: RunRecord, parallel: RunRecord) -> BitVerdict:
    """Compares two completed runs bit by bit.

    Args:
        reference: record of the run on one process.
        parallel: record of the run on several processes.
    """
    first_difference = find_first_difference(reference.updates, parallel.updates)
    return BitVerdict(reference, parallel, first_difference)


def find_first_difference(
    reference_run: Sequence[Update], parallel_run: Sequence[Update]
) -> FirstDifference | None:
    """Returns the first update in which bits differ; None if there is none.

    Args:
        reference_run: updates of the run on one process. Each is a tuple with a single record.
        parallel_run: updates of the run on several processes. Each has a record of every rank.
    """
    # Each optimizer has a number, and each update is a step of one of them.
    num_optimizers = len({update[0].optimizer for update in reference_run})

    # Updates at the end that only one of the runs has are ignored.
    for expected, actual in zip(reference_run, parallel_run, strict=False):
        differences = []
        for kind in KINDS:
            difference = compare_bits(kind, expected, actual)
            if difference is not None:
                differences.append(difference)

        if not differences:
            continue

        # The user counts the steps of each optimizer, and the optimizers, from 1.
        record_of_one_process = expected[0]
        step = record_of_one_process.step + 1
        optimizer = None
        if num_optimizers > 1:
            optimizer = record_of_one_process.optimizer + 1
        return FirstDifference(step, optimizer, differences)

    return None


def compare_bits(kind: str, expected: Update, actual: Update) -> BitDifference | None:
    """Compares the hashes of one kind in one update.

    Values of virtual ranks, such as a gradient of virtual rank 3, are spread over the ranks: each
    of them must be on some rank. All other values must be on every rank.

    For example, virtual ranks 0 and 1 are on rank 0, and 2 and 3 on rank 1. If the loss of virtual
    rank 3 has different bits, rank 1 is reported. If no rank has this loss, all ranks are reported.

    Args:
        kind: a key of `KINDS`.
        expected: update of the reference.
        actual: the same update of the parallel run.

    Returns:
        The values that differ, or None if there are none.
    """
    reference_record = expected[0]  # the only one, since the reference runs on one process
    expected_hashes = reference_record.bits.get(kind, {})
    hashes_of_ranks = [record.bits.get(kind, {}) for record in actual]

    # A value of a virtual rank that is missing altogether is no fault of a certain rank.
    names_on_some_rank = set().union(*hashes_of_ranks)
    missing_on_all_ranks = expected_hashes.keys() - names_on_some_rank

    wrong_names_by_rank: dict[int, set[str]] = {}  # only ranks with wrong values
    for rank, hashes in enumerate(hashes_of_ranks):
        wrong_names = _wrong_names_of_rank(kind, expected_hashes, hashes)
        if wrong_names:
            wrong_names_by_rank[rank] = wrong_names

    names_that_differ = missing_on_all_ranks.union(*wrong_names_by_rank.values())
    if not names_that_differ:
        return None

    # In the order of the reference, followed by names that only the parallel run has.
    all_names = [*expected_hashes, *sorted(names_on_some_rank - expected_hashes.keys())]
    ordered_names = [name for name in all_names if name in names_that_differ]

    # If no single rank is at fault, all ranks are named.
    all_ranks = list(range(len(actual)))
    ranks = list(wrong_names_by_rank) or all_ranks
    return BitDifference(kind, ordered_names, len(all_names), ranks)


def _wrong_names_of_rank(
    kind: str, expected_hashes: Mapping[str, str], hashes: Mapping[str, str]
) -> set[str]:
    """Returns the names of values that are wrong on a rank: their bits differ or they are missing.

    Args:
        kind: a key of `KINDS`.
        expected_hashes: hashes of the reference, by name.
        hashes: hashes of the rank, by name.
    """
    names_with_other_bits = {n for n, bits in hashes.items() if expected_hashes.get(n) != bits}
    if kind in KINDS_OF_PARTS:  # other ranks may have the values that this rank does not have
        return names_with_other_bits

    missing_names = expected_hashes.keys() - hashes.keys()
    return names_with_other_bits | missing_names


def _describe_compared(reference: RunRecord) -> str:
    """Lists what was compared: "the first 3 optimizer steps, 8 samples each, losses, ..."."""
    updates = reference.updates
    first = updates[0]  # later updates have the same tensors
    compared = count_noun(len(updates), "optimizer step")
    values = [f"the first {compared}" if reference.stopped_at else f"all {compared}"]

    if first.samples:  # the number of samples of all ranks
        values.append(f"{first.samples} samples each")

    values.append("losses")

    # An update is a sequence with a record for each rank. The reference has only one rank.
    record_of_one_process = first[0]
    bits = record_of_one_process.bits
    for kind, noun in (("gradients", "gradient"), ("parameters", "parameter")):
        values.append(count_noun(len(bits[kind]), noun))

    if bits["state"]:
        values.append(f"{count_noun(len(bits['state']), 'tensor')} of the optimizer's state")

    if bits["buffers"]:
        values.append(count_noun(len(bits["buffers"]), "buffer"))

    values.append("learning rates")
    return ", ".join(values)


def reason_bits_not_comparable(run: RunRecord) -> str:
    """Returns why a run cannot be compared bit by bit; empty if it can be.

    Args:
        run: record of a run with virtual ranks.
    """
    name = run.config.name  # how the script was run, such as "2 processes"
    if run.error:
        headline_of_error = run.error.splitlines()[0]  # such as "UsageError: world.sum(x)"
        found = _found_line(run.error)
        if found:
            return f"{name} with virtual ranks: {found} ({headline_of_error})"
        return f"{name} with virtual ranks: {headline_of_error}"

    if run.idle_ranks:
        return f"{format_ranks(run.idle_ranks)} made no optimizer step"
    if not run.updates:
        return f"{name} made no step of an optimizer that Lockstep has prepared"

    return ""


def _found_line(error: str) -> str:
    """Returns what the line "  found: ..." of an error says; empty if there is no such line."""
    for line in error.splitlines()[1:]:
        text = line.strip()
        if text.startswith("found:"):
            return text.removeprefix("found:").strip()
    return ""

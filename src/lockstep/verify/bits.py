"""Compares a run bit by bit with a run on one process, and gives the verdict.

The *reference* is the run on one process, and the *parallel* run is the one that is judged. Both
use the same *virtual ranks*: parts of every global batch that are computed by themselves. So not a
single bit may differ, because neither dropout nor the order of sums depends on the number of
processes. Both runs have recorded hashes (`lockstep.verify.recording.bits`), which are compared in
the order in which values follow from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.columns import join_label
from lockstep.language import translate, translate_names
from lockstep.verify.cause import format_items, script_names
from lockstep.verify.finding import Finding, labelled, verdict_head
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
    # None if all bits are equal.
    first: FirstDifference | None = None
    # Findings that are worth knowing, although they make no bits differ.
    notes: Sequence[Finding] = ()

    @property
    def word(self) -> str:
        """The verdict in one word: `EQUAL` or `DIFFERENT`."""
        numbers_differ = len(self.reference.updates) != len(self.parallel.updates)
        return "DIFFERENT" if self.first is not None or numbers_differ else "EQUAL"

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict as plain values, with the keys that `Verdict.as_json` uses."""
        findings = [note.as_json() for note in self.notes]
        if self.first is not None:
            # Values of several kinds may differ in this update. The first kind is the one that the
            # others follow from, so it is reported in detail.
            first_kind = self.first.differences[0]
            first_finding = {
                "code": "",
                "title": "the first bits that differ",
                "what": first_kind.kind,
                "step": self.first.step,
                "names": script_names(first_kind.names),
                "ranks": list(first_kind.ranks),
                "seen": [difference.text for difference in self.first.differences],
            }
            findings.insert(0, first_finding)

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
            # `translate` finds the translation of a text although it contains numbers and names.
            compared = translate(_describe_compared(self.reference))
            lines = [join_label(head + translate(", in every bit:"), compared)]

            # "  with    virtual_ranks=2, ...": further lines have a column for their label.
            lines.append(labelled(translate("with"), translate(self._virtual_ranks_text)))

            # `stopped_at` is a text such as "step 3"; empty if the script ran to its end.
            if self.reference.stopped_at:
                until = translate(f"{self.reference.stopped_at}; what comes later is not compared")
                lines.append(labelled(translate("until"), until))
        else:
            lines = self._lines_of_difference(head)

        for note in self.notes:
            lines += note.lines(translate("note"))

        return lines

    def _lines_of_difference(self, head: str) -> list[str]:
        """Returns the lines of a verdict on runs whose bits differ.

        Args:
            head: beginning of the first line, such as "DIFFERENT  2 processes".
        """
        # All bits of the common updates are equal, but one run has more updates:
        # "DIFFERENT  2 processes, in the number of steps: 3 steps, 4 on one process"
        if self.first is None:
            steps = (
                f"{len(self.parallel.updates)} steps, {len(self.reference.updates)} on one process"
            )
            lines = [join_label(head + translate(", in the number of steps:"), translate(steps))]
        else:
            # "DIFFERENT  2 processes, bits differ first in gradients (1 of 4), step 2"
            lines = [head + translate(f", bits differ first in {self.first.place}")]

            # Several kinds of values may differ in this update, such as gradients and parameters.
            # The other kinds may follow from the first one.
            difference, *later_differences = self.first.differences

            # "  where   layer.weight, on rank 1": the ranks are named if only some of them differ.
            where = translate_names(format_items(script_names(difference.names)))
            if len(difference.ranks) < self.parallel.config.nproc:
                where += translate(f", on {format_ranks(difference.ranks)}")
            lines.append(labelled(translate("where"), where))

            # "  then    the parameters after the step (4 of 4)"
            if later_differences:
                texts = [translate(later.text) for later in later_differences]
                lines.append(labelled(translate("then"), ", ".join(texts)))

        lines.append(labelled(translate("with"), translate(self._virtual_ranks_text)))
        lines.append(labelled(translate("do"), translate(ADVICE)))
        return lines

    @property
    def _virtual_ranks_text(self) -> str:
        """The number of virtual ranks, and whether the script or `verify` has set it."""
        number = self.reference.virtual_ranks
        if self.reference.virtual_ranks_are_own:
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
    return BitVerdict(
        reference, parallel, first=find_first_difference(reference.updates, parallel.updates)
    )


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

    Values of virtual ranks are spread over the ranks, because each rank computes some of the
    virtual ranks. All other values are the same on every rank, so each rank is compared with the
    reference.

    Args:
        kind: a key of `KINDS`.
        expected: update of the reference.
        actual: the same update of the parallel run.

    Returns:
        The values that differ, or None if there are none.
    """
    expected_hashes = expected[0].bits.get(kind, {})
    is_spread = kind in KINDS_OF_PARTS
    hashes_of_all: dict[str, str] = {}
    names_that_differ: set[str] = set()
    ranks_that_differ = []

    for number, rank in enumerate(actual):
        hashes = rank.bits.get(kind, {})
        hashes_of_all |= hashes

        # Values of this rank that the reference has with other bits, or does not have at all.
        names = _names_that_differ(expected_hashes, hashes)

        # A value that should be on every rank is missing on this one.
        missing_on_rank = expected_hashes.keys() - hashes.keys()
        if not is_spread:
            names |= missing_on_rank

        if names:
            names_that_differ |= names
            ranks_that_differ.append(number)

    # A value that should be on some rank is missing on all of them.
    missing_on_all_ranks = expected_hashes.keys() - hashes_of_all.keys()
    names_that_differ |= missing_on_all_ranks
    if not names_that_differ:
        return None

    # In the order of the reference, followed by names that only the parallel run has.
    all_names = [*expected_hashes, *sorted(hashes_of_all.keys() - expected_hashes.keys())]
    ordered_names = [name for name in all_names if name in names_that_differ]

    # A value of a virtual rank that is missing on all ranks is to be blamed on none of them in
    # particular, so all ranks are named.
    ranks = ranks_that_differ
    if not ranks:
        ranks = list(range(len(actual)))
    return BitDifference(kind, ordered_names, len(all_names), ranks)


def _names_that_differ(expected: Mapping[str, str], actual: Mapping[str, str]) -> set[str]:
    """Returns the names of a rank's values that the reference does not have with the same bits."""
    return {name for name, text in actual.items() if expected.get(name) != text}


def _describe_compared(reference: RunRecord) -> str:
    """Lists what was compared: "the first 3 optimizer steps, 8 samples each, losses, ..."."""
    updates = reference.updates
    first = updates[0]  # later updates have the same tensors
    compared = count_noun(len(updates), "optimizer step")
    values = [f"the first {compared}" if reference.stopped_at else f"all {compared}"]

    if first.samples:  # the number of samples of all ranks
        values.append(f"{first.samples} samples each")

    # An update is a sequence with a record for each rank. The reference has only one rank.
    values.append("losses")
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
        # The error is a text such as "SettingError: virtual_ranks=2 with strategy='pipeline'",
        # followed by lines such as "  found: ...".
        first_line, *other_lines = run.error.splitlines()
        found = ""
        for line in other_lines:
            if line.strip().startswith("found:"):
                found = f": {line.partition('found:')[2].strip()}"
                break
        return f"{name} with virtual ranks: {first_line}{found}"

    if run.idle_ranks:
        return f"{format_ranks(run.idle_ranks)} made no optimizer step"
    if not run.updates:
        return f"{name} made no step of an optimizer that Lockstep has prepared"

    return ""

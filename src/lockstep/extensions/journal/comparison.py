"""Compares the journals of two runs: finds the first step that differs, and what differed first.

A step computes losses, then gradients, then the update of weights and optimizer state. The first of
these that differs between the two runs, called A and B, says where to look. Losses: the data,
dropout or the forward pass. Gradients: the backward pass. The update: the sum of the gradients, the
optimizer or its settings.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError
from lockstep.extensions.journal.reading import Journal, JournalStep
from lockstep.wording import count_noun, join_first

MAX_NAMES_IN_TEXT = 3
MAX_VALUE_LENGTH = 100
"""Longer values of the manifest are cut off in the text."""


@dataclass
class StepDifferences:
    """What two runs computed differently in a step."""

    step: int
    has_hashes: bool = False
    """True if hashes were compared, and not only losses."""
    step_before: int | None = None
    """The last step before this one that was compared; None if this is the first."""
    hashes_before: int | None = None
    """The last step before this one whose hashes were compared; None if there is none."""
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The losses that differ: in A and in B, by virtual rank, or by rank without virtual ranks."""
    gradients: dict[int, list[str]] = field(default_factory=dict)
    """The parameters whose gradients differ, in the order of the model, by virtual rank."""
    state: list[str] = field(default_factory=list)
    """The parameters whose optimizer state differs after the step."""
    weights: list[str] = field(default_factory=list)
    """The parameters and buffers that differ after the step."""
    gradients_are_known: bool = False
    """True if gradients were compared."""
    has_losses: bool = False
    """True if losses were compared."""

    @property
    def is_empty(self) -> bool:
        """True if nothing differs."""
        return not (self.losses or self.gradients or self.state or self.weights)

    @property
    def differed_first(self) -> str:
        """What differed first within the step, for example "loss" or "weights"."""
        if self.losses:
            return "loss"
        if self.gradients:
            return "gradient"

        # Weights and optimizer state are updated together, so neither of them comes first.
        if self.weights and self.state:
            return "weights and optimizer state"
        return "weights" if self.weights else "optimizer state"


@dataclass
class JournalComparison:
    """How the journals of two runs differ."""

    journals: list[Journal]
    num_with_hashes: int = 0
    """Number of steps whose hashes were compared."""
    num_with_losses_only: int = 0
    """Number of other steps, of which only the losses were compared: not both runs have hashes."""
    weights_at_beginning: list[str] = field(default_factory=list)
    """The names of the weights that differ before the first step."""
    first_difference: StepDifferences | None = None
    manifest: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """The values of the manifest that differ: in A and in B, by name."""
    notes: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """True if the runs computed something differently."""
        return bool(self.weights_at_beginning) or self.first_difference is not None

    def lines(self) -> list[str]:
        """Returns the comparison as lines of text."""
        lines = []
        for letter, journal in zip("AB", self.journals, strict=True):
            lines.append(f"{letter}: {describe_journal(journal)}")
            for note in journal.notes:
                lines.append(f"  note: {note}")
        lines += [f"note: {note}" for note in self.notes]

        if self.weights_at_beginning:
            names = _some_names(self.weights_at_beginning)
            lines.append(f"the weights differ before the first step: {names}")
        if self.first_difference is not None:
            lines += self._describe_first_difference(self.first_difference)
        else:
            lines.append(self._describe_equal_steps())

        if self.manifest:
            lines.append("the manifests differ:")
            for name, (value_a, value_b) in self.manifest.items():
                lines.append(f"  {name}: A has {_shown(value_a)}, B has {_shown(value_b)}")
        elif self.differs:
            lines.append("the manifests are equal")
        return lines

    def _describe_equal_steps(self) -> str:
        """Describes how many steps were compared, if all of them are equal.

        Of the steps without hashes in both runs (`num_with_losses_only`), only the losses were
        compared. Example of 20 steps, of which both runs have written hashes of 2: "equal in every
        bit: 2 steps; equal losses: 18 steps between them, whose hashes are not in both".
        """
        with_losses_only = count_noun(self.num_with_losses_only, "step")
        if not self.num_with_hashes:
            return f"equal losses: {with_losses_only}, whose hashes are not in both"

        text = f"equal in every bit: {count_noun(self.num_with_hashes, 'step')}"
        if self.num_with_losses_only:
            text += f"; equal losses: {with_losses_only} between them, whose hashes are not in both"
        return text

    def _describe_first_difference(self, found: StepDifferences) -> list[str]:
        """Describes the first step that differs, as lines of text."""
        # If the runs began with different weights, it is no surprise that the steps differ.
        if self.weights_at_beginning:
            first_line = f"step {found.step}: the {found.differed_first} differs, too"
        else:
            first_line = f"step {found.step}: the {found.differed_first} diverged first"
        lines = [first_line + _describe_equal_before(found)]

        has_virtual_ranks = self.journals[0].virtual_ranks is not None
        part = "virtual rank" if has_virtual_ranks else "rank"
        if found.losses:
            number = min(found.losses)
            loss_a, loss_b = found.losses[number]
            lines.append(
                f"  loss: {part} {number}, {loss_a!r} in A and {loss_b!r} in B"
                f"{_and_others(len(found.losses) - 1, part)}"
            )

        # Equal gradients are worth a line only if the losses are equal, too: then the difference
        # arose in the optimizer's step.
        arose_in_optimizer_step = not found.losses and not found.gradients
        if found.gradients:
            number = min(found.gradients)
            lines.append(
                f"  gradient: virtual rank {number}, {_some_names(found.gradients[number])}"
                f"{_and_others(len(found.gradients) - 1, part)}"
            )
        elif found.gradients_are_known and arose_in_optimizer_step:
            lines.append("  gradient: equal on all virtual ranks")

        if found.state:
            lines.append(f"  optimizer state after the step: {_some_names(found.state)}")
        if found.weights:
            lines.append(f"  weights after the step: {_some_names(found.weights)}")

        # If hashes of this step or of the last equal step are missing, gradients or weights may
        # have differed before the losses did. Example: losses differ at step 6 and were equal at
        # step 5, but the last step with hashes in both runs is 3.
        last_equal_step = found.step_before
        last_step_with_hashes = found.hashes_before
        last_equal_step_has_hashes = last_step_with_hashes == last_equal_step
        if not (found.has_hashes and last_equal_step_has_hashes):
            lines.append(
                "  of steps without hashes only losses are known: to see what diverged before, "
                "train both again with --journal-every 1"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as values that `json.dumps` accepts.

        The keys are documented, so they stay even where an attribute has another name now: what
        differed first is under "parted_first", and the number of steps of which only the losses
        were compared is under "steps_with_compared_losses".
        """
        found = self.first_difference
        return {
            "equal": not self.differs,
            "compared_steps": self.num_with_hashes,
            "steps_with_compared_losses": self.num_with_losses_only,
            "weights_at_beginning": self.weights_at_beginning,
            "parted_first": None if found is None else found.differed_first,
            "first_difference": None if found is None else asdict(found),
            "manifest": self.manifest,
            "notes": self.notes,
        }


def _describe_equal_before(found: StepDifferences) -> str:
    """Returns how far two runs are equal before the first step that differs.

    For example "; equal up to step 3, and losses up to step 5", if only losses were written for the
    steps 4 and 5. Returns "" if no step before it was compared.
    """
    last_equal_step = found.step_before  # 5 in the example
    last_step_with_hashes = found.hashes_before  # 3 in the example
    if last_equal_step is None:
        return ""

    if last_step_with_hashes is None:
        text = f"; equal losses up to step {last_equal_step}"
    elif last_step_with_hashes == last_equal_step:
        text = f"; equal up to step {last_equal_step}"
    else:
        text = f"; equal up to step {last_step_with_hashes}"
        text += f", and losses up to step {last_equal_step}"

    # For example, the last equal step is 5 and the first that differs is 8. Then one of the runs
    # has no records of the steps 6 and 7.
    if last_equal_step < found.step - 1:
        text += ", the steps between were not written down by both"
    return text


def compare_journals(journal_a: Journal, journal_b: Journal) -> JournalComparison:
    """Compares two journals, up to the first step that differs.

    Raises:
        CheckpointError: if the journals have no step in common that can be compared.
    """
    comparison = JournalComparison([journal_a, journal_b])
    comparison.manifest = _compare_manifests(journal_a.manifest, journal_b.manifest)

    # The weights at the beginning can only be compared if both runs began at the same step.
    if journal_a.begins_at == journal_b.begins_at:
        weights_a = journal_a.weights_at_beginning
        weights_b = journal_b.weights_at_beginning
        for name in dict.fromkeys([*weights_a, *weights_b]):
            if weights_a.get(name) != weights_b.get(name):
                comparison.weights_at_beginning.append(name)

    steps_of_b = set(journal_b.steps)
    common_steps = [step for step in journal_a.steps if step in steps_of_b]
    if not common_steps:
        raise CheckpointError(
            f"the journals {journal_a.folder} and {journal_b.folder}",
            "they have no step in common",
            "give two runs that have trained the same steps",
        )

    comparison.notes += _notes_on_comparison(journal_a, journal_b)

    _compare_steps(comparison, common_steps)

    # Perhaps nothing could be compared. For example, no step has hashes in both runs, and the runs
    # have different numbers of ranks, each of which has written its own loss.
    compared_nothing = comparison.num_with_hashes == 0 and comparison.num_with_losses_only == 0
    if compared_nothing:
        raise CheckpointError(
            f"the journals {journal_a.folder} and {journal_b.folder}",
            "no step has hashes in both, and their losses are of different parts of the batch",
            "train both with --journal-every 1",
        )
    return comparison


def _notes_on_comparison(journal_a: Journal, journal_b: Journal) -> list[str]:
    """Returns notes on what cannot be compared between two journals."""
    notes: list[str] = []
    for letter, journal, other in (("A", journal_a, journal_b), ("B", journal_b, journal_a)):
        num_alone = len(set(journal.steps) - set(other.steps))
        if num_alone:
            notes.append(f"{count_noun(num_alone, 'step')} only in {letter}")

    if journal_a.virtual_ranks != journal_b.virtual_ranks:
        notes.append("the runs have other virtual ranks, so losses and gradients are not compared")
    elif journal_a.virtual_ranks is None:  # both have none
        notes.append(
            "without virtual ranks gradients are not written down, only losses, weights and "
            "optimizer state"
        )
    return notes


def _compare_steps(comparison: JournalComparison, common_steps: Sequence[int]) -> None:
    """Compares the steps of two journals in order, and stops at the first that differs.

    Writes that step, and how many steps were compared, into `comparison`.
    """
    journal_a, journal_b = comparison.journals
    last_equal_step = None
    last_step_with_equal_hashes = None
    for step in common_steps:
        differences = _compare_step(journal_a, journal_b, step)
        if differences.has_hashes:
            comparison.num_with_hashes += 1
        elif differences.has_losses:
            comparison.num_with_losses_only += 1
        else:  # nothing in this step can be compared
            continue

        if not differences.is_empty:
            differences.step_before = last_equal_step
            # The hashes may be only in every tenth step, for example. Then weights that differ may
            # have done so since any step after this one.
            differences.hashes_before = last_step_with_equal_hashes
            comparison.first_difference = differences
            return

        last_equal_step = step
        if differences.has_hashes:
            last_step_with_equal_hashes = step


def _compare_step(journal_a: Journal, journal_b: Journal, step: int) -> StepDifferences:
    """Compares what two runs computed in a step."""
    a = journal_a.read_step(step)
    b = journal_b.read_step(step)
    differences = StepDifferences(step)
    differences.has_hashes = a.has_hashes and b.has_hashes

    # Losses and gradients belong to parts of the global batch: one for each virtual rank; if there
    # are none, one for each rank.
    if _have_same_parts(journal_a, journal_b, step_a=a, step_b=b):
        differences.has_losses = True
        differences.losses = _differing_losses(a, b)
        if differences.has_hashes:
            # Without virtual ranks, no gradients are recorded.
            differences.gradients_are_known = journal_a.virtual_ranks is not None
            differences.gradients = _differing_gradients(a, b)

    if differences.has_hashes:
        differences.state = _differing_names(a.parameter_names, a.state, b.parameter_names, b.state)
        differences.weights = _differing_names(a.names, a.weights, b.names, b.weights)
    return differences


def _differing_losses(a: JournalStep, b: JournalStep) -> dict[int, tuple[float, float]]:
    """Returns the losses in A and in B of each part of the global batch in which they differ.

    A virtual rank whose loss is missing had no samples, so its loss is 0.
    """
    differing = {}
    for part in sorted(set(a.losses) | set(b.losses)):
        loss_a = a.losses.get(part, 0.0)
        loss_b = b.losses.get(part, 0.0)
        if _bits(loss_a) != _bits(loss_b):
            differing[part] = (loss_a, loss_b)
    return differing


def _differing_gradients(a: JournalStep, b: JournalStep) -> dict[int, list[str]]:
    """Returns the parameters whose gradients differ, by the virtual rank."""
    differing = {}
    for virtual_rank in sorted(set(a.gradients) | set(b.gradients)):
        gradients_a = _gradient_hashes(a, virtual_rank)
        gradients_b = _gradient_hashes(b, virtual_rank)
        names = _differing_names(a.parameter_names, gradients_a, b.parameter_names, gradients_b)
        if names:
            differing[virtual_rank] = names
    return differing


def _have_same_parts(
    journal_a: Journal, journal_b: Journal, step_a: JournalStep, step_b: JournalStep
) -> bool:
    """Returns True if two runs divided the global batch of a step into the same parts.

    Only then can the losses and gradients be compared, which belong to these parts.
    """
    if journal_a.virtual_ranks != journal_b.virtual_ranks:
        return False

    # With equally many virtual ranks, the parts are the same on any number of ranks.
    if journal_a.virtual_ranks is not None:
        return True

    # Without virtual ranks, each rank has a part. The losses are stored by rank.
    ranks_of_a = set(step_a.losses)
    ranks_of_b = set(step_b.losses)
    return ranks_of_a == ranks_of_b


def _gradient_hashes(step: JournalStep, virtual_rank: int) -> npt.NDArray[np.uint64]:
    """Returns the gradient hashes of a virtual rank, which are zeros if it had no samples."""
    if virtual_rank in step.gradients:
        return step.gradients[virtual_rank]
    return np.zeros(step.num_parameters, np.uint64)


def _differing_names(
    names_a: Sequence[str],
    hashes_a: npt.NDArray[np.uint64],
    names_b: Sequence[str],
    hashes_b: npt.NDArray[np.uint64],
) -> list[str]:
    """Returns the names whose hashes differ between A and B, or that only one of them has."""
    if names_a == names_b:  # the usual case, in a faster way
        return [names_a[index] for index in np.flatnonzero(hashes_a != hashes_b).tolist()]

    hash_in_a = dict(zip(names_a, hashes_a.tolist(), strict=True))
    hash_in_b = dict(zip(names_b, hashes_b.tolist(), strict=True))
    names = dict.fromkeys([*names_a, *names_b])
    return [name for name in names if hash_in_a.get(name) != hash_in_b.get(name)]


def _compare_manifests(
    manifest_a: Mapping[str, str], manifest_b: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """Returns the values that differ, in A and in B, by name. A missing value is None."""
    differing: dict[str, tuple[str | None, str | None]] = {}
    for name in dict.fromkeys([*manifest_a, *manifest_b]):
        value_a = manifest_a.get(name)
        value_b = manifest_b.get(name)
        if value_a != value_b:
            differing[name] = (value_a, value_b)
    return differing


def describe_journal(journal: Journal) -> str:
    """Returns a line like "runs/a: 48 steps, 0 to 47; 8 virtual ranks; 2 processes"."""
    steps = journal.steps
    text = f"{journal.folder}: {count_noun(len(steps), 'step')}"
    if steps:
        text += f", {steps[0]} to {steps[-1]}"
    if journal.every > 1:
        text += f"; hashes every {journal.every} steps"
    if journal.virtual_ranks is not None:
        text += f"; {count_noun(journal.virtual_ranks, 'virtual rank')}"
    text += f"; {count_noun(journal.num_ranks, 'process')}"
    if journal.num_starts > 1:
        text += f"; {count_noun(journal.num_starts, 'start')}"
    if journal.num_trained_again:
        text += f", {count_noun(journal.num_trained_again, 'step')} trained again"
    return text


def _bits(number: float) -> bytes:
    """Returns the bits of a number, for a comparison in which a NaN equals itself."""
    return struct.pack("<d", number)


def _some_names(names: Sequence[str]) -> str:
    """Lists the first few names, followed by the number of names if there are more."""
    text = join_first(names, MAX_NAMES_IN_TEXT)
    if len(names) > MAX_NAMES_IN_TEXT:
        text += f" ({len(names)} tensors)"
    return text


def _and_others(number: int, part: str) -> str:
    """Returns for example "; and 2 other virtual ranks", or "" if there are none."""
    if number == 0:
        return ""
    return f"; and {count_noun(number, f'other {part}')}"


def _shown(value: str | None) -> str:
    """Returns a value of the manifest as it is printed, cut off if it is long."""
    if value is None:
        return "none"
    if len(value) > MAX_VALUE_LENGTH:
        return f"{value[:MAX_VALUE_LENGTH]}..."
    return value

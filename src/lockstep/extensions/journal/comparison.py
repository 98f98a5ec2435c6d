"""Compares the journals of two runs: the first step at which they part, and what parted first.

In a step, losses come first, then gradients, then the update: weights and optimizer state. What
parts first says where to look: losses for data, dropout and forward passes; gradients for backward
passes; the update for the sum of the gradients, the optimizer and its settings.
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
    """What two runs have computed differently in a step."""

    step: int
    has_hashes: bool = False
    """True if hashes were compared, and not only losses."""
    step_before: int | None = None
    """The step before it that was compared; None: it is the first."""
    hashes_before: int | None = None
    """The last step before it whose hashes were compared; None: there is none."""
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By virtual rank, or by rank: the loss in A and in B."""
    gradients: dict[int, list[str]] = field(default_factory=dict)
    """By virtual rank, the parameters whose gradients differ, in the order of the model."""
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
    def parted_first(self) -> str:
        """What parted first: "loss", "gradient", "weights", "optimizer state" or both."""
        if self.losses:
            return "loss"
        if self.gradients:
            return "gradient"
        if self.weights and self.state:
            return "weights and optimizer state"
        return "weights" if self.weights else "optimizer state"


@dataclass
class JournalComparison:
    """How the journals of two runs differ."""

    journals: list[Journal]
    num_compared: int = 0
    """Steps whose hashes were compared."""
    num_compared_losses: int = 0
    """Other steps, of which only the losses were compared."""
    weights_at_beginning: list[str] = field(default_factory=list)
    """The names of the weights that differ before the first step."""
    first_difference: StepDifferences | None = None
    manifest: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """The lines of the manifest that differ, in A and in B."""
    notes: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """True if the runs have computed something differently."""
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
        """Returns a line about steps that are all equal."""
        others = count_noun(self.num_compared_losses, "step")
        if not self.num_compared:
            return f"equal losses: {others}, of which not both have hashes"
        text = f"equal in every bit: {count_noun(self.num_compared, 'step')}"
        if self.num_compared_losses:
            text += f"; equal losses: {others} between them, of which not both have hashes"
        return text

    def _describe_first_difference(self, found: StepDifferences) -> list[str]:
        """Returns lines about the first step that differs."""
        has_virtual_ranks = self.journals[0].virtual_ranks is not None
        part = "virtual rank" if has_virtual_ranks else "rank"
        first_line = f"step {found.step}: the {found.parted_first} parted first"
        if self.weights_at_beginning:
            first_line = f"step {found.step}: the {found.parted_first} differs, too"
        if found.step_before is not None:
            if found.hashes_before == found.step_before:
                first_line += f"; equal up to step {found.step_before}"
            elif found.hashes_before is None:
                first_line += f"; equal losses up to step {found.step_before}"
            else:
                first_line += f"; equal up to step {found.hashes_before}"
                first_line += f", and losses up to step {found.step_before}"
            if found.step_before < found.step - 1:
                first_line += ", the steps between were not written down by both"
        lines = [first_line]
        if found.losses:
            number = min(found.losses)
            loss_a, loss_b = found.losses[number]
            lines.append(
                f"  loss: {part} {number}, {loss_a!r} in A and {loss_b!r} in B"
                f"{_and_others(len(found.losses) - 1, part)}"
            )
        if found.gradients:
            number = min(found.gradients)
            lines.append(
                f"  gradient: virtual rank {number}, {_some_names(found.gradients[number])}"
                f"{_and_others(len(found.gradients) - 1, part)}"
            )
        elif found.gradients_are_known and not found.losses:
            lines.append("  gradient: equal on all virtual ranks")
        if found.state:
            lines.append(f"  optimizer state after the step: {_some_names(found.state)}")
        if found.weights:
            lines.append(f"  weights after the step: {_some_names(found.weights)}")
        if found.hashes_before != found.step_before or not found.has_hashes:
            lines.append(
                "  of steps without hashes only losses are known: to see what parted before, train "
                "both again with --journal-every 1"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as values for `json.dumps`."""
        found = self.first_difference
        return {
            "equal": not self.differs,
            "compared_steps": self.num_compared,
            "steps_with_compared_losses": self.num_compared_losses,
            "weights_at_beginning": self.weights_at_beginning,
            "parted_first": None if found is None else found.parted_first,
            "first_difference": None if found is None else asdict(found),
            "manifest": self.manifest,
            "notes": self.notes,
        }


def compare_journals(journal_a: Journal, journal_b: Journal) -> JournalComparison:
    """Compares two journals.

    Raises:
        CheckpointError: they have no step in common, so that nothing can be compared.
    """
    comparison = JournalComparison([journal_a, journal_b])
    comparison.manifest = _compare_manifests(journal_a.manifest, journal_b.manifest)
    if journal_a.begins_at == journal_b.begins_at:
        weights_a = journal_a.weights_at_beginning
        weights_b = journal_b.weights_at_beginning
        for name in [*weights_a, *(name for name in weights_b if name not in weights_a)]:
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
    for letter, journal, other in (("A", journal_a, journal_b), ("B", journal_b, journal_a)):
        num_alone = len(set(journal.steps) - set(other.steps))
        if num_alone:
            comparison.notes.append(f"{count_noun(num_alone, 'step')} only in {letter}")
    if journal_a.virtual_ranks != journal_b.virtual_ranks:
        comparison.notes.append(
            "the runs have other virtual ranks, so losses and gradients are not compared"
        )
    elif journal_a.virtual_ranks is None:
        comparison.notes.append(
            "without virtual ranks gradients are not written down, only losses, weights and "
            "optimizer state"
        )
    step_before = None
    hashes_before = None
    for step in common_steps:
        differences = _compare_step(journal_a, journal_b, step)
        if differences.has_hashes:
            comparison.num_compared += 1
        elif differences.has_losses:
            comparison.num_compared_losses += 1
        else:
            continue
        if not differences.is_empty:
            differences.step_before = step_before
            differences.hashes_before = hashes_before
            comparison.first_difference = differences
            break
        step_before = step
        if differences.has_hashes:
            hashes_before = step
    if not comparison.num_compared and not comparison.num_compared_losses:
        raise CheckpointError(
            f"the journals {journal_a.folder} and {journal_b.folder}",
            "of no step both have hashes, and their losses are of other parts of the batch",
            "train both with --journal-every 1",
        )
    return comparison


def _compare_step(journal_a: Journal, journal_b: Journal, step: int) -> StepDifferences:
    """Returns what differs in a step."""
    a = journal_a.read_step(step)
    b = journal_b.read_step(step)
    differences = StepDifferences(step)
    differences.has_hashes = a.has_hashes and b.has_hashes
    parameters_a = a.names[: a.num_parameters]
    parameters_b = b.names[: b.num_parameters]
    has_same_parts = journal_a.virtual_ranks == journal_b.virtual_ranks
    if journal_a.virtual_ranks is None:  # the parts are ranks
        has_same_parts = has_same_parts and set(a.losses) == set(b.losses)
    differences.has_losses = has_same_parts
    if has_same_parts:
        for number in sorted(set(a.losses) | set(b.losses)):
            loss_a = a.losses.get(number, 0.0)
            loss_b = b.losses.get(number, 0.0)
            if _bits(loss_a) != _bits(loss_b):
                differences.losses[number] = (loss_a, loss_b)
    if not differences.has_hashes:
        return differences
    if has_same_parts:
        differences.gradients_are_known = journal_a.virtual_ranks is not None
        for number in sorted(set(a.gradients) | set(b.gradients)):
            names = _differing_names(parameters_a, _row(a, number), parameters_b, _row(b, number))
            if names:
                differences.gradients[number] = names
    differences.state = _differing_names(parameters_a, a.state, parameters_b, b.state)
    differences.weights = _differing_names(a.names, a.weights, b.names, b.weights)
    return differences


def _row(step: JournalStep, virtual_rank: int) -> npt.NDArray[np.uint64]:
    """Returns the hashes of the gradient of a virtual rank; zeros if it had no samples."""
    if virtual_rank in step.gradients:
        return step.gradients[virtual_rank]
    return np.zeros(step.num_parameters, np.uint64)


def _differing_names(
    names_a: Sequence[str],
    hashes_a: npt.NDArray[np.uint64],
    names_b: Sequence[str],
    hashes_b: npt.NDArray[np.uint64],
) -> list[str]:
    """Returns the names whose hashes differ, or that only one of both has."""
    if names_a == names_b:
        return [names_a[place] for place in np.flatnonzero(hashes_a != hashes_b).tolist()]
    hash_of_a = dict(zip(names_a, hashes_a.tolist(), strict=True))
    hash_of_b = dict(zip(names_b, hashes_b.tolist(), strict=True))
    names = dict.fromkeys([*names_a, *names_b])
    return [name for name in names if hash_of_a.get(name) != hash_of_b.get(name)]


def _compare_manifests(
    manifest_a: Mapping[str, str], manifest_b: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """Returns the lines that differ; None for one that is not there."""
    differing: dict[str, tuple[str | None, str | None]] = {}
    for name in dict.fromkeys([*manifest_a, *manifest_b]):
        value_a = manifest_a.get(name)
        value_b = manifest_b.get(name)
        if value_a != value_b:
            differing[name] = (value_a, value_b)
    return differing


def describe_journal(journal: Journal) -> str:
    """Returns a line about a journal, such as "runs/a: 48 steps, 0 to 47; 8 virtual ranks; ..."."""
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
    """Returns the bits of a number, by which -0.0 differs from 0.0 and a NaN equals itself."""
    return struct.pack("<d", number)


def _some_names(names: Sequence[str]) -> str:
    """Returns the first names, and how many there are if not all are listed."""
    text = join_first(names, MAX_NAMES_IN_TEXT)
    if len(names) > MAX_NAMES_IN_TEXT:
        text += f" ({len(names)} tensors)"
    return text


def _and_others(number: int, part: str) -> str:
    """Returns "; and 2 other virtual ranks", or nothing if there are none."""
    if number == 0:
        return ""
    return f"; and {count_noun(number, f'other {part}')}"


def _shown(value: str | None) -> str:
    """Returns a value of the manifest as it is printed."""
    if value is None:
        return "none"
    if len(value) > MAX_VALUE_LENGTH:
        return f"{value[:MAX_VALUE_LENGTH]}..."
    return value

"""The verdict on a run: all differences from the reference, the first one first.

The *reference* is the run on one process, the *parallel* run the one that is judged. `judge`
compares them and returns a `Verdict`, which can be shown to people or written as JSON.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.errors import LockstepError
from lockstep.verify.accepted_differences import accept_differences
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.compare import (
    Divergence,
    find_divergences,
    num_comparable_updates,
    tolerance_of,
)
from lockstep.verify.finding import Finding
from lockstep.verify.joined_parts import join_parts
from lockstep.verify.line_findings import splitting_branches
from lockstep.verify.names import align_names
from lockstep.verify.rules.evidence import gradient_patterns
from lockstep.verify.run_record import RunRecord
from lockstep.verify.sample_rows import without_rows_that_are_no_samples
from lockstep.verify.self_checks import cause_or_failure, findings_without_reference
from lockstep.verify.tolerance import FLOAT64
from lockstep.verify.unsupported import recording_failed_error
from lockstep.wording import format_ranks

# Causes that are only the order, the number or the augmentation of samples. Other mistakes may be
# hidden behind them, unless both runs train on the same samples.
CODES_OF_SAMPLE_ORDER = {"LS107", "LS109", "LS110"}

# Kinds of differences whose rules need whole tensors on each rank.
KINDS_THAT_NEED_WHOLE_TENSORS = ("gradients", "unclipped", "kept", "parameters")


@dataclass(frozen=True)
class Verdict:
    """What a comparison with the reference has found."""

    reference: RunRecord
    other: RunRecord
    # The first difference first, then what is known without the reference.
    findings: tuple[Finding, ...] = ()
    # What differs but is no finding, because the parameters are equal all the same.
    accepted: str = ""
    # Why nothing can be said; empty if something can.
    unknown: str = ""
    # What to do then.
    unknown_advice: str = ""

    @property
    def word(self) -> str:
        """`EQUAL`, `DIFFERENT`, `NOT KNOWN`, or `FAILED`: the script ended with another error."""
        if self.unknown:
            return "NOT KNOWN"
        if self.other.error:
            return "DIFFERENT" if self.other.code else "FAILED"
        if any(finding.case for finding in self.findings):
            return "DIFFERENT"
        return "EQUAL"

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict in plain values."""
        return {
            "verdict": self.word,
            "way": self.other.config.name,
            "processes": self.other.config.nproc,
            "steps": len(self.reference.updates),
            "until": self.reference.stopped_at,
            "losses": [update.loss for update in self.reference.updates],
            "switched_off": list(self.other.switched_off),
            "by_choice": self.other.by_choice,
            "not_known": self.unknown,
            "batch_per_process": self.batch_not_enlarged,
            "findings": [finding.as_json() for finding in self.findings],
        }

    @property
    def batch_not_enlarged(self) -> str:
        """What `--batch-per-process` could not do, in words; empty if it did what it is for."""
        run = self.reference
        if run.config.batch_times == 1 or run.uses_lockstep:
            return ""
        line = run.unenlarged_loader_line
        if line:
            return f"it could not enlarge a DataLoader that has no batch size: {line}"
        if not run.num_loaders:
            return "it changed nothing, as no DataLoader of torch was trained on"
        return ""

    @property
    def _other_samples_may_hide_differences(self) -> bool:
        """Whether `--same-samples` would help: the first difference is one of sample order."""
        has_same_samples = self.reference.config.batches_folder is not None
        if self.word != "DIFFERENT" or self.reference.uses_lockstep or has_same_samples:
            return False
        first_code = self.findings[0].cause.code
        return first_code in CODES_OF_SAMPLE_ORDER and self.reference.num_loaders > 0

    def lines(self) -> list[str]:
        """Returns the verdict in lines for people."""
        head = f"{self.word:9}  {self.other.config.name}"
        if self.unknown:
            lines = [f"{head}: {self.unknown}", f"  do      {self.unknown_advice}"]
        elif self.word == "EQUAL":
            lines = self._lines_of_equal_runs(head)
        else:
            lines = self._lines_of_findings(head)
        if self._other_samples_may_hide_differences:
            lines.append(
                "  then    with --same-samples one process trains on the batches of all ranks, so "
                "that the rest is compared too"
            )
        if self.batch_not_enlarged:
            lines.append(f"  note    --batch-per-process: {self.batch_not_enlarged}")
        return lines

    def _lines_of_equal_runs(self, head: str) -> list[str]:
        """Returns the lines for runs without a difference: what was compared, and what was not."""
        lines = []
        if self.other.by_choice:
            lines.append(
                f"DIFFERENT by choice: {self.other.by_choice}; all else is compared without"
            )
        lines.append(f"{head}: {_describe_compared_values(self.reference)}")
        lines += self._tolerance_line()
        if self.accepted:
            lines.append(f"  but     {self.accepted}")
        if self.reference.stopped_at:
            until = self.reference.stopped_at
            lines.append(f"  until   {until}; what comes later is not compared")
        for finding in self.findings:
            lines += finding.lines("also")
        return lines

    def _lines_of_findings(self, head: str) -> list[str]:
        """Returns the lines for runs that differ: the first finding in full, then the others."""
        first, *others = self.findings
        lines = [head]
        if first.place:
            lines = [f"{head}, first in {first.place}"]
        lines += first.lines(by_lockstep=self.reference.uses_lockstep)
        if first.case is not None:
            lines += self._tolerance_line()
        for finding in others:
            if finding.place:
                lines.append(f"  and in  {finding.place}")
                lines += finding.lines("cause")
            else:
                lines += finding.lines("also")
        if self.word == "FAILED":
            lines += [f"  | {line}" for line in self.other.output.splitlines()]
        return lines

    def _tolerance_line(self) -> list[str]:
        """Says what counted as equal, unless it is the tolerance of float64."""
        tolerance = tolerance_of(self.reference.updates, self.other.updates)
        if tolerance is FLOAT64:
            return []
        text = (
            f"{tolerance.relative:g} of a tensor's largest value, as what they are made of has been"
        )
        return [f"  equal   within {text} in {tolerance.dtype}"]


def _describe_compared_values(reference: RunRecord) -> str:
    """Lists what was compared: "the first 3 optimizer steps, 8 samples each, losses, ..."."""
    updates = reference.updates
    if not updates:
        return "nothing was compared"
    first = updates[0]
    which = "the first" if reference.stopped_at else "all"
    values = [f"{which} {len(updates)} optimizer steps"]
    if first.samples:
        values.append(f"{first.samples} samples each")
    if first.loss is not None:
        values.append("losses")
    num_gradients = len(first.merged("gradients"))
    if num_gradients:
        values.append(f"{num_gradients} gradients")
    parameters = first.merged("parameters")
    if not parameters:  # those before each step were compared instead
        parameters = first.merged("parameter_sums")
    num_parameters = len(parameters)
    values.append(f"{num_parameters} parameters")
    num_buffers = len(first.merged("buffers"))
    if num_buffers:
        values.append(f"{num_buffers} buffers")
    if first[0].learning_rates:
        values.append("learning rates")
    return ", ".join(values)


def judge(reference: RunRecord, other: RunRecord) -> Verdict:
    """Compares a run with the reference.

    Raises:
        RecordingFailedError: the comparison itself has failed.
    """
    try:
        return _judge(reference, other)
    except LockstepError:
        raise
    except Exception as error:
        what = f"{other.config.name} of {other.config.script.path}"
        raise recording_failed_error(what, traceback.format_exc()) from error


def _judge(reference: RunRecord, parallel: RunRecord) -> Verdict:
    """Compares a run with the reference, from the names of tensors to ranks that did nothing."""
    tolerance = tolerance_of(reference.updates, parallel.updates)

    # Bring the updates of both runs into a form in which they can be compared.
    reference_run = reference.updates
    parallel_run = align_names(reference_run, parallel.updates)
    joined = join_parts(
        without_rows_that_are_no_samples(reference_run, parallel_run),
        without_rows_that_are_no_samples(parallel_run, reference_run),
    )
    final_sums = reference.final_sums, parallel.final_sums
    accepted = accept_differences(joined.reference_run, joined.parallel_run, final_sums, tolerance)
    reference = replace(reference, updates=accepted.reference_run)
    parallel = replace(parallel, updates=accepted.parallel_run)
    if joined.unknown and not parallel.error:
        advice = (
            "where each rank begins with its part of the tensors of one process, the parts are "
            "joined and compared: make the whole tensors from one seed, and let each rank keep its "
            "part"
        )
        return Verdict(reference, parallel, unknown=joined.unknown, unknown_advice=advice)

    # Compare them as long as rounding does not hide differences.
    num_updates = num_comparable_updates(reference.updates, parallel.updates, tolerance)
    if num_updates < max(len(reference.updates), len(parallel.updates)):
        until = f"step {num_updates}, as rounding has grown since to more than is passed over"
        reference = replace(reference, updates=reference.updates[:num_updates], stopped_at=until)
        parallel = replace(parallel, updates=parallel.updates[:num_updates])
    cases = find_divergences(reference.updates, parallel.updates, tolerance)
    if parallel.error:
        cases = [case for case in cases if case.kind != "length"]  # it ended before its end
    findings = _explain(cases, joined.joined_names)

    is_only_loss = {finding.cause.code for finding in findings} == {"LS501"}
    accepted_text = accepted.text
    if is_only_loss and not parallel.error:
        accepted_text = f"the loss is {findings[0].cause.evidence[0]} and parameters"
        findings = []
    if parallel.error:
        return Verdict(reference, parallel, _with_failure(findings, parallel))

    more_findings: list[Finding] = []
    if not joined.joined_names:
        was_stopped = bool(parallel.stopped_at)
        more_findings += findings_without_reference(
            parallel.updates, tolerance, was_stopped=was_stopped
        )
    more_findings += _gather_in_reference(reference)
    _add_new_findings(findings, more_findings, cases)
    if parallel.idle_ranks and not findings:
        idle = format_ranks(parallel.idle_ranks)
        if parallel.stopped_at:
            return Verdict(
                reference,
                parallel,
                unknown=f"while other ranks made the first {parallel.steps} optimizer steps, "
                f"no step of {idle} was seen",
                unknown_advice="compare more steps (`--steps`), so that all ranks come to train",
            )
        accepted_text = f"neither backward() nor an optimizer step of {idle} was seen"
    return Verdict(reference, parallel, tuple(findings), accepted_text)


def _explain(cases: Sequence[Divergence], joined_names: Sequence[str]) -> list[Finding]:
    """Returns a finding for each difference. A cause that was found already is left out.

    Args:
        cases: the differences.
        joined_names: tensors that the ranks hold in parts. Rules for copies of a model say nothing
            of them.
    """
    findings: list[Finding] = []
    for case in cases:
        cause = cause_or_failure(case)
        if joined_names and case.kind in KINDS_THAT_NEED_WHOLE_TENSORS:
            names = format_items(script_names(joined_names))
            text = f"of these tensors the ranks hold parts, which were joined: {names}"
            cause = Cause("LS210", (text, *gradient_patterns(case)))
        if cause not in [finding.cause for finding in findings]:
            findings.append(Finding(cause, case))
    return findings


def _with_failure(findings: Sequence[Finding], parallel: RunRecord) -> tuple[Finding, ...]:
    """Adds the error with which the script ended.

    An error without a code comes first: nothing is known of its cause, so it decides the verdict.
    """
    if parallel.code in {finding.cause.code for finding in findings}:
        failure = []
    else:
        if parallel.code == "LS304":  # the text says what happened, not how the script ended
            text = parallel.error
        else:
            nproc = parallel.config.nproc
            text = f"on {nproc} processes the script ended with: {parallel.error}"
        branches: Sequence[str] = ()
        if parallel.code == "LS405":
            branches = splitting_branches(parallel.branch_outcomes)
        failure = [Finding(Cause(parallel.code, (text, *branches)))]
    if parallel.code:
        return (*findings, *failure)
    return (*failure, *findings)


def _gather_in_reference(reference: RunRecord) -> list[Finding]:
    """Returns LS207 if the loss lacks a gradient on one process too, so that nothing differs."""
    for update in reference.updates:
        line = update.first("gather_line")
        if line:
            text = "on one process too the loss is made of it"
            return [Finding(Cause("LS207", (text, line)))]
    return []


def _add_new_findings(
    findings: list[Finding], more_findings: Sequence[Finding], cases: Sequence[Divergence]
) -> None:
    """Adds findings that are known without the reference and say something new.

    Args:
        findings: by comparison with the reference; more are added to it.
        more_findings: known without the reference.
        cases: all differences from the reference.
    """
    places = {(case.kind, case.update_index) for case in cases}
    for finding in more_findings:
        if finding.cause.code in {known.cause.code for known in findings}:
            continue
        case = finding.case
        if case is not None:
            is_known_difference = (case.kind, case.update_index) in places
            is_perhaps_rounding = not cases  # no rank differs from one process
            if is_known_difference or is_perhaps_rounding:
                continue
        findings.append(finding)

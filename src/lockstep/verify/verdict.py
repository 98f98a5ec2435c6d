"""The verdict on a run: all its differences from the reference, in the order in which they appear.

The *reference* is the run on one process, and the *parallel* run is the one that is judged. A
`RunRecord` holds what a run did, as a list of `Update`s (optimizer steps). A *case* is a difference
between the runs (`Divergence`), a *cause* explains it by a code of the catalogue, such as LS205,
and a `Finding` is a cause with its case. `judge` compares two runs and returns a `Verdict` with all
findings.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.columns import join_label
from lockstep.errors import LockstepError
from lockstep.language import add_colon, translate
from lockstep.verify.accepted_differences import accept_differences
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.divergence import (
    Divergence,
    find_divergences,
    tolerance_of,
    updates_before_rounding,
)
from lockstep.verify.finding import Finding, labelled, lines_on_later_steps, verdict_head
from lockstep.verify.joined_parts import JoinedRuns, join_parts
from lockstep.verify.late_models import with_names_of_models, without_models_met_by_one_run
from lockstep.verify.line_findings import splitting_branches
from lockstep.verify.names import AlignedRun, align_names
from lockstep.verify.rules.evidence import gradient_patterns
from lockstep.verify.run_record import RunRecord
from lockstep.verify.sample_rows import keep_models_with_sample_rows
from lockstep.verify.self_checks import find_cause, findings_without_reference
from lockstep.verify.tolerance import FLOAT64, Tolerance
from lockstep.verify.training_record import Update
from lockstep.verify.unsupported import recording_failed_error
from lockstep.wording import format_ranks

# Causes that only concern the order, the number or the augmentation of samples. They may hide other
# mistakes, unless both runs train on the same samples.
CODES_OF_SAMPLE_ORDER = {"LS107", "LS109", "LS110"}

# Kinds of differences whose rules only work for whole tensors on every rank.
KINDS_THAT_NEED_WHOLE_TENSORS = ("gradients", "unclipped", "kept", "parameters")

# Codes of the catalogue.
UNKNOWN_CAUSE = "LS210"
PARAMETERS_OF_RANKS_DIFFER = "LS304"
NUMBERS_OF_STEPS_DIFFER = "LS405"
GATHER_WITHOUT_GRADIENT = "LS207"


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a run with the reference."""

    reference: RunRecord
    parallel: RunRecord
    # The differences in order, followed by faults that are known without the reference.
    findings: tuple[Finding, ...] = ()
    # Difference that is accepted because the parameters are equal nevertheless; empty if none.
    accepted_difference: str = ""
    # Why there can be no verdict; empty if there is one.
    reason_unknown: str = ""
    # What the user can do if there can be no verdict.
    advice_if_unknown: str = ""

    @property
    def word(self) -> str:
        """The verdict in one word: `EQUAL`, `DIFFERENT`, `NOT KNOWN` or `FAILED`."""
        if self.reason_unknown:
            return "NOT KNOWN"

        # The script has ended with an error on several processes. If the error has a code of the
        # catalogue, such as LS303, it is known that the number of processes has caused it.
        if self.parallel.error:
            has_known_cause = bool(self.parallel.code)
            return "DIFFERENT" if has_known_cause else "FAILED"

        # A finding without a case is a fault of the script that makes no difference in this run,
        # such as a sampler that would repeat its order in the next epoch.
        some_finding_is_a_difference = any(finding.case is not None for finding in self.findings)
        if some_finding_is_a_difference:
            return "DIFFERENT"

        return "EQUAL"

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict as plain values."""
        return {
            "verdict": self.word,
            "comparison": "tolerance",
            # The way in which the script was run, such as "2 processes".
            "way": self.parallel.config.name,
            "processes": self.parallel.config.nproc,
            "steps": len(self.reference.updates),
            # Where the script was stopped, such as "step 3, batch 3 of 4 of epoch 1".
            "until": self.reference.stopped_at,
            "losses": [update.loss for update in self.reference.updates],
            # What was switched off for the comparison, such as dropout.
            "switched_off": list(self.parallel.switched_off),
            # An option of the script that changes results on purpose.
            "by_choice": self.parallel.chosen_difference,
            # Why there is no verdict.
            "not_known": self.reason_unknown,
            # Why the option `--batch-per-process` had no effect.
            "batch_per_process": self.reason_batch_not_enlarged,
            "findings": [finding.as_json() for finding in self.findings],
        }

    @property
    def reason_batch_not_enlarged(self) -> str:
        """Why `--batch-per-process` did not enlarge the batches of the reference; empty if it did.

        Also empty if there was nothing to enlarge.
        """
        run = self.reference

        # The option sets this factor to the number of processes. Without the option, it is 1.
        option_was_given = run.config.batch_size_factor > 1
        if not option_was_given:
            return ""

        # With Lockstep, the batch size is always that of all processes together.
        if run.uses_lockstep:
            return ""

        line = run.line_of_loader_without_batch_size  # empty if there is no such loader
        if line:
            return f"it could not enlarge a DataLoader that has no batch size: {line}"
        if not run.num_loaders:
            return "it changed nothing, as no DataLoader of torch was trained on"

        return ""

    @property
    def _same_samples_may_help(self) -> bool:
        """Whether more could be compared with the option `--same-samples`.

        The option removes differences in the order, the number and the augmentation of samples, if
        these come from torch's DataLoaders. So it helps if the first difference is of this kind.
        """
        if self.word != "DIFFERENT":
            return False

        # Only with `--same-samples`, the run has a folder for the batches of all ranks.
        was_already_given = self.reference.config.batches_folder is not None
        has_torch_loaders = self.reference.num_loaders > 0 and not self.reference.uses_lockstep
        if was_already_given or not has_torch_loaders:
            return False

        return self.findings[0].cause.code in CODES_OF_SAMPLE_ORDER

    def lines(self) -> list[str]:
        """Returns the lines of the verdict that are printed for the user."""
        head = verdict_head(self.word, self.parallel.config.name)
        if self.reason_unknown:
            lines = [
                join_label(add_colon(head), translate(self.reason_unknown)),
                labelled("do", translate(self.advice_if_unknown)),
            ]
        elif self.word == "EQUAL":
            lines = self._lines_of_equal_runs(head)
        else:
            lines = self._lines_of_findings(head)

        # Advice and notes, which follow any verdict.
        if self._same_samples_may_help:
            advice = translate(
                "with --same-samples one process trains on the batches of all ranks, so that the "
                "rest is compared too"
            )
            lines.append(labelled("then", advice))

        # The option `--batch-per-process` of the user had no effect.
        if self.reason_batch_not_enlarged:
            reason = translate(self.reason_batch_not_enlarged)
            lines.append(labelled("note", f"--batch-per-process: {reason}"))

        return lines

    def _lines_of_equal_runs(self, head: str) -> list[str]:
        """Returns the lines for runs without a difference: what was compared, and what was not.

        For example, of a script that sends gradients as bf16:

            DIFFERENT by choice: gradients are sent as bf16; all else is compared without
            EQUAL      2 processes: the first 3 optimizer steps, 8 samples each, losses, ...
              equal   within ...
              until   step 3, batch 3 of 23 of epoch 1; what comes later is not compared
              also    LS103: ...

        Args:
            head: beginning of the line with the verdict, such as "EQUAL      2 processes".
        """
        lines = []
        # An option of the script that changes results on purpose, such as "gradients are sent as
        # bf16". It was switched off, so that everything else could be compared without it.
        choice = self.parallel.chosen_difference
        if choice:
            lines.append(translate(f"DIFFERENT by choice: {choice}; all else is compared without"))

        compared = translate(_describe_compared_values(self.reference))
        lines.append(join_label(add_colon(head), compared))
        lines += self._lines_about_tolerance()

        # Such as "gradients and learning rates differ, and make the same parameters in every step".
        if self.accepted_difference:
            lines.append(labelled("but", translate(self.accepted_difference)))

        lines += lines_on_later_steps(
            stopped_at=self.reference.stopped_at,
            advice_on_more_steps=self.reference.advice_on_more_steps,
        )

        # Faults of the script that make no difference here.
        for finding in self.findings:
            lines += finding.lines(label_of_cause="also")

        return lines

    def _lines_of_findings(self, head: str) -> list[str]:
        """Returns the lines for runs that differ: the first finding in full, then the others.

        For example, with two differences and a fault that makes no difference in this run:

            DIFFERENT  2 processes, first in step 1, gradients
              cause   LS201: ...
              seen    ...
              and in  step 3, learning rates
              cause   LS401: ...
              seen    ...
              also    LS103: ...
              seen    ...

        Args:
            head: beginning of the first line, such as "DIFFERENT  2 processes".
        """
        # Only a finding about a difference between the runs has a place. Other findings are faults
        # of the script that make no difference in this run.
        first, *others = self.findings
        if first.place:
            head += translate(f", first in {first.place}")

        lines = [head, *first.lines(uses_lockstep=self.reference.uses_lockstep)]
        if first.place:
            lines += self._lines_about_tolerance()

        for finding in others:
            if finding.place:
                lines.append(labelled("and in", translate(finding.place)))
                lines += finding.lines()
            else:
                lines += finding.lines(label_of_cause="also")

        # "FAILED" is the verdict on a script that ended with an error without a code. Its cause is
        # not known, so the output is shown.
        if self.word == "FAILED":
            lines += [f"  | {line}" for line in self.parallel.output.splitlines()]

        return lines

    def _lines_about_tolerance(self) -> list[str]:
        """Returns a line that says which values count as equal; none if all was in float64.

        For example "  equal   within 0.001 of a tensor's largest value, because ...".
        """
        tolerance = tolerance_of(self.reference.updates, self.parallel.updates)
        all_was_in_float64 = tolerance is FLOAT64
        if all_was_in_float64:
            return []

        text = translate(
            f"within {tolerance.relative:g} of a tensor's largest value, because some values were "
            f"computed in {tolerance.dtype}"
        )
        return [labelled("equal", text)]


def _describe_compared_values(reference: RunRecord) -> str:
    """Lists what was compared: "the first 3 optimizer steps, 8 samples each, losses, ..."."""
    updates = reference.updates
    if not updates:
        return "nothing was compared"

    first = updates[0]  # later updates have the same tensors
    first_or_all = "the first" if reference.stopped_at else "all"
    values = [f"{first_or_all} {len(updates)} optimizer steps"]
    if first.samples:
        values.append(f"{first.samples} samples each")

    if first.loss is not None:
        values.append("losses")

    num_gradients = len(first.merged("gradients"))
    if num_gradients:
        values.append(f"{num_gradients} gradients")

    # If the parameters were not compared, because the user accepts that they differ, a sum over
    # each parameter was compared instead.
    parameters = first.merged("parameters")
    if not parameters:
        parameters = first.merged("parameter_sums")
    values.append(f"{len(parameters)} parameters")

    num_buffers = len(first.merged("buffers"))
    if num_buffers:
        values.append(f"{num_buffers} buffers")

    # An update is a sequence of records. The reference has one record for its process, or one for
    # each replica of the model that it trains.
    first_record = first[0]
    if first_record.learning_rates:
        values.append("learning rates")

    return ", ".join(values)


def judge(reference: RunRecord, parallel: RunRecord) -> Verdict:
    """Compares a run on several processes with the reference.

    Raises:
        RecordingFailedError: The comparison itself has failed.
    """
    try:
        return _judge(reference, parallel)
    except LockstepError:
        raise
    except Exception as error:
        what = f"{parallel.config.name} of {parallel.config.script.path}"
        raise recording_failed_error(what, traceback.format_exc()) from error


def _judge(reference: RunRecord, parallel: RunRecord) -> Verdict:
    """Compares a run with the reference, and returns the verdict.

    See `judge`, which handles errors in the comparison itself.
    """
    tolerance = tolerance_of(reference.updates, parallel.updates)

    # 1. Make the updates of both runs comparable, and remove differences that are accepted.
    reference_run, parallel_run = _with_same_names(reference, parallel)
    joined = _joined_updates(
        *without_models_met_by_one_run(reference_run.updates, parallel_run.updates)
    )
    accepted = accept_differences(
        joined.reference_run,
        joined.parallel_run,
        reference_final_sums=reference_run.final_sums,
        parallel_final_sums=parallel_run.final_sums,
        tolerance=tolerance,
    )
    reference = replace(reference, updates=accepted.reference_run)
    parallel = replace(parallel, updates=accepted.parallel_run)

    # An error of the script is reported in any case.
    if not parallel.error:
        not_known = _verdict_if_not_comparable(reference, parallel, joined)
        if not_known is not None:
            return not_known

    # 2. Find the differences, and explain them. After an error, a smaller number of steps is not a
    # difference of its own.
    reference, parallel = _cut_where_rounding_grows(reference, parallel, tolerance)
    cases = find_divergences(reference.updates, parallel.updates, tolerance)
    if parallel.error:
        cases = [case for case in cases if case.kind != "length"]

    findings = _explain(cases, joined.joined_names)
    if parallel.error:
        return Verdict(reference, parallel, findings=_with_failure(findings, parallel))

    # If only the loss differs, the script trains the same model, so the difference is accepted.
    accepted_text = accepted.text
    only_the_loss_differs = {finding.cause.code for finding in findings} == {"LS501"}
    if only_the_loss_differs:
        both_losses = findings[0].cause.evidence[0]  # it ends in "with equal gradients"
        accepted_text = f"the loss is {both_losses} and parameters"
        findings = []

    # 3. Add faults that are known without the reference. Ranks that hold parts of tensors may
    # differ from each other, so these are not checked.
    more_findings: list[Finding] = []
    if not joined.joined_names:
        more_findings += findings_without_reference(
            parallel.updates, tolerance, was_stopped=bool(parallel.stopped_at)
        )
    more_findings += _find_gather_without_gradient(reference)
    findings += _new_findings(more_findings, findings, cases)

    # 4. If nothing was found, report ranks that did not take part.
    if parallel.idle_ranks and not findings:
        return _judge_idle_ranks(reference, parallel)

    return Verdict(reference, parallel, findings=tuple(findings), accepted_difference=accepted_text)


def _verdict_if_not_comparable(
    reference: RunRecord, parallel: RunRecord, joined: JoinedRuns
) -> Verdict | None:
    """Returns the verdict "NOT KNOWN" if the runs cannot be compared; None if they can be.

    They cannot be if the ranks hold tensors that do not make up those of one process, or if
    `--batch-per-process` has enlarged batches that the script divides itself.
    """
    if joined.unjoinable_tensors_text:
        advice = (
            "where each rank begins with its part of the tensors of one process, the parts are "
            "joined and compared: make the whole tensors from one seed, and let each rank keep its "
            "part"
        )
        return Verdict(
            reference,
            parallel,
            reason_unknown=joined.unjoinable_tensors_text,
            advice_if_unknown=advice,
        )

    if _are_batches_divided_already(reference, parallel):
        num_processes = parallel.config.nproc
        reason = (
            f"with --batch-per-process one process trains {reference.updates[0].samples} samples "
            f"in step 1, and {num_processes} processes train {parallel.updates[0].samples} together"
        )
        advice = (
            "leave --batch-per-process out if the script divides its batch size by the number of "
            "processes itself"
        )
        return Verdict(reference, parallel, reason_unknown=reason, advice_if_unknown=advice)

    return None


def _with_same_names(reference: RunRecord, parallel: RunRecord) -> tuple[AlignedRun, AlignedRun]:
    """Returns what both runs have recorded, with the same name for the same tensor."""
    reference_run = with_names_of_models(AlignedRun(reference.updates, reference.final_sums))
    parallel_run = with_names_of_models(AlignedRun(parallel.updates, parallel.final_sums))
    parallel_run = align_names(reference_run.updates, parallel_run.updates, parallel_run.final_sums)

    # A model may have been met by one of the runs only, or by one rank.
    reference_run = with_names_of_models(reference_run, parallel_run.updates)
    parallel_run = with_names_of_models(parallel_run, reference_run.updates)
    return reference_run, parallel_run


def _joined_updates(reference_run: Sequence[Update], parallel_run: Sequence[Update]) -> JoinedRuns:
    """Returns the updates of both runs, in which tensors have the same shapes.

    Tensors that are split over the ranks are joined, and forward passes of models whose rows are
    not samples are removed.
    """
    return join_parts(
        keep_models_with_sample_rows(reference_run, parallel_run),
        keep_models_with_sample_rows(parallel_run, reference_run),
    )


def _are_batches_divided_already(reference: RunRecord, parallel: RunRecord) -> bool:
    """True if the ranks together train what one process trains without `--batch-per-process`.

    The option has then made the batches of the reference too large.
    """
    factor = reference.config.batch_size_factor
    if factor == 1 or not reference.updates or not parallel.updates:
        return False
    return reference.updates[0].samples == factor * parallel.updates[0].samples > 0


def _judge_idle_ranks(reference: RunRecord, parallel: RunRecord) -> Verdict:
    """Returns the verdict if there is no difference, but some ranks have not trained.

    It is "NOT KNOWN" if these ranks may train later, and otherwise "EQUAL" with a remark.
    """
    idle = format_ranks(parallel.idle_ranks)
    # If the script was stopped after enough steps, the idle ranks may train in later ones.
    was_stopped = bool(parallel.stopped_at)
    if was_stopped:
        reason = (
            f"while other ranks made the first {parallel.steps} optimizer steps, "
            f"no step of {idle} was seen"
        )
        advice = "compare more steps (`--steps`), so that all ranks come to train"
        return Verdict(reference, parallel, reason_unknown=reason, advice_if_unknown=advice)

    text = f"neither backward() nor an optimizer step of {idle} was seen"
    return Verdict(reference, parallel, accepted_difference=text)


def _cut_where_rounding_grows(
    reference: RunRecord, parallel: RunRecord, tolerance: Tolerance
) -> tuple[RunRecord, RunRecord]:
    """Returns both runs without the updates in which rounding could hide a difference.

    The reason is stored as `stopped_at` of the reference, from which the verdict prints it.
    """
    num_updates = updates_before_rounding(reference.updates, parallel.updates, tolerance)
    if num_updates is None:
        return reference, parallel

    until = f"step {num_updates}, since rounding has grown so far that it may hide a difference"
    return (
        replace(reference, updates=reference.updates[:num_updates], stopped_at=until),
        replace(parallel, updates=parallel.updates[:num_updates]),
    )


def _explain(cases: Sequence[Divergence], joined_names: Sequence[str]) -> list[Finding]:
    """Returns a finding for each difference, unless its cause was already found.

    Args:
        cases: differences between the runs.
        joined_names: names of tensors that were joined, because they are split over the ranks.
    """
    findings: list[Finding] = []
    for case in cases:
        # The rules for gradients, for example, expect a copy of the model on each rank. If ranks
        # have only parts of some tensors, these rules are not tried, and the cause is not known.
        if joined_names and case.kind in KINDS_THAT_NEED_WHOLE_TENSORS:
            names = format_items(script_names(joined_names))
            text = f"the ranks hold parts of these tensors, which were joined: {names}"
            cause = Cause(UNKNOWN_CAUSE, (text, *gradient_patterns(case)))
        else:
            cause = find_cause(case)

        if cause not in [finding.cause for finding in findings]:
            findings.append(Finding(cause, case))

    return findings


def _with_failure(findings: Sequence[Finding], parallel: RunRecord) -> tuple[Finding, ...]:
    """Returns the findings together with the error that ended the script.

    An error without a code comes first: its cause is not known, so it decides the verdict.
    """
    if not parallel.code:
        return (_finding_of_failure(parallel), *findings)
    if parallel.code in {finding.cause.code for finding in findings}:
        return tuple(findings)
    return (*findings, _finding_of_failure(parallel))


def _finding_of_failure(parallel: RunRecord) -> Finding:
    """Returns the error that ended the script as a finding."""
    error_is_a_sentence = parallel.code == PARAMETERS_OF_RANKS_DIFFER
    if error_is_a_sentence:
        text = parallel.error
    else:
        text = f"on {parallel.config.nproc} processes the script ended with: {parallel.error}"

    # If some rank ended before the others had made all their steps, name the `if` statements that
    # went different ways, which may be the reason.
    branches: Sequence[str] = ()
    if parallel.code == NUMBERS_OF_STEPS_DIFFER:
        branches = splitting_branches(parallel.branch_outcomes)

    return Finding(Cause(parallel.code, (text, *branches)))


def _find_gather_without_gradient(reference: RunRecord) -> list[Finding]:
    """Returns LS207 in a list if an all-gather of the reference passes no gradient on.

    The gradient is then missing on one process too, so no comparison can show it.
    """
    for update in reference.updates:
        # The line of the first rank that has one. It is recorded only for a gather that the loss
        # depends on and that passes no gradient on.
        line = update.first_on_any_rank("gather_line")
        if line:
            text = "on one process, too, the loss is computed from the gathered tensor"
            return [Finding(Cause(GATHER_WITHOUT_GRADIENT, (text, line)))]

    return []


def _new_findings(
    candidates: Sequence[Finding], findings: Sequence[Finding], cases: Sequence[Divergence]
) -> list[Finding]:
    """Returns the candidates that say something new.

    Args:
        candidates: findings that are known without the reference.
        findings: findings from the comparison with the reference.
        cases: all differences from the reference.
    """
    known_codes = {finding.cause.code for finding in findings}
    new_findings = []
    for candidate in candidates:
        if candidate.cause.code in known_codes:
            continue

        # What differs between the ranks often differs from the reference too. Then it has been
        # reported, perhaps under another code.
        difference_between_ranks = candidate.case
        if difference_between_ranks is not None:
            if not _is_new_difference(difference_between_ranks, cases):
                continue

        new_findings.append(candidate)
        known_codes.add(candidate.cause.code)

    return new_findings


def _is_new_difference(
    difference_between_ranks: Divergence, differences_from_reference: Sequence[Divergence]
) -> bool:
    """True if no difference from the reference is of the same kind and in the same update.

    It is False if there is no difference from the reference at all: every rank agrees with it
    within the tolerance, so the ranks differ from each other only by rounding.
    """
    known = {
        (difference.kind, difference.update_index) for difference in differences_from_reference
    }
    is_known = (difference_between_ranks.kind, difference_between_ranks.update_index) in known
    return bool(known) and not is_known

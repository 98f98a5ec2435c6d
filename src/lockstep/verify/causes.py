"""Finds the most likely cause of each difference between two runs, by trying rules in order.

`KINDS` lists the rules for each kind of difference (`Divergence.kind`). A rule is a function in
`lockstep.verify.rules`, whose docstring says what the rule needs, when it applies, what it cannot
distinguish from its cause, and which evidence it gives. The first rule that returns a cause wins.
So rules that are certain come before rules that guess, and the last rule of each kind always
applies.

To add a cause, write a rule, add it to a list here, and describe its code in `catalogue.toml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.verify.cause import Cause
from lockstep.verify.divergence import Divergence
from lockstep.verify.line_findings import new_branches
from lockstep.verify.rules import (
    gradient_values,
    gradients,
    initial,
    local_gradients,
    losses,
    model_inputs,
    model_outputs,
    optimizer,
    ranks_apart,
    sample_order,
)

Rule = Callable[[Divergence], Cause | None]


@dataclass(frozen=True)
class Kind:
    """A kind of difference."""

    # What differs, in words.
    description: str
    # Tried in this order.
    rules: tuple[Rule, ...]


def explain_gradient_values(case: Divergence) -> Cause:
    """Explains wrong gradients by their values. This is the last rule, and always applies."""
    # The kind is the field that differs: "gradients" or "unclipped".
    expected = case.expected.merged(case.kind)
    actual = case.actual.merged(case.kind)
    return gradient_values.explain_gradients(case, expected, actual)


GRADIENT_RULES: tuple[Rule, ...] = (
    ranks_apart.different_optimizers,
    ranks_apart.parameters_of_unstepped_optimizer,
    # How the model was trained.
    gradients.frozen_on_some_processes,
    gradients.other_mode_on_some_processes,
    gradients.parameters_without_optimizer,
    # Gradients that differ between the ranks.
    gradients.wrong_after_exchange_in_step,
    local_gradients.gradients_that_differ_between_ranks,
    ranks_apart.changed_between_passes,
    ranks_apart.factors_of_ranks,
    # Gradients that are the same on all ranks.
    gradients.gather_without_gradient,
    gradients.wrong_after_clipping,
    model_inputs.repeated_inputs,
    model_inputs.other_inputs,
    explain_gradient_values,
)

KINDS: dict[str, Kind] = {
    "initial": Kind(
        "the parameters before the first step",
        (
            ranks_apart.different_optimizers,
            initial.optimizer_has_parameters_of_no_model,
            initial.other_initial_parameters,
        ),
    ),
    "replicas": Kind(
        "the parameters of the ranks",
        (ranks_apart.different_optimizers, ranks_apart.parameters_apart),
    ),
    "samples": Kind(
        "the samples of the global batch",
        (
            ranks_apart.different_optimizers,
            sample_order.skipped_steps,
            sample_order.repeated_samples,
            sample_order.larger_global_batch,
            sample_order.left_out_samples,
            sample_order.samples_of_several_ranks,
            sample_order.other_order,
        ),
    ),
    "contents": Kind(
        "the content of samples",
        (
            ranks_apart.different_optimizers,
            sample_order.shuffled_datasets,
            sample_order.other_dataset_on_some_ranks,
            sample_order.random_contents,
        ),
    ),
    "kept": Kind(
        "parameters before the step",
        (
            ranks_apart.different_optimizers,
            optimizer.frozen_parameters_differ,
            optimizer.parameters_changed_between_steps,
        ),
    ),
    "unclipped": Kind("gradients before they were clipped", GRADIENT_RULES),
    "gradients": Kind("gradients", GRADIENT_RULES),
    "loss": Kind(
        "the loss",
        (
            ranks_apart.different_optimizers,
            ranks_apart.parameters_of_unstepped_optimizer,
            losses.other_loss_value,
        ),
    ),
    "rates": Kind(
        "the learning rate",
        (
            ranks_apart.different_optimizers,
            optimizer.other_parameter_groups,
            optimizer.other_learning_rates,
        ),
    ),
    "parameters": Kind(
        "the parameters after the step",
        (
            ranks_apart.different_optimizers,
            optimizer.other_optimizer,
            optimizer.parameters_of_ranks_differ,
            optimizer.other_parameters_after_step,
        ),
    ),
    "buffers": Kind(
        "the buffers after the step",
        (
            ranks_apart.different_optimizers,
            model_outputs.batchnorm_buffers,
            model_outputs.other_buffers,
        ),
    ),
    "length": Kind("the number of steps", (optimizer.other_number_of_steps,)),
}


def cause_of(case: Divergence) -> Cause:
    """Returns the cause of a difference, from the first rule that applies.

    Tests of the script, such as an `if`, that had another outcome for the first time are added as
    evidence.
    """
    for rule in KINDS[case.kind].rules:
        cause = rule(case)
        if cause is not None:
            return cause.with_evidence(*new_branches(case, cause))
    raise AssertionError(f"no rule applies to {case.kind}")

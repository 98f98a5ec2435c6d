"""The backward pass, the clipping of gradients and the loss of a global batch.

These are the methods of `World` that a training loop calls between the forward pass and the step of
the optimizer (`training.optimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.communication.summation_tree import sum_in_order
from lockstep.distributed import ordered_norm
from lockstep.distributed.determinism import find_refused_operation, nondeterministic_error
from lockstep.distributed.device import add_memory_advice
from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.optim.precision import Precision
from lockstep.session.delivery import TrainingPass
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule, Strategy, parameters_of
from lockstep.strategies.placeholder import Placeholders
from lockstep.torch_compat import outside_compiled_code
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.wording import describe_type


class TrainingStep:
    """What a training loop calls for the gradients of a global batch, once they are computed.

    Args:
        run: the run of this process.
        strategy: the strategy of the run, which runs the backward pass.
        precision: the precision of the run, with the loss scaler if there is one.
        wrapped: what the strategy returned for each prepared module; the mapping may still grow.
        optimizers: all prepared optimizers; the list may still grow.
        placeholders: the placeholder samples of a rank without samples.
    """

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        precision: Precision,
        wrapped: Mapping[nn.Module, PreparedModule],
        optimizers: Sequence[PreparedOptimizer],
        placeholders: Placeholders,
    ) -> None:
        self._run = run
        self._strategy = strategy
        self._precision = precision
        self._wrapped = wrapped
        self._optimizers = optimizers
        self._placeholders = placeholders

    @outside_compiled_code  # a script may compile the function that calls it
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass of a loss, weighted by its micro-batch's part of the global batch.

        The extensions are told in this order:

            before_backward    with the user's loss, which a check may refuse
            backward_begins    with the weighted loss, for which strategies prepare
            backward_ended     when strategies release memory
            after_backward     for observers

        Raises:
            UsageError: the loss cannot be trained on, or no optimizer was prepared under fp16.
        """
        step = self._run.step
        extensions = self._run.extensions
        micro_batch = step.source_of_loss()
        extensions.before_backward(loss, micro_batch)
        self._check_accumulation()
        self._check_optimizer_unscales()

        phase_before = step.enter_phase("backward")
        weighted_loss = step.weigh_loss(loss)
        try:
            self._run_backward(weighted_loss, micro_batch, options)
        finally:
            step.enter_phase(phase_before)

        extensions.after_backward(loss, micro_batch)
        # Counted last: for the extensions, `num_backwards` is the number of earlier passes.
        step.training_pass.num_backwards += 1

    def _check_optimizer_unscales(self) -> None:
        """Raises UsageError under fp16 if no optimizer is prepared, which would undo its scale."""
        has_only_modules = bool(self._wrapped) and not self._optimizers
        if self._precision.scaler is not None and has_only_modules:
            raise _optimizer_not_prepared(
                "under precision='fp16' gradients are multiplied by the scale of the loss; a "
                "prepared optimizer divides them again before it steps"
            )

    def _run_backward(
        self, weighted_loss: Tensor, micro_batch: MicroBatch, options: dict[str, Any]
    ) -> None:
        """Runs the backward pass of the strategy, and adds advice to its errors.

        Args:
            weighted_loss: the loss, weighted by its part of the global batch.
            micro_batch: the micro-batch that the loss is of.
            options: the options of `World.backward`.
        """
        step = self._run.step
        try:
            self._run.extensions.backward_begins(weighted_loss, micro_batch)

            # A rank without samples computes a placeholder. Activation checkpointing, which runs
            # forward passes again in here, must know that.
            with self._placeholders.in_backward():
                modules = list(self._wrapped)
                self._strategy.backward(modules, weighted_loss, self._precision, **options)
            self._run.extensions.backward_ended(micro_batch)
        except Exception as error:
            add_memory_advice(error, step.micro_batch.local_rows, step.num_devices)
            # With virtual ranks, torch refuses operations that are not deterministic.
            refused_operation = find_refused_operation(error)
            has_virtual_ranks = self._run.settings.virtual_ranks is not None
            if has_virtual_ranks and refused_operation is not None:
                raise nondeterministic_error(refused_operation) from error
            raise

    def clip(self, module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        """Clips the gradients of a module by their total norm, and returns that norm.

        Raises:
            UsageError: the argument is not a module, or `norm_type` is 0.
        """
        _check_arguments_of_clip(module, norm_type)
        self._run.extensions.before_clipping(module)
        parameters = list(module.parameters())
        self._prepare_clipping(parameters)

        # With virtual ranks the norm has the same bits on any number of processes, so it is
        # computed in a fixed order. Otherwise the strategy knows the fastest way.
        if self._run.settings.virtual_ranks is not None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = ordered_norm.total_norm(gradients, norm_type)
        else:
            norm = self._strategy.total_norm(parameters, norm_type)

        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _prepare_clipping(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divides gradients by the scale of the loss, and records that they are clipped.

        Only under fp16 there is such a scale. The norm is to be that of the gradients without it.
        """
        parameters_to_clip = set(parameters)
        for optimizer in self._optimizers:
            updates_some = not parameters_to_clip.isdisjoint(parameters_of(optimizer))
            if updates_some:
                self._precision.unscale([optimizer.inner])
                optimizer.step_calls.note_clipping()

    def loss(self) -> float:
        """Returns the loss of the present global batch or, after the loop, of the last one.

        All ranks call this together. A *pass* is one iteration of a training loop over a loader.

        Raises:
            UsageError: the loss is not known, or only a part of it.
        """
        training_pass, local_loss = self._pass_and_local_loss()
        if local_loss is None:
            raise UsageError(
                "world.loss()",
                "world.backward was not given a loss of this micro-batch",
                "call it after world.backward(loss)",
            )

        num_virtual_ranks = self._run.settings.virtual_ranks
        if num_virtual_ranks is not None:
            return self._loss_over_virtual_ranks(training_pass, num_virtual_ranks)

        # The losses are weighted so that their mean over the ranks is that of the global batch.
        mean: float = self._run.collectives.mean(float(local_loss))
        return mean

    def _pass_and_local_loss(self) -> tuple[TrainingPass, Tensor | float | None]:
        """Returns a pass, and this rank's loss of its latest global batch; None if not known.

        In a loop it is the pass of this loop, and the loss so far of the present global batch.
        After the loop it is the pass to which the latest loss belonged.
        """
        step = self._run.step
        loop_has_ended = not step.in_training_loop
        if loop_has_ended and step.pass_of_loss is not None:
            return step.pass_of_loss, _last_loss(step.pass_of_loss)

        # In a loop, or before any loss: the present pass. (Outside of loops over prepared loaders
        # there is one, too.)
        called_world_backward = step.training_pass.num_backwards > 0
        if not called_world_backward:
            return step.training_pass, None
        return step.training_pass, step.training_pass.loss

    def _loss_over_virtual_ranks(
        self, training_pass: TrainingPass, num_virtual_ranks: int
    ) -> float:
        """Returns the loss of the global batch, with the same bits on any number of processes."""
        # The losses of the virtual ranks on this process; 0 for all others.
        losses_here = torch.zeros(num_virtual_ranks, dtype=torch.float64)
        for number, loss in training_pass.loss_of_virtual_rank.items():
            losses_here[number] = float(loss)

        # Each virtual rank is computed by one process, so for each virtual rank this adds one loss
        # and zeros, which is exact.
        losses = self._run.collectives.sum(losses_here)

        # The losses are added in the order of the virtual ranks, so the bits are always the same.
        return sum_in_order(losses.tolist()) / num_virtual_ranks

    def _check_accumulation(self) -> None:
        """Checks that a backward pass may add to the gradients of earlier micro-batches.

        Raises:
            UsageError: gradients of earlier micro-batches were cleared, or a second backward pass
                for another optimizer would mix its gradients with them.
        """
        training_pass = self._run.step.training_pass
        micro_batch = training_pass.micro_batch

        if micro_batch.is_only_of_step:
            return  # nothing accumulates

        # First check: several backward passes in one micro-batch, for several optimizers. In a GAN,
        # for example, the loss of the generator also leaves gradients in the discriminator. On one
        # device, the loop clears them before the backward pass of the discriminator's own loss.
        # Here nothing is cleared until all micro-batches are computed, so the discriminator would
        # step with the sum of both.
        is_repeated_backward = training_pass.num_backwards > 0
        if is_repeated_backward and len(self._optimizers) > 1:
            raise UsageError(
                "several backward passes a micro-batch, for several optimizers",
                "what one leaves in the parameters of another is cleared once per global batch, "
                "not between the micro-batches, so it would be counted",
                "leave micro_batch_size out, or add the losses up and call world.backward once",
            )

        # Second check: the gradients of earlier micro-batches must still be there. It is made once
        # in each micro-batch, except in the first one, where nothing has accumulated yet.
        nothing_accumulated_yet = micro_batch.begins_gradients
        if nothing_accumulated_yet or is_repeated_backward:
            return

        # Some strategies accumulate gradients elsewhere than in `parameter.grad`, where the user's
        # `zero_grad` does not clear them.
        if any(wrapped.zero_grad_misses_gradients for wrapped in self._wrapped.values()):
            return

        has_only_modules = bool(self._wrapped) and not self._optimizers
        if has_only_modules and not self._has_gradients():
            raise _optimizer_not_prepared(
                "the gradients of the micro-batches before are gone: it steps and clears them "
                "in each micro-batch, not once in a global batch"
            )

        for optimizer in self._optimizers:
            optimizer.check_gradients_are_there()

    def _has_gradients(self) -> bool:
        """Returns True if any parameter of a prepared module has a gradient."""
        for module in self._wrapped:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    return True
        return False


def _last_loss(training_pass: TrainingPass) -> Tensor | float | None:
    """Returns this rank's loss of the last global batch of a pass that has ended.

    Returns:
        The loss, or None if the loop was left in the middle of the global batch, so that only a
        part of its loss is known.
    """
    if training_pass.num_backwards == 0:  # the loop was left before it trained its latest batch
        return training_pass.loss_of_previous_global_batch
    return training_pass.loss if training_pass.micro_batch.last else None


def _check_arguments_of_clip(module: Any, norm_type: float) -> None:
    """Raises UsageError unless the arguments of `World.clip_grad_norm_` are a module and a norm."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"world.clip_grad_norm_ of {describe_type(module)}",
            "it takes a module, whose gradients may be spread over the ranks",
            "pass the prepared model: world.clip_grad_norm_(model, max_norm)",
        )
    if norm_type == 0:
        raise UsageError(
            "world.clip_grad_norm_(..., norm_type=0)",
            "there is no norm of type 0: it would divide by zero",
            "leave it out for the usual norm, 2, or pass 1 or math.inf",
        )


def _optimizer_not_prepared(found: str) -> UsageError:
    return UsageError(
        "a training loop whose optimizer is not prepared",
        found,
        "prepare it with the model: model, optimizer = world.prepare(model, optimizer)",
    )

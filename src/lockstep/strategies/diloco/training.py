"""What DiLoCo does with a module in each step of a training.

A *virtual rank* trains its own copy of the model on a fixed part of every global batch (the user's
option calls it a replica). The virtual ranks of a process take turns in one module: from the first
micro-batch of a virtual rank until its optimizer step, the module has the weights, buffers and
gradients of this virtual rank. Otherwise it has the *shared* weights, which are evaluated and
saved. A *round* is the time between two exchanges. In the first `start` steps all virtual ranks
*train one model*: they use the shared weights and average every gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.plan import virtual_ranks_of_ranks
from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError, warn
from lockstep.session.delivery import TO_LEAVE_ONE_OUT
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import EqualTensors
from lockstep.strategies.diloco.exchange import (
    SAME_VIRTUAL_RANKS,
    Exchange,
    split_into_fragments,
)
from lockstep.strategies.diloco.options import DiLoCoOptions
from lockstep.strategies.diloco.outer_optimizer import OuterOptimizer
from lockstep.strategies.diloco.tensor_versions import SHARED, TensorVersions
from lockstep.strategies.gradient_average import average_gradients
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.replication import broadcast_from_first_rank
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.torch_compat import write_counts
from lockstep.wording import count_noun


class DiLoCoTraining(Extension):
    """Lets the virtual ranks of this process take turns in a module, and runs the exchanges.

    Args:
        module: the module, on its device.
        run: the run of this process.
        options: the options of the strategy.
    """

    def __init__(self, module: nn.Module, run: Run, options: DiLoCoOptions) -> None:
        self._module = module
        self._run = run
        self._options = options
        self._step = run.step
        num_ranks = run.topology.size
        virtual_ranks = options.virtual_ranks
        equal_shares = (1,) * num_ranks
        virtual_ranks_of_rank = virtual_ranks_of_ranks(equal_shares, virtual_ranks)
        self.own: Sequence[int] = virtual_ranks_of_rank[run.topology.rank]
        """The numbers of the virtual ranks that this process computes."""
        self._group: dist.ProcessGroup | None = None
        """The ranks that compute the same virtual rank as this one, if there are several."""
        self._moving_buffers: MovingBuffers | None = None
        if virtual_ranks.ranks_per_virtual_rank(num_ranks) > 1:
            self._group = run.groups.get(SAME_VIRTUAL_RANKS)

        if self._group is not None:
            self._moving_buffers = MovingBuffers(module, run.step, self._group)

        self._exchange = Exchange(run, virtual_ranks.count)

        self._parameter_names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        """The trainable parameters of the module."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._parameter_names.append(name)
                self.parameters.append(parameter)

        self._weights = TensorVersions(lambda: self.parameters)
        self._buffer_names = [name for name, _ in module.named_buffers()]
        self._buffer_places = [_owner_and_attribute(module, name) for name in self._buffer_names]
        self._buffers = TensorVersions(self._present_buffers)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._outer_optimizer = OuterOptimizer(
            self._weights,
            self.own,
            split_into_fragments(sizes, options.fragments),
            self._exchange,
            learning_rate=options.outer_lr,
            momentum=options.outer_momentum,
            compress=options.compress,
            delays=options.delay > 0,
        )

        self._owner_of_gradients = self.own[0]
        """The virtual rank whose gradients are in the module, at first that with the lowest number.
        """
        self._stored_gradients: dict[int, list[Tensor | None]] = {}
        """The gradients of each other virtual rank, by its number."""
        self._optimizers: list[Optimizer] = []
        """The optimizers that hold parameters of the module."""
        self._stepped_optimizers: set[int] = set()
        """The ids of the optimizers that have stepped for the present virtual rank."""
        self._global_batch_is_partly_stepped = False
        """True from the first optimizer step for a global batch on, until all steps are made."""
        self._num_virtual_ranks_begun = 0
        """How many virtual ranks of this process have begun in the present global batch."""
        self._num_virtual_ranks_stepped = 0
        """For how many of them some optimizer has stepped."""
        self._last_micro_batch_began = False
        """True if the last micro-batch of the global batch has begun."""
        self._write_counts_of_shared: list[int] = []
        """How often each parameter had been written to when the shared weights were put into the
        module. A later difference shows that the user has changed them by hand."""

    # Events, which decide whose values are in the module

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Records an optimizer if it holds parameters of this module."""
        if self._module in modules:
            self._optimizers.append(optimizer.inner)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Puts the values of the micro-batch's virtual rank into the module.

        Before the first micro-batch of a global batch, finishes the previous global batch if not
        every optimizer has stepped for each of its virtual ranks.

        Raises:
            UsageError: some virtual ranks have not stepped for the previous global batch.
        """
        if micro_batch.first:
            self._begin_global_batch()
        self._last_micro_batch_began = micro_batch.last  # of the global batch

        # Each virtual rank has its own optimizer step in a global batch. Another one begins here.
        if micro_batch.opens_step:
            self._num_virtual_ranks_begun += 1
            self._stepped_optimizers.clear()

        self._note_whether_ranks_have_same_micro_batch(micro_batch)
        self._put_values_of_present_virtual_rank()

    def _note_whether_ranks_have_same_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Sets why collectives of the script are refused; None if all ranks may call them.

        They may not while other ranks may be at another micro-batch. Example: rank 0 has two
        virtual ranks, and rank 1 has one. So the loop of rank 0 has two micro-batches in each
        global batch, and that of rank 1 has one. All ranks meet in the last micro-batch.
        """
        collectives = self._run.collectives
        num_ranks = self._run.topology.size
        is_same_on_all = self._options.virtual_ranks.are_equally_many_on_all(num_ranks)
        if is_same_on_all or micro_batch.last:
            collectives.why_ranks_are_apart = None
        else:
            replicas = count_noun(self._options.replicas, "replica")
            processes = count_noun(num_ranks, "process")
            collectives.why_ranks_are_apart = (
                f"{replicas} on {processes}: some processes train more of them than others, and so "
                "have more micro-batches"
            )

    def _begin_global_batch(self) -> None:
        """Finishes the previous global batch if need be, and resets what is counted for each."""
        if self._global_batch_is_partly_stepped:
            self._finish_previous_global_batch()
        self._num_virtual_ranks_begun = 0
        self._num_virtual_ranks_stepped = 0

    def _finish_previous_global_batch(self) -> None:
        """Finishes a global batch for which some, but not all, optimizer steps were made.

        Example: two optimizers A and B train the virtual ranks 0 and 1. If both had stepped for
        both, `after_step` would have finished the global batch.

        Raises:
            UsageError: some virtual ranks have not stepped.
        """
        # Without the micro-batch of virtual rank 1: the loop was left after virtual rank 0.
        loop_was_left = not self._last_micro_batch_began
        if loop_was_left:
            raise UsageError(
                "a training loop that was left between the replicas of a global batch",
                "some of them have made their step, and others have not",
                "leave the loop where world.is_last_micro_batch is true, or by what changes "
                "once per global batch, such as world.step",
            )

        # Neither A nor B has stepped for virtual rank 1: an error.
        self._check_all_have_stepped()

        # What remains: for virtual rank 1, A has stepped and B has not. This is allowed, since a
        # script may step one of its optimizers less often than the others.
        self._finish_global_batch()

    def _check_all_have_stepped(self) -> None:
        """Raises UsageError if some virtual rank has begun, and no optimizer has stepped for it.

        It is called when optimizers have stepped for other virtual ranks of this process.
        """
        num_stepped = self._num_virtual_ranks_stepped
        num_begun = self._num_virtual_ranks_begun
        if num_stepped < num_begun:
            raise UsageError(
                "a loop that skips optimizer.step() for some replicas of a global batch",
                f"optimizer.step() was called for {num_stepped} of {num_begun} replicas on this "
                "process, and the exchange needs all of them",
                f"call optimizer.step() for every batch of the loader; {TO_LEAVE_ONE_OUT}",
            )

    def before_forward(self) -> None:
        """Chooses the values for a forward pass: those in training, or for evaluation the shared.

        In training mode, after the last optimizer step for a virtual rank, a forward pass belongs
        to no step. It then uses the values that are in the module.
        """
        is_training = torch.is_grad_enabled() or self._module.training
        if not is_training:
            self.put_shared_values()
        elif not self._all_optimizers_stepped:
            self._put_values_of_present_virtual_rank()

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Restores the weights of the forward pass, which an evaluation may have replaced since.

        These are the weights of the virtual rank that has its turn.

        Args:
            weighted_loss: not needed here; all extensions get it.
            micro_batch: not needed here either.

        Raises:
            UsageError: no loader or no optimizer is prepared. The loader says which virtual rank a
                micro-batch belongs to, and the optimizer says when a virtual rank has stepped.
        """
        if not (self._step.in_training_loop and self._optimizers):
            raise UsageError(
                "training under strategy='diloco' without a prepared loader and optimizer",
                "the loader says which replica a micro-batch belongs to, and the optimizer when "
                "that has made its step",
                "train on what world.prepare(model, optimizer, loader) returned",
            )
        self._put_values_of_present_virtual_rank()

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Averages gradients over ranks, after the last backward pass before a step.

        While the virtual ranks train one model, these are all ranks; later, the ranks that compute
        the same virtual rank. A gradient that was averaged already, after an earlier backward pass
        of the same step, is equal on these ranks, so averaging it again does not change it.

        Args:
            micro_batch: not needed here; all extensions get it.
        """
        # The argument is the micro-batch of the loss. A loop may have got the next micro-batch
        # before its backward pass. Its optimizer then steps after that later micro-batch.
        latest_micro_batch = self._step.micro_batch
        if not latest_micro_batch.closes_step:  # more micro-batches follow before the step
            return

        if self._trains_one_model:
            if self._run.topology.size > 1:
                average_gradients(self.parameters)
        elif self._group is not None:  # otherwise this rank alone computes the virtual rank
            average_gradients(self.parameters, self._group)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Prepares the module for an optimizer's step for the present virtual rank.

        Restores the weights of the virtual rank, which an evaluation may have replaced.

        Raises:
            UsageError: the optimizer has stepped for this virtual rank already, or none has stepped
                for an earlier one.
        """
        if self._module not in modules:  # an optimizer of another module
            return

        self._note_step(optimizer)
        self._put_values_of_present_virtual_rank()

        is_first_step_for_global_batch = not self._global_batch_is_partly_stepped
        self._global_batch_is_partly_stepped = True
        if self._trains_one_model and is_first_step_for_global_batch:
            # The step is for all virtual ranks together. The model gets the mean of the buffers
            # that their forward passes have left.
            self._average_buffers()
            self._buffers.put_in_module(SHARED)

    def _note_step(self, optimizer: Optimizer) -> None:
        """Records that an optimizer is about to step for the present virtual rank.

        Raises:
            UsageError: it has stepped for this virtual rank already, or no optimizer has stepped
                for an earlier one.
        """
        if id(optimizer) in self._stepped_optimizers:
            raise UsageError(
                f"several steps of {type(optimizer).__name__} in a global batch",
                "under strategy='diloco' replicas meet after a number of global batches, and each "
                "makes one step in it",
                "call optimizer.step() once for each batch of the loader",
            )

        is_first_step_for_virtual_rank = not self._stepped_optimizers
        if is_first_step_for_virtual_rank:
            self._num_virtual_ranks_stepped += 1
            self._check_all_have_stepped()
        self._stepped_optimizers.add(id(optimizer))

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Finishes the global batch if all optimizers have stepped for its last virtual rank."""
        if self._module not in modules or not self._all_optimizers_stepped:
            return
        if self._moving_buffers is not None:
            self._moving_buffers.make_equal()
        if self._step.micro_batch.last:
            self._finish_global_batch()

    def settle(self) -> None:
        """Raises UsageError if no optimizer has stepped for the last virtual rank of a loop."""
        if self._global_batch_is_partly_stepped and not self._step.in_training_loop:
            self._check_all_have_stepped()

    def pass_ended(self) -> None:
        """Puts the shared values into the module when a loop has left its loader."""
        self._run.collectives.why_ranks_are_apart = None
        self.put_shared_values()

    def put_shared_values(self) -> None:
        """Puts the shared weights and buffers into the module, for evaluation and saving."""
        self._buffers.put_in_module(SHARED)
        if self._weights.in_module is not SHARED:
            self._weights.put_in_module(SHARED)
            self._write_counts_of_shared = write_counts(self.parameters)

    def _put_values_of_present_virtual_rank(self) -> None:
        """Puts the values of the virtual rank whose micro-batch is computed now into the module.

        While the virtual ranks train one model, they only differ in their buffers. Later, each has
        its own weights and gradients, too. The gradients that are in the module are put away.
        """
        if self._step.virtual_rank is None:  # outside of a training loop
            return

        number = self._step.virtual_rank.number
        self._buffers.put_in_module(number)
        if self._trains_one_model:
            return

        self._check_no_change_by_hand_is_lost(number)
        self._weights.put_in_module(number)  # a copy of the shared ones, if it has none of its own
        if number != self._owner_of_gradients:
            self._put_gradients_in_module(number)

    @property
    def _trains_one_model(self) -> bool:
        """True in the first steps, in which all virtual ranks train one model.

        The micro-batches of these steps have no virtual rank.
        """
        return self._step.micro_batch.virtual_rank is None

    def _put_gradients_in_module(self, number: int) -> None:
        """Puts away the gradients that are in the module, and restores those of a virtual rank.

        Args:
            number: the number of the virtual rank whose gradients are restored.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self._stored_gradients[self._owner_of_gradients] = gradients

        # A virtual rank without stored gradients has not run a backward pass yet.
        no_gradients: list[Tensor | None] = [None] * len(self.parameters)
        new_gradients = self._stored_gradients.pop(number, no_gradients)
        for parameter, gradient in zip(self.parameters, new_gradients, strict=True):
            parameter.grad = gradient

        self._owner_of_gradients = number

    def _check_no_change_by_hand_is_lost(self, number: int) -> None:
        """Raises UsageError if a virtual rank's weights would replace weights changed by hand.

        For example, the user has changed the shared weights, which are in the module. If virtual
        rank 2 has weights of its own, these would replace them: an error. If it has none, it goes
        on with the changed ones.

        Args:
            number: the number of the virtual rank.
        """
        shared_are_in_module = self._weights.in_module is SHARED
        has_own_weights = self._weights.exists(number)
        if shared_are_in_module and has_own_weights:
            self._check_shared_weights_are_unchanged()

    def _check_shared_weights_are_unchanged(self) -> None:
        """Raises UsageError if the user has changed the shared weights, as that would be lost."""
        # torch counts the writes to each tensor. No counts were noted if no step was made since the
        # shared weights were loaded.
        if not self._write_counts_of_shared:
            return

        if self._write_counts_of_shared != write_counts(self.parameters):
            raise UsageError(
                "weights changed by hand under strategy='diloco'",
                "outside of a step the model holds the shared weights, and the replicas go on from "
                "their own until the next exchange",
                "change them in a hook of the optimizer: register_step_post_hook; or load a state "
                "dict, with which all replicas begin anew",
            )

    @property
    def _all_optimizers_stepped(self) -> bool:
        """True if all optimizers have stepped for the present virtual rank."""
        return len(self._stepped_optimizers) == len(self._optimizers)

    # The exchange

    @torch.no_grad()
    def _finish_global_batch(self) -> None:
        """Runs the exchanges that are due when all virtual ranks have stepped for a global batch.

        Two options of DiLoCo decide which are due. In the first `start` steps the virtual ranks
        train one model, and nothing is sent; later each trains its own copy. A fragment of the
        weights that is sent after a step is applied to the shared weights `delay` steps later.
        """
        self._global_batch_is_partly_stepped = False

        # Apply the fragments that were sent `delay` steps ago.
        for fragment in self._outer_optimizer.due_fragments(self._step.number):
            self._apply(fragment)

        # Send other fragments. Without a delay they are applied at once.
        steps_apart = self._step.number - self._options.start  # since they train their own copies
        if steps_apart > 0:
            for fragment in self._fragments_to_send(steps_apart):
                due_step = self._step.number + self._options.delay
                self._outer_optimizer.send(fragment, due_step)
                if self._options.delay == 0:
                    self._apply(fragment)

        # Between two global batches the module has the shared weights, for evaluation and saving.
        self.put_shared_values()

    def _fragments_to_send(self, steps_apart: int) -> list[int]:
        """Returns the fragments to send after a number of steps.

        In each round of `every` steps the fragments are sent at equal intervals, the last one at
        the end of the round. For example, 2 fragments with `every` 10 are sent after steps 5 and 10
        of each round.

        Args:
            steps_apart: the number of steps that the virtual ranks have trained apart.
        """
        every = self._options.every
        to_send: list[int] = []
        # In the example: 1, 2, ..., 10, and then 1 again.
        present_step_in_round = (steps_apart - 1) % every + 1
        for fragment in range(self._options.fragments):
            # In the example, fragment 0 is sent in step 5 of a round, and fragment 1 in step 10.
            step_in_round = (fragment + 1) * every // self._options.fragments
            if step_in_round == present_step_in_round:
                to_send.append(fragment)
        return to_send

    def _apply(self, fragment: int) -> None:
        """Applies a fragment to the shared weights.

        The last one of a round also averages the buffers.
        """
        self._outer_optimizer.apply(fragment)
        if fragment == self._options.fragments - 1:
            self._average_buffers()

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Replaces each floating-point buffer by its mean over the virtual ranks.

        The mean becomes the shared value, and the value of each virtual rank. Other buffers, such
        as counters, are taken from the first virtual rank. A buffer that is equal everywhere keeps
        its bits.
        """
        shared = self._buffers.values(SHARED)
        buffers_of_virtual_ranks = [self._buffers.values(number) for number in self.own]
        self._average_floating_point(shared, buffers_of_virtual_ranks)

        # Every other buffer gets the value of virtual rank 0, the first one of rank 0. Each
        # rank takes the value of its own first virtual rank, and then receives that of rank 0.
        others: list[Tensor] = []
        for buffer, first_own_buffer in zip(shared, buffers_of_virtual_ranks[0], strict=True):
            if not buffer.is_floating_point():
                buffer.copy_(first_own_buffer)
                others.append(buffer)
        if others and self._run.topology.size > 1:
            broadcast_from_first_rank(others)

        for buffers in buffers_of_virtual_ranks:
            for index, buffer in enumerate(shared):
                buffers[index].copy_(buffer)

    def _average_floating_point(
        self, shared: Sequence[Tensor], buffers_of_virtual_ranks: Sequence[Sequence[Tensor]]
    ) -> None:
        """Writes the mean over all virtual ranks into each shared buffer of a floating-point type.

        new shared = shared - mean over all virtual ranks of (shared - buffer of the virtual rank)

        If all buffers are equal, the differences are exactly 0, and the bits stay the same. A mean
        of the buffers themselves might be rounded.

        Args:
            shared: all shared buffers.
            buffers_of_virtual_ranks: the same buffers of each virtual rank of this process.
        """
        averaged: list[Tensor] = []
        differences: list[Tensor] = []  # summed over the virtual ranks of this process
        for index, buffer in enumerate(shared):
            if buffer.is_floating_point():
                total = torch.zeros_like(buffer)
                for buffers in buffers_of_virtual_ranks:
                    total += _difference(buffer, buffers[index])
                averaged.append(buffer)
                differences.append(total)

        # In place, these sums become means over all virtual ranks of the run.
        wait = self._exchange.start_means(differences)
        wait()
        for buffer, mean_difference in zip(averaged, differences, strict=True):
            buffer.sub_(mean_difference)

    # For checks, checkpoints and the end of the run

    def equal_tensors(self) -> Iterable[EqualTensors]:
        """Yields the tensors that must be equal on several ranks.

        The shared weights must be equal on all ranks, and the weights of a virtual rank on the
        ranks that compute it.
        """
        if self._run.topology.size == 1:
            return

        # `values` returns one version of the weights or buffers: the shared one, or that of a
        # virtual rank, which its number identifies.
        shared_weights = self._weights.values(SHARED)
        shared_buffers = self._buffers.values(SHARED)
        yield EqualTensors(
            parameters=dict(zip(self._parameter_names, shared_weights, strict=True)),
            buffers=dict(zip(self._buffer_names, shared_buffers, strict=True)),
        )

        if self._group is None:  # no other rank computes a virtual rank of this one
            return

        # A rank that shares a virtual rank with other ranks computes no second one.
        only_virtual_rank = self.own[0]
        trains_its_own_weights = self._weights.exists(only_virtual_rank)
        if trains_its_own_weights:
            weights = self._weights.values(only_virtual_rank)
            weight_by_name = dict(zip(self._parameter_names, weights, strict=True))
            yield EqualTensors(parameters=weight_by_name, buffers={}, group=self._group)

    def shared_state(self) -> Any:
        """Returns the state of the outer optimizer, including the fragments in flight."""
        return self._outer_optimizer.shared_state()

    def check(self, shared: Any) -> None:
        """Raises CheckpointError if the shared state was saved with another number of fragments."""
        self._outer_optimizer.check(shared)

    def virtual_rank_state(self, number: int) -> Any:
        """Returns the weights, buffers and quantization errors of a virtual rank, for a checkpoint.

        The weights are None if the virtual rank has no own weights, but uses the shared ones. The
        quantization errors are added to what it sends next.
        """
        has_weights = self._weights.exists(number)
        return {
            "weights": self._weights.values(number) if has_weights else None,
            "buffers": self._buffers.values(number),
            "lost": self._outer_optimizer.quantization_errors(number),
        }

    @torch.no_grad()
    def load(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Loads the state that a checkpoint holds.

        Args:
            shared: what `shared_state` returned when it was saved.
            states: what `virtual_rank_state` returned then, by the number of the virtual rank: its
                weights, its buffers, and under "lost" what quantization has rounded off.
        """
        self.forget_virtual_ranks()
        device = self._run.device
        self._outer_optimizer.load_shared_state(shared, device)
        for number, state in states.items():
            self._outer_optimizer.load_quantization_errors(number, state["lost"], device)
            _load_values(self._weights, number, state["weights"])
            _load_values(self._buffers, number, state["buffers"])

    def forget_virtual_ranks(self) -> None:
        """Drops the state of all virtual ranks, which begin again with the module's weights."""
        self._weights.keep_only_shared()
        self._buffers.keep_only_shared()
        self._write_counts_of_shared = []
        self._stored_gradients = {}
        self._outer_optimizer.reset()

    def close(self, failed: bool) -> None:
        """Waits for running exchanges, and warns if the last steps were not exchanged.

        Example: with `every` 10 and `delay` 2, a round is complete 2 steps after its end. The best
        ends of a training are therefore after 12, 22, 32, ... steps. The last 2 steps are missing
        then, too, which needs no warning. After 27 steps, 7 are missing.

        Args:
            failed: True if the run ends with an error. Then other ranks may not send anything any
                more, and nothing is waited for.
        """
        if failed:
            self._outer_optimizer.drop_in_flight()
            return

        self._outer_optimizer.wait()
        self._outer_optimizer.drop_in_flight()  # they would be applied after steps to come
        steps_apart = self._step.number - self._options.start
        if steps_apart <= 0:  # the virtual ranks have not trained apart yet
            return

        # The comments have the numbers of the example.
        every = self._options.every
        delay = self._options.delay
        steps_in_rounds = _steps_in_complete_rounds(steps_apart, every, delay)  # 20
        steps_left = steps_apart - steps_in_rounds  # 27 - 20 = 7
        if steps_left <= delay:
            return

        next_good_end = steps_in_rounds + every + delay  # 20 + 10 + 2 = 32
        delay_option = f", delay={delay}" if delay > 0 else ""
        warn(
            f"DiLoCo(every={every}{delay_option}) for {count_noun(steps_apart, 'step')}",
            found=f"the last {count_noun(steps_left, 'step')} of the replicas are not in the "
            "shared weights, which are evaluated and saved",
            do=f"end after {next_good_end} steps, when the last exchange has been applied",
        )

    def release(self) -> None:
        """Drops all references to the process group."""
        group = self._run.groups.get(SAME_VIRTUAL_RANKS)
        for layer in self._module.modules():
            if isinstance(layer, SyncBatchNorm) and layer.process_group is group:
                layer.process_group = None
        self._group = None
        self._moving_buffers = None

    def _present_buffers(self) -> list[Tensor]:
        """Returns the module's buffers. A forward pass may have replaced some by new tensors."""
        return [getattr(owner, attribute) for owner, attribute in self._buffer_places]


def _steps_in_complete_rounds(steps_apart: int, every: int, delay: int) -> int:
    """Returns how many of the steps that virtual ranks have trained apart are in complete rounds.

    A round of `every` steps is complete `delay` steps after its end, when its last fragment is
    applied. With `every` 10 and `delay` 2, round 1 (steps 1 to 10) is complete after step 12, and
    round 2 after step 22. So after 12 to 21 steps apart, the result is 10.
    """
    num_complete_rounds = max(0, steps_apart - delay) // every
    return num_complete_rounds * every


def _owner_and_attribute(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the submodule that has a buffer, and the name of the attribute there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _load_values(
    versions: TensorVersions, virtual_rank: int, values: Sequence[Tensor] | None
) -> None:
    """Copies saved values into a virtual rank's version of some tensors.

    Args:
        versions: the versions of these tensors.
        virtual_rank: the number of the virtual rank.
        values: the saved values. If there are none, the virtual rank begins with the shared values.
    """
    if not values:
        return
    for tensor, value in zip(versions.values(virtual_rank), values, strict=True):
        tensor.copy_(value)


def _difference(shared: Tensor, other: Tensor) -> Tensor:
    """Returns `shared - other`, with 0 wherever both are equal, even if they are infinite."""
    return torch.where(shared == other, torch.zeros_like(shared), shared - other)

"""The strategy `diloco`: virtual ranks train apart and are merged at regular intervals.

A *virtual rank* (the user's option calls it a replica) trains its own copy of the model on an equal
part of every global batch, with its own inner optimizer. The number of virtual ranks is part of the
recipe, like the size of the global batch; the results do not depend on the number of processes.
After every `every` steps, called a *round*, the outer optimizer merges the virtual ranks into the
*shared* weights, and all of them continue from these.

The outer optimizer is SGD with Nesterov momentum. As the gradient of the shared weights it takes
the mean over virtual ranks of (shared weights - weights of the virtual rank) (Douillard et al.,
"DiLoCo", arXiv 2311.08105, algorithm 1). Without momentum and at a rate of 1 this is local SGD
(Stich, arXiv 1805.09767), which may begin later (post-local SGD, Lin et al., arXiv 1808.07217).

The model may be exchanged in fragments, one after the other. What was sent may be applied some
steps later, while training goes on. A virtual rank then continues from the mean of its own weights
and the shared ones ("Streaming DiLoCo", Douillard et al., arXiv 2501.18512, algorithm 2, with
alpha = 0.5).

Communication between virtual ranks: one all-reduce of a fragment when it is due. If differences are
compressed, it is one all-gather of the quantized differences instead, and the quantization error is
added to what is sent next (error feedback, Karimireddy et al., arXiv 1901.09847). Ranks that
compute one virtual rank together average its gradient in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.batch.indices import ceil_div
from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError, warn
from lockstep.keyword_arguments import check_keywords_of_constructor
from lockstep.settings import Choice
from lockstep.strategies.base import (
    PreparedModule,
    Strategy,
    StrategyPlan,
    move_to_device,
    open_group,
    refuse_virtual_ranks,
)
from lockstep.strategies.diloco.exchange import ACROSS_VIRTUAL_RANKS, SAME_VIRTUAL_RANKS
from lockstep.strategies.diloco.options import DiLoCoOptions
from lockstep.strategies.diloco.training import DiLoCoTraining
from lockstep.strategies.module_hook import RunHook
from lockstep.strategies.replication import broadcast_from_first_rank
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, convert
from lockstep.torch_compat import outside_compiled_code
from lockstep.units import format_bytes
from lockstep.wording import count_noun


@check_keywords_of_constructor("lockstep.strategies.DiLoCo")
@dataclass(frozen=True, kw_only=True)
class DiLoCo(DiLoCoOptions, Strategy):
    """The strategy `diloco` and its options.

    Raises:
        SettingError: an option has a value out of range, or two options exclude each other.
    """

    name: ClassVar[str] = "diloco"
    computes_batch_side_by_side: ClassVar[bool] = False
    why_ranks_differ: ClassVar[str] = "replicas train weights of their own"

    def plan(self, run: Run) -> StrategyPlan:
        """Plans a run in which each virtual rank gets an equal part of every global batch.

        Raises:
            SettingError: the strategy does not support this number of processes, or precision fp16.
        """
        refuse_virtual_ranks(
            run, self.name, "it has virtual ranks of its own, each of which trains a copy"
        )

        # The results depend on the number of replicas, but not on the number of processes. If there
        # are more processes than replicas, each replica is computed by equally many of them.
        num_ranks = run.topology.size
        if num_ranks > self.replicas and num_ranks % self.replicas != 0:
            raise SettingError(
                f"DiLoCo(replicas={self.replicas}) on {num_ranks} processes",
                f"{num_ranks} is more than {self.replicas} and no multiple of it, so not every "
                "replica could be computed by equally many processes",
                f"start at most {self.replicas} processes, or a multiple of it; the numbers depend "
                "on replicas alone",
            )

        if run.settings.precision == "fp16":
            raise SettingError(
                "strategy='diloco' with precision='fp16'",
                "its loss scaler would skip steps of one replica and not of the others",
                "use precision='bf16', which needs none",
            )

        if num_ranks > 1:
            self._open_groups(run)

        # In these first steps all virtual ranks still train one model.
        run.step.num_common_steps = self.start
        return replace(
            super().plan(run),
            virtual_ranks=self.virtual_ranks,
            statistics_group=SAME_VIRTUAL_RANKS,
        )

    def _open_groups(self, run: Run) -> None:
        """Opens the process groups: of ranks with the same virtual ranks, and across these."""
        # The ranks of a row compute the same virtual ranks. For 4 processes and 2 virtual ranks:
        # [[0, 1], [2, 3]]; for 2 processes and 4 virtual ranks: [[0], [1]].
        num_ranks = run.topology.size
        ranks_per_group = self.virtual_ranks.ranks_per_virtual_rank(num_ranks)
        ranks = torch.arange(num_ranks).view(-1, ranks_per_group)
        open_group(run, SAME_VIRTUAL_RANKS, ranks)  # one group for each row
        if self.compress:  # otherwise one all-reduce over all ranks averages the virtual ranks
            open_group(run, ACROSS_VIRTUAL_RANKS, ranks.T)  # one group for each column

    @property
    def needs_values(self) -> bool:
        """True, because each virtual rank begins with a copy of the parameters."""
        return True

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Prepares a module in which virtual ranks take turns; it is returned without a wrapper.

        Raises:
            SettingError: there are more fragments than parameters.
            UsageError: the module holds a sparse tensor.
        """
        choices = move_to_device(module, run.device)
        _set_statistics_group(module, run)
        if run.topology.size > 1:
            broadcast_from_first_rank([*module.parameters(), *module.buffers()])

        if not any(parameter.requires_grad for parameter in module.parameters()):
            # Nothing is trained, so there is nothing to exchange.
            return PreparedModule(module=module, choices=choices)

        # The mean running statistics of BatchNorm may not match the weights after an exchange.
        self._warn_of_statistics(module)

        options, chosen_difference = self._options_in(run)
        training = DiLoCoTraining(module, run, options)
        _register_hooks(module, training)

        size_bytes = sum(p.numel() * p.element_size() for p in training.parameters)
        choices += options._choices(run.topology.size, size_bytes)

        return PreparedModule(
            module=module,
            choices=choices,
            chosen_difference=chosen_difference,
            equal_tensors=training.equal_tensors,
            extensions=[training],
            virtual_rank_state=training,
        )

    def _options_in(self, run: Run) -> tuple[DiLoCo, str]:
        """Returns the options that a run uses, and a text about one that it leaves out.

        `lockstep verify` compares runs without compression. The text then says which option of the
        user makes the results differ from those of one device. It is empty in other runs.
        """
        if not run.settings.uncompressed or self.compress is None:
            return self, ""
        text = f"differences of replicas are sent as {self.compress}"
        return replace(self, compress=None), text

    def _choices(self, num_ranks: int, size_bytes: int) -> list[Choice]:
        """Returns the printed lines about the virtual ranks and the exchange.

        For example:

            replicas: 4, train apart; 2 replicas on each process, in turn
            exchange: every 10 steps, 3.2 MB as int8, applied 2 steps later; outer SGD, rate 0.7,
            Nesterov momentum 0.9

        Args:
            num_ranks: the number of processes.
            size_bytes: the size of the parameters that are exchanged.
        """
        # Where the virtual ranks (replicas) are computed.
        if self.replicas <= num_ranks:
            # `plan` has checked that the number of processes is a multiple.
            processes_per_replica = self.virtual_ranks.ranks_per_virtual_rank(num_ranks)
            where = f"each on {count_noun(processes_per_replica, 'process')}"
        else:
            fewest = self.replicas // num_ranks
            most = ceil_div(self.replicas, num_ranks)
            if fewest == most:
                replicas = count_noun(fewest, "replica")
            else:
                replicas = f"{fewest} or {most} replicas"
            where = f"{replicas} on each process, in turn"

        # What is exchanged, and how the outer optimizer applies it.
        exchanged = format_bytes(size_bytes)
        if self.compress is not None:
            exchanged += f" as {self.compress}"

        if self.fragments > 1:
            exchanged += f" in {self.fragments} fragments"

        if self.delay > 0:
            exchanged += f", applied {count_noun(self.delay, 'step')} later"

        rule = f"outer SGD, rate {self.outer_lr:g}, Nesterov momentum {self.outer_momentum:g}"
        return [
            Choice("replicas", str(self.replicas), f"train apart; {where}"),
            Choice("exchange", f"every {count_noun(self.every, 'step')}", f"{exchanged}; {rule}"),
        ]

    def _warn_of_statistics(self, module: nn.Module) -> None:
        """Warns if the evaluated weights will not match the running statistics of BatchNorm.

        Running statistics become the mean over the virtual ranks. The weights become their mean
        only with outer_lr=1 and without momentum; otherwise they overshoot their mean.
        """
        weights_are_means = self.outer_lr == 1.0 and not self.outer_momentum
        if weights_are_means:
            return

        # Layers in evaluation mode (frozen ones) never change their statistics.
        changes_statistics = any(
            layer.training and getattr(layer, "running_mean", None) is not None
            for layer in module.modules()
        )
        if not changes_statistics:
            return

        warn(
            f"DiLoCo(outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}) of a "
            "model with BatchNorm",
            found="running statistics are the mean over the replicas, but the outer optimizer "
            "takes the weights further, so the two do not match when the model is evaluated or "
            "saved",
            do="recompute them before you evaluate or save: update_bn(batches, model) of "
            "torch.optim.swa_utils, the same batches on every rank; or use GroupNorm, or "
            "outer_lr=1, outer_momentum=0",
        )


def _register_hooks(module: nn.Module, training: DiLoCoTraining) -> None:
    """Makes a module have the right values in its forward passes and in its state dict."""
    module.register_forward_pre_hook(ModuleHook(training.before_forward))

    # A state dict has the shared weights. If one is loaded, all virtual ranks begin again with
    # these weights.
    untyped_module: Any = module  # torch's hooks have no types
    untyped_module.register_state_dict_pre_hook(ModuleHook(training.put_shared_values))
    untyped_module.register_load_state_dict_pre_hook(ModuleHook(training.forget_virtual_ranks))


def _set_statistics_group(module: nn.Module, run: Run) -> None:
    """Makes SyncBatchNorm layers compute their statistics over the samples of one virtual rank.

    torch's own SyncBatchNorm layers are converted to Lockstep's.
    """
    group = run.groups.get(SAME_VIRTUAL_RANKS)  # None on one process
    for layer in module.modules():
        if group is not None and isinstance(layer, nn.SyncBatchNorm):
            convert(layer, group)
        if isinstance(layer, SyncBatchNorm) and layer.process_group is None:
            layer.process_group = group


class ModuleHook(RunHook):
    """A hook of a module that calls a function without arguments.

    Args:
        call: the function to call; None for a hook that does nothing.
    """

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    @outside_compiled_code
    def __call__(self, *args: Any) -> None:
        """Calls the function; called by torch with arguments that are not needed."""
        if self._call is not None:
            self._call()

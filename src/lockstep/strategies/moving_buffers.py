"""Keeps the buffers that forward passes change equal on all ranks.

Each rank computes its own samples, so a buffer that a forward pass changes (a running mean, a
codebook) gets different values on each rank. Such buffers are called *moving* here. After each
optimizer step they are taken from the first rank, or averaged if the user has asked for that.

Sending all buffers would be a waste: most of them (masks, tables) never change, and the statistics
of a SyncBatchNorm are equal on all ranks anyway. So the ranks find out which buffers move, in the
first steps and then at regular intervals, by comparing sums of their bits with one small
all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.communication import routing
from lockstep.errors import warn
from lockstep.session.check_schedule import check_due
from lockstep.session.step import Step
from lockstep.strategies.bit_sums import bit_sums
from lockstep.strategies.replication import broadcast_from_first_rank, start_sum
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.torch_compat import BatchNorm
from lockstep.wording import join_first


class MovingBuffers:
    """Keeps the buffers of a module equal on the ranks of a group.

    Buffers on the meta device belong to other ranks and are left out.

    Args:
        module: the module whose buffers are kept equal.
        step: the state of the current optimizer step.
        group: the ranks on which buffers are to be equal; None for all ranks.
        average: names, or patterns of names, of floating-point buffers that are averaged over the
            ranks, weighted by samples. All other buffers are taken from the first rank.
        left_out: names of buffers that are made equal elsewhere.
        strategy: the name of the strategy whose option `average_buffers` a warning may recommend;
            None if it has no such option.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        group: dist.ProcessGroup | None = None,
        *,
        average: str | Sequence[str] = (),
        left_out: Sequence[str] = (),
        strategy: str | None = None,
    ) -> None:
        self._module = module
        self._step = step
        self._group = group
        self._strategy = strategy
        self._has_warned = False
        self._num_steps = 0
        """The number of steps since the module was prepared. A resumed run starts again at 0,
        because it does not know yet which buffers move."""
        synchronised_ids = _buffer_ids(module, SyncBatchNorm)
        self._batchnorm_ids = _buffer_ids(module, BatchNorm)
        """The ids of buffers that need no warning: rank 0 has already printed that BatchNorm is not
        synchronised."""
        chosen = names_to_average(module, average)
        self._averaged_names: list[str] = []
        """The names of buffers that are averaged after each step."""
        self._watched_names: list[str] = []
        """The names of all other buffers, which may move."""

        for name, buffer in module.named_buffers():
            if buffer.numel() == 0 or buffer.is_meta or id(buffer) in synchronised_ids:
                continue
            if name in left_out:
                continue

            if name in chosen:
                self._averaged_names.append(name)
            else:
                self._watched_names.append(name)

        self._first_sums = self._bit_sums()
        """For each watched buffer, the sum of its bits before the training."""
        self.moving: list[str] = []
        """The names of the watched buffers that have changed on some rank."""

    def make_equal(self) -> None:
        """Makes moving buffers equal on all ranks, after an optimizer step.

        Some buffers are averaged. All others are watched, and those of them that have changed on
        some rank are *moving*: they are taken from rank 0.
        """
        self._num_steps += 1
        if self._averaged_names:
            self._average()

        # Not in every step, because it takes an all-reduce.
        if self._watched_names and check_due(self._num_steps):
            self._find_moving()

        if self.moving:
            buffers = dict(self._module.named_buffers())
            broadcast_from_first_rank([buffers[name] for name in self.moving], self._group)

    def _find_moving(self) -> None:
        """Sets `moving` to the names of the watched buffers that have changed on any rank.

        Warns once if the values of some of them differ between ranks.
        """
        changed_on_any_rank, differs_between_ranks = self._compare_over_ranks()

        # A buffer that has moved once may have returned to its first value.
        moving: list[str] = []
        for name, has_changed in zip(self._watched_names, changed_on_any_rank, strict=True):
            if has_changed or name in self.moving:
                moving.append(name)

        self.moving = moving
        self._warn_of_different(differs_between_ranks)

    def _warn_of_different(self, differs_between_ranks: Sequence[bool]) -> None:
        """Warns once of watched buffers whose values differ between ranks.

        Buffers of BatchNorm are left out: the start of the run has printed that BatchNorm is not
        synchronised.

        Args:
            differs_between_ranks: for each watched buffer, whether its values differ.
        """
        buffers = dict(self._module.named_buffers())
        different: list[str] = []
        for name, differs in zip(self._watched_names, differs_between_ranks, strict=True):
            if differs and id(buffers[name]) not in self._batchnorm_ids:
                different.append(name)

        if different and not self._has_warned:
            self._has_warned = True
            self._warn(different)

    def _compare_over_ranks(self) -> tuple[list[bool], list[bool]]:
        """Compares the watched buffers with their first values, and between the ranks.

        The values are compared by their bits. Torch also counts the writes to a tensor, but misses
        those of its own BatchNorm.

        Returns:
            For each watched buffer, whether it has changed on any rank, and whether its values
            differ between ranks. The result is the same on all ranks.
        """
        sums = self._bit_sums()
        has_changed = (sums != self._first_sums).to(torch.int64)

        # The smallest sum of all ranks is found as a maximum, too: -min(sums) = max(-sums).
        largest_sums = sums
        negative_smallest_sums = -sums

        # If this rank had no samples, its buffers have kept their old values. It sends the smallest
        # possible number in place of sums, so that the maxima are those of other ranks.
        micro_batch = self._step.micro_batch
        rank_has_no_samples = micro_batch.global_samples > 0 and micro_batch.local_rows == 0
        if rank_has_no_samples:
            never_a_maximum = torch.full_like(sums, torch.iinfo(torch.int64).min)
            largest_sums = never_a_maximum
            negative_smallest_sums = never_a_maximum

        # In place, the maximum of each number over all ranks.
        maxima = torch.stack([has_changed, largest_sums, negative_smallest_sums])
        routing.all_reduce(maxima, dist.ReduceOp.MAX, self._group)
        changed, largest, negative_smallest = maxima.tolist()

        changed_on_any_rank = [number > 0 for number in changed]
        differs_between_ranks: list[bool] = []
        for largest_sum, negative_sum in zip(largest, negative_smallest, strict=True):
            smallest_sum = -negative_sum
            differs_between_ranks.append(largest_sum != smallest_sum)

        return changed_on_any_rank, differs_between_ranks

    def _warn(self, names: Sequence[str]) -> None:
        """Warns that the values of the buffers with these names differ between ranks.

        The values of rank 0 replace those of all other ranks. So what the buffers of the other
        ranks have recorded in their forward passes is lost.
        """
        advice = "compute them from the global batch: world.sum of sums and counts, in forward"
        if self._strategy is not None:
            example = list(names[:1])
            advice += (
                "; running means over samples can be averaged after each step instead: "
                f"{self._strategy}(average_buffers={example!r})"
            )

        warn(
            "buffers that change in the forward pass",
            found=f"the values of {join_first(names)} differ between ranks, as each rank changes "
            "its own; after each step all ranks take those of rank 0, and what the other ranks "
            "recorded is lost",
            do=f"{advice}; if those of rank 0 are good enough, nothing has to be done",
        )

    @torch.no_grad()
    def _average(self) -> None:
        """Replaces buffers by their means over the ranks, weighted by the samples of each rank."""
        micro_batch = self._step.micro_batch

        # The weight of a rank is its number of samples in the global batch, if this is known. It is
        # unknown without a prepared loader (`global_samples` is 0), and with several micro-batches,
        # of which only the last one's samples are known here. Then all ranks have the same weight.
        weight = 1.0
        if micro_batch.global_samples > 0 and micro_batch.num_micro_batches == 1:
            weight = float(micro_batch.local_rows)

        buffers = dict(self._module.named_buffers())
        averaged = [buffers[name] for name in self._averaged_names]

        # mean = sum(weight * buffer) / sum(weight), with sums over the ranks. Each buffer needs the
        # total weight in its own dtype and on its own device, so a weight is sent with each.
        sums: list[Tensor] = []
        total_weights: list[Tensor] = []
        for buffer in averaged:
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            if weight == 0:
                # A buffer that has seen no samples may be NaN, and so would be 0 times its value.
                sums.append(torch.zeros_like(buffer, dtype=dtype))
            else:
                sums.append(buffer.to(dtype) * weight)
            total_weights.append(torch.full((), weight, dtype=dtype, device=buffer.device))

        wait = start_sum([*sums, *total_weights], self._group)  # over the ranks, in place
        wait()
        for buffer, total, total_weight in zip(averaged, sums, total_weights, strict=True):
            buffer.copy_(total / total_weight)

    def _bit_sums(self) -> Tensor:
        """Returns the sum of the bits of each watched buffer, shape `(watched buffers,)`."""
        buffers = dict(self._module.named_buffers())
        return bit_sums([buffers[name] for name in self._watched_names])


def names_to_average(module: nn.Module, average: str | Sequence[str]) -> set[str]:
    """Returns the names of the floating-point buffers that a user has chosen to be averaged.

    Warns of a choice that fits no buffer, for example because its name is misspelled.

    Args:
        module: the module that holds the buffers.
        average: names, or patterns of names such as `*.mean`, as in the option `average_buffers`.
    """
    patterns = [average] if isinstance(average, str) else average
    names = [name for name, buffer in module.named_buffers() if buffer.is_floating_point()]

    chosen: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        chosen.update(matching)
        if matching:
            continue

        # This is no error: a strategy may prepare two models, of which one has such buffers.
        warn(
            f"average_buffers={pattern!r}",
            found=f"no floating-point buffer of the model has this name: [{join_first(names)}]",
            do="give names as `model.named_buffers()` has them, or patterns such as '*.mean'",
        )
    return chosen


def _buffer_ids(module: nn.Module, layer_type: type[nn.Module]) -> set[int]:
    """Returns the ids of the buffers of all layers of a given type."""
    ids: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, layer_type):
            ids.update(id(buffer) for buffer in layer.buffers(recurse=False))
    return ids

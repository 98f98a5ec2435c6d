"""What processes exchange under DiLoCo: means over all virtual ranks.

A *virtual rank* trains a copy of the model of its own (the user's option calls it a replica). A
process computes one or several virtual ranks, or several processes compute one together. Values
are averaged by one all-reduce. Quantized values are gathered instead, and every process adds up the
same rows in the order of the virtual ranks, so the result does not depend on the number of
processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.batch.indices import ceil_div
from lockstep.communication import routing
from lockstep.communication.quantize import BLOCK, Method, decode, encode
from lockstep.communication.routing import carrier_device
from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError
from lockstep.strategies.replication import start_sum
from lockstep.wording import count_noun

SAME_VIRTUAL_RANKS = "replica"
"""Name of the process group of the ranks that compute the same virtual ranks as this one."""
ACROSS_VIRTUAL_RANKS = "across replicas"
"""Name of the process group with one rank of each of the groups above."""


class Exchange:
    """Averages over all virtual ranks of a run.

    The methods start an average and return a function that waits for it. These functions must be
    called in the order in which the averages were started, on all ranks.
    """

    def __init__(self, run: Run, num_virtual_ranks: int) -> None:
        self._run = run
        self._num_virtual_ranks = num_virtual_ranks

    def start_means(self, sums: Sequence[Tensor]) -> Callable[[], None]:
        """Starts to replace sums over this rank's virtual ranks by the means over all of them.

        Args:
            sums: tensors, which are replaced in place.

        Returns:
            A function that waits until `sums` hold the means.
        """
        num_ranks = self._run.topology.size
        end_sum = start_sum(sums) if num_ranks > 1 else None

        # A virtual rank that several ranks compute together is in the sum once for each of them:
        # with 2 virtual ranks on 6 ranks, 3 times.
        num_summands = max(self._num_virtual_ranks, num_ranks)

        def wait() -> None:
            """Divides the sums, once they are there."""
            if end_sum is not None:
                end_sum()
            for tensor in sums:
                tensor.div_(num_summands)

        return wait

    def start_quantized_means(
        self,
        vectors: Sequence[Tensor],
        errors: Sequence[Tensor | None],
        means: Sequence[Tensor],
        method: Method,
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Quantizes a vector of each virtual rank, and starts to fill `means` with their means.

        Args:
            vectors: one for each virtual rank of this process.
            errors: the quantization error of each virtual rank's previous vector, which is added
                to its vector (error feedback); None: there was none.
            means: tensors that are filled; together they have as many values as a vector.
            method: how values are quantized.

        Returns:
            The new quantization errors (with bf16, which has no error feedback, `errors`), and the
            function that waits for the means.
        """
        length = len(vectors[0])
        padding = -length % BLOCK  # up to a multiple of BLOCK
        if length == 0:  # `encode` needs at least one block
            padding = BLOCK

        # Shape (virtual ranks of this process, length + padding).
        values = F.pad(torch.stack([*vectors]), (0, padding))
        for row, error in zip(values, errors, strict=True):
            if error is not None:
                row += error  # the row is a view, so this changes `values`

        # `encode` fills them with what it loses.
        rounding_errors = None if method == "bf16" else torch.empty_like(values)
        finish_gather = self._start_gather(encode(values, method, rounding_errors))

        def wait() -> None:
            """Decodes the rows of all virtual ranks, once they are there, and fills `means`."""
            total = torch.zeros_like(values[:1])  # (1, length + padding)
            decoded = torch.empty_like(values[:1])
            rows = finish_gather().to(total.device)
            for row in torch.split(rows, 1):
                total += decode(row, method, decoded)

            # A process with a virtual rank less than others has sent a row of zeros, too. That adds
            # nothing, and the mean is over virtual ranks, not over rows.
            mean = total[0, :length].div_(self._num_virtual_ranks)
            parts = torch.split(mean, [tensor.numel() for tensor in means])
            for tensor, part in zip(means, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

        if rounding_errors is None:
            return errors, wait

        return [*rounding_errors], wait  # one row for each virtual rank

    def _start_gather(self, rows: Tensor) -> Callable[[], Tensor]:
        """Starts to gather the encoded rows of all virtual ranks, in their order.

        Ranks that compute the same virtual rank divide its row: each sends some of the columns to
        the other virtual ranks, and then they exchange what they have received.

        Args:
            rows: one row of bytes for each virtual rank of this process.

        Returns:
            A function that waits, and returns all rows. Where some processes have a virtual rank
            less than others, rows of zeros are among them, which decode to zeros.
        """
        across = self._run.groups.get(ACROSS_VIRTUAL_RANKS)
        if across is None or dist.get_world_size(across) == 1:
            return lambda: rows  # this process has the rows of all virtual ranks

        num_columns = rows.shape[1]
        num_peers = dist.get_world_size(across)

        # Every process sends equally many rows, so some add rows of zeros at the end.
        rows_per_peer = ceil_div(self._num_virtual_ranks, num_peers)
        sent = F.pad(rows, (0, 0, 0, rows_per_peer - len(rows)))
        sent = sent.to(carrier_device(rows.device, across))

        # Of ranks that have the same rows, each sends its share of the columns.
        same_group = self._run.groups.get(SAME_VIRTUAL_RANKS)
        num_sharing = dist.get_world_size(same_group)
        if num_sharing > 1:
            # The last share is padded, so that all have the same width.
            width = ceil_div(num_columns, num_sharing)
            padded = F.pad(sent, (0, width * num_sharing - num_columns))
            column_parts = torch.split(padded, width, 1)
            sent = column_parts[dist.get_rank(same_group)].contiguous()

        # An all-gather, by an all-to-all in which every peer is sent the same: row r of the
        # argument goes to peer r, and row r of the result comes from it. All rows of `sent` form
        # one row there.
        received = sent.new_empty(num_peers * rows_per_peer, sent.shape[1])
        same_for_every_peer = sent.view(1, -1).expand(num_peers, -1)
        finish_exchange = routing.start_all_to_all(
            received.view(num_peers, -1), same_for_every_peer, across
        )

        def finish() -> Tensor:
            """Waits for the rows, and puts the columns that other ranks received beside them.

            `received` has the columns that this rank has received, and the ranks of `same_group`
            have the others.
            """
            finish_exchange()
            if num_sharing == 1:  # this rank has received all columns
                return received
            gathered = received.new_empty(num_sharing, *received.shape)
            routing.all_gather(gathered, received, same_group)
            whole_rows = torch.cat(list(gathered), 1)
            return whole_rows[:, :num_columns].contiguous()  # without the padding

        return finish


def split_into_fragments(sizes: Sequence[int], num_fragments: int) -> list[list[int]]:
    """Splits a list of tensors into fragments of nearly equal size.

    Args:
        sizes: the number of elements of each tensor.
        num_fragments: how many fragments there are to be.

    Returns:
        The indices of the tensors of each fragment. They are consecutive; no fragment is empty.

    Raises:
        SettingError: there are fewer tensors than fragments.
    """
    num_tensors = len(sizes)
    if num_fragments > max(1, num_tensors):
        raise SettingError(
            f"DiLoCo(fragments={num_fragments})",
            f"the model has {count_noun(num_tensors, 'parameter')} to train",
            "use fewer fragments",
        )

    # size_before[i]: the number of elements of all tensors before tensor i.
    size_before = [0, *itertools.accumulate(sizes)]
    total = size_before[-1]

    # A bound is the index of a fragment's first tensor. Each is chosen as near as possible to where
    # the tensors would be cut if they could be.
    bounds = [0]
    for number_of_bound in range(1, num_fragments):
        ideal = total * number_of_bound / num_fragments
        # At least one tensor for the fragment before, and for each of those that follow.
        lowest = bounds[-1] + 1
        highest = num_tensors - (num_fragments - number_of_bound)
        candidates = range(lowest, highest + 1)
        bounds.append(min(candidates, key=lambda bound: abs(size_before[bound] - ideal)))

    bounds.append(num_tensors)
    return [list(range(begin, end)) for begin, end in itertools.pairwise(bounds)]

"""Averages tensors over all virtual ranks of a DiLoCo run.

A *virtual rank* trains its own copy of the model (the user's option calls it a replica). A process
computes one or more virtual ranks, or several processes compute one together. Values are averaged
by one all-reduce. Quantized values are gathered instead, and every process adds up the same rows in
the order of the virtual ranks, so the result does not depend on the number of processes.
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
"""The name of the process group of ranks that compute the same virtual ranks."""
ACROSS_VIRTUAL_RANKS = "across replicas"
"""The name of the process group that has one rank of each `SAME_VIRTUAL_RANKS` group."""


class Exchange:
    """Averages over all virtual ranks of a run.

    Each method starts an average and returns a function that waits for it. On all ranks these
    functions must be called in the order in which the averages were started.
    """

    def __init__(self, run: Run, num_virtual_ranks: int) -> None:
        self._run = run
        self._num_virtual_ranks = num_virtual_ranks

    def start_means(self, sums: Sequence[Tensor]) -> Callable[[], None]:
        """Starts replacing sums over this rank's virtual ranks by the means over all virtual ranks.

        Args:
            sums: the sums, which are replaced in place.

        Returns:
            A function that waits until `sums` holds the means.
        """
        num_ranks = self._run.topology.size
        finish_sum = start_sum(sums) if num_ranks > 1 else None

        # How often a virtual rank is added up in total. If there are more virtual ranks than ranks,
        # each is added once. If there are more ranks, several of them compute one virtual rank, and
        # each of these adds it: with 2 virtual ranks on 6 ranks, there are 6 summands.
        num_summands = max(self._num_virtual_ranks, num_ranks)

        def wait() -> None:
            """Waits for the sums over all ranks, and divides them."""
            if finish_sum is not None:
                finish_sum()
            for tensor in sums:
                tensor.div_(num_summands)

        return wait

    def start_quantized_means(
        self,
        vectors: Sequence[Tensor],
        previous_errors: Sequence[Tensor | None],
        means: Sequence[Tensor],
        method: Method,
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Quantizes one vector of each virtual rank, and starts computing the mean of all vectors.

        Args:
            vectors: one vector for each virtual rank of this process.
            previous_errors: for each of them, the quantization error of its previous vector, which
                is added to the new one (error feedback); None if there was none.
            means: tensors into which the mean is written, cut into parts. Together they have as
                many elements as a vector.
            method: how values are quantized.

        Returns:
            The new quantization errors, and a function that waits until `means` is filled. bf16 has
            no error feedback, so each of its errors is None.
        """
        # Shape (virtual ranks of this process, length of a vector with its padding).
        length = len(vectors[0])
        values = _padded_to_blocks(torch.stack(list(vectors)))
        _add_errors(values, previous_errors)
        new_errors = None if method == "bf16" else torch.empty_like(values)
        encoded = encode(values, method, new_errors)  # also writes the new errors
        finish_gather = self._start_gather(encoded)

        def wait() -> None:
            """Waits for the encoded vectors of all virtual ranks, and fills `means`."""
            encoded_vectors = finish_gather().to(values.device)
            mean = self._mean_of_encoded(encoded_vectors, method, like=values[0])
            parts = torch.split(mean[:length], [tensor.numel() for tensor in means])
            for tensor, part in zip(means, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

        if new_errors is None:
            return [None] * len(vectors), wait

        return list(new_errors), wait  # one row for each virtual rank

    def _mean_of_encoded(self, encoded_vectors: Tensor, method: Method, like: Tensor) -> Tensor:
        """Decodes one vector of each virtual rank, and returns their mean.

        Args:
            encoded_vectors: the bytes of one encoded vector in each row. There may be more rows
                than virtual ranks, because every process has sent the same number of rows. The
                additional vectors decode to zeros.
            method: how values were quantized.
            like: a decoded vector, which has the length, dtype and device of the result.
        """
        total = like.new_zeros(1, len(like))
        buffer_for_decode = like.new_empty(1, len(like))  # reused for every vector
        for encoded_vector in torch.split(encoded_vectors, 1):
            total += decode(encoded_vector, method, buffer_for_decode)

        return total[0].div_(self._num_virtual_ranks)

    def _start_gather(self, rows: Tensor) -> Callable[[], Tensor]:
        """Starts gathering the encoded rows of all virtual ranks, in their order.

        Ranks that compute the same virtual rank share the work: each sends some columns of the row
        to the other virtual ranks, and then they exchange the columns that they have received.

        Args:
            rows: one row of bytes for each virtual rank of this process.

        Returns:
            A function that waits for all rows and returns them. If some processes have one virtual
            rank fewer than others, there are additional rows, which decode to zeros.
        """
        across = self._run.groups.get(ACROSS_VIRTUAL_RANKS)
        if across is None or dist.get_world_size(across) == 1:
            return lambda: rows  # this process has the rows of all virtual ranks

        num_columns = rows.shape[1]
        num_peers = dist.get_world_size(across)

        # Every process sends the same number of rows, so some add a row of zeros at the end.
        rows_per_peer = ceil_div(self._num_virtual_ranks, num_peers)
        sent = F.pad(rows, (0, 0, 0, rows_per_peer - len(rows)))
        sent = sent.to(carrier_device(rows.device, across))

        # If several ranks have the same rows, each of them sends only its share of the columns.
        same_group = self._run.groups.get(SAME_VIRTUAL_RANKS)
        ranks_per_virtual_rank = dist.get_world_size(same_group)
        if ranks_per_virtual_rank > 1:
            # The last share is padded, so that all have the same width.
            width = ceil_div(num_columns, ranks_per_virtual_rank)
            padded = F.pad(sent, (0, width * ranks_per_virtual_rank - num_columns))
            column_parts = torch.split(padded, width, 1)
            sent = column_parts[dist.get_rank(same_group)].contiguous()

        # Gather by an all-to-all in which every peer is sent the same data. Row r of its input goes
        # to peer r, and row r of its output comes from peer r.
        received = sent.new_empty(num_peers * rows_per_peer, sent.shape[1])
        same_for_every_peer = sent.view(1, -1).expand(num_peers, -1)
        finish_exchange = routing.start_all_to_all(
            received.view(num_peers, -1), same_for_every_peer, across
        )

        def finish() -> Tensor:
            """Waits until all rows have arrived, and returns them with all of their columns.

            `received` has a row of bytes for each virtual rank. If several ranks (`same_group`)
            compute the same virtual rank, each of them has received another range of columns.
            """
            finish_exchange()
            if ranks_per_virtual_rank == 1:  # this rank has received all columns
                return received
            return _join_columns(received, same_group)[:, :num_columns].contiguous()

        return finish


def _padded_to_blocks(rows: Tensor) -> Tensor:
    """Appends zeros to each row, up to a multiple of BLOCK, and to at least one block."""
    length = rows.shape[1]
    blocks = max(1, ceil_div(length, BLOCK))
    return F.pad(rows, (0, blocks * BLOCK - length))


def _join_columns(own_columns: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Joins the columns of a matrix that the ranks of a group hold, in the order of the ranks.

    Args:
        own_columns: the columns of this rank, shape (rows, columns of one rank).
        group: the ranks.

    Returns:
        The whole matrix, shape (rows, ranks * columns of one rank), on every rank.
    """
    gathered = own_columns.new_empty(dist.get_world_size(group), *own_columns.shape)
    routing.all_gather(gathered, own_columns, group)
    return torch.cat(list(gathered), 1)


def split_into_fragments(sizes: Sequence[int], num_fragments: int) -> list[list[int]]:
    """Splits a list of tensors into fragments of nearly equal size.

    For example, tensors of 4, 1, 1 and 2 elements are split into two fragments as [[0], [1, 2, 3]].

    Args:
        sizes: the number of elements of each tensor.
        num_fragments: the number of fragments.

    Returns:
        The indices of the tensors of each fragment, which are consecutive.

    Raises:
        SettingError: there are fewer tensors than fragments.
    """
    num_tensors = len(sizes)

    # No fragment may be empty, except the only fragment of a model without tensors.
    if num_fragments > max(1, num_tensors):
        raise SettingError(
            f"DiLoCo(fragments={num_fragments})",
            f"the model has {count_noun(num_tensors, 'parameter')} to train",
            "use fewer fragments",
        )

    size_before = [0, *itertools.accumulate(sizes)]  # [i]: elements of all tensors before tensor i
    total_size = size_before[-1]

    # Choose the first tensor of each fragment as near as possible to the ideal cut, which might be
    # inside a tensor.
    first_tensors = [0]
    for fragment in range(1, num_fragments):
        ideal_size_before = total_size * fragment / num_fragments

        # The previous fragment has at least one tensor.
        lowest = first_tensors[-1] + 1

        # This fragment and each one after it have at least one tensor, too. For example, with 5
        # tensors and 3 fragments, fragment 1 begins at tensor 3 at the latest, so that fragment 2
        # has tensor 4.
        fragments_from_here = num_fragments - fragment
        highest = num_tensors - fragments_from_here
        candidates = range(lowest, highest + 1)
        distances = [abs(size_before[index] - ideal_size_before) for index in candidates]
        nearest = distances.index(min(distances))
        first_tensors.append(candidates[nearest])

    bounds = [*first_tensors, num_tensors]
    return [list(range(begin, end)) for begin, end in itertools.pairwise(bounds)]


def _add_errors(rows: Tensor, errors: Sequence[Tensor | None]) -> None:
    """Adds to each row of a tensor, in place, its quantization error, if it has one."""
    for row, error in zip(rows, errors, strict=True):
        if error is not None:
            row += error

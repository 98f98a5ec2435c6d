"""PowerSGD: sums matrices over all ranks, and sends each as two narrow matrices.

A matrix M is approximated by P Q^T, where P (*left*) and Q (*right*) have few columns. Each sum is
one step of a power iteration that starts with the Q of the previous sum: the ranks sum P = M Q,
orthogonalise it, and then sum Q = M^T P. The *residual* M - P Q^T is added to M in the next sum.
(Vogels et al., arXiv 1905.13727, algorithms 1 and 2; error feedback: Karimireddy et al., arXiv
1901.09847.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.quantize import wide_dtype
from lockstep.communication.quantized_sum import State, have_same_shapes

# A matrix is sent as it is if its narrow matrices would not be smaller by this factor.
MIN_REDUCTION = 2


class LowRankSum:
    """Sums several tensors over all ranks.

    The method is linear: up to rounding, the result depends only on the sum over the ranks, not on
    how the values are distributed over them. All ranks get the same bits if their processors are of
    the same kind, since each rank multiplies the narrow matrices itself.

    Args:
        shapes: shapes of the tensors. The first dimension becomes the rows of the matrix.
        like: tensor whose device and dtype the sums have. A dtype of fewer than 32 bits is replaced
            by float32.
        rank: number of columns of the narrow matrices.
        start: number of sums that are sent uncompressed before narrow matrices are used.
        seed: seed of the random matrices Q with which the power iteration begins.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], like: Tensor, *, rank: int, start: int, seed: int = 0
    ) -> None:
        self._num_uncompressed_sums = start
        sizes = [shape.numel() for shape in shapes]
        self.values = torch.zeros(sum(sizes), dtype=wide_dtype(like.dtype), device=like.device)
        """Before `start`, the values of this rank; after `end`, the sum over all ranks."""
        self._matrices: list[Tensor] = []
        """Views of `values` that are sent as narrow matrices."""
        self._num_columns: list[int] = []
        """For each matrix, the number of columns of its narrow matrices."""
        self._uncompressed_parts: list[Tensor] = []
        """Views of `values` that are always sent as they are, because they are too small."""

        for shape, part in zip(shapes, torch.split(self.values, sizes), strict=True):
            num_rows = shape[0] if shape else 1
            matrix = part.view(num_rows, len(part) // max(num_rows, 1))  # there may be 0 rows
            num_columns = min(rank, *matrix.shape)

            narrow_numel = num_columns * sum(matrix.shape)  # the elements of P and Q
            if narrow_numel * MIN_REDUCTION < matrix.numel():
                self._matrices.append(matrix)
                self._num_columns.append(num_columns)
            else:
                self._uncompressed_parts.append(part)

        self._right_sizes: list[int] = []
        """For each matrix, the number of elements in its Q."""
        for matrix, num_columns in zip(self._matrices, self._num_columns, strict=True):
            self._right_sizes.append(matrix.shape[1] * num_columns)

        generator = torch.Generator().manual_seed(seed)
        right = torch.randn(sum(self._right_sizes), generator=generator)
        residual_numel = sum(matrix.numel() for matrix in self._matrices)
        self.state = {
            "right": right.to(self.values),
            "residual": self.values.new_zeros(residual_numel),
            "times": torch.zeros((), dtype=torch.int64),
        }
        """The state for a checkpoint: the Q of all matrices, the residuals, and in `times` the
        number of sums that have ended."""
        self._lefts: list[Tensor] = []
        """The P of each matrix. `start` computes this rank's; `advance` makes them the orthogonal
        ones, which are the same on all ranks."""
        self._message: Tensor
        """The values that this sum sends, which are replaced by their sum over the ranks."""
        self._wait_for_message: Callable[[], None]
        """Waits for what `start` has sent."""
        self._wait_for_rights: Callable[[], None]
        """Waits for what `advance` has sent."""

    @property
    def _is_uncompressed(self) -> bool:
        """True in the first sums, in which everything is sent uncompressed."""
        return bool(self.state["times"] < self._num_uncompressed_sums)

    def start(self) -> None:
        """Adds the residual to `values`, and begins to send P = M Q of each matrix M.

        In the first sums (see `_is_uncompressed`) it sends `values` as they are instead.

        Call `advance` and `end` next. Calls for other sums may come in between, as long as all
        ranks make all calls in the same order.
        """
        if self._is_uncompressed:
            self._wait_for_message = routing.start_all_reduce(self.values)
            return

        # M += residual. The matrices are views of `values`, so this changes `values`.
        for matrix, residual in zip(self._matrices, self._residuals(), strict=True):
            matrix += residual

        # P = M Q, with shapes (rows, narrow) = (rows, columns) x (columns, narrow).
        self._lefts = []
        for matrix, right in zip(self._matrices, self._rights(), strict=True):
            self._lefts.append(matrix @ right)

        # One message holds the P of all matrices, then the tensors that are sent as they are
        # (`_unpack_message` takes it apart again).
        parts = [*self._lefts, *self._uncompressed_parts]
        self._message = torch.cat([part.view(-1) for part in parts])
        self._wait_for_message = routing.start_all_reduce(self._message)

    def advance(self) -> None:
        """Waits for the sums of P, orthogonalises them, and begins to send Q = M^T P."""
        self._wait_for_message()
        if self._is_uncompressed:  # `values` already holds the sum
            return

        sums_of_lefts, sums_of_uncompressed_parts = self._unpack_message()

        # The uncompressed parts are views of `values`, so this writes their sums to `values`.
        for part, sum_of_part in zip(
            self._uncompressed_parts, sums_of_uncompressed_parts, strict=True
        ):
            part.copy_(sum_of_part)

        # P becomes an orthonormal basis of the columns of its sum.
        self._lefts = _orthonormal_bases(sums_of_lefts)

        # Q = M^T P, with this rank's M. Each Q is a view of `state["right"]`, so this sends all of
        # them as one tensor.
        for matrix, left, right in zip(self._matrices, self._lefts, self._rights(), strict=True):
            torch.mm(matrix.T, left, out=right)
        self._wait_for_rights = routing.start_all_reduce(self.state["right"])

    def _unpack_message(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the sums of all P, and those of the uncompressed parts, from the message."""
        parts = [*self._lefts, *self._uncompressed_parts]
        flat_sums = torch.split(self._message, [part.numel() for part in parts])
        sums = [flat.view_as(part) for flat, part in zip(flat_sums, parts, strict=True)]
        num_matrices = len(self._lefts)
        return sums[:num_matrices], sums[num_matrices:]

    def end(self) -> None:
        """Waits for the sums of Q, computes `values` from P and Q, and updates the residuals."""
        if not self._is_uncompressed:  # otherwise `values` already holds the sum
            self._wait_for_rights()
            self._decompress()

        self.state["times"] += 1  # counts the sums; `_is_uncompressed` depends on it

    def _decompress(self) -> None:
        """Replaces each matrix M, a view of `values`, by its sum; updates the residuals.

        The sum of M over the ranks is approximated by S = P Q^T, where Q is already summed over the
        ranks. Of this sum, S / num_ranks counts as this rank's share. The residual is the part of
        the rank's own M that the share does not contain: M - S / num_ranks.
        """
        num_ranks = dist.get_world_size()
        for matrix, left, right, residual in zip(
            self._matrices, self._lefts, self._rights(), self._residuals(), strict=True
        ):
            sum_of_matrix = left @ right.T
            torch.sub(matrix, sum_of_matrix, alpha=1.0 / num_ranks, out=residual)
            matrix.copy_(sum_of_matrix)
        self._forget_nan_and_infinity()

    def _forget_nan_and_infinity(self) -> None:
        """Replaces them by 0 in what later steps use; the sum of this step keeps them."""
        self.state["residual"].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.state["right"].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def load(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads the state of the run that is resumed.

        If that run had a different number of ranks, the sum of their residuals is divided equally
        over the ranks of this run.

        Args:
            own: the `state` of this rank in that run.
            states_of_ranks: the `state` of every rank in that run.

        Returns:
            False if the states belong to other tensors; nothing is loaded then.
        """
        if not states_of_ranks or not have_same_shapes(states_of_ranks[0], self.state):
            return False

        # The matrices Q ("right") and the number of sums ("times") are the same on all ranks.
        for name in ("right", "times"):
            self.state[name].copy_(states_of_ranks[0][name])

        num_ranks = dist.get_world_size()
        if len(states_of_ranks) == num_ranks:
            self.state["residual"].copy_(own["residual"])
        else:
            residuals = torch.stack([state["residual"] for state in states_of_ranks])
            self.state["residual"].copy_(residuals.sum(0) / num_ranks)

        return True

    def _rights(self) -> list[Tensor]:
        """Returns the Q of each matrix, of shape `(columns, narrow)`: views of the state."""
        parts = torch.split(self.state["right"], self._right_sizes)
        return [
            part.view(-1, num_columns)
            for part, num_columns in zip(parts, self._num_columns, strict=True)
        ]

    def _residuals(self) -> list[Tensor]:
        """Returns the residual of each matrix, of the matrix's shape: views of the state."""
        sizes = [matrix.numel() for matrix in self._matrices]
        parts = torch.split(self.state["residual"], sizes)
        return [part.view_as(matrix) for part, matrix in zip(parts, self._matrices, strict=True)]


def _orthonormal_bases(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns an orthonormal basis of the columns of each matrix.

    Matrices of one shape are given to torch together: on a GPU a decomposition of a small matrix
    takes little more time than its call. On the CPU the result is the same in every bit.
    """
    positions_of_shape: dict[torch.Size, list[int]] = {}
    for position, matrix in enumerate(matrices):
        positions_of_shape.setdefault(matrix.shape, []).append(position)

    bases = list(matrices)
    for positions in positions_of_shape.values():
        stacked = torch.stack([matrices[position] for position in positions])
        bases_of_shape = torch.linalg.qr(stacked).Q
        for position, basis in zip(positions, bases_of_shape, strict=True):
            bases[position] = basis
    return bases

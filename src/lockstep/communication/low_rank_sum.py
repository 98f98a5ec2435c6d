"""PowerSGD: the sum over all ranks of matrices, sent as two narrow matrices each, again and again.

A matrix M is approximated by P Q^T, with P (*left*) and Q (*right*) of few columns. A sum makes
one step of a power iteration, from the Q of the last sum: the ranks sum P = M Q, orthogonalise it,
and sum Q = M^T P. What P Q^T lacks of M, the *residual*, is added to M the next time. (Vogels et
al., arXiv 1905.13727, algorithms 1 and 2; error feedback: Karimireddy et al., arXiv 1901.09847.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.quantize import wide_dtype
from lockstep.communication.quantized_sum import State, do_nothing, have_same_shapes

# Matrices that the narrow ones would not make smaller by this factor are sent as they are.
MIN_REDUCTION = 2


class LowRankSum:
    """The sum over all ranks of several tensors.

    The method is linear: the sum depends on the sum of what the ranks give, not on who gives it, up
    to rounding. All ranks get the same bits if their processors are of one kind, as each multiplies
    the narrow matrices itself.

    Args:
        shapes: of the tensors. Their first axis is that of the rows of the matrices.
        like: a tensor whose device the sums have, and whose dtype if it has at least 32 bits.
        rank: number of columns of the narrow matrices.
        start: how often everything is sent as it is before narrow matrices are sent.
        seed: of the matrices Q that the power iteration begins with.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], like: Tensor, *, rank: int, start: int, seed: int = 0
    ) -> None:
        self._num_uncompressed_sums = start
        sizes = [shape.numel() for shape in shapes]
        self.values = torch.zeros(sum(sizes), dtype=wide_dtype(like.dtype), device=like.device)
        """What this rank gives, before `start`; the sum over all ranks, after `end`."""
        self._matrices: list[Tensor] = []
        """Views of `values` that are sent as narrow matrices."""
        self._num_columns: list[int] = []
        """For each matrix the number of columns of its narrow matrices."""
        self._sent_whole: list[Tensor] = []
        """Views of `values` that are sent as they are."""
        for shape, part in zip(shapes, torch.split(self.values, sizes), strict=True):
            num_rows = shape[0] if shape else 1
            matrix = part.view(num_rows, len(part) // max(num_rows, 1))  # there may be 0 rows
            num_columns = min(rank, *matrix.shape)
            narrow_numel = num_columns * sum(matrix.shape)  # the elements of P and Q
            if narrow_numel * MIN_REDUCTION < matrix.numel():
                self._matrices.append(matrix)
                self._num_columns.append(num_columns)
            else:
                self._sent_whole.append(part)
        self._right_sizes: list[int] = []
        """For each matrix the number of elements of its Q."""
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
        """What a checkpoint must hold of this rank: all Q, the residual, and the number of sums."""
        self._lefts: list[Tensor] = []
        """The P of each matrix: this rank's, then orthogonal and the same on all ranks."""
        self._sent: Tensor
        self._finish: Callable[[], None] = do_nothing

    @property
    def _sends_whole(self) -> bool:
        """True as long as everything is sent as it is."""
        return bool(self.state["times"] < self._num_uncompressed_sums)

    def start(self) -> None:
        """Adds the residual to `values`, and begins to send P = M Q of each matrix M.

        `advance` and `end` follow; those of other sums may come between them. All ranks call all of
        them in the same order.
        """
        if self._sends_whole:  # the first sums are sent without compression
            self._finish = routing.start_all_reduce(self.values)
            return
        # M += residual, and P = M Q. With `rows`, `columns` and `narrow` columns, M has the shape
        # (rows, columns), Q (columns, narrow) and P (rows, narrow). In one message with all P go
        # the tensors that are sent as they are.
        for matrix, residual in zip(self._matrices, self._residuals(), strict=True):
            matrix += residual
        self._lefts = []
        for matrix, right in zip(self._matrices, self._rights(), strict=True):
            self._lefts.append(matrix @ right)
        parts = [*self._lefts, *self._sent_whole]
        self._sent = torch.cat([part.view(-1) for part in parts])
        self._finish = routing.start_all_reduce(self._sent)

    def advance(self) -> None:
        """Waits for the sums of P, orthogonalises them, and sends Q = M^T P."""
        self._finish()
        if self._sends_whole:  # `values` is the sum already
            self._finish = do_nothing
            return
        # The message has the sum of each P, then those of the tensors that were sent as they are.
        sizes = [part.numel() for part in (*self._lefts, *self._sent_whole)]
        sums = torch.split(self._sent, sizes)
        num_matrices = len(self._matrices)
        for part, sum_of_part in zip(self._sent_whole, sums[num_matrices:], strict=True):
            part.copy_(sum_of_part)
        # P: an orthonormal basis of the columns of the sum.
        for index in range(num_matrices):
            sum_of_left = sums[index].view_as(self._lefts[index])
            self._lefts[index] = torch.linalg.qr(sum_of_left).Q
        # Q = M^T P, with this rank's M; written to the state, which has all Q in one tensor.
        for matrix, left, right in zip(self._matrices, self._lefts, self._rights(), strict=True):
            torch.mm(matrix.T, left, out=right)
        self._finish = routing.start_all_reduce(self.state["right"])

    def end(self) -> None:
        """Waits for the sums of Q, makes `values` the sum of all ranks, and keeps the residual."""
        self._finish()
        if not self._sends_whole:  # otherwise `values` is the sum already
            num_ranks = dist.get_world_size()
            rights = self._rights()  # summed over the ranks
            residuals = self._residuals()
            for index, matrix in enumerate(self._matrices):
                # The sum of M over the ranks is about S = P Q^T. Each rank is taken to have given
                # S / num_ranks, so its residual is M - S / num_ranks.
                sum_of_matrix = self._lefts[index] @ rights[index].T
                residual = residuals[index]
                torch.sub(matrix, sum_of_matrix, alpha=1.0 / num_ranks, out=residual)
                # A value that is not finite shows in the sum, and must not come back in every step.
                residual.nan_to_num_(0.0, 0.0, 0.0)
                matrix.copy_(sum_of_matrix)
            self.state["right"].nan_to_num_(0.0, 0.0, 0.0)
        self._finish = do_nothing
        self.state["times"] += 1

    def load(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads the states of the run that is resumed.

        If that had another number of ranks, the sum of their residuals is divided equally over the
        ranks of this run.

        Args:
            own: what `state` was on this rank.
            states_of_ranks: what `state` was on every rank of that run.

        Returns:
            False if the states are of other tensors; then nothing is loaded.
        """
        if not states_of_ranks or not have_same_shapes(states_of_ranks[0], self.state):
            return False
        # The matrices Q and the number of sums are the same on all ranks.
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
        """Returns the Q of each matrix, (matrix columns, narrow columns): views of the state."""
        parts = torch.split(self.state["right"], self._right_sizes)
        return [
            part.view(-1, num_columns)
            for part, num_columns in zip(parts, self._num_columns, strict=True)
        ]

    def _residuals(self) -> list[Tensor]:
        """Returns the residual of each matrix, in its shape: views of the state."""
        sizes = [matrix.numel() for matrix in self._matrices]
        parts = torch.split(self.state["residual"], sizes)
        return [part.view_as(matrix) for part, matrix in zip(parts, self._matrices, strict=True)]

"""The norm of a gradient, with the same bits however its rows are spread over processes.

Under FSDP each process has some rows of every gradient. The sum over a row is computed by one
process, the sums of all rows are brought together, and every process adds them up. Sums are
computed by halving: the second half of a vector is added to the first, and so on. That takes
elementwise additions only, whose order depends neither on the number of threads nor on the place of
a row in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.communication import routing


@torch.no_grad()
def norm_by_rows(parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """Returns the norm of all gradients, a plain tensor, equal in every bit on all processes.

    Args:
        parameters: those without gradient are left out.
        norm_type: as for `torch.nn.utils.get_total_norm`.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    values_of_gradients: list[Tensor] = []
    for gradient in gradients:
        values_of_gradients.append(_values_of_rows(gradient, norm_type))
    values = torch.cat(values_of_gradients)
    if math.isinf(norm_type):
        result = values.max() if norm_type > 0 else values.min()
    else:
        result = sum_by_halving(values.view(1, -1)).view(()).pow(1.0 / norm_type)
    return result.to(gradients[0].dtype)


def _values_of_rows(gradient: Tensor, norm_type: float) -> Tensor:
    """Returns what each row of a gradient adds to the norm, in float64, shape `(rows,)`.

    It is the sum of powers, or for an infinite norm the largest or smallest absolute value.
    """
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    # Of a vector every element is a row.
    rows = local.reshape(-1, 1) if local.dim() < 2 else local.flatten(start_dim=1)
    absolute = rows.abs()
    if absolute.numel() == 0:
        values = torch.zeros(len(absolute), dtype=torch.float64, device=local.device)
    elif norm_type == math.inf:
        values = absolute.amax(dim=1).double()
    elif norm_type == -math.inf:
        values = absolute.amin(dim=1).double()
    else:
        powers = absolute * absolute if norm_type == 2.0 else absolute.pow(norm_type)
        values = sum_by_halving(powers).double()
    if not isinstance(gradient, DTensor):
        return values
    return _gather_rows(values, gradient)


def _gather_rows(values: Tensor, gradient: DTensor) -> Tensor:
    """Returns the values of all rows of a gradient, of which this process has some.

    Args:
        values: of the rows on this process, shape `(rows on this process,)`.
        gradient: sharded over the last dimension of its mesh, by rows, in equal parts of which the
            last ones may be shorter.
    """
    mesh = gradient.device_mesh
    dimension = mesh.ndim - 1
    num_rows = gradient.shape[0]
    rows_of_process = -(-num_rows // mesh.size(dimension))  # rounded up
    begin = min(num_rows, rows_of_process * mesh.get_local_rank(dimension))
    # Every value is on one process and 0 on the others, so the sum changes none.
    values_of_all = values.new_zeros(num_rows)
    values_of_all[begin : begin + len(values)] = values
    routing.all_reduce(values_of_all, group=mesh.get_group(dimension))
    return values_of_all


def sum_by_halving(rows: Tensor) -> Tensor:
    """Returns the sum of each row, shape `(rows,)`, computed by elementwise additions.

    Args:
        rows: shape `(rows, columns)`.
    """
    num_columns = rows.shape[1]
    if num_columns == 0:
        return rows.new_zeros(rows.shape[0])
    while num_columns > 1:
        half = (num_columns + 1) // 2
        halved = rows[:, :half].clone()
        halved[:, : num_columns - half] += rows[:, half:]
        rows = halved
        num_columns = half
    return rows[:, 0]

"""Computes norms with the same bits, however the rows of a tensor are spread over processes.

Under FSDP each process has some *rows* of every tensor: slices along its first dimension. One
process computes the sum over a row; then the sums of all rows are exchanged, and every process adds
them up in the same order. Sums are computed by halving: the second half of a vector is added to the
first half, and so on. This takes only elementwise additions, whose order depends neither on the
number of threads nor on where a row is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.communication import routing


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of all elements of some tensors, equal in every bit on all processes.

    Args:
        tensors: whole ones, or DTensors sharded by rows.
        norm_type: as for `torch.nn.utils.get_total_norm`.

    Returns:
        A plain tensor of shape `()`, in the dtype of the first tensor.
    """
    if not tensors:
        return torch.tensor(0.0)

    # For each tensor the sum of |x| ** norm_type. For a norm of type inf or -inf, the largest or
    # smallest |x|.
    values = torch.stack(_values_of_tensors(tensors, norm_type))
    if norm_type == math.inf:
        norm = values.max()
    elif norm_type == -math.inf:
        norm = values.min()
    else:
        # `sum_by_halving` sums up each row of a matrix, so the values become its only row.
        total = sum_by_halving(values.view(1, -1))[0]
        norm = total.pow(1.0 / norm_type)
    return norm.to(tensors[0].dtype)


@torch.no_grad()
def norms_of_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the Euclidean norm of each tensor, shape `()`, equal in every bit on all processes.

    Args:
        tensors: whole ones, or DTensors sharded by rows.
    """
    norms = []
    for tensor, sum_of_squares in zip(tensors, _values_of_tensors(tensors, 2.0), strict=True):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        norms.append(sum_of_squares.sqrt().to(dtype))
    return norms


def _values_of_tensors(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Returns what each tensor adds to a norm, in float64, shape `()`.

    It is the sum of powers of its elements, or the largest or smallest absolute value for a norm of
    type inf or -inf.
    """
    values_of_tensors = []

    # For each tensor a vector, with the value of each of its rows.
    for values_of_rows in _values_of_all_rows(tensors, norm_type):
        if norm_type == math.inf:
            values_of_tensors.append(values_of_rows.max())
        elif norm_type == -math.inf:
            values_of_tensors.append(values_of_rows.min())
        else:
            # `sum_by_halving` sums up each row of a matrix, so the values become its only row.
            values_of_tensors.append(sum_by_halving(values_of_rows.view(1, -1))[0])
    return values_of_tensors


def _values_of_all_rows(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Returns what each row of each tensor adds to a norm: float64 tensors of shape `(rows,)`.

    The rows of a sharded tensor are on several processes. For all tensors that are sharded over the
    same processes, the values are exchanged in one all-reduce.
    """
    # The values of the rows on this process, for each tensor.
    values_of_tensors = []
    indices_by_mesh: dict[DeviceMesh, list[int]] = {}  # the tensors that are sharded over a mesh
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            indices_by_mesh.setdefault(tensor.device_mesh, []).append(index)
            values_of_tensors.append(_values_of_rows(tensor.to_local(), norm_type))
        else:
            values_of_tensors.append(_values_of_rows(tensor, norm_type))

    # For a sharded tensor, replace them by the values of all its rows.
    for mesh, indices in indices_by_mesh.items():
        values_here = [values_of_tensors[index] for index in indices]
        num_rows = [_num_rows(tensors[index]) for index in indices]
        values_of_all_rows = _exchange_over_mesh(values_here, num_rows, mesh)
        for index, values in zip(indices, values_of_all_rows, strict=True):
            values_of_tensors[index] = values
    return values_of_tensors


def _exchange_over_mesh(
    values_of_tensors: Sequence[Tensor], num_rows_of_tensors: Sequence[int], mesh: DeviceMesh
) -> list[Tensor]:
    """Returns the values of all rows of tensors that are sharded over a mesh.

    Args:
        values_of_tensors: for each tensor, the values of its rows on this process.
        num_rows_of_tensors: for each tensor, the number of its rows on all processes.
        mesh: the processes that the tensors are sharded over.
    """
    # Each process puts 0 in place of the rows of other processes, so the sum over the processes has
    # every value unchanged.
    values_among_zeros = []
    for values, num_rows in zip(values_of_tensors, num_rows_of_tensors, strict=True):
        values_among_zeros.append(_among_zeros(values, num_rows, mesh))

    # The backend of the mesh needs the values on its device; the parameters may be offloaded to the
    # CPU. The rows are sharded over the last dimension of the mesh.
    joined = torch.cat(values_among_zeros).to(mesh.device_type)
    routing.all_reduce(joined, group=mesh.get_group(mesh.ndim - 1))

    exchanged = torch.split(joined, list(num_rows_of_tensors))
    return [
        all_values.to(values.device)
        for all_values, values in zip(exchanged, values_of_tensors, strict=True)
    ]


def _values_of_rows(local: Tensor, norm_type: float) -> Tensor:
    """Returns what each row on this process adds to a norm: a float64 tensor of shape `(rows,)`.

    This is the sum of |x| ** norm_type, of which the caller takes the root once all rows are added
    up. For a norm of type inf or -inf it is the largest or smallest |x|.
    """
    # Shape (rows, elements of a row). In a vector, each element is a row of its own.
    rows = local.reshape(-1, 1) if local.dim() < 2 else local.flatten(start_dim=1)
    absolute = rows.abs()
    if absolute.numel() == 0:
        # Rows without elements: a sum of nothing is 0. `amax` and `amin` would raise an error.
        return torch.zeros(len(absolute), dtype=torch.float64, device=local.device)
    if norm_type == math.inf:
        return absolute.amax(dim=1).double()
    if norm_type == -math.inf:
        return absolute.amin(dim=1).double()

    # In half precision the squares of small numbers would underflow to 0.
    absolute = absolute.to(torch.promote_types(absolute.dtype, torch.float32))
    powers = absolute * absolute if norm_type == 2.0 else absolute.pow(norm_type)
    return sum_by_halving(powers).double()


def _num_rows(tensor: Tensor) -> int:
    """Returns the number of rows of a whole tensor."""
    return tensor.shape[0] if tensor.dim() > 0 else 1


def _among_zeros(values: Tensor, num_rows: int, mesh: DeviceMesh) -> Tensor:
    """Returns the values of this process's rows in their places, and zeros for all other rows.

    For 5 rows on 2 processes, process 1 has the last two: `[v3, v4]` -> `[0, 0, 0, v3, v4]`.

    Args:
        values: the value of each row on this process, shape `(rows on this process,)`.
        num_rows: number of rows of the whole tensor, which is sharded over the last dimension of
            the mesh in equal parts; the last ones may be shorter.
        mesh: the processes that the tensor is sharded over.
    """
    dimension = mesh.ndim - 1
    num_processes = mesh.size(dimension)
    process = mesh.get_local_rank(dimension)
    rows_per_process = (num_rows + num_processes - 1) // num_processes  # rounded up
    begin = min(num_rows, rows_per_process * process)  # a process behind the last row has none
    among_zeros = values.new_zeros(num_rows)
    among_zeros[begin : begin + len(values)] = values
    return among_zeros


def sum_by_halving(rows: Tensor) -> Tensor:
    """Returns the sum of each row, computed by elementwise additions in a fixed order.

    For a row `[a, b, c, d, e]` it adds `[a + d, b + e, c]`, then `[a + d + c, b + e]`, then both.

    Args:
        rows: a tensor of shape `(rows, columns)`.

    Returns:
        A tensor of shape `(rows,)`.
    """
    num_columns = rows.shape[1]
    if num_columns == 0:
        return rows.new_zeros(rows.shape[0])

    while num_columns > 1:
        # Add the second half to the first. If the number is odd, the second half is shorter, and
        # the last column of the first half stays as it is.
        half = (num_columns + 1) // 2
        halved = rows[:, :half].clone()
        halved[:, : num_columns - half] += rows[:, half:]
        rows = halved
        num_columns = half
    return rows[:, 0]

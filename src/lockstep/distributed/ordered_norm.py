"""Norms with the same bits, however the rows of a tensor are spread over processes.

Under FSDP each process has some *rows* of every tensor, the slices along its first dimension. The
sum over a row is computed by one process, the sums of all rows are brought together, and every
process adds them up. Sums are computed by halving: the second half of a vector is added to the
first, and so on. That takes elementwise additions only, whose order depends neither on the number
of threads nor on the place of a row in memory.
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
    values = torch.stack(_values_of_tensors(tensors, norm_type))
    if norm_type == math.inf:
        norm = values.max()
    elif norm_type == -math.inf:
        norm = values.min()
    else:
        norm = sum_by_halving(values.view(1, -1))[0].pow(1.0 / norm_type)
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
    for values_of_rows in _values_of_all_rows(tensors, norm_type):
        if norm_type == math.inf:
            values_of_tensors.append(values_of_rows.max())
        elif norm_type == -math.inf:
            values_of_tensors.append(values_of_rows.min())
        else:
            values_of_tensors.append(sum_by_halving(values_of_rows.view(1, -1))[0])
    return values_of_tensors


def _values_of_all_rows(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Returns, for each tensor, what each of its rows adds to a norm, in float64, shape `(rows,)`.

    The rows of a sharded tensor are on several processes. For all tensors that are sharded over the
    same processes there is one all-reduce of a number for each row.
    """
    # At first only the values of the rows that are on this process.
    values_of_rows = []
    places_by_mesh: dict[DeviceMesh, list[int]] = {}  # which tensors are sharded over a mesh
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            if tensor.device_mesh not in places_by_mesh:
                places_by_mesh[tensor.device_mesh] = []
            places_by_mesh[tensor.device_mesh].append(place)
            values_of_rows.append(_values_of_rows(tensor.to_local(), norm_type))
        else:
            values_of_rows.append(_values_of_rows(tensor, norm_type))
    # Then the values of all rows. Each process fills in 0 for the rows of the others, so the sum
    # over the processes has every value unchanged.
    for mesh, places in places_by_mesh.items():
        num_rows = [_num_rows(tensors[place]) for place in places]
        filled_up = []
        for place, rows in zip(places, num_rows, strict=True):
            filled_up.append(_among_zeros(values_of_rows[place], rows, mesh))
        joined = torch.cat(filled_up).to(mesh.device_type)
        routing.all_reduce(joined, group=mesh.get_group(mesh.ndim - 1))
        for place, values in zip(places, torch.split(joined, num_rows), strict=True):
            values_of_rows[place] = values.to(values_of_rows[place].device)
    return values_of_rows


def _values_of_rows(local: Tensor, norm_type: float) -> Tensor:
    """Returns what each row on this process adds to a norm, in float64, shape `(rows,)`."""
    # Of a vector every element is a row.
    rows = local.reshape(-1, 1) if local.dim() < 2 else local.flatten(start_dim=1)
    absolute = rows.abs()
    if absolute.numel() == 0:
        return torch.zeros(len(absolute), dtype=torch.float64, device=local.device)
    if norm_type == math.inf:
        return absolute.amax(dim=1).double()
    if norm_type == -math.inf:
        return absolute.amin(dim=1).double()
    # In half precision the squares of small numbers would vanish.
    absolute = absolute.to(torch.promote_types(absolute.dtype, torch.float32))
    powers = absolute * absolute if norm_type == 2.0 else absolute.pow(norm_type)
    return sum_by_halving(powers).double()


def _num_rows(tensor: Tensor) -> int:
    """Returns the number of rows of a whole tensor."""
    return tensor.shape[0] if tensor.dim() > 0 else 1


def _among_zeros(values: Tensor, num_rows: int, mesh: DeviceMesh) -> Tensor:
    """Returns the values of this process's rows in their places, and zeros for all other rows.

    Args:
        values: of the rows on this process, shape `(rows on this process,)`.
        num_rows: of the whole tensor, which is sharded over the last dimension of the mesh in equal
            parts; the last ones may be shorter.
        mesh: of the processes.
    """
    dimension = mesh.ndim - 1
    num_processes = mesh.size(dimension)
    rows_of_process = (num_rows + num_processes - 1) // num_processes  # rounded up
    begin = min(num_rows, rows_of_process * mesh.get_local_rank(dimension))
    among_zeros = values.new_zeros(num_rows)
    among_zeros[begin : begin + len(values)] = values
    return among_zeros


def sum_by_halving(rows: Tensor) -> Tensor:
    """Returns the sum of each row, shape `(rows,)`, computed by elementwise additions.

    Args:
        rows: shape `(rows, columns)`.
    """
    num_columns = rows.shape[1]
    if num_columns == 0:
        return rows.new_zeros(rows.shape[0])
    while num_columns > 1:
        # The second half is added to the first. If the number is odd, the second half is shorter,
        # and the last column of the first one stays as it is.
        half = (num_columns + 1) // 2
        halved = rows[:, :half].clone()
        halved[:, : num_columns - half] += rows[:, half:]
        rows = halved
        num_columns = half
    return rows[:, 0]

"""What a record holds of a tensor: a summary, a summary of each row, a digest, or a copy.

A *summary* is two numbers that change with any value of a tensor. It stands for tensors that would
be too large to record. A *row summary* is the same for each sample of a batch, so that samples can
be compared one by one. A *digest* is a hash of all bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.distributed.torch_compat import is_sharded, to_local
from lockstep.verify.tolerance import Array


def summarize(tensor: Tensor) -> Array:
    """Returns a weighted sum of the values and the largest absolute value.

    The weights are cosines of the positions: the sum also changes when two values are swapped. The
    result has the shape (2,); NaN counts as 0.
    """
    values = tensor.detach().flatten().double().nan_to_num()
    positions = torch.arange(len(values), device=values.device, dtype=torch.float64)
    weighted_sum = float(values @ positions.cos())
    largest = float(values.abs().max()) if len(values) else 0.0
    return np.array([weighted_sum, largest])


def summarize_rows(values: Sequence[Tensor], count: int) -> Array:
    """Returns two weighted sums for each sample, over its rows of all tensors.

    Args:
        values: tensors with one row for each sample, or a fixed number of rows for each, in order.
        count: number of samples.

    Returns:
        An array of shape (count, 2), or (0, 2) if there is nothing to sum.
    """
    tables = []  # of each tensor, its values in the shape (count, values of a sample)
    for tensor in values:
        if tensor.numel():
            tables.append(tensor.detach().reshape(count, -1).double().nan_to_num())

    if not tables or count == 0:
        return np.zeros((0, 2))

    rows = torch.cat(tables, dim=1)
    # sums[sample, k] = sum over positions p of rows[sample, p] * weights[p, k]. Two sums with
    # different weights are hardly ever both the same by chance.
    positions = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype)
    first_weights = positions.cos()
    second_weights = (1.7 * positions + 1).cos()
    weights = torch.stack([first_weights, second_weights], dim=1)

    return (rows @ weights).cpu().numpy()


def sample_tensors(values: object) -> tuple[int, list[Tensor]]:
    """Finds the tensors of a nest of values that have one row for each sample.

    Returns:
        The number of samples, which is the number of rows of the first tensor, and the tensors.
    """
    # Sparse tensors and single numbers have no rows.
    candidates = [t for t in tensors(values) if t.layout == torch.strided and t.dim() > 0]
    if not candidates:
        return 0, []
    count = len(candidates[0])
    return count, tensors_with_rows(candidates, count)


def tensors_with_rows(values: Sequence[Tensor], count: int) -> list[Tensor]:
    """Returns the real tensors that have `count` rows in their first dimension.

    A hidden state of a recurrent layer has its samples in the second dimension. So the first two
    dimensions of a tensor with another number of rows are swapped before it is looked at.
    """
    with_rows = []
    for tensor in values:
        if tensor.dim() > 1 and len(tensor) != count:
            tensor = tensor.transpose(0, 1)
        if tensor.dim() > 0 and len(tensor) == count and not tensor.is_complex():
            with_rows.append(tensor)
    return with_rows


def storage_of(tensor: Tensor) -> int:
    """Returns the address of the tensor's values; 0 if there is no single one."""
    if is_sharded(tensor):
        return 0
    # A tensor subclass without a storage, or a tensor without a size yet, raises here.
    with suppress(RuntimeError, ValueError):
        return tensor.untyped_storage().data_ptr()
    return 0


def digest(tensor: Tensor) -> str:
    """Returns a hash of all values of a dense tensor, bit for bit.

    Of a sharded tensor, only this rank's values count. The values are copied first: memory that
    numpy looks at cannot be freed, and FSDP frees what it has gathered.
    """
    copy = to_local(tensor).cpu().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(copy.numpy().data, digest_size=8).hexdigest()


def copy_arrays(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Array]:
    """Copies tensors to numpy arrays, floating-point ones as float64.

    A sharded tensor is gathered, so all ranks must call this together. The values are copied in any
    case: memory that numpy looks at cannot be freed, and FSDP frees what it has gathered.

    Args:
        named: pairs of a name and a tensor. None, such as a missing gradient, is left out.

    Returns:
        The arrays by name.
    """
    arrays = {}
    for name, tensor in named:
        if tensor is None:
            continue

        whole = tensor.detach()
        if is_sharded(whole):
            whole = whole.full_tensor()  # type: ignore[attr-defined]

        if whole.is_sparse:
            whole = whole.to_dense()

        whole = whole.cpu()
        if whole.is_floating_point():
            whole = whole.double()

        arrays[name] = whole.clone(memory_format=torch.contiguous_format).numpy()

    return arrays

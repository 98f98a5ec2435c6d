"""Makes tensors equal on several ranks, by taking them from the first rank or by adding them up.

Strategies use these functions for parameters and gradients that DDP and FSDP do not average.
Tensors are sent in *buckets* of about 25 MiB, because many small messages take longer than a few
large ones. A *group* of ranks is a process group of torch, or None for all ranks. Every function is
collective: all ranks of the group call it with the same number of tensors, of the same shapes and
dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.routing import carrier_device
from lockstep.distributed import tensor_bytes
from lockstep.errors import UsageError

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
BUCKET_BYTES = 25 * 2**20
"""The maximum size of a message, unless a single tensor is larger."""


def broadcast_from_first_rank(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Overwrites tensors with the values that they have on the first rank of a group.

    They are sent as bytes, because no backend supports all dtypes.

    Args:
        tensors: tensors on devices that the backend of the group supports.
        group: the ranks to make equal; None for all ranks.

    Raises:
        UsageError: a tensor is sparse.
    """
    sent: list[Tensor] = []
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(
                "world.prepare of a model that holds a sparse tensor",
                f"a buffer or parameter of shape {tuple(tensor.shape)} has the layout "
                f"{tensor.layout}, and only dense ones are made equal on all ranks",
                "register its indices and its values as buffers, or keep it as a plain attribute",
            )

        # An expanded tensor has one number in the place of many, and cannot be written to. It gets
        # memory of its own for each number.
        if _is_expanded(tensor):
            tensor.data = tensor.data.contiguous()

        if tensor.numel():
            sent.append(tensor.detach())

    for bucket in make_buckets(sent, attrgetter("device")):
        _take_bucket_from_first(bucket, group)


def _take_bucket_from_first(bucket: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrites the tensors of a bucket with the values of the first rank, in one message."""
    tensors_as_bytes = [tensor_bytes.to_bytes(tensor) for tensor in bucket]
    if len(bucket) == 1:
        message = tensors_as_bytes[0]  # for a contiguous tensor, a view of it
    else:
        message = torch.cat(tensors_as_bytes)
    routing.broadcast(message, group=group)
    received = torch.split(message, [len(as_bytes) for as_bytes in tensors_as_bytes])

    for tensor, as_bytes in zip(bucket, received, strict=True):
        # If the message is a view of the tensor, the broadcast has written to the tensor itself.
        was_received_in_place = as_bytes.data_ptr() == tensor.data_ptr()
        if was_received_in_place:
            continue

        # The bytes of a tensor may begin anywhere in the message, for example at byte 3. To be
        # viewed as fp32, they must begin at a multiple of 4, so they are cloned.
        tensor.copy_(tensor_bytes.from_bytes(as_bytes.clone(), tensor.dtype, tensor.shape))


def _is_expanded(tensor: Tensor) -> bool:
    """Returns True if elements share memory, as after `expand`, so that torch refuses to write."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size > 1:
            return True
    return False


@torch.no_grad()
def start_sum(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Starts replacing tensors by their sums over the ranks of a group.

    Args:
        tensors: dense tensors.
        group: the ranks to add up; None for all ranks.

    Returns:
        A function that waits for the sums and writes them into the tensors. If several sums have
        been started, all ranks must call these functions in the same order.
    """
    sent: list[tuple[list[Tensor], Tensor, Callable[[], None]]] = []
    for bucket in make_buckets(tensors, attrgetter("device", "dtype")):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])

        # The backend of the group may only send from the CPU.
        message = flat.to(carrier_device(flat.device, group))
        sent.append((bucket, message, routing.start_all_reduce(message, group)))

    @torch.no_grad()
    def finish() -> None:
        """Waits for the sums, and writes them into the tensors."""
        for bucket, message, wait in sent:
            wait()
            sums = message.to(bucket[0].device)
            sizes = [tensor.numel() for tensor in bucket]
            for tensor, sum_of_tensor in zip(bucket, torch.split(sums, sizes), strict=True):
                tensor.copy_(sum_of_tensor.view_as(tensor))

    return finish


def _extreme_over_ranks(
    local_norm: Tensor, norm_type: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Returns the largest norm of any rank for the norm type inf, and the smallest for -inf.

    The result is NaN if the norm of any rank is NaN.
    """
    # The smallest norm is found as the maximum of the negated norms.
    sign = 1.0 if norm_type > 0 else -1.0
    signed_norm = sign * local_norm

    # On some devices the maximum of NaN and a number is the number. So two maxima are computed: of
    # the norms with NaN replaced by 0, and of a number that is 1 on ranks with NaN.
    is_nan = signed_norm.isnan()
    without_nan = torch.where(is_nan, 0.0, signed_norm)
    maxima = torch.stack([without_nan, is_nan.double()])
    routing.all_reduce(maxima, dist.ReduceOp.MAX, group)

    largest, any_is_nan = maxima
    return torch.where(any_is_nan != 0, math.nan, sign * largest)


def norm_over_ranks(
    local_tensors: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    copies: int = 1,
) -> Tensor:
    """Returns the norm of all tensors that the ranks of a group hold together.

    It takes one all-reduce, in float64, so that the powers of large norms do not overflow.

    Args:
        local_tensors: the tensors of this rank, possibly none.
        norm_type: the type of the norm, as for `torch.nn.utils.get_total_norm`; not 0.
        device: the device of the result, supported by the backend of the group.
        group: the ranks that hold the tensors; None for all ranks.
        copies: the number of ranks that hold the same tensors.

    Returns:
        A tensor without dimensions, in the widest dtype of `local_tensors`.
    """
    result_dtype = _widest_dtype(local_tensors)
    device_of_messages = carrier_device(device, group)
    local_norm = _local_norm(local_tensors, norm_type, device_of_messages)
    local_norm = local_norm.double().to(device_of_messages)

    # The largest or smallest norm. It is the same however many ranks hold it.
    if math.isinf(norm_type):
        return _extreme_over_ranks(local_norm, norm_type, group).to(device, result_dtype)

    # For example sqrt(a ** 2 + b ** 2), from the norms a and b of two ranks. The sum has each power
    # `copies` times.
    sum_of_powers = local_norm.pow(norm_type)
    routing.all_reduce(sum_of_powers, group=group)
    norm = sum_of_powers.div(copies).pow(1.0 / norm_type)
    return norm.to(device, result_dtype)


def _widest_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Returns a dtype to which those of all tensors can be converted; float32 without tensors."""
    if not tensors:
        return torch.float32
    widest = tensors[0].dtype
    for tensor in tensors:
        widest = torch.promote_types(widest, tensor.dtype)
    return widest


def _local_norm(local_tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Returns the norm of this rank's tensors, or a neutral value if they have no elements.

    The neutral value does not change the norm over all ranks. It is 0 for a positive norm type, and
    infinity for a negative one, whose powers (inf ** -2) are 0.

    Args:
        local_tensors: the tensors of this rank, possibly none.
        norm_type: the type of the norm.
        device: the device of the neutral value.
    """
    # Torch raises an error for the largest element of an empty tensor, so these are left out.
    filled = [tensor for tensor in local_tensors if tensor.numel()]
    if filled:
        return torch.nn.utils.get_total_norm(filled, norm_type)
    neutral = 0.0 if norm_type > 0 else math.inf
    # Unlike `torch.tensor(neutral, device=device)`, this does not wait for a GPU.
    return torch.full((), neutral, device=device)


def make_buckets(
    tensors: Sequence[AnyTensor], key: Callable[[AnyTensor], Any]
) -> Iterator[list[AnyTensor]]:
    """Yields lists of consecutive tensors that are sent in one message.

    Args:
        tensors: any tensors.
        key: a function of a tensor, for example its dtype. Tensors with different keys are put into
            different buckets.
    """
    bucket: list[AnyTensor] = []
    bucket_bytes = 0
    for tensor in tensors:
        is_full = bucket_bytes + tensor.nbytes > BUCKET_BYTES
        if bucket and (is_full or key(tensor) != key(bucket[0])):
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append(tensor)
        bucket_bytes += tensor.nbytes

    if bucket:
        yield bucket

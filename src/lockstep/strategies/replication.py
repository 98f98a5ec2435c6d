"""Tensors made equal on ranks: taken from the first one, or averaged.

Parameters are taken from the first rank once, buffers that move after each step. The statistics of
a SyncBatchNorm are equal on all ranks by construction, and most other buffers (masks, tables) never
change; sending them would be waste. What moves is found by looking, in the first steps and now and
then, with one small all-reduce so that all ranks agree.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.communication import routing
from lockstep.distributed import collectives
from lockstep.distributed.process_group import carrier_device
from lockstep.distributed.torch_compat import BatchNorm
from lockstep.errors import UsageError, warn
from lockstep.session.step import Step, check_due
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.wording import join_first

_BUCKET_BYTES = 25 * 2**20
"""That are sent at a time."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**17
"""Numbers summed at a time on the CPU, where torch first makes 64-bit ones of all of them."""


def take_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Gives tensors the first rank's values, as bytes: no backend knows all dtypes.

    Args:
        tensors: equal in number, shape and dtype on all ranks; on devices of the backend.
        group: None: all ranks.

    Raises:
        UsageError: one of them is sparse.
    """
    filled = []
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(
                "world.prepare of a model that holds a sparse tensor",
                f"a buffer or parameter of shape {tuple(tensor.shape)} has the layout "
                f"{tensor.layout}, and only dense ones are made equal on all ranks",
                "register its indices and its values as buffers, or keep it as a plain attribute",
            )
        if any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = tensor.data.contiguous()  # an expanded one has no memory to write to
        if tensor.numel():
            filled.append(tensor.detach())
    for bucket in _buckets(filled, attrgetter("device")):
        data = [collectives.to_bytes(tensor) for tensor in bucket]
        flat = torch.cat(data) if len(data) > 1 else data[0]
        routing.broadcast(flat, group=group)
        parts = torch.split(flat, [len(each) for each in data])
        for tensor, came in zip(bucket, parts, strict=True):
            if came.data_ptr() != tensor.data_ptr():  # its own memory has come already
                # A copy of its own is aligned, as its dtype must be.
                tensor.copy_(collectives.from_bytes(came.clone(), tensor.dtype, tensor.shape))


@torch.no_grad()
def start_sum(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Begins to replace tensors by their sums over the ranks of a group.

    Args:
        tensors: dense; equal in number, shape and dtype on all ranks.
        group: None: all ranks.

    Returns:
        What waits for the sums and writes them; called on all ranks in one order.
    """
    sent = []
    for bucket in _buckets(tensors, attrgetter("device", "dtype")):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        carried = flat.to(carrier_device(flat.device, group))
        sent.append((bucket, carried, routing.start_all_reduce(carried, group)))

    @torch.no_grad()
    def end() -> None:
        for bucket, carried, wait in sent:
            wait()
            parts = torch.split(carried.to(bucket[0].device), [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    return end


@torch.no_grad()
def average_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
) -> None:
    """Replaces every gradient by its mean over the ranks of a group, where no wrapper does.

    A gradient that a rank has not got counts as zero where another has it, and stays away where
    nobody has it. Communication: one byte a parameter, then one all-reduce a bucket of 25 MiB.

    Args:
        parameters: the same on all ranks, in the same order.
        group: the ranks; None: all of them.

    Raises:
        UsageError: a gradient is sparse.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
    routing.all_reduce(has, dist.ReduceOp.MAX, group)
    for parameter, somewhere in zip(trained, has.tolist(), strict=True):
        if somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in trained if p.grad is not None]
    if any(gradient.layout != torch.strided for gradient in gradients):
        raise UsageError(
            "an average of sparse gradients over pipelines, or over the ranks of a replica",
            "a layer was built with sparse=True",
            "leave sparse=True out, or use one pipeline, or no more ranks than replicas",
        )
    start_sum(gradients, group)()
    for gradient in gradients:
        gradient.div_(dist.get_world_size(group))


def norm_over_ranks(
    own: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    copies: int = 1,
) -> Tensor:
    """The norm of what the ranks of a group hold together: one all-reduce of a number or two.

    Args:
        own: what this rank holds of it; nothing, on some ranks.
        norm_type: of `torch.nn.utils.get_total_norm`.
        device: of the result, and of the backend.
        group: None: all ranks.
        copies: so many ranks hold the same.

    Returns:
        Taken in float64, where powers of large norms are still numbers; in the dtype of `own`.
    """
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in own} or {torch.float32})
    held = [tensor for tensor in own if tensor.numel()]  # nothing has no largest element
    norm = torch.tensor(math.inf if norm_type < 0 else 0.0)
    if held:
        norm = torch.nn.utils.get_total_norm(held, norm_type)
    norm = norm.double().to(carrier_device(device, group))
    if math.isinf(norm_type):
        sign = math.copysign(1.0, norm_type)
        # The largest of NaN and a number is either, by device and order.
        number = (sign * norm).nan_to_num(posinf=math.inf, neginf=-math.inf)
        both = torch.stack([number, norm.isnan().double()])
        routing.all_reduce(both, dist.ReduceOp.MAX, group)
        return torch.where(both[1] == 0, sign * both[0], math.nan).to(device, dtype)
    power = norm.pow(norm_type)
    routing.all_reduce(power, group=group)
    return power.div(copies).pow(1.0 / norm_type).to(device, dtype)


def _buckets(tensors: Sequence[Tensor], alike: Callable[[Tensor], Any]) -> Iterator[list[Tensor]]:
    """Tensors that follow each other and are alike, in lists that are sent at a time."""
    for _, group in itertools.groupby(tensors, alike):
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


class MovingBuffers:
    """Keeps the buffers of a module equal on all ranks, or on those of a group.

    Buffers that differ after a forward pass, such as running statistics of each rank's samples, are
    taken from the first rank, which is said once; or averaged, where the user has named them.
    Buffers that are on other ranks, and here on the meta device, are left out.

    Args:
        module: whose buffers are followed.
        step: of the run.
        group: None: all ranks.
        average: patterns of the names of floating-point buffers that are averaged.
        strategy: the name of the class whose option `average_buffers` can be advised; None: none.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        group: dist.ProcessGroup | None = None,
        *,
        average: str | Sequence[str] = (),
        strategy: str | None = None,
    ) -> None:
        self._module = module
        self._step = step
        self._group = group
        self._strategy = strategy
        self._warned = False
        synchronised = {
            id(buffer)
            for child in module.modules()
            if isinstance(child, SyncBatchNorm)
            for buffer in child.buffers(recurse=False)
        }
        # The block of choices says it of BatchNorm with sync_batchnorm=False.
        self._known_to_differ = {
            id(buffer)
            for child in module.modules()
            if isinstance(child, BatchNorm)
            for buffer in child.buffers(recurse=False)
        }
        here = {
            name: buffer
            for name, buffer in module.named_buffers()
            if buffer.numel() and not buffer.is_meta and id(buffer) not in synchronised
        }
        patterns = [average] if isinstance(average, str) else average
        self._averaged = [
            name
            for name, buffer in here.items()
            if buffer.is_floating_point() and any(fnmatchcase(name, p) for p in patterns)
        ]
        self._watched = [name for name in here if name not in self._averaged]
        self._before = self._bits()
        self.moving: list[str] = []

    def follow(self) -> None:
        """After an optimizer step: makes what moves equal on all ranks."""
        if self._averaged:
            self._average()
        if self._watched and check_due(self._step.number):
            self._look()
        if self.moving:
            now = dict(self._module.named_buffers())
            take_from_first((now[name] for name in self.moving), self._group)

    def _look(self) -> None:
        """Finds out which buffers move, on any rank, and which of them differ between ranks."""
        # Their bits are compared: torch does not count what its BatchNorm writes as a change.
        bits = self._bits()
        changed = (bits != self._before).to(torch.int64)
        extremes = torch.stack([changed, bits, -bits])
        present = self._step.micro_batch
        if present.global_samples and not present.local_rows:
            # A rank without samples computes a placeholder, which leaves its buffers as they were.
            extremes[1:] = torch.iinfo(torch.int64).min
        routing.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        moved, largest, smallest = extremes.tolist()
        now = dict(self._module.named_buffers())
        differ: list[str] = []
        moving: list[str] = []
        for place, name in enumerate(self._watched):
            if moved[place] or name in self.moving:
                moving.append(name)
            equal = largest[place] == -smallest[place]
            if not equal and id(now[name]) not in self._known_to_differ:
                differ.append(name)
        self.moving = moving
        if differ and not self._warned:
            self._warned = True
            self._warn(differ)

    def _warn(self, names: Sequence[str]) -> None:
        advice = "compute them from the global batch: world.sum of sums and counts, in forward"
        if self._strategy is not None:
            advice += (
                "; running means over samples can be averaged after each step instead: "
                f"{self._strategy}(average_buffers={list(names[:1])!r})"
            )
        warn(
            "buffers that change in the forward pass",
            f"the values of {join_first(names)} differ between ranks, as each rank changes its "
            "own; after each step all ranks take those of rank 0, and what others have seen is "
            "lost",
            f"{advice}; do nothing where rank 0's are good enough",
        )

    @torch.no_grad()
    def _average(self) -> None:
        """Replaces buffers by their mean over the ranks, weighted by the samples of each."""
        present = self._step.micro_batch
        by_samples = present.global_samples > 0 and present.num_micro_batches == 1
        weight = float(present.local_rows) if by_samples else 1.0
        now = dict(self._module.named_buffers())
        buffers = [now[name] for name in self._averaged]
        sums: list[Tensor] = []
        totals: list[Tensor] = []
        for buffer in buffers:
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            # Without samples a rank may have got NaN.
            own = buffer.to(dtype) if weight else torch.zeros_like(buffer, dtype=dtype)
            sums.append(own * weight)
            totals.append(torch.full((), weight, dtype=dtype, device=buffer.device))
        start_sum([*sums, *totals], self._group)()
        for buffer, total, count in zip(buffers, sums, totals, strict=True):
            buffer.copy_(total / count)

    def _bits(self) -> Tensor:
        now = dict(self._module.named_buffers())
        return fingerprint([now[name] for name in self._watched])


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """One 64-bit sum of the bits of each tensor, shape `(number of tensors,)`."""
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        bits = real.contiguous().view(_INTEGERS[real.element_size()])
        if bits.is_cuda or bits.numel() <= _CHUNK:
            sums.append(bits.sum(dtype=torch.int64))
        else:
            parts = [part.sum(dtype=torch.int64) for part in torch.split(bits.view(-1), _CHUNK)]
            sums.append(torch.stack(parts).sum())
    return torch.stack([part.to(sums[0].device) for part in sums]) if sums else torch.empty(0)

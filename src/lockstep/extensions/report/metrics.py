"""Means over all samples of all ranks, kept while training without ever waiting for a device.

Communication pattern: every `every` global batches each rank starts one asynchronous all-reduce of
a fixed number of float64 values (the sums so far, 536 bytes) and reads the result whenever it has
come; a final one at the end of the pass is waited for. When to start is a count of global batches,
so all ranks start the same collectives at the same places between those of training. The size does
not depend on what a rank logged: ranks that log different things are found, instead of hanging.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.collectives import Collectives
from lockstep.errors import RanksDifferError, UsageError

_MAX_NAMES = 32
_HEADER = 4  # ranks that log, the code of their names, its square, samples


@dataclass(slots=True)
class _Sum:
    total: Tensor
    """Weighted sum of the values: float64, 0-dimensional, on the device."""
    weight: float = 0.0


class RunningMeans:
    """The means of one pass over the data.

    Args:
        collectives: of the run; on one process the reduction is the identity.
        every: global batches between two reductions; 0: only the final one.
    """

    def __init__(self, collectives: Collectives, every: int = 10) -> None:
        self.values: dict[str, float] = {}
        """Weighted mean over ranks by name, by the last reduction that has been read; names that
        no weight has been given are left out."""
        self.total_samples = 0
        """Samples over all ranks, likewise."""
        self.samples = 0
        """This rank's samples so far; kept up to date by whoever delivers them."""
        self._alone = collectives.alone
        # Sums are kept there: tensors that are there already cost one kernel each.
        self._device = collectives.device
        self._on_cuda = collectives.device.type == "cuda"
        self._every = every
        self._counts = collectives.contributes
        self._sums: dict[str, _Sum] = {}
        self._steps = 0
        self._pending: deque[_Reduction] = deque()
        self._stream: torch.cuda.Stream | None = None

    def add(self, weight: float, /, **values: float | Tensor) -> None:
        """Adds one micro-batch's means.

        Args:
            weight: what the values are weighted by: samples, tokens. Values of weight 0 count for
                nothing, also where they are NaN, as the mean of an empty share is.
            values: one number each, 0-dimensional or with a single element; they are detached, and
                not waited for.

        Raises:
            UsageError: a value is not one real number, or there are more than 32 names.
        """
        for name, value in values.items():
            entry = self._sums.get(name) or self._open(name)
            number = self._one_number(name, value)
            if weight and self._counts:
                entry.total.add_(number, alpha=weight)
                entry.weight += weight

    def step(self) -> None:
        """One global batch is done: starts a reduction when it is time, reads those that came.

        Raises:
            RanksDifferError: the ranks did not log the same names.
        """
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            self.start_reduce()
        if self._pending:
            self._read(wait=False)

    def start_reduce(self) -> None:
        """Starts one reduction of everything up to here; all ranks must call it alike."""
        names = sorted(self._sums)
        packed = self._pack(names)
        if self._on_cuda:
            self._pending.append(self._start_on_cuda(names, packed))
        elif self._alone:
            self._pending.append(_Reduction(names, packed))
        else:
            work = dist.all_reduce(packed, async_op=True)
            self._pending.append(_Reduction(names, packed, work.is_completed, work.wait))

    def finish(self) -> None:
        """Makes the means of everything that was added exact; all ranks must call it.

        Raises:
            RanksDifferError: the ranks did not log the same names.
        """
        self.start_reduce()
        self._read(wait=True)

    def _open(self, name: str) -> _Sum:
        if len(self._sums) == _MAX_NAMES:
            raise UsageError(
                f"world.log({name}=...) as name number {_MAX_NAMES + 1} of one pass",
                f"at most {_MAX_NAMES} means are kept",
                "log fewer names, or log a mean of several of them",
            )
        # Sums that are first needed under inference_mode() must be usable outside of it as well.
        with torch.inference_mode(False):
            total = torch.zeros((), dtype=torch.float64, device=self._device)
        return self._sums.setdefault(name, _Sum(total))

    def _one_number(self, name: str, value: Any) -> float | Tensor:
        if isinstance(value, int | float):
            return value
        found = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_complex():
                number = value.detach().reshape(())
                return number.to(self._device, non_blocking=self._on_cuda)
            found = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        raise UsageError(
            f"world.log({name}=...)",
            f"{found}, not one number",
            f"log the mean over this micro-batch, for example {name}=values.float().mean()",
        )

    def _pack(self, names: list[str]) -> Tensor:
        """Everything in one float64 tensor of shape `(4 + 2 * 32,)`: header, weights, totals."""
        # A rank that had no samples may have logged nothing, and is not one that differs.
        takes_part = bool(names) or self.samples > 0
        # Up to 2 ** 16, so that sums of squares over a thousand ranks are exact in float64.
        code = (zlib.crc32("\0".join(names).encode()) & 0xFFFF) + 1 if takes_part else 0
        sums = [self._sums[name] for name in names]
        samples = self.samples if self._counts else 0
        host = [takes_part, code, code * code, samples, *(each.weight for each in sums)]
        host += [0.0] * (_HEADER + 2 * _MAX_NAMES - len(host))
        packed = torch.tensor(host, dtype=torch.float64, pin_memory=self._on_cuda)
        packed = packed.to(self._device, non_blocking=True)
        if sums:
            start = _HEADER + _MAX_NAMES
            packed[start : start + len(sums)] = torch.stack([each.total for each in sums])
        return packed

    def _start_on_cuda(self, names: list[str], packed: Tensor) -> _Reduction:
        """Reduces and copies on a stream of its own: the next step's kernels do not wait."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if not self._alone:
                dist.all_reduce(packed, async_op=True).wait()  # the stream waits, not the CPU
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # A pass that is broken off forgets what is under way; the memory must not be reused before.
        packed.record_stream(self._stream)
        return _Reduction(names, host, event.query, event.synchronize)

    def _read(self, *, wait: bool) -> None:
        """Reads the reductions that have come, or all of them."""
        while self._pending and (wait or self._pending[0].ready()):
            reduction = self._pending.popleft()
            reduction.wait()
            numbers = reduction.host.tolist()
            ranks, code, squares, samples = numbers[:_HEADER]
            # Equal on all ranks that take part if and only if this holds (Cauchy and Schwarz).
            if ranks * squares != code * code:
                raise RanksDifferError(
                    "world.log, whose values are averaged over all ranks",
                    f"this rank logged {', '.join(reduction.names) or 'nothing'} and some other "
                    "rank logged other names",
                    "log the same names on every rank (only rank 0 shows them); for a line from "
                    "rank 0 alone use world.print",
                )
            weights = numbers[_HEADER : _HEADER + _MAX_NAMES]
            totals = numbers[_HEADER + _MAX_NAMES :]
            found = zip(reduction.names, weights, totals, strict=False)
            self.values = {name: total / weight for name, weight, total in found if weight != 0}
            self.total_samples = int(samples)


class _Reduction(NamedTuple):
    """One that is under way."""

    names: list[str]
    host: Tensor
    """Where the result will be."""
    ready: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None
    """It raises what went wrong."""

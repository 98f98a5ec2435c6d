"""Means over all samples of all ranks, computed during training without waiting for a device.

Every rank keeps weighted *sums* of the values that it logs. A *reduction* adds them up over the
ranks: after a fixed number of global batches each rank starts an asynchronous all-reduce, and reads
the result when it has arrived. Only the last one, at the end of the pass, is waited for.

The number of global batches decides when a reduction starts, so all ranks start the same
collectives at the same places between those of training. Its size is always the same, 68 float64
values, whatever a rank logged: ranks that log different names are found, and do not hang.

The means of one rank alone are kept in the same way, without the all-reduce (`over_ranks=False`).
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
from lockstep.distributed.streams import side_stream
from lockstep.errors import warn
from lockstep.wording import describe_type

MAX_NAMES = 32
# The tensor that a reduction sums up over the ranks: a header, then the weights of up to 32 names,
# then the weighted sums of their values. The header is the number of ranks that log, a hash of
# their names, the square of the hash, and the number of samples.
HEADER_SIZE = 4
PACKED_SIZE = HEADER_SIZE + 2 * MAX_NAMES


@dataclass(slots=True)
class _Sum:
    """The weighted sum of the values of one name."""

    total: Tensor
    """A 0-dimensional float64 tensor on the device, where adding a tensor costs one kernel."""
    weight: float = 0.0


class RunningMeans:
    """The means of one pass over the data.

    Args:
        collectives: the collectives of the run; on one process a reduction is the identity.
        every: how many global batches lie between two reductions; 0 for only the last one.
        over_ranks: False for the means of this rank alone: then a reduction communicates nothing.
    """

    def __init__(
        self, collectives: Collectives, every: int = 10, *, over_ranks: bool = True
    ) -> None:
        self.values: dict[str, float] = {}
        """The weighted means over all ranks, by name, as the last reduction gave them. Names whose
        weight is 0 are left out."""
        self.weights: dict[str, float] = {}
        """What the means weigh, by name."""
        self.total_samples = 0
        """The samples of all ranks, as the last reduction gave them."""
        self.samples = 0
        """The samples of this rank so far; whoever yields them counts them here."""
        self._is_alone = collectives.single_process or not over_ranks
        self._device = collectives.device
        self._on_cuda = collectives.device.type == "cuda"
        self._every = every
        self._contributes = collectives.contributes
        self._sums: dict[str, _Sum] = {}
        self._num_batches = 0
        self._pending: deque[_Reduction] = deque()
        self._names_left_out: set[str] = set()
        self._has_warned_of_names = False

    def add(self, weight: float, /, **values: float | Tensor) -> None:
        """Adds the means over one micro-batch.

        Args:
            weight: the weight of the values: a number of samples or of tokens. With weight 0 the
                values are ignored, even if they are NaN, as the mean over no samples is.
            values: one number each, or a tensor with one element, which is detached and not waited
                for. What is not one real number is left out, with a warning, and so are names after
                the first 32: logging does not end a training.
        """
        for name, value in values.items():
            number = self._to_number(name, value)
            if number is None:
                continue
            entry = self._sums.get(name)
            if entry is None:
                entry = self._new_sum(name)
                if entry is None:
                    continue
            # A rank that repeats another rank's work, as in a pipeline, does not contribute.
            if weight and self._contributes:
                entry.total.add_(number, alpha=weight)
                entry.weight += weight

    def step(self) -> None:
        """Counts a global batch: starts a reduction if it is time, and reads those that arrived."""
        self._num_batches += 1
        # With `every` 0 only `finish` starts a reduction.
        if self._every and self._num_batches % self._every == 0:
            self.start_reduce()
        self.read_arrived()

    def read_arrived(self) -> None:
        """Reads the reductions that have arrived; waits for none."""
        if self._pending:
            self._read(wait=False)

    def own_sums(self) -> dict[str, tuple[float, float]]:
        """Returns the weighted sum and the weight of each name on this rank.

        It waits for the device.
        """
        return {name: (float(entry.total), entry.weight) for name, entry in self._sums.items()}

    def start_reduce(self) -> None:
        """Starts a reduction of all values up to here. All ranks must call it together.

        The reduction is pending until `step` or `finish` reads its result.
        """
        names = sorted(self._sums)
        packed = self._pack(names)
        if self._on_cuda:
            self._pending.append(self._start_on_cuda(names, packed))
        elif self._is_alone:  # on one process the result is there already
            self._pending.append(_Reduction(names, packed))
        else:
            work = dist.all_reduce(packed, async_op=True)
            self._pending.append(_Reduction(names, packed, work.is_completed, work.wait))

    def finish(self) -> None:
        """Reduces all values and waits for the result. All ranks must call it together."""
        self.start_reduce()
        self._read(wait=True)

    def _new_sum(self, name: str) -> _Sum | None:
        """Adds and returns an empty sum; None, with a warning, if there are too many names."""
        if len(self._sums) == MAX_NAMES:
            self._leave_out(
                name,
                f"world.log({name}=...) as name number {MAX_NAMES + 1} of one pass",
                f"at most {MAX_NAMES} means are kept, so it is left out",
                "log fewer names, or log a mean of several of them",
            )
            return None
        # A tensor that is made under inference_mode() could not be changed outside of it.
        with torch.inference_mode(False):
            total = torch.zeros((), dtype=torch.float64, device=self._device)
        new_sum = _Sum(total)
        self._sums[name] = new_sum
        return new_sum

    def _to_number(self, name: str, value: Any) -> float | Tensor | None:
        """Returns the value as a number, or as a 0-dimensional tensor on the device.

        Returns:
            None, with a warning, if the value is not one real number.
        """
        if isinstance(value, int | float):
            return value
        found = describe_type(value)
        if isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_complex():
                number = value.detach().reshape(())
                return number.to(self._device, non_blocking=self._on_cuda)
            found = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        self._leave_out(
            name,
            f"world.log({name}=...)",
            f"{found}, not one number, so it is left out",
            f"log the mean over this micro-batch, for example {name}=values.float().mean()",
        )
        return None

    def _leave_out(self, name: str, was_set: str, found: str, do: str) -> None:
        """Warns, once in a pass for each name, that a value is left out."""
        if name not in self._names_left_out:
            self._names_left_out.add(name)
            warn(was_set, found, do)

    def _pack(self, names: list[str]) -> Tensor:
        """Returns the float64 tensor of shape `(PACKED_SIZE,)` that a reduction sums up.

        Ranks that log different names must not be averaged. So it has a hash `h` of the names, and
        its square: from the sums of both over the ranks, `_compute_means` sees whether all ranks
        have the same `h`. For the `k` names that this rank has logged, the values are

            1, h, h ** 2, samples, weights of k names, 0, ..., weighted sums of k names, 0, ...

        where each of the two rows of zeros fills up the places of `MAX_NAMES` names.
        """
        # A rank without samples may have logged nothing; that does not make the ranks differ.
        logs = bool(names) or self.samples > 0
        name_hash = 0
        if logs:
            # At most 2 ** 16, so that sums of squares over a thousand ranks are exact in float64.
            name_hash = (zlib.crc32("\0".join(names).encode()) & 0xFFFF) + 1
        samples = self.samples if self._contributes else 0
        sums = [self._sums[name] for name in names]
        numbers: list[float] = [int(logs), name_hash, name_hash**2, samples]
        numbers += [entry.weight for entry in sums]
        numbers += [0.0] * (PACKED_SIZE - len(numbers))
        packed = torch.tensor(numbers, dtype=torch.float64, pin_memory=self._on_cuda)
        packed = packed.to(self._device, non_blocking=True)
        # The weighted sums are on the device already. Reading them here would wait for it.
        if sums:
            start = HEADER_SIZE + MAX_NAMES
            packed[start : start + len(sums)] = torch.stack([entry.total for entry in sums])
        return packed

    def _start_on_cuda(self, names: list[str], packed: Tensor) -> _Reduction:
        """Starts a reduction on a stream of its own, so that the next step does not wait for it."""
        stream = side_stream(self._device, "sums of logged values")
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if not self._is_alone:
                dist.all_reduce(packed, async_op=True).wait()  # the stream waits, not the CPU
            on_host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            on_host.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        # If the pass is left early, nobody waits for this reduction; its memory must not be given
        # to another tensor before the stream is done with it.
        packed.record_stream(stream)
        return _Reduction(names, on_host, arrived.query, arrived.synchronize)

    def _read(self, *, wait: bool) -> None:
        """Reads the reductions that have arrived, in order, and sets the means by each of them.

        Args:
            wait: wait for those that have not arrived, so that all are read.
        """
        while self._pending and (wait or self._pending[0].has_arrived()):
            reduction = self._pending.popleft()
            reduction.wait()
            self._compute_means(reduction)

    def _compute_means(self, reduction: _Reduction) -> None:
        """Sets `values`, `weights` and `total_samples` from the result of a reduction.

        If the ranks have logged different names, there are no means: which of the numbers belong
        together is not known. They are told once in a pass.
        """
        numbers = reduction.result.tolist()
        num_ranks, hash_sum, square_sum, samples = numbers[:HEADER_SIZE]
        self.values = {}  # a new dict, by which others see that the means are new
        self.weights = {}
        self.total_samples = int(samples)
        # For n hashes h, n * sum(h**2) is equal to sum(h)**2 if and only if all h are equal (the
        # inequality of Cauchy and Schwarz).
        names_are_equal = num_ranks * square_sum == hash_sum * hash_sum
        if not names_are_equal:
            self._warn_of_other_names(reduction.names)
            return
        weights = numbers[HEADER_SIZE : HEADER_SIZE + MAX_NAMES]
        totals = numbers[HEADER_SIZE + MAX_NAMES :]
        # There are fewer names than places for them; the rest of the places hold zeros.
        for name, weight, total in zip(reduction.names, weights, totals, strict=False):
            if weight != 0:
                self.values[name] = total / weight
                self.weights[name] = weight

    def _warn_of_other_names(self, names: list[str]) -> None:
        """Warns, once in a pass, that nothing is shown since other ranks log other names."""
        if self._has_warned_of_names:
            return
        self._has_warned_of_names = True
        warn(
            "world.log in a loop over world.progress(...), which shows means over all ranks",
            f"this rank logged {', '.join(names) or 'nothing'} and some other rank logged other "
            "names, so nothing is shown",
            "log the same names on every rank (only rank 0 shows them); for a line from rank 0 "
            "alone use world.print",
        )


class _Reduction(NamedTuple):
    """A reduction that was started."""

    names: list[str]
    result: Tensor
    """The CPU tensor that has the result when it has arrived."""
    has_arrived: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None
    """Waits for the result; raises the error if the reduction failed."""

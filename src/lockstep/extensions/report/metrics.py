"""What a script logs in a pass over the data: sums on each rank, and means for the display.

Every rank keeps weighted *sums* of the values that it logs (`WeightedSums`). They are copied to the
host without waiting for the device, for the record of the run.

A loop that is shown (`World.progress`) needs the means over all ranks while it goes on
(`RunningMeans`). A *reduction* adds the sums up over the ranks: after a fixed number of global
batches each rank starts an asynchronous all-reduce, and reads the result when it has arrived. Only
the last one, at the end of the pass, is waited for.

The number of global batches decides when a reduction starts, so all ranks start the same
collectives at the same places between those of training. Its size is always the same, 68 float64
values, whatever a rank logged: ranks that log different names are found, and do not hang.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.streams import side_stream, start_copy_to_host
from lockstep.errors import warn
from lockstep.torch_compat import is_sharded, to_local
from lockstep.wording import describe_type

MAX_SHOWN_NAMES = 32
# The tensor that a reduction sums up over the ranks: a header, then the weights of up to 32 names,
# then the weighted sums of their values. The header is the number of ranks that log, a hash of
# their names, the square of the hash, and the number of samples.
HEADER_SIZE = 4
PACKED_SIZE = HEADER_SIZE + 2 * MAX_SHOWN_NAMES


@dataclass(slots=True)
class _Sum:
    """The weighted sum of the values of one name."""

    total: Tensor
    """A 0-dimensional float64 tensor on the device, where adding a tensor costs one kernel."""
    weight: float = 0.0


class SumsCopy(NamedTuple):
    """A copy of weighted sums on the host, as they were at one moment."""

    weights: dict[str, float]
    """The sum of the weights of each name. Names for which it is 0 are left out."""
    totals: Tensor
    """The weighted sums in the order of `weights`, on the host when the copy has arrived."""
    arrived: Any
    """A CUDA event that tells when; None if the sums were on the host."""

    def means(self) -> dict[str, float]:
        """Returns the weighted means, by name. The copy must have arrived."""
        totals = self.totals.tolist()
        named = zip(self.weights.items(), totals, strict=True)
        return {name: total / weight for (name, weight), total in named}


class WeightedSums:
    """The weighted sums of what one rank logs in one pass.

    Args:
        device: where the sums are kept.
        contributes: False on a rank that repeats another rank's work, as in a pipeline: then all
            weights are 0.
    """

    def __init__(self, device: torch.device, *, contributes: bool = True) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._contributes = contributes
        self._sums: dict[str, _Sum] = {}
        self._names_left_out: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names that were logged, in alphabetical order."""
        return sorted(self._sums)

    def add(self, weight: float, /, **values: Any) -> None:
        """Adds the means over one micro-batch.

        Args:
            weight: the weight of the values: a number of samples or of tokens. With weight 0 the
                values are ignored, even if they are NaN, as the mean over no samples is.
            values: one number each, or a tensor with one element, which is detached and not waited
                for. A value that is not one real number is left out, with a warning: logging does
                not end a training.
        """
        for name, value in values.items():
            number = self._to_number(name, value)
            if number is None:
                continue

            # The name gets a sum even with weight 0: all ranks of a reduction must have the same
            # names, also a rank without samples.
            weighted_sum = self._sums.get(name)
            if weighted_sum is None:
                weighted_sum = self._new_sum(name)

            # A rank that repeats another rank's work does not contribute to the sums.
            if weight and self._contributes:
                weighted_sum.total.add_(number, alpha=weight)
                weighted_sum.weight += weight

    def read(self) -> dict[str, tuple[float, float]]:
        """Returns the weighted sum and the weight of each name. It waits for the device."""
        return {name: (float(entry.total), entry.weight) for name, entry in self._sums.items()}

    def weights(self, names: list[str]) -> list[float]:
        """Returns the weights of some names."""
        return [self._sums[name].weight for name in names]

    def totals(self, names: list[str]) -> Tensor:
        """Returns the weighted sums of some names, at least one, on the device."""
        return torch.stack([self._sums[name].total for name in names])

    def start_copy(self) -> SumsCopy:
        """Copies the sums to the host. From a GPU, the copy is started but not waited for."""
        weights: dict[str, float] = {}
        for name, entry in self._sums.items():
            if entry.weight != 0:
                weights[name] = entry.weight
        if not weights:
            return SumsCopy({}, torch.empty(0), arrived=None)

        totals = self.totals(list(weights))
        if not self._on_cuda:
            return SumsCopy(weights, totals, arrived=None)

        on_host, arrived = start_copy_to_host(totals)
        return SumsCopy(weights, on_host, arrived)

    def _new_sum(self, name: str) -> _Sum:
        """Adds and returns an empty sum."""
        # A tensor that is made under inference_mode() could not be changed outside of it.
        with torch.inference_mode(False):
            total = torch.zeros((), dtype=torch.float64, device=self._device)
        new_sum = _Sum(total)
        self._sums[name] = new_sum
        return new_sum

    def _to_number(self, name: str, value: Any) -> float | Tensor | None:
        """Returns the value as a number, or as a 0-dimensional tensor on the device.

        Returns:
            None, with a warning, if the value is not one real number, or cannot be read without
            waiting for other ranks.
        """
        number = self._try_to_read(value)
        if isinstance(number, _WhyNoNumber):
            self._warn_of_left_out(name, value, number)
            return None
        return number

    def _try_to_read(self, value: Any) -> float | Tensor | _WhyNoNumber:
        """Returns the value as a number or a 0-dimensional tensor, or why it is neither."""
        try:
            if _is_spread_over_ranks(value):
                return _WhyNoNumber.IS_SPREAD
            if isinstance(value, Tensor) and value.is_meta:
                return _WhyNoNumber.IS_ON_META
            number = self._read_number(value)
        except OverflowError:
            return _WhyNoNumber.IS_TOO_LARGE
        except Exception:
            # `float` calls a method of the value's class, and a tensor may be of a class of the
            # user's own, so that any error may come.
            return _WhyNoNumber.IS_NOT_ONE_NUMBER
        return _WhyNoNumber.IS_NOT_ONE_NUMBER if number is None else number

    def _read_number(self, value: Any) -> float | Tensor | None:
        """Reads one number from a value that was logged.

        a tensor with one number       a 0-dimensional tensor on the device
        any other tensor, or a text    None
        any other value                `float(value)`, which may raise an error of any kind
        """
        if isinstance(value, Tensor):
            scalar = _as_scalar(value)
            return None if scalar is None else scalar.to(self._device, non_blocking=self._on_cuda)
        if isinstance(value, np.ndarray) and value.size == 1:
            return float(value.item())
        if isinstance(value, str | bytes | bytearray):
            return None  # `float` would accept the text "1.5"
        return float(value)

    def _warn_of_left_out(self, name: str, value: Any, why: _WhyNoNumber) -> None:
        """Warns, once in a pass for each name, that a value is left out."""
        if name in self._names_left_out:
            return
        self._names_left_out.add(name)

        found = describe_type(value)
        if isinstance(value, Tensor):
            found = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        if why is _WhyNoNumber.IS_SPREAD:
            warn(
                f"world.log({name}=...)",
                found="a DTensor of which each rank has a part, and world.log waits for no other "
                "rank, so it is left out",
                do=f"log {name}=values.full_tensor(), which all ranks have to call",
            )
        elif why is _WhyNoNumber.IS_ON_META:
            warn(
                f"world.log({name}=...)",
                found="a tensor on the meta device, which has no value, so it is left out",
                do=f"log the mean over this micro-batch, for example {name}=values.float().mean()",
            )
        elif why is _WhyNoNumber.IS_TOO_LARGE:
            warn(
                f"world.log({name}=...)",
                found=f"{found} that is too large for a float, so it is left out",
                do=f"log it in a larger unit, for example {name}=number / 1e12",
            )
        else:
            warn(
                f"world.log({name}=...)",
                found=f"{found}, not one number, so it is left out",
                do=f"log the mean over this micro-batch, for example {name}=values.float().mean()",
            )


class _WhyNoNumber(Enum):
    """Why a value that was logged is left out."""

    IS_SPREAD = auto()  # each rank has a part of it
    IS_ON_META = auto()
    IS_TOO_LARGE = auto()  # for a float
    IS_NOT_ONE_NUMBER = auto()


def _is_spread_over_ranks(value: Any) -> bool:
    """Returns True for a DTensor whose value is not whole on this rank."""
    if not isinstance(value, Tensor) or not is_sharded(value):
        return False
    placements: Any = value.placements  # type: ignore[attr-defined]
    return not all(placement.is_replicate() for placement in placements)


def _as_scalar(value: Tensor) -> Tensor | None:
    """Returns a value as a 0-dimensional tensor that can be added to a float64.

    Returns None if the value is not one real number. For tensors of unusual kinds, torch may raise
    any error here.
    """
    if value.numel() != 1 or value.is_complex():
        return None

    number = value.detach()
    if is_sharded(number):
        number = to_local(number)
    if number.layout != torch.strided:
        number = number.to_dense()
    if number.is_quantized:
        number = number.dequantize()
    if number.is_floating_point() and number.element_size() == 1:  # torch does not add float8
        number = number.float()
    return number.reshape(())


class RunningMeans:
    """The means over all ranks of what was logged in a pass, for the display of that pass.

    Args:
        collectives: the collectives of the run; on one process a reduction is the identity.
        every: how many global batches lie between two reductions; 0 for only the last one.
    """

    def __init__(self, collectives: Collectives, every: int = 10) -> None:
        self.sums = WeightedSums(collectives.device, contributes=collectives.contributes)
        """What this rank has logged."""
        self.values: dict[str, float] = {}
        """The weighted means over all ranks, by name, as the last reduction gave them. Names whose
        weight is 0 are left out, and names after the first 32."""
        self.total_samples = 0
        """The samples of all ranks, as the last reduction gave them."""
        self.samples = 0
        """The samples of this rank so far; whoever yields them counts them here."""
        self._is_alone = collectives.single_process
        self._device = collectives.device
        self._on_cuda = collectives.device.type == "cuda"
        self._every = every
        self._contributes = collectives.contributes
        self._num_batches = 0
        self._pending: deque[_Reduction] = deque()
        self._has_warned_of_names = False
        self._has_warned_of_many_names = False

    def step(self) -> None:
        """Counts a global batch: starts a reduction if it is time, and reads those that arrived."""
        self._num_batches += 1
        # With `every` 0 only `finish` starts a reduction.
        if self._every and self._num_batches % self._every == 0:
            self._start_reduce()
        if self._pending:
            self._read(wait=False)

    def finish(self) -> None:
        """Reduces all values and waits for the result. All ranks must call it together."""
        self._start_reduce()
        self._read(wait=True)

    def _start_reduce(self) -> None:
        """Starts a reduction of all values up to here. All ranks must call it together.

        The reduction is pending until `step` or `finish` reads its result.
        """
        names = self.sums.names
        if len(names) > MAX_SHOWN_NAMES:
            self._warn_of_many_names(len(names))

        # The packed tensor has the values of `shown_names`, and a hash of all names. If the hashes
        # of two ranks differ, they have logged different names.
        shown_names = names[:MAX_SHOWN_NAMES]
        packed = self._pack(names, shown_names)

        if self._on_cuda:
            reduction = self._start_on_cuda(shown_names, packed)
        elif self._is_alone:
            reduction = _Reduction.of_one_process(shown_names, packed)
        else:
            work = dist.all_reduce(packed, async_op=True)
            reduction = _Reduction(shown_names, packed, work.is_completed, work.wait)
        self._pending.append(reduction)

    def _pack(self, names: list[str], shown_names: list[str]) -> Tensor:
        """Returns the float64 tensor of shape `(PACKED_SIZE,)` that a reduction sums up.

        The tensor consists of

            the header                           4 values, see `_header`
            the weight of each shown name        32 values (`MAX_SHOWN_NAMES`)
            the weighted sum of each shown name  32 values

        With fewer than 32 names, the rest of the weights and of the sums is 0.
        """
        # The header and the weights are numbers of Python, so they are copied to the device, with
        # zeros in the places of the weighted sums.
        numbers = self._header(names)
        numbers += self.sums.weights(shown_names)
        numbers += [0.0] * (PACKED_SIZE - len(numbers))
        packed = torch.tensor(numbers, dtype=torch.float64, pin_memory=self._on_cuda)
        packed = packed.to(self._device, non_blocking=True)

        # The weighted sums are on the device already. Reading them here would wait for it.
        if shown_names:
            begin_of_sums = HEADER_SIZE + MAX_SHOWN_NAMES
            end_of_sums = begin_of_sums + len(shown_names)
            packed[begin_of_sums:end_of_sums] = self.sums.totals(shown_names)
        return packed

    def _header(self, names: list[str]) -> list[float]:
        """Returns [1, h, h ** 2, number of samples], where h is a hash of the names.

        Ranks that log different names must not be averaged. The first three values, summed up over
        the ranks, show whether all hashes are equal: only then is the sum of the squares, times
        the number of ranks, the square of the sum.

        - Hashes 3 and 3 give 2, 6 and 18: they are equal, as 2 * 18 == 6 ** 2.
        - Hashes 3 and 5 give 2, 8 and 34: they differ, as 2 * 34 != 8 ** 2.
        """
        # A rank that repeats another rank's work, as in a pipeline, does not count its samples.
        samples = self.samples if self._contributes else 0

        # A rank that had no samples has nothing to log, which is no difference: it counts as no
        # rank in the comparison of names.
        names_are_compared = bool(names) or self.samples > 0
        if not names_are_compared:
            return [0, 0, 0, samples]
        name_hash = (zlib.crc32("\0".join(names).encode()) & 0xFFFF) + 1  # at most 2 ** 16
        return [1, name_hash, name_hash**2, samples]

    def _start_on_cuda(self, names: list[str], packed: Tensor) -> _Reduction:
        """Starts a reduction on a stream of its own, so that the next step does not wait for it."""
        stream = side_stream(self._device, "sums of logged values")
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if not self._is_alone:
                dist.all_reduce(packed, async_op=True).wait()  # the stream waits, not the CPU
            on_host, arrived = start_copy_to_host(packed)

        # Tells torch's allocator that `stream` uses `packed`, so that no other tensor gets its
        # memory too early. It may be freed while the stream still reads it: nobody waits for the
        # reduction of a pass that the script leaves early.
        packed.record_stream(stream)
        return _Reduction(names, on_host, has_arrived=arrived.query, wait=arrived.synchronize)

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
        """Sets `values` and `total_samples` from the result of a reduction.

        If the ranks have logged different names, there are no means: which of the numbers belong
        together is not known. The user is warned of that once per pass.
        """
        result = _unpack(reduction.result, num_names=len(reduction.names))
        self.values = {}
        self.total_samples = result.samples
        if not result.names_are_equal:
            self._warn_of_other_names(reduction.names)
            return

        for name, weight, total in zip(reduction.names, result.weights, result.totals, strict=True):
            if weight != 0:
                self.values[name] = total / weight

    def _warn_of_other_names(self, names: list[str]) -> None:
        """Warns, once in a pass, that nothing is shown since other ranks log other names."""
        if self._has_warned_of_names:
            return
        self._has_warned_of_names = True
        warn(
            "world.log in a loop over world.progress(...), which shows means over all ranks",
            found=f"this rank logged {', '.join(names) or 'nothing'} and some other rank logged "
            "other names, so nothing is shown",
            do="log the same names on every rank (only rank 0 shows them); for a line from rank 0 "
            "alone use world.print",
        )

    def _warn_of_many_names(self, num_names: int) -> None:
        """Warns, once in a pass, that not all means are shown."""
        if self._has_warned_of_many_names:
            return
        self._has_warned_of_many_names = True
        warn(
            f"world.log of {num_names} names in a loop over world.progress(...)",
            found=f"the first {MAX_SHOWN_NAMES} in alphabetical order are shown; the report has "
            "all",
            do="nothing has to be done",
        )


class _Reduction(NamedTuple):
    """A reduction that was started."""

    names: list[str]
    result: Tensor
    """The CPU tensor that has the result when it has arrived."""
    has_arrived: Callable[[], bool]
    wait: Callable[[], object]
    """Waits for the result; raises the error if the reduction failed."""

    @classmethod
    def of_one_process(cls, names: list[str], result: Tensor) -> _Reduction:
        """Returns the reduction over one process, whose values are the result already."""
        return cls(names, result, has_arrived=lambda: True, wait=lambda: None)


class _ReducedNumbers(NamedTuple):
    """The result of a reduction: numbers that were summed up over the ranks."""

    names_are_equal: bool
    """True if all ranks have logged the same names."""
    samples: int
    weights: list[float]
    """The weight of each shown name."""
    totals: list[float]
    """The weighted sum of each shown name."""


def _unpack(packed: Tensor, num_names: int) -> _ReducedNumbers:
    """Takes apart the sum over the ranks of what `RunningMeans._pack` returns.

    It has the number of ranks, the sum of their hashes, the sum of the squared hashes, the number
    of samples; then `MAX_SHOWN_NAMES` weights; then as many weighted sums.

    Args:
        packed: the sum.
        num_names: the number of shown names. The places for further names hold zeros.
    """
    numbers = packed.tolist()
    num_ranks, hash_sum, square_sum, samples = numbers[:HEADER_SIZE]
    weights = numbers[HEADER_SIZE : HEADER_SIZE + MAX_SHOWN_NAMES]
    totals = numbers[HEADER_SIZE + MAX_SHOWN_NAMES :]
    return _ReducedNumbers(
        names_are_equal=_all_hashes_are_equal(num_ranks, hash_sum, square_sum),
        samples=int(samples),
        weights=weights[:num_names],
        totals=totals[:num_names],
    )


def _all_hashes_are_equal(number: float, total: float, total_of_squares: float) -> bool:
    """Returns True if some hashes are equal, from their number, their sum, and that of squares.

    For n hashes h, n * sum(h ** 2) == sum(h) ** 2 if and only if all are equal (the inequality of
    Cauchy and Schwarz). For 3 and 3 it is 2 * (9 + 9) == (3 + 3) ** 2, and for 3 and 5 it is
    2 * (9 + 25) > (3 + 5) ** 2. The floats may be compared by `==`: they are integers, and as a
    hash is at most 2 ** 16, float64 holds them exactly for a thousand ranks.
    """
    return number * total_of_squares == total * total

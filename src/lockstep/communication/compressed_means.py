"""A communication hook for DDP that sends gradients compressed.

Gradients are sent in *units*: fixed sets of gradients that travel together. Each unit has its own
*sum* (`QuantizedSum` or `LowRankSum`), which sends the values of its gradients and carries the
compression error of one step over to the next. DDP's own buckets cannot serve as units, because DDP
rebuilds them after the first step and when a run is resumed.

Torch has hooks of this kind (`torch.distributed.algorithms.ddp_comm_hooks`). With Gloo those for
bf16 are refused, that for PowerSGD hung with many buckets (its callbacks wait in Gloo's own
threads), and the quantizing ones raise; nor is their state part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.low_rank_sum import LowRankSum
from lockstep.communication.quantized_sum import QuantizedSum, State

Compression = Literal["bf16", "int8", "powersgd"]
"""How gradients are sent."""

# Gradients are sent in about this many units, within these sizes: the first are on their way while
# others are computed, and while one waits for acknowledgements. An exchange of 200 KiB at 100 Mb/s
# alone took nearly twice as long as its bytes explain (benchmarks/results/compression.md).
NUM_UNITS = 4
MIN_UNIT_BYTES = 2**17
MAX_UNIT_BYTES = 2**23


class _GradientSlot(NamedTuple):
    """The place at which the gradient of a parameter is stored while it is sent."""

    unit: int
    """The number of its unit."""
    values: Tensor
    """The gradient's part of the values of the unit's sum: a view in the gradient's shape."""


class CompressedMeans:
    """Replaces the gradients in DDP's buckets by their means over the ranks.

    Args:
        parameters: the parameters that DDP trains, in DDP's order.
        method: how the gradients are compressed.
        rank: number of columns of PowerSGD's narrow matrices.
        start: number of steps whose gradients are sent uncompressed before PowerSGD begins.
    """

    def __init__(
        self, parameters: Iterable[Tensor], method: Compression, rank: int = 1, start: int = 100
    ) -> None:
        self._scale = 1.0 / dist.get_world_size()
        units = _divide_into_units(parameters)
        self.sums: list[QuantizedSum | LowRankSum] = []

        for number, unit in enumerate(units):
            if method == "powersgd":
                shapes = [parameter.shape for parameter in unit]
                self.sums.append(LowRankSum(shapes, unit[0], rank=rank, start=start, seed=number))
            else:
                length = sum(parameter.numel() for parameter in unit)
                self.sums.append(QuantizedSum(length, unit[0], method))

        self._slot_of_parameter: dict[Tensor, _GradientSlot] = {}
        for number, unit in enumerate(units):
            sizes = [parameter.numel() for parameter in unit]
            parts = torch.split(self.sums[number].values, sizes)
            for parameter, part in zip(unit, parts, strict=True):
                self._slot_of_parameter[parameter] = _GradientSlot(
                    number, part.view(parameter.shape)
                )

        self._gradients_of_units = [len(unit) for unit in units]
        self._begin_backward()

    def _begin_backward(self) -> None:
        """Resets the state of a backward pass: no gradient has arrived yet."""
        self._missing_gradients = list(self._gradients_of_units)
        """For each unit, the number of gradients that have not arrived yet."""
        self._started_sums: list[QuantizedSum | LowRankSum] = []
        self._finish_buckets: list[Callable[[], None]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages the gradients of a bucket. DDP calls this for each bucket of a backward pass.

        1. The gradients are copied into the sums of their units.
        2. As soon as all gradients of a unit have arrived, its sum starts to send them.
        3. The last bucket waits for all sums, and copies the means back into all buckets.

        Returns:
            A future of the bucket's buffer, which then holds the means. It completes when the last
            bucket of the backward pass has been processed.
        """
        if bucket.index() == 0:
            # If an earlier backward pass raised an error, its state is still there.
            self._begin_backward()
        buffer = bucket.buffer()
        gradients = bucket.gradients()  # views of the buffer
        slots = [self._slot_of_parameter[parameter] for parameter in bucket.parameters()]
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        means = torch.futures.Future[Tensor](devices=devices)

        for gradient, slot in zip(gradients, slots, strict=True):
            # Divided by the number of ranks here, so the sum over the ranks is their mean.
            torch.mul(gradient.to(slot.values.dtype), self._scale, out=slot.values)
            self._missing_gradients[slot.unit] -= 1
            if self._missing_gradients[slot.unit] == 0:
                unit_sum = self.sums[slot.unit]
                unit_sum.start()
                self._started_sums.append(unit_sum)

        def finish_bucket() -> None:
            """Copies the means back into the bucket."""
            for gradient, slot in zip(gradients, slots, strict=True):
                gradient.copy_(slot.values)
            means.set_result(buffer)

        self._finish_buckets.append(finish_bucket)
        if bucket.is_last():
            # All sums complete one phase before any begins the next, so that one is sent while
            # another is computed.
            for started_sum in self._started_sums:
                started_sum.advance()
            for started_sum in self._started_sums:
                started_sum.end()
            for finish in self._finish_buckets:
                finish()
            self._begin_backward()

        return means

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's state for a checkpoint: the tensors of each sum, by `UNIT.NAME`."""
        state: dict[str, Tensor] = {}
        for number, unit_sum in enumerate(self.sums):
            for name, tensor in unit_sum.state.items():
                state[f"{number}.{name}"] = tensor
        return state

    def load_state_dict(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads the state dicts of the run that is resumed.

        Args:
            own: the state dict that this rank returned in that run.
            states_of_ranks: the state dicts that all ranks of that run returned.

        Returns:
            True if everything was loaded. False if some state had to be dropped: a quantized sum,
            for example, can only use its state if the same ranks or machines exchange data as in
            that run.
        """
        everything_fits = True
        for number, unit_sum in enumerate(self.sums):
            own_state = _state_of_unit(own, number)
            states = [_state_of_unit(state, number) for state in states_of_ranks]
            if not unit_sum.load(own_state, states):
                everything_fits = False
        return everything_fits


def _state_of_unit(state: State, number: int) -> dict[str, Tensor]:
    """Extracts the state of one unit's sum, e.g. `{"2.residual": ...} -> {"residual": ...}`.

    Args:
        state: the result of `CompressedMeans.state_dict`: tensors by `UNIT.NAME`.
        number: number of the unit.
    """
    prefix = f"{number}."
    unit_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            unit_state[name.removeprefix(prefix)] = tensor
    return unit_state


def _divide_into_units(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divides parameters into units whose gradients are sent together.

    All parameters of a unit have the same dtype and device. The units are in about the order in
    which a backward pass computes their gradients.
    """
    parameters = list(parameters)

    # A unit is full when it has this number of bytes: the model's bytes divided by `NUM_UNITS`, but
    # at least `MIN_UNIT_BYTES` and at most `MAX_UNIT_BYTES`.
    total_bytes = sum(parameter.nbytes for parameter in parameters)
    unit_bytes = min(max(total_bytes // NUM_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)

    # Parameters are grouped by their *kind*, the dtype and the device. Each parameter is added to
    # the last unit of its kind.
    units_of_kind: dict[Any, list[list[Tensor]]] = {}
    bytes_of_last_unit: dict[Any, int] = {}
    for parameter in reversed(parameters):  # a backward pass reaches the last layers first
        kind = (parameter.dtype, parameter.device)
        if kind not in units_of_kind:
            units_of_kind[kind] = [[]]
            bytes_of_last_unit[kind] = 0

        units = units_of_kind[kind]
        last_unit_is_full = bytes_of_last_unit[kind] >= unit_bytes
        if last_unit_is_full:
            units.append([])
            bytes_of_last_unit[kind] = 0

        units[-1].append(parameter)
        bytes_of_last_unit[kind] += parameter.nbytes

    all_units: list[list[Tensor]] = []
    for units in units_of_kind.values():
        all_units += units
    return all_units

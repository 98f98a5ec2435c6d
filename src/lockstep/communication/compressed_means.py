"""A communication hook for DDP that sends gradients compressed.

A *unit* is a fixed set of gradients that are sent together. Each unit has a *sum* of its own
(`QuantizedSum` or `LowRankSum`), which sends their values and keeps what compression has lost in
one step for the next. DDP's buckets are not always the same: DDP makes them anew after the first
step, and in a run that is resumed.

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


class _Place(NamedTuple):
    """The place of a gradient among those that are sent."""

    unit: int
    """The number of its unit."""
    values: Tensor
    """The part of the unit's sum that belongs to the gradient: a view in its shape."""


class CompressedMeans:
    """Replaces the gradients in DDP's buckets by their means over the ranks.

    Args:
        parameters: those that DDP trains, in its order.
        method: how the gradients are sent.
        rank: number of columns of PowerSGD's narrow matrices.
        start: how many steps are sent uncompressed before PowerSGD begins.
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
        self._place_of_parameter: dict[Tensor, _Place] = {}
        for number, unit in enumerate(units):
            sizes = [parameter.numel() for parameter in unit]
            parts = torch.split(self.sums[number].values, sizes)
            for parameter, part in zip(unit, parts, strict=True):
                self._place_of_parameter[parameter] = _Place(number, part.view(parameter.shape))
        self._gradients_of_units = [len(unit) for unit in units]
        self._begin_backward()

    def _begin_backward(self) -> None:
        """Begins anew, with no gradient of the backward pass there yet."""
        self._missing_gradients = list(self._gradients_of_units)
        """For each unit the number of gradients that have not come yet."""
        self._started_sums: list[QuantizedSum | LowRankSum] = []
        self._finish_buckets: list[Callable[[], None]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Takes a bucket of gradients; DDP calls it for each bucket of a backward pass.

        The gradients are copied into the sums of their units. A unit's sum is started as soon as
        all of its gradients have come. The last bucket waits for all sums, and then the means are
        copied back into all buckets.

        Returns:
            The future of the bucket's buffer with the means; it is done when the last bucket of the
            backward pass has come.
        """
        if bucket.index() == 0:
            self._begin_backward()  # an earlier backward pass may have raised
        buffer = bucket.buffer()
        gradients = bucket.gradients()  # views of the buffer
        places = [self._place_of_parameter[parameter] for parameter in bucket.parameters()]
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        means = torch.futures.Future[Tensor](devices=devices)
        for gradient, place in zip(gradients, places, strict=True):
            # Divided by the number of ranks here, so the sum over the ranks is their mean.
            torch.mul(gradient.to(place.values.dtype), self._scale, out=place.values)
            self._missing_gradients[place.unit] -= 1
            if self._missing_gradients[place.unit] == 0:
                self.sums[place.unit].start()
                self._started_sums.append(self.sums[place.unit])

        def finish_bucket() -> None:
            """Copies the means back into the bucket."""
            for gradient, place in zip(gradients, places, strict=True):
                gradient.copy_(place.values)
            means.set_result(buffer)

        self._finish_buckets.append(finish_bucket)
        if bucket.is_last():
            # All sums go through one step before any goes through the next, so that each is on its
            # way while another one is computed.
            for started_sum in self._started_sums:
                started_sum.advance()
            for started_sum in self._started_sums:
                started_sum.end()
            for finish in self._finish_buckets:
                finish()
            self._begin_backward()
        return means

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what a checkpoint must hold of this rank: the sums' state, as `UNIT.NAME`."""
        state: dict[str, Tensor] = {}
        for number, unit_sum in enumerate(self.sums):
            for name, tensor in unit_sum.state.items():
                state[f"{number}.{name}"] = tensor
        return state

    def load_state_dict(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads what `state_dict` returned in the run that is resumed.

        Args:
            own: what it returned on this rank.
            states_of_ranks: what it returned on every rank of that run.

        Returns:
            False if something is lost. A quantized sum, for example, can take up its state only if
            the same ranks or machines send to each other as in that run.
        """
        everything_fits = True
        for number, unit_sum in enumerate(self.sums):
            own_state = _state_of_unit(own, number)
            states = [_state_of_unit(state, number) for state in states_of_ranks]
            if not unit_sum.load(own_state, states):
                everything_fits = False
        return everything_fits


def _state_of_unit(state: State, number: int) -> dict[str, Tensor]:
    """Returns the state of a unit's sum.

    Args:
        state: what `CompressedMeans.state_dict` returned: tensors by `UNIT.NAME`.
        number: of the unit.
    """
    prefix = f"{number}."
    unit_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            unit_state[name.removeprefix(prefix)] = tensor
    return unit_state


def _divide_into_units(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divides parameters into units whose gradients are sent together.

    The units are in about the order in which a backward pass comes to them; each has parameters of
    one dtype and device.
    """
    trained = list(parameters)
    total_bytes = sum(parameter.nbytes for parameter in trained)
    # A unit is full when it has so many bytes.
    unit_bytes = min(max(total_bytes // NUM_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    # A kind is a dtype and a device. New parameters go into the last unit of their kind.
    units_of_kind: dict[Any, list[list[Tensor]]] = {}
    bytes_of_last_unit: dict[Any, int] = {}
    for parameter in reversed(trained):  # a backward pass comes to the last ones first
        kind = (parameter.dtype, parameter.device)
        if kind not in units_of_kind:
            units_of_kind[kind] = [[]]
            bytes_of_last_unit[kind] = 0
        units = units_of_kind[kind]
        if bytes_of_last_unit[kind] >= unit_bytes:  # it is full
            units.append([])
            bytes_of_last_unit[kind] = 0
        units[-1].append(parameter)
        bytes_of_last_unit[kind] += parameter.nbytes
    all_units: list[list[Tensor]] = []
    for units in units_of_kind.values():
        all_units += units
    return all_units

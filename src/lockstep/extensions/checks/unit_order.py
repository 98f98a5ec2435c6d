"""Checks that all ranks run the same units of a sharded model (FSDP), in the same order.

The *units* of a sharded model are the submodules whose parameters are gathered together, just
before they run. If one rank runs other units than the rest, or has gradients for other parameters,
it receives the data that other ranks send for another unit. If the sizes happen to be equal,
nothing fails. Therefore the ranks compare in each step what they have used, by a small all-reduce
on the host. It runs in the background; its result is read when the next step or forward pass
begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.errors import RanksDifferError, warn_about
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.strategies.base import USE_ALL_IN_EVERY_VIRTUAL_RANK, PreparedModule
from lockstep.torch_compat import outside_compiled_code
from lockstep.wording import join_first

_ORDER_MASK = 2**62 - 1
"""Keeps the checksum of an order a positive number whose negative also fits in 64 bits."""
_TIMEOUT_AT_CLOSE = timedelta(seconds=5)
"""How long to wait for the last comparison. Another rank may have failed before it."""


class UnitOrderCheck(Check):
    """Checks that all ranks use the same units and parameters of each sharded module."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._usage_by_module: dict[int, _ModuleUsage] = {}
        """For each module with units, counts of what this rank has used, by the module's id."""

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Starts counting what this rank uses of a module, if the module has units."""
        if wrapped.units:
            self._usage_by_module[id(wrapped.module)] = _ModuleUsage(
                wrapped, has_virtual_ranks=self.run.settings.virtual_ranks is not None
            )

    def close(self, failed: bool) -> None:
        """Warns if ranks differed in the last step, whose comparison no later step reads."""
        for usage in self._usage_by_module.values():
            usage.warn_at_close()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Reads the result of the previous step's comparison, and starts the one of this step.

        Raises:
            RanksDifferError: on all ranks, if the ranks differed in the previous step.
        """
        for module in modules:
            usage = self._usage_by_module.get(id(module))
            if usage is not None:
                usage.start_comparison()


class _ModuleUsage:
    """Counts what this rank uses of one module, and compares it with the other ranks.

    Four things are compared: the number of forward passes of each unit, the order of these passes,
    the number of calls of `load_state_dict`, and which parameters have gradients. They are counted
    by hooks that this class registers.

    Args:
        wrapped: the prepared module with its units.
        has_virtual_ranks: True if the run has virtual ranks, with which `find_unused_parameters`
            does not work.
    """

    def __init__(self, wrapped: PreparedModule, *, has_virtual_ranks: bool) -> None:
        self._has_virtual_ranks = has_virtual_ranks
        root = wrapped.module
        self._units = list(wrapped.units)
        self._parameters = dict(root.named_parameters())
        self._num_passes = [0] * len(self._units)
        """The number of forward passes of each unit."""
        self._order_checksum = 0
        """A checksum of the order of these passes."""
        self._num_loads = 0
        """The number of calls of `load_state_dict`. All ranks must call it, because each of them
        takes its own shards of the state."""
        self._comparison: tuple[dist.Work, Tensor] | None = None
        """The all-reduce that is in progress, and the tensor that it writes to."""

        for number, unit in enumerate(wrapped.units.values()):
            unit.register_forward_hook(partial(self._count_pass, number))

        # This hook must run before torch's own hook, which gathers the parameters.
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_load_state_dict_pre_hook(self._count_load)  # type: ignore[no-untyped-call]

    @outside_compiled_code
    def _before_forward(self, *_: Any) -> None:
        """Reads the result of the previous step's comparison before the first gather."""
        self._finish_comparison()

    @outside_compiled_code  # else torch.compile would compile it again whenever a counter changes
    def _count_pass(self, unit: int, *_: Any) -> None:
        """Counts a forward pass of the unit with the given number."""
        self._num_passes[unit] += 1
        self._order_checksum = hash((self._order_checksum, unit)) & _ORDER_MASK

    def _count_load(self, *_: Any) -> None:
        """Counts a call of `load_state_dict`."""
        self._num_loads += 1

    def start_comparison(self) -> None:
        """Starts comparing the ranks in the background, after finishing the previous comparison.

        Raises:
            RanksDifferError: on all ranks, if the previous comparison found a difference.
        """
        self._finish_comparison()

        # `_difference` reads the values in this order.
        has_gradient = [p.grad is not None for p in self._parameters.values()]
        values = torch.tensor(
            [
                *self._num_passes,
                self._order_checksum,
                self._num_loads,  # calls of `load_state_dict`
                *has_gradient,
            ]
        )

        # A value is the same on all ranks if its maximum and its minimum are equal. A single
        # all-reduce finds both, because the minimum is the negative of the maximum of the negative
        # values.
        maxima = torch.cat([values, -values])
        work: Any = dist.all_reduce(maxima, dist.ReduceOp.MAX, async_op=True)
        self._comparison = (work, maxima)  # `maxima` has the result when the work is done

    def _finish_comparison(self, timeout: timedelta | None = None) -> None:
        """Waits for the comparison in progress, if there is one, and reads its result.

        Args:
            timeout: how long to wait; None for the timeout of the process group.

        Raises:
            RanksDifferError: on all ranks, if the ranks differ.
            RuntimeError: if not all ranks took part in the comparison in time.
        """
        if self._comparison is None:
            return

        work, maxima = self._comparison
        self._comparison = None
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)

        # Each rank has sent its counts, of units and gradients, and the negatives of these. If two
        # ranks have counted 2 and 3, the largest count is 3, and the largest negative is -2: the
        # smallest count is 2.
        largest, negative_smallest = maxima.chunk(2)
        differs = (largest != -negative_smallest).tolist()
        if any(differs):
            raise self._difference(differs)

    def warn_at_close(self) -> None:
        """Warns if the ranks differed in the last step."""
        with suppress(RuntimeError):  # raised if another rank has ended before the comparison
            try:
                self._finish_comparison(_TIMEOUT_AT_CLOSE)
            except RanksDifferError as error:
                warn_about(error)

    def _difference(self, differs: Sequence[bool]) -> RanksDifferError:
        """Builds the error that tells the user what only some of the ranks have done.

        Args:
            differs: for each value that `start_comparison` compares, True if it differs between
                ranks. The order is: the passes of each unit, the order of the passes, the calls of
                `load_state_dict`, and for each parameter whether it has a gradient.
        """
        num_units = len(self._units)
        passes_differ = differs[:num_units]
        order_differs = differs[num_units]
        loads_differ = differs[num_units + 1]
        gradients_differ = differs[num_units + 2 :]

        if loads_differ:
            return RanksDifferError(
                "load_state_dict of a sharded model",
                "some ranks called it and others did not, so shards of other weights are mixed",
                "call it on all ranks, never under `if world.is_main:`",
                code="LS304",
            )

        if any(passes_differ) or order_differs:
            units: list[str] = []
            for name, differ in zip(self._units, passes_differ, strict=True):
                if differ:
                    # "" is the module itself, with all parameters that are in no other unit.
                    units.append(name or "the rest")
            ran = "its units ran in another order on some ranks than on others"
            if units:
                ran = f"{join_first(units)} ran more often on some ranks than on others"
            return RanksDifferError(
                "forward passes of a sharded model",
                f"{ran}, and ranks gathered parameters of one unit in the place of another's",
                self._advice_unless_virtual_ranks(
                    "let all ranks run the same: choose blocks= so that a unit holds all that only "
                    "some ranks run (the experts of a layer), with find_unused_parameters=True"
                ),
                code="LS301",
            )

        names: list[str] = []
        for name, differ in zip(self._parameters, gradients_differ, strict=True):
            if differ:
                names.append(name)
        return RanksDifferError(
            "gradients of a sharded model",
            f"{join_first(names)} had one on some ranks only, and were averaged with those of "
            "others",
            self._advice_unless_virtual_ranks(
                "use the same parameters on all ranks, or pass "
                "strategy=lockstep.strategies.FSDP(find_unused_parameters=True)"
            ),
            code="LS301",
        )

    def _advice_unless_virtual_ranks(self, advice: str) -> str:
        """Returns an advice, or the one for a run with virtual ranks.

        There, `find_unused_parameters` does not work.
        """
        return USE_ALL_IN_EVERY_VIRTUAL_RANK if self._has_virtual_ranks else advice

"""Checks that all ranks run the same units of a sharded model (FSDP), in the same order.

The *units* of a sharded model are the submodules whose parameters are gathered together, just
before they run. If a rank runs other units than the rest, or has gradients for other parameters, it
receives what other ranks send for another unit; if the sizes happen to be equal, nothing fails. So
each step compares what the ranks have used, with one small all-reduce on the host. It runs in the
background, and its result is read when the next step or forward pass begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import outside_compiled_code
from lockstep.errors import RanksDifferError, warn_about
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.strategies.base import PreparedModule
from lockstep.wording import join_first

_ORDER_MASK = 2**62 - 1
"""Keeps the checksum of an order a positive number whose negative also fits in 64 bits."""
_TIMEOUT_AT_CLOSE = timedelta(seconds=5)
"""How long to wait for the last comparison. Another rank may have failed before it."""


class UnitOrderCheck(Check):
    """Compares what the ranks use of each module that has units."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._usage_by_module: dict[int, _ModuleUsage] = {}
        """What this rank has used of each module with units, by the id of the module."""

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Begins to count what this rank uses of a module, if the module has units."""
        if wrapped.units:
            self._usage_by_module[id(wrapped.module)] = _ModuleUsage(wrapped)

    def close(self, failed: bool) -> None:
        """Warns if ranks differed in the last step: no later step reads that comparison."""
        for usage in self._usage_by_module.values():
            usage.warn_at_close()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Reads the comparison of the previous step and starts that of this one.

        Raises:
            RanksDifferError: on all ranks, if the ranks differed in the previous step.
        """
        for module in modules:
            usage = self._usage_by_module.get(id(module))
            if usage is not None:
                usage.start_comparison()


class _ModuleUsage:
    """Counts what this rank uses of one module, and compares it with the other ranks.

    It compares four things: how many forward passes each unit has made, the order of these passes,
    how many times `load_state_dict` was called, and which parameters have gradients. It registers
    hooks that count.

    Args:
        wrapped: the module, with its units by name.
    """

    def __init__(self, wrapped: PreparedModule) -> None:
        root = wrapped.module
        self._units = list(wrapped.units)
        self._parameters = dict(root.named_parameters())
        self._num_passes = [0] * len(self._units)
        """How many forward passes each unit has made."""
        self._order_checksum = 0
        """A checksum of the order of these passes."""
        self._num_loads = 0
        """How many times `load_state_dict` was called. Each rank takes its own shards of a state,
        so all ranks must call it."""
        self._comparison: tuple[dist.Work, Tensor] | None = None
        """The all-reduce that is under way, and the tensor that it writes to."""
        for number, unit in enumerate(wrapped.units.values()):
            unit.register_forward_hook(partial(self._count_pass, number))
        # Prepended: it must come before the hook of torch that gathers the parameters.
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_load_state_dict_pre_hook(self._count_load)  # type: ignore[no-untyped-call]

    @outside_compiled_code
    def _before_forward(self, *_: Any) -> None:
        self._finish_comparison()

    @outside_compiled_code  # else torch.compile would compile it again whenever a counter changes
    def _count_pass(self, unit: int, *_: Any) -> None:
        """Counts a forward pass of the unit with this number."""
        self._num_passes[unit] += 1
        self._order_checksum = hash((self._order_checksum, unit)) & _ORDER_MASK

    def _count_load(self, *_: Any) -> None:
        self._num_loads += 1

    def start_comparison(self) -> None:
        """Starts to compare the ranks, in the background; ends the previous comparison.

        Raises:
            RanksDifferError: on all ranks, if the previous comparison found a difference.
        """
        self._finish_comparison()
        has_gradient = [p.grad is not None for p in self._parameters.values()]
        # The four things that the class compares, in the order in which `_difference` reads them.
        values = torch.tensor(
            [*self._num_passes, self._order_checksum, self._num_loads, *has_gradient]
        )
        # The minimum over the ranks is found as the maximum of the negative values.
        maxima = torch.cat([values, -values])
        work = dist.all_reduce(maxima, dist.ReduceOp.MAX, async_op=True)
        self._comparison = cast(dist.Work, work), maxima

    def _finish_comparison(self, timeout: timedelta | None = None) -> None:
        """Waits for the comparison that is under way, if there is one.

        Args:
            timeout: how long to wait. None for the timeout of the process group.

        Raises:
            RanksDifferError: on all ranks, if it found a difference.
            RuntimeError: the other ranks did not come.
        """
        if self._comparison is None:
            return
        work, maxima = self._comparison
        self._comparison = None
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
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
        """Returns the error that says what some ranks have done and others have not.

        Args:
            differs: a bool for each value that `start_comparison` compares, in its order: the
                passes of each unit, their order, the calls of `load_state_dict`, and for each
                parameter whether it has a gradient. True if ranks have different values.
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
                "let all ranks run the same: choose blocks= so that a unit holds all that only "
                "some ranks run (the experts of a layer), with find_unused_parameters=True",
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
            "use the same parameters on all ranks, or pass "
            "strategy=lockstep.strategies.FSDP(find_unused_parameters=True)",
            code="LS301",
        )

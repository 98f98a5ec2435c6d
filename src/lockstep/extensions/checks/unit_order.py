"""Do all ranks use the same of a sharded model?

Units gather their parameters, and average their gradients, in the order in which they run. A rank
that runs other units than the rest, or has gradients for other parameters, gets what others send
at that time; where the sizes are equal nobody notices. So it is compared in every step: one small
all-reduce on the host, looked at when the next step or forward pass begins.
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

_LARGEST = 2**62 - 1
_AT_CLOSE = timedelta(seconds=5)
"""How long the last comparison is waited for; another rank may have failed."""


class UnitOrderCheck(Check):
    """Compares what the ranks use of each module with units."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._uses: dict[int, _Use] = {}
        """Of modules, by the id of each."""

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Follows its units, where it has some."""
        if wrapped.units:
            self._uses[id(wrapped.module)] = _Use(wrapped)

    def close(self, failed: bool) -> None:
        """Looks at the last comparisons."""
        for use in self._uses.values():
            use.release()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises RanksDifferError, on all ranks, where the comparison before found a difference."""
        for module in modules:
            if (use := self._uses.get(id(module))) is not None:
                use.compare()


class _Use:
    """What is used of one module: passes of its units, states that were loaded, gradients."""

    def __init__(self, wrapped: PreparedModule) -> None:
        root = wrapped.module
        self._units = list(wrapped.units)
        self._parameters = dict(root.named_parameters())
        self._passes = [0] * len(self._units)
        self._order = 0
        """A sum of which came after which, equal on ranks where all came in the same order."""
        self._loads = 0
        """States that were loaded into the model; each rank takes its own shards of them."""
        self._under_way: tuple[dist.Work, Tensor] | None = None
        for number, unit in enumerate(wrapped.units.values()):
            unit.register_forward_hook(partial(self._passed, number))
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_load_state_dict_pre_hook(self._count_load)  # type: ignore[no-untyped-call]

    @outside_compiled_code
    def _before_forward(self, *_: Any) -> None:
        self.finish()

    @outside_compiled_code  # else a change of a counter would compile it again
    def _passed(self, unit: int, *_: Any) -> None:
        self._passes[unit] += 1
        self._order = hash((self._order, unit)) & _LARGEST

    def _count_load(self, *_: Any) -> None:
        self._loads += 1

    def compare(self) -> None:
        """Begins to compare, after a backward pass that has averaged gradients."""
        self.finish()
        used = [p.grad is not None for p in self._parameters.values()]
        mine = torch.tensor([*self._passes, self._order, self._loads, *used])
        extremes = torch.cat([mine, -mine])
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, async_op=True)
        self._under_way = cast(dist.Work, work), extremes

    def finish(self, timeout: timedelta | None = None) -> None:
        """Ends the comparison that is under way.

        Args:
            timeout: how long to wait for it; None: as long as for any collective.

        Raises:
            RanksDifferError: on all ranks, where it found a difference.
            RuntimeError: the other ranks did not come.
        """
        if self._under_way is None:
            return
        (work, extremes), self._under_way = self._under_way, None
        work.wait() if timeout is None else work.wait(timeout)
        largest, smallest = extremes.chunk(2)
        differ = (largest != -smallest).tolist()
        if any(differ):
            raise self._difference(differ)

    def release(self) -> None:
        """Warns where the last step was wrong, which no later one has said."""
        with suppress(RuntimeError):  # another rank has gone
            try:
                self.finish(_AT_CLOSE)
            except RanksDifferError as error:
                warn_about(error)

    def _difference(self, differ: Sequence[bool]) -> RanksDifferError:
        count = len(self._units)
        if differ[count + 1]:
            return RanksDifferError(
                "load_state_dict of a sharded model",
                "some ranks called it and others did not, so shards of other weights are mixed",
                "call it on all ranks, never under `if world.is_main:`",
                code="LS304",
            )
        if any(differ[: count + 1]):
            units = [name or "the rest" for name, d in zip(self._units, differ, strict=False) if d]
            ran = (
                f"{join_first(units)} ran more often on some ranks than on others"
                if units
                else "its units ran in another order on some ranks than on others"
            )
            return RanksDifferError(
                "forward passes of a sharded model",
                f"{ran}, and ranks gathered parameters of one unit in the place of another's",
                "let all ranks run the same: choose blocks= so that a unit holds all that only "
                "some ranks run (the experts of a layer), with find_unused_parameters=True",
                code="LS301",
            )
        names = [n for n, d in zip(self._parameters, differ[count + 2 :], strict=True) if d]
        return RanksDifferError(
            "gradients of a sharded model",
            f"{join_first(names)} had one on some ranks only, and were averaged with those of "
            "others",
            "use the same parameters on all ranks, or pass "
            "strategy=lockstep.strategies.FSDP(find_unused_parameters=True)",
            code="LS301",
        )

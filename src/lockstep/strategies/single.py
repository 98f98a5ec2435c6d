"""The strategy `single`: one process on one device.

Strategies for several ranks use `on_one_process` if they run on a single one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from lockstep.distributed.process_group import Run
from lockstep.strategies.base import PreparedModule, Strategy, StrategyPlan, move_to_device
from lockstep.strategies.registry import check_number_of_processes
from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers
from lockstep.strategies.virtual_ranks import GradientsOnOneProcess, make_virtual_rank_tree


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """One process on one device: plain torch, the reference for all other strategies."""

    name: ClassVar[str] = "single"

    def plan(self, run: Run) -> StrategyPlan:
        """Plans a run of one process.

        Raises:
            SettingError: there are several processes.
        """
        check_number_of_processes(self.name, run.topology.size)
        return replace(super().plan(run), can_autotune=True)

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Moves the module to its device and returns it without a wrapper."""
        choices = move_to_device(module, run.device)
        return replace(on_one_process(module, run), choices=choices)


def on_one_process(module: nn.Module, run: Run) -> PreparedModule:
    """Prepares a module for a run of one process, in which nothing has to be sent.

    Virtual ranks still need extensions, which keep their gradients and buffers apart.
    """
    if run.settings.virtual_ranks is None:
        return PreparedModule(module=module)

    tree = make_virtual_rank_tree(run)
    gradients = GradientsOnOneProcess(module, tree, run.step)
    buffers = VirtualRankBuffers(module, tree, run.step)
    return PreparedModule(module=module, extensions=[gradients, buffers])

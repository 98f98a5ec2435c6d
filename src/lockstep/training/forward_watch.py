"""Reports to the step with which batches the prepared modules are called.

This is only needed for loops that fetch batches before they train on them. The tensors that a
module is called with then show which batch is being trained.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lockstep.session.extension import Extension
from lockstep.session.step import Step
from lockstep.strategies.module_hook import RunHook, report_inputs


class ForwardWatch(Extension):
    """Registers hooks on the prepared modules once a loop has fetched a batch ahead.

    Args:
        step: the state of the current optimizer step.
        modules: all prepared modules; the collection may still grow.
    """

    def __init__(self, step: Step, modules: Collection[nn.Module]) -> None:
        self._step = step
        self._modules = modules
        self._is_watching = False

    def batches_fetched_ahead(self) -> None:
        """Registers hooks on all prepared modules."""
        self._is_watching = True
        for module in self._modules:
            self._hook(module)

    def module_prepared(self, wrapped: Any) -> None:
        """Registers a hook on a module that is prepared later."""
        if self._is_watching:
            self._hook(wrapped.module)

    def _hook(self, module: nn.Module) -> None:
        """Makes a module report its inputs, before any other hook can replace them."""
        hook = _ReportInputs(self._step)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


class _ReportInputs(RunHook):
    """A forward pre-hook that tells the step with which tensors a module is called.

    Args:
        step: the state of the current optimizer step; None for a hook that does nothing.
    """

    def __init__(self, step: Step | None = None) -> None:
        self._step = step

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Nothing is reported from compiled code, because reading storages would break its graph.
        if torch.compiler.is_compiling() or self._step is None:
            return
        report_inputs(self._step, (args, kwargs))

"""Hooks that a run registers on the user's modules, and what they report to the step."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.batch.pytree import storage_references, tensors
from lockstep.session.step import Step


class RunHook:
    """A base class for hooks of a module that belong to a run.

    A copy or a pickle of the module has copies of its hooks, but the run does not know the copied
    module. So the copy of a hook is made by its class without arguments, and must do nothing.
    """

    def __reduce__(self) -> tuple[type[RunHook], tuple[()]]:
        """Makes copies and pickles contain a hook that does nothing."""
        return type(self), ()


def report_inputs(step: Step, inputs: Any) -> None:
    """Tells the step with which tensors a module is called, if gradients are enabled.

    Args:
        step: the state of the current optimizer step.
        inputs: the arguments of the call.
    """
    if torch.is_grad_enabled():
        # A tensor that requires a gradient is taken for the output of another prepared module.
        requires_grad = any(tensor.requires_grad for tensor in tensors(inputs))
        step.module_called(storage_references(inputs), is_output_of_prepared_module=requires_grad)

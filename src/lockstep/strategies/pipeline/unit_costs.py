"""Measures the costs of a model's units, so that the model can be cut into stages of equal cost.

A *unit* is a submodule that stays in one piece (`split.units`). Its cost is its share of the time
and of the memory of a training step. Memory is needed for parameters, gradients, two optimizer
moments, and the activations that are kept for the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.batch.pytree import map_tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.optim import saved_activations
from lockstep.strategies.pipeline.input_kind import Arguments
from lockstep.torch_compat import pytree

NUM_TRIALS = 3
COPIES_OF_A_PARAMETER = 4
"""A device holds each parameter, its gradient, and two moments of Adam."""


class UnitCosts(NamedTuple):
    """The costs of the units of a model."""

    costs: list[float]
    """The cost of each unit."""
    reason: str
    """How the costs were determined. It is printed after the share of each stage, for example "48%
    + 52% of time and memory, measured on an example"."""
    called: list[bool]
    """For each unit, True if the forward pass of the example called it; all True without one."""


def measure(
    module: nn.Module, units: Sequence[str], examples: Sequence[Callable[[], Any]]
) -> UnitCosts:
    """Measures the cost of every unit of a model: its share of time plus its share of memory.

        cost = seconds / seconds of all units + bytes / bytes of all units

    If the model cannot be run on an example, the cost of a unit is the size of its parameters.

    Args:
        module: the model, on the CPU.
        units: the names of the units, in order.
        examples: functions that return a batch. The model is called with the batch, with its first
            element, or with its entries as keyword arguments.
    """
    modules = [module.get_submodule(name) for name in units]
    parameter_bytes = [float(sum(p.nbytes for p in unit.parameters())) for unit in modules]
    training_modules = [part for part in module.modules() if part.training]

    # In evaluation mode running statistics stay the same, and SyncBatchNorm does not communicate.
    module.eval()

    try:
        with preserve_rng_state():
            measured = _measure_on_examples(module, modules, examples)
    finally:
        for part in training_modules:
            part.training = True

    # Nothing could be measured. The reason is printed after the share of each stage: "48% + 52% of
    # parameters: no example to measure with". Every unit counts as called by the model.
    if measured is None:
        all_called = [True] * len(modules)
        reason = "of parameters: no example to measure with"
        if any(parameter.is_meta for parameter in module.parameters()):
            reason = "of parameters: the model has no values yet to measure with"
        return UnitCosts(costs=parameter_bytes, reason=reason, called=all_called)

    seconds, activation_bytes = measured

    total_bytes: list[float] = []
    for of_parameters, of_activations in zip(parameter_bytes, activation_bytes, strict=True):
        total_bytes.append(COPIES_OF_A_PARAMETER * of_parameters + of_activations)

    seconds_of_model = max(sum(seconds), 1e-12)  # never divide by 0
    bytes_of_model = max(sum(total_bytes), 1)

    costs: list[float] = []
    for seconds_of_unit, bytes_of_unit in zip(seconds, total_bytes, strict=True):
        costs.append(seconds_of_unit / seconds_of_model + bytes_of_unit / bytes_of_model)

    called = [seconds_of_unit > 0 for seconds_of_unit in seconds]
    return UnitCosts(costs, "of time and memory, measured on an example", called)


def _measure_on_examples(
    module: nn.Module, units: Sequence[nn.Module], make_examples: Sequence[Callable[[], Any]]
) -> tuple[list[float], list[int]] | None:
    """Measures units on the first example that the model can be called with.

    Args:
        module: the model.
        units: the units to measure.
        make_examples: functions, each of which returns a batch.

    Returns:
        The seconds of each unit, and the bytes of its activations; both are 0 for units that the
        model does not call. None if the model has no values yet (it is on the meta device), or
        cannot be called with any of the examples.
    """
    parameters = list(module.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return None

    device = torch.device("cpu")
    if parameters:
        device = parameters[0].device

    for make_example in make_examples:
        batch = map_tensors(make_example(), lambda tensor: tensor.to(device))

        # A loop may call `model(inputs)`, `model(inputs, targets)` or `model(batch)`. Which of
        # them it is can only be found out by trying. With wrong arguments any error may come.
        for arguments in _possible_arguments(batch):
            try:
                return _measure_call(module, units, arguments, device)
            except Exception:
                continue

    return None


def _measure_call(
    module: nn.Module, units: Sequence[nn.Module], arguments: Arguments, device: torch.device
) -> tuple[list[float], list[int]]:
    """Measures units in calls of the model with the given arguments.

    Returns:
        The seconds of each unit, and the bytes of its activations; both are 0 for units that the
        model does not call.

    Raises:
        Exception: the model cannot be called with these arguments.
    """
    args, kwargs = arguments
    activations = saved_activations.measure(module, units, args, kwargs)

    # The units are the blocks here. If unit 1 was not called, `activations_of_block` is
    # {0: {storage: 4096, ...}, 2: {...}}: for each unit, the bytes of each storage that it keeps.
    activation_bytes: list[int] = []
    for number in range(len(units)):
        bytes_of_storage = activations.activations_of_block.get(number, {})
        activation_bytes.append(sum(bytes_of_storage.values()))

    seconds = _time_units(module, units, arguments, device)
    return seconds, activation_bytes


def _possible_arguments(batch: Any) -> list[Arguments]:
    """Returns the arguments with which a training loop might call the model for a given batch.

    For example, for the batch (x, y): the arguments (x), (x, y) and ((x, y)).
    """
    if isinstance(batch, Mapping):
        return [((), dict(batch)), ((batch,), {})]
    if isinstance(batch, list | tuple) and batch:
        return [((batch[0],), {}), (tuple(batch), {}), ((batch,), {})]
    return [((batch,), {})]


def _time_units(
    module: nn.Module, units: Sequence[nn.Module], arguments: Arguments, device: torch.device
) -> list[float]:
    """Measures the seconds of each unit; 0 for a unit that the model does not call.

    A unit is timed at its first call, with the inputs and under the autocast settings of that call:
    right before it, the timer calls the unit several times by itself.
    """
    timers = [_FirstCallTimer(device) for _ in units]
    args, kwargs = arguments
    with torch.no_grad(), ExitStack() as stack:
        for unit, timer in zip(units, timers, strict=True):
            stack.enter_context(unit.register_forward_pre_hook(timer, with_kwargs=True))
        module(*args, **kwargs)

    return [timer.seconds for timer in timers]


class _FirstCallTimer:
    """A forward pre-hook that times a unit at its first call.

    Args:
        device: the device on which the unit runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._was_called = False
        self.seconds = 0.0

    def __call__(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Times the unit; called by torch before the unit runs."""
        if self._was_called:
            return

        # `_time_unit` calls the unit, and so this hook again, which then returns at once.
        self._was_called = True
        self.seconds = _time_unit(unit, (args, kwargs), self._device)


@torch.enable_grad()
def _time_unit(unit: nn.Module, arguments: Arguments, device: torch.device) -> float:
    """Measures the seconds of one forward and backward pass: the minimum of several trials."""
    device_module = torch.get_device_module(device)  # such as `torch.cuda`
    best = float("inf")
    for _ in range(NUM_TRIALS):
        # The unit may write to its arguments, so each trial gets copies.
        args, kwargs = pytree.tree_map_only(Tensor, _copy_for_trial, arguments)
        with_gradient = _tensors_with_gradient(unit.parameters())
        with_gradient += _tensors_with_gradient(pytree.tree_leaves((args, kwargs)))
        device_module.synchronize(device)  # a GPU may still be busy with earlier work
        begin = time.perf_counter()
        outputs = _tensors_with_gradient(pytree.tree_leaves(unit(*args, **kwargs)))
        sums = [output.sum() for output in outputs]
        if sums and with_gradient:  # otherwise there is no backward pass
            torch.autograd.grad(sums, with_gradient, allow_unused=True)

        device_module.synchronize(device)
        best = min(best, time.perf_counter() - begin)

    return best


def _tensors_with_gradient(leaves: Iterable[Any]) -> list[Tensor]:
    """Returns those of the given values that are tensors and require a gradient."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _copy_for_trial(tensor: Tensor) -> Tensor:
    """Returns a copy that requires a gradient. It is not a leaf, so the unit may write to it."""
    detached = tensor.detach()
    if detached.is_floating_point():
        detached.requires_grad_()
    return detached.clone()

"""What the units of a model cost, measured on an example, to cut it into stages of equal cost.

A *unit* is a submodule that is not divided (`split.units`). Its cost is its part of the time and of
the memory of a training step. Memory is that of parameters, gradients, two optimizer moments, and
of the activations that are kept for the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.batch.pytree import map_tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import pytree
from lockstep.optim import saved_activations
from lockstep.strategies.pipeline.input_kind import Arguments

NUM_TRIALS = 3
COPIES_OF_A_PARAMETER = 4
"""What a device holds of a parameter: itself, its gradient, and two moments of Adam."""


class UnitCosts(NamedTuple):
    """What the units of a model cost."""

    costs: list[float]
    """One number per unit."""
    reason: str
    """How they were determined, as text."""
    called: list[bool]
    """True for units that the forward pass of the example called; without an example, for all."""


def measure(
    module: nn.Module, units: Sequence[str], examples: Sequence[Callable[[], Any]]
) -> UnitCosts:
    """Measures the cost of every unit of a model: its part of the time, plus that of the memory.

        cost = seconds / seconds of all units + bytes / bytes of all units

    Without an example that the model can be called with, it is the size of the parameters.

    Args:
        module: on the CPU.
        units: names of submodules, in order.
        examples: functions that return a batch. The model is called with the batch, with its first
            element, or with its entries as keyword arguments.
    """
    modules = [module.get_submodule(name) for name in units]
    parameter_bytes = [float(sum(p.nbytes for p in unit.parameters())) for unit in modules]
    training_modules = [part for part in module.modules() if part.training]
    module.eval()  # so that running statistics stay, and a SyncBatchNorm waits for no other rank

    try:
        with preserve_rng_state():
            measured = _measure_on_examples(module, modules, examples)
    finally:
        for part in training_modules:
            part.training = True

    if measured is None:
        all_called = [True] * len(modules)
        reason = "of parameters: no example to measure with"
        if any(parameter.is_meta for parameter in module.parameters()):
            reason = "of parameters: the model has no values yet to measure with"
        return UnitCosts(parameter_bytes, reason, all_called)

    seconds, activation_bytes = measured

    total_bytes: list[float] = []
    for of_parameters, of_activations in zip(parameter_bytes, activation_bytes, strict=True):
        # Itself, its gradient and two moments of Adam for each parameter.
        total_bytes.append(COPIES_OF_A_PARAMETER * of_parameters + of_activations)

    seconds_of_model = max(sum(seconds), 1e-12)  # never divide by 0
    bytes_of_model = max(sum(total_bytes), 1)

    costs: list[float] = []
    for seconds_of_unit, bytes_of_unit in zip(seconds, total_bytes, strict=True):
        costs.append(seconds_of_unit / seconds_of_model + bytes_of_unit / bytes_of_model)

    called = [seconds_of_unit > 0 for seconds_of_unit in seconds]
    return UnitCosts(costs, "of time and memory, measured on an example", called)


def _measure_on_examples(
    module: nn.Module, units: Sequence[nn.Module], examples: Sequence[Callable[[], Any]]
) -> tuple[list[float], list[int]] | None:
    """Measures units with the first example that the model can be called with.

    Returns:
        The seconds that each unit takes, and the bytes of the activations of each, 0 for those that
        the model does not call; None if the model can be called with none of the examples.
    """
    device = next(module.parameters()).device
    if any(parameter.is_meta for parameter in module.parameters()):
        return None

    for example in examples:
        batch = map_tensors(example(), lambda tensor: tensor.to(device))
        for args, kwargs in _possible_arguments(batch):
            # If the model cannot be called with these arguments, others are tried.
            with suppress(Exception):
                # For each unit that was called, by its number: the bytes of each storage that it
                # keeps for the backward pass.
                kept = saved_activations.measure(module, units, args, kwargs).inside
                activation_bytes: list[int] = []
                for number in range(len(units)):
                    bytes_of_storages = kept.get(number, {})
                    activation_bytes.append(sum(bytes_of_storages.values()))

                seconds = _time_units(module, units, (args, kwargs), device)
                return seconds, activation_bytes

    return None


def _possible_arguments(batch: Any) -> list[Arguments]:
    """Returns the arguments with which a training loop might call the model for a batch."""
    if isinstance(batch, Mapping):
        return [((), dict(batch)), ((batch,), {})]
    if isinstance(batch, list | tuple) and batch:
        return [((batch[0],), {}), (tuple(batch), {}), ((batch,), {})]
    return [((batch,), {})]


def _time_units(
    module: nn.Module, units: Sequence[nn.Module], arguments: Arguments, device: torch.device
) -> list[float]:
    """Returns the seconds of each unit; 0 for a unit that the model does not call.

    A unit is timed when the model calls it first, with the inputs and the autocast of that call.
    """
    seconds_of_unit: dict[int, float] = {}

    def time_first_call(
        number: int, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Times a unit in its first call. It is a forward pre-hook of the unit with this number."""
        if number in seconds_of_unit:
            return
        seconds_of_unit[number] = 0.0  # timing calls the unit, and so this hook, again
        seconds_of_unit[number] = _time_unit(unit, (args, kwargs), device)

    args, kwargs = arguments
    with torch.no_grad(), ExitStack() as stack:
        for number, unit in enumerate(units):
            hook = partial(time_first_call, number)
            stack.enter_context(unit.register_forward_pre_hook(hook, with_kwargs=True))
        module(*args, **kwargs)

    return [seconds_of_unit.get(number, 0.0) for number in range(len(units))]


@torch.enable_grad()
def _time_unit(unit: nn.Module, arguments: Arguments, device: torch.device) -> float:
    """Returns the seconds of one forward and backward pass: the least of several trials."""
    synchronize = partial(torch.get_device_module(device).synchronize, device)
    best = float("inf")
    for _ in range(NUM_TRIALS):
        args, kwargs = pytree.tree_map_only(Tensor, _copy_for_trial, arguments)
        inputs = _tensors_with_gradient(unit.parameters())
        inputs += _tensors_with_gradient(pytree.tree_leaves((args, kwargs)))
        synchronize()  # a GPU may still compute what was started before
        begin = time.perf_counter()
        outputs = _tensors_with_gradient(pytree.tree_leaves(unit(*args, **kwargs)))
        sums = [output.sum() for output in outputs]
        if sums and inputs:  # otherwise there is no backward pass
            torch.autograd.grad(sums, inputs, allow_unused=True)

        synchronize()
        best = min(best, time.perf_counter() - begin)

    return best


def _tensors_with_gradient(leaves: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors that require a gradient."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _copy_for_trial(tensor: Tensor) -> Tensor:
    """Returns a copy with a gradient that is not a leaf: the unit may write to it."""
    detached = tensor.detach()
    if detached.is_floating_point():
        detached.requires_grad_()
    return detached.clone()

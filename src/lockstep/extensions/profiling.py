"""Runs the model at several batch sizes on one rank, to see how fast it is and what fits in memory.

In a real step the forward calls of the user's modules are recorded. They are then repeated with
other numbers of samples, each time with a backward pass, and without other ranks. Afterwards
everything is as before: parameters, buffers, attributes of modules, random streams.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.pytree import map_tensors, tensors
from lockstep.distributed.device import is_out_of_memory
from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import UsageError
from lockstep.strategies.base import may_set_attributes
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.torch_compat import (
    BatchNorm,
    members,
    outside_compiled_code,
    to_local,
)

MAX_TIMED_RUNS = 10
MIN_TIMED_S = 0.03
"""Runs are repeated until they took this long together, or until there were `MAX_TIMED_RUNS`."""
FREE_MEMORY_SHARE = 0.05
"""This share of a GPU's memory is kept free, because free memory is fragmented."""
STATE_VALUES_PER_WEIGHT = 2
"""How many numbers an optimizer such as Adam keeps for each parameter from its first step on."""
_WHY_NO_COLLECTIVES = (
    "the forward pass is tried at several sizes on each rank, to find what is 'auto'"
)


class ForwardCall(NamedTuple):
    """A recorded forward call."""

    module: nn.Module
    """The module that was called."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def record_calls(modules: Iterable[nn.Module]) -> Iterator[list[ForwardCall]]:
    """Records the forward calls with gradients of some modules, while the context is entered.

    The context gives the list of the calls, which grows with each call.
    """
    calls: list[ForwardCall] = []

    @outside_compiled_code
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            calls.append(ForwardCall(module, args, kwargs))

    with ExitStack() as hooks:
        for module in modules:
            # The handle is a context manager, which removes the hook when it is left.
            handle = module.register_forward_pre_hook(record, prepend=True, with_kwargs=True)
            hooks.enter_context(handle)
        yield calls


class ProfilingRun:
    """Repeats recorded calls at other sizes, each time with a backward pass.

    The loss that the user computes from the outputs is not known. It is replaced by one that needs
    as much memory as a cross entropy: it keeps the logarithms of its inputs, and its gradient is a
    new tensor.

    Args:
        run: the run of this process.
        calls: all forward calls before one backward pass.
        num_samples: how many samples they were made with.
        optimizers: those of the user, whose state takes memory, too.

    Raises:
        UsageError: when it computes, if it cannot see which tensors hold the samples.
    """

    def __init__(
        self,
        run: Run,
        calls: Sequence[ForwardCall],
        num_samples: int,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._run = run
        self._optimizers = optimizers
        self._calls = calls
        self._num_samples = num_samples
        self._modules = list(dict.fromkeys(call.module for call in calls))
        self._gpus = gpus_of(run, self._modules)
        self._warmed_up: set[tuple[int, int | None]] = set()
        """Sizes and devices that were computed before, so that caches are filled."""

    def fits(self, samples: int, device: int | None = None) -> bool:
        """Returns True if there is enough memory for this many samples at a time.

        Args:
            samples: how many samples to compute.
            device: the number of a device among those of this process. None for all of them.
        """
        with self._restore_everything():
            try:
                with self._reserve_memory():
                    self._compute(samples, device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                has_enough_memory = False
            else:
                has_enough_memory = True
        if has_enough_memory:
            return True

        # The error is freed when the `except` block is left. Until then its traceback refers to the
        # frames that have asked for the memory, and these refer to their tensors.
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA has not been used
        return False

    def seconds_per_sample(self, samples: int, device: int | None = None) -> float:
        """Returns the time of one sample if this many are computed at a time.

        It is the shortest of several runs, because other programs only make a run slower. The first
        run of a size fills caches, so it is not timed.

        Args:
            samples: how many samples to compute.
            device: the number of a device among those of this process. None for all of them.
        """
        run_times: list[float] = []
        with self._restore_everything():
            if (samples, device) not in self._warmed_up:
                self._compute(samples, device)
                self._warmed_up.add((samples, device))
            while sum(run_times) < MIN_TIMED_S and len(run_times) < MAX_TIMED_RUNS:
                begin = synchronized_time(self._gpus)
                self._compute(samples, device)
                run_times.append(synchronized_time(self._gpus) - begin)
        return min(run_times) / samples

    def _compute(self, samples: int, device: int | None) -> None:
        """Runs the forward passes of all calls, and one backward pass.

        Args:
            samples: how many samples to compute.
            device: the number of a device among those of this process. None for all of them.

        Raises:
            UsageError: there are no calls, or no output or input has a gradient.
        """
        if not self._calls:
            raise UsageError(
                "world.backward(loss)",
                "no forward pass of a prepared model came before it",
                "call what world.prepare returned",
            )

        outputs: list[Tensor] = []

        # The arguments and parameters whose gradients the backward pass computes. They are kept by
        # id, because several calls may share a parameter.
        tensors_with_gradient: dict[int, Tensor] = {}
        for call in self._calls:
            args, kwargs = self._resize(call, samples)
            for tensor in [*tensors((args, kwargs)), *call.module.parameters()]:
                if tensor.requires_grad:
                    tensors_with_gradient[id(tensor)] = tensor
            with _restricted_to(device, call.module):
                outputs += tensors(call.module(*args, **kwargs))

        # The user's loss function is not known here. Its replacement needs as much memory for its
        # backward pass as a cross entropy.
        losses = [_replacement_loss(output) for output in outputs if output.requires_grad]
        if not losses or not tensors_with_gradient:
            raise UsageError(
                "the output of the model",
                "no tensor with a gradient is seen in it",
                "return tensors, or tuples, dicts or dataclasses of them",
            )

        # Unlike `backward()`, this adds nothing to the `grad` of the parameters.
        torch.autograd.grad(losses, list(tensors_with_gradient.values()), allow_unused=True)

    def _resize(self, call: ForwardCall, samples: int) -> Any:
        """Returns the arguments of a call, with tensors that are repeated up to `samples` samples.

        A tensor holds samples if its first dimension (of `nn.DataParallel`: its dimension `dim`)
        has the length of the number of samples that the call was made with.

        Returns:
            A list of the positional arguments and the keyword arguments.

        Raises:
            UsageError: no tensor holds samples.
        """
        module = call.module
        dim = module.dim if isinstance(module, nn.DataParallel) else 0
        arguments = [call.args, call.kwargs]
        if not any(self._holds_samples(tensor, dim) for tensor in tensors(arguments)):
            which = f"dimension {dim}" if dim else "first dimension"
            raise UsageError(
                f"a call of {type(module).__name__} with {self._num_samples} samples",
                f"no tensor among its arguments has {self._num_samples} as its {which}",
                "give the model tensors with one row a sample",
            )
        return map_tensors(arguments, partial(self._repeat_samples, dim=dim, samples=samples))

    def _holds_samples(self, tensor: Tensor, dim: int) -> bool:
        """Returns True if a dimension of a tensor is as long as the recorded number of samples."""
        has_dim = -tensor.dim() <= dim < tensor.dim()  # `dim` may be negative
        return has_dim and tensor.shape[dim] == self._num_samples

    def _repeat_samples(self, tensor: Tensor, dim: int, samples: int) -> Tensor:
        """Returns a new leaf of the graph with another number of samples.

        A tensor that holds no samples gets the same values.

        Args:
            tensor: an argument of a call.
            dim: the dimension of the samples.
            samples: how many samples the result has.
        """
        resized = tensor.detach()
        if self._holds_samples(tensor, dim):
            # For 5 samples of 2: 0, 1, 0, 1, 0.
            indices = torch.arange(samples, device=tensor.device) % self._num_samples
            resized = resized.index_select(dim, indices)
        return resized.requires_grad_(tensor.requires_grad)

    @contextmanager
    def _reserve_memory(self) -> Iterator[None]:
        """Holds as much memory of each GPU as the optimizers' state will still take, and a margin.

        In training the state takes memory, too, but it may not exist yet.
        """
        reserved: list[Tensor] = []
        try:
            for gpu in self._gpus:
                _, total_memory = torch.cuda.mem_get_info(gpu)
                margin = int(FREE_MEMORY_SHARE * total_memory)
                num_bytes = self._missing_state_bytes(gpu) + margin
                reserved.append(torch.empty(num_bytes, dtype=torch.uint8, device=gpu))
            yield
        finally:
            reserved.clear()  # frees them

    def _missing_state_bytes(self, device: torch.device) -> int:
        """Returns how many bytes of the optimizers' state on a device do not exist yet.

        State is made by the first step, or by a checkpoint that is resumed. It is kept where the
        parameters are. A parameter without an optimizer may get one later.
        """
        parameters: dict[int, nn.Parameter] = {}  # by id: modules may share parameters
        for module in self._modules:
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.device == device:
                    parameters[id(parameter)] = parameter

        missing = 0
        states = _states_by_parameter(self._optimizers)
        state_without_optimizer = _OptimizerState(STATE_VALUES_PER_WEIGHT, existing_bytes=0)
        for parameter_id, parameter in parameters.items():
            state = states.get(parameter_id, state_without_optimizer)
            needed_bytes = state.values_per_weight * to_local(parameter).nbytes
            missing += max(needed_bytes - state.existing_bytes, 0)
        return missing

    @contextmanager
    def _restore_everything(self) -> Iterator[None]:
        """Restores modules and random streams when the context is left.

        Meanwhile collectives are refused, because each rank computes alone, and BatchNorm that is
        synchronised over the ranks computes statistics of this rank's samples only.
        """
        collectives = self._run.collectives
        layers: list[nn.Module] = []
        for module in self._modules:
            layers += module.modules()
        layers = list(dict.fromkeys(layers))  # modules may share layers
        synchronised = [layer for layer in layers if _communicates(layer)]

        # These dictionaries get their present entries back when the context is left.
        dictionaries: list[dict[str, Any]] = []

        # Attributes that layers set in their forward pass: an activation that stays in one would
        # keep the memory of the largest size that is tried.
        for layer in layers:
            if may_set_attributes(layer):
                dictionaries.append(vars(layer))

        # The attribute `forward` of the synchronised layers, which is set below.
        for layer in synchronised:
            if not may_set_attributes(layer):
                dictionaries.append(vars(layer))

        # The buffers of each layer, by name. The buffers also get their values back.
        buffers: list[Tensor] = []
        for layer in layers:
            buffers_by_name: dict[str, Any] = members(layer).buffers
            dictionaries.append(buffers_by_name)
            buffers += [buffer for buffer in buffers_by_name.values() if buffer is not None]

        contents = [(dictionary, dict(dictionary)) for dictionary in dictionaries]
        with (
            restored(contents, buffers, self._gpus),
            torch.enable_grad(),
            collectives.blocked_because(_WHY_NO_COLLECTIVES),
        ):
            for layer in synchronised:
                # An attribute of the layer hides the method of its class. It is bound to the
                # layer, and removed with the other new entries of `vars(layer)`.
                forward_of_one_rank = BatchNorm.forward.__get__(layer)
                layer.forward = forward_of_one_rank
            yield


class _OptimizerState(NamedTuple):
    """What an optimizer keeps for a parameter."""

    values_per_weight: int
    """How many values it keeps for each weight from its first step on."""
    existing_bytes: int
    """How many bytes of these exist already."""


def _states_by_parameter(optimizers: Iterable[Optimizer]) -> dict[int, _OptimizerState]:
    """Returns what optimizers keep for each parameter, and will keep, by the parameter's id."""
    states: dict[int, _OptimizerState] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # Before the first step there is no state to count. Most optimizers will keep as many
            # values as Adam.
            values_per_weight = STATE_VALUES_PER_WEIGHT
            if type(optimizer) is torch.optim.SGD:
                values_per_weight = 1 if group["momentum"] else 0

            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                existing_bytes = sum(to_local(tensor).nbytes for tensor in tensors(state))
                states[id(parameter)] = _OptimizerState(values_per_weight, existing_bytes)
    return states


def _communicates(layer: nn.Module) -> bool:
    """Returns True for a BatchNorm that is synchronised over the ranks."""
    # A layer with replicas in this process has got a `forward` as an attribute, which joins the
    # statistics of the replicas. It communicates with no other rank.
    has_own_forward = "forward" in vars(layer)
    return isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) and not has_own_forward


def _restricted_to(device: int | None, module: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which only one device of this process computes the calls of a module.

    Args:
        device: the number of the device among those of this process. None for all of them.
        module: the module. One without replicas has a single device.
    """
    if device is not None and isinstance(module, DataParallel):
        return module.only_on(device)
    return nullcontext()


def _replacement_loss(output: Tensor) -> Tensor:
    """Returns a number that needs as much memory for its backward pass as a cross entropy."""
    real = torch.view_as_real(output) if output.is_complex() else output
    if real.dim() == 0:
        return real
    return real.log_softmax(-1).square().sum()


@contextmanager
def restored(
    dictionaries: Sequence[tuple[dict[Any, Any], dict[Any, Any]]],
    values: Iterable[Tensor],
    gpus: Sequence[torch.device],
) -> Iterator[None]:
    """Restores dictionaries, the values of tensors, and random streams at the end.

    Args:
        dictionaries: pairs `(dictionary, copy)`. At the end, the dictionary gets exactly the
            entries of the copy.
        values: tensors. They are written to in place, because other objects refer to them.
        gpus: the GPUs whose random streams are used.
    """
    # The copies are on the CPU, so that they do not add to the memory of a GPU that is measured.
    copies = [(tensor, to_local(tensor).to("cpu", copy=True)) for tensor in values]
    preserve_streams_of_gpus = torch.random.fork_rng(gpus, enabled=bool(gpus))
    with preserve_rng_state(), preserve_streams_of_gpus:  # the first: those of the CPU
        try:
            yield
        finally:
            for dictionary, earlier_content in dictionaries:
                dictionary.clear()
                dictionary.update(earlier_content)
            with torch.no_grad():
                for tensor, value in copies:
                    to_local(tensor).copy_(value)


def gpus_of(run: Run, modules: Iterable[nn.Module]) -> list[torch.device]:
    """Returns all GPUs that some modules compute on: the device of the run, if it is one, first."""
    devices = {run.device: None}  # a dict, because it keeps the order
    for module in modules:
        devices |= dict.fromkeys(parameter.device for parameter in module.parameters())
        if isinstance(module, DataParallel):
            devices |= dict.fromkeys(module.devices)
    return [device for device in devices if device.type == "cuda"]


def synchronized_time(gpus: Iterable[torch.device]) -> float:
    """Waits until GPUs have finished their work, and returns the seconds of a clock."""
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter()

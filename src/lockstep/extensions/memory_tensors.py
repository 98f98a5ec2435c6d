"""Counts the memory of tensors: of models, of optimizers, and of what a forward pass keeps.

Memory is counted by storages, so that views of one storage count once. Torch's hooks and modes
belong to the thread that has entered them, but replicas of a model run in threads of their own.
`around_calls` enters a context in the thread of each replica.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lockstep.batch.pytree import tensors
from lockstep.communication import routing
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.torch_compat import (
    TorchDispatchMode,
    outside_compiled_code,
    pytree,
    to_local,
)
from lockstep.training.optimizer import PreparedOptimizer


def storages(tensors: Iterable[Tensor]) -> set[torch.UntypedStorage]:
    """Returns the storages of dense tensors. For a DTensor it is the storage of this rank's shard.

    Torch returns the same object for a storage as long as it is referred to, so that a set has each
    storage once.
    """
    found: set[torch.UntypedStorage] = set()
    for tensor in tensors:
        local = to_local(tensor)
        has_storage = local.layout is torch.strided and local.device.type != "meta"
        if has_storage:
            found.add(local.untyped_storage())
    return found


def bytes_by_device(storages: Iterable[torch.UntypedStorage]) -> Counter[torch.device]:
    """Returns the bytes of storages by the device that they are on."""
    sizes: Counter[torch.device] = Counter()
    for storage in storages:
        sizes[storage.device] += storage.nbytes()
    return sizes


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors of an optimizer's state.

    Tensors without dimensions, such as step counters, are left out: they may be on the CPU.
    """
    leaves = pytree.tree_leaves(list(optimizer.state.values()))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]


def state_bytes(optimizer: Optimizer) -> dict[torch.device, int] | None:
    """Returns the bytes of an optimizer's state by device, also before its first step.

    Before the first step, a copy of the optimizer makes a step with parameters of the same shapes
    on torch's meta device, which have no data. That shows what state it makes.

    Returns:
        None if the optimizer cannot make such a step. LBFGS, for example, needs data.
    """
    inner = optimizer.inner if isinstance(optimizer, PreparedOptimizer) else optimizer
    if inner.state:  # it has stepped
        return bytes_by_device(storages(state_tensors(inner)))

    meta_optimizer, device_of_meta_parameter = _copy_on_meta(inner)

    # Torch wraps the method `step` of an optimizer's class in a function that calls hooks. They
    # must not see this step, so the wrapped method is called instead.
    step_with_hooks: Any = type(inner).step
    step_without_hooks = getattr(step_with_hooks, "__wrapped__", step_with_hooks)
    try:
        step_without_hooks(meta_optimizer)
    except Exception:  # whatever the optimizer raises without data
        return None

    sizes: Counter[torch.device] = Counter()
    for meta_parameter, device in device_of_meta_parameter.items():
        num_bytes = 0
        for value in meta_optimizer.state.get(meta_parameter, {}).values():
            # Scalars are step counters, which are not counted, as in `state_tensors`.
            if isinstance(value, Tensor) and value.dim() > 0:
                num_bytes += value.nbytes
        sizes[device] += num_bytes
    return sizes


def _copy_on_meta(optimizer: Optimizer) -> tuple[Any, dict[nn.Parameter, torch.device]]:
    """Returns a copy of an optimizer, without its state, with parameters on the meta device.

    Parameters that are not trained are left out, as an optimizer keeps no state for them.

    Returns:
        The copy; and for each of its parameters the device of the parameter that it stands for.
    """
    meta_optimizer: Any = copy(optimizer)
    meta_optimizer.state = _empty_state_like(optimizer.state)
    meta_optimizer.param_groups = []
    device_of_meta_parameter: dict[nn.Parameter, torch.device] = {}
    for group in optimizer.param_groups:
        meta_parameters: list[nn.Parameter] = []
        for parameter in group["params"]:
            if parameter.requires_grad:
                meta_parameter = _on_meta(parameter)
                meta_parameters.append(meta_parameter)
                device_of_meta_parameter[meta_parameter] = parameter.device

        meta_group = {**group, "params": meta_parameters}
        # These options choose implementations that do not work on the meta device.
        for option in ("foreach", "fused", "capturable"):
            if option in meta_group:
                meta_group[option] = False
        meta_optimizer.param_groups.append(meta_group)
    return meta_optimizer, device_of_meta_parameter


def _empty_state_like(state: Any) -> Any:
    """Returns an empty dictionary of the same class, whose missing entries are `{}` when read.

    The class is `defaultdict`, or a subclass that the optimizer has chosen.
    """
    return type(state)(dict)


def _on_meta(parameter: Tensor) -> nn.Parameter:
    """Returns a parameter on the meta device, with a gradient; of a DTensor, for its shard."""
    local = to_local(parameter)
    meta_parameter = nn.Parameter(torch.empty_like(local, device="meta"))
    meta_parameter.grad = torch.empty_like(local, device="meta")
    return meta_parameter


class SavedTensors:
    """Collects the storages that autograd keeps of forward passes for the backward pass.

    `torch.autograd.graph.saved_tensors_hooks` passes on each tensor that an operation saves (see
    the tutorial "Hooks for autograd saved tensors"). A storage whose memory was freed since has no
    bytes when it is counted: FSDP frees gathered parameters.

    Args:
        arguments: of the forward pass. If they are views of a larger tensor, as a replica's part
            of a batch is, only their own bytes count.
    """

    def __init__(self, arguments: Any = ()) -> None:
        self._saved: set[torch.UntypedStorage] = set()
        """The storages of the tensors that autograd has saved."""
        self._argument_bytes: Counter[torch.UntypedStorage] = Counter()
        """How many bytes of each storage belong to arguments."""
        for tensor in tensors(arguments):
            for storage in storages([tensor]):
                self._argument_bytes[storage] += tensor.nbytes

    def watch(self) -> saved_tensors_hooks:
        """Returns a context for a forward pass, to be entered in the thread that makes it."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def count_and_add_to(self, counted: set[torch.UntypedStorage]) -> Counter[torch.device]:
        """Returns the bytes of the saved tensors by device, and notes that they were counted.

        For example, a batch of 100 bytes is divided over four replicas. For each of them 25 bytes
        count, though all four have the storage of the whole batch. The weights, which all of them
        have saved, count once.

        Args:
            counted: storages that were counted elsewhere, which are left out here. The storages
                that are counted now are added to this set, except those of arguments.
        """
        new_storages = self._saved - self._argument_bytes.keys() - counted
        counted.update(new_storages)
        return self._bytes_of_saved_arguments() + bytes_by_device(new_storages)

    def _bytes_of_saved_arguments(self) -> Counter[torch.device]:
        """Returns the bytes of the saved arguments of the forward pass, without other parts of
        their storages.
        """
        sizes: Counter[torch.device] = Counter()
        for storage in self._saved & self._argument_bytes.keys():
            sizes[storage.device] += min(storage.nbytes(), self._argument_bytes[storage])
        return sizes

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.update(storages([tensor]))
        # An output that is saved as it is would keep its own graph alive, in a circle.
        return tensor.detach()


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures how many bytes of CPU tensors are alive in a step, and the peak.

    It must be entered around a step, in each thread of it. Torch calls it with the arguments and
    results of every operation; their storages count from then on until they are freed. Memory that
    a kernel allocates and frees within one operation is not seen. The shared memory of all ranks is
    not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        shared = routing.shared_memory()
        self._address_of_shared_memory = None if shared is None else shared.address
        self._lock = threading.RLock()
        self._sizes: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        """The sizes of storages when they were last seen, by storage."""
        self._upper_bound = 0
        """At least the bytes alive. What was freed since `total` was last computed is still in it,
        so that `total` is only computed when the bound exceeds the peak."""

    @property
    def total(self) -> int:
        """The bytes alive now. FSDP may have freed the memory of a storage that still exists."""
        total = 0
        for storage in self._sizes:
            # In torch 2.9 the Python object may exist a little longer than the storage.
            with suppress(RuntimeError):
                total += storage.nbytes()
        return total

    def count(self, alive: Iterable[torch.UntypedStorage]) -> None:
        """Counts storages that are alive, and raises `peak` if more bytes are alive than before.

        To add up the sizes of all storages is slow. So an upper bound of the sum is kept: it grows
        with each new byte, and does not become smaller when storages are freed or shrink. Only if
        the bound exceeds the peak, the exact sum is computed, and becomes the new bound. Example:

                                  exact sum   upper bound   peak
            at first              10          10            10
            4 bytes are freed     6           10            10
            3 bytes are new       9           13            10
            13 is more than 10    9           9             10
        """
        with self._lock:
            for storage in alive:
                if storage.device.type != "cpu":
                    continue

                # This is the shared memory through which the ranks of a machine exchange data. Its
                # size does not depend on the model.
                if storage.data_ptr() == self._address_of_shared_memory:
                    continue

                num_bytes = storage.nbytes()
                size_before = self._sizes.get(storage, 0)  # 0: it was not seen before
                num_new_bytes = max(0, num_bytes - size_before)
                self._upper_bound += num_new_bytes
                self._sizes[storage] = num_bytes  # a freed storage leaves this weak dictionary

            may_be_new_peak = self._upper_bound > self.peak
            if may_be_new_peak:
                exact_sum = self.total  # adds up all sizes
                self._upper_bound = exact_sum
                self.peak = max(self.peak, exact_sum)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        self.count(storages(t for t in leaves if isinstance(t, Tensor)))
        return result


class _EnteredContexts(threading.local):
    """The contexts that a thread has entered, the outermost first. Each thread has its own list.

    There may be several, because a model may call itself in its forward pass.
    """

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


@contextmanager
def around_calls(
    model: nn.Module, make_context: Callable[[Any], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Enters a context around every call of a model, or of each of its replicas.

    Args:
        model: the model.
        make_context: returns the context for the arguments of a call. It is entered in the thread
            that makes the call.
    """
    module = model.module if isinstance(model, DataParallel) else model
    entered = _EnteredContexts()  # a list for each thread

    @outside_compiled_code
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        context = make_context((args, kwargs))
        context.__enter__()
        entered.contexts.append(context)

    @outside_compiled_code
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.contexts.pop().__exit__(None, None, None)

    # The handle of a hook is a context manager, which removes the hook when it is left.
    hook_before = module.register_forward_pre_hook(enter, with_kwargs=True)
    hook_after = module.register_forward_hook(leave, always_call=True)
    with hook_before, hook_after:
        yield

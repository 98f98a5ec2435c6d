"""Whose memory: what a forward pass keeps for the backward pass, and what tensors are alive.

Both look at storages, so that views are counted once, and both can look into several threads:
torch's hooks and modes are those of the thread that entered them, and replicas run in threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.distributed.torch_compat import TorchDispatchMode, pytree


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, where it is spread over the ranks."""
    tensor = tensor.detach()
    # By its method: the import of DTensor takes long, and where there is one it has been made.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of dense tensors, each once. While one is held, its number is its own."""
    found = {}
    for tensor in tensors:
        own = local(tensor)
        if own.layout is torch.strided and own.device.type != "meta":
            storage = own.untyped_storage()
            found[storage._cdata] = storage
    return found


def bytes_by_device(held: Iterable[torch.UntypedStorage]) -> dict[torch.device, int]:
    """The bytes of storages that are held, by the device they are on."""
    sizes: dict[torch.device, int] = {}
    for storage in held:
        sizes[storage.device] = sizes.get(storage.device, 0) + storage.nbytes()
    return sizes


class SavedTensors:
    """What autograd keeps of forward passes for the backward pass, once per storage.

    torch hands out each tensor that an operation saves (`torch.autograd.graph.saved_tensors_hooks`,
    see the tutorial "Hooks for autograd saved tensors"). A storage that was given back since, as
    FSDP does with gathered parameters, has no bytes when it is counted.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.UntypedStorage] = {}

    def watch(self) -> saved_tensors_hooks:
        """To be entered around a forward pass, in the thread that makes it."""
        return saved_tensors_hooks(self._pack, _unpack)

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """All that were saved; by number, as `storages` gives them."""
        return dict(self._kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._kept.update(storages([tensor]))
        return tensor.detach()  # an output that is kept as it is would keep itself


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class LiveTensors:
    """The bytes of the tensors alive on the CPU that a step has touched, and the most at any time.

    Every operation says what it takes and makes; a storage counts from then until it is freed.
    Memory that a kernel takes for itself and gives back before it returns is not seen.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._total = 0
        self.peak = 0

    def hold(self, held: Iterable[torch.UntypedStorage]) -> None:
        """Counts storages that are there before the step."""
        for storage in held:
            self._count(storage)

    def watch(self) -> AbstractContextManager[Any]:
        """To be entered around a step, in each of its threads."""
        return _Operations(self)

    def see(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor that exists."""
        self.hold(storages([tensor]).values())

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu":
            return
        number = storage._cdata
        with self._lock:
            reference, size = self._alive.get(number, (None, 0))
            if reference is None or reference() is not storage:
                reference = weakref.ref(storage, self._forget(number))
            now = storage.nbytes()
            self._alive[number] = reference, now
            self._total += now - size
            if self._total > self.peak:
                self._recount()

    def _forget(self, number: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            with self._lock:
                if self._alive.get(number, (None, 0))[0] is reference:
                    self._total -= self._alive.pop(number)[1]

        return forget

    def _recount(self) -> None:
        """Storages may have been made smaller since (FSDP does that): asked before a new peak."""
        total = 0
        for number, (reference, _) in list(self._alive.items()):
            storage = reference()
            size = 0 if storage is None else storage.nbytes()
            if number in self._alive:
                self._alive[number] = reference, size
                total += size
        self._total = total
        self.peak = max(self.peak, total)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation of a thread to `LiveTensors`."""

    def __init__(self, live: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._live.see(leaf)
        return result


@contextmanager
def around_calls(
    module: nn.Module, make: Callable[[Any], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Enters `make(arguments)` around every call of a module, in the thread that calls it."""
    entered = threading.local()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        context = make((args, kwargs))
        context.__enter__()
        entered.contexts = [*getattr(entered, "contexts", ()), context]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.contexts.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""Made-up GPUs: a step runs on the CPU, and every call that would wait for a GPU is written down.

`MadeUpGpu` is a mode in which every call of torch's Python API is seen. It keeps for each storage
whether it would be in the memory of a GPU or of the host, and tells Lockstep and the test that
tensors of the first kind are on `cuda:0`, or on the GPU to which they were moved. Torch's own code
is told the truth, so it computes on the CPU. Arithmetic with tensors of two GPUs raises an error,
as it does in torch. Streams and events of `torch.cuda` are made up: what is recorded in a step is
done two steps later, as on a GPU that is behind.

What cannot be seen here is what torch's kernels for CUDA do themselves, and what happens in another
thread. The stage `syncs` of `benchmarks/gpu` asks torch on a real GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import lockstep
from lockstep.strategies import fsdp, fused_batchnorm

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
LOCKSTEP = str(Path(lockstep.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
STEPS_BEHIND = 2

READS = {
    *("item", "tolist", "numpy", "__array__", "cpu", "nonzero", "argwhere", "is_nonzero", "unique"),
    *("__bool__", "__float__", "__int__", "__index__", "__contains__", "equal", "allclose"),
    *("masked_select", "repeat_interleave", "bincount"),
}
"""Functions that wait for the GPU if one of their tensors is there."""
NEED_ONE_DEVICE = {
    *("add", "add_", "__add__", "__iadd__", "mul", "mul_", "__mul__", "__imul__", "linear"),
    *("matmul", "cat", "stack", "index_add_", "__getitem__", "__setitem__"),
}
"""Functions whose tensors must not be on several GPUs. In torch these are most functions."""


class MadeUpGpu(TorchFunctionMode):
    """While it is active tensors may be on the made-up GPU, and waits for it are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """How often each place waited for the GPU: file and function of Lockstep's."""
        self.num_steps = 0
        self._device_of_storage: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        """A storage that is not here was made by C++: on the first GPU. The weak reference keeps
        the number of a storage from being used again."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        frame = sys._getframe(1)
        from_torch = frame.f_code.co_filename.startswith(TORCH)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return self._attribute(func, args, from_torch)
        if name == "pin_memory":
            return args[0]
        if func is torch.device or name == "_parse_to":  # makes a device of what it is given
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)

        devices = [leaf for leaf in tree_leaves((args, kwargs)) if _is_device(leaf)]
        target = torch.device(devices[0]) if devices else None
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [self.is_on_gpu(tensor) for tensor in inputs]
        gpus = {self.device_of(tensor) for tensor in inputs if tensor.dim()} - {CPU}
        if len(gpus) > 1 and name in NEED_ONE_DEVICE:
            raise RuntimeError(f"Expected all tensors to be on the same device, found {gpus}")
        if self._waits(name, args, kwargs, target, on_gpu, from_torch):
            self.note(frame)
        if target is not None and target.type == "cuda":
            args, kwargs = tree_map(_on_cpu, (args, kwargs))
        result = func(*args, **kwargs)

        is_moved = target is not None and (target.type == "cuda" or not from_torch)
        if name in ("cpu", "numpy"):
            device_of_result = CPU
        elif is_moved:
            assert target is not None
            device_of_result = _with_index(target)
        elif inputs:
            on_gpus = [tensor for tensor in inputs if self.is_on_gpu(tensor)]
            device_of_result = self.device_of(on_gpus[0]) if on_gpus else CPU
        else:
            # Torch has made it on the device of a tensor, of which it was told that it is the CPU.
            # Where it means the CPU it writes device="cpu".
            is_of_tensor = target is not None and not isinstance(devices[0], str)
            device_of_result = GPU if is_of_tensor else CPU
        is_copied = bool(inputs) and self.device_of(inputs[0]) != device_of_result
        if isinstance(result, Tensor) and is_copied:
            if result is inputs[0] or result.data_ptr() == inputs[0].data_ptr():
                result = result.clone()  # else both would be where one is
        was_given = {id(tensor) for tensor in inputs}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in was_given:
                self.put(leaf, device_of_result)
        return result

    def _waits(
        self,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        target: torch.device | None,
        on_gpu: list[bool],
        from_torch: bool,
    ) -> bool:
        """Returns True if a call would wait for the GPU."""
        non_blocking = bool(kwargs.get("non_blocking"))
        if name in READS:
            return any(on_gpu)
        if name == "_foreach_copy_":
            num_pairs = len(on_gpu) // 2
            return on_gpu[:num_pairs] != on_gpu[num_pairs:] and not non_blocking
        if name == "copy_":
            non_blocking = non_blocking or (len(args) > 2 and bool(args[2]))
            return len(on_gpu) == 2 and on_gpu[0] != on_gpu[1] and not non_blocking
        if name in ("to", "cuda", "type"):
            if target is None or (from_torch and target.type == "cpu") or not on_gpu:
                return False  # torch has asked a tensor for its device, and was told the CPU
            return on_gpu[0] != (target.type == "cuda") and not non_blocking
        if name in ("tensor", "as_tensor"):
            return target is not None and target.type == "cuda" and not any(on_gpu)
        if name in ("__getitem__", "__setitem__", "index_select", "index_add_", "index_copy_"):
            index = args[1]
            has_list = any(isinstance(part, list) for part in _parts(index))
            has_mask = any(
                isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
                for part in _parts(index)
            )
            return on_gpu[0] and (has_list or has_mask or not all(on_gpu))
        return False

    def _attribute(self, func: Callable[..., Any], args: Any, from_torch: bool) -> Any:
        """Returns an attribute of a tensor, where a lie may be needed."""
        tensor = args[0]
        attribute = getattr(func, "__self__", None)
        if attribute in (torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.is_cpu):
            truth = func(*args)
            if from_torch or not self.is_on_gpu(tensor):
                return truth
            of_gpu = {torch.Tensor.device: self.device_of(tensor), torch.Tensor.is_cuda: True}
            return of_gpu.get(attribute, False)
        result = func(*args)
        if isinstance(result, Tensor):
            # A gradient that was made by C++ is where its parameter is.
            if attribute is not torch.Tensor.grad or not self._is_known(result):
                self.put(result, self.device_of(tensor))
        return result

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Returns True if a tensor would be on a GPU."""
        return self.device_of(tensor).type == "cuda"

    def device_of(self, tensor: Tensor) -> torch.device:
        """Returns the device on which a tensor would be."""
        with torch._C.DisableTorchFunction():
            storage = _storage(tensor)
            known = None if storage is None else self._device_of_storage.get(storage._cdata)
        return GPU if known is None else known[1]

    def _is_known(self, tensor: Tensor) -> bool:
        """Returns True if it was noted where a tensor would be."""
        with torch._C.DisableTorchFunction():
            storage = _storage(tensor)
            return storage is None or storage._cdata in self._device_of_storage

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Notes where a tensor would be."""
        with torch._C.DisableTorchFunction():
            storage = _storage(tensor)
            if storage is not None:
                self._device_of_storage[storage._cdata] = StorageWeakRef(storage), device

    def note(self, frame: FrameType | None) -> None:
        """Counts a wait, by the innermost function of Lockstep's that led to it."""
        place = "the loop"
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(LOCKSTEP):
                place = f"{path[len(LOCKSTEP) + 1 :]} {frame.f_code.co_name}"
                break
            frame = frame.f_back
        self.waits[place] += 1

    def begin(self) -> None:
        """Begins to count anew, in step 0."""
        self.waits.clear()
        self.num_steps = 0


def _storage(tensor: Tensor) -> Any:
    """The storage of a tensor, of a DTensor that of this rank's part; None if it has none."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _with_index(device: torch.device) -> torch.device:
    """Returns the first GPU for `cuda`, and any other device as it is."""
    return GPU if device == torch.device("cuda") else device


def _is_device(leaf: Any) -> bool:
    if isinstance(leaf, str):
        return leaf.partition(":")[0] in ("cuda", "cpu")
    return isinstance(leaf, torch.device)


def _on_cpu(leaf: Any) -> Any:
    return CPU if _is_device(leaf) else leaf


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


class Event:
    """Is reached two steps after it was recorded."""

    def __init__(self, gpu: MadeUpGpu) -> None:
        self._gpu = gpu
        self._recorded_at = 0

    def record(self, stream: Any = None) -> None:
        self._recorded_at = self._gpu.num_steps

    def query(self) -> bool:
        return self._gpu.num_steps >= self._recorded_at + STEPS_BEHIND

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        if not self.query():
            self._gpu.note(sys._getframe(1))


class Stream:
    """Waits for nothing unless the host does."""

    def __init__(self, gpu: MadeUpGpu) -> None:
        self._gpu = gpu

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> Event:
        event = Event(self._gpu)
        event.record()
        return event

    def synchronize(self) -> None:
        self._gpu.note(sys._getframe(1))


def make_up_gpu(patch: Callable[[Any, str, Any], None], count: int = 1) -> MadeUpGpu:
    """Replaces `torch.cuda` and what asks for a real GPU in this process.

    Args:
        patch: sets an attribute of an object, such as `MonkeyPatch.setattr`.
        count: number of GPUs.

    Returns:
        The mode, to be entered for all of the training.
    """
    gpu = MadeUpGpu()

    @contextlib.contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    returned: dict[str, Any] = {
        "is_available": True,
        "init": None,
        "is_initialized": False,
        "device_count": count,
        "current_device": 0,
        "is_bf16_supported": True,
        "set_device": None,
        "empty_cache": None,
        "manual_seed": None,
        "is_current_stream_capturing": False,
        "max_memory_allocated": 0,
        "get_device_name": "a made-up GPU",
        "get_device_properties": SimpleNamespace(name="a made-up GPU", uuid="0"),
        "get_device_capability": (9, 0),
    }
    for name, value in returned.items():
        patch(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    patch(torch.cuda, "get_rng_state", lambda *args: torch.zeros(16, dtype=torch.uint8))
    patch(torch.cuda, "set_rng_state", lambda *args: None)
    patch(torch.cuda, "Event", lambda *args, **kwargs: Event(gpu))
    patch(torch.cuda, "Stream", lambda *args, **kwargs: Stream(gpu))
    patch(torch.cuda, "current_stream", lambda *args: Stream(gpu))
    patch(torch.Tensor, "record_stream", lambda *args: None)
    plain_from_numpy = torch.from_numpy

    def from_numpy(array: Any) -> Tensor:
        tensor = plain_from_numpy(array)  # which no mode sees
        gpu.put(tensor, CPU)
        return tensor

    patch(torch, "from_numpy", from_numpy)
    patch(torch.cuda, "stream", nothing)
    patch(torch.cuda, "device", nothing)
    patch(torch.cuda, "synchronize", lambda *args: gpu.note(sys._getframe(1)))

    patch(
        torch.futures.Future,
        "__init__",
        lambda future, *, devices=None: torch._C.Future.__init__(future, []),
    )

    # Collectives take tensors on the GPU, as those of NCCL do; Gloo sums up the CPU tensors.
    patch(dist, "get_backend_config", lambda *args: "cpu:gloo,cuda:nccl")
    plain_init = DistributedDataParallel.__init__

    def init(module: Any, *args: Any, device_ids: Any = None, **kwargs: Any) -> None:
        plain_init(module, *args, **kwargs)  # which sees that the module is on the CPU

    patch(DistributedDataParallel, "__init__", init)

    plain_from_group = DeviceMesh.from_group
    patch(
        DeviceMesh,
        "from_group",
        lambda groups, kind, *args, **more: plain_from_group(groups, "cpu", *args, **more),
    )
    # The mesh says that it is on the CPU.
    plain_norm = fsdp.norm_over_ranks
    patch(
        fsdp,
        "norm_over_ranks",
        lambda tensors, norm_type, device, *args, **more: plain_norm(
            tensors, norm_type, GPU, *args, **more
        ),
    )
    plain_backward = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with gpu:  # a mode is off in a function that it sees, such as torch.autograd.backward
            return plain_backward(*args, **kwargs)

    patch(torch.autograd, "_engine_run_backward", run_backward)
    # Its kernels are there for CUDA alone.
    patch(fused_batchnorm, "supports", lambda x: False)
    return gpu

"""Every private name of torch's that Lockstep uses, and nothing else.

Sections: classes without a public name, the compiler, DDP, FSDP, modules and autograd, optimizers,
state dicts, workers of a DataLoader, stores, process groups and their Flight Recorder, launching
ranks. Each name was read in torch 2.11, 2.13 and 2.14, where nothing else is said;
`tests/distributed/test_torch_compat.py` tells when one of them changes.

The launcher uses this module too, so torch is imported where it is needed, not at the top.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from lockstep.errors import SettingError

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor, nn
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.modules import batchnorm, dropout
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNorm: TypeAlias = batchnorm._BatchNorm
    NormBase: TypeAlias = batchnorm._NormBase
    DropoutNd: TypeAlias = dropout._DropoutNd
    pytree = _pytree

P = ParamSpec("P")
T = TypeVar("T")

# Classes and modules without a public name

_NAMES = {
    "BatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    "DisableTorchFunctionSubclass": ("torch._C", "DisableTorchFunctionSubclass"),
    "DropoutNd": ("torch.nn.modules.dropout", "_DropoutNd"),
    "NormBase": ("torch.nn.modules.batchnorm", "_NormBase"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "pytree": ("torch.utils", "_pytree"),
}
"""Classes and modules that torch has no public name for: where they are, and what they are called.
The base classes of its BatchNorm, norm and dropout layers, its pytree, its dispatch mode, and the
context in which subclasses of Tensor are asked nothing (named in torch's "Extending PyTorch")."""


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


# The compiler

COMPILED_CHILD_NAME = "_orig_mod"
"""The name of the original module in the one that `torch.compile` returns, and so a part of the
names of its weights."""


def never_compiled(function: Callable[P, T], *, recursive: bool = False) -> Callable[P, T]:
    """Torch's compiler leaves this function alone.

    With `recursive` also all that it calls, which is compiled otherwise.

    `torch.compiler.disable` would load the compiler, which takes a second, at once.
    """
    import torch

    disable: Any = getattr(torch, "_disable_dynamo")  # noqa: B009 - not exported
    made: Callable[P, T] = disable(function, recursive=recursive)
    return made


def run_as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Torch's compiler runs this function as it is and compiles each function that it calls.

    In a function that is compiled as a whole it is traced with the rest, where `never_compiled`
    would end the graph. Torch marks its own functions so (`torch._dynamo.eval_frame.skip_code`);
    the mark is set without loading the compiler.
    """
    from torch._C._dynamo import eval_frame

    frame: Any = eval_frame
    mark = frame._FrameExecStrategy(frame._FrameAction.SKIP, frame._FrameAction.DEFAULT)
    frame.set_code_exec_strategy(function.__code__, mark)
    return function


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled in this process."""
    return "torch._dynamo" in sys.modules


def outside_compiled_code(function: Callable[P, T]) -> Callable[P, T]:
    """A function that torch's compiler does not trace, nor what it calls: a hook of a module.

    `torch.compile(model)` and `model.compile()` call hooks as they are and compile the forward pass
    between them. A hook would be compiled apart from it: graph breaks where it looks at what a
    graph does not have (`grad_fn`), and another compilation whenever a number that it has read
    changes. Torch leaves the hooks of `fully_shard` out in the same way.

    Where the compiler is not loaded, the function does not load it.
    """
    uncompiled = never_compiled(function, recursive=True)

    @run_as_it_is
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if compiler_is_loaded():
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


# DDP


def enclosing_ddp() -> DistributedDataParallel | None:
    """The DDP module in whose forward pass this is called."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def await_another_backward(module: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Lets DDP average the gradients of one more backward pass of the same forward passes.

    Torch does this at the end of each forward pass (`DistributedDataParallel._post_forward`). Where
    gradients are awaited still, the next backward pass is to bring them.

    Args:
        module: after a forward pass.
        roots: where to look for unused parameters from; empty: all are used.
    """
    try:
        module.reducer._rebuild_buckets()  # raises before an unfinished reduction is given up
    except RuntimeError:
        return
    module.reducer.prepare_for_backward(list(roots))


# FSDP


def make_fsdp_root(module: FSDPModule) -> None:
    """Makes a module the root of its FSDP units now.

    Torch would take the first one that runs for it, and refuse the whole model after a part of it.
    """
    module._get_fsdp_state()._lazy_init()


def share_meshes_with_copies() -> None:
    """A deep copy of a DeviceMesh is from now on the mesh itself.

    The copy that torch makes, with each copy of a DTensor, keeps process groups of its own alive.
    """
    from torch.distributed.device_mesh import DeviceMesh

    mesh_class: Any = DeviceMesh
    mesh_class.__deepcopy__ = lambda mesh, memo: mesh


def drop_fsdp_groups(units: Iterable[FSDPModule], mesh: DeviceMesh) -> None:
    """Clears the places where torch keeps process groups for FSDP units."""
    for unit in units:
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # 2.11: one, or None
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
                for name in vars(info):
                    if name.endswith("process_group"):
                        setattr(info, name, None)
    getattr(mesh, "_pg_registry", {}).clear()


# Modules and autograd


def gradient_hooks(parameter: Tensor) -> int:
    """How many hooks a parameter's gradient has; no public name tells."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return len(parameter._backward_hooks or ()) + len(after or ())


def write_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Returns how often each tensor was written to in place, as autograd counts it."""
    return [tensor._version for tensor in tensors]


class Members(NamedTuple):
    """The dicts in which a module keeps its own parameters, buffers and submodules, by name."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    modules: dict[str, nn.Module | None]


def members(module: nn.Module) -> Members:
    """Returns the dicts in which a module keeps what was registered in it.

    A change of a dict registers or removes something, without the checks of `Module.__setattr__`.
    The public methods, such as `named_buffers`, return copies and leave out what is None.
    """
    return Members(module._parameters, module._buffers, module._modules)


def set_members(module: nn.Module, new: Members) -> None:
    """Replaces the dicts in which a module keeps what was registered in it."""
    vars(module).update(_parameters=new.parameters, _buffers=new.buffers, _modules=new.modules)


def replace_apply(module: nn.Module, apply: Callable[..., Any]) -> None:
    """Replaces what `module.to()`, `module.half()` and the like call.

    Args:
        module: the module.
        apply: called with a function that converts a tensor; returns the module.
    """
    vars(module)["_apply"] = apply


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another one."""
    return tensor._is_view()


def shallow_copy(module: nn.Module) -> nn.Module:
    """A new module of the same attributes, as `nn.DataParallel` makes its replicas.

    Its parameters, buffers and submodules are to be set. An RNN's copy has a list of weights of its
    own.
    """
    from torch import nn

    replicate: Any = type(module)._replicate_for_data_parallel
    if replicate is not nn.Module._replicate_for_data_parallel:
        own: nn.Module = replicate(module)
        return own
    # What that does, in a third of the time: it sets each of its changes as an attribute.
    made = type(module).__new__(type(module))
    vars(made).update(vars(module), _is_replica=True)
    return made


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(model)` gave, or `model.compile()` was called."""
    return is_compiled_in_place(module) or COMPILED_CHILD_NAME in module._modules


def without_compile(module: nn.Module) -> nn.Module:
    """The user's module inside of what `torch.compile(model)` gave; any other module itself."""
    # Not by getattr: wrappers answer for what is inside of them.
    if COMPILED_CHILD_NAME not in module._modules:
        return module
    inner: nn.Module = module._modules[COMPILED_CHILD_NAME]  # type: ignore[assignment]
    return inner


_MARKS_OF_COMPILED_MODULES = (
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "get_compiler_config",
)


def let_compile_again(module: nn.Module) -> None:
    """Lets `torch.compile` wrap what `torch.compile(model)` gave once more, hooks and all.

    Torch compiles such a module again by compiling the `forward` that the model had at the first
    time, and finds that by a mark on the wrapper. Hooks of the wrapper and of the model, and a
    `forward` that was set since then, would be left out without a word: under `fully_shard` no
    parameter would be gathered. Without the marks torch takes the wrapper for a module like any
    other; what is lost is its method `get_compiler_config`.

    Args:
        module: the module itself and its submodules are treated.
    """
    if not compiler_is_loaded():
        return
    for part in module.modules():
        if COMPILED_CHILD_NAME in part._modules:
            for mark in _MARKS_OF_COMPILED_MODULES:
                vars(part).pop(mark, None)


def in_backward_pass() -> bool:
    """Whether this thread is in a backward pass, as checkpointed blocks are when they are computed
    again; torch's own checkpointing asks the same.
    """
    import torch

    return torch._C._current_graph_task_id() != -1


def storage_reference(tensor: Tensor) -> Any:
    """A weak reference to the storage of a tensor that is dense.

    Those to one storage are equal and have one hash, whichever of its views they were made of; the
    place of a freed storage is not used again as long as a reference to it is there.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def in_function_transform() -> bool:
    """Whether this is inside of `torch.func.vmap`, `grad` or the like, where tensors stand for
    others.
    """
    import torch

    stack: Any = torch._C._functorch
    return stack.peek_interpreter_stack() is not None


def watch_indices(
    drawn: Callable[[Any, Callable[[], Any]], Any], begins: Callable[[Any], object]
) -> None:
    """Lets a function draw the indices of every batch of every DataLoader, from any sampler.

    Args:
        drawn: is given the loader's iterator and what draws; returns what that returns.
        begins: is given the iterator when its workers, which persist, begin another pass.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    plain: Any = _BaseDataLoaderIter._next_index
    reset: Any = _BaseDataLoaderIter._reset

    def next_index(self: _BaseDataLoaderIter) -> Any:
        return drawn(self, partial(plain, self))

    def begin_pass(self: _BaseDataLoaderIter, *args: Any, **kwargs: Any) -> None:
        begins(self)
        reset(self, *args, **kwargs)

    _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]
    _BaseDataLoaderIter._reset = begin_pass  # type: ignore[method-assign]


def on_shadowed_iteration(called: Callable[[], object]) -> None:
    """Calls a function on a rank that has joined (`Join`), for each iteration of the others.

    Args:
        called: before this rank takes part in the collectives of the iteration.
    """
    from torch.distributed.algorithms.join import Join

    plain: Any = Join._get_num_nonjoined_procs

    def counted(self: Join) -> int:
        left: int = plain(self)
        if left:
            called()
        return left

    Join._get_num_nonjoined_procs = counted  # type: ignore[method-assign]


# Optimizers


def unscales_gradients(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer divides its gradients by the loss scale, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def answer_grad_scaler(optimizer_class: type[Optimizer], answer: Callable[[Any], bool]) -> None:
    """Sets what torch's GradScaler is told about the optimizers of a class.

    Just before it steps, the scaler asks whether the optimizer divides its gradients by the scale.

    Args:
        optimizer_class: the class.
        answer: called with the optimizer that is asked; raises to refuse the step.
    """
    optimizer_class._step_supports_amp_scaling = property(answer)  # type: ignore[attr-defined]


# State dicts and DTensors


def state_dict_metadata(state: Any) -> Any:
    """What `nn.Module.state_dict()` keeps beside the tensors: the modules' versions; or None."""
    return getattr(state, "_metadata", None)


def set_state_dict_metadata(state: Any, metadata: Any) -> None:
    """Gives it to a copy, which is without; of None nothing becomes."""
    if metadata is not None:
        state._metadata = metadata


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor."""
    # Not by isinstance: who has no DTensor should not wait for its import.
    return hasattr(value, "full_tensor")


def own_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, any other tensor whole; it shares the memory."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part.detach()


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's shard of a DTensor begins in it, and the shard's extents."""
    from torch.distributed.tensor import _utils

    sizes, offsets = _utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(sizes)


# Workers of a DataLoader


END_OF_PASS = object()
"""What `watch_data_loaders` tells in the place of a batch when a pass is over."""


def watch_data_loaders(seen: Callable[[Any, Any, Any, Any], None]) -> Callable[[], None]:
    """Has a function called with each batch that a DataLoader delivers in this process.

    No public hook tells of batches, and an iterator of our own in the place of torch's would lack
    what some programs ask that for, its length for example.

    Args:
        seen: called with the iterator, its dataset, the sampler, or the batch sampler where that
            is not torch's own, and the batch or `END_OF_PASS`.

    Returns:
        What ends it.
    """
    from torch.utils.data import BatchSampler, dataloader

    iterators: Any = dataloader._BaseDataLoaderIter
    plain = iterators.__next__

    def watched(iterator: Any) -> Any:
        indices = iterator._index_sampler
        sampler = indices.sampler if type(indices) is BatchSampler else indices
        try:
            batch = plain(iterator)
        except StopIteration:
            seen(iterator, iterator._dataset, sampler, END_OF_PASS)
            raise
        seen(iterator, iterator._dataset, sampler, batch)
        return batch

    def end() -> None:
        if iterators.__next__ is watched:
            iterators.__next__ = plain

    iterators.__next__ = watched
    return end


@contextmanager
def without_worker_info() -> Iterator[None]:
    """In a worker of a DataLoader: `torch.utils.data.get_worker_info` gives None.

    Many iterable datasets ask it and give each worker a part of their own. A worker that needs the
    whole of one, to take from it what it was asked for, has no public way to say so.
    """
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


# Stores

_VALIDATE_AND_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 0x10C5)
"""The first requests of TCPStore's client (torch/csrc/distributed/c10d/TCPStore.cpp): VALIDATE with
a magic number, PING with any number."""
_PONG = struct.pack("<I", 0x10C5)
"""A store sends PING's number back."""


def answers_as_store(connection: socket.socket) -> bool:
    """Whether a TCPStore is at the other end of a connection that has a timeout.

    Torch's own client cannot be asked: it waits without end, whatever its timeout, for something
    that listens and says nothing.
    """
    try:
        connection.sendall(_VALIDATE_AND_PING)
        return connection.recv(len(_PONG), socket.MSG_WAITALL) == _PONG
    except OSError:
        return False


def store_elsewhere(address: int, port: int) -> None:
    """Where `env://` or `tcp://` of this process names port `address`, a store at `port` serves it.

    Torch's own would listen on all interfaces.
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    create = rendezvous._create_c10d_store

    def created(host: str, at: int, rank: int, size: int, timeout: Any, *others: Any) -> Any:
        if at != address:
            return create(host, at, rank, size, timeout, *others)
        return rendezvous.TCPStore(host, port, size, is_master=False, timeout=timeout)

    rendezvous._create_c10d_store = created


# Process groups and their Flight Recorder

RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Functions of `torch._C._distributed_c10d`: the Flight Recorder of Gloo and others, that of NCCL.
Each has a second form with `_json` after its name, without frames and much cheaper."""


def flight_record(*, lines: bool) -> str:
    """What torch's Flight Recorder holds, as a JSON list of its records, one a recorder.

    Without `lines` 2000 calls take 50 ms. With `lines` each call has its stack, 0.2 s, in a process
    that has loaded torch's compiler (all that have used DDP have); elsewhere torch would load it
    now, in 2 s and with the interpreter's lock held, so the calls stay without.
    """
    import torch._C._distributed_c10d as c10d

    compiler = sys.modules.get("torch._dynamo")
    lines = lines and not getattr(getattr(compiler, "__spec__", None), "_initializing", True)
    names = [name if lines else f"{name}_json" for name in RECORDERS]
    written: list[bytes] = [getattr(c10d, name)() for name in names if hasattr(c10d, name)]
    if lines:  # made by torch, in this process
        return json.dumps([pickle.loads(record) for record in written], default=str)
    return f"[{', '.join(record.decode(errors='replace') for record in written)}]"


def take_gpu(index: int | None = None) -> None:
    """In a thread of ours, before the recorders are asked: its GPU is that of this rank.

    It is that of the process group, else the one with this index; None: with the local rank's.

    They ask CUDA whether a call has ended. A thread that has chosen no GPU would open the first
    one for that, where every rank of the machine would then hold some hundred MiB more.
    """
    cuda, c10d = map(sys.modules.get, ("torch.cuda", "torch.distributed.distributed_c10d"))
    if cuda is None or c10d is None or not cuda.is_initialized():
        return
    bound = getattr(c10d.GroupMember.WORLD, "bound_device_id", None)
    own = int(os.environ.get("LOCAL_RANK", 0)) if index is None else index
    index = own if bound is None else bound.index
    if index < cuda.device_count():
        cuda.set_device(index)


def process_groups() -> list[dict[str, Any]]:
    """This rank's process groups: their names, descriptions and the ranks in them."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []
    return [
        {
            "name": str(name),
            "description": str(getattr(group, "group_desc", "")),
            "ranks": sorted(c10d._world.pg_group_ranks.get(group, {})),
        }
        for group, name in list(c10d._world.pg_names.items())
    ]


def group_being_made(frame: FrameType | None) -> dict[str, Any] | None:
    """The process group that a thread waits to make in `new_group`, with what calls that.

    Args:
        frame: the thread's innermost one.

    Returns:
        Its name, ranks and backend, and whether only these ranks wait for each other, as they do
        without TORCH_DIST_INIT_BARRIER=1; None where the thread makes none, or has just begun.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    while frame is not None:
        if frame.f_code.co_name == "_new_group_with_tag":
            values = frame.f_locals
            if "group_name" not in values:
                return None
            assert c10d is not None  # the frame is one of its functions
            waits_for_all = c10d._is_barrier_after_init() == 1
            return {
                "name": str(values["group_name"]),
                "ranks": [int(rank) for rank in values["ranks"]],
                "backend": str(values["backend"]),
                "members_only": values["use_local_synchronization"] or not waits_for_all,
            }
        frame = frame.f_back
    return None


def on_default_group(opened: Callable[[object], object]) -> None:
    """Calls `opened` with each default process group of this process from now on.

    `init_process_group` and what calls it set the group by `_update_default_pg`, or reset it: None.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:  # a torch that was built without torch.distributed
        return
    original = c10d._update_default_pg

    def update(group: object) -> None:
        original(group)
        if group is not None:
            opened(group)

    c10d._update_default_pg = update


# Launching ranks


def skip_exit_barrier(agent: SimpleElasticAgent) -> None:
    """Lets torch elastic's agent return without waiting for the agents of other machines.

    Once its workers have succeeded, the agent waits up to 300 s for the other agents
    (`SimpleElasticAgent._exit_barrier`). It does so in C++, where no signal is heard. A shorter
    `exit_barrier_timeout`, which is public, would let it log an error.
    """
    agent._exit_barrier = lambda: None  # type: ignore[method-assign]


def bound_to_processors(line: tuple[str, ...], gpu: int, mode: str) -> tuple[str, ...]:
    """A command that runs on the processors near a GPU: torchrun's --numa-binding.

    Args:
        line: the command.
        gpu: index of the GPU.
        mode: a value of the flag, see `torch.numa.binding.AffinityMode`.

    Raises:
        SettingError: there is no such GPU, no numactl, or the kernel does not tell what is near.
    """
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    logger = logging.getLogger(binding.__name__)
    before, logger.disabled = logger.disabled, True  # it would print the traceback
    wrap: Any = binding._maybe_wrap_command_args_with_numa_binding
    newer = "device_index" in inspect.signature(wrap).parameters  # since torch 2.14
    try:
        return tuple(
            wrap(line, numa_options=options, **{"device_index" if newer else "gpu_index": gpu})
        )
    except Exception as error:  # of CUDA, of the file system, of torch's own checks
        raise SettingError(
            f"--numa-binding {mode}",
            f"local rank {gpu} cannot be bound: {error}",
            "leave the flag out; it needs one GPU a process, and the command numactl",
        ) from None
    finally:
        logger.disabled = before

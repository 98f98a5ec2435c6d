"""The only module that uses private names of torch, one function for each purpose.

Each name was read in the sources of torch 2.6, 2.9, 2.11, 2.13 and 2.14, unless a comment says
otherwise.
`tests/distributed/test_torch_compat.py` fails if one of them changes. The launcher uses this module
before torch is imported, so torch is imported inside the functions.

Sections: what an older torch lacks, classes without a public name, the compiler, DDP, FSDP, modules
and autograd, data loaders, optimizers, the profiler, state dicts and DTensors, stores, process
groups and their Flight Recorder, launching ranks.
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

    import torch
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
    from torch.utils.hooks import RemovableHandle

    BatchNorm: TypeAlias = batchnorm._BatchNorm
    NormBase: TypeAlias = batchnorm._NormBase
    DropoutNd: TypeAlias = dropout._DropoutNd
    pytree = _pytree

P = ParamSpec("P")
T = TypeVar("T")

# What an older torch lacks


def accepted(function: Callable[..., object], **options: Any) -> dict[str, Any]:
    """Returns those of the options that a function or class has in this version of torch.

    Args:
        function: a function or class of torch.
        options: arguments that some versions do not have, and without which the call does the same.
    """
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def dtypes_named(*names: str) -> list[torch.dtype]:
    """Returns the dtypes of these names that this version of torch has.

    Torch 2.6 has neither `float8_e8m0fnu` nor `float4_e2m1fn_x2`.
    """
    import torch

    return [getattr(torch, name) for name in names if hasattr(torch, name)]


def list_keys(store: Any) -> list[str] | None:
    """Returns the keys in a TCPStore; None: a torch before 2.10 does not tell them."""
    if not hasattr(store, "list_keys"):
        return None
    keys: list[str] = store.list_keys()
    return keys


def separate_attempts(attempt: int) -> None:
    """Keeps the ranks of a restarted run from reading what the ranks before them have written.

    The launcher's store outlives the ranks. If they are started again, they would connect to the
    addresses of ranks that are gone. With torch 2.10 or later, the launcher lists the keys in its
    store and deletes these. Older versions cannot list keys, so here the number of the attempt is
    put before each key. `lockstep.init` has such a prefix of its own.

    Args:
        attempt: how often the ranks of the run have been started before.
    """
    from torch.distributed import PrefixStore, TCPStore

    launcher_deletes_old_keys = hasattr(TCPStore, "list_keys")
    if launcher_deletes_old_keys:
        return

    rendezvous: Any = import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    def create_store(*args: Any, **kwargs: Any) -> Any:
        store = original(*args, **kwargs)
        is_store_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_store_of_launcher:
            return PrefixStore(f"attempt_{attempt}", store)
        return store

    rendezvous._create_c10d_store = create_store


# Classes and modules without a public name

MODULE_AND_NAME = {
    "BatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    "DisableTorchFunctionSubclass": ("torch._C", "DisableTorchFunctionSubclass"),
    "DropoutNd": ("torch.nn.modules.dropout", "_DropoutNd"),
    "NormBase": ("torch.nn.modules.batchnorm", "_NormBase"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "pytree": ("torch.utils", "_pytree"),
}
"""Classes and modules without a public name, by the name that they have here: the base classes of
BatchNorm, norm and dropout layers, pytree, the dispatch mode, and the context in which methods of
Tensor's subclasses are not called (described in torch's "Extending PyTorch")."""


def __getattr__(name: str) -> Any:
    """Imports one of these classes when it is first used; Python calls this for unknown names."""
    if name not in MODULE_AND_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, name_in_module = MODULE_AND_NAME[name]
    value = getattr(import_module(module_name), name_in_module)
    globals()[name] = value  # so that this function is not called again
    return value


# The compiler

COMPILED_CHILD_NAME = "_orig_mod"
"""`torch.compile` returns a wrapper that contains the original module under this name, which is
therefore a part of the names of its weights."""


def never_compiled(function: Callable[P, T], *, recursive: bool = False) -> Callable[P, T]:
    """Returns the function in a form that torch's compiler never compiles.

    `torch.compiler.disable` does the same, but loads the compiler at once, which takes a second.

    Args:
        function: the function.
        recursive: do not compile the functions that it calls either.
    """
    import torch

    disable: Any = getattr(torch, "_disable_dynamo")  # noqa: B009 - not exported
    uncompiled: Callable[P, T] = disable(function, recursive=recursive)
    return uncompiled


def run_as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function so that torch's compiler does not begin to compile at this function.

    Python runs the function as it is, and the compiler may still compile the functions that it
    calls. The mark has no effect inside of a function that is being compiled: there the compiler
    traces through the marked function, while `never_compiled` would break the graph.

    Torch marks its own functions in the same way (`torch._dynamo.eval_frame.skip_code`). Setting
    the mark does not load the compiler.
    """
    from torch._C._dynamo import eval_frame

    frame_api: Any = eval_frame
    if not hasattr(frame_api, "_FrameExecStrategy"):  # torch 2.6
        frame_api.skip_code(function.__code__)
        return function

    # This frame is skipped; the frames of functions that it calls are handled as usual.
    skip_this_frame_only = frame_api._FrameExecStrategy(
        frame_api._FrameAction.SKIP, frame_api._FrameAction.DEFAULT
    )
    frame_api.set_code_exec_strategy(function.__code__, skip_this_frame_only)
    return function


def compiler_is_loaded() -> bool:
    """Returns False if nothing can have been compiled in this process yet."""
    return "torch._dynamo" in sys.modules


def outside_compiled_code(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a hook of a module in a form that torch's compiler does not trace, nor what it calls.

    `torch.compile(model)` and `model.compile()` call hooks and compile the forward pass between
    them. Without this they would compile each hook separately, with a graph break where the hook
    reads what a graph does not have (`grad_fn`), and again whenever a number changes that the hook
    has read. Torch excludes the hooks of `fully_shard` in the same way.

    If the compiler is not loaded, calling the hook does not load it.
    """
    # `never_compiled` also covers what the hook calls, but loads the compiler at its first call.
    # `run_as_it_is` covers only `call` itself, which decides whether to go through the former.
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
    """Returns the DDP module whose forward pass is running, or None."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def await_another_backward(module: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Lets DDP average the gradients of one more backward pass of the same forward passes.

    Torch does this at the end of each forward pass (`DistributedDataParallel._post_forward`). If
    the previous backward pass has not produced all gradients, nothing changes: DDP still expects
    them from the next one.

    Args:
        module: the DDP module, after a forward pass.
        roots: the outputs from which DDP looks for unused parameters; empty: all are used.
    """
    try:
        module.reducer._rebuild_buckets()
    except RuntimeError:
        # The reduction is unfinished, and `prepare_for_backward` would give it up.
        return

    module.reducer.prepare_for_backward(list(roots))


# FSDP


def make_fsdp_root(module: FSDPModule) -> None:
    """Makes a module the root of its FSDP units now.

    Torch makes the first module that runs the root. If that is only a part of the model, it
    refuses to run the whole model afterwards.
    """
    module._get_fsdp_state()._lazy_init()


def share_meshes_with_copies() -> None:
    """Makes `copy.deepcopy` of a DeviceMesh return the mesh itself, from now on.

    Torch copies the mesh with each DTensor, and every copy keeps process groups of its own alive.
    """
    from torch.distributed.device_mesh import DeviceMesh

    mesh_class: Any = DeviceMesh
    mesh_class.__deepcopy__ = lambda mesh, memo: mesh


def drop_fsdp_groups(units: Iterable[FSDPModule], mesh: DeviceMesh) -> None:
    """Removes torch's references to the process groups of FSDP units, so that they can be freed."""
    for unit in units:
        for parameter_group in _parameter_groups(unit):
            _clear_process_groups(parameter_group.mesh_info)
            _clear_process_groups(parameter_group.post_forward_mesh_info)
    getattr(mesh, "_pg_registry", {}).clear()  # in some versions the mesh keeps its groups here


def shards_in_reduction_order(unit: FSDPModule) -> list[nn.Parameter]:
    """Returns the shards of an FSDP unit in the order in which its gradient has its parameters."""
    shards: list[nn.Parameter] = []
    for parameter_group in _parameter_groups(unit):
        for fsdp_parameter in parameter_group.fsdp_params:
            shards.append(fsdp_parameter.sharded_param)
    return shards


def gathered_dtype(unit: FSDPModule) -> torch.dtype | None:
    """Returns the dtype in which an FSDP unit gathers its parameters; None: in their own."""
    dtype: torch.dtype | None = unit._get_fsdp_state()._mp_policy.param_dtype
    return dtype


def set_dtypes_of_frozen_unit(unit: FSDPModule) -> None:
    """Tells torch the dtypes of a unit whose parameters are all frozen.

    Torch takes these dtypes from the parameters that are trained when the unit runs first. Here
    there are none yet, but the parameters may be trained later. Then, without the dtypes, a
    gradient in half precision would not fit its parameter in fp32.
    """
    for parameter_group in _parameter_groups(unit):
        if parameter_group._orig_dtype is not None:
            continue

        for fsdp_parameter in parameter_group.fsdp_params:
            if fsdp_parameter.orig_dtype.is_floating_point:
                parameter_group._orig_dtype = fsdp_parameter.orig_dtype
                parameter_group._reduce_dtype = fsdp_parameter.reduce_dtype
                break


def parameters_with_accumulated_gradient(unit: FSDPModule) -> list[nn.Parameter]:
    """Returns the gathered parameters whose gradients torch keeps beside them.

    These are gradients of earlier micro-batches, if they are averaged in another dtype than
    parameters are gathered in. `parameter.grad` is then None.
    """
    parameters: list[nn.Parameter] = []
    for parameter_group in _parameter_groups(unit):
        for fsdp_parameter in parameter_group.fsdp_params:
            if fsdp_parameter.unsharded_accumulated_grad is not None:
                parameters.append(fsdp_parameter.unsharded_param)
    return parameters


def drop_accumulated_gradients(unit: FSDPModule) -> None:
    """Drops the gradients that `parameters_with_accumulated_gradient` is about."""
    for parameter_group in _parameter_groups(unit):
        for fsdp_parameter in parameter_group.fsdp_params:
            fsdp_parameter.unsharded_accumulated_grad = None


def accumulate_late_gradients(unit: FSDPModule, *, zeros_if_unused: bool) -> list[RemovableHandle]:
    """Gives all gradients of a unit one dtype, before the backward pass that averages them.

    Torch has converted the gradients of earlier micro-batches to the dtype that they are averaged
    in. A parameter that only the last micro-batch uses gets a *late* gradient in half precision,
    and torch refuses to send both together. So the late gradient is converted too.

    Args:
        unit: the unit.
        zeros_if_unused: let late gradients be added to zeros in the right dtype, which are sent
            if no micro-batch uses the parameter.

    Returns:
        Hooks of the parameters that no micro-batch has used yet, to be removed after the pass.
    """
    hooks: list[RemovableHandle] = []
    for parameter_group in _parameter_groups(unit):
        without_gradient: list[Any] = []
        for fsdp_parameter in parameter_group.fsdp_params:
            if fsdp_parameter.unsharded_accumulated_grad is None:
                without_gradient.append(fsdp_parameter)

        # There was no earlier micro-batch, so all gradients are late and have one dtype.
        all_are_late = len(without_gradient) == len(parameter_group.fsdp_params)
        if all_are_late:
            continue

        for fsdp_parameter in without_gradient:
            whole = fsdp_parameter.unsharded_param
            if not whole.requires_grad:
                continue

            if zeros_if_unused:
                # Torch adds a late gradient to these zeros, and so converts it.
                zeros = whole.new_zeros(whole.shape, dtype=fsdp_parameter.reduce_dtype)
                fsdp_parameter.unsharded_accumulated_grad = zeros
            else:
                convert = partial(_accumulate_gradient, fsdp_parameter)
                hooks.append(whole.register_post_accumulate_grad_hook(convert))
    return hooks


def _accumulate_gradient(fsdp_parameter: Any, whole: Tensor) -> None:
    """Converts the gradient of a parameter to the dtype that it is averaged in.

    Args:
        fsdp_parameter: torch's object.
        whole: the parameter that has the gradient.
    """
    assert whole.grad is not None
    fsdp_parameter.unsharded_accumulated_grad = whole.grad.to(fsdp_parameter.reduce_dtype)
    whole.grad = None


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    """Returns torch's groups of the parameters of an FSDP unit; empty if it has none of its own."""
    state = unit._get_fsdp_state()
    parameter_groups = getattr(state, "_fsdp_param_groups", None)
    if parameter_groups is None:  # torch 2.11 has a single group, or None
        parameter_groups = [state._fsdp_param_group]
    return [group for group in parameter_groups if group is not None]


def _clear_process_groups(mesh_info: Any) -> None:
    """Sets the attributes of an FSDP unit's mesh that are process groups to None."""
    if not mesh_info:  # of a unit that keeps its parameters after the forward pass
        return
    for name in vars(mesh_info):
        if name.endswith("process_group"):
            setattr(mesh_info, name, None)


# Modules and autograd


def count_gradient_hooks(parameter: Tensor) -> int:
    """Returns the number of hooks that are called with a parameter's gradient."""
    hooks_before_accumulation = parameter._backward_hooks or ()
    hooks_after_accumulation = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return len(hooks_before_accumulation) + len(hooks_after_accumulation)


def write_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Returns how often each tensor was written to in place, as autograd counts it."""
    return [tensor._version for tensor in tensors]


def add_to_each(tensors: list[Tensor], summands: list[Tensor]) -> None:
    """Adds one summand to each tensor, in place: one call for all of them."""
    import torch

    torch._foreach_add_(tensors, summands)


def copy_to_each(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copies one source to each tensor: one call for all of them."""
    import torch

    if tensors:  # torch refuses empty lists
        torch._foreach_copy_(tensors, sources)


def multiply_each(tensors: list[Tensor], factor: float) -> None:
    """Multiplies all tensors by a number, in place: one call for all of them."""
    import torch

    torch._foreach_mul_(tensors, factor)


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
    """Replaces the method that `module.to()`, `module.half()` and similar methods call.

    Args:
        module: the module.
        apply: called with a function that converts a tensor; returns the module.
    """
    vars(module)["_apply"] = apply


def convert_tensors(
    module: nn.Module, convert: Callable[[Tensor], Tensor], *, recurse: bool = True
) -> None:
    """Replaces the tensors of a module as `module.to()` does, and keeps its parameter objects.

    Optimizers and tied modules hold these objects. Some layers keep more than the registered
    tensors, such as LSTMs and modules under `fully_shard`. Their own `_apply`, which is called
    here, updates what they keep besides.

    Args:
        module: the module.
        convert: returns a tensor for a tensor; the same one if nothing is to be changed.
        recurse: False for the tensors that are registered in the module itself alone.
    """
    import torch

    swapped_before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(convert, recurse)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped_before)


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the method that gives a module's parameters new initial values; None without one."""
    from torch import nn

    if isinstance(module, nn.MultiheadAttention | nn.Transformer):  # without a public name
        return module._reset_parameters
    method = getattr(module, "reset_parameters", None)
    return method if callable(method) else None


def device_constructors() -> set[Callable[..., Any]]:
    """Returns the functions of torch whose tensors `with torch.device(...)` puts on a device."""
    from torch.utils import _device

    constructors: set[Callable[..., Any]] = _device._device_constructors()
    return constructors


def storage_key(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors in the same memory, also on the meta device.

    It may be given again after the memory is freed.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


@contextmanager
def trunc_normal_replaced(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Inside this context `nn.init.trunc_normal_` calls another function.

    The original draws again until no value is outside of the bounds. How often depends on the
    values, so it cannot be recorded on tensors without values, such as those on the meta device.

    Args:
        replacement: called with the original function, and with what that takes: the tensor, mean,
            std, both bounds, and the generator by its name.
    """
    from torch.nn import init

    original = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = partial(replacement, original)
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


def copy_operation() -> Any:
    """Returns the operation that `tensor.to(...)` calls if something changes."""
    import torch

    return torch.ops.aten._to_copy.default


def reads_number(operation: Any) -> bool:
    """Returns True for operations that return a number: `tensor.item()`, `torch.equal(...)`."""
    import torch

    aten = torch.ops.aten
    return operation in (
        aten._local_scalar_dense.default,
        aten.allclose.default,
        aten.equal.default,
    )


def written_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operation writes to, such as `x` in `x.uniform_()`.

    Args:
        operation: the `OpOverload` that a `TorchDispatchMode` is given.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    written: list[Any] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue

        value = args[number] if number < len(args) else kwargs.get(argument.name)
        written.append(value)
    return written


def is_view(tensor: Tensor) -> bool:
    """Returns True if autograd treats a tensor as a view of another one."""
    return tensor._is_view()


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a new module with the same attributes, as `nn.DataParallel` makes its replicas.

    The caller must set its parameters, buffers and submodules with `set_members`.
    """
    from torch import nn

    replicate: Any = type(module)._replicate_for_data_parallel
    if replicate is not nn.Module._replicate_for_data_parallel:
        # The class has its own way to make a replica; an RNN copies its list of weights.
        replica: nn.Module = replicate(module)
        return replica

    # What torch's own method does, in a third of the time: `__init__` is not called.
    copy = type(module).__new__(type(module))
    vars(copy).update(vars(module), _is_replica=True)
    return copy


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns True if `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Returns True if a module came from `torch.compile(model)`, or was compiled in place."""
    return is_compiled_in_place(module) or COMPILED_CHILD_NAME in module._modules


def without_compile(module: nn.Module) -> nn.Module:
    """Returns the module that was given to `torch.compile`; any other module is returned itself."""
    # Not by `getattr`: wrappers of other kinds pass it on to the module that they contain.
    if COMPILED_CHILD_NAME not in module._modules:
        return module
    inner: nn.Module = module._modules[COMPILED_CHILD_NAME]  # type: ignore[assignment]
    return inner


ATTRIBUTES_OF_COMPILED_MODULES = (
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "get_compiler_config",
)


def let_compile_again(module: nn.Module) -> None:
    """Lets `torch.compile` compile modules that it has compiled before together with their hooks.

    If torch compiles such a module again, it compiles the `forward` that the model had the first
    time, which it finds by an attribute of the wrapper. Hooks, and a `forward` that was set since
    then, would silently be left out: under `fully_shard` no parameter would be gathered. Without
    these attributes torch treats the wrapper like any other module; what is lost is its method
    `get_compiler_config`.

    Args:
        module: the attributes of this module and of all its submodules are removed.
    """
    if not compiler_is_loaded():  # nothing can have been compiled
        return

    for part in module.modules():
        if COMPILED_CHILD_NAME in part._modules:
            for name in ATTRIBUTES_OF_COMPILED_MODULES:
                vars(part).pop(name, None)


def in_backward_pass() -> bool:
    """Returns True if this thread runs a backward pass.

    That is also true while the forward pass of a checkpointed block is recomputed. Torch's own
    activation checkpointing uses the same test.
    """
    import torch

    return torch._C._current_graph_task_id() != -1  # -1: this thread runs none


def storage_reference(tensor: Tensor) -> Any:
    """Returns a weak reference to the storage of a dense tensor, which can be a key of a dict.

    References to one storage are equal, whichever of its views they were made from. As long as
    there is a reference, the address of a freed storage is not used again.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def in_function_transform() -> bool:
    """Returns True inside `torch.func.vmap`, `torch.func.grad` and similar transforms.

    There tensors are placeholders, whose values cannot be read.
    """
    import torch

    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


# Data loaders


def watch_indices(
    draw_indices: Callable[[Any, Callable[[], Any]], Any], on_new_pass: Callable[[Any], object]
) -> None:
    """Has a function called in place of every draw of a batch's indices, in every DataLoader.

    Args:
        draw_indices: called with the loader's iterator and the function that draws the indices;
            must return what that function returns.
        on_new_pass: called with the iterator when its persistent workers begin another pass.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original_next_index: Any = _BaseDataLoaderIter._next_index
    original_reset: Any = _BaseDataLoaderIter._reset

    def next_index(self: _BaseDataLoaderIter) -> Any:
        return draw_indices(self, partial(original_next_index, self))

    def reset(self: _BaseDataLoaderIter, *args: Any, **kwargs: Any) -> None:
        on_new_pass(self)
        original_reset(self, *args, **kwargs)

    _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]
    _BaseDataLoaderIter._reset = reset  # type: ignore[method-assign]


END_OF_PASS = object()
"""Passed by `watch_data_loaders` instead of a batch when a pass is over."""


def watch_data_loaders(on_batch: Callable[[Any, Any, Any, Any], None]) -> Callable[[], None]:
    """Has a function called with each batch that a DataLoader delivers in this process.

    Torch has no public hook for batches. A wrapper around torch's iterator would lack what some
    programs use of it, such as its length.

    Args:
        on_batch: called with the iterator, its dataset, the sampler (the batch sampler, if that is
            not torch's own class), and the batch or `END_OF_PASS`.

    Returns:
        A function that stops the watching.
    """
    from torch.utils.data import BatchSampler, dataloader

    iterator_class: Any = dataloader._BaseDataLoaderIter
    original_next = iterator_class.__next__

    def watched_next(iterator: Any) -> Any:
        """Replaces the method `__next__` of a DataLoader's iterator.

        Returns the next batch as before. `on_batch` is called with each batch, and with
        `END_OF_PASS` after the last one.
        """
        # The user's sampler is usually inside of torch's own BatchSampler, which only groups the
        # samples. A batch sampler of the user's own is passed on itself.
        sampler = iterator._index_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler

        try:
            batch = original_next(iterator)
        except StopIteration:
            on_batch(iterator, iterator._dataset, sampler, END_OF_PASS)
            raise

        on_batch(iterator, iterator._dataset, sampler, batch)
        return batch

    def stop_watching() -> None:
        if iterator_class.__next__ is watched_next:  # nobody has replaced it since
            iterator_class.__next__ = original_next

    iterator_class.__next__ = watched_next
    return stop_watching


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Makes `torch.utils.data.get_worker_info` return None inside a worker of a DataLoader.

    Many iterable datasets call it and give each worker a part of their own. A worker that needs the
    whole dataset, to take its samples from it, has no public way to get that.
    """
    from torch.utils.data._utils import worker

    worker_info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = worker_info


# Joining (torch.distributed.algorithms.Join) and optimizers


def on_shadowed_iteration(callback: Callable[[], object]) -> None:
    """Has a function called on a rank that has no more batches (`Join`), for each batch of others.

    Args:
        callback: called before this rank takes part in the collectives of the iteration.
    """
    from torch.distributed.algorithms.join import Join

    # A rank without batches asks once per iteration how many ranks still have batches, and takes
    # part in their collectives if there are any.
    original: Any = Join._get_num_nonjoined_procs

    def get_num_nonjoined_procs(self: Join) -> int:
        num_ranks_with_batches: int = original(self)
        if num_ranks_with_batches > 0:
            callback()
        return num_ranks_with_batches

    Join._get_num_nonjoined_procs = get_num_nonjoined_procs  # type: ignore[method-assign]


def unscales_gradients(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer divides its gradients by the loss scale, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def answer_grad_scaler(optimizer_class: type[Optimizer], answer: Callable[[Any], bool]) -> None:
    """Answers torch's GradScaler for the optimizers of a class.

    Just before a step, the scaler asks whether the optimizer divides its gradients by the scale.

    Args:
        optimizer_class: the class.
        answer: called with the optimizer; returns the answer, or raises to refuse the step.
    """
    optimizer_class._step_supports_amp_scaling = property(answer)  # type: ignore[attr-defined]


# The profiler


def profiler_is_running() -> bool:
    """Returns True while `torch.profiler` or `torch.autograd.profiler` records in this process."""
    import torch

    # Read in torch 2.11 and 2.13.
    is_running: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return is_running


# State dicts and DTensors


def state_dict_metadata(state: Any) -> Any:
    """Returns the versions of the modules, which `nn.Module.state_dict()` stores; or None."""
    return getattr(state, "_metadata", None)


def set_state_dict_metadata(state: Any, metadata: Any) -> None:
    """Sets the metadata of a copied state dict; None is ignored."""
    if metadata is not None:
        state._metadata = metadata


def is_sharded(value: object) -> bool:
    """Returns True for a DTensor."""
    # Not by `isinstance`, which would import DTensor for programs that have none.
    return hasattr(value, "full_tensor")


def to_local(tensor: Any) -> Tensor:
    """Returns this rank's shard of a DTensor, or any other tensor whole; memory is shared."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()


def local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the offsets and the sizes of this rank's shard of a DTensor."""
    from torch.distributed.tensor import _utils

    sizes, offsets = _utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(sizes)


# Stores

_VALIDATE_AND_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 0x10C5)
"""The first requests of TCPStore's client (torch/csrc/distributed/c10d/TCPStore.cpp): VALIDATE with
a magic number, PING with any number."""
_PONG = struct.pack("<I", 0x10C5)
"""The answer of a store: the number of PING."""


def answers_as_store(connection: socket.socket) -> bool:
    """Returns True if a TCPStore is at the other end of a connection.

    Torch's own client cannot be used: it waits without end, whatever its timeout, for something
    that listens and sends nothing.

    Args:
        connection: a connected socket that has a timeout.
    """
    try:
        connection.sendall(_VALIDATE_AND_PING)
        return connection.recv(len(_PONG), socket.MSG_WAITALL) == _PONG
    except OSError:
        return False


def store_elsewhere(announced_port: int, store_port: int) -> None:
    """Makes `env://` and `tcp://` connect to a running store instead of serving one.

    A store that torch serves would listen on all interfaces.

    Args:
        announced_port: the port that `env://` or `tcp://` names.
        store_port: the port of the store that is used instead. Other announced ports are not
            affected.
    """
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    def create_store(host: str, port: int, rank: int, size: int, timeout: Any, *rest: Any) -> Any:
        if port != announced_port:
            return original(host, port, rank, size, timeout, *rest)
        return rendezvous.TCPStore(host, store_port, size, is_master=False, timeout=timeout)

    rendezvous._create_c10d_store = create_store


# Process groups and their Flight Recorder

RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Functions of `torch._C._distributed_c10d` that return the Flight Recorder's calls, of Gloo and of
NCCL. With `_json` at the end of its name, each returns them without stacks and much faster."""


def flight_record(*, lines: bool) -> str:
    """Returns the calls in torch's Flight Recorder, as a JSON list with a record of each recorder.

    Args:
        lines: include the stack of each call. 2000 calls take 0.2 s with stacks, 50 ms without.
            Stacks are left out in a process that has not loaded torch's compiler, because torch
            would load it now, in 2 s and while it holds the interpreter's lock. A process that
            uses DDP has loaded it.
    """
    import torch._C._distributed_c10d as c10d

    with_stacks = lines and _compiler_is_fully_imported()
    records: list[bytes] = []
    for name in RECORDERS:
        # Torch has two functions for each recorder. Only the one without `_json` returns stacks.
        function_name = name if with_stacks else f"{name}_json"
        if hasattr(c10d, function_name):
            records.append(getattr(c10d, function_name)())
    if with_stacks:
        # Records with stacks are pickles. They are safe to load: torch made them in this process.
        return json.dumps([pickle.loads(record) for record in records], default=str)

    texts = [record.decode(errors="replace") for record in records]
    return f"[{', '.join(texts)}]"


def _compiler_is_fully_imported() -> bool:
    """Returns True if torch's compiler is loaded, and no thread is importing it just now."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None:
        return False
    # Python's import system sets this attribute while a module is being imported. A module that has
    # no such attribute counts as being imported, to be safe.
    import_spec = getattr(compiler, "__spec__", None)
    is_being_imported = getattr(import_spec, "_initializing", True)
    return not is_being_imported


def take_gpu(index: int | None = None) -> None:
    """Makes the GPU of this rank the current one of this thread, before `flight_record` is called.

    Torch's Flight Recorder asks CUDA whether a call has ended. A thread that has no current GPU
    would open GPU 0 for that, and every rank of the machine would take some hundred MiB of its
    memory.

    Args:
        index: number of the GPU. If the process group says which GPU it uses, this one is taken
            instead; if neither says it, the number in LOCAL_RANK is.
    """
    cuda = sys.modules.get("torch.cuda")
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if cuda is None or c10d is None or not cuda.is_initialized():  # the process uses no GPU
        return

    device_of_group = getattr(c10d.GroupMember.WORLD, "bound_device_id", None)
    if device_of_group is not None:
        index = device_of_group.index
    elif index is None:
        index = int(os.environ.get("LOCAL_RANK", 0))
    if index < cuda.device_count():
        cuda.set_device(index)


def count_gpus_without_cuda() -> int | None:
    """Returns the number of visible GPUs without initialising CUDA.

    It is asked from the vendor's management library, as `torch.cuda.device_count` does at first.

    Returns:
        None if the library is not there, or cannot tell, as with MIG slices.
    """
    import torch

    cuda: Any = torch.cuda
    is_rocm = torch.version.hip is not None
    count: int = cuda._device_count_amdsmi() if is_rocm else cuda._device_count_nvml()
    return count if count >= 0 else None


def cuda_is_refused_in_this_copy() -> bool:
    """Returns True if torch will not use CUDA here, in a process that was forked.

    So it is if the process that was copied had asked CUDA for anything, be it the number of GPUs.
    """
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def process_groups() -> list[dict[str, Any]]:
    """Returns the names, descriptions and ranks of this rank's process groups."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []

    descriptions = []

    # A copy: another thread may open a group meanwhile.
    for group, name in list(c10d._world.pg_names.items()):
        descriptions.append(
            {
                "name": str(name),
                "description": str(getattr(group, "group_desc", "")),
                "ranks": sorted(c10d._world.pg_group_ranks.get(group, {})),
            }
        )
    return descriptions


def group_being_made(frame: FrameType | None) -> dict[str, Any] | None:
    """Returns the process group that a thread is opening with `new_group`, or None.

    Args:
        frame: the innermost frame of the thread.

    Returns:
        The name, ranks and backend of the group. `members_only` is True if only its ranks wait for
        each other, and False if all ranks of the run do (TORCH_DIST_INIT_BARRIER=1). None if the
        thread opens no group, or has just begun to.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    while frame is not None:
        if frame.f_code.co_name == "_new_group_with_tag":
            values = frame.f_locals
            if "group_name" not in values:  # torch has not chosen it yet
                return None

            assert c10d is not None  # the frame is one of its functions

            # After `new_group` all ranks of the run wait for each other, if torch has a barrier
            # there and the caller did not ask that only the members of the group do.
            has_barrier_of_all = c10d._is_barrier_after_init() == 1
            members_only = values["use_local_synchronization"]
            all_ranks_wait = has_barrier_of_all and not members_only
            return {
                "name": str(values["group_name"]),
                "ranks": [int(rank) for rank in values["ranks"]],
                "backend": str(values["backend"]),
                "members_only": not all_ranks_wait,
            }

        frame = frame.f_back
    return None


def on_default_group(on_opened: Callable[[object], object]) -> None:
    """Has a function called with each default process group that this process opens.

    `init_process_group` sets the group by `_update_default_pg`; closing it sets None.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:  # a torch that was built without torch.distributed
        return

    original = c10d._update_default_pg

    def update(group: object) -> None:
        original(group)
        if group is not None:
            on_opened(group)

    c10d._update_default_pg = update


# Launching ranks


def skip_exit_barrier(agent: SimpleElasticAgent) -> None:
    """Lets torch elastic's agent return without waiting for the agents of other machines.

    Once its workers have succeeded, the agent waits up to 300 s for the other agents
    (`SimpleElasticAgent._exit_barrier`), in C++, where signals are not handled. With a shorter
    `exit_barrier_timeout`, which is public, it would log an error.
    """
    agent._exit_barrier = lambda: None  # type: ignore[method-assign]


def bound_to_processors(line: tuple[str, ...], gpu: int, mode: str) -> tuple[str, ...]:
    """Returns a command that runs on the processors near a GPU, as torchrun's --numa-binding does.

    Args:
        line: the command.
        gpu: index of the GPU.
        mode: a value of the flag, see `torch.numa.binding.AffinityMode`.

    Raises:
        SettingError: there is no such GPU or no numactl, or the kernel does not say which
            processors are near, or torch is older than 2.11.
    """
    try:
        from torch.numa import binding

        wrap: Any = binding._maybe_wrap_command_args_with_numa_binding
    except (ImportError, AttributeError):
        import torch

        raise SettingError(
            f"--numa-binding {mode}",
            f"torch {torch.__version__} cannot bind a command to processors",
            "leave the flag out, or install a newer torch",
        ) from None

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    logger = logging.getLogger(binding.__name__)
    was_disabled = logger.disabled
    logger.disabled = True  # it would print the traceback
    try:
        if "device_index" in inspect.signature(wrap).parameters:  # since torch 2.14
            return tuple(wrap(line, numa_options=options, device_index=gpu))
        return tuple(wrap(line, numa_options=options, gpu_index=gpu))
    except Exception as error:  # of CUDA, of the file system, of torch's own checks
        raise SettingError(
            f"--numa-binding {mode}",
            f"local rank {gpu} cannot be bound: {error}",
            "leave the flag out; it needs one GPU a process, and the command numactl",
        ) from None
    finally:
        logger.disabled = was_disabled

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
    """Gives the keys of each attempt a prefix of their own, `attempt_1/`, for torch before 2.10.

    The launcher's store outlives the ranks. Without the prefix, the ranks of the second attempt
    would read the addresses that the ranks of the first one have written, and connect to processes
    that are gone. With torch 2.10 or later, the launcher deletes these keys instead.

    Only scripts that call torch's `init_process_group` themselves need this. `lockstep.init` opens
    its store in another way, with such a prefix of its own.

    Args:
        attempt: how often the ranks of the run have been started before.
    """
    from torch.distributed import PrefixStore, TCPStore

    launcher_deletes_old_keys = hasattr(TCPStore, "list_keys")
    if launcher_deletes_old_keys:
        return

    rendezvous: Any = import_module("torch.distributed.rendezvous")
    create_store_of_torch = rendezvous._create_c10d_store

    def create_store(*args: Any, **kwargs: Any) -> Any:
        store = create_store_of_torch(*args, **kwargs)
        is_store_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if is_store_of_launcher:
            return PrefixStore(f"attempt_{attempt}", store)
        return store

    rendezvous._create_c10d_store = create_store  # `init_process_group` calls it


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


def compile_only_callees(function: Callable[P, T]) -> Callable[P, T]:
    """Makes torch.compile start at the functions that this function calls, and not at this one.

    Use it for a wrapper around a forward pass, for example: the forward pass is compiled, and the
    wrapper is not.

    If a compiled function calls this one, this one is compiled as a part of that function's graph.
    (`never_compiled` would split the graph in two.)
    """
    # Torch marks its own functions in this way too, in `torch._dynamo.eval_frame.skip_code`. That
    # module is not used here, because importing it loads the whole compiler.
    from torch._C._dynamo import eval_frame

    frame_api: Any = eval_frame
    if not hasattr(frame_api, "_FrameExecStrategy"):  # torch 2.6
        frame_api.skip_code(function.__code__)
        return function

    for_this_function = frame_api._FrameAction.SKIP
    for_functions_it_calls = frame_api._FrameAction.DEFAULT
    strategy = frame_api._FrameExecStrategy(for_this_function, for_functions_it_calls)
    frame_api.set_code_exec_strategy(function.__code__, strategy)
    return function


def compiler_is_loaded() -> bool:
    """Returns False if nothing can have been compiled in this process yet."""
    return "torch._dynamo" in sys.modules


def outside_compiled_code(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a hook of a module so that neither the hook nor what it calls is compiled.

    `torch.compile(model)` and `model.compile()` call hooks and compile the forward pass between
    them. Without this they would compile each hook separately, with a graph break where the hook
    reads what a graph does not have (`grad_fn`), and again whenever a number changes that the hook
    has read. Torch excludes the hooks of `fully_shard` in the same way.

    Args:
        function: the hook.
    """
    run_uncompiled = never_compiled(function, recursive=True)

    # If the compiler is not loaded, nothing can be compiled, so the hook is called as it is. The
    # first call of `run_uncompiled` would load the compiler, which takes about a second.
    @compile_only_callees  # so that this `if` is not compiled either
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if compiler_is_loaded():
            return run_uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


# DDP


def enclosing_ddp() -> DistributedDataParallel | None:
    """Returns the DDP module whose forward pass is running, or None."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def await_another_backward(module: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Lets DDP average the gradients of one more backward pass of the same forward passes.

    Torch calls `prepare_for_backward` at the end of each forward pass, so that DDP averages the
    gradients of one backward pass. This calls it once more.

    If the previous backward pass has not produced the gradients of all parameters, nothing changes:
    DDP still expects the missing gradients from the next backward pass.

    Args:
        module: the DDP module, after a forward pass.
        roots: the outputs from which DDP looks for unused parameters. If empty, DDP expects a
            gradient of every parameter.
    """
    # If some gradients are missing, `prepare_for_backward` would forget which have come already.
    if _has_averaged_all_gradients(module):
        module.reducer.prepare_for_backward(list(roots))


def _has_averaged_all_gradients(module: DistributedDataParallel) -> bool:
    """Returns True if DDP has averaged the gradients of all parameters in the last backward pass.

    DDP does not say so. But `_rebuild_buckets`, which torch calls before each forward pass, raises
    a RuntimeError if it has not.
    """
    try:
        module.reducer._rebuild_buckets()
    except RuntimeError:
        return False
    return True


# FSDP


def make_fsdp_root(module: FSDPModule) -> None:
    """Makes a module the root of its FSDP units now.

    Torch makes the first module that runs the root. If that is only a part of the model, it
    refuses to run the whole model afterwards.
    """
    module._get_fsdp_state()._lazy_init()


def can_ignore_fsdp_parameters() -> bool:
    """Returns True if `fully_shard` can leave parameters out (the argument `ignored_params`)."""
    from torch.distributed.fsdp import fully_shard

    return "ignored_params" in inspect.signature(fully_shard).parameters


def gather_in_backward_of(tensors: Sequence[Tensor], unit: FSDPModule) -> None:
    """Makes a backward pass through the given tensors gather an FSDP unit.

    Torch does this by itself for the tensors in the unit's output.
    """
    unit._get_fsdp_state()._register_pre_backward_hook(list(tensors))


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

    When a unit runs for the first time, torch takes these dtypes from its trained parameters. A
    unit whose parameters are all frozen gets none. If its parameters are trained later, a gradient
    in half precision would then not fit its parameter in fp32.
    """
    for parameter_group in _parameter_groups(unit):
        if parameter_group._orig_dtype is not None:  # torch knows the dtypes
            continue

        # All parameters of a group have the same dtypes, so take those of the first one with
        # floating-point numbers.
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

    A unit is a module under `fully_shard`; torch sends the gradients of all its parameters in one
    message. For example, the gradients of two micro-batches are summed in fp32, while the backward
    pass itself is in bf16:

        weight, used by both micro-batches: torch has its fp32 gradient from the first one
        bias, used by the second only: its gradient is *late*, and would stay in bf16

    Torch refuses to send both together. So the late gradient is converted to fp32. If the second
    micro-batch does not use bias either, `zeros_if_unused` decides: zeros are sent for it, or the
    message has weight alone.

    Args:
        unit: the unit.
        zeros_if_unused: what happens to a parameter that the last micro-batch does not use either.
            If True, zeros are sent for it. If False, it has no gradient, and is left out of the
            message.

    Returns:
        Hooks of the parameters that no micro-batch has used yet, to be removed after the pass.
    """
    hooks: list[RemovableHandle] = []
    for parameter_group in _parameter_groups(unit):
        unused_so_far = _unused_so_far(parameter_group)

        # If no parameter of the group was used, the next backward pass is its first one, in which
        # all gradients have the same dtype.
        some_were_used = len(unused_so_far) < len(parameter_group.fsdp_params)
        if not some_were_used:
            continue

        for fsdp_parameter in unused_so_far:
            whole = fsdp_parameter.unsharded_param
            if not whole.requires_grad:
                continue
            if zeros_if_unused:
                _accumulate_zeros(fsdp_parameter)
            else:
                convert = partial(_convert_gradient, fsdp_parameter)
                hooks.append(whole.register_post_accumulate_grad_hook(convert))
    return hooks


def _unused_so_far(parameter_group: Any) -> list[Any]:
    """Returns the parameters of a group without a gradient from earlier micro-batches."""
    unused = []
    for fsdp_parameter in parameter_group.fsdp_params:
        if fsdp_parameter.unsharded_accumulated_grad is None:
            unused.append(fsdp_parameter)
    return unused


def _accumulate_zeros(fsdp_parameter: Any) -> None:
    """Makes torch send zeros for a parameter, plus its late gradient if there is one."""
    whole = fsdp_parameter.unsharded_param
    zeros = whole.new_zeros(whole.shape, dtype=fsdp_parameter.reduce_dtype)
    fsdp_parameter.unsharded_accumulated_grad = zeros


def _convert_gradient(fsdp_parameter: Any, whole: Tensor) -> None:
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


def write_count(tensor: Tensor) -> int:
    """Returns how often a tensor was written to in place, as autograd counts it."""
    return tensor._version


def write_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the `write_count` of each tensor."""
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
    """Replaces the tensors of a module as `module.to()` does, and keeps its `Parameter` objects.

    Optimizers and tied modules refer to these objects, so they see the new tensors.

    Args:
        module: the module.
        convert: returns a tensor for a tensor; the same one if nothing is to be changed.
        recurse: False for the tensors that are registered in the module itself alone.
    """
    import torch

    # Set this for `_apply`, so that it swaps the contents of the old `Parameter` and the new one
    # (`torch.utils.swap_tensors`). By default, it may register a new object in the module instead.
    swapped_before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # Some modules override `_apply`. An LSTM, for example, also updates its list of weights.
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
def replacing_trunc_normal(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Makes `nn.init.trunc_normal_` call another function inside this context.

    The original reads the values that it has drawn: it draws again while any of them is out of
    bounds. So it cannot run on the meta device, where tensors have no values. Lockstep records the
    operations of an initialization there, to run them later.

    Args:
        replacement: called as `replacement(original, tensor, mean, std, a, b, generator=...)`, with
            the original function before its arguments.
    """
    from torch.nn import init

    # `nn.init.trunc_normal_` only calls this function.
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
    """Returns True for operations that return a Python value, which depends on the elements.

    These are `tensor.item()`, `torch.equal(...)` and `torch.allclose(...)`.

    Args:
        operation: an operation as a dispatch mode gets it, such as `torch.ops.aten.equal.default`.
    """
    import torch

    aten = torch.ops.aten
    return operation in (
        aten._local_scalar_dense.default,  # `tensor.item()`
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

    # This is torch's own method without the copies of the dicts of parameters, buffers and
    # submodules, which the caller replaces: three times as fast.
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
    "_torchdynamo_orig_callable",  # by this one torch recognises a wrapper
    "_torchdynamo_wrapper_id",  # what torch sets together with it
    "get_compiler_config",
)


def let_compile_again(module: nn.Module) -> None:
    """Lets a model that contains compiled modules be compiled as a whole, with all hooks.

    `torch.compile(block)` returns a wrapper, an `OptimizedModule`, whose only child is `block`. It
    has an attribute `_torchdynamo_orig_callable`: the `forward` that `block` had at that time. If a
    model that contains the wrapper is compiled, torch compiles this old `forward`. Hooks that were
    registered since then would silently be left out; under `fully_shard`, for example, no parameter
    would be gathered. Without the attribute torch treats the wrapper like any other module.

    Args:
        module: the model. The attributes are removed from each wrapper that it is or contains,
            which thereby loses its method `get_compiler_config`.
    """
    if not compiler_is_loaded():  # nothing can have been compiled
        return

    for part in module.modules():
        is_wrapper = COMPILED_CHILD_NAME in part._modules
        if is_wrapper:
            for name in ATTRIBUTES_OF_COMPILED_MODULES:
                vars(part).pop(name, None)


def in_backward_pass() -> bool:
    """Returns True if this thread runs a backward pass.

    That is also true while the forward pass of a checkpointed block is recomputed. Torch's own
    activation checkpointing uses the same test.
    """
    import torch

    return torch._C._current_graph_task_id() != -1  # -1: this thread runs none


def rows_summed_by_loss_function(node: Any) -> int:
    """Returns the number of rows that a loss function has added up with `reduction="sum"`.

    Args:
        node: a node of autograd's graph, for example the `grad_fn` of a loss.

    Returns:
        The size of the first dimension of the loss function's input. 0 if the node is that of
        another function, or of another reduction.
    """
    sum_reduction = 2  # torch.nn._reduction.get_enum("sum")
    if getattr(node, "_saved_reduction", None) != sum_reduction:
        return 0

    # Torch releases the input in the backward pass, after which it raises a RuntimeError.
    try:
        predictions: Tensor = node._saved_self
    except RuntimeError:
        return 0
    return len(predictions) if predictions.dim() > 0 else 0


def is_mean_of_loss_function(node: Any) -> bool:
    """Returns True for the node of a loss function that was called with `reduction="mean"`."""
    mean_reduction = 1  # torch.nn._reduction.get_enum("mean")
    return getattr(node, "_saved_reduction", None) == mean_reduction


def scalar_factor(node: Any) -> float | None:
    """Returns the number by which a node of autograd's graph multiplies: 0.25 for `loss / 4`.

    Args:
        node: a node of autograd's graph.

    Returns:
        None if the node is no multiplication or division, or not by one number on the CPU. Numbers
        of Python are on the CPU.
    """
    name = node.name()
    if name not in ("MulBackward0", "DivBackward0"):
        return None

    # What the node multiplies or divides by: a tensor, or None if the backward pass does not need
    # it. A Python number is a tensor on the CPU here.
    try:
        other = node._saved_other
    except RuntimeError:  # the backward pass has released it
        return None
    if other is None or other.numel() != 1 or other.requires_grad:
        return None
    if other.is_cuda:  # to read it would wait for the GPU
        return None

    value = float(other)
    if name == "MulBackward0":
        return value
    return 1 / value if value else None


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
    """Replaces the function that draws the indices of a batch, in all DataLoaders.

    Args:
        draw_indices: called for each batch, with the loader's iterator and torch's function that
            draws the indices. It must call this function and return its result.
        on_new_pass: called with the iterator of a loader with workers, when the iterator is created
            and, if the workers are persistent, when each further pass begins. Without workers it is
            not called.
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
    """Calls `on_batch` with each batch that a DataLoader delivers in this process.

    Torch has no public hook for batches, so this replaces `__next__` of torch's iterators. An
    iterator of our own around them would not have all their attributes, which some programs use.

    Args:
        on_batch: called with four arguments: the iterator; its dataset; the sampler, or the batch
            sampler if that is not of torch's own class; and the batch, or `END_OF_PASS`.

    Returns:
        A function that stops the watching.
    """
    from torch.utils.data import BatchSampler, dataloader

    iterator_class: Any = dataloader._BaseDataLoaderIter
    original_next = iterator_class.__next__

    def watched_next(iterator: Any) -> Any:
        """Returns the next batch of a DataLoader's iterator, as `original_next` does.

        This takes the place of torch's `__next__`. It calls `on_batch` (the argument of
        `watch_data_loaders`) with each batch, and with `END_OF_PASS` after the last one.
        """
        # `on_batch` gets what the user has chosen: the sampler inside of torch's BatchSampler, or a
        # batch sampler of the user's own.
        chosen_sampler = iterator._index_sampler
        if type(chosen_sampler) is BatchSampler:
            chosen_sampler = chosen_sampler.sampler

        try:
            batch = original_next(iterator)
        except StopIteration:
            on_batch(iterator, iterator._dataset, chosen_sampler, END_OF_PASS)
            raise

        on_batch(iterator, iterator._dataset, chosen_sampler, batch)
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
    """Makes `Join` call `callback` on a rank without batches, for each batch of the other ranks.

    Under torch's `Join`, such a rank shadows the iterations of the others: it takes part in their
    collectives, without a batch of its own.

    Args:
        callback: called before this rank takes part in the collectives of an iteration.
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


def unscale_shards_with_others() -> None:
    """Lets torch's GradScaler unscale gradients of which some are DTensors and others are not.

    Torch unscales all gradients in one call. It takes the mesh over which it looks for infinite
    values from the first gradient of the list, which must therefore be a DTensor.
    """
    import torch
    from torch.distributed.tensor import DTensor

    # Read in torch 2.11 and 2.13.
    handlers = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    original = handlers[operation]
    if getattr(original, "sorts_gradients", False):  # this function was called before
        return

    def unscale(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Moves the DTensors to the front. The gradients are changed in place, in any order."""
        gradients, *others = args
        sorted_gradients = sorted(gradients, key=is_sharded, reverse=True)
        original(op_call, (sorted_gradients, *others), kwargs)

    unscale.sorts_gradients = True  # type: ignore[attr-defined]
    handlers[operation] = unscale


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


def redirect_store(*, from_port: int, to_port: int) -> None:
    """Makes `init_process_group` connect to a running store instead of serving one.

    A store that torch serves listens on all interfaces of the machine, so others could reach it.
    Lockstep serves a store that listens on one address only, and redirects torch to it.

    Args:
        from_port: the port in `tcp://HOST:PORT`, or MASTER_PORT for `env://`. Calls with any
            other port are not changed.
        to_port: the port of the running store.
    """
    # `init_process_group` calls this function. It is replaced for the rest of the process.
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store

    def create_store(host: str, port: int, rank: int, size: int, timeout: Any, *rest: Any) -> Any:
        if port != from_port:
            return original(host, port, rank, size, timeout, *rest)
        return rendezvous.TCPStore(host, to_port, size, is_master=False, timeout=timeout)

    rendezvous._create_c10d_store = create_store


# Process groups and their Flight Recorder

RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Functions of `torch._C._distributed_c10d` that return the Flight Recorder's calls, of Gloo and of
NCCL. With `_json` at the end of its name, each returns them without stacks and much faster."""


def flight_record(*, stacks: bool) -> str:
    """Returns the calls in torch's Flight Recorder, as JSON.

    Torch has a recorder for each kind of backend, such as NCCL. The result is a list with one
    element for each recorder.

    Args:
        stacks: True to include the stack of each call, if that is possible at once (see
            `_compiler_is_fully_imported`). 2000 calls take 0.2 s with stacks, 50 ms without.
    """
    import torch._C._distributed_c10d as c10d

    with_stacks = stacks and _compiler_is_fully_imported()
    records: list[bytes] = []
    for name in RECORDERS:
        # Torch has two functions for each recorder. Only the one without `_json` returns stacks.
        function_name = name if with_stacks else f"{name}_json"
        if hasattr(c10d, function_name):
            records.append(getattr(c10d, function_name)())
    if with_stacks:
        # Records with stacks are pickles. They are safe to load: torch made them in this process.
        # They may contain values that JSON does not know; these become texts.
        return json.dumps([pickle.loads(record) for record in records], default=str)

    texts = [record.decode(errors="replace") for record in records]
    return f"[{', '.join(texts)}]"


def _compiler_is_fully_imported() -> bool:
    """Returns True if torch's compiler is loaded, and no thread is importing it just now.

    Torch needs it to record stacks. If it is not loaded, torch loads it, in 2 s and while it holds
    the interpreter's lock. A process that uses DDP has loaded it.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None:
        return False

    # Python's import system sets `__spec__._initializing` to True while it imports the module. If
    # the attribute is missing, the module is taken to be still importing, to be safe.
    import_spec = getattr(compiler, "__spec__", None)
    is_being_imported = getattr(import_spec, "_initializing", True)
    return not is_being_imported


def take_gpu(fallback_index: int | None = None) -> None:
    """Makes the GPU of this rank the current one of this thread, before `flight_record` is called.

    Torch's Flight Recorder asks CUDA whether a call has ended. A thread that has no current GPU
    would open GPU 0 for that, and every rank of the machine would take some hundred MiB of its
    memory.

    Args:
        fallback_index: number of the GPU to take if the process group does not say which GPU it
            uses. If it is None, the number in LOCAL_RANK is used.
    """
    cuda = sys.modules.get("torch.cuda")
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if cuda is None or c10d is None or not cuda.is_initialized():  # the process uses no GPU
        return

    device_of_group = getattr(c10d.GroupMember.WORLD, "bound_device_id", None)
    if device_of_group is not None:
        index = device_of_group.index
    elif fallback_index is not None:
        index = fallback_index
    else:
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


def num_collectives() -> int | None:
    """Returns how many collectives this rank has begun, in all process groups that are open.

    Messages between two ranks (`dist.send`) are not counted. The result is None if a backend, such
    as MPI, does not count its collectives.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return 0

    total = 0
    for group in list(c10d._world.pg_names):
        count = _num_collectives_of(group)
        if count is None:
            return None
        total += count
    return total


def has_not_communicated(groups: Iterable[Any]) -> bool:
    """Returns True if this rank has certainly called no collective and sent no message.

    The Flight Recorder has both, of Gloo and NCCL. The groups themselves count the collectives of
    other backends.

    Args:
        groups: all default process groups that were opened; they may be closed by now.
    """
    if not _flight_recorder_is_complete():  # nothing is certain
        return False

    for record in json.loads(flight_record(stacks=False)):
        if record.get("entries"):
            return False

    return all(_num_collectives_of(group) == 0 for group in groups)


def _num_collectives_of(group: Any) -> int | None:
    """Returns how many collectives a group has begun, or None if its backend does not count."""
    try:
        count: int = group._get_sequence_number_for_group()
    except RuntimeError:
        return None
    return count


def _flight_recorder_is_complete() -> bool:
    """Returns True if torch's Flight Recorder is on, and records both Gloo and NCCL."""
    buffer_size = os.environ.get("TORCH_FR_BUFFER_SIZE", "")
    is_on = buffer_size.isdigit() and int(buffer_size) > 0
    return is_on and _torch_records_gloo()


def _torch_records_gloo() -> bool:
    """Returns True if torch's Flight Recorder records the calls of Gloo; before 2.8 only NCCL's."""
    import torch._C._distributed_c10d as c10d

    return hasattr(c10d, "_dump_fr_trace_json")


def process_groups() -> list[dict[str, Any]]:
    """Returns the names, descriptions and ranks of this rank's process groups."""
    # If torch.distributed has not been imported, there are none, and this must not import it.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []

    descriptions = []
    names_of_groups = list(c10d._world.pg_names.items())  # a copy: another thread may open a group
    for group, name in names_of_groups:
        # For each rank of the group, its number in the run and in the group.
        rank_in_group = c10d._world.pg_group_ranks.get(group, {})
        descriptions.append(
            {
                "name": str(name),
                "description": str(getattr(group, "group_desc", "")),
                "ranks": sorted(rank_in_group),
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
            variables = frame.f_locals  # those of torch's function
            if "group_name" not in variables:  # torch has not chosen it yet
                return None

            # At the end of `new_group` all ranks wait for each other if TORCH_DIST_INIT_BARRIER=1,
            # unless the caller wants that only the members of the group do.
            assert c10d is not None  # the frame is one of its functions
            has_barrier_of_all = c10d._is_barrier_after_init() == 1
            caller_wants_members_only = bool(variables["use_local_synchronization"])
            all_ranks_wait = has_barrier_of_all and not caller_wants_members_only
            return {
                "name": str(variables["group_name"]),
                "ranks": [int(rank) for rank in variables["ranks"]],
                "backend": str(variables["backend"]),
                "members_only": not all_ranks_wait,
            }

        frame = frame.f_back
    return None


def call_on_new_default_group(on_opened: Callable[[object], object]) -> None:
    """Calls `on_opened` with each default process group that this process opens from now on.

    `init_process_group` sets the group by `_update_default_pg`, which this replaces. When the group
    is closed, torch calls the same function with None.
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


def bound_to_processors(command: tuple[str, ...], gpu: int, mode: str) -> tuple[str, ...]:
    """Returns a command that runs on the processors near a GPU, as torchrun's --numa-binding does.

    Args:
        command: the command line of a rank, as words.
        gpu: index of the GPU, which is the local rank of this rank.
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
    try:
        with _silenced(logging.getLogger(binding.__name__)):  # it would print the traceback
            if "device_index" in inspect.signature(wrap).parameters:  # since torch 2.14
                return tuple(wrap(command, numa_options=options, device_index=gpu))
            return tuple(wrap(command, numa_options=options, gpu_index=gpu))
    except Exception as error:  # of CUDA, of the file system, of torch's own checks
        raise SettingError(
            f"--numa-binding {mode}",
            f"local rank {gpu} cannot be bound: {error}",
            "leave the flag out; it needs one GPU a process, and the command numactl",
        ) from None


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    """Disables a logger inside this context."""
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def number_among_spawned() -> int | None:
    """Returns the number that `torch.multiprocessing.spawn` has given to this process.

    It is the first argument of the function that runs in the process. The function of torch that
    calls it is looked for among the callers of this one.

    Returns:
        None in a process that `spawn` has not started.
    """
    # The name `torch.multiprocessing.spawn` is the function, not the module.
    file = sys.modules["torch.multiprocessing.spawn"].__file__
    frame = inspect.currentframe()
    while frame is not None:
        # `_wrap(fn, i, args, ...)` calls `fn(i, *args)`.
        if frame.f_code.co_name == "_wrap" and frame.f_code.co_filename == file:
            number: int | None = frame.f_locals.get("i")
            return number
        frame = frame.f_back
    return None

"""The units of FSDP2, which are modules under `fully_shard`.

The private names used here were also checked against the sources of torch 2.8 and 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.utils.hooks import RemovableHandle


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


def make_whole_parameters(unit: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Makes the whole parameters of a unit before it runs for the first time.

    Each parameter of the unit has two forms: its shard, and the whole parameter that torch puts
    into the module in its place while the unit runs (`unsharded_param`). Torch makes the second one
    when it gathers the unit for the first time, and uses it in all forward passes from then on.
    Here it is made without gathering: it has a shape, and no memory.

    The model must have its root already (`make_fsdp_root`).

    Returns:
        For each parameter of the unit: its shard, and the whole parameter.
    """
    import torch

    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for parameter_group in _parameter_groups(unit):
        # Parameters made in inference mode could never be trained.
        with torch.inference_mode(False):
            has_own_gather = any(_gathers_itself(each) for each in parameter_group.fsdp_params)
            if has_own_gather:
                # Only the class of the shards (such as that of float8 weights) knows the shapes of
                # the whole parameters, so the unit is gathered, and its memory is freed again.
                unit.unshard()
                unit.reshard()
            else:
                num_shards = parameter_group._all_gather_process_group.size()
                for fsdp_parameter in parameter_group.fsdp_params:
                    _make_whole_parameter(fsdp_parameter, num_shards, parameter_group.device)

        for fsdp_parameter in parameter_group.fsdp_params:
            pairs.append((fsdp_parameter.sharded_param, fsdp_parameter.unsharded_param))
    return pairs


def _gathers_itself(fsdp_parameter: Any) -> bool:
    """Returns True if the class of a shard says how the whole parameter is gathered."""
    return hasattr(fsdp_parameter._sharded_local_tensor, "fsdp_pre_all_gather")


def _make_whole_parameter(fsdp_parameter: Any, num_shards: int, device: torch.device) -> None:
    """Makes the whole parameter of one shard; see `make_whole_parameters`."""
    num_elements_of_shard = fsdp_parameter.padded_sharded_param_size.numel()
    dtype = fsdp_parameter.param_dtype or fsdp_parameter.orig_dtype
    fsdp_parameter.init_all_gather_outputs([num_elements_of_shard], [dtype], num_shards, device)
    fsdp_parameter.init_unsharded_param()
    fsdp_parameter.free_unsharded_param()


def gathered_dtype(unit: FSDPModule) -> torch.dtype | None:
    """Returns the dtype in which an FSDP unit gathers its parameters; None: in their own."""
    dtype: torch.dtype | None = unit._get_fsdp_state()._mp_policy.param_dtype
    return dtype


def set_dtypes_of_frozen_unit(unit: FSDPModule) -> None:
    """Tells torch the dtypes of a unit whose parameters are all frozen.

    From torch 2.7 to 2.13 a unit takes these dtypes from its trained parameters when it runs for
    the first time, so one whose parameters are all frozen gets none. If its parameters are trained
    later, a gradient in half precision would then not fit its parameter in fp32. Other versions of
    torch need no help: 2.6 and 2.14 take the dtypes from frozen parameters too, and 2.15 has them
    for each parameter.
    """
    for parameter_group in _parameter_groups(unit):
        has_attribute = hasattr(parameter_group, "_orig_dtype")  # not with torch 2.15
        if not has_attribute or parameter_group._orig_dtype is not None:
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
    parameters are gathered in. `parameter.grad` is then None, except with torch 2.15 (see
    `_torch_accumulates_in_grad`).
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
            if _torch_accumulates_in_grad(fsdp_parameter):
                fsdp_parameter.unsharded_param.grad = None
            else:
                fsdp_parameter.unsharded_accumulated_grad = None


def _torch_accumulates_in_grad(fsdp_parameter: Any) -> bool:
    """Returns True if torch accumulates the gradients of micro-batches in `parameter.grad`.

    This is so since torch 2.15, in fp32. There `unsharded_accumulated_grad` is a property that
    returns `parameter.grad`. Torch also converts late gradients itself
    (`accumulate_late_gradients`).
    """
    return isinstance(getattr(type(fsdp_parameter), "unsharded_accumulated_grad", None), property)


def accumulate_late_gradients(unit: FSDPModule, *, zeros_if_unused: bool) -> list[RemovableHandle]:
    """Lets parameters that no micro-batch has used yet fit into the message of the last one.

    Torch sends the gradients of all parameters of a unit in one message, and before torch 2.15 they
    must have one dtype. Those of parameters that an earlier micro-batch has used were accumulated
    in fp32. A gradient is *late* if only the last micro-batch uses the parameter: it would be sent
    in bf16, as it is computed. So these parameters get a hook that converts it, or fp32 zeros to
    which torch adds it.

    Args:
        unit: the unit, a module under `fully_shard`.
        zeros_if_unused: True if zeros are to be sent for a parameter that the last micro-batch does
            not use either. If False, it has no gradient, and is left out of the message.

    Returns:
        The hooks, to be removed after the backward pass of the last micro-batch.
    """
    hooks: list[RemovableHandle] = []
    for parameter_group in _parameter_groups(unit):
        for fsdp_parameter in _parameters_with_late_gradients(parameter_group):
            if zeros_if_unused:
                _accumulate_zeros(fsdp_parameter)
            else:
                convert = partial(_convert_gradient, fsdp_parameter)
                whole = fsdp_parameter.unsharded_param
                hooks.append(whole.register_post_accumulate_grad_hook(convert))
    return hooks


def _parameters_with_late_gradients(parameter_group: Any) -> list[Any]:
    """Returns the trained parameters of a group whose gradients could not be sent as computed.

    There is none if no parameter of the group was used yet: then all gradients are computed in the
    last micro-batch, in the same dtype.
    """
    late = []
    some_were_used = False
    for fsdp_parameter in parameter_group.fsdp_params:
        if fsdp_parameter.unsharded_accumulated_grad is not None:
            some_were_used = True
            continue
        is_trained = fsdp_parameter.unsharded_param.requires_grad
        torch_converts_itself = _torch_accumulates_in_grad(fsdp_parameter)
        if is_trained and not torch_converts_itself:
            late.append(fsdp_parameter)
    return late if some_were_used else []


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


def reset_after_failed_forward(units: Sequence[FSDPModule]) -> bool:
    """Makes torch forget a forward pass that has raised an error.

    Gradients stay: an evaluation may fail between a backward pass and the optimizer step. (Torch
    since 2.15 would drop them.)

    Args:
        units: all units of a model, its root last.

    Returns:
        False if torch cannot do that, before 2.13.
    """
    reset: Callable[[], None] | None = getattr(units[-1], "reset_iter_state", None)
    if reset is None:
        return False

    kept: list[tuple[nn.Parameter, Tensor | None]] = []
    for unit in units:
        for parameter in _all_parameters(unit):
            kept.append((parameter, parameter.grad))

    reset()
    for parameter, gradient in kept:
        if parameter.grad is not gradient:
            parameter.grad = gradient
    return True


def _all_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Returns the shards of an FSDP unit, and the whole parameters that torch has made of them."""
    parameters: list[nn.Parameter] = []
    for parameter_group in _parameter_groups(unit):
        for fsdp_parameter in parameter_group.fsdp_params:
            parameters.append(fsdp_parameter.sharded_param)
            whole = getattr(fsdp_parameter, "_unsharded_param", None)
            if whole is not None:  # torch makes it when it is needed for the first time
                parameters.append(whole)
    return parameters


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    """Returns torch's groups of the parameters of an FSDP unit; empty if it has none of its own."""
    state = unit._get_fsdp_state()
    parameter_groups = getattr(state, "_fsdp_param_groups", None)
    if parameter_groups is None:  # torch up to 2.11 has a single group, or None
        parameter_groups = [state._fsdp_param_group]
    return [group for group in parameter_groups if group is not None]


def _clear_process_groups(mesh_info: Any) -> None:
    """Sets the attributes of an FSDP unit's mesh that are process groups to None."""
    if not mesh_info:  # of a unit that keeps its parameters after the forward pass
        return
    for name in vars(mesh_info):
        if name.endswith("process_group"):
            setattr(mesh_info, name, None)

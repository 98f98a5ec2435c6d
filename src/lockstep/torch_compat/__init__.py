"""The only room that uses private names of torch, one function for each purpose.

Each name was read in the sources of torch 2.6, 2.9, 2.11, 2.13 and 2.14, unless a comment says
otherwise. `tests/test_torch_compat.py` fails if one of them changes.

There is one file for each subject, and all functions can be imported from here. The launcher uses
them before torch is imported, so torch is imported inside the functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.torch_compat.amp import (
    answer_grad_scaler as answer_grad_scaler,
    unscale_shards_with_others as unscale_shards_with_others,
    unscales_gradients as unscales_gradients,
)
from lockstep.torch_compat.autograd import (
    count_gradient_hooks as count_gradient_hooks,
    in_backward_pass as in_backward_pass,
    in_function_transform as in_function_transform,
    is_mean_of_loss_function as is_mean_of_loss_function,
    profiler_is_running as profiler_is_running,
    rows_summed_by_loss_function as rows_summed_by_loss_function,
    scalar_factor as scalar_factor,
)
from lockstep.torch_compat.compiler import (
    COMPILED_CHILD_NAME as COMPILED_CHILD_NAME,
    compile_only_callees as compile_only_callees,
    compiled_code_runs_eagerly as compiled_code_runs_eagerly,
    compiler_is_loaded as compiler_is_loaded,
    is_compiled as is_compiled,
    is_compiled_in_place as is_compiled_in_place,
    let_compile_again as let_compile_again,
    never_compiled as never_compiled,
    outside_compiled_code as outside_compiled_code,
    without_compile as without_compile,
)
from lockstep.torch_compat.data_loaders import (
    END_OF_PASS as END_OF_PASS,
    watch_data_loaders as watch_data_loaders,
    watch_indices as watch_indices,
    without_worker_info as without_worker_info,
)
from lockstep.torch_compat.ddp import (
    await_another_backward as await_another_backward,
    enclosing_ddp as enclosing_ddp,
    on_shadowed_iteration as on_shadowed_iteration,
)
from lockstep.torch_compat.dtensor import (
    is_sharded as is_sharded,
    local_box as local_box,
    to_local as to_local,
)
from lockstep.torch_compat.fsdp import (
    accumulate_late_gradients as accumulate_late_gradients,
    can_ignore_fsdp_parameters as can_ignore_fsdp_parameters,
    drop_accumulated_gradients as drop_accumulated_gradients,
    drop_fsdp_groups as drop_fsdp_groups,
    gather_in_backward_of as gather_in_backward_of,
    gathered_dtype as gathered_dtype,
    make_fsdp_root as make_fsdp_root,
    make_whole_parameters as make_whole_parameters,
    parameters_with_accumulated_gradient as parameters_with_accumulated_gradient,
    reset_after_failed_forward as reset_after_failed_forward,
    set_dtypes_of_frozen_unit as set_dtypes_of_frozen_unit,
    shards_in_reduction_order as shards_in_reduction_order,
    share_meshes_with_copies as share_meshes_with_copies,
)
from lockstep.torch_compat.gpus import (
    count_gpus_without_cuda as count_gpus_without_cuda,
    cuda_is_refused_in_this_copy as cuda_is_refused_in_this_copy,
)
from lockstep.torch_compat.launch import (
    bound_to_processors as bound_to_processors,
    is_in_init_process_group as is_in_init_process_group,
    number_among_spawned as number_among_spawned,
    skip_exit_barrier as skip_exit_barrier,
)
from lockstep.torch_compat.modules import (
    Members as Members,
    convert_tensors as convert_tensors,
    members as members,
    replace_apply as replace_apply,
    replacing_trunc_normal as replacing_trunc_normal,
    reset_method as reset_method,
    set_members as set_members,
    set_state_dict_metadata as set_state_dict_metadata,
    shallow_copy as shallow_copy,
    state_dict_metadata as state_dict_metadata,
)
from lockstep.torch_compat.older_torch import (
    accepted as accepted,
    dtypes_named as dtypes_named,
)
from lockstep.torch_compat.operations import (
    copy_operation as copy_operation,
    device_constructors as device_constructors,
    reads_number as reads_number,
    written_arguments as written_arguments,
)
from lockstep.torch_compat.process_groups import (
    call_on_new_default_group as call_on_new_default_group,
    gpu_of_default_group as gpu_of_default_group,
    group_being_made as group_being_made,
    process_groups as process_groups,
)
from lockstep.torch_compat.recorder import (
    flight_record as flight_record,
    has_not_communicated as has_not_communicated,
    num_collectives as num_collectives,
    take_gpu as take_gpu,
)
from lockstep.torch_compat.stores import (
    answers_as_store as answers_as_store,
    list_keys as list_keys,
    redirect_store as redirect_store,
    replace_store_creation as replace_store_creation,
    separate_attempts as separate_attempts,
)
from lockstep.torch_compat.tensors import (
    add_to_each as add_to_each,
    copy_to_each as copy_to_each,
    is_view as is_view,
    multiply_each as multiply_each,
    storage_key as storage_key,
    storage_reference as storage_reference,
    write_count as write_count,
    write_counts as write_counts,
)

if TYPE_CHECKING:
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch.nn.modules import batchnorm, dropout
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNorm: TypeAlias = batchnorm._BatchNorm
    NormBase: TypeAlias = batchnorm._NormBase
    DropoutNd: TypeAlias = dropout._DropoutNd
    pytree = _pytree

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

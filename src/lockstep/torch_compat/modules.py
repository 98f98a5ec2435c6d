"""Modules: what is registered in them, how it is converted, initialised and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn


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


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the method that gives a module's parameters new initial values; None without one."""
    from torch import nn

    if isinstance(module, nn.MultiheadAttention | nn.Transformer):  # without a public name
        return module._reset_parameters
    method = getattr(module, "reset_parameters", None)
    return method if callable(method) else None


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


def state_dict_metadata(state: Any) -> Any:
    """Returns the versions of the modules, which `nn.Module.state_dict()` stores; or None."""
    return getattr(state, "_metadata", None)


def set_state_dict_metadata(state: Any, metadata: Any) -> None:
    """Sets the metadata of a copied state dict; None is ignored."""
    if metadata is not None:
        state._metadata = metadata

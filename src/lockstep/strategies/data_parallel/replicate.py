"""Copies a module for the replicas of one forward pass, as torch's `replicate` does.

A copy is shallow: its submodules are new objects with the attributes of the originals. On the
module's own device, called *home*, copies share the parameters and get clones of the buffers. On
another device a copy has copies of the parameters, made by torch's broadcast (over NCCL where
possible), and autograd adds up their gradients at home. New copies are made for each forward pass.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from lockstep.batch.pytree import map_tensors
from lockstep.errors import UsageError
from lockstep.optim.precision import HalfForward
from lockstep.strategies.base import may_set_attributes
from lockstep.strategies.data_parallel.batchnorm import BatchNormOverReplicas
from lockstep.torch_compat import (
    Members,
    is_compiled,
    members,
    set_members,
    shallow_copy,
)
from lockstep.wording import describe_type

broadcast_coalesced: Any = comm.broadcast_coalesced
BUCKET_BYTES = 25 * 2**20
"""About how much is sent from one device to another at a time, as in DDP."""


def parameters_and_buffers(module: nn.Module) -> list[Tensor]:
    """Returns the parameters of a module, followed by its buffers."""
    return [*module.parameters(), *module.buffers()]


def replicate(
    module: nn.Module,
    tensors: Sequence[Tensor],
    home: torch.device,
    devices: Sequence[torch.device],
) -> list[nn.Module]:
    """Returns a copy of a module for each of the given devices.

    If all of them are the module's own device, the copies share its parameters. On other devices
    they have copies of the parameters; autograd then adds the gradients of these copies to the
    gradients of the original parameters.

    Args:
        module: the module, on the device `home`.
        tensors: its parameters and buffers.
        home: the device of the module.
        devices: the device of each copy: `home` for all of them, or for none.

    Raises:
        UsageError: a part of the module is bound to the original: compiled or scripted code, or a
            `forward` that was set on the object.
    """
    if home in devices:
        tensors_of_copies = [_with_cloned_buffers(tensors) for _ in devices]
    else:
        tensors_of_copies = copy_to_devices(tensors, devices)

    copies: list[nn.Module] = []
    for new_tensors in tensors_of_copies:
        new_tensor_by_id: dict[int, Tensor] = {}  # by the `id` of the tensor that it replaces
        for tensor, new_tensor in zip(tensors, new_tensors, strict=True):
            new_tensor_by_id[id(tensor)] = new_tensor
        copies.append(copy_module(module, new_tensor_by_id))

    return copies


def _with_cloned_buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the same parameters, and a clone of each buffer."""
    return [tensor if isinstance(tensor, nn.Parameter) else tensor.clone() for tensor in tensors]


def copy_module(module: nn.Module, new_tensor_by_id: dict[int, Tensor]) -> nn.Module:
    """Returns a shallow copy of a module with other tensors.

    Args:
        module: the module to copy.
        new_tensor_by_id: the tensor that replaces each parameter and buffer, by the `id` of the
            original.
    """
    # Copy all submodules before connecting them, because each may be registered several times.
    copy_of: dict[nn.Module, nn.Module] = {}
    for name, part in module.named_modules():
        _check_can_be_copied(name, part)
        copy_of[part] = shallow_copy(part)

    for part, new_part in copy_of.items():
        _copy_slots(part, new_part)
        old = members(part)

        children: dict[str, nn.Module | None] = {}
        for name, child in old.modules.items():
            children[name] = None if child is None else copy_of[child]

        buffers: dict[str, Tensor | None] = {}
        for name, buffer in old.buffers.items():
            buffers[name] = None if buffer is None else new_tensor_by_id[id(buffer)]

        # The dictionaries are set directly, because `Module.__setattr__` takes longer than the copy
        # itself. The one for parameters is filled below.
        parameters: dict[str, Any] = {}
        set_members(new_part, Members(parameters, buffers, children))
        for name, parameter in old.parameters.items():
            new_parameter: Any = None
            if parameter is not None:
                new_parameter = new_tensor_by_id[id(parameter)]

            # A copied tensor is no `nn.Parameter`, so `setattr` makes it a plain attribute. This is
            # necessary, because an RNN updates its list of weights in `__setattr__`.
            if new_parameter is not parameter:
                setattr(new_part, name, new_parameter)

            # It is also put into the dictionary, so that `next(self.parameters()).device` is the
            # device of the copy.
            parameters[name] = new_parameter

        # A forward that was set on the object refers to the original.
        if "forward" in vars(part):
            new_part.forward = _bind_forward(vars(part)["forward"], part, new_part)

    return copy_of[module]


def _copy_slots(part: nn.Module, new_part: nn.Module) -> None:
    """Copies the attributes of a class with `__slots__`, which are not in `__dict__`."""
    state = object.__getstate__(part)
    if isinstance(state, tuple):  # the `__dict__`, and the values of the slots
        _, slots = state
        for name, value in slots.items():
            object.__setattr__(new_part, name, value)


def _check_can_be_copied(name: str, part: nn.Module) -> None:
    """Raises UsageError for code that is bound to one module object, which a copy cannot run."""
    module_name = name or "the module"
    if is_compiled(part):
        found = f"{module_name} is compiled"
    elif isinstance(part, torch.jit.ScriptModule):
        found = f"{module_name} is scripted"
    elif not _can_be_rebound(part):
        found = f"{module_name} has a forward set on the object"
    else:
        return

    raise UsageError(
        f"several replicas of {describe_type(part)}",
        f"{found}; such code is bound to one object on one device",
        "use strategy='ddp' for it, or leave torch.compile, torch.jit and the like out",
    )


def _can_be_rebound(part: nn.Module) -> bool:
    """Returns True if the forward of a module can also be called with a copy (`_rebind`)."""
    # Autocast sets a `HalfForward` on the object. Its attribute `own` is the forward that was set
    # there before; None if there was none.
    forward = vars(part).get("forward")
    if isinstance(forward, HalfForward):
        forward = forward.own

    # No forward was set on the object. That of the class works for all modules of the class.
    if forward is None:
        return True

    # A function or a partial may refer to the module in its closure or its arguments, where the
    # module cannot be replaced.
    if isinstance(forward, FunctionType | partial):
        return False

    # Any other forward is a method or an object, such as one with `self.module = module`. It refers
    # to the module by an attribute, and a copy of it can refer to another module. An object of a
    # class that is written in C has no such attributes.
    return hasattr(forward, "__dict__")


def _bind_forward(forward: Any, original: nn.Module, new_module: nn.Module) -> Callable[..., Any]:
    """Returns a `forward` for the copy of a module whose `forward` was set on the object.

    For example, a script sets `original.forward = MethodType(own_forward, original)`. The result
    then calls `own_forward` with the copy (`_rebind`).

    The result refers to the copy weakly, and binds `forward` to it anew in each call. Otherwise the
    copy and its `forward` would refer to each other, and would stay in memory until the next
    garbage collection.
    """
    reference = weakref.ref(new_module)

    def forward_of_copy(*args: Any, **kwargs: Any) -> Any:
        copy_of_module = reference()  # it is alive while it is called
        bound_forward = _rebind(forward, original, copy_of_module)
        return bound_forward(*args, **kwargs)

    return forward_of_copy


def _rebind(forward: Any, original: nn.Module, new_module: nn.Module | None) -> Any:
    """Returns a `forward` that calls the copy of a module instead of the original.

    There are two kinds of `forward`:

    - a method of the module, which is bound to the copy instead;
    - an object that refers to the module in its attributes. The object is copied, and in the
      attributes the module is replaced by its copy. An attribute may also be another `forward`,
      which the object calls; it is treated in the same way. For example, `BatchNormOverReplicas`
      has the module, and `HalfForward` (autocast) has the module and the previous `forward`.

    For example, `HalfForward(module=m, own=m.forward)` becomes
    `HalfForward(module=copy, own=copy.forward)`.

    Args:
        forward: the `forward` of the original, or one that such an object calls.
        original: the module that was copied.
        new_module: the copy.
    """
    if isinstance(forward, MethodType):
        is_of_module = forward.__self__ is original  # and not a method of another object
        return MethodType(forward.__func__, new_module) if is_of_module else forward
    return _rebind_object(forward, original, new_module)


def _rebind_object(forward: Any, original: nn.Module, new_module: nn.Module | None) -> Any:
    """Returns a copy of an object whose attributes refer to the copy of a module; see `_rebind`.

    For example, the attributes of a wrapper are `module`, the original, and `forward`, a method of
    the original. In the result they are the copy, and the same method of the copy.

    Args:
        forward: an object that is used as the `forward` of the original. `_can_be_rebound` has
            checked that it has attributes.
        original: the module that was copied.
        new_module: the copy.
    """
    copied_forward = copy.copy(forward)
    for name, attribute in vars(forward).items():
        if attribute is original:
            setattr(copied_forward, name, new_module)
        elif _is_inner_forward(forward, name, attribute):
            setattr(copied_forward, name, _rebind(attribute, original, new_module))

    return copied_forward


def _is_inner_forward(forward: Any, name: str, attribute: Any) -> bool:
    """Returns True if an attribute of a `forward` is another `forward`, which the first one calls.

    Args:
        forward: an object that is used as the `forward` of a module.
        name: the name of the attribute.
        attribute: the value of the attribute.
    """
    if isinstance(attribute, MethodType | BatchNormOverReplicas):
        return True

    # `HalfForward` keeps the forward that was set on the module before in its attribute `own`; None
    # if there was none.
    return isinstance(forward, HalfForward) and name == "own" and attribute is not None


def copy_to_devices(
    tensors: Sequence[Tensor], devices: Sequence[torch.device]
) -> list[list[Tensor]]:
    """Returns differentiable copies of the tensors, as one list for each device."""
    if not devices or not tensors:  # there is nothing to copy
        return [[] for _ in devices]

    # torch's broadcast does not accept complex tensors.
    real_tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]

    # All copies for the first device, then all copies for the next one, and so on.
    flat_copies = Broadcast.apply(list(devices), *real_tensors)  # type: ignore[no-untyped-call]

    copies_of_device: list[list[Tensor]] = []
    for start in range(0, len(flat_copies), len(tensors)):
        copies: list[Tensor] = []
        for tensor, copied in zip(tensors, flat_copies[start : start + len(tensors)], strict=True):
            copies.append(torch.view_as_complex(copied) if tensor.is_complex() else copied)
        copies_of_device.append(copies)

    return copies_of_device


class Broadcast(torch.autograd.Function):
    """torch's `Broadcast`, without the copy on the device that the tensors come from.

    A parameter that no replica has used gets no gradient, as on one device. With torch's class it
    would get zeros, and an optimizer with weight decay would then change it.
    """

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns copies of the tensors: those on `devices[0]`, then those on `devices[1]`, ...

        For the tensors a and b on 2 devices, these are `(a0, b0, a1, b1)`.
        """
        ctx.home = tensors[0].device
        ctx.num_tensors = len(tensors)
        ctx.set_materialize_grads(False)
        needs_gradient = ctx.needs_input_grad[1:]  # without the first argument, `devices`

        # torch's function broadcasts from the first device of the list, here the device of the
        # tensors. It returns a list for each device; the first list has the tensors themselves.
        tensors_of_devices = broadcast_coalesced(tensors, [ctx.home, *devices])
        frozen: list[Tensor] = []
        copies_of_all: list[Tensor] = []
        for copies_on_device in tensors_of_devices[1:]:
            copies_of_all += copies_on_device
            for copied, is_needed in zip(copies_on_device, needs_gradient, strict=True):
                if not is_needed:
                    frozen.append(copied)

        ctx.mark_non_differentiable(*frozen)
        return tuple(copies_of_all)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns, for each tensor, the sum of the gradients of its copies.

        Args:
            ctx: what `forward` has stored.
            *gradients: the gradients of the copies, in the order in which `forward` returns these.
        """
        gradients_of_tensors: list[list[Tensor]] = []
        for index in range(ctx.num_tensors):
            # For the tensors a and b on 2 devices, the gradients are those of a0, b0, a1 and b1. So
            # those of a are `gradients[0::2]`. The gradient of a copy is None if the replica has
            # not used it.
            gradients_of_copies = gradients[index :: ctx.num_tensors]
            used = [gradient for gradient in gradients_of_copies if gradient is not None]
            gradients_of_tensors.append(used)

        no_gradient_of_devices = None  # of the first argument of `forward`
        return no_gradient_of_devices, *sum_gradients(gradients_of_tensors, ctx.home)


_BucketKey = tuple[tuple[torch.device, ...], torch.dtype]
"""What the gradients of the tensors in a bucket have in common: their devices and their dtype."""


def sum_gradients(
    gradients_of_tensors: Sequence[Sequence[Tensor]], home: torch.device
) -> list[Tensor | None]:
    """Adds up the gradients of each tensor at home.

    Every transfer takes time, however small it is. So gradients on the same devices are put into
    buckets, and each bucket goes from device to device as one tensor. The sums have the same bits
    as sums of single tensors.

    Args:
        gradients_of_tensors: for each tensor, its gradients on different devices.
        home: the device of the sums.

    Returns:
        The sum for each tensor; None if it has no gradients.
    """
    sums: list[Tensor | None] = [None] * len(gradients_of_tensors)
    buckets: dict[_BucketKey, list[int]] = {}  # lists of indices of tensors
    bytes_in_bucket: dict[_BucketKey, int] = {}  # on each of the devices
    for index, gradients in enumerate(gradients_of_tensors):
        if not gradients:
            continue

        if any(gradient.layout != torch.strided for gradient in gradients):  # sparse ones
            sums[index] = _sum_from_device_to_device(gradients).to(home)
            continue

        # All gradients of the tensor have the same dtype and size.
        first_gradient = gradients[0]
        devices = tuple(gradient.device for gradient in gradients)
        key = (devices, first_gradient.dtype)
        bucket = buckets.setdefault(key, [])
        bucket.append(index)
        bytes_in_bucket[key] = bytes_in_bucket.get(key, 0) + first_gradient.nbytes
        if bytes_in_bucket[key] >= BUCKET_BYTES:
            _sum_bucket(gradients_of_tensors, bucket, home, sums)
            del buckets[key], bytes_in_bucket[key]

    for bucket in buckets.values():
        _sum_bucket(gradients_of_tensors, bucket, home, sums)

    return sums


def _sum_bucket(
    gradients_of_tensors: Sequence[Sequence[Tensor]],
    bucket: Sequence[int],
    home: torch.device,
    sums: list[Tensor | None],
) -> None:
    """Adds up the gradients of the tensors in a bucket, and writes the results into `sums`.

    Args:
        gradients_of_tensors: for each tensor, its gradients on different devices.
        bucket: the indices of tensors whose gradients are on the same devices and have one dtype.
        home: the device of the sums.
        sums: the sum for each tensor, by the index of the tensor.
    """
    # With the tensors a and b on the devices 0 and 1, this is [[a0, a1], [b0, b1]]. Then
    # `flat_gradients` becomes [a0 and b0 in one tensor, a1 and b1 in one tensor].
    gradients_in_bucket = [gradients_of_tensors[index] for index in bucket]
    flat_gradients: list[Tensor] = []
    for gradients_on_device in zip(*gradients_in_bucket, strict=True):
        parts = [gradient.reshape(-1) for gradient in gradients_on_device]
        flat_gradients.append(parts[0] if len(parts) == 1 else torch.cat(parts))

    total = _sum_from_device_to_device(flat_gradients).to(home)
    shapes = [gradients[0].shape for gradients in gradients_in_bucket]
    views = torch.split(total, [shape.numel() for shape in shapes])

    for index, shape, view in zip(bucket, shapes, views, strict=True):
        # With a common count, torch would take a write to one of the sums for a write to all.
        sums[index] = _with_own_write_count(view).view(shape)


def _with_own_write_count(view: Tensor) -> Tensor:
    """Returns a view whose writes torch does not count as writes to other views of the tensor.

    All views of a tensor share one count of writes. `data` has a count of its own, but no graph. In
    a backward pass there is a graph only with `create_graph=True`; the view is then left as it is.
    """
    has_graph = torch.is_grad_enabled()
    return view if has_graph else view.data


def _sum_from_device_to_device(summands: Sequence[Tensor]) -> Tensor:
    """Adds up tensors on several devices, moving the sum from each device to the next one.

    So no device holds more than one tensor besides its own.
    """
    total = summands[0]
    for summand in summands[1:]:
        total = total.to(summand.device) + summand
    return total


AttributesOfPart = dict[str, dict[str, Any]]
"""The attributes of submodules, by the name of the submodule and the name of the attribute."""


def attributes(module: nn.Module) -> AttributesOfPart:
    """Returns the attributes of every submodule whose forward the user may have written."""
    attributes_of_part: AttributesOfPart = {}
    for path, part in module.named_modules():
        if may_set_attributes(part):
            attributes_of_part[path] = dict(vars(part))
    return attributes_of_part


def copy_state_back(
    module: nn.Module, replica: nn.Module, before: AttributesOfPart, home: torch.device
) -> None:
    """Copies the buffers and new attributes of a replica back to the original module.

    This is done if the home device got no samples, so that the original has not run in a forward
    pass. It then has the same buffers and attributes as if it had run.

    Args:
        module: the original module.
        replica: the copy that has run.
        before: the attributes of each submodule of the copy before the forward pass, as returned by
            `attributes(replica)`.
        home: the device of the original.
    """
    parts_of_replica = dict(replica.named_modules())
    for path, attributes_before in before.items():
        original_part = module.get_submodule(path)
        _copy_new_attributes_back(original_part, parts_of_replica[path], attributes_before, home)

    with torch.no_grad():
        for path, original_part in module.named_modules():
            original_buffers = members(original_part).buffers  # the dict that the module uses
            for name, new_buffer in members(parts_of_replica[path]).buffers.items():
                _copy_buffer_back(original_buffers, name, new_buffer, home)


def _copy_new_attributes_back(
    original_part: nn.Module,
    part_of_replica: nn.Module,
    attributes_before: dict[str, Any],
    home: torch.device,
) -> None:
    """Copies the attributes that a forward pass has set in a submodule of a replica.

    Args:
        original_part: the submodule of the original, which gets them.
        part_of_replica: the submodule of the replica.
        attributes_before: the attributes of `part_of_replica` before the forward pass.
        home: the device of the original.
    """
    for name, value in vars(part_of_replica).items():
        is_unchanged = name in attributes_before and attributes_before[name] is value
        if not is_unchanged:
            # (`to` copies a tensor only if it is on another device.)
            vars(original_part)[name] = map_tensors(value, lambda tensor: tensor.to(home))


def _copy_buffer_back(
    original_buffers: dict[str, Tensor | None],
    name: str,
    new_buffer: Tensor | None,
    home: torch.device,
) -> None:
    """Copies a buffer of a replica into the original's buffer, or replaces it if the shape differs.

    Args:
        original_buffers: the buffers of the original submodule, by name.
        name: the name of the buffer.
        new_buffer: the buffer of the replica.
        home: the device of the original.
    """
    buffer = original_buffers.get(name)
    if new_buffer is None:
        original_buffers[name] = None
    elif buffer is not None and buffer.shape == new_buffer.shape:
        buffer.copy_(new_buffer)
    else:
        original_buffers[name] = new_buffer.detach().to(home)

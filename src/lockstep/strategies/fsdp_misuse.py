"""Errors for operations that a script cannot do with a model that is sharded by FSDP.

After `fully_shard` each rank has only a *shard* of every parameter, the previous parameter objects
are useless, and gradients reach the shards without autograd. Code that is right for a plain model
would then go wrong without an error: hooks on gradients are not called, penalties on old parameters
are 0, gradients of copies are not averaged. Such code raises an error here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep import torch_compat
from lockstep.errors import LockstepError, UsageError, add_note_once
from lockstep.language import translate
from lockstep.wording import describe_type, join_first


def check_parameters(module: nn.Module) -> None:
    """Raises UsageError if a parameter cannot be sharded."""
    for name, parameter in module.named_parameters():
        reason_and_advice = _why_not_sharded(parameter)
        if reason_and_advice is not None:
            reason, advice = reason_and_advice
            raise UsageError(f"world.prepare of the parameter {name!r}", reason, advice)

    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.sparse and layer.weight.requires_grad:
            raise UsageError(
                f"world.prepare of {name!r}, an embedding with sparse gradients",
                "gradients of shards are dense",
                "leave sparse=True out, or use strategy='ddp'",
            )


def _why_not_sharded(parameter: nn.Parameter) -> tuple[str, str] | None:
    """Returns why a parameter cannot be sharded and what to do about it, or None."""
    if isinstance(parameter, DTensor):
        return "is sharded already", "give a plain module to world.prepare, once"
    if parameter.dim() == 0 and not torch_compat.can_ignore_fsdp_parameters():
        return "has no dimension to cut", "make it a parameter of shape (1,)"
    if not parameter.numel():
        return "has no elements", "leave it out, or make it a buffer"
    return None


def check_dtypes(units: Sequence[nn.Module]) -> None:
    """Raises UsageError if the trainable parameters of a unit have different dtypes.

    The gradients of a unit are sent in one tensor, except those of parameters without dimensions.

    Args:
        units: the units of a model, inner units before outer ones. A parameter belongs to the first
            unit that contains it.
    """
    ids_in_earlier_units: set[int] = set()
    for unit in units:
        example_of_dtype: dict[Any, str] = {}  # the name of one parameter of each dtype
        ids_in_unit: set[int] = set()
        for name, parameter in unit.named_parameters():
            is_sent = parameter.requires_grad and parameter.dim() > 0
            if is_sent and id(parameter) not in ids_in_earlier_units:
                example_of_dtype[parameter.dtype] = name
                ids_in_unit.add(id(parameter))

        if len(example_of_dtype) > 1:
            raise UsageError(
                f"world.prepare of {describe_type(unit)} with parameters of several dtypes",
                ", ".join(f"{name} is {dtype}" for dtype, name in example_of_dtype.items()),
                "convert them to one dtype, freeze them (requires_grad_(False)), or choose other "
                "units with blocks=",
            )

        ids_in_earlier_units |= ids_in_unit


def check_hooks(parameters: Mapping[str, Tensor], *, num_own_hooks: int = 0) -> None:
    """Raises UsageError if the user has registered hooks on gradients, since they are never called.

    Args:
        parameters: the parameters by name.
        num_own_hooks: how many hooks Lockstep has registered on each of them.
    """
    hooked: list[str] = []
    for name, parameter in parameters.items():
        if torch_compat.count_gradient_hooks(parameter) > num_own_hooks:
            hooked.append(name)

    if hooked:
        raise UsageError(
            "hooks on the gradients of a sharded model's parameters",
            f"those of {join_first(hooked)} are not called: gradients of shards do not come from "
            "autograd",
            "read or change gradients between world.backward and optimizer.step",
        )


class ReplacedParameter(nn.Parameter):
    """A parameter whose place in the model a shard has taken.

    Any operation on it raises UsageError.

    It has no elements and no gradient any more. Without the error, its norm would be 0, and so
    would a penalty on it.
    """

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise UsageError(
            "a parameter that was taken from a model before world.prepare",
            "a shard has taken its place in the model",
            "take it from the prepared model: model.parameters(), model.head.weight",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "a parameter that was replaced in world.prepare"


def refuse_autograd_gradient(name: str, gradient: Tensor) -> None:
    """A gradient hook of a shard, which always raises UsageError.

    Autograd brings a gradient to a shard only if the loss was computed from the shard itself. In
    the model's forward pass torch replaces shards by whole parameters.

    Args:
        name: the name of the parameter.
        gradient: the gradient that autograd brings.
    """
    raise outside_forward_error(f"{name} was a shard there, or made whole from shards")


_ABOUT_DTYPES = re.compile(r"\bdtypes?\b|(scalar|same|bias|weight) type|promoting")
"""Matches torch's messages about operands of different dtypes."""


def note_mixed_dtypes(error: BaseException | None, half_dtype: torch.dtype) -> None:
    """Adds a note to an error of a forward pass if its message is about dtypes.

    Args:
        error: the error; None if there was none.
        half_dtype: the dtype of the parameters in the forward pass.
    """
    if not isinstance(error, RuntimeError | ValueError) or isinstance(error, LockstepError):
        return

    if _ABOUT_DTYPES.search(str(error)):
        note = (
            f"parameters are in {half_dtype} in the forward pass, and there is no autocast that "
            "brings operands to one dtype: convert them in the model, as by "
            "x.to(self.weight.dtype), or use FSDP(autocast=True)"
        )
        add_note_once(error, "mixed dtypes", translate(note))


def outside_forward_error(found: str) -> UsageError:
    """Returns the error for a loss that uses parameters outside of the model's forward pass.

    Args:
        found: how the parameters were used, for the message.
    """
    return UsageError(
        "a loss computed from a parameter of a sharded model, outside of its forward pass",
        f"{found}: such a gradient is neither averaged over the ranks nor weighted",
        "compute it in the model's forward pass, where parameters are whole, and return it; "
        "for a penalty on weights there is weight_decay of the optimizer",
    )


def replaced_parameter_error(name: str) -> UsageError:
    """Returns the error for a forward pass of a model in which a parameter was replaced.

    Torch puts the whole parameter that it gathers into the module, so what the script has put there
    would not be used.

    Args:
        name: the name of the parameter.
    """
    return UsageError(
        "a forward pass of a sharded model with other parameters than its own",
        f"{name} is not the tensor that world.prepare has sharded, but torch and the optimizer "
        "would still use the sharded one",
        "for torch.func.functional_call, use strategy='ddp'; else write into the parameters, under "
        "torch.no_grad(): parameter.copy_(...), or load without assign=True",
        code="LS303",
    )


def refuse_copies(unit: nn.Module) -> None:
    """Makes `copy.deepcopy`, `copy.copy` and pickling of a unit raise UsageError."""
    vars(unit)["__deepcopy__"] = _refuse_deepcopy
    vars(unit)["__reduce_ex__"] = _refuse_pickle


def _refuse_deepcopy(memo: Any) -> NoReturn:
    raise UsageError(
        "a copy of a sharded model",
        "its parameters are gathered and averaged for this very object",
        "copy the model first and prepare both: ema = copy.deepcopy(model); "
        "model, ema = world.prepare(model, ema)",
    )


def _refuse_pickle(protocol: SupportsIndex) -> NoReturn:
    raise UsageError(
        "torch.save, pickle or copy.copy of a sharded model",
        "this rank has only its shards of the parameters, and they are bound to this run",
        "save the weights instead, on all ranks together: lockstep.save_weights(model, path); or "
        "all that is needed to resume: world.checkpoint(path, model=model, ...)",
    )

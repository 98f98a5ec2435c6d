"""What a loss is made of: calls of torch's loss functions, the terms of a sum, and the lines.

A *term* of a loss is one of the numbers that were added up to it: a loss of 3 that was computed as
`a + b` with `a` = 1 and `b` = 2 has the terms 1 and 2. The terms, and the user's line that made the
loss, are kept in the `__dict__` of its tensor. A loss is a scalar tensor that has a gradient.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.user_code import is_user_file, user_line

LOSS_FUNCTIONS = {
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cross_entropy,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
}
IGNORE_INDEX = -100
"""torch's default `ignore_index`: labels that do not count in the loss."""
LOCKSTEP_FOLDER = str(Path(__file__).parents[2])
TORCH_FOLDER = f"{os.sep}torch{os.sep}"


@dataclass(frozen=True)
class LossCall:
    """A call of one of torch's loss functions with the output of a model."""

    line: str
    targets: Tensor
    options: Mapping[str, Any]
    """The other arguments, by name or as `argument 3`."""

    @property
    def weight(self) -> float:
        """The sum of the weights of all targets, by which torch divides a mean.

        A label has the weight of its class, or 1 if no class weights were given; ignored labels
        have none. Each value of targets that are no labels has the weight 1.
        """
        if self.targets.is_floating_point():  # not labels, but values or probabilities
            return float(self.targets.numel())

        ignored = self.options.get("ignore_index", IGNORE_INDEX)
        labels = self.targets[self.targets != ignored]

        # cross_entropy(input, target, weight), by name or by place. Other functions of labels have
        # a number in third place.
        class_weights = self.options.get("weight", self.options.get("argument 3"))
        if isinstance(class_weights, Tensor) and class_weights.dim() == 1:
            return float(class_weights[labels].sum())

        return float(labels.numel())


def loss_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LossCall | None:
    """Reads the arguments of a call of one of torch's loss functions.

    Args:
        name: of the function.
        args: of the call.
        kwargs: of the call.

    Returns:
        The call, with a copy of the targets. None if there are no targets, or if nothing is trained
        by it: the outputs carry no gradient.
    """
    # The first two arguments of all these functions are called `input` and `target`.
    options = dict(zip(("input", "target"), args, strict=False)) | dict(kwargs)
    outputs = options.pop("input", None)
    targets = options.pop("target", None)
    if not needs_gradient(outputs) or not isinstance(targets, Tensor):
        return None

    # Arguments by place have no name here: their meaning depends on the function.
    for number, value in enumerate(args[2:], 3):
        options[f"argument {number}"] = value

    return LossCall(f"{name}: {user_line() or ''}", targets.detach().clone(), options)


def terms_of(loss: Tensor) -> list[float]:
    """Returns the numbers that were added up to this loss, or the loss itself."""
    terms: list[float] | None = loss.__dict__.get("_terms")  # as `note_loss` has kept them
    if terms:
        return terms
    return [float(loss.detach())]


def terms_of_result(name: str, one: Any, other: Any) -> list[float]:
    """Returns the terms that the result of a call is the sum of; empty if it is no sum of losses.

    A loss that was not added up is one term. So for losses of 1, 2 and 3, `(a + b) - c` has the
    terms 1, 2 and -3, and `(a + b) / 2` has 0.5 and 1.

    Args:
        name: of the function that is called, such as `add`.
        one: its first argument.
        other: its second argument.
    """
    if name not in ("add", "add_", "sub", "mul", "div"):
        return []

    terms = _terms_of_argument(one)  # empty if it is no loss
    other_terms = _terms_of_argument(other)
    if name in ("add", "add_"):
        return terms + other_terms
    if name == "sub":
        return terms + [-term for term in other_terms]
    # A product or a quotient is a sum if the first argument is a loss and the other one a number:
    # each term is multiplied or divided.
    if not terms or other_terms or not _is_single_number(other):
        return []

    factor = float(other)
    if factor == 0:  # no term is left, or the quotient is infinite
        return []
    if name == "div":
        return [term / factor for term in terms]

    return [term * factor for term in terms]


def _terms_of_argument(value: Any) -> list[float]:
    """Returns the terms of a loss, which is a scalar with a gradient; none of anything else."""
    if needs_gradient(value) and not value.dim():
        return terms_of(value)
    return []


def _is_single_number(value: Any) -> bool:
    """True for a number of Python's and for a tensor of one number."""
    return not isinstance(value, Tensor) or value.numel() == 1


def divisor_mark(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the mark of a loss that this call divides by a number; empty for other calls.

    It is {"divisor": (number, the user's line)}.

    Args:
        name: of the function that is called.
        args: of the call: the loss and the divisor.
    """
    if name != "div" or len(args) != 2:
        return {}
    divisor = args[1]
    if not _is_single_number(divisor) or needs_gradient(divisor):
        return {}
    return {"divisor": (float(divisor), user_line() or "")}


def line_of_loss(loss: Tensor) -> str | None:
    """Returns the user's line that made a loss, if a function call was seen to make it."""
    return loss.__dict__.get("_line")


def note_loss(loss: Tensor, name: str, args: tuple[Any, ...], terms: list[float]) -> None:
    """Keeps on a loss the line that made it and the terms that it is the sum of, if any.

    Args:
        loss: what the call has returned.
        name: of the function that was called.
        args: of the call.
        terms: as `terms_of_result` returned them.
    """
    loss.__dict__["_line"] = _line_of_call(name, args)
    if terms:
        loss.__dict__["_terms"] = terms


def _line_of_call(name: str, args: tuple[Any, ...]) -> str | None:
    """Returns the user's line that calls torch.

    A loss that a library only scales, as Accelerate does in its `backward`, keeps the line that
    made it before.
    """
    may_scale = name in ("mul", "div") and len(args) == 2
    if not may_scale or _is_called_by_user():
        return user_line()

    # A library calls loss * factor, or factor * loss.
    if needs_gradient(args[0]):
        loss, factor = args
    else:
        factor, loss = args

    is_scaled_loss = needs_gradient(loss) and not loss.dim() and not needs_gradient(factor)
    if is_scaled_loss:
        return line_of_loss(loss) or user_line()

    return user_line()


def _is_called_by_user() -> bool:
    """True if the user's code called torch, and no library in between."""
    # From the innermost call outwards: torch and Lockstep come first, then whoever called torch.
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return True
        is_of_torch_or_lockstep = TORCH_FOLDER in file or file.startswith(LOCKSTEP_FOLDER)
        if not is_of_torch_or_lockstep:  # a library in between
            return False
        frame = frame.f_back

    return False


def needs_gradient(value: object) -> bool:
    """True for a tensor with `requires_grad`."""
    return isinstance(value, Tensor) and value.requires_grad

"""Reads how a loss is computed: calls of loss functions, terms of sums, and the user's line.

A loss is a scalar tensor that requires a gradient. The *terms* of a loss are the numbers that were
added up to it: the loss `a + b` with `a` = 1 and `b` = 2 has the terms 1 and 2. The terms, and the
line of the user's code that computed the loss, are kept in the `__dict__` of its tensor.
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
"""Torch's default `ignore_index`: targets with this label are left out of the loss."""
LOCKSTEP_FOLDER = str(Path(__file__).parents[2])
TORCH_FOLDER = f"{os.sep}torch{os.sep}"


@dataclass(frozen=True)
class LossCall:
    """A call of one of torch's loss functions with the output of a model."""

    line: str
    targets: Tensor
    options: Mapping[str, Any]
    """The other arguments, by name, or under a name such as `argument 3` if passed by position."""

    @property
    def _class_weights(self) -> Tensor | None:
        """The weight of each class, as in `cross_entropy(input, target, weight)`, or None.

        In other loss functions, the third argument is another option, such as a number.
        """
        third_argument = self.options.get("argument 3")
        weight = self.options.get("weight", third_argument)
        has_weight_of_each_class = isinstance(weight, Tensor) and weight.dim() == 1
        return weight if has_weight_of_each_class else None

    @property
    def divisor(self) -> float:
        """The number that torch divides by to compute a mean: the total weight of all targets.

        Ignored labels have the weight 0, and other labels the weight of their class, or 1 without
        class weights. If the targets are not labels but values or probabilities, each value has the
        weight 1.
        """
        if self.targets.is_floating_point():  # values or probabilities
            return float(self.targets.numel())

        ignored_label = self.options.get("ignore_index", IGNORE_INDEX)
        labels = self.targets[self.targets != ignored_label]

        class_weights = self._class_weights
        if class_weights is None:
            return float(labels.numel())

        weights_of_labels = class_weights[labels]
        return float(weights_of_labels.sum())


def loss_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LossCall | None:
    """Reads the arguments of a call of one of torch's loss functions.

    The first two arguments of all these functions are called `input` and `target`. The others are
    kept as options.

    Args:
        name: name of the function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The call, with a copy of its targets. None if there are no targets, or if the call trains
        nothing because its input requires no gradient.
    """
    arguments = dict(zip(("input", "target"), args, strict=False)) | dict(kwargs)
    outputs = arguments.get("input")
    targets = arguments.get("target")
    if not needs_gradient(outputs) or not isinstance(targets, Tensor):
        return None

    # The names of further positional arguments depend on the function, so they are numbered:
    # "argument 3", "argument 4", ...
    options = {key: value for key, value in kwargs.items() if key not in ("input", "target")}
    for number, value in enumerate(args[2:], start=3):
        options[f"argument {number}"] = value

    line = user_line() or ""  # the line of the script with the call, if it is known
    return LossCall(f"{name}: {line}", targets.detach().clone(), options)


def terms_of(loss: Tensor) -> list[float]:
    """Returns the numbers that were added up to this loss; for any other loss, the loss itself."""
    terms: list[float] | None = loss.__dict__.get("_terms")  # set by `note_loss`
    if terms:
        return terms
    return [float(loss.detach())]


def terms_added_by_call(name: str, args: tuple[Any, ...]) -> list[float]:
    """Returns the terms of the loss that a call computes from other losses.

    For losses a = 1, b = 2 and c = 3, `(a + b) - c` has the terms 1, 2 and -3, and `(a + b) / 2`
    has the terms 0.5 and 1. The list is empty if the call does not compute a sum of losses.

    Args:
        name: name of the called function, such as "add".
        args: positional arguments of the call. For `a + b`, torch calls `Tensor.add(a, b)`.
    """
    if name not in ("add", "add_", "sub", "mul", "div") or len(args) != 2:
        return []

    one, other = args
    terms = _terms_of_argument(one)  # empty if the argument is not a loss
    other_terms = _terms_of_argument(other)
    if name in ("add", "add_"):
        return terms + other_terms
    if name == "sub":
        return terms + [-term for term in other_terms]

    # The call is a product or a quotient. If it scales a loss by a number, every term is scaled.
    # For `2 * loss`, torch passes the loss first too.
    scales_loss = bool(terms) and not other_terms and _is_single_number(other)
    if not scales_loss:
        return []

    # A product with 0 is not a sum of losses any more, and a quotient by 0 is infinite.
    factor = float(other)
    if factor == 0:
        return []
    if name == "div":
        return [term / factor for term in terms]

    return [term * factor for term in terms]


def _terms_of_argument(value: Any) -> list[float]:
    """Returns the terms of a loss; an empty list for anything that is not a loss."""
    if needs_gradient(value) and not value.dim():
        return terms_of(value)
    return []


def _is_single_number(value: Any) -> bool:
    """True for a Python number and for a tensor with one element."""
    return not isinstance(value, Tensor) or value.numel() == 1


def divisor_mark(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the mark for a loss divided by a number: {"divisor": (number, line)}.

    The result is empty if the call does not divide by a number.

    Args:
        name: name of the called function.
        args: positional arguments of the call: the loss and the divisor.
    """
    if name != "div" or len(args) != 2:
        return {}

    divisor = args[1]
    is_constant = _is_single_number(divisor) and not needs_gradient(divisor)
    if not is_constant:
        return {}

    return {"divisor": (float(divisor), user_line() or "")}


def line_of_loss(loss: Tensor) -> str | None:
    """Returns the line of the user's code that computed a loss; None if it is not known."""
    return loss.__dict__.get("_line")


def note_loss(loss: Tensor, name: str, args: tuple[Any, ...], terms: list[float]) -> None:
    """Stores the line that computed a loss, and its terms if it is a sum, on the loss tensor.

    Args:
        loss: return value of the call.
        name: name of the called function.
        args: positional arguments of the call.
        terms: return value of `terms_added_by_call` for this call.
    """
    loss.__dict__["_line"] = _line_of_call(name, args)
    if terms:
        loss.__dict__["_terms"] = terms


def _line_of_call(name: str, args: tuple[Any, ...]) -> str | None:
    """Returns the line of the user's code that computed the result of a call.

    Usually, this is the line that made the call. But if a library only scales a loss, as Accelerate
    does in its `backward`, it is the line of the user that has computed the unscaled loss.

    Args:
        name: name of the called function.
        args: positional arguments of the call.
    """
    loss = _scaled_loss(name, args)
    if loss is None or _is_called_by_user():
        return user_line()

    line_of_unscaled_loss = line_of_loss(loss)
    return line_of_unscaled_loss or user_line()


def _scaled_loss(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """Returns the loss in `loss * factor`, `factor * loss` or `loss / factor`.

    None if the call is something else. See `_line_of_call` for the arguments.
    """
    if name not in ("mul", "div") or len(args) != 2:
        return None

    losses = [value for value in args if needs_gradient(value)]
    has_one_loss = len(losses) == 1 and losses[0].dim() == 0  # a loss is a scalar with a gradient
    return losses[0] if has_one_loss else None


def _is_called_by_user() -> bool:
    """True if the user's code called torch directly, without a library in between."""
    # Walk up the call stack: past the frames of Lockstep and torch, to the caller of torch.
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return True
        # Torch may be installed anywhere, so "/torch/" is looked for. Lockstep's folder is known.
        is_of_torch = TORCH_FOLDER in file
        is_of_lockstep = file.startswith(LOCKSTEP_FOLDER)
        if not is_of_torch and not is_of_lockstep:  # the caller is a library
            return False
        frame = frame.f_back

    return False


def needs_gradient(value: object) -> bool:
    """True for a tensor with `requires_grad`."""
    return isinstance(value, Tensor) and value.requires_grad

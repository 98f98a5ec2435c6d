"""Sees every call of torch's functions in the script: changes some, and notes evidence of others.

`FunctionMode` is torch's own way to intercept calls (`TorchFunctionMode`). A call first becomes
comparable (`Determinism`): no dropout, float64. What it was given and what it returns is then
noted: draws of random numbers, losses, writes to tensors of models, statistics over the samples of
a batch. *Marks* tell what a tensor was made from: its result gets the marks of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.user_code import user_line
from lockstep.verify.recording.determinism import DROPOUT_FUNCTIONS, Determinism
from lockstep.verify.recording.draws import DrawLog
from lockstep.verify.recording.loss_calls import (
    LOSS_FUNCTIONS,
    LossCall,
    divisor_mark,
    loss_call,
    needs_gradient,
    note_loss,
    terms_of_result,
)
from lockstep.verify.recording.marks import STATISTIC, mark, marks_of
from lockstep.verify.recording.sample_statistics import reduces_over_samples, summary_number
from lockstep.verify.recording.writes import WriteLog

DRAWING_FUNCTIONS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "dropout", "rrelu", "gumbel_softmax"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_"),
    *("log_normal_", "kaiming_uniform_", "dropout_", "native_dropout"),
}
NUMBER_METHODS = {"item", "__float__", "__int__", "tolist"}
"""Methods that turn a tensor into a number of Python's."""
MAX_LOSS_CALLS = 64
"""Calls of loss functions that are noted for one backward pass."""


@dataclass
class _CallEvidence:
    """What the arguments of a call tell, noted before the call writes to them."""

    marks: dict[str, Any] = field(default_factory=dict)
    """Marks of all arguments, by kind."""
    loss_terms: list[float] = field(default_factory=list)
    """Of a sum of losses, the terms; empty for other calls."""


class FunctionMode(TorchFunctionMode):
    """Intercepts the calls of torch's functions in this process.

    Args:
        determinism: what is changed in calls.
    """

    def __init__(self, determinism: Determinism) -> None:
        super().__init__()
        self.determinism = determinism
        self.draws = DrawLog()
        self.writes = WriteLog()
        self.loss_calls: list[LossCall] = []
        """Calls of loss functions since `pop_loss_calls`."""
        self.statistics: dict[str, float] = {}
        """Statistics over samples that became numbers of Python's, by the user's line."""
        self.lowest_dtype = torch.float64 if determinism.double else torch.float32
        """The lowest precision that anything with a gradient has had."""
        self.in_backward = False
        """True while the script's call of a backward pass runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one call of the script; torch hides the mode from what runs inside of the call.

        Args:
            func: the function or method of torch that is called.
            types: classes of the arguments, for subclasses of Tensor.
            args: of the call.
            kwargs: of the call.

        Returns:
            What the call returns to the script.
        """
        kwargs = kwargs or {}
        if is_traced():
            return func(*args, **kwargs)

        name = getattr(func, "__name__", "")

        if func in DROPOUT_FUNCTIONS:
            return self.determinism.skip_dropout(args, kwargs)

        if name in DRAWING_FUNCTIONS:
            line = self.draws.begin(kwargs.get("generator"))
            drawn = self.determinism.draw(func, args, kwargs)
            self.draws.finish(drawn, line)
            return drawn

        kwargs = self.determinism.without_attention_dropout(func, kwargs)
        evidence = _CallEvidence()

        # An odd argument leaves no evidence; the script's call goes on all the same.
        with suppress(Exception):
            self._note_arguments(evidence, func, name, args, kwargs)

        if self.determinism.double:
            func, args, kwargs = self.determinism.widen_call(func, name, args, kwargs)

        # `Tensor.backward`, `torch.autograd.backward` or `torch.autograd.grad`
        if name in ("backward", "grad"):
            with self.backward_pass(True):
                return func(*args, **kwargs)

        result = func(*args, **kwargs)
        with suppress(Exception):
            self._note_result(result, evidence, func, name, args, kwargs)

        return result

    def _note_arguments(
        self, evidence: _CallEvidence, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Notes what a call is given in `evidence`, before the call writes to its arguments.

        A call of a loss function is also added to `loss_calls`.
        """
        evidence.marks = marks_of((args, kwargs))
        if func in LOSS_FUNCTIONS and len(self.loss_calls) < MAX_LOSS_CALLS:
            call = loss_call(name, args, kwargs)
            if call is not None:
                self.loss_calls.append(call)
        if len(args) == 2:  # it may be a sum, a difference, a product or a quotient
            evidence.loss_terms = terms_of_result(name, *args)

    def _note_result(
        self,
        result: Any,
        evidence: _CallEvidence,
        func: Any,
        name: str,
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Notes what a call has returned or written to, and marks the result.

        Args:
            result: what was returned.
            evidence: what the arguments tell. The result gets their marks, and perhaps more.
            func: the function of torch that was called.
            name: its name.
            args: of the call.
            kwargs: of the call.
        """
        self.writes.note_call(func, name, args, kwargs)
        marks = evidence.marks
        if name in NUMBER_METHODS and isinstance(result, int | float):
            self._note_python_number(float(result), marks)

        is_loss_or_term = needs_gradient(result) and result.dim() == 0
        if is_loss_or_term:
            marks |= divisor_mark(name, args)  # empty unless the call divides it by a number
            note_loss(result, name, args, evidence.loss_terms)

        if reduces_over_samples(name, args, kwargs):
            # A statistic over the samples of a batch, such as their mean.
            number = summary_number(result)
            if number is not None:
                marks[f"{STATISTIC}{user_line() or ''}"] = number

        mark(result, **marks)

        if name == "__setitem__":
            # After `tensor[index] = values`, the tensor is also made from the values.
            tensor, _, values = args
            mark(tensor, **marks_of(values))

        if needs_gradient(result) and result.dtype is not self.lowest_dtype:
            self.note_dtype(result)

    def _note_python_number(self, number: float, marks: Mapping[str, Any]) -> None:
        """Notes a number that the script takes from a tensor, such as `x.mean().item()`.

        Marks cannot follow what it does with the number. So the number itself is noted if the
        marks of the tensor say that it is made from a statistic over samples.
        """
        if any(kind.startswith(STATISTIC) for kind in marks):
            self.statistics[user_line() or ""] = number

    def note_dtype(self, tensor: Tensor) -> None:
        """Lowers `lowest_dtype` to that of a loss or a gradient, if this is less precise."""
        dtype = tensor.dtype
        if not dtype.is_floating_point:
            return
        # The larger the distance from 1 to the next number, the lower the precision.
        if torch.finfo(dtype).eps > torch.finfo(self.lowest_dtype).eps:
            self.lowest_dtype = dtype

    def pop_loss_calls(self) -> list[LossCall]:
        """Returns the calls of loss functions since the last time, and forgets them."""
        calls = self.loss_calls
        self.loss_calls = []
        return calls

    @contextmanager
    def backward_pass(self, running: bool) -> Iterator[None]:
        """Sets `in_backward` inside of the block.

        Args:
            running: False while activation checkpointing computes a forward pass again within a
                backward pass.
        """
        before = self.in_backward
        self.in_backward = running
        try:
            yield
        finally:
            self.in_backward = before


def is_traced() -> bool:
    """True while `torch.jit.trace` runs: what is computed then is no training."""
    jit: Any = torch.jit
    return bool(jit.is_tracing())

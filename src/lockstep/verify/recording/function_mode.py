"""Intercepts every call of torch's functions in the script: changes some calls, and records others.

`FunctionMode` is built on torch's own `TorchFunctionMode`. A call is first made comparable between
runs by `Determinism` (no dropout, float64). Then its arguments and result are recorded: draws of
random numbers, losses, writes to tensors of models, and statistics over the samples of a batch.
*Marks* on a tensor tell what it was computed from: the result of a call gets the marks of its
arguments.
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
    terms_added_by_call,
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
"""Methods that turn a tensor into a Python number."""
MAX_LOSS_CALLS = 64
"""Number of calls of loss functions that are recorded for one backward pass."""


@dataclass
class _CallEvidence:
    """What the arguments of a call tell. It is read before the call, which may overwrite them."""

    marks: dict[str, Any] = field(default_factory=dict)
    """The marks of all arguments, by kind."""
    loss_terms: list[float] = field(default_factory=list)
    """The terms, if the call adds up losses; empty for other calls."""


class FunctionMode(TorchFunctionMode):
    """Intercepts the calls of torch's functions in this process.

    Args:
        determinism: decides which calls are changed, and how.
    """

    def __init__(self, determinism: Determinism) -> None:
        super().__init__()
        self.determinism = determinism
        self.draws = DrawLog()
        self.writes = WriteLog()
        self.loss_calls: list[LossCall] = []
        """Calls of loss functions since `pop_loss_calls`."""
        self.statistics: dict[str, float] = {}
        """Statistics over samples that became Python numbers, by the user's line."""
        self.lowest_dtype = torch.float64 if determinism.double else torch.float32
        """The lowest precision of any loss or gradient so far."""
        self.in_backward = False
        """True while a backward pass that the script called is running."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one call of the script. Torch switches this mode off for calls made within the call.

        Args:
            func: function or method of torch that is called.
            types: classes of the arguments that are subclasses of Tensor.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            The value that the call returns to the script.
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

        # Recording must never break the script, so its errors are ignored, here and below.
        evidence = _CallEvidence()
        with suppress(Exception):
            self._note_arguments(evidence, func, name, args, kwargs)

        if self.determinism.double:
            func, args, kwargs = self.determinism.widen_call(func, name, args, kwargs)

        # This is `Tensor.backward`, `torch.autograd.backward` or `torch.autograd.grad`.
        if name in ("backward", "grad"):
            with self.set_in_backward(True):
                return func(*args, **kwargs)

        result = func(*args, **kwargs)
        with suppress(Exception):
            self._note_result(result, evidence, func, name, args, kwargs)

        return result

    def _note_arguments(
        self, evidence: _CallEvidence, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Reads the arguments of a call into `evidence`, before the call may overwrite them.

        A call of a loss function is also added to `loss_calls`.

        Args:
            evidence: object whose fields are set here.
            func: function of torch that is called.
            name: name of the function.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        evidence.marks = marks_of((args, kwargs))

        if func in LOSS_FUNCTIONS and len(self.loss_calls) < MAX_LOSS_CALLS:
            call = loss_call(name, args, kwargs)
            if call is not None:
                self.loss_calls.append(call)

        # For `loss_a + loss_b`, these are the two losses as numbers.
        evidence.loss_terms = terms_added_by_call(name, args)

    def _note_result(
        self,
        result: Any,
        evidence: _CallEvidence,
        func: Any,
        name: str,
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Records the result of a call, or the tensors that it wrote to, and marks the result.

        Args:
            result: return value of the call.
            evidence: what was read from the arguments before the call; the result gets their marks.
            func: function of torch that was called.
            name: name of the function.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        self.writes.note_call(func, name, args, kwargs)

        if name in NUMBER_METHODS and isinstance(result, int | float):
            self._note_python_number(float(result), evidence.marks)

        # The result gets the marks of the arguments, and further ones.
        marks = dict(evidence.marks)

        is_loss_or_term = needs_gradient(result) and result.dim() == 0
        if is_loss_or_term:
            marks |= divisor_mark(name, args)  # empty unless the call is a division by a number
            note_loss(result, name, args, evidence.loss_terms)

        # The result is a statistic over the samples of a batch, such as their mean. Its mark is
        # {"statistic train.py:12: ...": a number that stands for the statistic}. With the line in
        # the key, a loss can carry the marks of several statistics.
        if reduces_over_samples(name, args, kwargs):
            summary = summary_number(result)
            if summary is not None:
                kind = f"{STATISTIC}{user_line() or ''}"
                marks[kind] = summary

        mark(result, **marks)

        # After `tensor[index] = values`, the tensor is also made from the values.
        if name == "__setitem__":
            tensor, _, values = args
            mark(tensor, **marks_of(values))

        # The precision of losses and activations decides on the tolerance of the comparison.
        if needs_gradient(result) and result.dtype is not self.lowest_dtype:
            self.note_dtype(result)

    def _note_python_number(self, number: float, marks: Mapping[str, Any]) -> None:
        """Records a Python number that was made from a statistic over samples: `x.mean().item()`.

        Marks exist only on tensors, so they cannot show what the script does with the number.

        Args:
            number: the Python number.
            marks: marks of the tensor that it was read from.
        """
        if any(kind.startswith(STATISTIC) for kind in marks):
            self.statistics[user_line() or ""] = number

    def note_dtype(self, tensor: Tensor) -> None:
        """Updates `lowest_dtype` with the dtype of a loss or a gradient."""
        dtype = tensor.dtype
        if not dtype.is_floating_point:
            return
        # `eps` is the distance from 1 to the next number: the larger, the lower the precision.
        if torch.finfo(dtype).eps > torch.finfo(self.lowest_dtype).eps:
            self.lowest_dtype = dtype

    def pop_loss_calls(self) -> list[LossCall]:
        """Returns the calls of loss functions since the last time, and clears them."""
        calls = self.loss_calls
        self.loss_calls = []
        return calls

    @contextmanager
    def set_in_backward(self, in_backward: bool) -> Iterator[None]:
        """Returns a context manager that sets `in_backward` for its block.

        Args:
            in_backward: True for a backward pass; False for a forward pass that activation
                checkpointing recomputes within a backward pass.
        """
        value_before = self.in_backward
        self.in_backward = in_backward
        try:
            yield
        finally:
            self.in_backward = value_before


def is_traced() -> bool:
    """True while `torch.jit.trace` runs. What is computed then is not part of the training."""
    jit: Any = torch.jit
    return bool(jit.is_tracing())

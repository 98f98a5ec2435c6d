"""Marks on tensors: which earlier events of the script a tensor was made from.

A mark is a kind and a value that are kept on a tensor. All that is computed from the tensor gets
the mark too (`FunctionMode` sees to that), so the marks of a loss tell what it was made from. The
kinds:

- `gather`: the line of an all-gather that carries no gradient
- `detached`: the line of an all-gather of a model's output that was detached before
- `batch`: the number of a batch that a DataLoader handed out
- `draw`: of a draw of random numbers its number, its line and a digest of the numbers
- `divisor`: the number that a loss was divided by, and the line
- `trained`: it is an output of a model in training; the number of the update
- `statistic LINE`: a summary of a statistic over the samples of a batch, taken at that line
- `model NUMBER`: the line at which a model was called before the update of that number
- `norm ID`: the id of a BatchNorm layer that took its statistics from this rank's samples alone

If a tensor is made from several with a mark of one kind, the largest value is kept: the latest
batch, draw or update. Of lines and divisors any value would do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.distributed.torch_compat import pytree

STATISTIC = "statistic "
MODEL_CALL = "model "
BATCH_NORM = "norm "
LOCAL_KINDS = (STATISTIC, MODEL_CALL, BATCH_NORM)
"""Prefixes of the marks of values that one rank computes from its own samples."""


def mark(values: Any, **marks: Any) -> None:
    """Adds marks, by kind, to every tensor in a nest of values.

    Of a kind that a tensor has already, the larger value is kept, such as the later batch.
    """
    if not marks:
        return

    for tensor in tensors(values):
        if "_marks" not in tensor.__dict__:
            tensor.__dict__["_marks"] = {}
        existing = tensor.__dict__["_marks"]
        for kind, value in marks.items():
            existing[kind] = max(existing.get(kind, value), value)


def marks_of(values: Any) -> dict[str, Any]:
    """Returns the marks of all tensors in a nest of values, by kind.

    Of a kind that several tensors have, the largest value counts, such as the latest batch.
    """
    merged: dict[str, Any] = {}
    for tensor in pytree.tree_leaves(values):
        if not isinstance(tensor, Tensor):
            continue
        for kind, value in tensor.__dict__.get("_marks", {}).items():
            merged[kind] = max(merged.get(kind, value), value)
    return merged


def unmark(tensor: Tensor) -> None:
    """Removes the marks of local values: the tensor was exchanged and is now of all ranks."""
    marks = tensor.__dict__.get("_marks", {})
    for kind in list(marks):
        if kind.startswith(LOCAL_KINDS):
            del marks[kind]

"""Marks on tensors, which tell what a tensor was computed from.

A mark has a *kind* and a value, and is stored on the tensor. `FunctionMode` copies the marks of a
call's arguments to its result, so the marks of a loss tell what it was computed from. If several
arguments have a mark of one kind, the largest value is kept, which is the latest batch, draw or
update. The kinds:

- `gather`: line of an all-gather that passes no gradient on
- `detached`: line of an all-gather of a model's output that was detached before
- `batch`: number of a batch that a DataLoader handed out
- `draw`: number, line and digest of a draw of random numbers
- `divisor`: number that a loss was divided by, and the line
- `trained`: number of the update in which a model in training returned this output
- `statistic LINE`: summary of a statistic over the samples of a batch, taken at that line
- `model NUMBER`: line at which a model was called before the update with that number
- `norm ID`: id of a BatchNorm layer whose statistics cover only this rank's samples
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.torch_compat import pytree

STATISTIC = "statistic "
MODEL_CALL = "model "
BATCH_NORM = "norm "
LOCAL_KINDS = (STATISTIC, MODEL_CALL, BATCH_NORM)
"""Prefixes of the kinds that stand for values one rank computes from its own samples."""


def mark(values: Any, **marks: Any) -> None:
    """Adds marks, given by kind, to every tensor in a nest of values.

    If a tensor already has a mark of the same kind, the larger value is kept, such as the later
    batch. Of two lines, which are texts, the later one in the alphabet is kept, so that the result
    does not depend on the order of the calls.
    """
    if not marks:
        return

    for tensor in tensors(values):
        existing_marks = tensor.__dict__.setdefault("_marks", {})
        for kind, new_value in marks.items():
            existing_value = existing_marks.get(kind, new_value)
            existing_marks[kind] = max(existing_value, new_value)


def marks_of(values: Any) -> dict[str, Any]:
    """Returns the marks of all tensors in a nest of values, merged by kind.

    If several tensors have a mark of one kind, the largest value is returned, such as the latest
    batch.
    """
    merged: dict[str, Any] = {}
    for tensor in pytree.tree_leaves(values):
        if not isinstance(tensor, Tensor):
            continue
        for kind, value in tensor.__dict__.get("_marks", {}).items():
            merged[kind] = max(merged.get(kind, value), value)
    return merged


def remove_local_marks(tensor: Tensor) -> None:
    """Removes the marks that stand for values of this rank alone, after a tensor was exchanged."""
    marks = tensor.__dict__.get("_marks", {})
    for kind in list(marks):
        if kind.startswith(LOCAL_KINDS):
            del marks[kind]

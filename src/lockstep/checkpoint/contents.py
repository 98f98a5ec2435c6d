"""Opens a weights file or a checkpoint of any format for `lockstep checkpoint` to look into.

The result, `Contents`, has the tensors as `LazyTensor`s: their names, shapes and dtypes are known,
and their values are read in parts, so that no tensor has to fit into memory. Names are *tied* if
they stand for one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.encoding import why_unstorable
from lockstep.checkpoint.file_errors import unreadable
from lockstep.checkpoint.formats.reading import FoundState, Source, read_source, read_values
from lockstep.checkpoint.lazy_tensor import LazyTensor, TensorInMemory, dtype_name
from lockstep.checkpoint.sharding import copy_to_memory, tie_key

MAX_EXPANSION_BYTES = 2**26
"""A tensor may claim this many bytes more than its storage has, as expanded tensors do."""


@dataclass(frozen=True)
class Contents:
    """What is in a file or a checkpoint."""

    source: Source
    tensors: Mapping[str, LazyTensor]
    """The tensors by name, in the order of the file. Tied names have the same object."""
    extra: Mapping[str, Any]
    """What a module's state holds besides tensors."""
    facts: Mapping[str, Any]
    """Step, epoch, versions and so on, as far as the form has them."""
    files: Mapping[str, int]
    """The sizes of the files in bytes."""
    training: Mapping[str, LazyTensor]
    """The tensors of the optimizer and of everything else that is no model, if asked for."""


def open_contents(
    path: Path,
    *,
    name: str | None = None,
    trust: bool = False,
    everything: bool = False,
    training: bool = False,
) -> Contents:
    """Opens a weights file or a checkpoint, without reading values.

    Args:
        path: the file or folder; see `read_source`.
        name: the name of one model, if there are several.
        trust: whether a torch file may run its author's code while it is read.
        everything: whether to take all models of a checkpoint.
        training: whether to fill `Contents.training`, with the tensors of optimizers and the like.

    Raises:
        CheckpointError: the path cannot be read, or is not sound.
        SettingError: there is no model of this name.
    """
    source = read_source(path, trust=trust, name=name, everything=everything, lazy=True)
    # A torch file may hold several dictionaries of tensors: the model's, and small ones such as
    # statistics. The largest one is taken for the model. Any other source holds one state; with
    # `everything`, it has all models of the checkpoint.
    largest = max(source.states, key=_state_nbytes)
    tensors, extra = _split_state(source.path, largest.state)

    training_tensors = {}
    if training:
        # The source may also list the tensors of the model here, which are left out.
        model_tensor_ids = {id(tensor) for tensor in tensors.values()}
        for tensor_name, tensor in source.find_training_tensors():
            if id(tensor) not in model_tensor_ids:
                training_tensors[tensor_name] = tensor

    for tensor in (*tensors.values(), *training_tensors.values()):
        tensor.check()  # raises an error if the tensor is not in its file

    # The facts are shown to the user. If the model is inside a dictionary of a torch file, the fact
    # "read" says which part of the file was read: "['model']".
    facts = dict(source.facts)
    is_checkpoint = bool(source.modules)  # only a checkpoint of Lockstep lists its modules
    is_in_dictionary = bool(largest.place) and not is_checkpoint
    if is_in_dictionary:
        facts = {"read": largest.place, **facts}
    return Contents(
        source=source,
        tensors=tensors,
        extra=extra,
        facts=facts,
        files={file.name: file.stat().st_size for file in source.files},
        training=training_tensors,
    )


def _state_nbytes(found: FoundState) -> int:
    """Returns the size of a state's tensors in bytes."""
    tensors = [value for value in found.state.values() if isinstance(value, Tensor | LazyTensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _split_state(
    path: Path, state: Mapping[str, Any]
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Splits a state into its tensors and its other values, both by name.

    Tied names get the same `LazyTensor` object.

    Raises:
        CheckpointError: one of the tensors is of a kind that is not supported.
    """
    tensors: dict[str, LazyTensor] = {}
    extra: dict[str, Any] = {}
    tensor_of_tie: dict[object, LazyTensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            _check_tensor(path, name, value)

            tie = tie_key(value)  # equal for tied tensors; None for a tensor without memory
            if tie in tensor_of_tie:
                tensors[name] = tensor_of_tie[tie]
                continue
            tensors[name] = TensorInMemory(value)
            if tie is not None:
                tensor_of_tie[tie] = tensors[name]
        elif isinstance(value, LazyTensor):
            tensors[name] = value
        else:
            # For example the extra state of a module. It is small, so its tensors are read now, and
            # copied, as they may be mapped from a file.
            extra[name] = copy_to_memory(read_values(value))
    return tensors, extra


def _check_tensor(path: Path, name: str, value: Tensor) -> None:
    """Checks that a tensor can be stored, and does not claim far more memory than it has.

    Raises:
        CheckpointError: it cannot be stored, or claims too much memory.
    """
    problem_of_value = why_unstorable(value)
    if problem_of_value is None:
        # An expanded tensor has more elements than memory: `torch.zeros(1).expand(10**12)` in a
        # small file would take terabytes when it is written out.
        storage_nbytes = value.untyped_storage().nbytes()
        if value.nbytes > storage_nbytes + MAX_EXPANSION_BYTES:
            problem_of_value = f"claims {value.nbytes} bytes and has {storage_nbytes}"

    if problem_of_value is not None:
        raise unreadable(
            path,
            f"{name} {problem_of_value}",
            "save plain tensors, as the state_dict of a model on the CPU has them",
        )


def tied_to(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Returns, for each name that is tied to an earlier name, that earlier name.

    If "a", "b" and "c" stand for one tensor: `{"b": "a", "c": "a"}`.
    """
    first_name_of_id: dict[int, str] = {}
    tied_names = {}
    for name, tensor in tensors.items():
        if id(tensor) in first_name_of_id:
            tied_names[name] = first_name_of_id[id(tensor)]
        else:
            first_name_of_id[id(tensor)] = name
    return tied_names


def totals(tensors: Iterable[LazyTensor]) -> dict[str, Any]:
    """Counts tensors, their values and bytes, and the tensors of each dtype.

    A tensor with several names is counted once. Example: `{"tensors": 2, "values": 10, "bytes": 40,
    "dtypes": {"float32": 2}}`.
    """
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    num_of_dtype = Counter(dtype_name(tensor.dtype) for tensor in distinct)
    return {
        "tensors": len(distinct),
        "values": sum(tensor.num_elements for tensor in distinct),
        "bytes": sum(tensor.nbytes for tensor in distinct),
        "dtypes": dict(num_of_dtype.most_common()),
    }

"""Patches of loaders: their batches are recorded, kept for another run, replaced, or made larger.

With `--same-samples`, the run on several processes keeps its batches (`BatchWriter`), and the run
on one process gets them in place of its own (`BatchReader`). The script is also ended here, before
it reads a batch that would not be compared.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.batch.loader import Loader
from lockstep.torch_compat import watch_indices
from lockstep.user_code import user_line
from lockstep.verify.feed import BatchReader, BatchWriter, LoadedBatch
from lockstep.verify.recording.draws import moved_streams, stream_digests
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.larger_batches import CannotEnlargeError, enlarge_in_place
from lockstep.verify.recording.library_code import is_of_lockstep
from lockstep.verify.recording.patches.wrapping import UNKNOWN_LINE, wrap
from lockstep.verify.recording.progress import RunProgress
from lockstep.verify.recording.recorder import Recorder

INDICES_ATTRIBUTE = "_lockstep_indices"
"""Name of the attribute in which a DataLoader's iterator keeps the indices of pending batches."""


# The indices of samples


def record_sample_indices(mode: FunctionMode) -> None:
    """Patches DataLoader iterators to keep the sample indices of each batch until it is handed out.

    With worker processes, the indices of several batches are drawn before the first batch is ready.
    """

    def draw_indices(iterator: Any, draw: Callable[[], Any]) -> Any:
        """Draws the sample indices of the next batch, and keeps them on the iterator."""
        # The indices themselves are compared, so the random draws that order them are not recorded.
        with mode.draws.paused():
            indices = draw()
        _pending_indices(iterator).append(indices)
        return indices

    def forget_indices(iterator: Any) -> None:
        """Clears the indices of the last pass, because persistent workers begin another one."""
        vars(iterator).pop(INDICES_ATTRIBUTE, None)

    watch_indices(draw_indices=draw_indices, on_new_pass=forget_indices)


def _pending_indices(iterator: Any) -> deque[Any]:
    """Returns the queue of sample indices for batches that an iterator has not handed out yet.

    The queue is created on first use and stored on the iterator.
    """
    attributes = vars(iterator)
    if INDICES_ATTRIBUTE not in attributes:
        attributes[INDICES_ATTRIBUTE] = deque()
    pending: deque[Any] = attributes[INDICES_ATTRIBUTE]
    return pending


def _as_numbers(indices: Any) -> list[int] | None:
    """Returns the indices of a batch as integers.

    The result is None if there are no indices, or if the dataset uses other keys, such as texts or
    pairs.
    """
    if not isinstance(indices, list | tuple) or not indices:
        return None
    if not all(isinstance(index, int | np.integer | Tensor) for index in indices):
        return None
    return [int(index) for index in indices]


# Iteration


def watch_loaders(
    recorder: Recorder, mode: FunctionMode, kept_batches: BatchWriter | BatchReader | None
) -> None:
    """Patches the iteration of DataLoaders, to see their batches, and to keep or replace them.

    Args:
        recorder: recorder that is informed of each batch.
        mode: function mode, which sees every call of torch's functions.
        kept_batches: writer that keeps each batch, or reader whose batches replace those of the
            loader, or None.
    """
    original_iter = DataLoader.__iter__
    original_lockstep_iter = Loader.__iter__

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        """Replaces `DataLoader.__iter__`."""
        # A DataLoader inside one of Lockstep's loaders is left alone, because `Loader.__iter__` is
        # patched instead.
        if _is_lockstep_dataset(self.dataset):
            return original_iter(self)

        return _iterate_torch_loader(self, original_iter, recorder, mode, kept_batches)

    def iterate_lockstep(self: Loader) -> Iterator[Any]:
        """Replaces `Loader.__iter__`, to convert the batches of Lockstep's loaders to float64.

        It also ends the script once enough steps are recorded. The batches are not recorded here:
        the recorder is an extension of Lockstep, which tells it of every batch.
        """
        batches = _until_enough_steps(recorder.state, original_lockstep_iter(self))
        return map(mode.determinism.convert, batches)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign, assignment]
    Loader.__iter__ = iterate_lockstep  # type: ignore[method-assign]


def _iterate_torch_loader(
    loader: DataLoader[Any],
    original_iter: Callable[[DataLoader[Any]], Iterator[Any]],
    recorder: Recorder,
    mode: FunctionMode,
    kept_batches: BatchWriter | BatchReader | None,
) -> Iterator[Any]:
    """Returns the iterator that the script gets for one of torch's DataLoaders.

    Args:
        loader: the DataLoader.
        original_iter: torch's own `DataLoader.__iter__`.
        recorder: recorder that is informed of each batch.
        mode: function mode, which sees the random numbers that are drawn while a batch is read.
        kept_batches: writer that keeps each batch for another run, or reader of the batches that
            another run has kept, or None.
    """
    # Gradients are off during evaluation.
    is_training = torch.is_grad_enabled()
    if is_training:
        recorder.inputs.begin_pass(loader)

    # Training loops get the batches of the other run instead of the loader's own.
    if is_training and isinstance(kept_batches, BatchReader):
        return _iterate_kept(recorder, loader, kept_batches)

    writer = kept_batches if isinstance(kept_batches, BatchWriter) else None
    return _iterate_recorded(recorder, mode, loader, original_iter(loader), writer)


def _iterate_kept(
    recorder: Recorder, loader: DataLoader[Any], reader: BatchReader
) -> Iterator[Any]:
    """Records and yields the batches of the other run, in which those of all ranks are joined."""
    name_of_pass = reader.begin_pass(loader)
    for batch, ids in _until_enough_steps(recorder.state, reader.batches(name_of_pass)):
        recorder.inputs.record_batch(loader, batch, ids=ids, random_draws={})
        yield batch


def _iterate_recorded(
    recorder: Recorder,
    mode: FunctionMode,
    loader: DataLoader[Any],
    iterator: Iterator[Any],
    writer: BatchWriter | None,
) -> Iterator[Any]:
    """Yields the batches of a DataLoader, in float64.

    Batches for training are recorded, and kept for another run if there is a writer. Batches for
    evaluation, when gradients are off, are neither recorded nor kept.

    Args:
        recorder: recorder that is informed of each batch.
        mode: function mode, which sees the random numbers that are drawn while a batch is read.
        loader: the DataLoader.
        iterator: iterator that `iter(loader)` returned.
        writer: writer that keeps the batches for another run; None to keep none.
    """
    # The iterator draws the sample indices of several batches ahead. They wait in this queue, in
    # the order of the batches (see `record_sample_indices`).
    pending_indices = _pending_indices(iterator)
    batches = _until_enough_steps(recorder.state, iterator)

    # Whether a pass is kept is decided at its beginning, for all of its batches.
    writer_of_pass = writer if torch.is_grad_enabled() else None
    name_of_pass = ""
    if writer_of_pass is not None:
        name_of_pass = writer_of_pass.begin_pass(loader)

    for number in count():
        # Random numbers that are drawn while the batch is read belong to the batch.
        mode.draws.restart()
        streams_before = stream_digests()

        try:
            batch = mode.determinism.convert(next(batches))
        except StopIteration:
            return

        # The indices of this batch are the first in the queue. The iterator of a subclass of
        # DataLoader may work without indices.
        ids = None
        if pending_indices:
            ids = _as_numbers(pending_indices.popleft())

        # The script may switch gradients on or off between two batches of one pass.
        is_training = torch.is_grad_enabled()
        if is_training:
            drawn = mode.draws.since_restart() | moved_streams(streams_before)
            recorder.inputs.record_batch(loader, batch, ids=ids, random_draws=drawn)

        if writer_of_pass is not None:
            writer_of_pass.write(name_of_pass, number, LoadedBatch(batch, ids))

        yield batch


def end_after_enough_steps(state: RunProgress) -> None:
    """Patches the iteration of Lockstep's loaders, to end the script after enough steps."""
    original_iter = Loader.__iter__

    def iterate(self: Loader) -> Iterator[Any]:
        return _until_enough_steps(state, original_iter(self))

    Loader.__iter__ = iterate  # type: ignore[method-assign]


def _until_enough_steps(state: RunProgress, iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields the batches of an iterator, and ends the script once enough steps are recorded.

    The script is ended before the next batch is read, which would not be compared, and which may
    take long to read.
    """
    while True:
        if torch.is_grad_enabled():  # never in the middle of an evaluation
            state.end_script_if_enough()
        try:
            yield next(iterator)
        except StopIteration:
            return


# Batches of another run, and larger batches


def number_loaders(kept_batches: BatchWriter | BatchReader) -> None:
    """Patches `DataLoader.__init__`, to number the script's loaders in the order of construction.

    A loader has the same number in the run that writes batches and in the run that reads them.

    Args:
        kept_batches: writer of the batches of this run, or reader of the batches of the other run.
            It counts the loaders.
    """

    def after_init(loader: DataLoader[Any], dataset: Any, *_args: Any, **_kwargs: Any) -> None:
        if not _is_lockstep_dataset(dataset):
            kept_batches.add_loader(loader)

    wrap(DataLoader, "__init__", after=after_init)


def replace_lengths(reader: BatchReader) -> None:
    """Patches `DataLoader.__len__`, since loaders yield the batches of another run.

    Args:
        reader: reader of the batches of the other run.
    """
    original_len: Any = DataLoader.__len__

    def length(self: DataLoader[Any]) -> int:
        """Replaces `DataLoader.__len__`: returns the length in the other run, if it is known."""
        length_in_other_run = reader.length(self)
        if length_in_other_run is not None:
            return length_in_other_run

        own_length: int = original_len(self)
        return own_length

    DataLoader.__len__ = length  # type: ignore[method-assign]


def enlarge_batches(recorder: Recorder, times: int) -> None:
    """Patches `DataLoader.__init__`, to multiply batch sizes (see `larger_batches`)."""
    original_init: Any = DataLoader.__init__
    signature = inspect.signature(original_init)

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        """Replaces `DataLoader.__init__`, to multiply the batch size by the factor `times`.

        If that is not possible, the loader stays as it is, and the verdict mentions its line. A
        loader that Lockstep has built inside of its own also stays as it is.
        """
        arguments = signature.bind(self, *args, **kwargs).arguments  # by name, including "self"
        is_built_by_script = not _is_lockstep_dataset(arguments["dataset"])
        if is_built_by_script:
            try:
                enlarge_in_place(arguments, times)
            except CannotEnlargeError:
                recorder.note_loader_without_batch_size(user_line() or UNKNOWN_LINE)
        original_init(**arguments)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def _is_lockstep_dataset(dataset: Any) -> bool:
    """True for the dataset inside one of Lockstep's loaders, which is not the script's."""
    return is_of_lockstep(type(dataset).__module__)

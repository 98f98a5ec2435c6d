"""Records the batches that loaders hand out to be trained on.

`state.update` is the record of the current optimizer step; its `batches` are what loaders handed
out, as records of their content (`Batch`). Models may be called with something else that the script
computes from a batch, so inputs of models are recorded separately, in `forwards`. *Ids* of samples
are their indices in the dataset.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lockstep.session.extension import DeliveredBatch
from lockstep.verify.recording.batches import UnusedBatches, describe_batch
from lockstep.verify.recording.state import RecorderState, guarded
from lockstep.verify.training_record import Batch


class InputRecorder:
    """Records batches of Lockstep's loaders and of torch's DataLoaders."""

    def __init__(self, state: RecorderState) -> None:
        self.state = state
        self.samplers_with_epoch: set[Any] = set()
        """Samplers whose `set_epoch` was called."""
        self._unused = UnusedBatches()
        self._passes_over: dict[Any, int] = {}
        """By loader, in the order of their first use, how often it was iterated to train. Only
        passes over loaders of torch's are counted."""
        self._batches_in_epoch: Counter[tuple[Any, int]] = Counter()
        """The batches handed out, by loader of torch's and epoch."""

    @property
    def number_of_torch_loaders(self) -> int:
        """How many of torch's DataLoaders were iterated to train."""
        return len([loader for loader in self._passes_over if isinstance(loader, DataLoader)])

    @guarded
    def begin_pass(self, loader: DataLoader[Any]) -> None:
        """Counts a pass over a DataLoader of torch's, which begins to be iterated to train."""
        self._passes_over[loader] = self._passes_over.get(loader, 0) + 1

    @guarded
    def record_batch(
        self,
        loader: DataLoader[Any],
        batch: Any,
        *,
        ids: list[int] | None,
        random_draws: dict[str, str],
    ) -> None:
        """Records a batch that a DataLoader of torch's hands out to be trained on.

        Args:
            loader: which hands it out.
            batch: as it is handed out.
            ids: indices of its samples in the dataset; None if they are not known.
            random_draws: the random streams that were drawn from to read it, with a digest.
        """
        sampler = loader.sampler
        is_shuffled = isinstance(sampler, DistributedSampler) and sampler.shuffle

        # Epochs are counted from 0. No pass was counted if gradients were off when the iteration
        # began, and were switched on later.
        passes_begun = self._passes_over.get(loader, 0)
        epoch = max(0, passes_begun - 1)
        record = describe_batch(
            batch,
            ids=ids,
            random_draws=random_draws,
            epoch=epoch,
            workers=loader.num_workers > 0,
            iterable=isinstance(loader.dataset, IterableDataset),
            order_fixed=is_shuffled and sampler not in self.samplers_with_epoch,
        )
        self._batches_in_epoch[loader, epoch] += 1
        self._add(loader, record, self._batches_in_epoch[loader, epoch])
        self._unused.add(batch, record)

    @guarded
    def record_lockstep_batch(self, event: DeliveredBatch) -> None:
        """Records a micro-batch that a loader of Lockstep's hands out.

        The record has the samples' indices. It has their contents only if the batch has one row for
        each index. The micro-batch becomes the current one in `state`.
        """
        # `counts` is False if this rank's losses are left out, as on some pipeline stages.
        self.state.update.contributes = event.counts
        self.state.micro_batch = event.micro_batch
        ids = event.samples.tolist()
        record = describe_batch(
            event.batch, event.micro_batch.local_rows, epoch=event.epoch, ids=ids
        )

        if len(record.contents) != len(ids):  # a collate function changed the number of samples
            record.contents = ()

        self._add(event.loader, record, event.position + 1)

    def _add(self, loader: Any, record: Batch, number: int) -> None:
        """Adds a batch to the current update, and numbers its loader.

        Sets `state.last_batch_text`, by which the user is told where the script was stopped. Random
        numbers that are drawn from here on count for the step.

        Args:
            loader: which handed it out.
            record: its record, which gets the number of the loader.
            number: of the batch in its epoch, from 1.
        """
        state = self.state
        state.loss_is_weighted = False  # `World.backward` was given no loss of this batch yet

        if loader not in self._passes_over:
            self._passes_over[loader] = 0

        # Loaders are numbered in the order of their first use.
        record.loader = list(self._passes_over).index(loader)
        place = f"batch {number}"
        with suppress(TypeError):  # a stream has no length
            place = f"batch {number} of {len(loader)}"

        # The end of a sentence such as "step 3, batch 3 of 4 of epoch 1".
        state.last_batch_text = f", {place} of epoch {record.epoch + 1}"
        state.update.batches.append(record)

        # What was drawn to read the batch is no part of what is drawn for the step.
        state.mode.draws.restart()
        state.step_draws.restart()

    def note_use(self, batch_number: int) -> None:
        """Notes that a model is called with what was made from this batch; 0 if from none."""
        self._unused.use(batch_number)

    def end_update(self) -> list[Batch]:
        """Removes from the update the batches that it was not trained on.

        Returns:
            Batches that were fetched ahead for a later update.
        """
        update = self.state.update
        fetched_ahead, never_trained = self._unused.end_update()
        untrained_ids = {id(record) for record in (*fetched_ahead, *never_trained)}
        update.batches = [record for record in update.batches if id(record) not in untrained_ids]

        if not update.batches:
            # No loader was used: the inputs of models are all that is known of the samples.
            update.batches = update.model_inputs

        return fetched_ahead

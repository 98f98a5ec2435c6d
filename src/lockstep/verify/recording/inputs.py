"""Records the batches that loaders hand out to be trained on.

`state.update` is the record of the current optimizer step, and its `batches` describe what loaders
handed out for it (`Batch` records). A script may compute something else from a batch before it
calls a model, so the inputs of models are recorded separately, by `forwards`. The *ids* of samples
are their indices in the dataset.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lockstep.session.extension import DeliveredBatch
from lockstep.verify.recording.batches import UnusedBatches, describe_batch
from lockstep.verify.recording.guard import guarded
from lockstep.verify.recording.state import RecorderState
from lockstep.verify.training_record import Batch


class InputRecorder:
    """Records batches of Lockstep's loaders and of torch's DataLoaders."""

    def __init__(self, state: RecorderState) -> None:
        self.state = state
        self.samplers_with_epoch: set[Any] = set()
        """Samplers whose `set_epoch` the script has called."""
        self._unused = UnusedBatches()
        self._number_of_loader: dict[Any, int] = {}
        """The number of each loader, from 0, in the order of the first use."""
        self._passes_over: Counter[DataLoader[Any]] = Counter()
        """How often each of torch's loaders was iterated for training."""
        self._batches_in_epoch: Counter[tuple[Any, int]] = Counter()
        """Number of batches handed out, by torch's loader and epoch."""

    @property
    def number_of_torch_loaders(self) -> int:
        """Number of torch's DataLoaders that were iterated for training."""
        return len([loader for loader in self._number_of_loader if isinstance(loader, DataLoader)])

    @guarded
    def begin_pass(self, loader: DataLoader[Any]) -> None:
        """Counts a pass over one of torch's DataLoaders, which begins for training."""
        self._number_of_loader.setdefault(loader, len(self._number_of_loader))
        self._passes_over[loader] += 1

    @guarded
    def record_batch(
        self,
        loader: DataLoader[Any],
        batch: Any,
        *,
        ids: list[int] | None,
        random_draws: dict[str, str],
    ) -> None:
        """Records a batch that one of torch's DataLoaders hands out for training.

        Args:
            loader: loader that hands out the batch.
            batch: the batch as the script gets it.
            ids: indices of the samples in the dataset; None if they are not known.
            random_draws: random streams that were used while the batch was read, with a digest of
                each.
        """
        sampler = loader.sampler
        is_shuffled = isinstance(sampler, DistributedSampler) and sampler.shuffle
        epoch = self._epoch_of(loader)

        # A shuffling sampler whose `set_epoch` is never called gives the same order in each epoch.
        has_fixed_order = is_shuffled and sampler not in self.samplers_with_epoch
        record = describe_batch(
            batch,
            ids=ids,
            random_draws=random_draws,
            epoch=epoch,
            workers=loader.num_workers > 0,
            iterable=isinstance(loader.dataset, IterableDataset),
            order_fixed=has_fixed_order,
        )
        self._batches_in_epoch[loader, epoch] += 1
        number_in_epoch = self._batches_in_epoch[loader, epoch]
        self._add(loader, record, number_in_epoch)
        self._unused.add(batch, record)  # until a model is called with it

    def _epoch_of(self, loader: DataLoader[Any]) -> int:
        """Returns the number of the pass over a loader, from 0.

        A pass that began while gradients were off was not counted. So there may be no passes, which
        is epoch 0, too.
        """
        passes_begun = self._passes_over[loader]
        return max(0, passes_begun - 1)

    @guarded
    def record_lockstep_batch(self, event: DeliveredBatch) -> None:
        """Records a micro-batch that one of Lockstep's loaders hands out.

        The micro-batch also becomes the current one in `state`. The record has digests of the
        samples only if the batch has one row for each sample index.

        Args:
            event: the micro-batch and its position in the epoch.
        """
        # With pipeline stages, several ranks get the same micro-batch. Its samples and losses are
        # counted on one of these ranks only.
        is_counted_here = event.counts
        self.state.update.contributes = is_counted_here
        self.state.micro_batch = event.micro_batch

        ids = event.samples.tolist()
        record = describe_batch(
            event.batch, event.micro_batch.local_rows, epoch=event.epoch, ids=ids
        )

        # `contents` has a digest of each row of the batch. If there are more or fewer rows than
        # sample indices, a collate function has changed their number. Then it is not known which
        # digest belongs to which sample, so all of them are dropped.
        if len(record.contents) != len(ids):
            record.contents = ()

        number_in_epoch = event.position + 1  # positions are counted from 0
        self._add(event.loader, record, number_in_epoch)

    def _add(self, loader: Any, record: Batch, number_in_epoch: int) -> None:
        """Adds a batch to the current update, and numbers its loader.

        Args:
            loader: loader that handed out the batch.
            record: record of the batch; its `loader` is set.
            number_in_epoch: number of the batch in its epoch, from 1.
        """
        # A loader that was not used before gets the next number.
        next_number = len(self._number_of_loader)
        record.loader = self._number_of_loader.setdefault(loader, next_number)
        self.state.update.batches.append(record)

        # Tells the user where the script was stopped: "step 3, batch 3 of 4 of epoch 1".
        place = f"batch {number_in_epoch}"
        with suppress(TypeError):  # a stream has no length
            place = f"batch {number_in_epoch} of {len(loader)}"
        self.state.last_batch_text = f", {place} of epoch {record.epoch + 1}"

        self._begin_use_of_batch()

    def _begin_use_of_batch(self) -> None:
        """Forgets what was recorded before a batch was handed out, and does not belong to it.

        That is the loss of an earlier batch, and the random numbers drawn while this one was read.
        """
        self.state.loss_is_recorded_by_world = False
        self.state.forget_draws_so_far()

    def mark_used(self, batch_number: int) -> None:
        """Records that a model is called with tensors that were made from a batch.

        Args:
            batch_number: number of the batch; 0 if the tensors were made from no batch.
        """
        self._unused.mark_used(batch_number)

    def end_update(self) -> list[Batch]:
        """Keeps only those batches in the update that models have trained on in this step.

        Returns:
            The batches that were fetched ahead for a later update.
        """
        update = self.state.update
        fetched_ahead, never_trained = self._unused.end_update()
        ids_not_trained_now = {id(record) for record in (*fetched_ahead, *never_trained)}
        update.batches = [
            record for record in update.batches if id(record) not in ids_not_trained_now
        ]

        # Without a loader, only the inputs of the models are known.
        if not update.batches:
            update.batches = update.model_inputs

        return fetched_ahead

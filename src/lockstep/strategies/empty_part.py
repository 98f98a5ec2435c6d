"""Explains errors of the user's model on a rank that has no samples of a batch."""

from __future__ import annotations

from lockstep.errors import LockstepError, add_note_once
from lockstep.language import translate_sentences
from lockstep.session.micro_batch import MicroBatch


def note_empty_part(error: BaseException | None, micro_batch: MicroBatch) -> None:
    """Explains an error of the user's model if this rank had no samples when it was raised.

    Many functions of torch reject tensors without rows, and their messages do not say why there are
    no rows. The explanation is added to the error as a note, for example "lockstep: this rank has
    none of the 3 samples of this batch, so ...".

    Args:
        error: the error of a forward pass; None if there was none.
        micro_batch: the micro-batch of that forward pass.
    """
    if not isinstance(error, RuntimeError | ValueError | IndexError | TypeError):
        return
    if isinstance(error, LockstepError):
        return

    rank_has_no_samples = micro_batch.global_samples > 0 and micro_batch.local_rows == 0
    if not rank_has_no_samples:
        return

    why_empty, alternative = _why_part_is_empty(micro_batch)
    note = translate_sentences(
        f"this rank {why_empty}, so its tensors have the shape (0, *).",
        "Inside the prepared model, functions of torch that refuse them get one placeholder row.",
        f"Make all other code work with any number of samples, or {alternative}.",
    )
    add_note_once(error, "empty part", note)


def _why_part_is_empty(micro_batch: MicroBatch) -> tuple[str, str]:
    """Returns why this rank has no samples of a micro-batch, and what would avoid that.

    For example, "has none of the 3 samples of this batch" and "leave short batches out:
    drop_last=True".
    """
    drop_last = "leave short batches out: drop_last=True"
    if micro_batch.left_out:
        why_empty = (
            f"has no samples: the collate function left out all {micro_batch.left_out} of its part"
        )
        return why_empty, drop_last

    # The rank has fewer virtual ranks than others. This happens in full batches, too, so leaving
    # out short ones would not avoid it.
    virtual_rank = micro_batch.virtual_rank
    if virtual_rank is not None and virtual_rank.is_padding:
        why_empty = "has no virtual rank left to compute in this micro-batch, as other ranks have"
        return why_empty, "give all ranks the same number of virtual ranks"

    if micro_batch.num_micro_batches > 1:
        return "has no samples in this micro-batch", drop_last
    return f"has none of the {micro_batch.global_samples} samples of this batch", drop_last

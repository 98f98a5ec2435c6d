"""A micro-batch: what a rank computes in one forward and backward pass, and how much it counts.

A *global batch* holds the samples of one optimizer step, over all ranks. Each rank computes its
part of it in one or more *micro-batches*.

A *virtual rank* is a fixed part of every global batch that is computed by itself, whatever the
number of processes: one process computes one or several of them, one after the other. Either all
virtual ranks train one model, and their gradients are added up (the setting `virtual_ranks`), or
each trains a copy of the model, with an optimizer step of its own (DiLoCo's replicas). In the
second case several processes may compute one virtual rank together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRanks:
    """The virtual ranks of a run."""

    count: int
    train_copies: bool
    """True if each trains a copy of the model; False if all train one model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRank:
    """The virtual rank that a micro-batch belongs to."""

    number: int
    """Its number among all virtual ranks of the run, from 0."""
    begins: bool
    """True if this micro-batch is its first of the global batch."""
    ends: bool
    """True if this micro-batch is its last of the global batch."""
    piece: int = 0
    """The number of this micro-batch among those of the virtual rank, from 0."""
    number_on_process: int
    """How many virtual ranks this process computes, one after the other."""
    mean_number_on_process: float
    """How many a process computes on average; at least 1."""
    has_own_step: bool
    """True if an optimizer steps for it alone: each virtual rank trains a copy of the model."""
    is_padding: bool = False
    """True if the process has no virtual rank to compute, and gets a micro-batch without samples so
    that every process has as many micro-batches."""
    is_repeat: bool = False
    """True if it is computed elsewhere, or has been computed before, and is computed here only to
    check a device: its gradient, loss, samples and buffers count for nothing."""
    is_compared: bool = False
    """True if its gradient is compared with what another process computes for the same virtual
    rank."""

    @property
    def counts(self) -> bool:
        """True if its gradient and its loss are part of those of the global batch."""
        return not self.is_padding and not self.is_repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one rank computes in one forward and backward pass."""

    global_samples: int = 0
    """Samples of the whole global batch, over all ranks and micro-batches."""
    local_rows: int = 0
    """Rows of this rank's part. That is its number of samples, unless a collate function leaves
    some out or adds others. It may be 0."""
    left_out: int = 0
    """Samples of this rank's part that the collate function left out."""
    first: bool = True
    """True if this micro-batch is the first of its global batch."""
    last: bool = True
    """True if this micro-batch is the last of its global batch."""
    num_micro_batches: int = 1
    """Micro-batches of the global batch."""
    scale: float = 1.0
    """Factor of the loss. With it, the average over ranks of the accumulated gradients is the
    gradient of the mean over the global batch. If virtual ranks train one model, so is the average
    over virtual ranks. If they train copies, the accumulated gradients are those of the mean over
    the part of one virtual rank."""
    plain: bool = True
    """True if `scale` is 1 on every rank and the global batch is one micro-batch. Then
    `loss.backward()` gives the same gradients as `world.backward(loss)`."""
    virtual_rank: VirtualRank | None = None
    """The virtual rank that this micro-batch belongs to; None: the global batch has one model."""
    checks_devices: bool = False
    """True if in its global batch devices are checked (the setting `check_devices`)."""

    @property
    def is_repeat(self) -> bool:
        """True if it is computed only to check a device, and counts for nothing."""
        return self.virtual_rank is not None and self.virtual_rank.is_repeat

    @property
    def counted_rows(self) -> int:
        """The rows that count on this rank, in means and sums over samples."""
        return 0 if self.is_repeat else self.local_rows

    @property
    def opens(self) -> bool:
        """True if no gradients of the same optimizer step come before it."""
        return self.first or (self.has_own_step and self.virtual_rank_begins)

    @property
    def closes(self) -> bool:
        """True if an optimizer steps after it."""
        return self.last or (self.has_own_step and self.virtual_rank_ends)

    @property
    def begins_gradients(self) -> bool:
        """True if `parameter.grad` holds nothing yet that belongs to it."""
        return self.first or self.virtual_rank_begins

    @property
    def has_own_step(self) -> bool:
        """True if an optimizer steps for its virtual rank alone."""
        return self.virtual_rank is not None and self.virtual_rank.has_own_step

    @property
    def virtual_rank_begins(self) -> bool:
        """True if it is the first micro-batch of its virtual rank in the global batch."""
        return self.virtual_rank is not None and self.virtual_rank.begins

    @property
    def virtual_rank_ends(self) -> bool:
        """True if it is the last micro-batch of its virtual rank in the global batch."""
        return self.virtual_rank is not None and self.virtual_rank.ends

    @property
    def virtual_rank_number(self) -> int | None:
        """The number of its virtual rank, or None."""
        return None if self.virtual_rank is None else self.virtual_rank.number

    def without_virtual_rank(self) -> MicroBatch:
        """Returns this micro-batch as it counts before virtual ranks begin to train copies."""
        if self.virtual_rank is None:
            return self
        # A process adds up the gradients of several virtual ranks, each with a mean of its own.
        scale = self.scale / self.virtual_rank.mean_number_on_process
        return replace(self, scale=scale, virtual_rank=None)

"""Describes a micro-batch: what a rank computes in one forward and backward pass.

A *global batch* holds the samples of one optimizer step, over all ranks. Each rank computes its
part of it in one or more *micro-batches*.

A *virtual rank* is a fixed part of every global batch that is computed separately, whatever the
number of processes; a process computes one or more of them, one after the other. Either all virtual
ranks train one model, and their gradients are added (the setting `virtual_ranks`), or each trains a
copy of the model with its own optimizer step (the replicas of DiLoCo). In the second case several
processes may compute one virtual rank together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRanks:
    """The virtual ranks of a run."""

    count: int
    train_copies: bool
    """True if each trains a copy of the model; False if all train one model."""

    def ranks_per_virtual_rank(self, num_ranks: int) -> int:
        """Returns how many ranks compute a virtual rank together.

        There are several only if there are more ranks than virtual ranks: 2 virtual ranks on 8
        ranks have 4 ranks each.
        """
        return max(1, num_ranks // self.count)

    def are_equally_many_on_all(self, num_ranks: int) -> bool:
        """Returns True if all ranks compute equally many virtual ranks.

        For 3 virtual ranks it is False on 2 ranks, of which one computes two. It is True on 1, 3
        and 6 ranks.
        """
        return num_ranks > self.count or self.count % num_ranks == 0

    def num_averaged_gradients(self, num_ranks: int) -> int:
        """Returns how many gradients are averaged before an optimizer steps.

        If all virtual ranks train one model, there is one gradient of each. If they train copies,
        there is one of each rank that computes the copy.
        """
        return self.ranks_per_virtual_rank(num_ranks) if self.train_copies else self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRank:
    """The virtual rank that a micro-batch belongs to."""

    number: int
    """Its number among all virtual ranks of the run, from 0."""
    begins: bool
    """True if this is the first micro-batch of the virtual rank in the global batch."""
    ends: bool
    """True if this is the last micro-batch of the virtual rank in the global batch."""
    piece: int = 0
    """The number of this micro-batch among those of the virtual rank, from 0."""
    num_on_process: int
    """How many virtual ranks this process computes, one after the other."""
    virtual_ranks_per_process: float
    """How many virtual ranks a process computes on average; at least 1."""
    has_own_step: bool
    """True if each virtual rank trains a copy of the model, with its own optimizer step."""
    is_padding: bool = False
    """True if the process has no virtual rank left to compute. It then gets a micro-batch without
    samples, so that every process has the same number of micro-batches."""
    is_repeat: bool = False
    """True if the virtual rank is computed a second time, only to check a device. Its gradient,
    loss, samples and buffers are then ignored."""
    is_compared: bool = False
    """True if its gradient is compared with what another process computes for the same virtual
    rank."""

    @property
    def contributes(self) -> bool:
        """True if its gradient and its loss are part of those of the global batch."""
        return not self.is_padding and not self.is_repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one rank computes in one forward and backward pass."""

    global_samples: int = 0
    """The number of samples in the whole global batch, over all ranks and micro-batches."""
    local_rows: int = 0
    """The number of rows in this rank's part, which may be 0. It is the number of samples unless a
    collate function leaves samples out or adds rows."""
    left_out: int = 0
    """The number of samples of this rank's part that the collate function left out."""
    first: bool = True
    """True if this micro-batch is the first of its global batch."""
    last: bool = True
    """True if this micro-batch is the last of its global batch."""
    num_micro_batches: int = 1
    """The number of micro-batches in the global batch."""
    scale: float = 1.0
    """The factor of the loss. With it, the average of the accumulated gradients over all ranks is
    the gradient of the mean loss over the global batch. If virtual ranks train one model, it is the
    average over the virtual ranks instead. If they train copies, the accumulated gradients are
    those of the mean loss over one virtual rank's part."""
    plain: bool = True
    """True if `scale` is 1 on every rank and the global batch is one micro-batch. Then
    `loss.backward()` gives the same gradients as `world.backward(loss)`."""
    virtual_rank: VirtualRank | None = None
    """The virtual rank that this micro-batch belongs to; None without virtual ranks."""
    checks_devices: bool = False
    """True if devices are checked in its global batch (the setting `check_devices`)."""

    @property
    def is_repeat(self) -> bool:
        """True if it is computed only to check a device, and its results are ignored."""
        return self.virtual_rank is not None and self.virtual_rank.is_repeat

    @property
    def counted_rows(self) -> int:
        """The rows that count on this rank, in means and sums over samples."""
        return 0 if self.is_repeat else self.local_rows

    @property
    def opens_step(self) -> bool:
        """True if it is the first micro-batch of an optimizer step."""
        return self.first or (self.has_own_step and self.virtual_rank_begins)

    @property
    def closes_step(self) -> bool:
        """True if it is the last micro-batch of an optimizer step."""
        return self.last or (self.has_own_step and self.virtual_rank_ends)

    @property
    def is_only_of_step(self) -> bool:
        """True if an optimizer steps for this micro-batch alone, so that nothing accumulates."""
        return self.opens_step and self.closes_step

    @property
    def begins_gradients(self) -> bool:
        """True if it is the first micro-batch that adds to a gradient in `parameter.grad`."""
        return self.first or self.virtual_rank_begins

    @property
    def has_own_step(self) -> bool:
        """True if its virtual rank has its own optimizer step."""
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
        """Returns this micro-batch for a step in which all virtual ranks still train one model."""
        if self.virtual_rank is None:
            return self
        # A process adds the gradients of several virtual ranks, each the gradient of its own mean.
        scale = self.scale / self.virtual_rank.virtual_ranks_per_process
        return replace(self, scale=scale, virtual_rank=None)

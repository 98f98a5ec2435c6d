"""Opens the process groups of a run, besides the default group.

All groups are opened here, so that each of them has the timeout of the run (`collective_timeout`):
torch gives a group without one its own default, 30 minutes, whatever the default group has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def open_groups(
    ranks_of_groups: Sequence[Sequence[int]],
    name: str,
    *,
    timeout: timedelta | None,
    cpu_tensors_only: bool = False,
) -> dist.ProcessGroup:
    """Opens several process groups that have no rank in common. All ranks of the run call this.

    Args:
        ranks_of_groups: every rank of the run once.
        name: a description of the groups, for reports of hangs.
        timeout: how long a collective may take; None: torch's default.
        cpu_tensors_only: the groups use Gloo alone. Otherwise they have the backends of the default
            group, and on GPUs an NCCL communicator each, which takes time and GPU memory.

    Returns:
        The group that this rank belongs to.
    """
    own_rank = dist.get_rank()
    group: dist.ProcessGroup
    if cpu_tensors_only:
        # Not by calls of all ranks, as below. If NCCL's default group is connected, torch lets the
        # ranks outside of a new group take part in a split of that communicator. Its members do so
        # only if the group is one of NCCL, so the others would wait for them (pytorch#145376).
        own_ranks = next(ranks for ranks in ranks_of_groups if own_rank in ranks)
        group = dist.new_group(
            list(own_ranks),
            timeout=timeout,
            backend="gloo",
            use_local_synchronization=True,
            group_desc=name,
        )
        return group
    own_group: dist.ProcessGroup | None = None
    for ranks in ranks_of_groups:
        # Here all ranks must open all groups, in the same order.
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
        if own_rank in ranks:
            own_group = group
    assert own_group is not None  # every rank is in one of the groups
    return own_group

"""Opens the process groups of a run, except for the default group.

All groups are opened here, so that each has the timeout of the run (`collective_timeout`). A group
that is opened without a timeout gets torch's default of 30 minutes, not that of the default group.
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
    """Opens process groups that together contain each rank once. All ranks of the run call this.

    Args:
        ranks_of_groups: the ranks of each group, e.g. `[[0, 1], [2, 3]]`. Every rank of the run is
            in one of the groups.
        name: description of the groups, which is shown in reports of hangs.
        timeout: how long a collective may take; None for torch's default.
        cpu_tensors_only: True to use only Gloo. Otherwise the groups have the backends of the
            default group; on GPUs each then creates an NCCL communicator, which takes time and GPU
            memory.

    Returns:
        The group that this rank belongs to.
    """
    own_rank = dist.get_rank()
    group: dist.ProcessGroup
    if cpu_tensors_only:
        # Each rank opens only its own group (`use_local_synchronization`). If every rank opened all
        # groups, as below, a run whose default group uses NCCL would hang (pytorch#145376).
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
        # All ranks must open all groups, in the same order.
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
        if own_rank in ranks:
            own_group = group

    assert own_group is not None  # every rank is in one of the groups
    return own_group

"""Process groups: which there are, their GPU, and when one is opened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    import torch


def process_groups() -> list[dict[str, Any]]:
    """Returns the names, descriptions and ranks of this rank's process groups."""
    # If torch.distributed has not been imported, there are none, and this must not import it.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []

    descriptions = []
    names_of_groups = list(c10d._world.pg_names.items())  # a copy: another thread may open a group
    for group, name in names_of_groups:
        # For each rank of the group, its number in the run and in the group.
        rank_in_group = c10d._world.pg_group_ranks.get(group, {})
        descriptions.append(
            {
                "name": str(name),
                "description": str(getattr(group, "group_desc", "")),
                "ranks": sorted(rank_in_group),
            }
        )
    return descriptions


def gpu_of_default_group() -> torch.device | None:
    """Returns the GPU with which the default process group was opened.

    Returns:
        None if there is no such group, or it was opened without a GPU.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return None
    gpu: torch.device | None = getattr(c10d.GroupMember.WORLD, "bound_device_id", None)
    return gpu


def group_being_made(frame: FrameType | None) -> dict[str, Any] | None:
    """Returns the process group that a thread is opening with `new_group`, or None.

    Args:
        frame: the innermost frame of the thread.

    Returns:
        The name, ranks and backend of the group. `members_only` is True if only its ranks wait for
        each other, and False if all ranks of the run do (TORCH_DIST_INIT_BARRIER=1). None if the
        thread opens no group, or has just begun to.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    while frame is not None:
        if frame.f_code.co_name == "_new_group_with_tag":
            variables = frame.f_locals  # those of torch's function
            if "group_name" not in variables:  # torch has not chosen it yet
                return None

            # At the end of `new_group` all ranks wait for each other if TORCH_DIST_INIT_BARRIER=1,
            # unless the caller wants that only the members of the group do.
            assert c10d is not None  # the frame is one of its functions
            ends_with_barrier = c10d._is_barrier_after_init() == 1
            caller_wants_members_only = bool(variables["use_local_synchronization"])
            return {
                "name": str(variables["group_name"]),
                "ranks": [int(rank) for rank in variables["ranks"]],
                "backend": str(variables["backend"]),
                "members_only": caller_wants_members_only or not ends_with_barrier,
            }

        frame = frame.f_back
    return None


def call_on_new_default_group(on_opened: Callable[[object], object]) -> None:
    """Calls `on_opened` with each default process group that this process opens from now on.

    `init_process_group` sets the group by `_update_default_pg`, which this replaces. When the group
    is closed, torch calls the same function with None.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:  # a torch that was built without torch.distributed
        return

    original = c10d._update_default_pg

    def update(group: object) -> None:
        original(group)
        if group is not None:
            on_opened(group)

    c10d._update_default_pg = update

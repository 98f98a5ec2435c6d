"""The memory areas of all ranks of this machine, in which they keep their steps.

The launcher holds several areas for each rank (`memory_area`): the rank writes its steps to the
first two in turn, and receives the steps of ranks of another machine in the others. Ranks map the
areas of their neighbours too, to see whether these have kept the previous step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from lockstep.checkpoint.kept_layout import KeptLayout
from lockstep.checkpoint.memory_area import Area, Seal
from lockstep.machine.topology import AREAS_PER_RANK, OWN_AREAS_PER_RANK, Topology


class MachineAreas:
    """Maps the areas of all ranks that the launcher of this machine has started in any attempt.

    Args:
        topology: the place of this process in the run, with the paths of the areas.

    Raises:
        OSError: the launcher has ended, or runs in another container.
    """

    def __init__(self, topology: Topology) -> None:
        self._local_rank = topology.local_rank
        self._local_size = topology.local_size

        # The launcher gives the paths of all areas on this machine, rank by rank.
        areas = [Area(path) for path in topology.memory]
        self._areas_of_ranks: list[list[Area]] = []
        for begin in range(0, len(areas), AREAS_PER_RANK):
            self._areas_of_ranks.append(areas[begin : begin + AREAS_PER_RANK])

    @property
    def of_this_rank(self) -> list[Area]:
        """The areas of this rank: the two that it writes to, and those for copies of other ranks.

        There are two for each rank of another machine that may send its copies here.
        """
        return self._areas_of_ranks[self._local_rank]

    @property
    def own(self) -> list[Area]:
        """The two areas to which this rank writes its steps in turn."""
        return self.of_this_rank[:OWN_AREAS_PER_RANK]

    def inbox(self, sender_index: int) -> list[Area]:
        """Returns the two areas for the copies of one of the ranks that send theirs to this rank.

        Args:
            sender_index: 0 for the first of these ranks, 1 for the second.
        """
        first_area = OWN_AREAS_PER_RANK * (1 + sender_index)
        return self.of_this_rank[first_area : first_area + OWN_AREAS_PER_RANK]

    def looked_after(self) -> list[Area]:
        """Returns the areas of this rank, and those of some ranks that no longer exist.

        An earlier attempt may have had more ranks. 5 ranks before, 2 ranks now: the rank with local
        rank 0 looks after the areas of the ranks 0, 2 and 4, the other one after those of 1 and 3.
        """
        areas: list[Area] = []
        for areas_of_rank in self._areas_of_ranks[self._local_rank :: self._local_size]:
            areas += areas_of_rank
        return areas

    def break_seals(self, *, except_of: Collection[str]) -> None:
        """Deletes the steps in all areas that this rank looks after, by breaking their seals.

        Args:
            except_of: the paths of the areas that keep what they hold.
        """
        for area in self.looked_after():
            if area.path not in except_of:
                area.break_seal()

    def all_ranks_have_sealed(self, attempt: int, serial: int) -> bool:
        """Returns True if every rank of this machine has sealed its part of a step.

        Args:
            attempt: the attempt that has kept the step, see `memory_area.Seal`.
            serial: the serial number of the step.
        """
        for areas_of_rank in self._areas_of_ranks[: self._local_size]:
            seals = [area.seal for area in areas_of_rank]
            if not any(_is_of(seal, attempt, serial) for seal in seals):
                return False
        return True

    def some_rank_has_given_up(self, attempt: int) -> bool:
        """Returns True if a rank of this machine has stopped keeping steps in an attempt.

        The rank has noted that in its first area (`give_up`).
        """
        areas_of_present_ranks = self._areas_of_ranks[: self._local_size]
        return any(areas[0].given_up_in == attempt for areas in areas_of_present_ranks)

    def give_up(self, attempt: int) -> None:
        """Tells the other ranks of the machine that this rank has stopped keeping steps."""
        self.own[0].give_up(attempt)

    def free_unused(self, num_senders: int) -> None:
        """Frees the memory of the areas that no rank uses in the present attempt.

        Each rank frees its areas for copies that it does not receive. The first one also frees the
        areas of ranks that no longer exist.

        Args:
            num_senders: how many ranks of another machine send their copies to this rank.
        """
        num_used = OWN_AREAS_PER_RANK * (1 + num_senders)
        unused = self.of_this_rank[num_used:]
        if self._local_rank == 0:
            # An earlier attempt may have had more ranks on this machine. Their areas are the last.
            for areas_of_absent_rank in self._areas_of_ranks[self._local_size :]:
                unused += areas_of_absent_rank
        for area in unused:
            area.free()


class OwnArea:
    """One of the two areas to which this rank writes its steps, and the views to copy to.

    Args:
        area: the area.
    """

    def __init__(self, area: Area) -> None:
        self.area = area
        self._layout_version: int | None = None
        """The version of the layout for which the views were made; None if there are none yet."""
        self._views: list[Tensor] = []
        """The tensors in the memory of the area that values are copied to."""

    def has_views_for(self, layout: KeptLayout) -> bool:
        """Returns True if a step was copied here with the same places for all values."""
        return self._layout_version == layout.version

    def begin_writing(self, header_bytes: int, layout: KeptLayout) -> list[Tensor]:
        """Breaks the seal of the area, and makes room for a header and the values of a layout.

        Args:
            header_bytes: the length of the header.
            layout: which tensors are copied, and to which places.

        Returns:
            The tensors to copy to, one for each of `layout.sources`. Those of the last copy are
            used again, unless the area has other memory now or the values have other places.
        """
        memory_has_moved = self.area.begin_writing(header_bytes, layout.num_bytes)
        if memory_has_moved or not self.has_views_for(layout):
            self._views = layout.destinations_in(self.area)
            self._layout_version = layout.version
        return self._views


def first_area_not_in(paths: Collection[str], areas: Sequence[Area]) -> int:
    """Returns the index of the first area whose path is not in `paths`.

    Args:
        paths: the paths of the areas that hold the step that the run resumed from. Until a later
            step is complete, it is the only complete one, and must not be overwritten.
        areas: two areas that are written in turn. So one of them does not hold that step.
    """
    for index, area in enumerate(areas):
        if area.path not in paths:
            return index
    raise AssertionError("all areas hold the resumed step")


def _is_of(seal: Seal | None, attempt: int, serial: int) -> bool:
    """Returns True if an area is sealed with this attempt and serial number."""
    return seal is not None and seal.attempt == attempt and seal.serial == serial

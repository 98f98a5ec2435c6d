"""Who am I in the run: a frozen value, made once by `distributed.environment`; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import SettingError


@dataclass(frozen=True)
class DataParallelRank:
    """Which part of every global batch a process computes: part `rank` of `size`.

    Where several processes compute one part together (the stages of a pipeline), the first `size`
    ranks of the run are those that hold the results: they alone contribute to sums and means over
    ranks.
    """

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One process's place among the others.

    Every process of a node has the same `node_rank`; where all nodes hold equally many,
    `rank = node_rank * local_size + local_rank`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    """Host name or address of the node that holds rank 0."""
    master_port: int | None = None
    agent_store: bool = False
    """The launcher already serves a store at the master's address; rank 0 must not open another."""
    source: str = "one process"
    """Where this was learnt from, in words: `torchrun`, `Slurm`, ..."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise SettingError(
                f"rank {self.rank} of world size {self.size} (from {self.source})",
                "ranks count from 0 to world size - 1",
                "start each process with a rank of its own below the world size",
            )
        if self.local_size < 1 or not 0 <= self.local_rank < self.local_size:
            raise SettingError(
                f"local rank {self.local_rank} of {self.local_size} (from {self.source})",
                "local ranks count from 0 to the number of processes on the node - 1",
                "set LOCAL_RANK and LOCAL_WORLD_SIZE to match, or let `lockstep run` set them",
            )

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def one_node(self) -> bool:
        """True when all processes run on this machine."""
        return self.local_size == self.size

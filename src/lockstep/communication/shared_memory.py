"""Collectives of the ranks of one machine through memory that all of them map.

Each rank has *slots*, parts of the memory in which the others read what it gives. A *barrier* is
passed when all ranks have come; it is made of semaphores, which ranks *post* for each other.
Barriers are even and odd in turn (their *parity*). Before the first barrier of a collective each
rank writes the *words* of its call, such as "all_reduce of 3 numbers in float32", so that all of
them notice if they have called different ones.

An all-reduce of much data: every rank copies into its slot what the others are to sum, waits for
all, sums its own slice over the slots in the order of the ranks, waits for all again, and copies
the other slices out (a reduce-scatter and an all-gather). One of little data: every rank copies all
of it, waits for all once, and sums everything. Each slice is summed by one rank, or by all in the
same order, so that all ranks have the same bits.

A rank has two slots, used in turn: before one is written again all ranks have passed a barrier, and
so have read what was in it.

The barrier is made of POSIX semaphores in the mapping. `sem_post` and `sem_wait` synchronise memory
(IEEE Std 1003.1-2017, 4.12), on x86-64 as on 64-bit Arm; a waiter sleeps in the kernel, and where
nobody sleeps a call takes a third of a microsecond. A rank has one for even barriers and one for
odd ones: a rank that is one barrier ahead is not taken for another that is not there yet. Few ranks
post to each other; of many all post to the first, which waits for all and then posts to each.

The mapping is a memfd: it has no name that could stay behind, does not count against the size of
/dev/shm, and is gone with the last process that maps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.groups import open_groups
from lockstep.communication.summation_tree import RankSums
from lockstep.communication.traffic import all_reduce_bytes, traffic
from lockstep.errors import RanksDifferError
from lockstep.wording import format_ranks

CHUNK_BYTES = 2**19
"""The part of a slot for each of up to 8 ranks. A larger tensor goes piece by piece, which the
processors' caches hold; if ranks share cores, pieces of half the size take twice as long."""
MAX_RANKS_IN_SLOT_SIZE = 8
MAX_BYTES_OF_ALL_SLOTS = 2**29
"""Every rank maps all slots, and its page tables grow with what it touches."""
ALL_TO_ALL_BYTES = 2**21
"""Up to this size, of the tensors of all ranks together, every rank sums everything: a second
barrier costs more than reading more memory. The tensor must fit into a slot, too."""
TRIES_BEFORE_SLEEP = 300
"""How often a rank tests a semaphore before it sleeps: for some 100 microseconds, which is about
what it costs to sleep and be woken (Karlin et al., SODA 1990)."""
TRIES_BEFORE_SLEEP_ON_SHARED_CORES = 40
"""The same if there are more ranks than cores: some 15 microseconds."""
MAX_RANKS_OF_FLAT_BARRIER = 8
"""Up to this number all ranks wake each other in a barrier; more would have too much to wake. It
is also how many ranks a rank looks at when it checks whether others have ended."""
MAX_RECORDED_CALLS = 64
CHECK_INTERVAL_S = 1.0
"""How often a rank that sleeps checks whether the others are still there."""

TOKEN_BYTES = 32
CACHE_LINE_BYTES = 64
"""A semaphore has 32 bytes (glibc) or fewer."""
CALL_WORDS_BYTES = 2 * CACHE_LINE_BYTES
BARRIER_NUMBER = struct.Struct("=q")
PARITIES = (0, 1)

COMBINE_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class Call(NamedTuple):
    """One collective, as the watchdog reports it."""

    number: int
    """Counts the calls, from 1."""
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    time_s: float
    """When it was called, in seconds since 1970."""
    thread: int


def _round_up(number: int, unit: int) -> int:
    """Returns the smallest multiple of the unit that is not below the number."""
    return -(-number // unit) * unit


class _Layout:
    """Where things are in the mapping, in bytes from its start.

    In this order: the token, the semaphores, the barrier numbers, the words of the calls, and the
    slots, which begin on a new page.

    Args:
        size: the number of ranks on this machine.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        end_of_words = self.call(size, 0)
        self.slots = _round_up(end_of_words, mmap.PAGESIZE)
        num_slots = 2 * size
        most = max(MAX_BYTES_OF_ALL_SLOTS // num_slots, CACHE_LINE_BYTES * size)
        most_in_whole_pages = most // mmap.PAGESIZE * mmap.PAGESIZE
        wanted = CHUNK_BYTES * min(size, MAX_RANKS_IN_SLOT_SIZE)
        self.slot = min(wanted, most_in_whole_pages)
        """The size of a slot."""
        self.end = self.slots + num_slots * self.slot

    def semaphore(self, rank: int, parity: int) -> int:
        """Returns where a rank's semaphore for even (0) or odd (1) barriers is."""
        return CACHE_LINE_BYTES * (1 + 2 * rank + parity)

    def barriers(self, rank: int) -> int:
        """Returns where a rank writes the number of barriers that it has reached.

        The number is negative if an error made the rank leave the last barrier.
        """
        return CACHE_LINE_BYTES * (1 + 2 * self.size + rank)

    def call(self, rank: int, parity: int) -> int:
        """Returns where a rank writes the words of its call."""
        begin = CACHE_LINE_BYTES * (1 + 3 * self.size)
        return begin + CALL_WORDS_BYTES * (2 * rank + parity)


class _Time(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Semaphores:
    """The C library's functions for semaphores; they take the address of a semaphore."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        library_with_errno = ctypes.CDLL(None, use_errno=True)  # slower calls
        self.post = library.sem_post
        self.try_wait = library.sem_trywait
        self._init = library_with_errno.sem_init
        self._timed_wait = library_with_errno.sem_timedwait
        self.post.argtypes = self.try_wait.argtypes = [ctypes.c_void_p]
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._timed_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]

    def init(self, address: int) -> None:
        """Makes a semaphore that processes share, with the value 0."""
        if self._init(address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def posted_within(self, seconds: float, address: int) -> bool:
        """Sleeps until the semaphore is posted, for so many seconds at most.

        Returns False if it was not posted, or a signal ended the sleep.
        """
        whole_seconds, fraction = divmod(time.time() + seconds, 1.0)
        deadline = _Time(int(whole_seconds), int(fraction * 1e9))
        if self._timed_wait(address, deadline) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False


class _Barrier(NamedTuple):
    """What one rank does in a barrier: the addresses of the semaphores that it waits for and posts.

    Few ranks all post to each other. Of many, all post to the first rank, which waits for all of
    them and then posts to each.
    """

    own: int
    num_posts_awaited: int
    """How often the own semaphore is posted by other ranks."""
    posted_before: list[int]
    """Posted before the rank waits."""
    posted_after: list[int]
    """Posted after it has waited."""

    @classmethod
    def of(cls, semaphores: Sequence[int], rank: int) -> _Barrier:
        """Returns what one rank does, given the semaphores of all ranks."""
        own = semaphores[rank]
        others = [*semaphores[:rank], *semaphores[rank + 1 :]]
        # Few ranks: each posts to all others, and waits for all of them.
        if len(semaphores) <= MAX_RANKS_OF_FLAT_BARRIER:
            return cls(own, len(others), posted_before=others, posted_after=[])
        # Many ranks: the first one waits for all others, and then tells each that all have come.
        if rank == 0:
            return cls(own, len(others), posted_before=[], posted_after=others)
        return cls(own, 1, posted_before=[semaphores[0]], posted_after=[])


class SharedMemory:
    """The collectives of one rank; made by `open_shared_memory`.

    Args:
        memory: the mapping that all ranks of this machine share.
        rank: of this process.
        pids: the process of each rank of this machine.
        timeout_s: how long a rank may wait for the others.
        across: the process group of the ranks that have the same local rank on all machines; None
            if there is one machine.
        machine: the number of this machine, if the ranks of every machine follow each other, those
            of the first machine first; else None.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        pids: Mapping[int, int],
        timeout_s: float,
        across: dist.ProcessGroup | None = None,
        machine: int | None = None,
    ) -> None:
        self.across = across
        self.machine = machine
        self.ranks = list(pids)
        """The ranks of this machine."""
        self._pids = dict(pids)
        self._local_rank = self.ranks.index(rank)
        self._local_size = len(pids)
        cores: set[int] = set()
        for pid in pids.values():
            cores |= os.sched_getaffinity(pid)
        if self._local_size <= len(cores):
            self._tries = TRIES_BEFORE_SLEEP
        else:
            self._tries = TRIES_BEFORE_SLEEP_ON_SHARED_CORES
        self.calls: deque[Call] = deque(maxlen=MAX_RECORDED_CALLS)
        """The latest calls, the oldest first; the watchdog's thread reads them."""
        self.completed = 0
        """The number of the last call that was completed."""
        self._memory = memory
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._functions = _Semaphores()

        layout = _Layout(self._local_size)
        self._slot_bytes = layout.slot
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = everything.data_ptr()
        """The address of the mapping in this process; its tensors share one storage."""
        local_ranks = range(self._local_size)
        self._barrier_of_parity = []
        self._calls_at = []
        """For each parity, where the words of each rank's call are."""
        for parity in PARITIES:
            semaphores = [self.address + layout.semaphore(peer, parity) for peer in local_ranks]
            self._barrier_of_parity.append(_Barrier.of(semaphores, self._local_rank))
            self._calls_at.append([layout.call(peer, parity) for peer in local_ranks])
        self._barriers_at = [layout.barriers(peer) for peer in local_ranks]
        slots = torch.split(everything[layout.slots :], layout.slot)
        self._slots: tuple[Sequence[Tensor], Sequence[Tensor]]
        self._slots = (slots[: self._local_size], slots[self._local_size :])
        """The two slots of each rank: the first ones of all ranks, then the second ones."""
        self._slots_of_dtype: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Views of the slots, by the half in use and the dtype."""

        self._half = 0
        """Which of its two slots each rank uses."""
        self._barriers = 0
        """The number of barriers that this rank has reached."""
        self._number = 0
        """The number of the last call that was begun."""
        self._checks = 0
        """How often this rank has checked whether others have ended."""
        self._words_of_call: dict[tuple[str, torch.dtype, int], bytes] = {}
        self._words_to_compare: bytes | None = None
        """The words of the current call, until its first barrier."""
        self._broken = ""
        """The message of the error if the last call was not completed."""

    def takes(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
        """Returns True for a dense, contiguous CPU tensor and the operations SUM, MAX and MIN."""
        is_dense_on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
        return is_dense_on_cpu and tensor.is_contiguous() and op in COMBINE_FUNCTIONS

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, scale: float = 1.0
    ) -> None:
        """Replaces the tensor by its sum, maximum or minimum over the ranks, in their order.

        Args:
            tensor: contiguous; of the same dtype and number of elements on all ranks.
            op: SUM, MAX or MIN.
            scale: the values of every rank are multiplied by this before.

        Raises:
            RanksDifferError: on all ranks, if they have not called the same collective.
            torch.distributed.DistNetworkError: a rank has ended, or did not come in time.
        """
        own = tensor.detach().view(-1)
        max_bytes = min(self._slot_bytes, ALL_TO_ALL_BYTES // self._local_size)
        # A small tensor on one machine: every rank reduces all of it.
        if self.across is None and own.nbytes <= max_bytes:
            with self._calling("all_reduce", tensor, _how(op)):
                self._reduce_by_all(own, COMBINE_FUNCTIONS[op], scale)
            traffic.shared += own.nbytes
            return
        # Otherwise every rank reduces a slice of it.
        finish = self.start_all_reduce(tensor, op, scale=scale)
        finish()

    def start_all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        scale: float = 1.0,
        between: Callable[[Tensor], Callable[[], object]] | None = None,
    ) -> Callable[[], None]:
        """Starts an all-reduce; returns a function that waits for the other machines and ends it.

        Other all-reduces may be started before it is ended. All ranks must end them in the order in
        which they were started. Arguments and errors are those of `all_reduce`.

        Args:
            tensor: see `all_reduce`.
            op: see `all_reduce`.
            scale: see `all_reduce`.
            between: replaces the all-reduce between the machines: called with this rank's slice of
                the sum over this machine, returns a function that waits for the result.
        """
        slices = torch.tensor_split(tensor.detach().view(-1), self._local_size)
        with self._calling("all_reduce", tensor, f"{_how(op)} in slices"):
            self._reduce_scatter(slices, COMBINE_FUNCTIONS[op], scale)
        own_slice = slices[self._local_rank]
        wait: Callable[[], object] | None = None
        traffic.shared += tensor.nbytes
        if between is not None:
            wait = between(own_slice)
        elif self.across is not None and own_slice.numel():
            work = cast(dist.Work, dist.all_reduce(own_slice, op, self.across, async_op=True))
            wait = partial(traffic.wait, work.wait)
            traffic.sent += all_reduce_bytes(own_slice.nbytes, dist.get_world_size(self.across))

        def end() -> None:
            if wait is not None:
                wait()
            with self._calling("all_gather", tensor):
                self._gather(slices)

        return end

    def sum_in_tree(
        self, nodes: Sequence[Tensor], total: Tensor, sums: RankSums, *, scale: float = 1.0
    ) -> None:
        """Writes the sum over virtual ranks, in the order of their tree, to `total` on all ranks.

        All ranks have to be on this machine. Errors are those of `all_reduce`.

        Args:
            nodes: this rank's values of nodes of the tree, flat tensors as long as `total`. They
                are overwritten. `total` itself may be one of them.
            total: flat; of the same dtype and number of elements on all ranks.
            sums: says how many nodes each rank has, and in which order they are added.
            scale: the sum is multiplied by this.
        """
        most_nodes = max(sums.nodes_of_rank)
        fits_into_slot = total.nbytes * most_nodes <= self._slot_bytes
        bytes_to_read = total.nbytes * len(sums.merges)
        with self._calling("all_reduce", total, " in a tree"):
            if fits_into_slot and bytes_to_read <= ALL_TO_ALL_BYTES:
                # A small tensor: every rank reads the nodes of all ranks, and sums all of it.
                self._sum_tree_by_all(nodes, total, sums)
                if scale != 1.0:
                    total.mul_(scale)
            else:
                # Every rank sums a slice of it, and then the slices are gathered.
                slices = torch.tensor_split(total, self._local_size)
                slices_of_nodes = [torch.tensor_split(node, self._local_size) for node in nodes]
                self._reduce_scatter_in_tree(
                    slices_of_nodes,
                    [slices[self._local_rank]],
                    sums.nodes_of_rank,
                    sums.merges,
                    total,
                )
                if scale != 1.0:
                    slices[self._local_rank].mul_(scale)
                self._gather(slices)
        traffic.shared += total.nbytes * max(1, len(nodes))

    def reduce_scatter_in_tree(
        self,
        slices_of_nodes: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
        nodes_of_rank: Sequence[int],
        merges: Sequence[int],
        *,
        whole: Tensor,
    ) -> None:
        """Writes this rank's slices of sums over virtual ranks of this machine.

        Errors are those of `all_reduce`.

        Args:
            slices_of_nodes: `slices_of_nodes[n][r]` is the slice of this rank's node n that rank r
                of this machine sums. The slices of a node are as long as those that
                `torch.tensor_split` makes of `whole`. They are overwritten.
            totals: this rank's slices of the sums, as many as the merges leave.
            nodes_of_rank: how many nodes each rank of this machine has.
            merges: for each node of each rank, the number of merges after it was pushed onto the
                stack; see `add_in_tree`.
            whole: a tensor with the dtype of the nodes and as many elements as a node has. Its
                values are not read.
        """
        with self._calling("reduce_scatter", whole, " in a tree"):
            self._reduce_scatter_in_tree(slices_of_nodes, totals, nodes_of_rank, merges, whole)
        traffic.shared += whole.nbytes * len(slices_of_nodes)

    def gather_slices(self, slices: Sequence[Tensor], whole: Tensor) -> None:
        """Copies the slice of each rank of this machine to all of them.

        Errors are those of `all_reduce`.

        Args:
            slices: one for each rank. That of this rank is read, the others are written.
            whole: that they are slices of.
        """
        with self._calling("all_gather", whole):
            self._gather(slices)

    def all_gather(self, rows: Tensor, tensor: Tensor) -> None:
        """Fills `rows`, one for each rank of this machine, with their tensors.

        Errors are those of `all_reduce`.
        """
        own = tensor.detach().view(-1)
        flat_rows = rows.detach().view(self._local_size, len(own))
        piece_numel = self._slot_bytes // own.itemsize  # a slot has room for so many elements
        with self._calling("all_gather", tensor):
            # An empty tensor has one piece too, so that the ranks wait for each other.
            for start in range(0, max(1, len(own)), piece_numel):
                piece = own[start : start + piece_numel]
                slots = self._next_slots(own.dtype)
                slots[self._local_rank][: len(piece)].copy_(piece)
                self._barrier()
                # The slots follow each other in memory, so one copy takes the pieces of all ranks.
                slot_numel = slots[0].numel()
                pieces = torch.as_strided(slots[0], (len(slots), len(piece)), (slot_numel, 1))
                flat_rows[:, start : start + piece_numel].copy_(pieces)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives all ranks of this machine the values of one of them.

        Args:
            tensor: see `all_reduce`.
            source: the local rank that sends.

        Errors are those of `all_reduce`.
        """
        own = tensor.detach().view(-1)
        # A gather in which all ranks but the source have empty parts.
        parts = [own if peer == source else own[:0] for peer in range(self._local_size)]
        with self._calling("broadcast", tensor, f" from rank {self.ranks[source]}"):
            self._gather(parts)

    def close(self) -> None:
        """Unmaps the memory. Later calls raise, such as those of a model's communication hook."""
        with self._lock:
            # As if the last call had not been completed: then `_calling` raises this message.
            self._number = self.completed + 1
            self._broken = "shared memory: after world.close()"
            self._slots = ((), ())
            self.across = None
            self._slots_of_dtype.clear()
            self._memory.close()

    def flight_record(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns these ranks as a group, and its latest calls, as torch's Flight Recorder does."""
        name = "shared memory"
        entries = [
            {
                "profiling_name": f"{name}:{call.op}",
                "process_group": [name, ""],
                "pg_id": name,
                "is_p2p": False,
                "collective_seq_id": call.number,
                "input_sizes": [call.shape],
                "output_sizes": [call.shape],
                "input_dtypes": [str(call.dtype).removeprefix("torch.")],
                "state": "completed" if call.number <= self.completed else "scheduled",
                "time_created_ns": int(call.time_s * 1e9),
                "thread_id": call.thread,
            }
            for call in list(self.calls)
        ]
        group = {"name": name, "description": "", "ranks": self.ranks}
        return group, {"entries": entries}

    def _reduce_by_all(self, own: Tensor, combine: Callable[..., Tensor], scale: float) -> None:
        """Reduces a small tensor: every rank reads the tensors of all ranks."""
        slots = [slot[: len(own)] for slot in self._next_slots(own.dtype)]
        _scale(own, scale, slots[self._local_rank])
        self._barrier()
        total = slots[0]
        for slot in slots[1:]:
            total = combine(total, slot, out=own)

    def _reduce_scatter(
        self, slices: Sequence[Tensor], combine: Callable[..., Tensor], scale: float
    ) -> None:
        """Reduces every slice on one rank: the slice of this rank's number on this rank.

        Args:
            slices: this rank's values, one slice for each rank. The slice of its own number is
                replaced by the result.
            combine: reduces two tensors.
            scale: the values are multiplied by this before.
        """
        local_rank = self._local_rank
        local_size = self._local_size
        # A slot has a piece for each of the ranks.
        piece_numel = self._slot_bytes // slices[0].itemsize // local_size
        for start in range(0, len(slices[0]), piece_numel):
            pieces = [rank_slice[start : start + piece_numel] for rank_slice in slices]
            slots = []
            for slot in self._next_slots(pieces[0].dtype):
                slots.append(torch.split(slot[: piece_numel * local_size], piece_numel))
            own_piece = pieces[local_rank]
            for peer, piece in enumerate(pieces):
                if peer == local_rank:
                    _scale(piece, scale, out=piece)
                else:
                    _scale(piece, scale, out=slots[local_rank][peer][: len(piece)])
            self._barrier()
            # What each rank contributes to this rank's piece, in the order of the ranks.
            contributions = [slot[local_rank][: len(own_piece)] for slot in slots]
            # This rank's own contribution is not in its slot, so sums can be written there.
            scratch = contributions[local_rank]
            contributions[local_rank] = own_piece
            total = contributions[0]
            for peer in range(1, local_size):
                # The sum is written to the own piece as soon as that has been added.
                out = own_piece if peer >= local_rank else scratch
                total = combine(total, contributions[peer], out=out)

    def _sum_tree_by_all(self, nodes: Sequence[Tensor], total: Tensor, sums: RankSums) -> None:
        """Sums a small tensor in the order of a tree: every rank reads the nodes of all ranks."""
        numel = len(total)
        slots = self._next_slots(total.dtype)
        for index, node in enumerate(nodes):
            slots[self._local_rank][index * numel : (index + 1) * numel].copy_(node)
        self._barrier()
        values: list[Tensor] = []
        for slot, num_nodes in zip(slots, sums.nodes_of_rank, strict=True):
            for index in range(num_nodes):
                values.append(slot[index * numel : (index + 1) * numel])
        # What is in the slots must stay, because other ranks read it too.
        add_in_tree(values, sums.merges, [total], overwrite=False)

    def _reduce_scatter_in_tree(
        self,
        slices_of_nodes: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
        nodes_of_rank: Sequence[int],
        merges: Sequence[int],
        whole: Tensor,
    ) -> None:
        """Sums every slice on one rank; arguments are those of `reduce_scatter_in_tree`."""
        local_rank = self._local_rank
        local_size = self._local_size
        # As `torch.tensor_split` cuts: the first slices have one element more.
        shortest_slice, num_longer = divmod(whole.numel(), local_size)
        own_length = shortest_slice + (1 if local_rank < num_longer else 0)
        longest_slice = shortest_slice + (1 if num_longer else 0)
        most_nodes = max(1, *nodes_of_rank)
        dtype = whole.dtype
        # A slot has a piece for each node of its rank and each of the ranks that sum.
        piece_numel = self._slot_bytes // dtype.itemsize // (local_size * most_nodes)
        for start in range(0, longest_slice, piece_numel):
            slots = self._next_slots(dtype)
            pieces_of_slot = []  # for each rank, by node * ranks + the rank that sums
            for slot in slots:
                pieces_of_slot.append(
                    torch.split(slot[: piece_numel * local_size * most_nodes], piece_numel)
                )
            for node, slices in enumerate(slices_of_nodes):
                for peer, peer_slice in enumerate(slices):
                    piece = peer_slice[start : start + piece_numel]
                    if peer != local_rank:
                        place = pieces_of_slot[local_rank][node * local_size + peer]
                        place[: len(piece)].copy_(piece)
            self._barrier()
            total_pieces = [total[start : start + piece_numel] for total in totals]
            values = []
            for peer, num_nodes in enumerate(nodes_of_rank):
                for node in range(num_nodes):
                    if peer == local_rank:
                        own_slice = slices_of_nodes[node][local_rank]
                        values.append(own_slice[start : start + piece_numel])
                    else:
                        place = pieces_of_slot[peer][node * local_size + local_rank]
                        values.append(place[: max(0, min(piece_numel, own_length - start))])
            # These places are read by no other rank, so sums may overwrite them.
            add_in_tree(values, merges, total_pieces, overwrite=True)

    def _gather(self, parts: Sequence[Tensor]) -> None:
        """Copies the part of each rank to all ranks.

        Args:
            parts: one tensor for each rank. That of this rank is read, the others are written.
        """
        piece_numel = self._slot_bytes // parts[0].itemsize
        longest = max(len(part) for part in parts)
        # If all parts are empty there is one piece too, so that the ranks wait for each other.
        for start in range(0, max(1, longest), piece_numel):
            pieces = [part[start : start + piece_numel] for part in parts]
            slots = self._next_slots(parts[0].dtype)
            own_piece = pieces[self._local_rank]
            slots[self._local_rank][: len(own_piece)].copy_(own_piece)
            self._barrier()
            for peer, piece in enumerate(pieces):
                if peer != self._local_rank and len(piece):
                    piece.copy_(slots[peer][: len(piece)])

    def _next_slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Changes to the other half of the slots; returns one slot for each rank."""
        self._half = 1 - self._half
        key = (self._half, dtype)
        if key not in self._slots_of_dtype:
            self._slots_of_dtype[key] = [slot.view(dtype) for slot in self._slots[self._half]]
        return self._slots_of_dtype[key]

    @contextlib.contextmanager
    def _calling(self, op: str, tensor: Tensor, how: str = "") -> Iterator[None]:
        """Surrounds a collective: records it, and makes later calls raise if it fails.

        `_number` is that of the last call that was begun, and `completed` that of the last one that
        has come to its end.

        Args:
            op: the name of the collective.
            tensor: what it is called with.
            how: added to the name where ranks compare their calls.
        """
        with self._lock, torch.no_grad():
            # An earlier call has failed, or a signal handler runs inside one.
            if self.completed < self._number:
                raise dist.DistNetworkError(self._broken)
            self._number += 1
            # The message of that error, unless this call is completed.
            self._broken = f"shared memory: {op} number {self._number} did not come to its end"
            shape = tuple(tensor.shape)
            thread = threading.get_ident()
            self.calls.append(Call(self._number, op, shape, tensor.dtype, time.time(), thread))
            self._words_to_compare = self._call_words(op + how, tensor)
            try:
                yield
            except BaseException:
                # The negative number tells the others that this rank has left, so that they do not
                # count on it to check which ranks have ended.
                own_place = self._barriers_at[self._local_rank]
                BARRIER_NUMBER.pack_into(self._memory, own_place, -self._barriers)
                raise
            self.completed = self._number

    def _call_words(self, name: str, tensor: Tensor) -> bytes:
        """Returns the words of a call, filled up with spaces, by which ranks compare their calls.

        Args:
            name: of the collective.
            tensor: what it is called with.
        """
        key = (name, tensor.dtype, tensor.numel())
        if key not in self._words_of_call:
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            words = f"{name} of {tensor.numel()} numbers in {dtype_name}"
            self._words_of_call[key] = words.encode().ljust(CALL_WORDS_BYTES)
        return self._words_of_call[key]

    def _barrier(self) -> None:
        """Returns when all ranks have come, and what they wrote before can be read.

        A rank posts semaphores of other ranks to say that it has come, and waits until its own was
        posted (`_Barrier`). In the first barrier of a call the ranks also compare the words of
        their calls.
        """
        self._barriers += 1
        parity = self._barriers & 1
        words = self._words_to_compare  # None if they were compared in an earlier barrier
        memory = self._memory
        # The other ranks can read there that this rank has reached the barrier.
        BARRIER_NUMBER.pack_into(memory, self._barriers_at[self._local_rank], self._barriers)
        places = self._calls_at[parity]  # for each rank, where the words of its call are
        if words is not None:
            own_place = places[self._local_rank]
            memory[own_place : own_place + CALL_WORDS_BYTES] = words
        barrier = self._barrier_of_parity[parity]
        for semaphore in barrier.posted_before:
            self._functions.post(semaphore)
        begin = time.perf_counter()
        for _ in range(barrier.num_posts_awaited):
            self._wait(barrier.own)
        traffic.blocked_s += time.perf_counter() - begin
        for semaphore in barrier.posted_after:
            self._functions.post(semaphore)
        if words is not None:
            self._words_to_compare = None
            words_of_ranks = [memory[place : place + CALL_WORDS_BYTES] for place in places]
            if words_of_ranks.count(words) != self._local_size:
                raise self._calls_differ_error(words_of_ranks)

    def _wait(self, semaphore: int) -> None:
        """Waits until the semaphore is posted: at first without sleeping, since that is faster.

        Raises:
            torch.distributed.DistNetworkError: a rank has ended, or did not come in time.
        """
        for _ in range(self._tries):
            if self._functions.try_wait(semaphore) == 0:
                return
        deadline = time.monotonic() + self._timeout_s
        while not self._functions.posted_within(CHECK_INTERVAL_S, semaphore):
            call = f"{self.calls[-1].op} number {self._number}"
            ended_ranks = self._find_ended_ranks()
            if ended_ranks:
                raise dist.DistNetworkError(
                    f"shared memory: {format_ranks(ended_ranks)} ended while this rank waited in "
                    f"{call}"
                )
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(
                    f"shared memory: {format_ranks(self._absent_ranks())} did not come within "
                    f"{self._timeout_s:g} s to {call}"
                )

    def _find_ended_ranks(self) -> list[int]:
        """Returns ranks that have ended, so that this barrier cannot complete; [] if none is known.

        Not every rank looks at all others, since each look is a system call.
        """
        absent_ranks = self._absent_ranks()
        first_rank = self.ranks[:1]
        waits_for_all = self._barrier_of_parity[0].num_posts_awaited == self._local_size - 1
        if waits_for_all:
            return self._ended(absent_ranks)
        # This rank waits for the first rank, which waits for all. If that has come to this barrier,
        # it looks at the others.
        (barriers_of_first,) = BARRIER_NUMBER.unpack_from(self._memory, self._barriers_at[0])
        if barriers_of_first >= self._barriers:
            return self._ended(first_rank)
        # The first rank is absent, too. Then all ranks look, each at a few absent ranks, and at the
        # next ones in its next check. The list is doubled, so that the few may begin near its end.
        begin = MAX_RANKS_OF_FLAT_BARRIER * self._checks % len(absent_ranks)
        self._checks += 1
        ranks_to_check = (2 * absent_ranks)[begin : begin + MAX_RANKS_OF_FLAT_BARRIER]
        ended_ranks = self._ended(sorted(set(ranks_to_check)))
        if ended_ranks:
            return ended_ranks
        # The first rank comes last: it may have ended because another one had.
        return self._ended(first_rank)

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of the ranks whose processes have ended."""
        return [rank for rank in ranks if not _is_running(self._pids[rank])]

    def _absent_ranks(self) -> list[int]:
        """Returns the ranks that have not reached this barrier.

        If all have, it is the first rank's turn to say so, and that rank is returned.
        """
        absent_ranks = []
        for rank, place in zip(self.ranks, self._barriers_at, strict=True):
            (barriers_of_rank,) = BARRIER_NUMBER.unpack_from(self._memory, place)
            if abs(barriers_of_rank) < self._barriers:
                absent_ranks.append(rank)
        return absent_ranks or self.ranks[:1]

    def _calls_differ_error(self, words_of_ranks: Sequence[bytes]) -> RanksDifferError:
        """Returns the error of ranks that have called different collectives.

        Args:
            words_of_ranks: for each rank of this machine, the words of its call.
        """
        calls = []
        for rank, words in zip(self.ranks, words_of_ranks, strict=True):
            calls.append(f"rank {rank}: {words.decode().strip()}")
        return RanksDifferError(
            "a collective",
            "; ".join(calls),
            "call the same collective with the same shapes and dtypes on every rank; look for one "
            "that only some ranks call, under `if world.is_main:` for example",
        )


def add_in_tree(
    values: Sequence[Tensor], merges: Sequence[int], totals: Sequence[Tensor], *, overwrite: bool
) -> None:
    """Adds values up in the order of a tree; see `summation_tree`.

    The values are pushed onto a stack, one after the other. After some of them, the two topmost
    values of the stack are *merged*, once or several times: they are replaced by their sum.

    Args:
        values: of nodes of the tree, in the order of their leaves. If there is one sum, its tensor
            in `totals` may be one of them.
        merges: for each value, the number of merges after it was pushed.
        totals: what is left on the stack at the end is written to these.
        overwrite: True if partial sums may be written to `values`.
    """
    num_additions = sum(merges)
    has_one_total = len(totals) == 1
    stack: list[Tensor] = []
    for value, num_merges in zip(values, merges, strict=True):
        stack.append(value)
        for _ in range(num_merges):
            right = stack.pop()
            left = stack.pop()
            num_additions -= 1
            if num_additions == 0 and has_one_total:
                # This is the last sum. The tensor of the total may be one of the values, and can be
                # overwritten now.
                stack.append(torch.add(left, right, out=totals[0]))
            elif overwrite:
                stack.append(left.add_(right))
            else:
                stack.append(left + right)
    for result, total in zip(stack, totals, strict=True):
        if result.data_ptr() != total.data_ptr():
            total.copy_(result)


def open_shared_memory(
    rank: int, node: int, timeout_s: float, exchange: Callable[[Any], list[Any]]
) -> tuple[SharedMemory | None, str]:
    """Maps the same memory on the ranks of each machine, if that is possible on all machines.

    Args:
        rank: of this process.
        node: the number of its machine.
        timeout_s: how long a rank may wait for the others.
        exchange: returns the values of all ranks, given this rank's value (which JSON can hold).

    Returns:
        The collectives and a text that says who shares memory; or None and the reason.
    """
    ranks_of_machine: dict[int, list[int]] = {}
    for peer, peer_node in enumerate(exchange(node)):
        ranks_of_machine.setdefault(peer_node, []).append(peer)
    ranks = ranks_of_machine[node]
    sizes = sorted({len(ranks_there) for ranks_there in ranks_of_machine.values()})
    if sizes == [1]:
        return None, "1 rank a machine"
    if sizes[0] == 1 or len(sizes) > 1:
        return None, f"{' or '.join(str(size) for size in sizes)} ranks a machine"
    # The first rank of each machine keeps the memory open until all have mapped it.
    with contextlib.ExitStack() as stack:
        offer = None
        problem = ""
        if rank == ranks[0]:
            try:
                offer = _create(len(ranks), stack)
            except (OSError, AttributeError) as error:  # only Linux has memfd
                problem = f"no memory can be shared: {error}"
        offer, problem = exchange([offer, problem])[ranks[0]]
        memory = None
        if not problem:
            try:
                memory = _map(len(ranks), *offer)
            except (OSError, ValueError) as error:
                problem = f"rank {rank} cannot map the memory of rank {ranks[0]}: {error}"
        answers = exchange([os.getpid(), problem])
    for _, problem_of_rank in answers:
        if problem_of_rank:
            return None, problem_of_rank
    assert memory is not None  # else this rank has answered with a problem
    pids = {peer: answers[peer][0] for peer in ranks}
    across = None
    who_shares = "all ranks are on one machine"
    if len(ranks_of_machine) > 1:
        # A group has one rank of each machine. Only tensors in shared memory are sent, so it needs
        # no NCCL communicator.
        across = open_groups(
            list(zip(*ranks_of_machine.values(), strict=True)),
            "between machines",
            timeout=timedelta(seconds=timeout_s),
            cpu_tensors_only=True,
        )
        who_shares = f"{len(ranks)} ranks a machine sum up there; each sends its part to the others"
    all_ranks: list[int] = []
    for ranks_there in ranks_of_machine.values():
        all_ranks += ranks_there
    machine = None
    if all_ranks == sorted(all_ranks):
        machine = ranks[0] // len(ranks)
    return SharedMemory(memory, rank, pids, timeout_s, across, machine), who_shares


def _create(size: int, stack: contextlib.ExitStack) -> tuple[int, int, str]:
    """Creates the memory with its semaphores, and keeps it open until the stack is closed.

    Returns:
        What `_map` needs in another process: the number of this process, the file descriptor of the
        memory in it, and the random token with which the memory begins.
    """
    layout = _Layout(size)
    functions = _Semaphores()
    descriptor = os.memfd_create("lockstep")
    stack.callback(os.close, descriptor)
    os.ftruncate(descriptor, layout.end)
    token = secrets.token_hex(TOKEN_BYTES // 2)
    with mmap.mmap(descriptor, layout.end) as memory:
        memory[:TOKEN_BYTES] = token.encode()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for rank in range(size):
            for parity in PARITIES:  # a rank has one for even and one for odd barriers
                functions.init(address + layout.semaphore(rank, parity))
    return os.getpid(), descriptor, token


def _map(size: int, pid: int, descriptor: int, token: str) -> mmap.mmap:
    """Maps the memory that `_create` has made in another process.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is another file. The processes are in different containers, for example,
            where a process number means another process.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, _Layout(size).end)
    finally:
        os.close(opened)
    if memory[:TOKEN_BYTES] != token.encode():
        raise ValueError("it is another file")
    return memory


def _how(op: Any) -> str:
    """Returns how a reduction is added to the words of a call, " (maximum)"; nothing for a sum."""
    return "" if op == dist.ReduceOp.SUM else f" ({COMBINE_FUNCTIONS[op].__name__})"


def _scale(source: Tensor, scale: float, out: Tensor) -> None:
    """Writes `source * scale` to `out`, which may be the source itself."""
    if scale != 1.0:
        torch.mul(source, scale, out=out)
    elif source.data_ptr() != out.data_ptr():
        out.copy_(source)


def _is_running(pid: int) -> bool:
    """Returns False if a process has ended, even if its parent has not been told yet."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False

"""Collectives between the ranks of one machine, through memory that all of them map.

Each rank writes its data into its *slots* of the memory, where the other ranks read it. A *barrier*
makes every rank wait until all have arrived; ranks wake each other by *posting* semaphores.
Barriers are alternately even and odd (their *parity*). Before the first barrier of a collective,
each rank writes a description of its call, such as "all_reduce of 3 numbers in float32", so that
all ranks notice if they have called different collectives.

In an all-reduce of a large tensor, every rank copies its values into its slot and waits at a
barrier. It then sums its own slice over all slots, in the order of the ranks, waits at a second
barrier, and copies the other slices from the other ranks (a reduce-scatter and an all-gather). For
a small tensor there is only one barrier, after which every rank sums everything. All ranks get the
same bits, because a slice is summed either by one rank, or by all of them in the same order.

A rank uses its two slots in turn. Before it writes to a slot again, all ranks have passed a
barrier, and so have read its previous contents.

The barrier is made of POSIX semaphores in the mapping. `sem_post` and `sem_wait` synchronise memory
(IEEE Std 1003.1-2017, 4.12), on x86-64 as on 64-bit Arm. A waiting rank sleeps in the kernel; if
nobody sleeps, a call takes a third of a microsecond. Each rank has one semaphore for even barriers
and one for odd ones, so that a rank which is one barrier ahead cannot be mistaken for one that has
not arrived yet. Up to a few ranks all post to each other. Otherwise all post to the first rank,
which waits for all and then posts to each.

The mapping is a memfd: it has no name that could be left behind, does not count against the size of
/dev/shm, and disappears with the last process that maps it.
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
from lockstep.communication.summation_tree import TreeOrder
from lockstep.communication.traffic import all_reduce_bytes, traffic
from lockstep.errors import RanksDifferError
from lockstep.wording import format_ranks

CHUNK_BYTES = 2**19
"""The part of a slot for each of up to 8 ranks. A larger tensor is copied in pieces of this size,
which fit into the CPU's caches; if ranks share cores, half this size takes twice as long."""
MAX_RANKS_IN_SLOT_SIZE = 8
MAX_BYTES_OF_ALL_SLOTS = 2**29
"""An upper limit, because every rank maps all slots and needs page tables for them."""
MAX_BYTES_READ_BY_ALL = 2**21
"""If the tensors of all ranks together have at most this size, every rank sums everything: reading
more memory costs less than a second barrier. The tensor must also fit into a slot."""
TRIES_BEFORE_SLEEP = 300
"""How often a rank tests a semaphore before it sleeps. This takes about 100 microseconds, about as
long as falling asleep and being woken (Karlin et al., SODA 1990)."""
TRIES_BEFORE_SLEEP_ON_SHARED_CORES = 40
"""The same if there are more ranks than cores: about 15 microseconds."""
MAX_RANKS_OF_FLAT_BARRIER = 8
"""Up to this number of ranks, all ranks wake each other in a barrier."""
MAX_RANKS_CHECKED_AT_ONCE = MAX_RANKS_OF_FLAT_BARRIER
"""How many ranks a rank looks at when it checks whether others have ended."""
MAX_RECORDED_CALLS = 64
CHECK_INTERVAL_S = 1.0
"""How often a sleeping rank checks whether the other ranks still run, in seconds."""

TOKEN_BYTES = 32
CACHE_LINE_BYTES = 64
"""A semaphore has 32 bytes (glibc) or fewer."""
DESCRIPTION_BYTES = 2 * CACHE_LINE_BYTES
BARRIER_NUMBER = struct.Struct("=q")
PARITIES = (0, 1)

COMBINE_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class Call(NamedTuple):
    """One call of a collective, as the watchdog reports it."""

    number: int
    """The number of the call, from 1."""
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    time_s: float
    """When it was called, in seconds since 1970."""
    thread: int


def _round_up(number: int, unit: int) -> int:
    """Rounds a number up to a multiple of the unit, e.g. `_round_up(5, 4) == 8`."""
    return -(-number // unit) * unit


StartSum = Callable[[Tensor], Callable[[], object]]
"""A function that begins to sum a tensor in place, adds the bytes that it sends to `traffic.sent`,
and returns a function that waits for the sum."""


class _Layout:
    """The layout of the mapping: offsets in bytes from its start.

    It holds, in this order: the token, the semaphores, the barrier numbers, the descriptions of the
    calls, and the slots, which begin on a new page.

    Args:
        size: number of ranks on this machine.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        end_of_descriptions = self.call(size, 0)  # those of one more rank would begin there
        self.slots = _round_up(end_of_descriptions, mmap.PAGESIZE)
        """The offset of the first slot."""

        # Each rank has two slots. They are smaller if there are very many ranks, but each has at
        # least a cache line for each rank.
        num_slots = 2 * size
        wanted_bytes = CHUNK_BYTES * min(size, MAX_RANKS_IN_SLOT_SIZE)
        max_bytes = max(MAX_BYTES_OF_ALL_SLOTS // num_slots, CACHE_LINE_BYTES * size)
        max_bytes_in_whole_pages = max_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.slot = min(wanted_bytes, max_bytes_in_whole_pages)
        """The size of a slot in bytes."""
        self.end = self.slots + num_slots * self.slot

    def semaphore(self, rank: int, parity: int) -> int:
        """Returns the offset of a rank's semaphore for barriers of a parity: 0 even, 1 odd."""
        return CACHE_LINE_BYTES * (1 + 2 * rank + parity)

    def barriers(self, rank: int) -> int:
        """Returns the offset of the number of barriers that a rank has reached.

        The rank makes this number negative if an error ended its last collective.
        """
        return CACHE_LINE_BYTES * (1 + 2 * self.size + rank)

    def call(self, rank: int, parity: int) -> int:
        """Returns the offset of the description of a rank's call."""
        begin = CACHE_LINE_BYTES * (1 + 3 * self.size)
        return begin + DESCRIPTION_BYTES * (2 * rank + parity)


class _Time(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Semaphores:
    """The C library's functions for semaphores, which take the address of a semaphore."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        library_with_errno = ctypes.CDLL(None, use_errno=True)  # its calls are slower
        self.post = library.sem_post
        self.try_wait = library.sem_trywait
        self._init = library_with_errno.sem_init
        self._timed_wait = library_with_errno.sem_timedwait
        self.post.argtypes = self.try_wait.argtypes = [ctypes.c_void_p]
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._timed_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]

    def init(self, address: int) -> None:
        """Initializes a semaphore that processes share, with the value 0."""
        if self._init(address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def posted_within(self, seconds: float, address: int) -> bool:
        """Sleeps until the semaphore is posted, for at most the given time.

        Returns:
            True if it was posted; False if the time is over or a signal ended the sleep.
        """
        # `sem_timedwait` takes the time of day at which to stop waiting.
        whole_seconds, fraction = divmod(time.time() + seconds, 1.0)
        deadline = _Time(int(whole_seconds), int(fraction * 1e9))
        if self._timed_wait(address, deadline) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False


class _Barrier(NamedTuple):
    """What one rank does in a barrier, with the addresses of the semaphores it waits for or posts.

    Up to a few ranks all post to each other. Otherwise all post to the first rank, which waits for
    all of them and then posts to each.
    """

    own: int
    """The semaphore of this rank."""
    num_posts_awaited: int
    """How often other ranks post it in a barrier."""
    posted_on_arrival: list[int]
    """The semaphores that this rank posts when it arrives, before it waits."""
    posted_after_waiting: list[int]
    """The semaphores that this rank posts after it has waited."""

    @classmethod
    def of(cls, semaphores: Sequence[int], rank: int) -> _Barrier:
        """Returns what one rank does in a barrier.

        Args:
            semaphores: address of the semaphore of each rank.
            rank: number of the rank on this machine.
        """
        own = semaphores[rank]
        others = [*semaphores[:rank], *semaphores[rank + 1 :]]

        # Few ranks: each posts to all others, and waits until all of them have posted.
        if len(semaphores) <= MAX_RANKS_OF_FLAT_BARRIER:
            return cls(
                own,
                num_posts_awaited=len(others),
                posted_on_arrival=others,
                posted_after_waiting=[],
            )

        # Many ranks: the first one waits until all others have posted, then wakes each of them.
        if rank == 0:
            return cls(
                own,
                num_posts_awaited=len(others),
                posted_on_arrival=[],
                posted_after_waiting=others,
            )

        # The others tell the first one that they have arrived, and wait until it wakes them.
        return cls(
            own,
            num_posts_awaited=1,
            posted_on_arrival=[semaphores[0]],
            posted_after_waiting=[],
        )


class _Progress(NamedTuple):
    """What a rank tells the others about itself through the memory."""

    num_barriers: int
    """How many barriers it has reached since the run began."""
    has_left_collective: bool
    """True if an error has ended its last collective."""


class SharedMemory:
    """The collectives of one rank through shared memory; created by `open_shared_memory`.

    Args:
        memory: the mapping that all ranks of this machine share.
        rank: rank of this process in the run.
        pids: process ID of each rank of this machine.
        timeout_s: how long a rank may wait for the others, in seconds.
        group_across_machines: process group of the ranks that have the same local rank on all
            machines; None if there is one machine.
        has_consecutive_ranks: True if the ranks are numbered machine by machine.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        pids: Mapping[int, int],
        timeout_s: float,
        group_across_machines: dist.ProcessGroup | None = None,
        *,
        has_consecutive_ranks: bool = False,
    ) -> None:
        self.group_across_machines = group_across_machines
        self.has_consecutive_ranks = has_consecutive_ranks
        self.ranks = list(pids)
        """The ranks of this machine."""
        self._pids = dict(pids)
        self._local_rank = self.ranks.index(rank)
        self._local_size = len(pids)

        cores: set[int] = set()
        for pid in pids.values():
            cores |= os.sched_getaffinity(pid)
        if self._local_size <= len(cores):
            self._num_tries_before_sleep = TRIES_BEFORE_SLEEP
        else:
            self._num_tries_before_sleep = TRIES_BEFORE_SLEEP_ON_SHARED_CORES

        self.calls: deque[Call] = deque(maxlen=MAX_RECORDED_CALLS)
        """The latest calls, the oldest first; the watchdog's thread reads them."""
        self.num_completed = 0
        """How many calls have completed; the number of the last one that has."""
        self._memory = memory
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._semaphores = _Semaphores()

        layout = _Layout(self._local_size)
        self._slot_bytes = layout.slot
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = everything.data_ptr()
        """The address of the mapping in this process; its tensors share one storage."""
        local_ranks = range(self._local_size)
        self._barrier_of_parity = []
        self._call_offsets = []
        """For each parity, the offset of the description of each rank's call."""
        for parity in PARITIES:
            semaphores = [self.address + layout.semaphore(peer, parity) for peer in local_ranks]
            self._barrier_of_parity.append(_Barrier.of(semaphores, self._local_rank))
            self._call_offsets.append([layout.call(peer, parity) for peer in local_ranks])
        self._barrier_number_offsets = [layout.barriers(peer) for peer in local_ranks]
        slots = torch.split(everything[layout.slots :], layout.slot)
        self._slots: tuple[Sequence[Tensor], Sequence[Tensor]]
        self._slots = (slots[: self._local_size], slots[self._local_size :])
        """The two slots of each rank: the first ones of all ranks, then the second ones."""
        self._slots_of_dtype: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Views of the slots, by which of the two slots is in use and by dtype."""

        self._half = 0
        """Which of its two slots each rank uses, 0 or 1."""
        self._num_barriers = 0
        """How many barriers this rank has reached."""
        self._num_begun = 0
        """How many calls have begun; the number of the last one that has."""
        self._num_checks = 0
        """How often this rank has checked whether other ranks have ended."""
        self._description_of_call: dict[tuple[str, torch.dtype, int], bytes] = {}
        self._description_to_compare: bytes | None = None
        """The description of the current call, until ranks compare it in the first barrier."""
        self._error_if_incomplete = ""
        """The error message for later calls if the last call does not complete."""
        self._is_closed = False

    @property
    def is_only_machine(self) -> bool:
        """True if all ranks of the run are on this machine."""
        return self.group_across_machines is None

    def supports(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
        """Returns True if a tensor can be reduced here: dense, contiguous, and on the CPU.

        Args:
            tensor: the tensor.
            op: the operation; only SUM, MAX and MIN are supported.
        """
        is_dense_on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
        return is_dense_on_cpu and tensor.is_contiguous() and op in COMBINE_FUNCTIONS

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, scale: float = 1.0
    ) -> None:
        """Replaces the tensor by its sum, maximum or minimum over the ranks.

        The tensors are added in the order of the ranks, so all ranks get the same bits.

        Args:
            tensor: contiguous tensor with the same dtype and number of elements on all ranks.
            op: SUM, MAX or MIN.
            scale: factor by which the values of every rank are multiplied first.

        Raises:
            RanksDifferError: the ranks have called different collectives; raised on all of them.
            torch.distributed.DistNetworkError: a rank has ended, or did not arrive in time.
        """
        own = tensor.detach().view(-1)

        # A small tensor on one machine: every rank reads the tensors of all ranks, and reduces all
        # of it.
        fits_into_slot = own.nbytes <= self._slot_bytes
        nbytes_of_all_ranks = own.nbytes * self._local_size
        is_quick_to_read = nbytes_of_all_ranks <= MAX_BYTES_READ_BY_ALL
        if self.is_only_machine and fits_into_slot and is_quick_to_read:
            with self._calling("all_reduce", tensor, _describe_op(op)):
                self._reduce_by_all(own, COMBINE_FUNCTIONS[op], scale)
            traffic.shared += own.nbytes
            return

        # Otherwise every rank reduces a slice of it.
        finish = self.start_all_reduce(tensor, op, scale=scale)
        finish()

    def all_reduce_within_machine(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replaces the tensor by its sum, maximum or minimum over the ranks of this machine only.

        Errors are those of `all_reduce`.
        """
        finish = self.start_all_reduce_within_machine(tensor, op)
        finish()

    def start_all_reduce_within_machine(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM
    ) -> Callable[[], None]:
        """Starts an all-reduce over the ranks of this machine only; see `start_all_reduce`."""
        return self.start_all_reduce(tensor, op, start_between_machines=_skip_other_machines)

    def start_all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        scale: float = 1.0,
        start_between_machines: StartSum | None = None,
    ) -> Callable[[], None]:
        """Starts an all-reduce, and returns a function that completes it.

        Several all-reduces may be under way at once. All ranks must complete them in the order in
        which they were started. Errors are those of `all_reduce`.

        Args:
            tensor: see `all_reduce`.
            op: see `all_reduce`.
            scale: see `all_reduce`.
            start_between_machines: begins to sum this rank's slice over the machines, for example
                compressed, in place of an all-reduce.
        """
        # First within the machine: each rank reduces one slice. The slices are views of the tensor,
        # so all results below are written into the tensor.
        slices = torch.tensor_split(tensor.detach().view(-1), self._local_size)
        with self._calling("all_reduce", tensor, f"{_describe_op(op)} in slices"):
            self._reduce_scatter(slices, COMBINE_FUNCTIONS[op], scale)
        traffic.shared += tensor.nbytes

        # Then between the machines: ranks with the same local rank reduce their slices.
        own_slice = slices[self._local_rank]
        if start_between_machines is None:
            start_between_machines = partial(self._start_reduce_between_machines, op=op)
        wait_for_other_machines = start_between_machines(own_slice)

        def end() -> None:
            """Waits for the other machines, then gathers the slices of this machine's ranks."""
            wait_for_other_machines()
            with self._calling("all_gather", tensor):
                self._gather(slices)

        return end

    def _start_reduce_between_machines(self, own_slice: Tensor, op: Any) -> Callable[[], object]:
        """Begins to reduce this rank's slice over the machines, in place.

        Returns:
            A function that waits for the result.
        """
        group = self.group_across_machines
        if group is None or own_slice.numel() == 0:
            return do_nothing

        work = cast(dist.Work, dist.all_reduce(own_slice, op, group, async_op=True))
        traffic.sent += all_reduce_bytes(own_slice.nbytes, dist.get_world_size(group))
        return partial(traffic.wait, work.wait)

    def sum_in_tree(
        self, partial_sums: Sequence[Tensor], total: Tensor, order: TreeOrder, *, scale: float = 1.0
    ) -> None:
        """Sums over virtual ranks in the order of their tree; writes the sum to `total`.

        All ranks must be on this machine. Errors are those of `all_reduce`.

        Args:
            partial_sums: this rank's partial sums, which are values of nodes of the tree
                (`summation_tree`): flat tensors as long as `total`. They are overwritten, and
                `total` may be one of them.
            total: flat tensor with the same dtype and number of elements on all ranks.
            order: how many partial sums each rank has, and in which order they are added.
            scale: factor by which the sum is multiplied.
        """
        # Each partial sum of each rank is a tensor as long as `total`.
        max_partial_sums_of_rank = max(order.num_partial_sums_of_rank)
        num_partial_sums_of_all = sum(order.num_partial_sums_of_rank)
        partial_sums_fit_into_slot = total.nbytes * max_partial_sums_of_rank <= self._slot_bytes
        are_quick_to_read = total.nbytes * num_partial_sums_of_all <= MAX_BYTES_READ_BY_ALL

        with self._calling("all_reduce", total, how=" in a tree"):
            if partial_sums_fit_into_slot and are_quick_to_read:
                # A small tensor: every rank reads the partial sums of all ranks, and sums them
                # whole.
                self._sum_tree_by_all(partial_sums, total, order, scale)
            else:
                self._sum_tree_in_slices(partial_sums, total, order, scale)

        # Without partial sums, this rank still writes its slice of the total, counted as a tensor.
        num_tensors_written = max(1, len(partial_sums))
        traffic.shared += total.nbytes * num_tensors_written

    def _sum_tree_in_slices(
        self, partial_sums: Sequence[Tensor], total: Tensor, order: TreeOrder, scale: float
    ) -> None:
        """Sums a large tensor in the order of a tree: each rank sums one slice of it.

        Args:
            partial_sums: this rank's partial sums, each as long as `total`. They are
                overwritten.
            total: tensor that the sum is written to.
            order: how many partial sums each rank has, and in which order they are added.
            scale: factor by which the sum is multiplied.
        """
        slices_of_total = torch.tensor_split(total, self._local_size)
        own_slice = slices_of_total[self._local_rank]

        # The sum of this rank's slice is written to `own_slice`, which is a part of `total`.
        self._reduce_scatter_in_tree(
            slices_of_partial_sums=[
                torch.tensor_split(partial_sum, self._local_size) for partial_sum in partial_sums
            ],
            totals=[own_slice],
            num_partial_sums_of_rank=order.num_partial_sums_of_rank,
            merges=order.merges,
            numel=total.numel(),
            dtype=total.dtype,
        )
        if scale != 1.0:
            own_slice.mul_(scale)

        # Copy the other slices of `total` from the ranks that have summed them.
        self._gather(slices_of_total)

    def reduce_scatter_in_tree(
        self,
        slices_of_partial_sums: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
        num_partial_sums_of_rank: Sequence[int],
        merges: Sequence[int],
        *,
        like: Tensor,
    ) -> None:
        """Adds partial sums of the ranks of this machine; each rank gets one slice of the results.

        The partial sums of all ranks, in the order of the ranks, are pushed onto a stack. After
        partial sum i is pushed, the two topmost values of the stack are replaced by their sum,
        `merges[i]` times. What is left on the stack are the results. For example, rank 0 has the
        partial sums a and b, rank 1 has c, and the merges are `(0, 1, 0)`:

            push a                stack: a
            push b, 1 merge       stack: a + b
            push c                stack: a + b, c

        The two results can only be added together with partial sums of other machines.

        Errors are those of `all_reduce`.

        Args:
            slices_of_partial_sums: this rank's partial sums, each cut into one slice for each rank:
                `slices_of_partial_sums[n][r]` is the slice of partial sum n that rank r adds up.
                The slices are as long as those of `torch.tensor_split(like, ranks)`. They are
                overwritten.
            totals: for each result, the tensor that this rank's slice of it is written to.
            num_partial_sums_of_rank: for each rank of this machine, how many partial sums it has.
            merges: for each partial sum of all ranks, how many additions follow its push.
            like: any tensor with the dtype and the number of elements of a whole partial sum, i.e.
                of all its slices together. Its values are not read.
        """
        # " in a tree" distinguishes this call from other reduce-scatters when ranks compare calls.
        with self._calling("reduce_scatter", like, how=" in a tree"):
            self._reduce_scatter_in_tree(
                slices_of_partial_sums,
                totals,
                num_partial_sums_of_rank,
                merges,
                numel=like.numel(),
                dtype=like.dtype,
            )
        traffic.shared += like.nbytes * len(slices_of_partial_sums)

    def gather_slices(self, slices: Sequence[Tensor], whole: Tensor) -> None:
        """Copies the slice of each rank of this machine to all its other ranks.

        Errors are those of `all_reduce`.

        Args:
            slices: one slice for each rank. This rank's slice is read, the others are written.
            whole: the tensor that they are slices of.
        """
        with self._calling("all_gather", whole):
            self._gather(slices)

    def all_gather(self, rows: Tensor, tensor: Tensor) -> None:
        """Gathers the tensors of all ranks of this machine. Errors are those of `all_reduce`.

        Args:
            rows: output tensor of shape `(ranks, *)`; row r is filled with the tensor of rank r.
            tensor: the tensor of this rank, of shape `(*)`.
        """
        own = tensor.detach().view(-1)
        flat_rows = rows.detach().view(self._local_size, len(own))

        piece_numel = self._slot_bytes // own.itemsize  # number of elements that fit into a slot
        with self._calling("all_gather", tensor):
            # Even an empty tensor has one piece, so that the ranks wait for each other.
            for start in range(0, max(1, len(own)), piece_numel):
                piece = own[start : start + piece_numel]
                slots = self._next_slots(own.dtype)
                slots[self._local_rank][: len(piece)].copy_(piece)
                self._barrier()
                flat_rows[:, start : start + piece_numel].copy_(_as_rows(slots, len(piece)))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies a tensor from one rank of this machine to the others.

        Errors are those of `all_reduce`.

        Args:
            tensor: the values to send on the source; overwritten on the other ranks.
            source: local rank of the source.
        """
        own = tensor.detach().view(-1)
        # A gather in which all ranks but the source have empty parts.
        parts = [own if peer == source else own[:0] for peer in range(self._local_size)]
        with self._calling("broadcast", tensor, f" from rank {self.ranks[source]}"):
            self._gather(parts)

    def close(self) -> None:
        """Unmaps the memory. Later calls raise an error.

        A model's communication hook, for example, may still be called after the run has ended.
        """
        with self._lock:
            self._is_closed = True  # from now on `_calling` raises an error

            # Drop the tensors in the memory, and the process group, which would stay open.
            self._slots = ((), ())
            self._slots_of_dtype.clear()
            self.group_across_machines = None
            self._memory.close()

    def flight_record(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Describes the latest calls in the format of torch's Flight Recorder.

        Returns:
            The ranks of this machine as a process group, and the calls.
        """
        name = "shared memory"
        entries = [
            {
                "profiling_name": f"{name}:{call.op}",
                "process_group": [name, ""],
                "pg_id": name,
                "is_p2p": False,
                "collective_seq_id": call.number,
                "input_sizes": [call.shape],
                "output_sizes": [call.shape],  # only the tensor that was passed is recorded
                "input_dtypes": [str(call.dtype).removeprefix("torch.")],
                "state": "completed" if call.number <= self.num_completed else "scheduled",
                "time_created_ns": int(call.time_s * 1e9),
                "thread_id": call.thread,
            }
            for call in list(self.calls)
        ]
        group = {"name": name, "description": "", "ranks": self.ranks}
        return group, {"entries": entries}

    def _reduce_by_all(self, own: Tensor, combine: Callable[..., Tensor], scale: float) -> None:
        """Reduces a small tensor in place: every rank reads the tensors of all ranks."""
        slots = [slot[: len(own)] for slot in self._next_slots(own.dtype)]
        _scale(own, scale, slots[self._local_rank])
        self._barrier()
        total = slots[0]
        for slot in slots[1:]:
            total = combine(total, slot, out=own)

    def _reduce_scatter(
        self, slices: Sequence[Tensor], combine: Callable[..., Tensor], scale: float
    ) -> None:
        """Reduces each slice on one rank: rank r of this machine reduces slice r.

        Args:
            slices: this rank's values, one slice for each rank. The slice that this rank reduces is
                replaced by the result.
            combine: function that reduces two tensors.
            scale: factor by which the values are multiplied first.
        """
        local_rank = self._local_rank
        local_size = self._local_size

        # A slot holds one piece of the slice of each rank: `slots[rank][peer]` is the place where
        # `rank` writes its values for the piece that `peer` reduces.
        piece_numel = self._slot_bytes // slices[0].itemsize // local_size
        for start in range(0, len(slices[0]), piece_numel):
            pieces = [rank_slice[start : start + piece_numel] for rank_slice in slices]
            slots = []
            for slot in self._next_slots(pieces[0].dtype):
                slots.append(torch.split(slot[: piece_numel * local_size], piece_numel))
            own_piece = pieces[local_rank]

            # Write the pieces that the other ranks reduce to this rank's slot.
            for peer, piece in enumerate(pieces):
                if peer == local_rank:
                    _scale(piece, scale, out=piece)
                else:
                    _scale(piece, scale, out=slots[local_rank][peer][: len(piece)])

            self._barrier()

            # Collect the values of each rank for the piece that this rank reduces. Its own values
            # are still in `own_piece`: they were not copied to its slot.
            contributions = []
            for peer, pieces_in_slot in enumerate(slots):
                values_in_slot = pieces_in_slot[local_rank][: len(own_piece)]
                contributions.append(own_piece if peer == local_rank else values_in_slot)
            unused_place_in_own_slot = slots[local_rank][local_rank][: len(own_piece)]

            # Reduce in the order of the ranks. Until this rank's own values have been added,
            # partial sums are kept in the unused place. The step that adds them writes its result
            # to `own_piece`, and so do all later steps. So the final result is in `own_piece`.
            total = contributions[0]
            for peer in range(1, local_size):
                own_values_are_added = peer >= local_rank
                out = own_piece if own_values_are_added else unused_place_in_own_slot
                total = combine(total, contributions[peer], out=out)

    def _sum_tree_by_all(
        self, partial_sums: Sequence[Tensor], total: Tensor, order: TreeOrder, scale: float
    ) -> None:
        """Sums a small tensor in the order of a tree: every rank sums the whole of it.

        Args:
            partial_sums: this rank's partial sums, each as long as `total`.
            total: tensor that the sum is written to.
            order: how many partial sums each rank has, and in which order they are added.
            scale: factor by which the sum is multiplied.
        """
        # Write this rank's partial sums to its slot, one after the other.
        numel = len(total)
        slots = self._next_slots(total.dtype)
        for index, partial_sum in enumerate(partial_sums):
            slots[self._local_rank][index * numel : (index + 1) * numel].copy_(partial_sum)
        self._barrier()

        # Read the partial sums of all ranks, in the order of the ranks.
        values: list[Tensor] = []
        for slot, num_partial_sums in zip(slots, order.num_partial_sums_of_rank, strict=True):
            for index in range(num_partial_sums):
                values.append(slot[index * numel : (index + 1) * numel])

        # The values in the slots must not be overwritten, because other ranks read them too.
        add_in_tree(values, order.merges, [total], overwrite=False)
        if scale != 1.0:
            total.mul_(scale)

    def _reduce_scatter_in_tree(
        self,
        slices_of_partial_sums: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
        num_partial_sums_of_rank: Sequence[int],
        merges: Sequence[int],
        *,
        numel: int,
        dtype: torch.dtype,
    ) -> None:
        """Sums each slice on one rank.

        The arguments are those of `reduce_scatter_in_tree`, with the number of elements and the
        dtype of a whole partial sum.
        """
        local_rank = self._local_rank
        local_size = self._local_size

        # The lengths of the slices that `torch.tensor_split` makes: 8 elements for 3 ranks become
        # slices of 3, 3 and 2.
        shortest_slice, num_longer = divmod(numel, local_size)
        own_length = shortest_slice + (1 if local_rank < num_longer else 0)
        longest_slice = shortest_slice + (1 if num_longer else 0)
        most_partial_sums = max(1, *num_partial_sums_of_rank)

        # A slot holds a piece for each pair of a partial sum of its rank and a rank that sums.
        piece_numel = self._slot_bytes // dtype.itemsize // (local_size * most_partial_sums)
        for start in range(0, longest_slice, piece_numel):
            slots = self._next_slots(dtype)
            pieces_of_slot = []  # `pieces_of_slot[rank][index * local_size + rank_that_sums]`
            for slot in slots:
                pieces_of_slot.append(
                    torch.split(slot[: piece_numel * local_size * most_partial_sums], piece_numel)
                )

            # Write the pieces that the other ranks sum to this rank's slot.
            for index, slices in enumerate(slices_of_partial_sums):
                for peer, peer_slice in enumerate(slices):
                    piece = peer_slice[start : start + piece_numel]
                    if peer != local_rank:
                        target = pieces_of_slot[local_rank][index * local_size + peer]
                        target[: len(piece)].copy_(piece)

            self._barrier()

            # Collect the pieces that this rank sums, in the order of the ranks.
            own_piece_length = max(0, min(piece_numel, own_length - start))
            values = []
            for peer, num_partial_sums in enumerate(num_partial_sums_of_rank):
                for index in range(num_partial_sums):
                    if peer == local_rank:
                        own_slice = slices_of_partial_sums[index][local_rank]
                        values.append(own_slice[start : start + piece_numel])
                    else:
                        source = pieces_of_slot[peer][index * local_size + local_rank]
                        values.append(source[:own_piece_length])

            # No other rank reads these pieces, so partial sums may overwrite them.
            total_pieces = [total[start : start + piece_numel] for total in totals]
            add_in_tree(values, merges, total_pieces, overwrite=True)

    def _gather(self, parts: Sequence[Tensor]) -> None:
        """Copies the part of each rank to all other ranks.

        Args:
            parts: one tensor for each rank. This rank's tensor is read, the others are written.
        """
        piece_numel = self._slot_bytes // parts[0].itemsize
        longest = max(len(part) for part in parts)

        # Even if all parts are empty there is one piece, so that the ranks wait for each other.
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
        """Switches to the other of the two slots, and returns that slot of each rank.

        A rank uses its slots A and B in turn: it writes piece 0 to A, 1 to B, and 2 to A again,
        after the barrier of piece 1. Every rank enters that barrier after it has read piece 0.
        """
        self._half = 1 - self._half
        key = (self._half, dtype)
        if key not in self._slots_of_dtype:
            self._slots_of_dtype[key] = [slot.view(dtype) for slot in self._slots[self._half]]
        return self._slots_of_dtype[key]

    @contextlib.contextmanager
    def _calling(self, op: str, tensor: Tensor, how: str = "") -> Iterator[None]:
        """Surrounds a collective: records the call, and makes later calls raise if it fails.

        Args:
            op: name of the collective, e.g. "broadcast".
            tensor: the tensor that it is called with.
            how: text that follows the name where ranks compare their calls, e.g. " from rank 2".
        """
        with self._lock, torch.no_grad():
            if self._is_closed:
                raise dist.DistNetworkError("shared memory: after world.close()")

            self._raise_if_last_call_is_incomplete()
            self._num_begun += 1
            self._record_call(self._num_begun, op, tensor, how)

            try:
                yield
            except BaseException:
                # Tell the other ranks, which may be waiting in a barrier, that this one has left.
                self._publish_barrier_number(has_left_collective=True)
                raise

            self.num_completed = self._num_begun

    def _raise_if_last_call_is_incomplete(self) -> None:
        """Raises an error if the last call has failed, or is interrupted by a signal handler.

        Such a handler gets here because it runs in the thread that holds the lock, which may
        acquire it again. The ranks would not agree on which barrier comes next.
        """
        if self.num_completed < self._num_begun:
            raise dist.DistNetworkError(self._error_if_incomplete)

    def _record_call(self, number: int, op: str, tensor: Tensor, how: str) -> None:
        """Records that a collective begins.

        Args:
            number: number of the call on this rank.
            op: name of the collective, e.g. "broadcast".
            tensor: the tensor that it is called with.
            how: text that follows the name where ranks compare their calls, e.g. " from rank 2".
        """
        # The message of the error that later calls raise if this one does not complete.
        self._error_if_incomplete = f"shared memory: {op} number {number} did not finish"
        shape = tuple(tensor.shape)
        thread = threading.get_ident()
        self.calls.append(Call(number, op, shape, tensor.dtype, time.time(), thread))
        self._description_to_compare = self._describe_call(op + how, tensor)

    def _publish_barrier_number(self, *, has_left_collective: bool = False) -> None:
        """Writes to the shared memory how many barriers this rank has reached.

        Args:
            has_left_collective: True if an error ended this rank's collective. The number is then
                written as a negative one. Other ranks that wait in a barrier see by this that they
                cannot rely on this rank to find out which ranks have ended.
        """
        number = -self._num_barriers if has_left_collective else self._num_barriers
        own_offset = self._barrier_number_offsets[self._local_rank]
        BARRIER_NUMBER.pack_into(self._memory, own_offset, number)

    def _describe_call(self, name: str, tensor: Tensor) -> bytes:
        """Returns the description of a call by which ranks compare their calls.

        It is padded with spaces to `DESCRIPTION_BYTES`.

        Args:
            name: name of the collective.
            tensor: the tensor that it is called with.
        """
        key = (name, tensor.dtype, tensor.numel())
        if key not in self._description_of_call:
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            description = f"{name} of {tensor.numel()} numbers in {dtype_name}"
            self._description_of_call[key] = description.encode().ljust(DESCRIPTION_BYTES)
        return self._description_of_call[key]

    def _barrier(self) -> None:
        """Waits until all ranks have arrived; then everything they wrote before can be read.

        In the first barrier of a call the ranks also compare the descriptions of their calls.
        """
        self._num_barriers += 1
        self._publish_barrier_number()  # ranks that wait here see by it which ranks are missing

        # Even and odd barriers have semaphores of their own: a rank that is already at the next
        # barrier must not wake one that still waits in this one.
        parity = self._num_barriers % 2
        barrier = self._barrier_of_parity[parity]

        description = self._description_to_compare  # None in the later barriers of a call
        if description is not None:
            self._write_description(description, parity)

        self._wait_for_others(barrier)

        if description is not None:
            self._description_to_compare = None
            self._compare_with_other_ranks(description, parity)

    def _wait_for_others(self, barrier: _Barrier) -> None:
        """Waits until all ranks have arrived. Each rank waits at a semaphore of its own.

        Up to 8 ranks post each other's semaphores on arrival. With more ranks, all others post the
        semaphore of the first rank. The first rank waits for these posts, and then posts the
        semaphores of the others.
        """
        for semaphore in barrier.posted_on_arrival:
            self._semaphores.post(semaphore)

        begin = time.perf_counter()
        for _ in range(barrier.num_posts_awaited):
            self._wait(barrier.own)
        traffic.blocked_s += time.perf_counter() - begin

        for semaphore in barrier.posted_after_waiting:
            self._semaphores.post(semaphore)

    def _write_description(self, description: bytes, parity: int) -> None:
        """Writes the description of this rank's call to the memory, for barriers of a parity."""
        own_offset = self._call_offsets[parity][self._local_rank]
        self._memory[own_offset : own_offset + DESCRIPTION_BYTES] = description

    def _compare_with_other_ranks(self, description: bytes, parity: int) -> None:
        """Raises an error if calls of other ranks are described differently than this rank's."""
        descriptions = []
        for offset in self._call_offsets[parity]:
            descriptions.append(self._memory[offset : offset + DESCRIPTION_BYTES])

        all_are_equal = descriptions.count(description) == self._local_size
        if not all_are_equal:
            raise self._calls_differ_error(descriptions)

    def _wait(self, semaphore: int) -> None:
        """Waits until the semaphore is posted.

        It first tests the semaphore a number of times, since that is faster than sleeping.

        Raises:
            torch.distributed.DistNetworkError: a rank has ended, or did not arrive in time.
        """
        for _ in range(self._num_tries_before_sleep):
            was_posted = self._semaphores.try_wait(semaphore) == 0
            if was_posted:
                return

        # Sleep until it is posted. After each second without a post, raise an error if a rank has
        # ended or the time is over; otherwise sleep again.
        deadline = time.monotonic() + self._timeout_s
        while not self._semaphores.posted_within(CHECK_INTERVAL_S, semaphore):
            call = f"{self.calls[-1].op} number {self._num_begun}"
            self._raise_if_ranks_ended(call)
            if time.monotonic() > deadline:
                raise self._timeout_error(call)

    def _raise_if_ranks_ended(self, call: str) -> None:
        """Raises an error if it finds ranks that have ended, so that the call cannot complete."""
        ended_ranks = self._find_ended_ranks()
        if ended_ranks:
            raise dist.DistNetworkError(
                f"shared memory: {format_ranks(ended_ranks)} ended while this rank waited in {call}"
            )

    def _timeout_error(self, call: str) -> dist.DistNetworkError:
        """Returns the error if the time to wait for the other ranks is over."""
        absent_ranks = self._absent_ranks()
        if absent_ranks:
            late = f"{format_ranks(absent_ranks)} did not come"
        else:
            # More than 8 ranks are woken by the first rank, which has not woken this one.
            late = "all ranks have come, but one did not go on"
        return dist.DistNetworkError(
            f"shared memory: {late} within {self._timeout_s:g} s to {call}"
        )

    def _find_ended_ranks(self) -> list[int]:
        """Returns ranks that have ended before this barrier, which can then not complete.

        Looking whether a rank still runs is a system call. So with more than 8 ranks, the first one
        looks at all others, and each of the others only at the first one. While the first one does
        not look, because it is not here, the others look at a few of the ranks that they await.

        So the list may be incomplete, or empty although some rank has ended.
        """
        first_rank = self.ranks[0]
        is_first_rank = self._local_rank == 0
        if is_first_rank or self._local_size <= MAX_RANKS_OF_FLAT_BARRIER:
            return self._ended(self._awaited_ranks())

        # The first rank may even be at a later barrier, if it has just woken this rank. If an error
        # has ended its collective, it waits no longer.
        first = self._read_progress(local_rank=0)
        first_rank_has_arrived = first.num_barriers >= self._num_barriers
        first_rank_looks_at_others = first_rank_has_arrived and not first.has_left_collective
        if first_rank_looks_at_others:
            return self._ended([first_rank])

        # Look at the first rank last: it may have ended only because another one had.
        ended_ranks = self._ended(self._next_ranks_to_check())
        return ended_ranks or self._ended([first_rank])

    def _next_ranks_to_check(self) -> list[int]:
        """Returns the awaited ranks in turn, at most 8 in each call, and then again from the first.

        Of the awaited ranks 1 to 10, the first call returns 1 to 8, and the second call 1 to 6, 9
        and 10.
        """
        awaited_ranks = self._awaited_ranks()
        begin = MAX_RANKS_CHECKED_AT_ONCE * self._num_checks % len(awaited_ranks)
        self._num_checks += 1

        # The list is doubled so that the few ranks may begin near its end.
        in_circle = 2 * awaited_ranks
        next_few = in_circle[begin : begin + MAX_RANKS_CHECKED_AT_ONCE]
        return sorted(set(next_few))

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        """Returns the given ranks whose processes have ended."""
        return [rank for rank in ranks if not _is_running(self._pids[rank])]

    def _absent_ranks(self) -> list[int]:
        """Returns the ranks that have not reached the barrier in which this rank waits."""
        absent_ranks = []
        for local_rank, rank in enumerate(self.ranks):
            if self._read_progress(local_rank).num_barriers < self._num_barriers:
                absent_ranks.append(rank)
        return absent_ranks

    def _read_progress(self, local_rank: int) -> _Progress:
        """Returns what a rank has written with `_publish_barrier_number`."""
        offset = self._barrier_number_offsets[local_rank]
        (number,) = BARRIER_NUMBER.unpack_from(self._memory, offset)
        return _Progress(num_barriers=abs(number), has_left_collective=number < 0)

    def _awaited_ranks(self) -> list[int]:
        """Returns the ranks for which this rank waits in the barrier; at least one.

        These are the ranks that have not reached the barrier. If all have reached it, this rank may
        wait to be woken by the first rank, which is returned.
        """
        return self._absent_ranks() or self.ranks[:1]

    def _calls_differ_error(self, descriptions: Sequence[bytes]) -> RanksDifferError:
        """Returns the error of ranks that have called different collectives.

        Args:
            descriptions: for each rank of this machine, the description of its call, padded with
                spaces.
        """
        calls = []
        for rank, description in zip(self.ranks, descriptions, strict=True):
            calls.append(f"rank {rank}: {description.decode().strip()}")
        return RanksDifferError(
            "a collective",
            "; ".join(calls),
            "call the same collective with the same shapes and dtypes on every rank; look for one "
            "that only some ranks call, under `if world.is_main:` for example",
        )


def add_in_tree(
    values: Sequence[Tensor], merges: Sequence[int], totals: Sequence[Tensor], *, overwrite: bool
) -> None:
    """Adds values in the order of a tree (`summation_tree`), and writes the sums to `totals`.

    The values are pushed onto a stack, one after the other. A *merge* replaces the two topmost
    values of the stack by their sum. With the merges `[0, 1, 0, 2]`, the values a, b, c and d
    become `(a + b) + (c + d)`.

    Args:
        values: values of nodes of the tree, from left to right.
        merges: for each value, how many merges follow its push.
        totals: tensors that the values left on the stack at the end are written to. If only one
            value is left, its tensor may also be one of `values`.
        overwrite: True if partial sums may overwrite `values`.
    """
    if len(totals) == 1 and len(values) > 1:
        # The last addition writes to the total. It may be one of the values, all of which have been
        # added by then.
        merges_but_last = [*merges[:-1], merges[-1] - 1]
        left, right = _add_on_stack(values, merges_but_last, overwrite=overwrite)
        torch.add(left, right, out=totals[0])
        return

    results = _add_on_stack(values, merges, overwrite=overwrite)
    for result, total in zip(results, totals, strict=True):
        is_already_there = result.data_ptr() == total.data_ptr()
        if not is_already_there:
            total.copy_(result)


def _add_on_stack(
    values: Sequence[Tensor], merges: Sequence[int], *, overwrite: bool
) -> list[Tensor]:
    """Pushes values onto a stack and merges them; returns what is left on the stack.

    Args:
        values: see `add_in_tree`.
        merges: see `add_in_tree`.
        overwrite: True if partial sums may overwrite `values`; False if each is a new tensor.
    """
    stack: list[Tensor] = []
    for value, num_merges in zip(values, merges, strict=True):
        stack.append(value)
        for _ in range(num_merges):
            right = stack.pop()
            left = stack.pop()
            stack.append(torch.add(left, right, out=left if overwrite else None))
    return stack


def open_shared_memory(
    rank: int, node: int, timeout_s: float, exchange: Callable[[Any], list[Any]]
) -> tuple[SharedMemory | None, str]:
    """Maps the same memory on the ranks of each machine, if that is possible on all machines.

    Args:
        rank: rank of this process in the run.
        node: number of its machine.
        timeout_s: how long a rank may wait for the others, in seconds.
        exchange: function that takes this rank's value, which JSON can represent, and returns the
            values of all ranks.

    Returns:
        The collectives, and a text that says which ranks share memory. If memory cannot be shared:
        None, and the reason.
    """
    # Memory is shared only if all machines have the same number of ranks, at least 2.
    ranks_of_machine: dict[int, list[int]] = {}
    for peer, peer_node in enumerate(exchange(node)):
        ranks_of_machine.setdefault(peer_node, []).append(peer)
    ranks = ranks_of_machine[node]
    sizes = sorted({len(ranks_there) for ranks_there in ranks_of_machine.values()})
    if sizes == [1]:
        return None, "1 rank a machine"
    if sizes[0] == 1 or len(sizes) > 1:
        return None, f"{' or '.join(str(size) for size in sizes)} ranks a machine"

    memory, pids, problem = _map_on_machine(rank, ranks, exchange)
    if memory is None:
        return None, problem

    group_across_machines = None
    who_shares = "all ranks are on one machine"
    if len(ranks_of_machine) > 1:
        # Each group has one rank of each machine. It only sends tensors in shared memory, so it
        # needs no NCCL communicator.
        group_across_machines = open_groups(
            list(zip(*ranks_of_machine.values(), strict=True)),
            "between machines",
            timeout=timedelta(seconds=timeout_s),
            cpu_tensors_only=True,
        )
        who_shares = f"{len(ranks)} ranks a machine sum up there; each sends its part to the others"

    all_ranks: list[int] = []
    for ranks_there in ranks_of_machine.values():
        all_ranks += ranks_there
    are_numbered_by_machine = all_ranks == sorted(all_ranks)

    shared = SharedMemory(
        memory,
        rank,
        pids,
        timeout_s,
        group_across_machines,
        has_consecutive_ranks=are_numbered_by_machine,
    )
    return shared, who_shares


def _map_on_machine(
    rank: int, ranks: Sequence[int], exchange: Callable[[Any], list[Any]]
) -> tuple[mmap.mmap | None, dict[int, int], str]:
    """Maps the same memory on all ranks of this machine. Its first rank creates the memory.

    Args:
        rank: rank of this process in the run.
        ranks: the ranks of this machine.
        exchange: function that takes this rank's value, and returns the values of all ranks of the
            run, in the order of the ranks.

    Returns:
        The memory, the process ID of each rank of this machine, and "". If memory cannot be shared
        on some machine of the run: None, no process IDs, and the reason.
    """
    # The first rank of each machine keeps the memory open until all have mapped it.
    with contextlib.ExitStack() as stack:
        own_offer = None
        problem_of_offer = ""
        if rank == ranks[0]:
            try:
                own_offer = _create(len(ranks), stack)
            except (OSError, AttributeError) as error:  # only Linux has memfd
                problem_of_offer = f"no memory can be shared: {error}"

        offers_of_all_ranks = exchange([own_offer, problem_of_offer])
        memory, problem = _map_offer(rank, ranks, *offers_of_all_ranks[ranks[0]])
        answers_of_all_ranks = exchange([os.getpid(), problem])

    # If one machine of the run cannot share memory, none does.
    pids_of_all = []
    for pid, problem_of_rank in answers_of_all_ranks:
        if problem_of_rank:
            return None, {}, problem_of_rank
        pids_of_all.append(pid)
    return memory, {peer: pids_of_all[peer] for peer in ranks}, ""


def _map_offer(
    rank: int, ranks: Sequence[int], offer: Sequence[Any], problem: str
) -> tuple[mmap.mmap | None, str]:
    """Maps the memory that the first rank of this machine offers.

    Args:
        rank: rank of this process in the run.
        ranks: the ranks of this machine.
        offer: what `_create` has returned on the first of them.
        problem: why the first rank offers no memory; "" if it does.

    Returns:
        The memory and "", or None and why there is none.
    """
    if problem:
        return None, problem
    try:
        return _map(len(ranks), *offer), ""
    except (OSError, ValueError) as error:
        return None, f"rank {rank} cannot map the memory of rank {ranks[0]}: {error}"


def _create(size: int, stack: contextlib.ExitStack) -> tuple[int, int, str]:
    """Creates the memory with its semaphores, and keeps it open until the stack is closed.

    Args:
        size: number of ranks on this machine.
        stack: closes this process's file descriptor of the memory.

    Returns:
        The arguments of `_map` in other processes: the ID of this process, its file descriptor of
        the memory, and the random token with which the memory begins.
    """
    layout = _Layout(size)
    semaphores = _Semaphores()
    descriptor = os.memfd_create("lockstep")
    stack.callback(os.close, descriptor)
    os.ftruncate(descriptor, layout.end)

    # This process maps the memory only to write its beginning. What it writes, also the state of
    # the semaphores, is in the memory itself and remains when this mapping is closed.
    token = secrets.token_hex(TOKEN_BYTES // 2)  # two characters for each random byte
    with mmap.mmap(descriptor, layout.end) as memory:
        memory[:TOKEN_BYTES] = token.encode()

        address = _address_of(memory)
        for rank in range(size):
            for parity in PARITIES:
                semaphores.init(address + layout.semaphore(rank, parity))

    return os.getpid(), descriptor, token


def _address_of(memory: mmap.mmap) -> int:
    """Returns the address of a mapping in this process."""
    # The object made by `from_buffer` ends with this line. While it lives, `memory` cannot be
    # closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map(size: int, pid: int, descriptor: int, token: str) -> mmap.mmap:
    """Maps the memory that `_create` has made in another process.

    Raises:
        OSError: the memory cannot be opened.
        ValueError: the file is not that memory. This happens, for example, if the processes are in
            different containers, where the same process ID stands for another process.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        num_bytes = _Layout(size).end  # the end of the last part, so the size of the whole file
        memory = mmap.mmap(opened, num_bytes)
    finally:
        os.close(opened)

    if memory[:TOKEN_BYTES] != token.encode():
        raise ValueError("it is another file")

    return memory


def _as_rows(slots: Sequence[Tensor], length: int) -> Tensor:
    """Returns the first `length` elements of each slot as the rows of one tensor, a view.

    The slots are consecutive in memory.
    """
    slot_numel = slots[0].numel()
    return torch.as_strided(slots[0], size=(len(slots), length), stride=(slot_numel, 1))


def _skip_other_machines(shard: Tensor) -> Callable[[], None]:
    """Does nothing where `start_all_reduce` would sum a slice over the other machines."""
    return do_nothing


def do_nothing() -> None:
    """Does nothing: the function that waits for a sum that is complete already."""


def _describe_op(op: Any) -> str:
    """Returns the text for a reduction in the description of a call, e.g. " (maximum)"."""
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

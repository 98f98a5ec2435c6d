"""Collectives of the ranks of one machine through memory that all of them map.

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
from functools import partial
from typing import Any, NamedTuple, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.traffic import all_reduce_bytes, traffic
from lockstep.errors import RanksDifferError
from lockstep.wording import format_ranks

CHUNK_BYTES = 2**19
"""Of a slot, for each of up to 8 ranks. What is larger goes piece by piece, which the processors'
caches hold; where ranks take turns on cores, pieces of half the size take twice as long."""
_SLOTS_BYTES = 2**29
"""At most, of all slots together: every rank maps all of them, and its page tables grow with what
it touches."""
ALL_TO_ALL_BYTES = 2**21
"""Up to so many of all ranks together every rank sums all, where a slot holds it: a second barrier
costs more than to read more memory."""
_TRIES, _TRIES_IN_TURN = 300, 40
"""To find a semaphore posted before a rank sleeps: some 100 microseconds, about what it costs to
sleep and be woken (Karlin et al., SODA 1990); 15 where ranks take turns on cores."""
_FEW = 8
"""Ranks that all wake each other in a barrier: with more the machine has too much to wake."""
_CALLS_KEPT = 64
_LOOK_S = 1.0
"""How often a rank that sleeps looks whether the others are still there."""

_TOKEN_BYTES = 32
_LINE = 64
"""Bytes of a cache line; a semaphore has 32 (glibc) or fewer."""
_WORDS = 2 * _LINE
_NUMBER = struct.Struct("=q")

_COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class Call(NamedTuple):
    """One collective, as the watchdog tells of it."""

    number: int
    """From 1."""
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    time_s: float
    """When it was called, by the wall clock."""
    thread: int


class _Layout:
    """Where things are in the mapping, in bytes from its start: first a token, then these."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots = -(-self.call(size, 0) // mmap.PAGESIZE) * mmap.PAGESIZE
        most = max(_SLOTS_BYTES // (2 * size), _LINE * size) // mmap.PAGESIZE * mmap.PAGESIZE
        self.slot = min(CHUNK_BYTES * min(size, 8), most)
        """Bytes of a slot."""
        self.end = self.slots + 2 * size * self.slot

    def semaphore(self, rank: int, turn: int) -> int:
        """Of a rank, for even or for odd barriers."""
        return _LINE * (1 + 2 * rank + turn)

    def barriers(self, rank: int) -> int:
        """The number of barriers that a rank has come to; negative: it has left the last one."""
        return _LINE * (1 + 2 * self.size + rank)

    def call(self, rank: int, turn: int) -> int:
        """The words for what a rank calls."""
        return _LINE * (1 + 3 * self.size) + _WORDS * (2 * rank + turn)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Semaphores:
    """Functions of the C library; they take the address of a semaphore."""

    def __init__(self) -> None:
        fast, checked = ctypes.CDLL(None), ctypes.CDLL(None, use_errno=True)
        self.post, self.try_wait = fast.sem_post, fast.sem_trywait
        self._init, self._timed_wait = checked.sem_init, checked.sem_timedwait
        self.post.argtypes = self.try_wait.argtypes = [ctypes.c_void_p]
        self._init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self._timed_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]

    def init(self, address: int) -> None:
        """Makes one, not posted, that processes share."""
        if self._init(address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")

    def posted_within(self, seconds: float, address: int) -> bool:
        """Sleeps until it is posted; False: it was not. A signal may end this early."""
        until, rest = divmod(time.time() + seconds, 1.0)
        if self._timed_wait(address, _Time(int(until), int(rest * 1e9))) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False


class _Barrier(NamedTuple):
    """What a rank does in a barrier: semaphores that it posts before and after it waits."""

    own: int
    awaited: int
    """How many times `own` is to be posted."""
    posted_before: list[int]
    posted_after: list[int]

    @classmethod
    def of(cls, semaphores: Sequence[int], rank: int) -> _Barrier:
        """Of one rank, by the semaphores of all."""
        own, others = semaphores[rank], [*semaphores[:rank], *semaphores[rank + 1 :]]
        if len(semaphores) <= _FEW:
            return cls(own, len(others), others, [])
        return cls(own, 1, others[:1], []) if rank else cls(own, len(others), [], others)


class SharedMemory:
    """The collectives of one rank; made by `open_shared_memory`.

    Args:
        memory: what all ranks of this machine have mapped, prepared by one of them.
        rank: of this process.
        pids: of the ranks of this machine, by rank.
        timeout_s: how long a rank may wait for the others.
        across: the ranks that have the same place on the other machines; None: there are none.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        pids: Mapping[int, int],
        timeout_s: float,
        across: dist.ProcessGroup | None = None,
    ) -> None:
        self.across = across
        self._pids = dict(pids)
        self.ranks = list(pids)
        """Those of this machine."""
        self._local_rank, self._local_size = self.ranks.index(rank), len(pids)
        cores = set[int]().union(*map(os.sched_getaffinity, pids.values()))
        self._tries = _TRIES if self._local_size <= len(cores) else _TRIES_IN_TURN
        self.calls: deque[Call] = deque(maxlen=_CALLS_KEPT)
        """The latest ones, the oldest first; the watchdog's thread reads them."""
        self.completed = 0
        """The number of the last call that has come to its end."""
        self._memory, self._timeout_s = memory, timeout_s
        self._lock = threading.RLock()
        self._functions = _Semaphores()
        layout = _Layout(self._local_size)
        self._slot_bytes = layout.slot
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = first = everything.data_ptr()
        """Of the mapping, whose tensors share one storage."""
        ranks, turns = range(self._local_size), (0, 1)
        semaphores = [[first + layout.semaphore(r, t) for r in ranks] for t in turns]
        self._barrier_of = [_Barrier.of(each, self._local_rank) for each in semaphores]
        """By turn."""
        self._calls_at = [[layout.call(r, t) for r in ranks] for t in turns]
        self._barriers_at = [layout.barriers(r) for r in ranks]
        slots = torch.split(everything[layout.slots :], layout.slot)
        self._slots: tuple[Sequence[Tensor], Sequence[Tensor]]
        self._slots = slots[: self._local_size], slots[self._local_size :]
        self._typed: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._half = self._barriers = self._number = self._looks = 0
        self._words: dict[tuple[str, torch.dtype, int], bytes] = {}
        self._unchecked: bytes | None = None
        """The words of the present call, until its first barrier."""
        self._broken = ""
        """What is said of the last call where it did not come to its end."""

    def takes(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
        """Whether it can be reduced so: dense and contiguous on the CPU; SUM, MAX or MIN."""
        dense = tensor.device.type == "cpu" and tensor.layout is torch.strided
        return dense and tensor.is_contiguous() and op in _COMBINE

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, scale: float = 1.0
    ) -> None:
        """Replaces the tensor by its sum, maximum or minimum over the ranks, in their order.

        Args:
            tensor: contiguous; of the same dtype and number of elements on all ranks.
            op: SUM, MAX or MIN.
            scale: what the values of every rank are multiplied by before.

        Raises:
            RanksDifferError: on all ranks, where they have not called the same.
            torch.distributed.DistNetworkError: a rank has ended, or did not come in time.
        """
        own = tensor.detach().view(-1)
        most = min(self._slot_bytes, ALL_TO_ALL_BYTES // self._local_size)
        if self.across is not None or own.nbytes > most:
            self.start_all_reduce(tensor, op, scale=scale)()
            return
        with self._calling("all_reduce", tensor, _how(op)):
            self._reduce_by_all(own, _COMBINE[op], scale)
        traffic.shared += own.nbytes

    def start_all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        scale: float = 1.0,
        between: Callable[[Tensor], Callable[[], object]] | None = None,
    ) -> Callable[[], None]:
        """The same in two halves: what this returns waits for the other machines.

        Between them other all-reduces may be started; all are to be ended in the same order.
        `between` may begin the exchange with the other machines, of this rank's slice of what this
        machine gives, in another way; what it returns ends it.
        """
        slices = torch.tensor_split(tensor.detach().view(-1), self._local_size)
        with self._calling("all_reduce", tensor, f"{_how(op)} in slices"):
            self._reduce_scatter(slices, _COMBINE[op], scale)
        mine, wait = slices[self._local_rank], cast("Callable[[], object] | None", None)
        traffic.shared += tensor.nbytes
        if between is not None:
            wait = between(mine)
        elif self.across is not None and mine.numel():
            work = cast(dist.Work, dist.all_reduce(mine, op, self.across, async_op=True))
            wait = partial(traffic.wait, work.wait)
            traffic.sent += all_reduce_bytes(mine.nbytes, dist.get_world_size(self.across))

        def end() -> None:
            if wait is not None:
                wait()
            with self._calling("all_gather", tensor):
                self._gather(slices)

        return end

    def all_gather(self, rows: Tensor, tensor: Tensor) -> None:
        """Fills `rows`, one a rank, with the tensors of all ranks of this machine.

        Errors are as of `all_reduce`.
        """
        own = tensor.detach().view(-1)
        flat = rows.detach().view(self._local_size, len(own))
        room = self._slot_bytes // own.itemsize
        with self._calling("all_gather", tensor):
            for start in range(0, max(1, len(own)), room):
                piece = own[start : start + room]
                slots = self._next_slots(own.dtype)
                slots[self._local_rank][: len(piece)].copy_(piece)
                self._barrier()
                whole = torch.as_strided(slots[0], (len(slots), len(piece)), (slots[0].numel(), 1))
                flat[:, start : start + room].copy_(whole)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives all ranks of this machine the values of one of them.

        Args:
            tensor: as of `all_reduce`.
            source: the place of that rank among those of this machine.

        Errors are as of `all_reduce`.
        """
        own = tensor.detach().view(-1)
        parts = [own if place == source else own[:0] for place in range(self._local_size)]
        with self._calling("broadcast", tensor, f" from rank {self.ranks[source]}"):
            self._gather(parts)

    def close(self) -> None:
        """Lets go of the memory; a model whose communication hook has this may live on."""
        with self._lock:
            self._number, self._broken = self.completed + 1, "shared memory: after world.close()"
            self._slots, self.across = ((), ()), None
            self._typed.clear()
            self._memory.close()

    def flight_record(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The group of these ranks, and its latest calls in the form of torch's Flight Recorder."""
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
        slots = [slot[: len(own)] for slot in self._next_slots(own.dtype)]
        _scale(own, scale, slots[self._local_rank])
        self._barrier()
        total = slots[0]
        for slot in slots[1:]:
            total = combine(total, slot, out=own)

    def _reduce_scatter(
        self, slices: Sequence[Tensor], combine: Callable[..., Tensor], scale: float
    ) -> None:
        """Reduces each rank's slice on that rank alone, in the tensor itself."""
        me, size = self._local_rank, self._local_size
        room = self._slot_bytes // slices[0].itemsize // size  # in a slot for each of the ranks
        for start in range(0, len(slices[0]), room):
            parts = [each[start : start + room] for each in slices]
            typed = self._next_slots(parts[0].dtype)
            slots = [torch.split(slot[: room * size], room) for slot in typed]
            for rank, part in enumerate(parts):
                to = part if rank == me else slots[me][rank][: len(part)]
                _scale(part, scale, to)
            self._barrier()
            own = parts[me]
            given = [slot[me][: len(own)] for slot in slots]
            unread, given[me] = given[me], own
            total = given[0]
            for rank in range(1, size):
                total = combine(total, given[rank], out=own if rank >= me else unread)

    def _gather(self, parts: Sequence[Tensor]) -> None:
        """Fills every rank's part, of which its own is there already."""
        room = self._slot_bytes // parts[0].itemsize
        for start in range(0, max(1, *map(len, parts)), room):
            pieces = [part[start : start + room] for part in parts]
            slots = self._next_slots(parts[0].dtype)
            slots[self._local_rank][: len(pieces[self._local_rank])].copy_(pieces[self._local_rank])
            self._barrier()
            for rank, piece in enumerate(pieces):
                if rank != self._local_rank and len(piece):
                    piece.copy_(slots[rank][: len(piece)])

    def _next_slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Those of all ranks."""
        self._half = 1 - self._half
        key = self._half, dtype
        if key not in self._typed:
            self._typed[key] = [slot.view(dtype) for slot in self._slots[self._half]]
        return self._typed[key]

    @contextlib.contextmanager
    def _calling(self, op: str, tensor: Tensor, how: str = "") -> Iterator[None]:
        with self._lock, torch.no_grad():
            if self.completed < self._number:  # or this is a signal's handler, inside of a call
                raise dist.DistNetworkError(self._broken)
            self._number += 1
            self._broken = f"shared memory: {op} number {self._number} did not come to its end"
            shape, dtype, thread = tuple(tensor.shape), tensor.dtype, threading.get_ident()
            self.calls.append(Call(self._number, op, shape, dtype, time.time(), thread))
            key = op + how, dtype, tensor.numel()
            if key not in self._words:
                words = f"{op}{how} of {key[2]} numbers in {str(dtype).removeprefix('torch.')}"
                self._words[key] = words.encode().ljust(_WORDS)
            self._unchecked = self._words[key]
            try:
                yield
            except BaseException:  # so that the others do not count on this rank to look
                place = self._barriers_at[self._local_rank]
                _NUMBER.pack_into(self._memory, place, -self._barriers)
                raise
            self.completed = self._number

    def _barrier(self) -> None:
        """Returns when all ranks have come, and what they wrote before can be read."""
        self._barriers += 1
        turn, words, memory = self._barriers & 1, self._unchecked, self._memory
        _NUMBER.pack_into(memory, self._barriers_at[self._local_rank], self._barriers)
        places = self._calls_at[turn]
        if words is not None:
            memory[places[self._local_rank] : places[self._local_rank] + _WORDS] = words
        barrier = self._barrier_of[turn]
        for semaphore in barrier.posted_before:
            self._functions.post(semaphore)
        begin = time.perf_counter()
        for _ in range(barrier.awaited):
            self._wait(barrier.own)
        traffic.blocked_s += time.perf_counter() - begin
        for semaphore in barrier.posted_after:
            self._functions.post(semaphore)
        if words is not None:
            self._unchecked = None
            heard = [memory[at : at + _WORDS] for at in places]
            if heard.count(words) != self._local_size:
                raise self._differ(heard)

    def _wait(self, semaphore: int) -> None:
        for _ in range(self._tries):
            if self._functions.try_wait(semaphore) == 0:
                return
        deadline = time.monotonic() + self._timeout_s
        while not self._functions.posted_within(_LOOK_S, semaphore):
            doing = f"{self.calls[-1].op} number {self._number}"
            if gone := self._ended():
                raise dist.DistNetworkError(
                    f"shared memory: {format_ranks(gone)} ended while this rank waited in {doing}"
                )
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(
                    f"shared memory: {format_ranks(self._absent())} did not come within "
                    f"{self._timeout_s:g} s to {doing}"
                )

    def _ended(self) -> list[int]:
        """Ranks that have ended, without which this barrier does not."""
        absent, first = self._absent(), self.ranks[:1]
        if self._barrier_of[0].awaited == self._local_size - 1:  # few ranks, or this is the first
            return self._gone(absent)
        (number,) = _NUMBER.unpack_from(self._memory, self._barriers_at[0])
        if number >= self._barriers:  # it waits, too, and looks at the others
            return self._gone(first)
        begin = _FEW * self._looks % len(absent)
        self._looks += 1
        # All ranks look, so each at a few at a time. The first may have ended because another had.
        return self._gone(sorted({*(2 * absent)[begin : begin + _FEW]})) or self._gone(first)

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not _is_there(self._pids[rank])]

    def _absent(self) -> list[int]:
        """The ranks that have not come to this barrier; the first is to say so where all have."""
        come = (_NUMBER.unpack_from(self._memory, place) for place in self._barriers_at)
        absent = [r for r, (n,) in zip(self.ranks, come, strict=True) if abs(n) < self._barriers]
        return absent or self.ranks[:1]

    def _differ(self, heard: Sequence[bytes]) -> RanksDifferError:
        pairs = zip(self.ranks, heard, strict=True)
        return RanksDifferError(
            "a collective",
            "; ".join(f"rank {rank}: {words.decode().strip()}" for rank, words in pairs),
            "call the same collective with the same shapes and dtypes on every rank; look for one "
            "that only some ranks call, under `if world.is_main:` for example",
        )


def open_shared_memory(
    rank: int, node: int, timeout_s: float, exchange: Callable[[Any], list[Any]]
) -> tuple[SharedMemory | None, str]:
    """Maps the same memory on the ranks of each machine; everywhere or nowhere.

    Args:
        rank: of this process.
        node: the number of its machine.
        timeout_s: how long a rank may wait for the others.
        exchange: gives the values of all ranks, which JSON can hold.

    Returns:
        The collectives, and who shares memory; or None, and why nobody does.
    """
    machines: dict[int, list[int]] = {}
    for other, its_node in enumerate(exchange(node)):
        machines.setdefault(its_node, []).append(other)
    ranks, sizes = machines[node], sorted(set(map(len, machines.values())))
    if sizes[0] == 1 or len(sizes) > 1:
        numbers = " or ".join(map(str, sizes))
        return None, f"{numbers} rank{'s' * (sizes != [1])} a machine"
    with contextlib.ExitStack() as stack:
        offer, memory = None, None
        try:
            offer = _create(len(ranks), stack) if rank == ranks[0] else None
            problem = ""
        except (OSError, AttributeError) as error:  # memfd is of Linux alone
            problem = f"no memory can be shared: {error}"
        offer, problem = exchange([offer, problem])[ranks[0]]
        if not problem:
            try:
                memory = _map(len(ranks), *offer)
            except (OSError, ValueError) as error:
                problem = f"rank {rank} cannot map the memory of rank {ranks[0]}: {error}"
        answers = exchange([os.getpid(), problem])
    problem = next((told for _, told in answers if told), "")
    if problem or memory is None:
        return None, problem
    pids = {other: answers[other][0] for other in ranks}
    across, told = None, "all ranks are on one machine"
    if len(machines) > 1:
        for place in zip(*machines.values(), strict=True):
            group = dist.new_group(list(place))
            across = group if rank in place else across
        told = f"{len(ranks)} ranks a machine sum up there; each sends its part to the others"
    return SharedMemory(memory, rank, pids, timeout_s, across), told


def _create(size: int, stack: contextlib.ExitStack) -> tuple[int, int, str]:
    """The memory, with its semaphores, until the stack is closed: process, descriptor, token."""
    layout, functions = _Layout(size), _Semaphores()
    descriptor = os.memfd_create("lockstep")
    stack.callback(os.close, descriptor)
    os.ftruncate(descriptor, layout.end)
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    with mmap.mmap(descriptor, layout.end) as memory:
        memory[:_TOKEN_BYTES] = token.encode()
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for rank in range(size):
            for turn in (0, 1):
                functions.init(first + layout.semaphore(rank, turn))
    return os.getpid(), descriptor, token


def _map(size: int, pid: int, descriptor: int, token: str) -> mmap.mmap:
    """Maps what `_create` has made in another process.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else: the processes do not see each other's numbers.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, _Layout(size).end)
    finally:
        os.close(opened)
    if memory[:_TOKEN_BYTES] != token.encode():
        raise ValueError("it is another file")
    return memory


def _how(op: Any) -> str:
    """The reduction in words; a sum needs none."""
    return "" if op == dist.ReduceOp.SUM else f" ({_COMBINE[op].__name__})"


def _scale(source: Tensor, scale: float, out: Tensor) -> None:
    if scale != 1.0:
        torch.mul(source, scale, out=out)
    elif source.data_ptr() != out.data_ptr():
        out.copy_(source)


def _is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False

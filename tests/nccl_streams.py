"""Judges how sends and receives would go over NCCL, from what ranks did over Gloo.

Over NCCL the operations of a rank in one process group are executed one after the other, in the
order in which they were started (each group has a CUDA stream of its own). A send may last until
its receiver comes to it. An operation begins after what the rank had waited for before, and the
n-th send of a rank to another one goes to its n-th receive there, whatever their tags. Gloo does
none of that, so a program may be right over Gloo and hang, or receive the wrong tensors, over NCCL.

`recording` writes down what the wires of a pipeline do on a rank, and `judge_nccl` takes the
records of all ranks. No time plays a part: if no operations wait for each other in a circle, no
delay of any rank makes them do so.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.pipeline.wire import Wire

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class Event(NamedTuple):
    """An operation that a rank starts, or its wait for one."""

    kind: str
    """`send`, `receive` or `wait`."""
    number: int
    """Of the operation, among those of the rank."""
    group: str = ""
    peer: int = 0
    sizes: tuple[int, ...] = ()
    tag: int = 0
    over_nccl: bool = True
    """False for a tensor that stays on the CPU, which goes over Gloo on GPUs, too."""


class Recorder:
    """What one rank does."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._num_operations = 0
        self._storages_from_gpu: dict[int, Tensor] = {}

    def add(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        peer: int,
        group: Any,
        tag: int,
        over_nccl: bool = False,
    ) -> int:
        """Adds an operation, and returns its number."""
        self._num_operations += 1
        sizes = tuple(len(tensor) for tensor in tensors)
        name = group.group_name
        event = Event(kind, self._num_operations, name, peer, sizes, tag, over_nccl)
        self.events.append(event)
        if over_nccl and kind == "receive":
            for tensor in tensors:  # they are kept, so that no other tensor gets their memory
                self._storages_from_gpu[tensor.untyped_storage().data_ptr()] = tensor
        return self._num_operations

    def waited(self, work: Any, number: int) -> Any:
        """Returns an object whose `wait` is recorded."""

        class Waited:
            is_completed = work.is_completed

            def wait(_self) -> Any:
                self.events.append(Event("wait", number))
                return work.wait()

        return Waited()

    def check_read(self, tensor: Tensor) -> None:
        """Raises AssertionError if the value of a tensor that came over NCCL is read."""
        pointer = tensor.untyped_storage().data_ptr()
        assert pointer not in self._storages_from_gpu, "a read that waits for the GPU"


@contextmanager
def recording() -> Iterator[Recorder]:
    """Lets the wires of this rank do what they do over NCCL, and records it."""
    recorder = Recorder()
    batch, isend, irecv, recv = dist.batch_isend_irecv, dist.isend, dist.irecv, dist.recv

    def recorded_batch(operations: list[dist.P2POp]) -> list[Any]:
        kind = "send" if operations[0].op is isend else "receive"
        tensors = [operation.tensor for operation in operations]
        first = operations[0]
        number = recorder.add(kind, tensors, first.peer, first.group, first.tag, over_nccl=True)
        return [recorder.waited(work, number) for work in batch(operations)]

    def recorded_isend(tensor: Tensor, to: int, group: Any, tag: int) -> Any:
        number = recorder.add("send", [tensor], to, group, tag)
        return recorder.waited(isend(tensor, to, group, tag), number)

    def recorded_irecv(tensor: Tensor, source: int, group: Any, tag: int) -> Any:
        number = recorder.add("receive", [tensor], source, group, tag)
        return recorder.waited(irecv(tensor, source, group, tag), number)

    def recorded_recv(tensor: Tensor, source: int, group: Any, tag: int) -> None:
        number = recorder.add("receive", [tensor], source, group, tag)
        recorder.events.append(Event("wait", number))
        recv(tensor, source, group, tag)

    def checked(original: Any) -> Any:
        def read(tensor: Tensor, *args: Any) -> Any:
            recorder.check_read(tensor)
            return original(tensor, *args)

        return read

    def operation(function: Any, *arguments: Any) -> dist.P2POp:
        return dist.P2POp(isend if function is recorded_isend else irecv, *arguments)

    functions = _Functions(
        batch_isend_irecv=recorded_batch,
        isend=recorded_isend,
        irecv=recorded_irecv,
        recv=recorded_recv,
        P2POp=operation,
    )
    originals = {name: getattr(torch.Tensor, name) for name in READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, checked(original))
    try:
        with (
            mock.patch.object(Wire, "sends_over_gloo", new=False),
            mock.patch("lockstep.strategies.pipeline.wire.dist", functions),
        ):
            yield recorder
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


class _Functions:
    """Stands for `torch.distributed` in the module of the wires."""

    def __init__(self, **functions: Any) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


Operation = tuple[int, int]
"""A rank and the number of an operation of it."""


def judge_nccl(events_of_ranks: Sequence[Sequence[Event]]) -> str:
    """Returns what would go wrong over NCCL; empty if nothing does.

    Every rank goes through its events as far as it can: to a wait for an operation that is not
    done. An operation over NCCL is done when both sides have come to it and have done all that they
    started before it in the same group.
    """
    partner, problem = _match(events_of_ranks)
    if problem:
        return problem
    ranks = [_Rank(rank, events) for rank, events in enumerate(events_of_ranks)]
    done: set[Operation] = set()
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            if rank.go_on(done):
                moved = True
        for rank in ranks:
            for operation in rank.executable():
                peer = ranks[partner[operation][0]]
                if operation not in done and partner[operation] in peer.executable():
                    done |= {operation, partner[operation]}
                    moved = True
            rank.remove(done)
    for rank in ranks:
        if rank.position < len(rank.events):
            event = rank.events[rank.position]
            return f"rank {rank.number} waits for ever at event {rank.position}: {event}"
    return ""


class _Rank:
    """A rank that goes through its events."""

    def __init__(self, number: int, events: Sequence[Event]) -> None:
        self.number = number
        self.events = events
        self.position = 0
        """Of the event at which it is."""
        self._streams: dict[str, deque[Operation]] = defaultdict(deque)
        """The operations of each group that were started and are not done, in their order."""
        self._over_gloo: set[Operation] = set()
        """Those that wait for nothing but their partner."""

    def go_on(self, done: set[Operation]) -> bool:
        """Goes on to the next wait for an operation that is not done; True if it has moved."""
        position_before = self.position
        while self.position < len(self.events):
            event = self.events[self.position]
            operation = (self.number, event.number)
            if event.kind == "wait" and operation not in done:
                break
            if event.kind != "wait" and event.over_nccl:
                self._streams[event.group].append(operation)
            elif event.kind != "wait":
                self._over_gloo.add(operation)
            self.position += 1
        return self.position > position_before

    def executable(self) -> set[Operation]:
        """Returns the operations that wait for nothing but their partner."""
        return {stream[0] for stream in self._streams.values() if stream} | self._over_gloo

    def remove(self, done: set[Operation]) -> None:
        """Removes operations that are done."""
        self._over_gloo -= done
        for stream in self._streams.values():
            while stream and stream[0] in done:
                stream.popleft()


def _match(
    events_of_ranks: Sequence[Sequence[Event]],
) -> tuple[dict[Operation, Operation], str]:
    """Returns the partner of each operation, or what is wrong: they would receive other tensors."""
    sends: dict[Any, list[tuple[Operation, Event]]] = defaultdict(list)
    receives: dict[Any, list[tuple[Operation, Event]]] = defaultdict(list)
    for rank, events in enumerate(events_of_ranks):
        for event in events:
            # Gloo tells messages apart by their tags.
            channel = (event.group, event.over_nccl, None if event.over_nccl else event.tag)
            if event.kind == "send":
                sends[channel, rank, event.peer].append(((rank, event.number), event))
            elif event.kind == "receive":
                receives[channel, event.peer, rank].append(((rank, event.number), event))
    partner: dict[Operation, Operation] = {}
    for key in sends.keys() | receives.keys():
        if len(sends[key]) != len(receives[key]):
            return {}, f"{key}: {len(sends[key])} sends, {len(receives[key])} receives"
        for (sent, send), (received, receive) in zip(sends[key], receives[key], strict=True):
            if (send.sizes, send.tag) != (receive.sizes, receive.tag):
                return {}, f"{send} goes to {receive}"
            partner[sent] = received
            partner[received] = sent
    return partner, ""

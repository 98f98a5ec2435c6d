"""What goes from machine to machine: counted, measured, and predicted of other methods."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

_FIRST_BYTES, _MOST_BYTES = 2**16, 2**24
_LONG_S, _TOO_LONG_S = 0.06, 0.2
"""Messages grow until one takes so long that its time tells the bandwidth."""
_PINGS = 15
_DILOCO_EVERY = 50
_MUCH = 0.2
"""Of a step: where waiting takes more, something can be done about it."""


class Traffic:
    """What this rank has moved since the run began, as far as Lockstep moves it itself."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Counts from 0."""
        self.sent = 0
        """Bytes sent by the backend to other ranks; headers of packets are not counted."""
        self.shared = 0
        """Bytes written into memory that the ranks of a machine share."""
        self.waited_s = 0.0
        """Seconds in which it waited for what other ranks were to send by the backend."""
        self.blocked_s = 0.0
        """Seconds in which it waited for other ranks in any way, those of its machine included."""

    def wait(self, work: Callable[[], object]) -> None:
        """Calls what waits for what other ranks send by the backend."""
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        self.waited_s += seconds
        self.blocked_s += seconds

    def block(self, work: Callable[[], object]) -> None:
        """Calls a collective of the backend that returns when the other ranks have come."""
        begin = time.perf_counter()
        work()
        self.blocked_s += time.perf_counter() - begin


traffic = Traffic()


def run_delay_s() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where it is not known.

    Linux: the second field of `schedstat`, see the kernel's sched-stats.rst.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """What each of so many ranks sends for the all-reduce of a tensor: Gloo's, in a ring."""
    return 2 * nbytes * (size - 1) // size


class Link(NamedTuple):
    """Between machines, the slowest of them; each sends and receives at a time."""

    latency_s: float
    """From one machine to the next."""
    bandwidth: float
    """Bytes a second."""
    machines: int = 2

    def __str__(self) -> str:
        mbits = self.bandwidth * 8 / 1e6
        return f"{mbits:.0f} Mb/s" if mbits >= 100 else f"{mbits:.3g} Mb/s"


def measure(
    shift: Callable[[int], float], agree: Callable[[float], float], machines: int = 2
) -> Link:
    """Sends messages round all machines until one takes long enough; well below a second.

    Args:
        shift: sends so many bytes to the next machine, receives as many from the one before, and
            gives the seconds that took.
        agree: the largest of all ranks' values.
        machines: how many there are.
    """
    for _ in range(3):
        shift(1)  # connects
    latency = agree(statistics.median(shift(1) for _ in range(_PINGS)))
    smaller, before, size = 0, latency, _FIRST_BYTES
    while True:
        seconds = agree(shift(size))
        for _ in range(2):  # a busy machine may have disturbed it
            if seconds < _TOO_LONG_S:
                seconds = min(seconds, agree(shift(size)))
        if seconds >= _LONG_S or size >= _MOST_BYTES:
            # By the difference: TCP takes a while to fill a link.
            return Link(latency, (size - smaller) / max(seconds - before, 1e-9), machines)
        smaller, before, size = size, seconds, size * 4


def step_seconds(compute_s: float, nbytes: float, link: Link, *, hidden_s: float = 0.0) -> float:
    """How long a step takes.

    Args:
        compute_s: seconds of computing, encoding among it.
        nbytes: that each machine sends in an all-reduce: in two halves, one after the other.
        link: between the machines.
        hidden_s: how much of the sending goes on while gradients are still computed.
    """
    sending = nbytes / link.bandwidth + 2 * link.latency_s
    return compute_s + max(0.0, sending - hidden_s)


class Network(NamedTuple):
    """What was seen in the first steps."""

    compute_s: float
    """Seconds of a step but those of waiting."""
    waiting_s: float
    """Seconds of a step in which the rank that waits least waits for other machines."""
    gradient_bytes: int
    """Of the whole model, in float32."""
    local_size: int
    """Ranks of each machine."""
    hierarchical: bool
    """The ranks of a machine sum up before one of them sends."""
    compressed: bool = False
    """Gradients are sent compressed."""
    run_delay_s: float = 0.0
    """Of `compute_s`, in which the training had no core. On machines with no more cores than ranks
    the backend's threads had it, in proportion to what they send."""

    @property
    def fraction(self) -> float:
        """Of a step that is waiting."""
        return self.waiting_s / (self.compute_s + self.waiting_s)

    def sent_bytes(self, machines: int, *, hierarchical: bool) -> float:
        """What each machine sends for one all-reduce of all gradients."""
        ring = machines if hierarchical else machines * self.local_size
        return all_reduce_bytes(self.gradient_bytes, ring)


class Compressed(NamedTuple):
    """What a compression of gradients takes."""

    fraction: float
    """What it sends, as a fraction of the bytes in float32."""
    encode_s: float = 0.0
    """Seconds of a step that encoding takes."""


def alternatives(
    seen: Network, link: Link, compressions: Mapping[str, Compressed]
) -> list[tuple[str, float, bool]]:
    """What other methods of training would give on this link.

    Args:
        seen: of the present method.
        link: as it was measured.
        compressions: by name.

    Returns:
        Each method, how many times as fast a step would be, and whether its numbers are the same.
    """
    if seen.compressed:
        return []  # how much of it is encoding is not known
    now = seen.sent_bytes(link.machines, hierarchical=seen.hierarchical)
    # What is seen counts more than what was measured: all waiting was for what was sent, and no
    # more of that was hidden than about the backward pass takes.
    measured = now / link.bandwidth + 2 * link.latency_s
    sending = min(max(measured, seen.waiting_s), seen.waiting_s + seen.compute_s / 2)
    hidden, times = sending - seen.waiting_s, sending / measured
    real = Link(link.latency_s * times, link.bandwidth / times, link.machines)
    summed = seen.sent_bytes(link.machines, hierarchical=True)
    total = seen.compute_s + seen.waiting_s
    found = []
    if seen.local_size > 1 and not seen.hierarchical:
        step_s = step_seconds(seen.compute_s, summed, real, hidden_s=hidden)
        found.append(("hierarchical", total / step_s, True))
    for name, (fraction, encode_s) in compressions.items():
        compute_s = seen.compute_s - seen.run_delay_s * (1.0 - fraction) + encode_s
        step_s = step_seconds(compute_s, summed * fraction, real, hidden_s=hidden)
        found.append((name, total / step_s, False))
    # Its exchange is hidden by nothing, once in so many steps.
    exchange_s = seen.run_delay_s + step_seconds(0.0, summed, real)
    step_s = seen.compute_s - seen.run_delay_s + exchange_s / _DILOCO_EVERY
    return [*found, (f"diloco every={_DILOCO_EVERY}", total / step_s, False)]


def advice(seen: Network, link: Link, compressions: Mapping[str, Compressed]) -> str:
    """The network's fraction of a step in words, and where it is over a fifth what would help."""
    text = (
        f"a step computes for {_time(seen.compute_s)} and waits for other machines for "
        f"{_time(seen.waiting_s)} ({seen.fraction:.0%})"
    )
    if seen.fraction <= _MUCH:
        return text
    words = [
        f"{name}: {'same' if same else 'other'} numbers, about {times:.1f} times as fast"
        for name, times, same in alternatives(seen, link, compressions)
        if times >= 1.05
    ]
    return "; ".join([text, *words])


def slow_machine(step_s: float, waited_s: Mapping[str, float]) -> str:
    """Names the machine that all others wait for; empty where none stands out.

    What the network takes is waited for on all machines; what one machine takes longer than the
    others is waited for on all but that one.

    Args:
        step_s: seconds of a step.
        waited_s: how many of them each machine waits for others, by its name.
    """
    slowest, other, *_ = sorted(waited_s, key=waited_s.__getitem__)
    if waited_s[other] - waited_s[slowest] <= _MUCH * step_s:
        return ""
    return (
        f"{slowest} is slower than the others: a step computes there for "
        f"{_time(step_s - waited_s[slowest])}, elsewhere for {_time(step_s - waited_s[other])} "
        "at most; look at what else runs there, or give it less to do by shares"
    )


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"

"""Predicts how much faster other methods of training would be on the network between machines.

A *method* is a way to exchange gradients: hierarchical (the ranks of a machine sum up first),
compressed (bf16, int8), or DiLoCo. A step is taken to consist of computing and of sending, a part
of which is *hidden*: it goes on during the backward pass. The rest of the sending is waited for.
The times of the first steps (`Network`) are believed more than the measured speed of the link.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.communication.link import Link
from lockstep.communication.quantize import BLOCK, Method, decode, encode
from lockstep.communication.traffic import all_reduce_bytes

DILOCO_STEPS_BETWEEN_EXCHANGES = 50
# If waiting takes more than this share of a step, something can be done about it.
NOTABLE_SHARE_OF_STEP = 0.2
# A method that would make a step only a little faster is not named.
MIN_NAMED_SPEEDUP = 1.05
# At most this many values are encoded to see how long it takes.
MAX_VALUES_TRIED = 2**23


def run_delay_s() -> float:
    """Returns the seconds that this thread was ready to run and had no core; 0 if not known.

    On Linux this is the second field of `schedstat`; see the kernel's sched-stats.rst.
    """
    try:
        nanoseconds = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return nanoseconds / 1e9


class Network(NamedTuple):
    """What was seen of a step in the first steps."""

    compute_s: float
    """Seconds of a step without those of waiting."""
    waiting_s: float
    """Seconds of a step in which the rank that waits least waits for other machines."""
    gradient_bytes: int
    """Bytes of the gradients of the whole model in float32."""
    local_size: int
    """Ranks of each machine."""
    hierarchical: bool
    """True if the ranks of a machine sum up before one of them sends."""
    compressed: bool = False
    """True if gradients are sent compressed."""
    run_delay_s: float = 0.0
    """Part of `compute_s` in which the training had no core. On machines with no more cores than
    ranks the threads of the backend had it, in proportion to what they send."""

    @property
    def waiting_share(self) -> float:
        """The share of a step that is waiting."""
        return self.waiting_s / (self.compute_s + self.waiting_s)

    def sent_bytes(self, machines: int, *, hierarchical: bool) -> float:
        """Returns what each machine sends for one all-reduce of all gradients."""
        num_senders = machines if hierarchical else machines * self.local_size
        return all_reduce_bytes(self.gradient_bytes, num_senders)


class CompressionCost(NamedTuple):
    """What a compression of gradients costs."""

    sent_share: float
    """The bytes that it sends, as a share of those in float32."""
    compress_s: float = 0.0
    """Seconds of a step that it takes to copy, encode and decode the gradients."""


class Forecast(NamedTuple):
    """What another method of training would give."""

    method: str
    speedup: float
    """How many times as fast a step would be."""
    same_results: bool
    """True if the training has the same results as now, number by number."""


def measure_compression_costs(num_gradients: int, peers: int) -> dict[str, CompressionCost]:
    """Measures what it costs a rank to compress its gradients and to add up those of its peers.

    A part of the gradients is tried. For example, compressing 100 000 values takes 8 ms of a step
    (`_compression_seconds_of_step`), so compressing 1 000 000 gradients takes 80 ms.

    Args:
        num_gradients: how many gradients the rank compresses in a step.
        peers: how many machines exchange them.

    Returns:
        The cost by method of compression.
    """
    # Values are encoded in blocks of 128 (`BLOCK`), so a whole number of blocks is tried: 7 blocks
    # for 1000 gradients, and at least one.
    num_blocks = max(1, min(num_gradients, MAX_VALUES_TRIED) // BLOCK)
    num_values = num_blocks * BLOCK
    values = torch.ones(1, num_values)
    buffer = torch.empty_like(values)

    # Encoding to int8 writes the rounding errors into a tensor, as the training does to add them to
    # the next gradients. For bf16 they are not kept.
    errors_of_int8 = torch.empty_like(values)
    methods: tuple[tuple[Method, Tensor | None], ...] = (("bf16", None), ("int8", errors_of_int8))

    costs: dict[str, CompressionCost] = {}
    for method, rounding_errors in methods:
        # The first time memory is new and slow, so the shortest time counts.
        trials = [_time_compression(values, buffer, method, rounding_errors) for _ in range(3)]
        shortest_s = min(_compression_seconds_of_step(times, peers) for times in trials)
        costs[method] = CompressionCost(
            sent_share=trials[0].encoded_bytes / values.nbytes,
            compress_s=shortest_s * num_gradients / num_values,
        )
    return costs


def _compression_seconds_of_step(times: _CompressionTimes, peers: int) -> float:
    """Returns how long compression takes in a step, from the times for all gradients once.

    - Copied three times: the gradients are put together, summed up, and taken apart.
    - Encoded: all gradients once, and then the sums of the rank's own chunk. There is one chunk for
      each peer, so this is a further `1 / peers` of them.
    - Decoded: the chunks of the peers, and then the sums. Each of these has as many values as there
      are gradients.

    For example, 1, 2 and 1 ms with 2 peers give 3 * 1 + 1.5 * 2 + 2 * 1 = 8 ms.
    """
    copying_s = 3 * times.copy_s
    encoding_s = (1 + 1 / peers) * times.encode_s
    decoding_s = 2 * times.decode_s
    return copying_s + encoding_s + decoding_s


class _CompressionTimes(NamedTuple):
    """What it takes to compress some values once."""

    copy_s: float
    encode_s: float
    decode_s: float
    encoded_bytes: int


def _time_compression(
    values: Tensor, buffer: Tensor, method: Method, rounding_errors: Tensor | None
) -> _CompressionTimes:
    """Copies, encodes and decodes values, and measures each of these.

    Args:
        values: the values.
        buffer: a tensor of the same shape, which they are copied to.
        method: the method of compression.
        rounding_errors: a tensor that is filled with the rounding errors; None: they are not kept.
    """
    begin_s = time.perf_counter()
    buffer.copy_(values)
    copied_s = time.perf_counter()
    encoded = encode(buffer, method, rounding_errors)
    encoded_s = time.perf_counter()
    decode(encoded, method, buffer)
    end_s = time.perf_counter()
    return _CompressionTimes(
        copy_s=copied_s - begin_s,
        encode_s=encoded_s - copied_s,
        decode_s=end_s - encoded_s,
        encoded_bytes=encoded.nbytes,
    )


def step_seconds(compute_s: float, nbytes: float, link: Link, *, hidden_s: float = 0.0) -> float:
    """Returns how long a step takes.

    Args:
        compute_s: seconds of computing, with encoding.
        nbytes: the bytes that each machine sends in an all-reduce. It sends them in two halves, one
            after the other, so the latency counts twice.
        link: the link between the machines.
        hidden_s: seconds of the sending that go on while gradients are still computed.
    """
    sending_s = nbytes / link.bandwidth + 2 * link.latency_s
    return compute_s + max(0.0, sending_s - hidden_s)


def forecast_methods(
    network: Network, link: Link, compressions: Mapping[str, CompressionCost]
) -> list[Forecast]:
    """Predicts what other methods of training would give on this link.

    Args:
        network: the times of a step with the present method.
        link: the link as it was measured before the training.
        compressions: the cost of each compression, by its name.

    Returns:
        A forecast for each method; none if gradients are compressed already, since it is not known
        how much of a step compressing takes.
    """
    if network.compressed:
        return []

    # How long the sending of a step really takes (`sending_s`), of which `waiting_s` is waited for
    # and the rest is hidden behind the backward pass: sending_s = waiting_s + hidden_s.
    sent_now = network.sent_bytes(link.machines, hierarchical=network.hierarchical)

    # By the speed of the link that was measured before the training; see `step_seconds`.
    measured_sending_s = sent_now / link.bandwidth + 2 * link.latency_s

    # Sending takes at least as long as is waited for it. Its rest is hidden behind the backward
    # pass, which is about half of the computing.
    sending_s = max(measured_sending_s, network.waiting_s)
    sending_s = min(sending_s, network.waiting_s + network.compute_s / 2)
    hidden_s = sending_s - network.waiting_s

    # The link as the training meets it, which is often slower than measured.
    slowdown = sending_s / measured_sending_s
    link_in_training = Link(link.latency_s * slowdown, link.bandwidth / slowdown, link.machines)
    sent_by_machine = network.sent_bytes(link.machines, hierarchical=True)
    step_now_s = network.compute_s + network.waiting_s

    # For each method: the seconds `step_s` of a step with it, and the speedup step_now_s / step_s.
    forecasts: list[Forecast] = []
    if network.local_size > 1 and not network.hierarchical:
        step_s = step_seconds(
            network.compute_s, sent_by_machine, link_in_training, hidden_s=hidden_s
        )
        forecasts.append(Forecast("hierarchical", step_now_s / step_s, same_results=True))
    for name, cost in compressions.items():
        # The training has no core while the backend's threads send; what is not sent gives that
        # time back.
        run_delay_gained_s = network.run_delay_s * (1.0 - cost.sent_share)
        compute_s = network.compute_s - run_delay_gained_s + cost.compress_s
        sent_bytes = sent_by_machine * cost.sent_share
        step_s = step_seconds(compute_s, sent_bytes, link_in_training, hidden_s=hidden_s)
        forecasts.append(Forecast(name, step_now_s / step_s, same_results=False))

    # DiLoCo exchanges once in many steps, and nothing hides that exchange. The time in which the
    # training has no core comes from sending, so it too comes once in many steps.
    exchange_s = network.run_delay_s + step_seconds(0.0, sent_by_machine, link_in_training)
    step_s = network.compute_s - network.run_delay_s + exchange_s / DILOCO_STEPS_BETWEEN_EXCHANGES
    name = f"diloco every={DILOCO_STEPS_BETWEEN_EXCHANGES}"
    forecasts.append(Forecast(name, step_now_s / step_s, same_results=False))
    return forecasts


def describe_network(
    network: Network, link: Link, compressions: Mapping[str, CompressionCost]
) -> str:
    """Says how much of a step is waiting for the network; if over a fifth, also what would help.

    For example "a step computes for 80 ms and waits for other machines for 40 ms (33%); bf16: other
    numbers, about 1.3 times as fast". Here "other numbers" means that with bf16 the training would
    have different results than now; a method with "same numbers" changes no result.
    """
    text = (
        f"a step computes for {_format_seconds(network.compute_s)} and waits for other "
        f"machines for {_format_seconds(network.waiting_s)} ({network.waiting_share:.0%})"
    )
    if network.waiting_share <= NOTABLE_SHARE_OF_STEP:
        return text

    parts = [text]
    for forecast in forecast_methods(network, link, compressions):
        if forecast.speedup < MIN_NAMED_SPEEDUP:
            continue

        # Two whole texts, since each is a message that is translated.
        method = forecast.method
        speedup = forecast.speedup
        if forecast.same_results:
            parts.append(f"{method}: same numbers, about {speedup:.1f} times as fast")
        else:
            parts.append(f"{method}: other numbers, about {speedup:.1f} times as fast")
    return "; ".join(parts)


def describe_slow_machine(step_s: float, waited_s: Mapping[str, float]) -> str:
    """Names the machine that all others wait for; returns an empty text if none stands out.

    A slow machine makes all others wait, and waits itself only for the network. So the slowest
    machine is the one that waits least.

    Args:
        step_s: seconds of a step.
        waited_s: for each machine by its name, the seconds of a step in which it waits for others.
            There are two machines or more.
    """
    least_waiting_first = sorted(waited_s, key=lambda machine: waited_s[machine])
    slowest, next_slowest = least_waiting_first[:2]
    difference_s = waited_s[next_slowest] - waited_s[slowest]
    if difference_s <= NOTABLE_SHARE_OF_STEP * step_s:
        return ""

    # A machine computes while it does not wait. For example, in a step of 100 ms the slowest
    # waits 10 ms, the next slowest 60 ms, and the others longer than 60 ms. So the slowest computes
    # for 90 ms, and all others for at most 40 ms.
    computing_there = _format_seconds(step_s - waited_s[slowest])
    computing_elsewhere = _format_seconds(step_s - waited_s[next_slowest])
    return (
        f"{slowest} is slower than the others: a step computes there for {computing_there}, "
        f"elsewhere for {computing_elsewhere} "
        "at most; look at what else runs there, or give it less to do by shares"
    )


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if seconds >= 0.01 else f"{milliseconds:.2g} ms"

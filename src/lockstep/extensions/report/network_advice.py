"""Advice on the network, printed once after the first steps of a run on several machines.

It says how much of a step is *waiting* for other machines, how much faster compression or another
strategy would be (`network_forecast` estimates it), and whether one machine is slower than the
others.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.communication import routing
from lockstep.communication.link import Link
from lockstep.communication.traffic import traffic
from lockstep.distributed.process_group import Run
from lockstep.extensions.report.console import print_labelled_note
from lockstep.extensions.report.network_forecast import (
    CompressionCost,
    Network,
    describe_network,
    describe_slow_machine,
    measure_compression_costs,
    run_delay_s,
)
from lockstep.session.extension import Extension

WARMUP_STEPS = 3  # in which buckets are made and caches filled
MEASURED_STEPS = 10
BYTES_PER_GRADIENT = 4  # float32


@dataclass(frozen=True)
class _ClocksAfterStep:
    """The readings of three clocks when a step has ended. Differences give the step's times."""

    now_s: float
    waited_s: float
    """Seconds since the run began in which this rank waited for other machines."""
    run_delay_s: float
    """Seconds since the thread began in which it was ready to run but had no core."""


class _StepTimes(NamedTuple):
    """The times of a step on this rank."""

    step_s: float
    """Seconds of the whole step."""
    waiting_s: float
    """Seconds in which this rank waited for other machines."""
    run_delay_s: float
    """Seconds in which the training thread was ready to run but had no core."""


class NetworkAdvice(Extension):
    """Measures the first steps and prints the advice on rank 0.

    Communication: one exchange of a few bytes, after the last measured step.

    Args:
        run: the run, on several machines.
        link: the measured connection between the machines.
    """

    def __init__(self, run: Run, link: Link) -> None:
        self._run = run
        self._link = link
        self._clocks: list[_ClocksAfterStep] = []

    def step_finished(self, number: int) -> None:
        """Reads the clocks after a step; after the last measured step the advice is printed."""
        if len(self._clocks) == WARMUP_STEPS + MEASURED_STEPS:  # the advice was printed
            return
        self._clocks.append(_ClocksAfterStep(time.perf_counter(), traffic.waited_s, run_delay_s()))
        if len(self._clocks) == WARMUP_STEPS + MEASURED_STEPS:
            self._print_advice()

    def _measured_times(self) -> _StepTimes:
        """Returns the times of a step: the medians over the measured steps."""
        step_times = []
        waiting_times = []
        run_delays = []  # seconds in which the training thread was ready to run but had no core

        # The first measured step began when the last step of the warm-up ended.
        clocks = self._clocks[WARMUP_STEPS - 1 :]
        for before, after in itertools.pairwise(clocks):
            step_times.append(after.now_s - before.now_s)
            waiting_times.append(after.waited_s - before.waited_s)
            run_delays.append(after.run_delay_s - before.run_delay_s)

        # Not means, since the network may have been interrupted for a while.
        return _StepTimes(
            step_s=statistics.median(step_times),
            waiting_s=statistics.median(waiting_times),
            run_delay_s=statistics.median(run_delays),
        )

    def _print_advice(self) -> None:
        """Exchanges how long each rank waited in a step, and prints the advice on rank 0."""
        times = self._measured_times()
        topology = self._run.topology
        machine = f"machine {topology.node_rank} ({socket.gethostname()})"
        waiting_of_ranks = self._run.collectives.exchange([machine, times.waiting_s])
        if not topology.is_main:
            return

        # For example {"machine 0 (a)": 0.02, "machine 1 (b)": 0.05}. The slowest rank of the run is
        # the one that waits least, here on machine 0. It waits for no other rank, so its 0.02 s are
        # what every rank waits for the network.
        waiting_of_machine = _shortest_waiting_by_machine(waiting_of_ranks)
        network_waiting_s = min(waiting_of_machine.values())

        network = self._describe_network(
            times.step_s, network_waiting_s, run_delay_s=times.run_delay_s
        )
        costs = self._measure_compression_costs(network)
        print_labelled_note("network", describe_network(network, self._link, costs))
        warning = describe_slow_machine(times.step_s, waiting_of_machine)
        if warning:
            print_labelled_note("network", warning)

    def _measure_compression_costs(self, network: Network) -> dict[str, CompressionCost]:
        """Measures what compression costs a rank; each compresses a part of its machine's."""
        num_gradients = network.gradient_bytes // BYTES_PER_GRADIENT
        num_gradients_of_rank = num_gradients // network.local_size
        return measure_compression_costs(num_gradients_of_rank, peers=self._link.machines)

    def _describe_network(self, step_s: float, waiting_s: float, *, run_delay_s: float) -> Network:
        """Returns what the advice is computed from: times per step, and what is sent.

        Args:
            step_s: seconds of a step.
            waiting_s: seconds of a step that are spent waiting for the network.
            run_delay_s: seconds of a step in which the training thread was ready to run, but the
                operating system gave it no CPU core.
        """
        models = []
        for reference in self._run.prepared:
            model = reference()  # a weak reference: None if the script has dropped the model
            if model is not None:
                models.append(model)

        num_trained = 0
        for model in models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    num_trained += parameter.numel()

        compute_s = step_s - waiting_s
        num_machines = self._link.machines
        return Network(
            compute_s=compute_s,
            waiting_s=waiting_s,
            gradient_bytes=BYTES_PER_GRADIENT * num_trained,
            local_size=self._run.topology.size // num_machines,  # ranks of a machine
            # If the ranks of a machine have shared memory, they sum up their gradients there, and
            # one of them sends the sum.
            hierarchical=routing.shared_memory() is not None,
            # A model under DDP has this attribute; it is None without compression.
            compressed=any(getattr(model, "compressed", None) is not None for model in models),
            # The time without a core is a part of the computing. The kernel measures it by a clock
            # of its own, so it may seem to be a little longer than the computing.
            run_delay_s=min(run_delay_s, compute_s),
        )


def _shortest_waiting_by_machine(
    waiting_of_ranks: Sequence[tuple[str, float]],
) -> dict[str, float]:
    """Returns, for each machine, the shortest time that any of its ranks waited in a step.

    That is the time of the machine's slowest rank: all ranks wait for the network, and the faster
    ones wait for the slowest rank too.

    Args:
        waiting_of_ranks: for each rank, its machine and the seconds.
    """
    waiting_of_machine: dict[str, float] = {}
    for machine, seconds in waiting_of_ranks:
        shortest = waiting_of_machine.get(machine, seconds)
        waiting_of_machine[machine] = min(shortest, seconds)
    return waiting_of_machine

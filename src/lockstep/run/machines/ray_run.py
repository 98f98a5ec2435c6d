"""Runs a script on the nodes of a Ray cluster (`lockstep run --ray`), and waits for its end.

Ray chooses the nodes, and carries the input and output of the launchers there. Everything else is
the same as with `--hosts`: see `hosts_run`.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.errors import EXIT_SIGNAL, HostError
from lockstep.language import translate
from lockstep.machine.network import wait_until
from lockstep.run.machines import ray_placement
from lockstep.run.machines.hosts import Host, HostsSpec
from lockstep.run.machines.hosts_run import HostsRun
from lockstep.run.machines.machine_connection import MachineConnection, ShowLine
from lockstep.run.machines.ray_call import CallOutcome
from lockstep.run.machines.ray_connection import RayConnection
from lockstep.run.machines.ray_placement import RayNode
from lockstep.run.start.torchrun_flags import parse_flags, rendezvous_parameters
from lockstep.wording import count_noun

MAX_RESTARTS_OPTION = "--max-restarts"
"""torchrun's flag: how often the ranks are started again."""
ANY_FREE_PORT = "0"
"""The value of --master-port for a port that is free when the launchers meet."""
EXIT_INTERRUPTED = EXIT_SIGNAL + signal.SIGINT


def run_on_ray(address: str, spec: HostsSpec, say: Callable[[str], None]) -> int:
    """Starts a run on a Ray cluster, and ends it on all nodes when one fails.

    Args:
        address: address of the cluster, in the form that `ray.init` accepts.
        spec: the request. Its `hosts` are empty, and its `nproc` is the number of all ranks.
        say: function that shows a line to the user.

    Returns:
        The exit code of the launcher that failed first; see `lockstep.errors`.

    Raises:
        SettingError: Ray is not installed, or --nproc cannot be used.
        HostError: the run cannot be started on the cluster; then nothing is left running there.
    """
    try:
        ray_placement.connect(address, f"--ray {address}")
        return _run_while_connected(spec, say)
    except KeyboardInterrupt:  # before the nodes are known; after that, `run_on_hosts` handles it
        return EXIT_INTERRUPTED


def _run_while_connected(spec: HostsSpec, say: Callable[[str], None]) -> int:
    """Reserves places for the ranks, runs them there, and disconnects from the cluster."""
    group = None
    try:
        # A bundle is the resources of one rank, which Ray reserves together: a core and perhaps a
        # GPU.
        num_ranks = ray_placement.num_ranks(spec.nproc, spec.option)
        bundles = [ray_placement.bundle()] * num_ranks
        group = ray_placement.reserve(bundles, say)
        return RayRun(spec, group, say).run()
    finally:
        if group is not None:
            ray_placement.release(group)
        ray_placement.disconnect()


class RayRun:
    """A run of which each rank has a bundle of a placement group.

    When a node is lost, Ray places its bundles on other nodes. Then all ranks are started again, as
    often as --max-restarts allows.

    Args:
        spec: the request, whose hosts are not known yet.
        group: the placement group.
        say: function that shows a line to the user.
        call: Ray's reference to the file that each node gets (module `ray_call`); None if the ranks
            run a script.
    """

    def __init__(
        self, spec: HostsSpec, group: Any, say: Callable[[str], None], call: Any = None
    ) -> None:
        self._spec = spec
        self._group = group
        self._say = say
        self._called_function = call
        self._hosts_run: HostsRun | None = None
        self._connections: list[RayConnection] = []
        """The connections to the nodes on which the ranks were last started, in their order."""
        self.outcomes: list[CallOutcome | None] = []
        """How the call has ended on each of these nodes; None where the launcher was lost."""
        self.interrupted_by: int | None = None
        """The number of the first signal that was sent to this command (`interrupt`)."""

    def run(self) -> int:
        """Carries out the run, with restarts; see `run_on_ray`."""
        restarts_left = int(self._spec.torchrun_flag(MAX_RESTARTS_OPTION) or 0)
        while self.interrupted_by is None:
            exit_code = self._run_on_nodes(restarts_left)

            # A lost node or a killed rank gives the exit code EXIT_LOST_RANK. A code above
            # EXIT_SIGNAL says that a signal was sent to the run itself.
            was_ended_by_signal = exit_code > EXIT_SIGNAL
            if was_ended_by_signal or restarts_left == 0:
                return exit_code

            lost_nodes = self._lost_nodes()
            if not lost_nodes:
                return exit_code
            if not ray_placement.have_died(lost_nodes):
                return exit_code  # only the helper on a node has ended

            restarts_left -= 1
            self._wait_until_replaced(lost_nodes, restarts_left)

        return EXIT_SIGNAL + self.interrupted_by

    def interrupt(self, number: int) -> None:
        """Passes a signal on to the run. It may be called in any thread."""
        if self.interrupted_by is None:
            self.interrupted_by = number
        if self._hosts_run is not None:
            self._hosts_run.interrupt(signal.Signals(number).name)

    def _run_on_nodes(self, restarts_left: int) -> int:
        """Starts the ranks on the nodes that have their bundles now, and waits for their end.

        A bundle is what Ray has reserved for a rank on one of the nodes. The ranks run a script, or
        the function that `lockstep.launch` was called with.

        Returns:
            The exit code, see `run_on_hosts`.
        """
        self._connections = []

        def make_and_note_connection(host: Host, show: ShowLine) -> MachineConnection:
            assert isinstance(host, RayNode)
            connection = RayConnection(host, self._group, show, self._called_function)
            self._connections.append(connection)
            return connection

        spec = self._spec.with_torchrun_flag(MAX_RESTARTS_OPTION, str(restarts_left))
        nodes = ray_placement.nodes_of_group(self._group)
        spec = _spec_with_nodes(spec, nodes)
        self._hosts_run = HostsRun(spec, self._say, make_and_note_connection)
        try:
            return self._hosts_run.run()
        finally:
            if self._called_function is not None:
                self.outcomes = [connection.take_outcome() for connection in self._connections]
            for connection in self._connections:
                connection.end()

    def _lost_nodes(self) -> list[RayNode]:
        """Returns the nodes to which the connection was lost while the ranks were running."""
        return [connection.node for connection in self._connections if connection.exit_code is None]

    def _wait_until_replaced(self, lost_nodes: list[RayNode], restarts_left: int) -> None:
        """Waits until Ray has placed all bundles on nodes that it has, or the run is interrupted.

        Raises:
            HostError: Ray has not placed them within the time that nodes wait for each other.
        """
        names = " and ".join(node.name for node in lost_nodes)
        self._say(
            f"Ray has lost {names}: the ranks start again as soon as each of them has a place; "
            f"{count_noun(restarts_left, 'restart')} left after that"
        )

        timeout_s = self._join_timeout_s()

        def is_over() -> bool:
            return ray_placement.is_placed(self._group) or self.interrupted_by is not None

        if wait_until(is_over, time.monotonic() + timeout_s):
            return

        raise HostError(
            f"{self._spec.option}: a run that has lost {names}",
            f"within {timeout_s:g} s its ranks have found no place on other nodes: "
            + ray_placement.describe_shortage(self._group),
            "add a node, or start fewer ranks: checkpoints can be resumed on any number of them",
        )

    def _join_timeout_s(self) -> float:
        """Returns how long nodes wait for each other, which --rdzv-conf timeout=SECONDS may set."""
        # Imports torch, which `lockstep run --help` and a start on this machine do without.
        from lockstep.run.machines.rendezvous_settings import join_timeout

        # The flag is read only for several nodes, and the parser requires a script.
        flags = parse_flags([*self._spec.torchrun, "--nnodes=2", "script"])
        return join_timeout(rendezvous_parameters(flags))


def describe(address: str, spec: HostsSpec) -> str:
    """Describes for `--dry-run` what would be started, in the language of this process.

    The cluster is not connected to, so "N" stands for the number of ranks on a node.
    """
    any_node = Host(name="NODE", nproc="N")
    run_on_any_node = replace(spec, hosts=(any_node,))
    # With one host, the address and the port are not among the arguments.
    arguments = run_on_any_node.launcher_arguments(node_rank=0, address="", port=0)
    variables = ", ".join(sorted(spec.environment)) or translate("none")
    return "\n".join(
        [
            translate(
                f"on the Ray cluster at {address}, for all ranks (--nproc {spec.nproc}): a GPU and "
                "a core each, or a core if it has no GPUs"
            ),
            translate("on each node, for the N ranks there:"),
            f"  lockstep {shlex.join(arguments)}",
            translate(f"variables that are sent: {variables}, and a token"),
        ]
    )


def _spec_with_nodes(spec: HostsSpec, nodes: list[RayNode]) -> HostsSpec:
    """Returns the request for nodes that are now known, with the address where they meet.

    The port there is any free port: Ray may start several runs on one node at once, which would all
    choose the usual port.
    """
    placed = spec.on_machines(nodes)
    if len(nodes) == 1:  # it has nobody to meet
        return placed

    flags = list(placed.torchrun)
    if spec.torchrun_flag("--master-addr") is None:
        flags += ["--master-addr", nodes[0].ip_address]
    if spec.torchrun_flag("--master-port") is None:
        flags += ["--master-port", ANY_FREE_PORT]
    return replace(placed, torchrun=flags)

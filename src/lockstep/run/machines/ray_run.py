"""Runs a script on the nodes of a Ray cluster (`lockstep run --ray`), and waits for its end.

Ray chooses the nodes, and carries the input and output of the launchers there. Everything else is
the same as with `--hosts`: see `ssh_run`.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from dataclasses import replace

from lockstep.run.machines import ray_placement
from lockstep.run.machines.hosts import Host, HostsSpec
from lockstep.run.machines.ray_connection import RayRemote
from lockstep.run.machines.ray_placement import RayNode
from lockstep.run.machines.ssh_connection import Remote, ShowLine
from lockstep.run.machines.ssh_run import run_on_hosts

EXIT_INTERRUPTED = 128 + signal.SIGINT


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
        ray_placement.connect(address)
        return _run_while_connected(spec, say)
    except KeyboardInterrupt:  # before the nodes are known; after that, `run_on_hosts` handles it
        return EXIT_INTERRUPTED


def _run_while_connected(spec: HostsSpec, say: Callable[[str], None]) -> int:
    """Reserves places for the ranks, runs them there, and disconnects from the cluster."""
    group = None
    try:
        bundles = [ray_placement.bundle()] * ray_placement.num_ranks(spec.nproc)
        group = ray_placement.reserve(bundles, say)
        nodes = ray_placement.nodes_of_group(group)

        def connect(host: Host, show: ShowLine) -> Remote:
            assert isinstance(host, RayNode)
            return RayRemote(host, group, show)

        return run_on_hosts(_spec_with_nodes(spec, nodes), say, connect)
    finally:
        if group is not None:
            ray_placement.release(group)
        ray_placement.disconnect()


def describe(address: str, spec: HostsSpec) -> str:
    """Describes what would be started, for `--dry-run`, without connecting to the cluster."""
    # With a single host, the arguments contain no node rank, address and port.
    example = replace(spec, hosts=(Host("NODE", "N"),))
    arguments = example.launcher_arguments(node_rank=0, address="", port=0)
    variables = ", ".join(sorted(spec.environment)) or "none"
    return "\n".join(
        [
            f"on the Ray cluster at {address}, for all ranks (--nproc {spec.nproc}): a GPU and a "
            "core each, or a core if it has no GPUs",
            "on each node, for the N ranks there:",
            f"  lockstep {shlex.join(arguments)}",
            f"variables that are sent: {variables}, and a token",
        ]
    )


def _spec_with_nodes(spec: HostsSpec, nodes: list[RayNode]) -> HostsSpec:
    """Returns the request for nodes that are now known."""
    placed = spec.on_machines(nodes)
    if len(nodes) == 1 or spec.torchrun_flag("--master-addr") is not None:
        return placed
    return replace(placed, torchrun=[*placed.torchrun, "--master-addr", nodes[0].ip_address])

"""Starts a run on the nodes of a Ray cluster (--ray)."""

from __future__ import annotations

import os

import click

from lockstep.cli.output import say
from lockstep.cli.places.other_machines import spec_for_unknown_machines
from lockstep.cli.places.place import Place
from lockstep.cli.run_options import check_settings
from lockstep.errors import SettingError
from lockstep.run.machines import ray_run
from lockstep.run.machines.ray_placement import RUNNING_CLUSTER


class RayCluster(Place):
    """The nodes of a Ray cluster."""

    def __init__(self, ctx: click.Context, script: str, args: tuple[str, ...]) -> None:
        self._address: str = ctx.params["ray"]
        self._spec = spec_for_unknown_machines(ctx, script, args, "--ray")

        # With `--nproc auto`, the number of processes is only known on the machines.
        num_processes = int(self._spec.nproc) if self._spec.nproc.isdigit() else None
        check_settings(ctx, os.environ, num_processes)

    def describe(self) -> str:
        """Describes what would be started, without connecting to the cluster."""
        return ray_run.describe(self._address, self._spec)

    def start(self) -> int:
        """Starts launchers on the nodes that Ray chooses, and waits for their end."""
        return ray_run.run_on_ray(self._address, self._spec, say)


def check_ray_address(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Checks the address that is given with --ray.

    In `lockstep run --ray train.py`, the user forgot the address, and click takes the script as the
    value of --ray. This is the callback of the option.

    Raises:
        SettingError: it is not the address of a Ray cluster.
    """
    if value is None or value == RUNNING_CLUSTER or ":" in value:
        return value

    raise SettingError(
        f"--ray {value}",
        "this is not the address of a Ray cluster, which has a port",
        f"write --ray={RUNNING_CLUSTER} for the cluster that runs on this machine, or "
        "--ray=HOST:6379",
    )

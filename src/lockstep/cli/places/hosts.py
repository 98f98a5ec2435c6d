"""Starts a run on the machines of --hosts, by ssh."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from lockstep.cli.output import say
from lockstep.cli.places.other_machines import spec_for_unknown_machines
from lockstep.cli.places.place import Place
from lockstep.cli.run_options import check_settings
from lockstep.errors import SettingError
from lockstep.run.machines.hostfile import parse_hosts
from lockstep.run.machines.hosts import HostsSpec, current_folder
from lockstep.run.machines.hosts_run import run_on_hosts
from lockstep.run.machines.ssh_command import SshCommand

HOST_WORD_PATTERN = re.compile(r"[\w.@:,\[\]/-]+")
"""What a host, or the path of a script, consists of."""


class Hosts(Place):
    """The machines of --hosts."""

    def __init__(self, ctx: click.Context, script: str, args: tuple[str, ...]) -> None:
        self._spec = _hosts_spec(ctx, script, args)
        check_settings(ctx, os.environ, _num_processes_on_hosts(self._spec))

    def describe(self) -> str:
        """Describes what would be started on each machine."""
        return self._spec.describe()

    def start(self) -> int:
        """Starts launchers on all machines, and waits for their end."""
        return run_on_hosts(self._spec, say)


def _hosts_spec(ctx: click.Context, script: str, args: tuple[str, ...]) -> HostsSpec:
    """Returns the request for a run on the machines of --hosts.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.

    Raises:
        SettingError: one of torchrun's flags cannot be used with --hosts, there is no such script,
            or --copy would send too much.
    """
    _check_no_hosts_after_spaces(ctx, script, args)  # as in `--hosts node1 node2 train.py`
    spec_without_machines = spec_for_unknown_machines(ctx, script, args, "--hosts")

    folder = Path(current_folder())
    if ctx.params["copy"] and folder in (Path("/"), Path.home().resolve()):
        raise SettingError(
            "--copy",
            f"all of {folder} would be sent",
            "start the run in the project's own folder",
        )

    ssh = SshCommand.parse(ctx.params["ssh"])
    machines = parse_hosts(ctx.params["hosts"])
    goes_on_if_connection_is_lost = ctx.params["on_lost"] == "keep"
    return replace(
        spec_without_machines.on_machines(machines),
        ssh=ssh,
        copy=ctx.params["copy"],
        keep=goes_on_if_connection_is_lost,
    )


def _num_processes_on_hosts(spec: HostsSpec) -> int | None:
    """Returns the world size of a run on the machines of --hosts.

    It is None if it is not known yet, since the number of processes depends on the machine, as with
    --nproc=auto.
    """
    total = 0
    for host in spec.hosts:
        nproc = str(host.nproc or spec.nproc)
        if not nproc.isdigit():
            return None
        total += int(nproc)
    return total


def _check_no_hosts_after_spaces(ctx: click.Context, script: str, args: Sequence[str]) -> None:
    """Checks that hosts are not separated by spaces, as in `--hosts node1 node2 train.py`.

    In this example `node2` is given as the script, and there is no such file.

    Raises:
        SettingError: the words behind --hosts are hosts, with a script behind them.
    """
    if ctx.params["module"] or Path(script).exists():
        return

    words = [script, *args]
    num_hosts = _num_hosts_before_script(words)
    if num_hosts is None:
        return

    first_hosts = ctx.params["hosts"]  # node1
    more_hosts = words[:num_hosts]  # node2
    actual_script = words[num_hosts]  # train.py
    joined = ",".join(host.rstrip(",") for host in (first_hosts, *more_hosts))
    corrected = " ".join(["--hosts", joined, actual_script])
    raise SettingError(
        f"--hosts {first_hosts} {' '.join(more_hosts)}",
        "a space ends the list of hosts",
        f"separate them by commas: {corrected}",
    )


def _num_hosts_before_script(words: Sequence[str]) -> int | None:
    """Returns how many words stand before the script, if all of them may be hosts.

    For `["node2", "train.py", "--lr", "1"]` it is 1. It is None if there is no script, or if a word
    before it cannot be a host.
    """
    for position, word in enumerate(words):
        may_be_host_or_script = HOST_WORD_PATTERN.fullmatch(word) and not word.startswith("-")
        if not may_be_host_or_script:
            return None
        if word.endswith(".py") and Path(word).is_file():
            return position
    return None

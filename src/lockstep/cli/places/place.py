"""Defines what a place does for `lockstep run`, and what it tells the launchers that it starts."""

from __future__ import annotations

import abc

import click

from lockstep.cli.file_defaults import file_and_its_options
from lockstep.cli.place_options import PlaceOption
from lockstep.cli.run_options import is_given
from lockstep.cli.torchrun_options import TORCHRUN_FLAGS


class Place(abc.ABC):
    """Where the run of a command is started. The constructor checks all that is given.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.

    Raises:
        SettingError: something that is given cannot be used in this place.
    """

    @abc.abstractmethod
    def __init__(self, ctx: click.Context, script: str, args: tuple[str, ...]) -> None: ...

    @abc.abstractmethod
    def describe(self) -> str:
        """Describes for `--dry-run` what would be started, in the language of this process."""

    @abc.abstractmethod
    def start(self) -> int | None:
        """Starts the run, and waits for its end.

        Returns:
            The exit code of the run; None if this command only hands the run over.
        """


def launcher_arguments(ctx: click.Context, script: str, args: tuple[str, ...]) -> list[str]:
    """Returns the arguments for `lockstep run` on another machine: everything that was given here.

    Only --nproc, --dry-run and the options that say where the run is started are left out.
    """
    module_flag = ["-m"] if ctx.params["module"] else []
    return [*given_options(ctx), *ctx.meta[TORCHRUN_FLAGS], *module_flag, script, *args]


def given_options(ctx: click.Context) -> list[str]:
    """Returns the options that the user gave, as words of a command line for other launchers.

    Options from the launch file are included, as other launchers do not read it. Options that these
    launchers do not get, or get in another way, are left out.
    """
    # Says which of the options come from a launch file: "lockstep.toml: nproc, precision".
    words = [f"--from-file={file_and_its_options(ctx)}"]

    left_out = {"nproc", "module"}  # the caller passes them on
    left_out |= {"dry_run", "launch_file"}  # they are for this command only
    left_out |= {"from_file"}  # it is among the words already
    for param in ctx.command.params:
        name = str(param.name)
        if not isinstance(param, click.Option):  # the script and its arguments
            continue
        if isinstance(param, PlaceOption):  # it says where the run is started
            continue
        if name in left_out or not is_given(ctx, name):
            continue

        value = ctx.params[name]
        if not param.is_flag:
            words += [param.opts[0], str(value)]
        elif value:
            words.append(param.opts[0])
        else:
            words.append(param.secondary_opts[0])  # the negative flag, such as --no-warm

    return words

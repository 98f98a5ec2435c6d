"""Implements `lockstep run`: starts a script on several processes, of this machine or of several.

A *launcher* starts and watches the processes of one machine. `lockstep run` either is the launcher
of this machine, or starts launchers elsewhere: by ssh (`--hosts`), on a Ray cluster (`--ray`), or
as a job of the scheduler Slurm. It accepts torchrun's flags among its own options, and passes them
on. A *launch file* holds options in TOML.
"""

from __future__ import annotations

import signal
import unicodedata
from pathlib import Path
from typing import Any

import click

from lockstep.cli import run_help
from lockstep.cli.file_defaults import (
    TorchrunOptionsNeeded,
    keep_source,
    options_come_from_other_launcher,
    read_defaults,
)
from lockstep.cli.misplaced_options import (
    flags_of,
    misplaced_option_hint,
    say_if_options_are_not_read,
)
from lockstep.cli.output import say
from lockstep.cli.place_options import (
    PlaceOption,
    check_place_options,
    chosen_places,
    drop_overridden_places,
)
from lockstep.cli.places.here import ThisMachine
from lockstep.cli.places.hosts import Hosts
from lockstep.cli.places.place import Place
from lockstep.cli.places.ray import RayCluster, check_ray_address
from lockstep.cli.places.slurm import NewSlurmJob, PresentSlurmJob, placement_in_job
from lockstep.cli.run_options import as_user_wrote_it, comes_from_file, setting_options
from lockstep.cli.second_launcher import check_no_second_launcher
from lockstep.cli.torchrun_options import TORCHRUN_FLAGS, TORCHRUN_OPTIONS, torchrun_options
from lockstep.cli.unknown_option import (
    advice_on_foreign_option,
    familiar_option,
    similar_option,
)
from lockstep.errors import SettingError
from lockstep.run.machines.ray_placement import RUNNING_CLUSTER
from lockstep.run.start.plan import HangRules

PLACES: dict[str, type[Place]] = {"hosts": Hosts, "ray": RayCluster, "slurm": NewSlurmJob}
"""The places where a run can be started, by the names of the options that choose them."""
REFUSED_ARGUMENT_EXIT_CODE = 2
"""The exit code with which argparse and click end a script that gets an unknown argument."""


class RunCommand(click.Command):
    """A command that accepts torchrun's flags among its own options, before the script."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the parameters of the command, including torchrun's flags once they are known."""
        return [*super().get_params(ctx), *ctx.meta.get(TORCHRUN_OPTIONS, ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command line, and collects torchrun's flags in `ctx.meta[TORCHRUN_FLAGS]`.

        Torchrun's flags are only read if a flag, or a key of the launch file, is unknown, as that
        imports torch. Then the command line is parsed a second time.

        Raises:
            SettingError: neither this command nor torchrun has a flag.
        """
        ctx.allow_interspersed_args = False  # words after the script belong to the script
        ctx.meta[TORCHRUN_FLAGS] = []
        try:
            return self._parse(ctx, args)
        except (click.NoSuchOption, TorchrunOptionsNeeded):
            self._add_torchrun_options(ctx)  # the unknown flag or key may be one of these

        try:
            return self._parse(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown_flag_error(self, ctx, error.option_name) from None

    def _add_torchrun_options(self, ctx: click.Context) -> None:
        """Reads torchrun's flags, which `get_params` also returns from now on."""
        own_flags = flags_of(self)
        options = []
        for option in torchrun_options():
            if own_flags.isdisjoint(option.opts):  # otherwise this command has the flag itself
                options.append(option)
        ctx.meta[TORCHRUN_OPTIONS] = options

    def _parse(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command line with the options that are known so far.

        Raises:
            SettingError: a value in the launch file is not valid.
        """
        try:
            return super().parse_args(ctx, [*args])  # a copy, since click empties the list
        except click.BadParameter as error:
            param = error.param
            if param is None or not comes_from_file(ctx, str(param.name)):
                raise
            was_set = as_user_wrote_it(ctx, param)
            raise SettingError(was_set, error.message, "correct it, or leave it out") from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples and the groups of options for `--help`."""
        run_help.write_options(self, ctx, formatter)


def _unknown_flag_error(command: click.Command, ctx: click.Context, flag: str) -> SettingError:
    """Returns the error for a flag that neither this command nor torchrun has."""
    found = "neither Lockstep nor torchrun has this flag"
    our_flag = familiar_option(command, ctx, flag)
    if our_flag is not None:
        return SettingError(flag, found, f"use {our_flag} instead")

    advice = advice_on_foreign_option(command, ctx, flag)
    if advice is not None:
        return SettingError(flag, found, advice)

    # "--nproc＝2" with a full-width equals sign, which Chinese input methods write.
    ascii_flag = unicodedata.normalize("NFKC", flag)
    if ascii_flag != flag and ascii_flag.isascii():
        return SettingError(
            flag, "it has full-width characters", f"type them in half width: {ascii_flag}"
        )

    do = "the script's own arguments go after the script: lockstep run SCRIPT " + flag
    similar_flag = similar_option(command, ctx, flag)
    if similar_flag is not None:
        do = f"did you mean {similar_flag}? If not, {do}"

    return SettingError(flag, found, do)


@click.command(
    cls=RunCommand,
    options_metavar="[OPTIONS] [TORCHRUN'S FLAGS]",
    short_help="Starts a script on several processes.",
    epilog=run_help.EPILOG,
)
@click.option(
    "--nproc",
    *run_help.OTHER_SPELLINGS,
    metavar="N|auto|gpu|cpu",
    help="Processes per machine; auto: one per GPU, without GPUs one per core.  [default: 1]",
)
@click.option(
    "--hosts",
    cls=PlaceOption,
    places=("hosts",),
    metavar="A,B:N|FILE",
    help="Start on these machines, with N processes each; or a hostfile (B slots=N).",
)
@click.option(
    "--copy",
    cls=PlaceOption,
    places=("hosts",),
    is_flag=True,
    help="Send this folder to them first, by rsync.",
)
@click.option(
    "--on-lost",
    cls=PlaceOption,
    places=("hosts",),
    type=click.Choice(["stop", "keep"]),
    default="stop",
    help="When the connection to a machine is lost: stop the run, or let it continue.",
)
@click.option(
    "--forward-env",
    cls=PlaceOption,
    places=("hosts", "ray"),
    multiple=True,
    metavar="NAME",
    help="Send this variable too, besides NCCL_... and similar ones; may be repeated.",
)
@click.option(
    "--ssh",
    cls=PlaceOption,
    places=("hosts",),
    default="ssh",
    metavar="COMMAND",
    help="The ssh command, such as 'ssh -F config'.",
)
@click.option(
    "--ray",
    cls=PlaceOption,
    places=("ray",),
    is_flag=False,
    flag_value=RUNNING_CLUSTER,
    metavar="[ADDRESS]",
    callback=check_ray_address,
    help="Start on a Ray cluster, one process per GPU; --nproc is the number of all of them.",
)
@click.option(
    "--slurm",
    cls=PlaceOption,
    places=("slurm",),
    is_flag=True,
    help="Submit the run to Slurm as a job.",
)
@click.option(
    "--nodes",
    cls=PlaceOption,
    places=("slurm",),
    type=click.IntRange(min=1),
    metavar="N",
    help="How many machines.  [default: 1]",
)
@click.option(
    "--gpus-per-node",
    cls=PlaceOption,
    places=("slurm",),
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs of each machine, with a process each.",
)
@click.option(
    "--time", cls=PlaceOption, places=("slurm",), metavar="HH:MM:SS", help="Time limit of the job."
)
@click.option(
    "--sbatch",
    cls=PlaceOption,
    places=("slurm",),
    multiple=True,
    metavar="OPTION",
    help="Another option of sbatch, such as --partition=gpu; may be repeated.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option(
    "--launch-file",
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=read_defaults,
    help="Read options from FILE.  [default: the nearest lockstep.toml or pyproject.toml]",
)
@click.option("--from-file", is_eager=True, expose_value=False, hidden=True, callback=keep_source)
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the script's output and failures.")
@click.option(
    "--warm/--no-warm",
    default=True,
    help="Fork ranks from a process that has imported torch; --no-warm: fresh interpreters.",
)
@click.option(
    "--keep-in-memory/--no-keep-in-memory",
    default=None,
    help="Keep the last step in memory, to resume from.  [default: with --max-restarts, as often "
    "as is cheap]",
)
@click.option(
    "--on-hang",
    type=click.Choice(["stop", "report"]),
    default="stop",
    help="When the ranks hang: stop the run, or only report it.",
)
@click.option(
    "--hang-after",
    type=click.FloatRange(min=1.0),
    default=HangRules.after,
    metavar="SECONDS",
    help="Look for a hang after this long without a step.",
)
@click.option(
    "--local-rank-argument",
    type=click.Choice(["local_rank", "local-rank", "none"]),
    help="Pass the local rank to the script as this argument.  [default: if it defines one]",
)
@setting_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **_: Any) -> None:
    """Starts SCRIPT on several processes, watches them, and ends all of them when one fails."""
    # The other options are read from `ctx.params`, each where it is needed.
    drop_overridden_places(ctx)
    check_place_options(ctx)
    _check_report_names_folder(ctx.params["report"])
    check_no_second_launcher(ctx.params["nproc"], script, args, ctx.params["module"])
    place = _chosen_place(ctx, script, args)

    # If another launcher has started this command, it has already said which options are not read.
    if not options_come_from_other_launcher(ctx):
        say_if_options_are_not_read(ctx, script, args, say)

    if ctx.params["dry_run"]:
        click.echo(place.describe())
        return
    exit_code = place.start()
    if exit_code is not None:
        _exit_with_hint(ctx, exit_code, script, args)


def _chosen_place(ctx: click.Context, script: str, args: tuple[str, ...]) -> Place:
    """Returns where the run is started, by the options and by the job of Slurm that this is in."""
    options = chosen_places(ctx)
    if options:
        only_option = options[0]  # `check_place_options` rejects a second one
        place_class = PLACES[only_option]
        return place_class(ctx, script, args)

    # In a job of Slurm, srun may have to start a launcher on each of its nodes.
    placement = placement_in_job(ctx)
    if placement is not None and placement.srun_nodes:
        return PresentSlurmJob(ctx, script, args, placement)
    return ThisMachine(ctx, script, args, placement)


def _check_report_names_folder(report: str | None) -> None:
    """Checks that --report, which takes a folder, was not given the name of a tracking service.

    The service is named by `lockstep report FOLDER --to tensorboard`, after the run. A folder may
    have the name of a service too, which is certain if it holds the record of an earlier run.
    """
    if report not in ("tensorboard", "wandb", "mlflow"):
        return
    if not _has_record(Path(report)):
        do = f"name one, and afterwards: lockstep report FOLDER --to {report}"
        raise SettingError(f"--report {report}", "it takes a folder for the record", do)


def _has_record(folder: Path) -> bool:
    """Returns True if a folder contains the record of a run, as written with --report."""
    from lockstep.extensions.report.record_format import RECORD_SUFFIX

    return any(folder.glob(f"*{RECORD_SUFFIX}"))


def _exit_with_hint(ctx: click.Context, exit_code: int, script: str, args: tuple[str, ...]) -> None:
    """Exits with the exit code of the run, after a hint if the script has refused its arguments.

    In `lockstep run train.py --nproc 2`, the option `--nproc` stands after the script, so it is
    passed to the script. If the script ended because it does not know this argument, a hint about
    the order is printed first.
    """
    if exit_code == REFUSED_ARGUMENT_EXIT_CODE:
        hint = misplaced_option_hint(ctx, script, args)
        if hint:
            say(hint)

    # The run has ended, and Ctrl-C would only replace its exit code by another one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctx.exit(exit_code)

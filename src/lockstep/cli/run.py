"""Implements `lockstep run`: starts a script on several processes, of this machine or of several.

A *launcher* starts and watches the processes of one machine. `lockstep run` either is the launcher
of this machine, or starts launchers elsewhere: by ssh (`--hosts`), on a Ray cluster (`--ray`), or
as a job of the scheduler Slurm. It accepts torchrun's flags among its own options, and passes them
on. A *launch file* holds options in TOML.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lockstep.cli import launch_file, run_help
from lockstep.cli.launch_file import LaunchFile
from lockstep.cli.run_options import (
    LAUNCH_FILE,
    as_user_wrote_it,
    check_nproc,
    check_settings,
    comes_from_file,
    is_given,
    setting_options,
)
from lockstep.cli.unknown_option import (
    MIN_SIMILARITY_AFTER_SCRIPT,
    familiar_option,
    similar_option,
)
from lockstep.errors import SettingError
from lockstep.language import translate
from lockstep.machine.topology import LAUNCHER_VARIABLE, scheduler_of_several_tasks_here
from lockstep.run.machines import ray_run, slurm, slurm_batch
from lockstep.run.machines.hostfile import parse_hosts
from lockstep.run.machines.hosts import (
    HostsSpec,
    current_folder,
    forwarded_environment,
    ssh_command,
)
from lockstep.run.machines.ray_placement import RUNNING_CLUSTER
from lockstep.run.machines.ssh_run import run_on_hosts
from lockstep.run.start.plan import HangRules, LaunchSpec
from lockstep.run.start.rank_imports import without_garbage_collection
from lockstep.run.start.step_memory import check_keep_in_memory
from lockstep.run.start.torchrun_flags import (
    TorchrunFlags,
    check_flags_usable_with,
    flag_of_variable,
    is_torchrun_variable,
    parse_flags,
    variable_of_flag,
)
from lockstep.run.start.unread_arguments import misplaced_launcher_options, never_reads_arguments
from lockstep.run.start.worker import Script
from lockstep.settings import DECLARATIONS, FROM_FILE_VARIABLE, QUIET_VARIABLE, is_quiet
from lockstep.units import parse_seconds
from lockstep.wording import did_you_mean

# Keys of click's context.
TORCHRUN_FLAGS = "lockstep.torchrun_flags"  # the flags of torchrun that were given, as a list
TORCHRUN_OPTIONS = "lockstep.torchrun_options"  # torchrun's flags as click's options

PLACES = ("hosts", "ray", "slurm")
"""Options that say where a run takes place."""
OPTIONS_FROM_FILE = "lockstep.options_from_file"
"""Key of click's context: which options of the launcher that has started this one come from a
launch file."""

TORCHRUN_NAME_PREFIX = "torchrun_"
"""The prefix of the names of click's options that stand for torchrun's flags."""

OPTIONS_OF_HOSTS = ("hosts", "copy", "on_lost", "forward_env", "ssh")
OPTIONS_OF_RAY = ("ray", "forward_env")
OPTIONS_OF_SLURM = ("slurm", "nodes", "gpus_per_node", "time", "sbatch")
"""The options that say where the run is started. The first of each group makes the others valid."""

NOT_IN_A_LAUNCH_FILE = ("launch_file", "from_file", "help")
"""Options that have no key in a launch file."""

MODULES_OF_LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "lockstep",
)
"""Modules that start a script on several processes, as `lockstep run` does."""
PROGRAMS_OF_LAUNCHERS = (
    *("accelerate", "deepspeed", "fabric", "horovodrun", "lockstep", "mpiexec", "mpirun"),
    *("srun", "torchrun"),
)
"""Programs that do the same."""
TORCHELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
"""The variable that the ranks of torchrun have."""

HOST_WORD_PATTERN = re.compile(r"[\w.@:,\[\]/-]+")
"""What a host, or the path of a script, consists of."""

REFUSED_ARGUMENT_EXIT_CODE = 2
"""The exit code with which argparse and click end a script that gets an unknown argument."""


class TorchrunOptionsNeeded(Exception):
    """A key of the launch file is unknown, but may be an option of torchrun's, which have not been
    read yet.
    """


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
        own_flags = _flags_of(self)
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


def _flags_of(command: click.Command) -> set[str]:
    """Returns every flag of a command: `--nproc`, `--module`, `-m`, ..."""
    flags: set[str] = set()
    for param in command.params:
        flags.update(param.opts)
    return flags


def _unknown_flag_error(command: click.Command, ctx: click.Context, flag: str) -> SettingError:
    """Returns the error for a flag that neither this command nor torchrun has."""
    found = "neither Lockstep nor torchrun has this flag"
    our_flag_or_advice = familiar_option(command, ctx, flag)
    if our_flag_or_advice is not None:
        if our_flag_or_advice.startswith("--"):
            our_flag = our_flag_or_advice
            return SettingError(flag, found, f"use {our_flag} instead")
        return SettingError(flag, found, our_flag_or_advice)

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


def _keep_source(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Keeps the value of --from-file, by which another launcher says which options come from a
    file.
    """
    if value is not None:
        ctx.meta[OPTIONS_FROM_FILE] = value


def _read_launch_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Makes the values of the launch file the defaults of the options.

    This is the callback of --launch-file. Click calls it before it handles the other options, and
    once more if `RunCommand.parse_args` parses the command line a second time.

    Args:
        ctx: the context of the command.
        param: the option --launch-file.
        value: path of the file; None to search for one.

    Raises:
        SettingError: there is no such file, or it has a key or a value that no option has.
        TorchrunOptionsNeeded: see `_defaults_from_file`.
    """
    if _has_options_from_other_launcher(ctx):
        return

    if value is None:
        file = launch_file.find_launch_file(Path(current_folder()))
    else:
        file = launch_file.read_launch_file(Path(value))

    if file is not None:
        ctx.meta[LAUNCH_FILE] = file
        ctx.default_map = _defaults_from_file(ctx, file, os.environ)


def _has_options_from_other_launcher(ctx: click.Context) -> bool:
    """Returns True if another launcher has read the launch file, and has started this command.

    With --hosts, for example, the user's command starts this one on each machine, with the options
    of the file and with --from-file, whose callback `_keep_source` was called before.
    """
    return OPTIONS_FROM_FILE in ctx.meta


def _defaults_from_file(
    ctx: click.Context, file: LaunchFile, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the values of a launch file, by the names of click's parameters.

    Values that are also set by environment variables (`environ`) are left out, as the variables
    override the file.

    Raises:
        SettingError: a key of the file is an option neither of this command nor of torchrun.
        TorchrunOptionsNeeded: a key is not an option of this command, but may be one of torchrun's.
    """
    option_of_key = _options_by_key(ctx)  # with torchrun's options, once they have been read
    defaults = {}
    for key in file.values:
        if key not in option_of_key:
            if TORCHRUN_OPTIONS not in ctx.meta:
                raise TorchrunOptionsNeeded
            raise _unknown_key_error(file, key, option_of_key)

        option = option_of_key[key]
        is_set_by_variable = any(environ.get(name) for name in _variables_of_option(option))
        if not is_set_by_variable:
            defaults[str(option.name)] = _default_from_file(option, file, key)

    return defaults


def _unknown_key_error(file: LaunchFile, key: str, known_keys: Iterable[str]) -> SettingError:
    """Returns the error for a key of a launch file that is no option."""
    if isinstance(file.values[key], dict):
        return SettingError(
            f"the table [{key}] in {file.name}",
            "options do not stand in tables of their own",
            "write them at the top of lockstep.toml, or under [tool.lockstep] in pyproject.toml",
        )

    return SettingError(
        f"{key} in {file.place_of(key)}",
        "lockstep run has no such option",
        did_you_mean(key, known_keys, "lockstep run --help lists them"),
    )


def _options_by_key(ctx: click.Context) -> dict[str, click.Option]:
    """Returns the options by their keys in a launch file: `nproc` for `--nproc`."""
    option_of_key: dict[str, click.Option] = {}
    for param in ctx.command.get_params(ctx):
        if not isinstance(param, click.Option) or param.name in NOT_IN_A_LAUNCH_FILE:
            continue
        for spelling in param.opts:
            if spelling.startswith("--"):
                option_of_key[spelling.removeprefix("--").replace("_", "-")] = param
    return option_of_key


def _variables_of_option(option: click.Option) -> list[str]:
    """Returns the environment variables that can be set instead of an option.

    Those of Lockstep begin with LOCKSTEP_, those of torchrun with PET_, such as PET_NNODES for
    --nnodes.
    """
    name = str(option.name)
    if name == "quiet":
        return [QUIET_VARIABLE]
    if name == "nproc":
        return [variable_of_flag("--nproc-per-node")]
    if name.startswith(TORCHRUN_NAME_PREFIX):
        return [variable_of_flag(name.removeprefix(TORCHRUN_NAME_PREFIX))]

    for declaration in DECLARATIONS.values():
        if declaration.name == name:
            return [declaration.variable]

    return []


def _default_from_file(option: click.Option, file: LaunchFile, key: str) -> Any:
    """Converts the value of a key into the form that click expects.

    Returns:
        True or False for a flag, a tuple of strings for an option that may be repeated, otherwise a
        string.

    Raises:
        SettingError: the option does not accept a value of this type.
    """
    value = file.values[key]
    if option.is_flag:
        if isinstance(value, bool):
            return value

        raise SettingError(
            file.entry_and_place(key), "it is switched on or off", "write true or false"
        )

    if option.multiple:
        texts = value if isinstance(value, list) else [value]
        if all(isinstance(text, str) for text in texts):
            return tuple(texts)

        raise SettingError(
            file.entry_and_place(key), "it takes texts", f'write {key} = ["first", "second"]'
        )

    is_switch = isinstance(value, bool)  # for Python, True is also an int
    if isinstance(value, str | int | float) and not is_switch:
        return str(value)

    raise SettingError(
        file.entry_and_place(key), "it takes a number or a text", f'write {key} = "..."'
    )


def torchrun_options() -> list[click.Option]:
    """Returns a hidden option of click for each of torchrun's flags, read from its parser."""
    with without_garbage_collection():
        from torch.distributed.run import get_args_parser

    options = []
    for action in get_args_parser()._actions:
        is_positional = not action.option_strings  # the script and its arguments
        if is_positional or action.dest == "help":
            continue

        # For click, `is_flag=False` would mean an option whose value may be left out. With None it
        # is an option with a value.
        takes_no_value = action.nargs == 0
        is_flag = True if takes_no_value else None
        options.append(
            click.Option(
                # The name comes first, followed by the flags, such as --nnodes.
                [f"{TORCHRUN_NAME_PREFIX}{action.dest}", *action.option_strings],
                is_flag=is_flag,
                expose_value=False,  # the callback handles the value
                callback=_collect_torchrun_flag,
                # `--print-completion` needs no script. As an eager option it is handled before
                # click notices that there is none.
                is_eager=action.dest == "print_completion",
                hidden=True,
            )
        )

    return options


def _collect_torchrun_flag(
    ctx: click.Context, option: click.Parameter, value: str | bool | None
) -> None:
    """Adds one of torchrun's flags to `ctx.meta[TORCHRUN_FLAGS]`, if it was given.

    This is the callback of the options that `torchrun_options` returns. With --print-completion,
    the command prints and exits here.

    Args:
        ctx: the context of the command.
        option: click's option that stands for the flag.
        value: None or False if the flag was not given; otherwise its value, or True if it takes
            none.
    """
    if value is None or value is False:
        return

    flag = max(option.opts, key=len)  # the longest spelling: --module rather than -m
    words = [flag] if value is True else [flag, str(value)]
    if flag == "--print-completion":
        parse_flags(words)  # torchrun's parser prints and exits
    ctx.meta[TORCHRUN_FLAGS] += words


def _check_ray_address(
    ctx: click.Context, option: click.Parameter, value: str | None
) -> str | None:
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
    metavar="A,B:N|FILE",
    help="Start on these machines, with N processes each; or a hostfile (B slots=N).",
)
@click.option("--copy", is_flag=True, help="Send this folder to them first, by rsync.")
@click.option(
    "--on-lost",
    type=click.Choice(["stop", "keep"]),
    default="stop",
    help="When the connection to a machine is lost: stop the run, or let it continue.",
)
@click.option(
    "--forward-env",
    multiple=True,
    metavar="NAME",
    help="Send this variable too, besides NCCL_... and similar ones; may be repeated.",
)
@click.option(
    "--ssh",
    default="ssh",
    metavar="COMMAND",
    help="The ssh command, such as 'ssh -F config'.",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value=RUNNING_CLUSTER,
    metavar="[ADDRESS]",
    callback=_check_ray_address,
    help="Start on a Ray cluster, one process per GPU; --nproc is the number of all of them.",
)
@click.option("--slurm", is_flag=True, help="Submit the run to Slurm as a job.")
@click.option(
    "--nodes", type=click.IntRange(min=1), metavar="N", help="How many machines.  [default: 1]"
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs of each machine, with a process each.",
)
@click.option("--time", metavar="HH:MM:SS", help="Time limit of the job.")
@click.option(
    "--sbatch",
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
    callback=_read_launch_file,
    help="Read options from FILE.  [default: the nearest lockstep.toml or pyproject.toml]",
)
@click.option("--from-file", is_eager=True, expose_value=False, hidden=True, callback=_keep_source)
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
def command(
    ctx: click.Context,
    /,
    script: str,
    args: tuple[str, ...],
    nproc: str | None,
    module: bool,
    dry_run: bool,
    quiet: bool,
    warm: bool,
    keep_in_memory: bool | None,
    on_hang: str,
    hang_after: float,
    local_rank_argument: str | None,
    **settings: Any,
) -> None:
    """Starts SCRIPT on several processes, watches them, and ends all of them when one fails."""
    _leave_out_places_of_file(ctx)
    _check_combinations(ctx)
    _check_no_second_launcher(nproc, script, args, module)
    _check_no_torchrun_variables(ctx, os.environ)
    if OPTIONS_FROM_FILE not in ctx.meta:  # otherwise the launcher that started this one says it
        say_if_options_are_not_read(ctx, script, args, _say)

    # The options that say where the run is started are read from `ctx.params`. Without them, the
    # settings of `lockstep.init` remain.
    for name in {*OPTIONS_OF_HOSTS, *OPTIONS_OF_RAY, *OPTIONS_OF_SLURM}:
        settings.pop(name)

    if ctx.params["hosts"] is not None:
        _run_on_hosts(ctx, script, args)
        return
    if ctx.params["ray"] is not None:
        _run_on_ray(ctx, script, args)
        return
    if ctx.params["slurm"]:
        _submit_to_slurm(ctx, script, args)
        return

    # Inside a job of Slurm, its variables say how the machines of the job find each other.
    torchrun_flags = tuple(ctx.meta[TORCHRUN_FLAGS])
    placement = _placement_in_slurm_job(nproc, torchrun_flags)
    if placement is not None and placement.srun_nodes:
        _start_launchers_by_srun(ctx, script, args, placement)
        return
    if placement is not None:
        nproc = placement.nproc
        torchrun_flags += placement.meeting_flags

    check_nproc(ctx, nproc)
    check_settings(ctx, os.environ, _world_size_if_known(nproc, torchrun_flags, os.environ))
    quiet = quiet or is_quiet(os.environ)
    spec = LaunchSpec(
        script=Script(path=script, arguments=args, module=module),
        nproc=nproc,
        settings=_settings_of_ranks(ctx, settings, quiet),
        torchrun=torchrun_flags,
        warm=warm,
        keep_in_memory=keep_in_memory,
        hang=HangRules(on_hang, parse_seconds("--hang-after", hang_after)),
        local_rank_argument=local_rank_argument,
        from_file=_file_and_its_options(ctx),
        quiet=quiet,
    )
    _run_here(ctx, spec)


def _run_on_hosts(ctx: click.Context, script: str, args: tuple[str, ...]) -> None:
    """Runs the script on the machines of --hosts, by ssh; with --dry-run only says how."""
    spec = _hosts_spec(ctx, script, args)
    check_settings(ctx, os.environ, _num_processes_on_hosts(spec))

    if ctx.params["dry_run"]:
        click.echo(spec.describe())
    else:
        exit_code = run_on_hosts(spec, _say)
        _exit_with_hint(ctx, exit_code, script, args)


def _run_on_ray(ctx: click.Context, script: str, args: tuple[str, ...]) -> None:
    """Runs the script on the nodes of a Ray cluster; with --dry-run only says how."""
    spec = _spec_for_unknown_machines(ctx, script, args, "--ray")

    # With `--nproc auto`, the number of processes is only known on the machines.
    num_processes = int(spec.nproc) if spec.nproc.isdigit() else None
    check_settings(ctx, os.environ, num_processes)

    address = ctx.params["ray"]
    if ctx.params["dry_run"]:
        click.echo(ray_run.describe(address, spec))
    else:
        exit_code = ray_run.run_on_ray(address, spec, _say)
        _exit_with_hint(ctx, exit_code, script, args)


def _submit_to_slurm(ctx: click.Context, script: str, args: tuple[str, ...]) -> None:
    """Submits the run to Slurm as a job; with --dry-run only prints the script of the job."""
    check_settings(ctx, os.environ, num_processes=None)  # only the job will know the number
    options = _sbatch_options(ctx, script)
    launcher_arguments = _launcher_arguments(ctx, script, args)
    job_script = slurm_batch.job_script(options, ctx.params["nproc"], launcher_arguments)

    if ctx.params["dry_run"]:
        click.echo(job_script)
    else:
        click.echo(slurm_batch.submit(job_script, options))


def _placement_in_slurm_job(
    nproc: str | None, torchrun_flags: Sequence[str]
) -> slurm.JobPlacement | None:
    """Returns how the run is started in the Slurm job that this process belongs to.

    Returns None outside of a job, and if torchrun's flags say how the machines find each other.
    """
    if TorchrunFlags(torchrun_flags, os.environ).describe_nodes:
        return None
    return slurm.find_placement(os.environ, nproc)


def _start_launchers_by_srun(
    ctx: click.Context, script: str, args: tuple[str, ...], placement: slurm.JobPlacement
) -> None:
    """Starts a launcher on each machine of a Slurm job, of which this process is the first one.

    srun replaces this process. With --dry-run its command line is only printed.
    """
    command_line = slurm.srun_command(placement, _launcher_arguments(ctx, script, args))
    if ctx.params["dry_run"]:
        click.echo(shlex.join(command_line))
    else:
        slurm.exec_srun(command_line)


def _settings_of_ranks(
    ctx: click.Context, settings: Mapping[str, Any], quiet: bool
) -> dict[str, Any]:
    """Returns the settings that are passed on to the ranks, without those that were not given.

    Args:
        ctx: the context of the command.
        settings: the options of the settings of `lockstep.init`; None if not given.
        quiet: whether the run prints only the script's output and failures.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if quiet:
        given["quiet"] = 1

    # The ranks get this text in an environment variable, and print it. If this process has the
    # variable, from a launcher that has read another file, it is replaced, even by an empty text.
    origin_of_options = _file_and_its_options(ctx)  # "lockstep.toml: nproc, precision"
    replaces_inherited = FROM_FILE_VARIABLE in os.environ
    if origin_of_options or replaces_inherited:
        given["from_file"] = origin_of_options
    return given


def _run_here(ctx: click.Context, spec: LaunchSpec) -> None:
    """Runs the script on this machine; with --dry-run only says how."""
    from lockstep.run.start.script import plan_run, run_script

    if ctx.params["dry_run"]:
        click.echo(plan_run(spec).describe())
    else:
        script = spec.script
        exit_code = run_script(spec, _print)
        _exit_with_hint(ctx, exit_code, script.path, script.arguments)


def _file_and_its_options(ctx: click.Context) -> str:
    """Returns the launch file and the options that come from it: "lockstep.toml: nproc, precision".

    The result is empty if no option comes from a launch file.
    """
    if _has_options_from_other_launcher(ctx):
        text: str = ctx.meta[OPTIONS_FROM_FILE]  # the other launcher has passed this text on
        return text

    file: LaunchFile | None = ctx.meta.get(LAUNCH_FILE)
    if file is None:
        return ""

    # `copy = true` in the file has no effect in a run without --hosts, for example.
    options_without_effect = _missing_main_options(ctx).keys()
    option_of_key = _options_by_key(ctx)
    used = []
    for key in file.values:
        name = str(option_of_key[key].name)
        if comes_from_file(ctx, name) and name not in options_without_effect:
            used.append(key)

    if not used:
        return ""
    return f"{file.name}: {', '.join(used)}"


def _world_size_if_known(
    nproc: str | None, torchrun_flags: Sequence[str], environ: Mapping[str, str]
) -> int | None:
    """Returns the world size of a run that is started on this machine.

    It is None if it is not known yet: with several machines, or with a number of processes that
    depends on the machine, such as --nproc=auto.

    Args:
        nproc: the value of --nproc.
        torchrun_flags: torchrun's flags and their values: `["--nnodes", "2"]`, `["--nnodes=2"]`.
        environ: environment variables of this process.
    """
    flags = TorchrunFlags(torchrun_flags, environ)
    num_nodes = flags.get("--nnodes") or "1"
    nproc = nproc or flags.get("--nproc-per-node") or "1"

    # The same command on another machine may start another number of processes.
    has_several_machines = num_nodes != "1"
    if has_several_machines or not nproc.isdigit():
        return None
    return int(nproc)


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


def _check_no_second_launcher(
    nproc: str | None, script: str, args: Sequence[str], module: bool
) -> None:
    """Checks that this command neither starts another launcher nor was started by one.

    In `lockstep run --nproc 2 -m torch.distributed.run train.py`, and in `torchrun
    --nproc-per-node 2 -m lockstep run train.py`, each process would start a training of its own.

    Raises:
        SettingError: the script is a launcher, or several of this command were started by one.
    """
    if module and script in MODULES_OF_LAUNCHERS and nproc not in (None, "1"):
        raise SettingError(
            f"lockstep run --nproc {nproc} -m {script}",
            "it is a launcher too, so each process would start the whole training",
            f"leave out -m {script} and its options: lockstep run --nproc N SCRIPT",
        )

    program = Path(script).name
    if not module and program in PROGRAMS_OF_LAUNCHERS:
        if program == "torchrun":
            command = shlex.join(["lockstep", "run", *args])
            do = f"leave it out, as lockstep run has the same options: {command}"
        else:
            do = "leave it and its options out: lockstep run --nproc N SCRIPT"
        raise SettingError(f"lockstep run {script}", "it is a launcher too", do)

    _check_started_once(os.environ, script, args, module)


def _check_started_once(
    environ: Mapping[str, str], script: str, args: Sequence[str], module: bool
) -> None:
    """Checks that no other launcher has started this command in several processes.

    The ranks of a run of Lockstep's own are left out: their script may start another run.

    Raises:
        SettingError: torchrun or a scheduler has started this command in several processes.
    """
    if LAUNCHER_VARIABLE in environ:
        return

    launcher = ""
    scheduler = scheduler_of_several_tasks_here(environ)
    if TORCHELASTIC_VARIABLE in environ:
        launcher = "torchrun"
        num_processes = environ.get("WORLD_SIZE", "1")
        num_here = environ.get("LOCAL_WORLD_SIZE", num_processes)
        variables = ", ".join(("RANK", "WORLD_SIZE", TORCHELASTIC_VARIABLE))
    elif scheduler is not None:
        launcher = scheduler.command
        num_processes = num_here = environ[scheduler.local_size]
        variables = scheduler.local_size
    if not launcher or num_processes == "1":
        return

    program = [*(["-m"] if module else []), script, *args]
    raise SettingError(
        f"lockstep run in each of the {num_processes} processes of {launcher}",
        "both are launchers, so each process would start the whole training",
        f"leave {launcher} and its options out: "
        f"{shlex.join(['lockstep', 'run', '--nproc', num_here, *program])}. If a process of a "
        f"training starts another one on purpose, remove {variables} from its environment",
    )


def _check_no_torchrun_variables(ctx: click.Context, environ: Mapping[str, str]) -> None:
    """Checks that none of torchrun's variables is set for a run on other machines.

    Its launchers are started by ssh or Ray, with options. Of torchrun's variables, only a launcher
    on this machine would see any.

    Raises:
        SettingError: one is set.
    """
    for place in ("hosts", "ray"):
        if ctx.params[place] is None:
            continue
        for variable, value in environ.items():
            if is_torchrun_variable(variable) and value:
                flag = flag_of_variable(variable)
                raise SettingError(
                    f"{variable}={value} with --{place}",
                    "the other machines do not get torchrun's variables",
                    f"unset it, and write the option {flag}",
                )


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
    """Returns 1 for `["node2", "train.py", "--lr", "1"]`: one host stands before the script.

    It is None if no script follows, or if another word than a host stands before the script.
    """
    for position, word in enumerate(words):
        may_be_host_or_script = HOST_WORD_PATTERN.fullmatch(word) and not word.startswith("-")
        if not may_be_host_or_script:
            return None
        if word.endswith(".py") and Path(word).is_file():
            return position
    return None


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
    _check_no_hosts_after_spaces(ctx, script, args)
    spec_without_machines = _spec_for_unknown_machines(ctx, script, args, "--hosts")

    folder = Path(current_folder())
    if ctx.params["copy"] and folder in (Path("/"), Path.home().resolve()):
        raise SettingError(
            "--copy",
            f"all of {folder} would be sent",
            "start the run in the project's own folder",
        )

    goes_on_if_connection_is_lost = ctx.params["on_lost"] == "keep"
    spec_without_machines = replace(
        spec_without_machines,
        ssh=ssh_command(ctx.params["ssh"]),
        copy=ctx.params["copy"],
        keep=goes_on_if_connection_is_lost,
    )

    machines = parse_hosts(ctx.params["hosts"])
    return spec_without_machines.on_machines(machines)


def _spec_for_unknown_machines(
    ctx: click.Context, script: str, args: tuple[str, ...], option: str
) -> HostsSpec:
    """Describes a run on other machines, without saying which machines these are.

    The caller fills in the machines (`HostsSpec.on_machines`).

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.
        option: the option that asks for other machines, `--hosts` or `--ray`.

    Raises:
        SettingError: one of torchrun's flags cannot be used with the option, or there is no such
            script.
    """
    from lockstep.run.start.script import check_script

    check_flags_usable_with(option, ctx.meta[TORCHRUN_FLAGS])
    module = ctx.params["module"]
    check_script(Script(path=script, arguments=args, module=module))
    return HostsSpec(
        hosts=(),  # filled in by the caller
        arguments=_given_options(ctx),
        script=(script, *args),
        module=module,
        torchrun=ctx.meta[TORCHRUN_FLAGS],
        nproc=ctx.params["nproc"] or "1",
        environment=forwarded_environment(os.environ, ctx.params["forward_env"]),
        option=option,
        quiet=ctx.params["quiet"] or is_quiet(os.environ),
    )


def _sbatch_options(ctx: click.Context, script: str) -> list[str]:
    """Returns the options for sbatch, which submits the job.

    All that can be wrong is checked here, so that the job does not fail after hours in the queue.

    Raises:
        SettingError: an option is wrong, one of torchrun's flags cannot be used with --slurm, or
            there is no such script.
    """
    from lockstep.run.start.script import check_script

    params = ctx.params
    torchrun_flags = ctx.meta[TORCHRUN_FLAGS]
    if params["keep_in_memory"]:  # not possible with all of torchrun's flags
        # Torchrun's parser accepts the flags only together with a script.
        check_keep_in_memory(parse_flags([*torchrun_flags, script]))
    check_flags_usable_with("--slurm", torchrun_flags)
    check_script(Script(path=script, arguments=params["args"], module=params["module"]))

    request = slurm_batch.JobRequest(
        nodes=params["nodes"] or 1,
        gpus_per_node=params["gpus_per_node"],
        time=params["time"],
        options=params["sbatch"],
    )
    return slurm_batch.sbatch_options(request, script)  # also checks the request


def _missing_main_options(ctx: click.Context) -> dict[str, str]:
    """Returns the options that have no effect, each with the main option without which it has none.

    In a run without --hosts and --slurm, this is `{"copy": "hosts", "nodes": "slurm", ...}`.
    """
    missing_main_options = {}
    for main_option, *dependent_options in (OPTIONS_OF_HOSTS, OPTIONS_OF_SLURM):
        if ctx.params[main_option] in (None, False):
            for option in dependent_options:
                missing_main_options[option] = main_option

    # --forward-env also has an effect with --ray, although it is listed above as needing --hosts.
    if ctx.params["ray"] is not None:
        missing_main_options.pop("forward_env", None)

    return missing_main_options


def _leave_out_places_of_file(ctx: click.Context) -> None:
    """Leaves out `hosts`, `ray` or `slurm` of the launch file if another of them is given.

    Each of them says where the run takes place, and the command line overrides the file.
    """
    chosen = [option for option in PLACES if ctx.params[option] not in (None, False)]
    if all(comes_from_file(ctx, option) for option in chosen):
        return
    for option in chosen:
        if comes_from_file(ctx, option):
            ctx.params[option] = False if option == "slurm" else None


def _check_combinations(ctx: click.Context) -> None:
    """Checks that the given options can be combined.

    Raises:
        SettingError: an option has no effect without another one, or contradicts it.
    """
    flag_of = {str(param.name): param.opts[0] for param in ctx.command.params}

    # An option on the command line without its main option is a mistake: `--copy` without
    # `--hosts`. A launch file may contain such an option, for runs that have the main option.
    for option, main_option in _missing_main_options(ctx).items():
        is_on_command_line = is_given(ctx, option) and not comes_from_file(ctx, option)
        if is_on_command_line:
            raise SettingError(
                flag_of[option], f"there is no {flag_of[main_option]}", "add it, or leave this out"
            )

    _check_report_is_no_service(ctx.params["report"])

    # Each of --hosts, --slurm and --ray says where the processes run.
    if ctx.params["hosts"] is not None and ctx.params["slurm"]:
        raise SettingError("--hosts with --slurm", "a job has machines of its own", "take one")

    if ctx.params["ray"] is not None:
        for option in ("hosts", "slurm"):
            is_option_given = ctx.params[option] not in (None, False)
            if is_option_given:
                found = "a Ray cluster has machines of its own"
                raise SettingError(f"{flag_of[option]} with --ray", found, "take one")


def _check_report_is_no_service(report: str | None) -> None:
    """Checks that --report, which takes a folder, was not given the name of a tracking service.

    The service is named by `lockstep report FOLDER --to tensorboard`, after the run.
    """
    is_service = report in ("tensorboard", "wandb", "mlflow")
    if report is None or not is_service:
        return
    is_folder_of_earlier_run = _has_record(Path(report))
    if not is_folder_of_earlier_run:
        do = f"name one, and afterwards: lockstep report FOLDER --to {report}"
        raise SettingError(f"--report {report}", "it takes a folder for the record", do)


def _has_record(folder: Path) -> bool:
    """Returns True if a folder contains the record of a run, as written with --report."""
    from lockstep.extensions.report.record_format import RECORD_SUFFIX

    return any(folder.glob(f"*{RECORD_SUFFIX}"))


def _launcher_arguments(ctx: click.Context, script: str, args: tuple[str, ...]) -> list[str]:
    """Returns the arguments for `lockstep run` on another machine: everything that was given here.

    Only --nproc, --dry-run and the options that say where the run is started are left out.
    """
    module_flag = ["-m"] if ctx.params["module"] else []
    return [*_given_options(ctx), *ctx.meta[TORCHRUN_FLAGS], *module_flag, script, *args]


def _given_options(ctx: click.Context) -> list[str]:
    """Returns the options that the user gave, as words of a command line for other launchers.

    Options from the launch file are included, as other launchers do not read it. Options that these
    launchers do not get, or get in another way, are left out.
    """
    left_out = {*OPTIONS_OF_HOSTS, *OPTIONS_OF_RAY, *OPTIONS_OF_SLURM}
    left_out |= {"nproc", "module"}  # the caller passes them on
    left_out |= {"dry_run", "launch_file"}  # they are for this command only

    # --from-file says which of the options come from a launch file, for messages. Its text is
    # that of this command, not the one that the user may have given.
    left_out.add("from_file")
    words = [f"--from-file={_file_and_its_options(ctx)}"]
    for param in ctx.command.params:
        name = str(param.name)
        if not isinstance(param, click.Option):  # the script and its arguments
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


def _say(line: str) -> None:
    """Shows an English line in the language of this process."""
    _print(translate(line))


def _print(line: str) -> None:
    """Prints a line of Lockstep itself on standard error, as standard output belongs to the
    script.
    """
    click.echo(f"lockstep: {line}", err=True)


def misplaced_option_hint(ctx: click.Context, script: str, args: tuple[str, ...]) -> str:
    """Returns a hint if an option of this command is among the script's arguments.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.

    Returns:
        The hint, or an empty string.
    """
    own_flags = _flags_of(ctx.command)
    for word in args:
        if word.partition("=")[0] in own_flags:
            return (
                f"{word} stands after {script}, so that the script was given it; "
                f"the options of {ctx.command_path} stand before the script"
            )
    return ""


def say_if_options_are_not_read(
    ctx: click.Context, script: str, args: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Warns if options of this command stand after a script that never reads its arguments.

    In `lockstep run train.py --nproc 2` the option --nproc has no effect if `train.py` reads no
    arguments, and nothing would fail. The options may also be misspelt.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.
        say: prints a line.
    """
    takes_value: dict[str, bool] = {}  # for each flag, such as --nproc
    for param in ctx.command.params:
        if isinstance(param, click.Option):
            for flag in param.opts:
                takes_value[flag] = not param.is_flag

    meant_options = {}  # by the misspelt options
    for word in args:
        flag = word.partition("=")[0]
        if not flag.startswith("--") or flag in takes_value:
            continue
        meant = similar_option(ctx.command, ctx, flag, MIN_SIMILARITY_AFTER_SCRIPT)
        if meant is not None:
            meant_options[flag] = meant

    words = misplaced_launcher_options(args, takes_value)
    if not words and not meant_options:
        return
    if not never_reads_arguments(Script(path=script, module=ctx.params["module"])):
        return

    if words:
        say(
            f"warning: {shlex.join(words)} has no effect, as it stands after {script}, which reads "
            f"no arguments: write it before {script}"
        )
    for flag, meant in meant_options.items():
        say(
            f"warning: {flag} has no effect, as {script} reads no arguments: if you meant {meant}, "
            f"write it before {script}"
        )


def _exit_with_hint(ctx: click.Context, exit_code: int, script: str, args: tuple[str, ...]) -> None:
    """Exits with the exit code of the run, after a hint if the script has refused its arguments.

    In `lockstep run train.py --nproc 2`, the option `--nproc` stands after the script, so it is
    passed to the script. If the script ended because it does not know this argument, a hint about
    the order is printed first.
    """
    if exit_code == REFUSED_ARGUMENT_EXIT_CODE:
        hint = misplaced_option_hint(ctx, script, args)
        if hint:
            _say(hint)

    # The run has ended, and Ctrl-C would only replace its exit code by another one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctx.exit(exit_code)

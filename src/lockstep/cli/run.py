"""`lockstep run`: starts a script on several processes, of this machine or of several.

A *launcher* starts and watches the processes of one machine; `lockstep run` is the launcher of this
machine, or starts launchers elsewhere: by ssh (`--hosts`) or as a job of the scheduler Slurm. It
accepts the flags of torchrun among its own options and passes them on.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lockstep.errors import SettingError, unknown_choice_error
from lockstep.run.machines import slurm, slurm_batch
from lockstep.run.machines.hostfile import parse_hosts
from lockstep.run.machines.hosts import (
    HostsSpec,
    current_folder,
    forwarded_environment,
    ssh_command,
)
from lockstep.run.machines.ssh_run import run_on_hosts
from lockstep.run.start.plan import HangRules, LaunchSpec
from lockstep.run.start.rank_imports import without_garbage_collection
from lockstep.run.start.torchrun_flags import check_flags_elsewhere, has_node_flags, parse_flags
from lockstep.run.start.worker import Script
from lockstep.settings import DECLARATIONS, Declaration
from lockstep.strategies import CLASS_OF_NAME
from lockstep.units import parse_seconds

# Keys of click's context.
TORCHRUN_FLAGS = "lockstep.torchrun_flags"  # the flags of torchrun that were given, as a list
TORCHRUN_OPTIONS = "lockstep.torchrun_options"  # torchrun's flags as click's options

OPTIONS_OF_HOSTS = ("hosts", "copy", "on_lost", "forward_env", "ssh")
OPTIONS_OF_SLURM = ("slurm", "nodes", "gpus_per_node", "time", "sbatch")
"""Options that say where the run is started. The first of each group makes the others valid."""

REFUSED_ARGUMENT_EXIT_CODE = 2
"""How argparse and click end a script that was given an argument it does not know."""


class RunCommand(click.Command):
    """A command that accepts torchrun's flags among its own options, before the script."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the command's parameters, with torchrun's flags if `parse_args` has read them."""
        return [*super().get_params(ctx), *ctx.meta.get(TORCHRUN_OPTIONS, ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command line; torchrun's flags are collected in `ctx.meta[TORCHRUN_FLAGS]`.

        It is parsed a second time, with torchrun's flags, if the first time finds an unknown flag.

        Raises:
            SettingError: neither this command nor torchrun has a flag.
        """
        ctx.allow_interspersed_args = False  # what follows the script belongs to the script
        ctx.meta[TORCHRUN_FLAGS] = []
        try:
            return super().parse_args(ctx, [*args])  # a copy, since click empties the list
        except click.NoSuchOption:
            # Perhaps the flag is torchrun's. Its flags are read only now, since that imports torch.
            own_flags = _flags_of(self)
            options = []
            for option in torchrun_options():
                if own_flags.isdisjoint(option.opts):  # else this command has it itself
                    options.append(option)
            ctx.meta[TORCHRUN_OPTIONS] = options  # `get_params` returns them from now on
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            do = "put it after the script, if it is the script's own"
            if error.possibilities:
                do = f"did you mean {error.possibilities[0]}? Or {do}"
            raise SettingError(
                error.option_name, "neither Lockstep nor torchrun has this flag", do
            ) from None


def _flags_of(command: click.Command) -> set[str]:
    """Returns every flag of a command: `--nproc`, `--module`, `-m`, ..."""
    flags: set[str] = set()
    for param in command.params:
        flags.update(param.opts)
    return flags


def torchrun_options() -> list[click.Option]:
    """Returns every flag of torchrun as a hidden option of click, read from torchrun's parser."""
    with without_garbage_collection():
        from torch.distributed.run import get_args_parser

    options = []
    for action in get_args_parser()._actions:
        is_positional = not action.option_strings  # the script and its arguments
        if is_positional or action.dest == "help":
            continue
        takes_no_value = action.nargs == 0
        options.append(
            click.Option(
                # The name comes first, then the flags, such as --nnodes.
                [f"torchrun_{action.dest}", *action.option_strings],
                # None lets click decide; False would mean that the value may be left out.
                is_flag=True if takes_no_value else None,
                expose_value=False,  # the callback takes the value
                callback=_collect_torchrun_flag,
                # Eager options are handled before click finds that there is no script.
                is_eager=action.dest == "print_completion",
                hidden=True,
            )
        )
    return options


def _collect_torchrun_flag(
    ctx: click.Context, option: click.Parameter, value: str | bool | None
) -> None:
    """Adds one of torchrun's flags to `ctx.meta[TORCHRUN_FLAGS]`, if it was given.

    Click calls this for each option. With --print-completion the command prints and exits here.

    Args:
        ctx: the context of the command.
        option: the option of click that stands for the flag.
        value: None or False if the flag was not given; otherwise the text that follows it, or True
            for a flag that no text follows.
    """
    if value is None or value is False:
        return
    flag = max(option.opts, key=len)  # the longest spelling: --module rather than -m
    if value is True:
        ctx.meta[TORCHRUN_FLAGS].append(flag)
    elif option.is_eager and value:
        # --print-completion: torchrun's parser prints what was asked for, and exits.
        parse_flags([flag, value])
    else:
        ctx.meta[TORCHRUN_FLAGS] += [flag, value]


class SettingType(click.ParamType):  # type: ignore[type-arg]
    """The value of a setting, read as its environment variable is."""

    def __init__(self, declaration: Declaration) -> None:
        assert declaration.reader is not None
        self.name = declaration.reader.__name__.replace("_", " ")
        self._read = declaration.reader

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns what the value stands for, or ends with click's error if it cannot be read."""
        try:
            return self._read(value)
        except ValueError:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option to a command for each setting whose declaration has a help text.

    It is used as a decorator and returns the command.
    """
    # The option that is added last stands first, as that of the topmost decorator does.
    for declaration in reversed(list(DECLARATIONS.values())):
        if not declaration.help:
            continue
        add_option = click.option(
            declaration.option,
            type=SettingType(declaration),
            callback=known_strategy if declaration.name == "strategy" else None,
            metavar=declaration.metavar,
            help=declaration.help,
        )
        command = add_option(command)
    return command


def known_strategy(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Returns the value of --strategy as it is, if its name is known; the ranks read its options.

    Raises:
        SettingError: there is no such strategy.
    """
    if value:
        name = value.partition(":")[0]
        if name not in CLASS_OF_NAME:
            raise unknown_choice_error(f"--strategy {value}", name, "strategies", CLASS_OF_NAME)
    return value


@click.command(
    cls=RunCommand,
    options_metavar="[OPTIONS] [TORCHRUN'S FLAGS]",
    short_help="Starts a script on several processes.",
    epilog="Every flag of torchrun except --logs-specs is accepted too, with torchrun's meaning "
    "(--nnodes, --node-rank, --master-addr, --rdzv-endpoint, --max-restarts, --log-dir, ...; see "
    "torchrun --help). Flags stand before the script; what follows the script is the script's own.",
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    metavar="N|auto|gpu|cpu",
    help="Processes on this machine; auto: one per GPU, else one per core.  [default: 1]",
)
@click.option(
    "--hosts",
    metavar="A,B:N|FILE",
    help="Machines to start on over ssh, with N processes each, or a hostfile (B slots=N).",
)
@click.option("--copy", is_flag=True, help="With --hosts: send this folder to them by rsync.")
@click.option(
    "--on-lost",
    type=click.Choice(["stop", "keep"]),
    default="stop",
    help="With --hosts: end the run when the connection to a machine is lost, or let it go on.",
)
@click.option(
    "--forward-env",
    multiple=True,
    metavar="NAME",
    help="With --hosts: a variable to send to all machines, besides NCCL_... and similar ones.",
)
@click.option(
    "--ssh",
    default="ssh",
    metavar="COMMAND",
    help="With --hosts: how to call ssh, such as ssh -F F.",
)
@click.option("--slurm", is_flag=True, help="Submit the run as a job to Slurm.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --slurm: how many machines.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --slurm: GPUs of each machine, and processes on it.",
)
@click.option("--time", metavar="HH:MM:SS", help="With --slurm: the job's time limit.")
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="With --slurm: another option of sbatch, such as --partition=gpu.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option(
    "--warm/--no-warm",
    default=True,
    help="Fork the ranks from a process that has imported torch, or start an interpreter for each.",
)
@click.option(
    "--keep-in-memory/--no-keep-in-memory",
    default=None,
    help="Keep each step in memory, for a restart, or none.  [default: with --max-restarts, as "
    "often as costs little]",
)
@click.option(
    "--on-hang",
    type=click.Choice(["stop", "report"]),
    default="stop",
    help="Stop a run that hangs, or only report it.",
)
@click.option(
    "--hang-after",
    type=click.FloatRange(min=1.0),
    default=HangRules.after,
    metavar="SECONDS",
    help="After this time without a step, the ranks are examined closely.",
)
@click.option(
    "--local-rank-argument",
    type=click.Choice(["local_rank", "local-rank", "none"]),
    help="How to pass the local rank to the script.  [default: only if it defines the argument]",
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
    warm: bool,
    keep_in_memory: bool | None,
    on_hang: str,
    hang_after: float,
    local_rank_argument: str | None,
    **settings: Any,
) -> None:
    """Starts SCRIPT on several processes, and ends them all when one fails.

    The settings (--strategy to --report) reach `lockstep.init` in the script; a script that sets
    one itself to another value ends in an error.
    """
    _check_combinations(ctx)
    # The options for runs that are started elsewhere, which are no settings of `lockstep.init`.
    elsewhere = {name: settings.pop(name) for name in (*OPTIONS_OF_HOSTS, *OPTIONS_OF_SLURM)}

    # By ssh on the machines of --hosts.
    if elsewhere["hosts"] is not None:
        hosts_spec = _hosts_spec(ctx, script, args, elsewhere)
        if dry_run:
            click.echo(hosts_spec.describe())
        else:
            _exit(ctx, run_on_hosts(hosts_spec, _print), script, args)
        return

    # As a job of Slurm.
    if elsewhere["slurm"]:
        options = _sbatch_options(ctx, script, elsewhere)
        job_script = slurm_batch.job_script(options, nproc, _launcher_arguments(ctx, script, args))
        click.echo(job_script if dry_run else slurm_batch.submit(job_script, options))
        return

    # Inside a job of Slurm. Its variables say how the machines find each other, unless flags do.
    torchrun_flags = tuple(ctx.meta[TORCHRUN_FLAGS])
    placement = None
    if not has_node_flags(torchrun_flags, os.environ):
        placement = slurm.find_placement(os.environ, nproc)
    if placement is not None:
        nproc = placement.nproc
        torchrun_flags += placement.meeting_flags
        if placement.srun_nodes:
            # This process is the first of the job, and srun starts a launcher on each machine.
            command_line = slurm.srun_command(placement, _launcher_arguments(ctx, script, args))
            if dry_run:
                click.echo(shlex.join(command_line))
            else:
                slurm.exec_srun(command_line)
            return

    # On this machine.
    spec = LaunchSpec(
        script=Script(path=script, arguments=args, module=module),
        nproc=nproc,
        settings={name: value for name, value in settings.items() if value is not None},
        torchrun=torchrun_flags,
        warm=warm,
        keep_in_memory=keep_in_memory,
        hang=HangRules(on_hang, parse_seconds("--hang-after", hang_after)),
        local_rank_argument=local_rank_argument,
    )
    from lockstep.run.start.script import plan_run, run_script

    if dry_run:
        click.echo(plan_run(spec).describe())
    else:
        _exit(ctx, run_script(spec, _print), script, args)


def _hosts_spec(
    ctx: click.Context, script: str, args: tuple[str, ...], options: dict[str, Any]
) -> HostsSpec:
    """Returns what is to be started on the machines of --hosts.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.
        options: the values of OPTIONS_OF_HOSTS.

    Raises:
        SettingError: a flag of torchrun cannot be used with --hosts, there is no such script, or
            --copy would send too much.
    """
    from lockstep.run.start.script import check_script

    check_flags_elsewhere(ctx.meta[TORCHRUN_FLAGS], "--hosts")
    module = ctx.params["module"]
    check_script(Script(path=script, module=module))
    folder = Path(current_folder())
    if options["copy"] and folder in (Path("/"), Path.home().resolve()):
        raise SettingError(
            "--copy",
            f"all of {folder} would be sent",
            "start the run in the project's own folder",
        )
    hosts = parse_hosts(options["hosts"])
    torchrun_flags = [*ctx.meta[TORCHRUN_FLAGS]]
    if len(hosts) == 1:
        # If that machine is in a job of Slurm, its other machines take no part.
        torchrun_flags.insert(0, "--standalone")
    return HostsSpec(
        hosts=hosts,
        arguments=_given_options(ctx),
        script=(script, *args),
        module=module,
        torchrun=torchrun_flags,
        nproc=ctx.params["nproc"] or "1",
        environment=forwarded_environment(os.environ, options["forward_env"]),
        ssh=ssh_command(options["ssh"]),
        copy=options["copy"],
        keep=options["on_lost"] == "keep",
    )


def _sbatch_options(ctx: click.Context, script: str, options: dict[str, Any]) -> list[str]:
    """Returns the options for sbatch, which submits the job.

    Args:
        ctx: the context of the command.
        script: the script.
        options: the values of OPTIONS_OF_SLURM.

    Raises:
        SettingError: an option is wrong, a flag of torchrun cannot be used with --slurm, or there
            is no such script.
    """
    from lockstep.run.start.script import check_script

    request = slurm_batch.JobRequest(
        nodes=options["nodes"] or 1,
        gpus_per_node=options["gpus_per_node"],
        time=options["time"],
        options=options["sbatch"],
    )
    sbatch_options = slurm_batch.sbatch_options(request, script)
    check_flags_elsewhere(ctx.meta[TORCHRUN_FLAGS], "--slurm")
    check_script(Script(path=script, module=ctx.params["module"]))
    return sbatch_options


def _is_given(ctx: click.Context, param_name: str) -> bool:
    """Returns True if the user gave the option, False if it has its default."""
    return ctx.get_parameter_source(param_name) is ParameterSource.COMMANDLINE


def _check_combinations(ctx: click.Context) -> None:
    """Raises SettingError for options that mean nothing without, or together with, another one."""
    flag_of = {str(param.name): param.opts[0] for param in ctx.command.params}
    # Options such as --copy without --hosts, or --nodes without --slurm.
    for main_option, *dependent_options in (OPTIONS_OF_HOSTS, OPTIONS_OF_SLURM):
        if _is_given(ctx, main_option):
            continue
        for option in dependent_options:
            if _is_given(ctx, option):
                raise SettingError(
                    flag_of[option],
                    f"there is no {flag_of[main_option]}",
                    "add it, or leave this out",
                )
    # `--report tensorboard` is a mistake, unless a folder of this name has the record of a run.
    report = ctx.params["report"]
    if report in ("tensorboard", "wandb") and not _has_record(Path(report)):
        do = f"name one, and afterwards: lockstep report FOLDER --to {report}"
        raise SettingError(f"--report {report}", "it takes a folder for the record", do)
    if ctx.params["hosts"] is not None and ctx.params["slurm"]:
        raise SettingError("--hosts with --slurm", "a job has machines of its own", "take one")


def _has_record(folder: Path) -> bool:
    """Returns whether a folder has the record of a run, as --report has written it."""
    from lockstep.extensions.report.record_format import RECORD_SUFFIX

    return any(folder.glob(f"*{RECORD_SUFFIX}"))


def _launcher_arguments(ctx: click.Context, script: str, args: tuple[str, ...]) -> list[str]:
    """Returns the arguments for `lockstep run` on another machine: all that was given here.

    Only --nproc, --dry-run and the options that say where the run is started are left out.
    """
    module_flag = ["-m"] if ctx.params["module"] else []
    return [*_given_options(ctx), *ctx.meta[TORCHRUN_FLAGS], *module_flag, script, *args]


def _given_options(ctx: click.Context) -> list[str]:
    """Returns the options that the user gave, as words of a command line.

    Left out are those that the launchers on other machines are not given, or are given otherwise.
    """
    left_out = {*OPTIONS_OF_HOSTS, *OPTIONS_OF_SLURM, "nproc", "module", "dry_run"}
    words = []
    for param in ctx.command.params:
        name = str(param.name)
        if not isinstance(param, click.Option):  # the script and its arguments
            continue
        if name in left_out or not _is_given(ctx, name):
            continue
        value = ctx.params[name]
        if not param.is_flag:
            words += [param.opts[0], str(value)]
        elif value:
            words.append(param.opts[0])
        else:
            words.append(param.secondary_opts[0])  # the flag for False, such as --no-warm
    return words


def _print(line: str) -> None:
    """Prints a line of Lockstep itself, on standard error, since the script uses the output."""
    click.echo(f"lockstep: {line}", err=True)


def misplaced_option_hint(ctx: click.Context, script: str, args: tuple[str, ...]) -> str:
    """Returns a hint if the script's arguments have an option of this command; else an empty text.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.
    """
    own_flags = _flags_of(ctx.command)
    for word in args:
        if word.partition("=")[0] in own_flags:
            return (
                f"{word} stands after {script}, so that the script was given it; "
                f"the options of {ctx.command_path} stand before the script"
            )
    return ""


def _exit(ctx: click.Context, exit_code: int, script: str, args: tuple[str, ...]) -> None:
    """Exits with the code of the run.

    If the script refused its arguments, it says first which of them may be an option of this
    command.
    """
    if exit_code == REFUSED_ARGUMENT_EXIT_CODE:
        hint = misplaced_option_hint(ctx, script, args)
        if hint:
            _print(hint)
    # The run has ended; another Ctrl-C now would only replace its exit code by another one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctx.exit(exit_code)

"""`lockstep run`: starts a script on several processes, of this machine or of several."""

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
from lockstep.run.start.torchrun_flags import check_flags_elsewhere, has_node_flags, parse_flags
from lockstep.run.start.worker import Script, nothing_collected
from lockstep.settings import DECLARATIONS, Declaration
from lockstep.units import parse_seconds

_TORCHRUN, _FLAGS = "lockstep.torchrun", "lockstep.flags"
"""In a command's context: torchrun's flags as given, and as click is to know them."""
STRATEGIES = ("single", "dp", "ddp", "fsdp", "hsdp", "pipeline", "diloco")
"""As in `lockstep.strategies`, which imports torch."""


class RunCommand(click.Command):
    """Takes torchrun's flags among its own: all stand before the script, in any order."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """As click's, with torchrun's flags where one of them is asked for."""
        return [*super().get_params(ctx), *ctx.meta.get(_FLAGS, ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; torchrun's flags are laid aside."""
        ctx.allow_interspersed_args = False
        ctx.meta[_TORCHRUN] = []
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption:
            # Asking torchrun's parser imports torch, so only where a flag is not ours.
            known = {name for param in self.params for name in param.opts}
            ctx.meta[_FLAGS] = [o for o in torchrun_options() if known.isdisjoint(o.opts)]
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            near = f"did you mean {error.possibilities[0]}? Or " if error.possibilities else ""
            raise SettingError(
                error.option_name,
                "neither Lockstep nor torchrun has this flag",
                f"{near}put it after the script, if it is the script's own",
            ) from None


def torchrun_options() -> list[click.Option]:
    """Every flag of torchrun, read from its own parser."""
    with nothing_collected():
        from torch.distributed.run import get_args_parser

    return [
        click.Option(
            [f"torchrun_{action.dest}", *action.option_strings],
            is_flag=True if action.nargs == 0 else None,  # False: its value may be left out
            expose_value=False,
            callback=_lay_aside,
            is_eager=action.dest == "print_completion",  # it takes no script
            hidden=True,
        )
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ]


def _lay_aside(ctx: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    name = max(option.opts, key=len)
    if value is True:
        ctx.meta[_TORCHRUN].append(name)
    elif value and option.is_eager:
        parse_flags([name, value])  # torch's parser prints, and exits
    elif value not in (None, False):
        ctx.meta[_TORCHRUN] += [name, value]


class SettingType(click.ParamType):  # type: ignore[type-arg]
    """The value of a setting, read as its environment variable is."""

    def __init__(self, declaration: Declaration) -> None:
        assert declaration.reader is not None
        self.name = declaration.reader.__name__.replace("_", " ")
        self._read = declaration.reader

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the value, or ends with click's error for one that cannot be read."""
        try:
            return self._read(value)
        except ValueError:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each setting whose declaration has a help text, in their order."""
    for declaration in reversed(list(DECLARATIONS.values())):
        if declaration.help:
            add = click.option(
                declaration.option,
                type=SettingType(declaration),
                callback=known_strategy if declaration.name == "strategy" else None,
                metavar=declaration.metavar,
                help=declaration.help,
            )
            command = add(command)
    return command


def known_strategy(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """As it is; the ranks read its options."""
    name = (value or STRATEGIES[0]).partition(":")[0]
    if name not in STRATEGIES:
        raise unknown_choice_error(f"--strategy {value}", name, "strategies", STRATEGIES)
    return value


@click.command(
    cls=RunCommand,
    options_metavar="[OPTIONS] [TORCHRUN'S FLAGS]",
    short_help="Starts a script on several processes.",
    epilog="Every flag of torchrun but --logs-specs is accepted too, with torchrun's meaning "
    "(--nnodes, --node-rank, --master-addr, --rdzv-endpoint, --max-restarts, --log-dir, ...; see "
    "torchrun --help). Flags stand before the script; what follows the script is the script's own.",
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    metavar="N|auto|gpu|cpu",
    help="Processes on this machine; auto: one a GPU, else one a core.  [default: 1]",
)
@click.option(
    "--hosts",
    metavar="A,B:N|FILE",
    help="Machines to start on over ssh, with N processes each, or a hostfile (B slots=N).",
)
@click.option("--copy", is_flag=True, help="With --hosts: send them this folder by rsync.")
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
    help="With --hosts: a variable that all machines get, beside NCCL_... and the like.",
)
@click.option(
    "--ssh",
    default="ssh",
    metavar="COMMAND",
    help="With --hosts: how to call it, such as ssh -F F.",
)
@click.option("--slurm", is_flag=True, help="Submit the run as a job to Slurm.")
@click.option("--nodes", type=click.IntRange(min=1), help="With --slurm: how many machines.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --slurm: GPUs of each, and processes on it.",
)
@click.option("--time", metavar="HH:MM:SS", help="With --slurm: the job's time limit.")
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="With --slurm: another option of sbatch's, such as --partition=gpu.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option(
    "--warm/--no-warm",
    default=True,
    help="Copy the ranks from a process that has imported torch, or start an interpreter for each.",
)
@click.option(
    "--on-hang",
    type=click.Choice(["stop", "report"]),
    default="stop",
    help="End a run that cannot go on, or only say so.",
)
@click.option(
    "--hang-after",
    type=click.FloatRange(min=1.0),
    default=HangRules.after,
    metavar="SECONDS",
    help="Without a step for so long, the ranks are looked at closely.",
)
@click.option(
    "--local-rank-argument",
    type=click.Choice(["local_rank", "local-rank", "none"]),
    help="Give the script its local rank as this argument.  [default: where its source asks]",
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
    on_hang: str,
    hang_after: float,
    local_rank_argument: str | None,
    **settings: Any,
) -> None:
    """Starts SCRIPT on several processes, and ends them all when one fails.

    The settings (--strategy to --report) reach `lockstep.init` in the script; a script that sets
    one itself to another value ends in an error.
    """
    _check_together(ctx)
    elsewhere = {name: settings.pop(name) for name in (*_OF_HOSTS, *_OF_SLURM)}
    torchrun = tuple(ctx.meta[_TORCHRUN])
    if elsewhere["hosts"] is not None:
        on_all = _on_hosts(ctx, (script, *args), elsewhere)
        if dry_run:
            click.echo(on_all.describe())
        else:
            _end(ctx, run_on_hosts(on_all, _say), script, args)
        return
    if elsewhere["slurm"]:
        options = _sbatch_options(ctx, script, elsewhere)
        arguments = _arguments(ctx, (script, *args))
        text = slurm_batch.job_script(options, ctx.params["nproc"], arguments)
        click.echo(text if dry_run else slurm_batch.submit(text, options))
        return
    job = None
    if not has_node_flags(torchrun, os.environ):
        job = slurm.find_placement(os.environ, nproc)
    if job is not None:
        nproc, torchrun = job.nproc, (*torchrun, *job.meeting_flags)
        if job.srun_nodes:
            line = slurm.srun_command(job, _arguments(ctx, (script, *args)))
            if dry_run:
                click.echo(shlex.join(line))
            else:
                slurm.exec_srun(line)
            return
    spec = LaunchSpec(
        script=Script(path=script, arguments=args, module=module),
        nproc=nproc,
        settings={name: value for name, value in settings.items() if value is not None},
        torchrun=torchrun,
        warm=warm,
        hang=HangRules(on_hang, parse_seconds("--hang-after", hang_after)),
        local_rank_argument=local_rank_argument,
    )
    from lockstep.run.start.script import plan_run, run_script

    if dry_run:
        click.echo(plan_run(spec).describe())
    else:
        _end(ctx, run_script(spec, _say), script, args)


_OF_HOSTS = ("hosts", "copy", "on_lost", "forward_env", "ssh")
_OF_SLURM = ("slurm", "nodes", "gpus_per_node", "time", "sbatch")
"""Options that say where else the run is; the first of them makes the others mean something."""


def _on_hosts(ctx: click.Context, script: tuple[str, ...], given: dict[str, Any]) -> HostsSpec:
    """What is to be started on several machines."""
    from lockstep.run.start.script import check_script

    check_flags_elsewhere(ctx.meta[_TORCHRUN], "--hosts")
    check_script(Script(path=script[0], module=ctx.params["module"]))
    here = Path(current_folder())
    if given["copy"] and here in (Path("/"), Path.home().resolve()):
        found = f"all of {here} would be sent"
        raise SettingError("--copy", found, "start the run in the project's own folder")
    hosts = parse_hosts(given["hosts"])
    # A single machine is all there is, whatever a job of Slurm's has besides.
    alone = ["--standalone"] if len(hosts) == 1 else []
    return HostsSpec(
        hosts=hosts,
        arguments=_given(ctx),
        script=script,
        module=ctx.params["module"],
        torchrun=[*alone, *ctx.meta[_TORCHRUN]],
        nproc=ctx.params["nproc"] or "1",
        environment=forwarded_environment(os.environ, given["forward_env"]),
        ssh=ssh_command(given["ssh"]),
        copy=given["copy"],
        keep=given["on_lost"] == "keep",
    )


def _sbatch_options(ctx: click.Context, script: str, given: dict[str, Any]) -> list[str]:
    """What the job asks for that is to be submitted."""
    from lockstep.run.start.script import check_script

    request = slurm_batch.JobRequest(
        nodes=given["nodes"] or 1,
        gpus_per_node=given["gpus_per_node"],
        time=given["time"],
        options=given["sbatch"],
    )
    options = slurm_batch.sbatch_options(request, script)
    check_flags_elsewhere(ctx.meta[_TORCHRUN], "--slurm")
    check_script(Script(path=script, module=ctx.params["module"]))
    return options


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    return ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE


def _check_together(ctx: click.Context) -> None:
    """Refuses options that mean nothing without another one."""
    for names in (_OF_HOSTS, _OF_SLURM):
        first, *others = [p for name in names for p in ctx.command.params if p.name == name]
        for param in () if _is_given(ctx, first) else others:
            if _is_given(ctx, param):
                raise SettingError(
                    param.opts[0], f"there is no {first.opts[0]}", "add it, or leave this out"
                )
    report = ctx.params["report"]
    if report in ("tensorboard", "wandb"):
        from lockstep.extensions.report.record_format import RECORD_SUFFIX

        if not any(Path(report).glob(f"*{RECORD_SUFFIX}")):
            do = f"name one, and afterwards: lockstep report FOLDER --to {report}"
            raise SettingError(f"--report {report}", "it takes a folder for the record", do)
    if ctx.params["hosts"] is not None and ctx.params["slurm"]:
        raise SettingError("--hosts with --slurm", "a job has machines of its own", "take one")


def _arguments(ctx: click.Context, script: tuple[str, ...]) -> list[str]:
    """All that was given, but for --nproc, as it is to be given to launchers elsewhere."""
    module = ["-m"] if ctx.params["module"] else []
    return [*_given(ctx), *ctx.meta[_TORCHRUN], *module, *script]


def _given(ctx: click.Context) -> list[str]:
    """The options that were given, as they are to be given to each machine's launcher."""
    left_out = {*_OF_HOSTS, *_OF_SLURM, "nproc", "module", "dry_run"}
    words = []
    for param in ctx.command.params:
        if isinstance(param, click.Option) and _is_given(ctx, param) and param.name not in left_out:
            value = ctx.params[str(param.name)]
            if param.is_flag:
                words += [(param.opts if value else param.secondary_opts)[0]]
            else:
                words += [param.opts[0], str(value)]
    return words


def _say(line: str) -> None:
    click.echo(f"lockstep: {line}", err=True)


def misplaced(ctx: click.Context, script: str, args: tuple[str, ...]) -> str:
    """What there is to say of options of the command among the script's arguments; or nothing."""
    names = {name for option in ctx.command.params for name in option.opts}
    found = next((word for word in args if word.partition("=")[0] in names), None)
    if not found:
        return ""
    return (
        f"{found} stands after {script}, so that the script was given it; "
        f"the options of {ctx.command_path} stand before the script"
    )


def _end(ctx: click.Context, code: int, script: str, args: tuple[str, ...]) -> None:
    if code == 2 and (hint := misplaced(ctx, script, args)):
        _say(hint)  # argparse and click end so for an argument they do not know
    # All has been ended and said; Ctrl-C once more must not turn our code into another.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctx.exit(code)

"""Finds options of a command that stand after the script, so that the script was given them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import click

from lockstep.cli.unknown_option import MIN_SIMILARITY_AFTER_SCRIPT, similar_option
from lockstep.run.start.unread_arguments import misplaced_launcher_options, never_reads_arguments
from lockstep.run.start.worker import Script


def misplaced_option_hint(ctx: click.Context, script: str, args: tuple[str, ...]) -> str:
    """Returns a hint if an option of this command is among the script's arguments.

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.

    Returns:
        The hint, or an empty string.
    """
    own_flags = flags_of(ctx.command)
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

    warnings = []
    words = misplaced_launcher_options(args, takes_value)
    if words:
        warnings.append(
            f"warning: {shlex.join(words)} has no effect, as it stands after {script}, which reads "
            f"no arguments: write it before {script}"
        )

    unknown_flags = [flag for flag in _flags_among(args) if flag not in takes_value]
    for flag in unknown_flags:
        meant = similar_option(ctx.command, ctx, flag, MIN_SIMILARITY_AFTER_SCRIPT)
        if meant is not None:
            warnings.append(
                f"warning: {flag} has no effect, as {script} reads no arguments: if you meant "
                f"{meant}, write it before {script}"
            )

    # The script is only read if there is something to warn of.
    if warnings and never_reads_arguments(Script(path=script, module=ctx.params["module"])):
        for warning in warnings:
            say(warning)


def _flags_among(args: Sequence[str]) -> list[str]:
    """Returns the flags among the arguments of a script, each once: `--lr` for `--lr=0.1`."""
    flags = [word.partition("=")[0] for word in args if word.startswith("--")]
    return list(dict.fromkeys(flags))


def flags_of(command: click.Command) -> set[str]:
    """Returns every flag of a command: `--nproc`, `--module`, `-m`, ..."""
    flags: set[str] = set()
    for param in command.params:
        flags.update(param.opts)
    return flags

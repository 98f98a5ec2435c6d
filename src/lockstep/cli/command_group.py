"""A group of commands that says which command was probably meant by an unknown one."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from lockstep.familiar_names import COMMANDS_OF_WORD

READING_COMMANDS = {"lockstep checkpoint": "inspect", "lockstep journal": "show"}
"""The command of each group that shows what is in a path. Other groups take no paths."""


class SuggestingGroup(click.Group):
    """A group of commands. For an unknown command its error names those that may be meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command of a command line.

        Raises:
            click.UsageError: there is no such command.
        """
        name = args[0]
        known_names = self.list_commands(ctx)

        is_option = name.startswith("-")  # click itself reports an unknown option
        if name in known_names or is_option:
            return super().resolve_command(ctx, args)

        meant = _commands_meant(ctx.command_path, args, known_names)
        if len(meant) == 1:
            message = f"No such command {name!r}. Did you mean {meant[0]}?"
        elif meant:
            message = f"No such command {name!r}. Did you mean one of: {'; '.join(meant)}?"
        else:
            message = f"No such command {name!r}. There are: {', '.join(known_names)}."
        raise click.UsageError(message, ctx)


def _commands_meant(group: str, args: Sequence[str], known_names: Sequence[str]) -> list[str]:
    """Returns the command lines that may be meant by one with an unknown command.

    Args:
        group: the command line up to the group: "lockstep checkpoint".
        args: the unknown command and its arguments.
        known_names: the commands of the group.
    """
    name, *arguments = args
    # The program may have been called by another name, such as that of a link to it.
    program = group.partition(" ")[0]
    standard_group = group.replace(program, "lockstep", 1)

    # A word of other programs may mean one or several commands: "launch" means "run".
    word = name.lower().replace("_", "-")
    commands_of_word = COMMANDS_OF_WORD[standard_group].get(word)
    if commands_of_word is not None:
        return [_command_line(group, command, arguments) for command in commands_of_word]

    similar = difflib.get_close_matches(name.lower(), known_names, n=1)
    if similar:
        return [_command_line(group, similar[0], arguments)]

    # A path in the place of the command.
    if standard_group == "lockstep" and name.endswith(".py"):
        return [_command_line(group, "run", args)]
    if standard_group in READING_COMMANDS and Path(name).exists():
        return [_command_line(group, READING_COMMANDS[standard_group], args)]

    return []


def _command_line(group: str, command: str, arguments: Sequence[str]) -> str:
    """Returns a command line with its arguments, which are left out of `--help` and the like."""
    is_option = command.rpartition(" ")[2].startswith("--")
    if is_option or not arguments:
        return f"{group} {command}"
    return f"{group} {command} {shlex.join(arguments)}"

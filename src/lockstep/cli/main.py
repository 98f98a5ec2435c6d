"""Implements the command `lockstep`, with its subcommands in one file each.

The file of a subcommand is only imported when the subcommand is called. No subcommand needs torch
to print its help.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import Any

import click

from lockstep import __version__
from lockstep.cli.command_group import SuggestingGroup
from lockstep.cli.help_text import TranslatedUsageError, translate_help
from lockstep.errors import EXIT_SIGNAL, LockstepError, check_language

COMMANDS = ("run", "verify", "doctor", "report", "ledger", "journal", "checkpoint", "explain")


class LazyGroup(SuggestingGroup):
    """A group that imports a subcommand only when it is needed, and prints Lockstep's errors
    briefly.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Translates the help of this command, and then makes the context of the call.

        Click reads the arguments while it makes the context, and prints the help if --help is
        among them. So the help must be translated first.
        """
        translate_help(self)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise TranslatedUsageError(error) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the subcommands, the most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns a subcommand, or None if there is no such subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"lockstep.cli.{cmd_name}").command
        translate_help(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand. Lockstep's own errors end it with their message and exit code."""
        try:
            check_language(os.environ)
            return super().invoke(ctx)
        except LockstepError as error:
            # Not `str(error)`: that also names the line of the user's script that called Lockstep,
            # and here no script is running.
            click.echo(f"lockstep: {error.translated_message}", err=True)
            ctx.exit(error.exit_code)
        except click.UsageError as error:
            raise TranslatedUsageError(error) from None
        except KeyboardInterrupt:
            ctx.exit(EXIT_SIGNAL + signal.SIGINT)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="lockstep")
def main() -> None:
    """Trains a PyTorch model on any number of devices with the same results as on one."""


if __name__ == "__main__":
    main(prog_name="lockstep")

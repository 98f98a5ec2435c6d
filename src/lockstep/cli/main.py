"""`lockstep`: one file a command, imported when it is called, and no torch to say its help."""

from __future__ import annotations

import difflib
import signal
from importlib import import_module
from typing import Any

import click

from lockstep import __version__
from lockstep.errors import LockstepError

COMMANDS = ("run", "verify", "doctor", "report", "ledger", "checkpoint", "explain")


class LazyGroup(click.Group):
    """Imports a command's module when it is needed, and prints our errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, the most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, which its module calls `command`."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"lockstep.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest name where there is no such command."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            if near:
                advice = f"Did you mean {near[0]}?"
            elif name.endswith(".py"):
                advice = f"Did you mean lockstep run {name}?"
            else:
                advice = f"There are: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {name!r}. {advice}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's; our errors end the program with their own exit code."""
        try:
            return super().invoke(ctx)
        except LockstepError as error:
            # Without the place: that would be a line of the command's own.
            click.echo(f"lockstep: {error.parts}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="lockstep")
def main() -> None:
    """Trains a PyTorch model on any number of devices and gets the same numbers."""


if __name__ == "__main__":
    main(prog_name="lockstep")

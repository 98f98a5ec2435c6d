"""Implements `lockstep journal`: compares what two runs have computed, by hashes of every step."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.command_group import SuggestingGroup
from lockstep.cli.output import print_for_people, write_json
from lockstep.errors import LockstepError
from lockstep.language import translate

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
EXIT_UNREADABLE = 2  # 1 means that two journals differ


@click.group(cls=SuggestingGroup, short_help="Finds where two runs first differ, bit by bit.")
def command() -> None:
    """Reads journals of hashes, recorded with `lockstep run --journal FOLDER`."""


@command.command(
    "diff",
    short_help="Finds the first difference between runs A and B.",
    epilog="Exit codes: 0 all steps that both have are equal, 1 they differ, 2 a journal cannot be "
    "read.",
)
@click.argument("a", type=FOLDER)
@click.argument("b", type=FOLDER)
@click.option("--json", "json_file", metavar="FILE", help="Write the result to FILE; - is stdout.")
@click.pass_context
def diff_command(ctx: click.Context, /, a: Path, b: Path, json_file: str | None) -> None:
    """Finds the first step, virtual rank and parameter in which runs A and B differ.

    It also lists the lines of their manifests that differ: code, settings, versions, devices.
    """
    from lockstep.extensions.journal.comparison import compare_journals
    from lockstep.extensions.journal.reading import read_journal

    try:
        comparison = compare_journals(read_journal(a), read_journal(b))
    except LockstepError as error:
        error.exit_code = EXIT_UNREADABLE
        raise

    # If the JSON goes to stdout, the lines go to stderr.
    print_for_people([translate(line) for line in comparison.lines()], json_file)
    write_json(json_file, comparison.as_json())
    ctx.exit(1 if comparison.differs else 0)


@command.command("show", epilog="Exit codes: 0 the journal was read, 2 it cannot be read.")
@click.argument("run", type=FOLDER)
@click.option(
    "--last",
    default=5,
    type=click.IntRange(min=0),
    metavar="STEPS",
    help="Show this many of the last steps.",
)
def show_command(run: Path, last: int) -> None:
    """Shows the manifest of a run and the hashes of its last steps.

    The hashes are of all gradients, of the weights and of the optimizer state together.
    """
    from lockstep.extensions.journal.summary import summary_lines

    try:
        lines = summary_lines(run, last)
    except LockstepError as error:
        error.exit_code = EXIT_UNREADABLE
        raise

    for line in lines:
        # Lines of the manifest are indented, such as "  python 3.12". They hold the user's own
        # values, and are not translated. Notes on them are indented too, and are translated.
        is_note = line.startswith("  note: ")
        is_of_manifest = line.startswith("  ") and not is_note
        click.echo(line if is_of_manifest else translate(line))

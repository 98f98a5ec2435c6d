"""Implements `lockstep ledger`: checks whether a whole run has trained on every sample once."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.output import print_for_people, write_json
from lockstep.language import translate


@click.command(
    short_help="Checks that a run has trained on every sample exactly once.",
    epilog="Exit code 0: every sample was trained on exactly once; 1: not, or no ledger was found.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the report to FILE; - is stdout.")
@click.argument("run", type=click.Path(path_type=Path))
@click.pass_context
def command(ctx: click.Context, /, run: Path, json_file: str | None) -> None:
    """Reads the sample ledger in folder RUN, recorded with `lockstep run --ledger RUN`.

    It reports the samples that an epoch repeated or skipped, across restarts and changes of world
    size. Neither the script nor its data is needed.
    """
    from lockstep.extensions.ledger.judge import judge

    report = judge(run)
    print_for_people(report.lines(translate), json_file)
    write_json(json_file, report.as_json())
    ctx.exit(1 if report.findings else 0)

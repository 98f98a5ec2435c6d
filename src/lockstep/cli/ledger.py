"""`lockstep ledger`: checks whether a whole run trained every sample once."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.output import print_for_people, write_json


@click.command(
    short_help="Checks which samples a run has trained.",
    epilog="Exit codes: 0 every sample was trained once, 1 not, or there is no ledger to read.",
)
@click.option("--json", "as_json", metavar="FILE", help="Write the report there; - is stdout.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.pass_context
def command(ctx: click.Context, /, run: Path, as_json: str | None) -> None:
    """Reads the sample ledger in the folder RUN, which `lockstep run --ledger RUN` has written.

    It covers all restarts and changes of world size, and says whether an epoch trained a sample
    twice or left one out. Neither the script nor its data are needed.
    """
    from lockstep.extensions.ledger.judge import judge

    report = judge(run)
    print_for_people(report.lines(), as_json)
    write_json(as_json, report.as_json())
    ctx.exit(1 if report.findings else 0)

"""`lockstep doctor`: is this machine fit for a run."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.verify import show, write_json


@click.command(
    short_help="Says whether this machine is fit for a run.",
    epilog="Exit codes: 0 nothing stands against a run, 1 an error was found.",
)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("."),
              help="Where checkpoints are to go.")  # fmt: skip
@click.option("--fix", is_flag=True, help="Mend what can be mended without root.")
@click.option("--json", "as_json", metavar="FILE", help="Write the report there; - is stdout.")
@click.pass_context
def command(ctx: click.Context, /, folder: Path, fix: bool, as_json: str | None) -> None:
    """Looks at versions, GPUs, cores, memory, limits, clock, disk and network, in under 30 seconds.

    Each check is one line: ok, warning or error, what was found, and what to do.
    """
    from lockstep import doctor

    facts = doctor.gather(folder)
    done = doctor.fix(facts) if fix else []
    if done:
        facts = doctor.gather(folder)
    findings = doctor.judge(facts)
    show([*(f"fixed    {text}" for text in done), *doctor.lines(findings)], as_json)
    write_json(as_json, doctor.as_json(facts, findings))
    ctx.exit(doctor.exit_code(findings))

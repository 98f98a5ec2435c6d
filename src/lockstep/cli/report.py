"""`lockstep report`: a page of how a run goes, or went."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from lockstep.errors import SettingError


@click.command(
    short_help="Makes a page of how a run went, or goes.",
    epilog="Exit codes: 0 done, 1 there is no record to read, 2 a library is missing.",
)
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the page there.  [default: RUN/report.html]")  # fmt: skip
@click.option("--live", is_flag=True, help="Serve the page on this machine while the run goes on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="For --live; 0: any.")
@click.option("--baseline", "baselines", multiple=True, metavar="RUN",
              type=click.Path(path_type=Path),
              help="Another run, such as one on one rank, to compare with.")  # fmt: skip
@click.option("--to", "tracker", type=click.Choice(["tensorboard", "wandb"]),
              help="Write the curves through this library instead.")  # fmt: skip
@click.argument("run", type=click.Path(path_type=Path))
def command(
    run: Path,
    out: Path | None,
    live: bool,
    port: int,
    baselines: tuple[Path, ...],
    tracker: str | None,
) -> None:
    """Reads the record in the folder RUN, which `lockstep run --report RUN` has written.

    The page is one file that needs nothing else: what was run and chosen, the loss, where the time
    of a step goes by rank, what failed or hung, and which samples were trained.
    """
    from lockstep.extensions.report.reading import Record

    record = Record(run)
    if tracker is not None:
        from lockstep.extensions.report.trackers import follow, write

        click.echo((follow if live else write)(record, tracker))
        return
    from lockstep.extensions.report.page import render
    from lockstep.run.watch.evidence import write_atomically

    others = [Record(folder) for folder in baselines]
    if live:
        from lockstep.extensions.report.live import serve

        serve(record, others, port, click.echo)
        return
    path = out or run / "report.html"
    place = Path(os.path.realpath(path))  # a link stays one
    page = render(record, others)
    stdout = False
    with contextlib.suppress(OSError):
        stdout = os.path.samestat(path.stat(), os.fstat(1))  # which may be a file, too
    if stdout:
        click.echo(page.encode(), nl=False)
        return
    try:
        if path.exists() and not path.is_file():  # a pipe
            path.write_text(page, encoding="utf-8")
            return
        write_atomically(place, page)
    except OSError as error:
        with contextlib.suppress(OSError):
            place.with_name(f"{place.name}.new").unlink()
        found = f"it cannot be written: {error.strerror}"
        raise SettingError(f"--out {path}", found, "name another file") from error
    click.echo(f"{click.format_filename(path)}: {len(page.encode()) / 1e6:.1f} MB")

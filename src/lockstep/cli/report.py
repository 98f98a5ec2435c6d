"""Implements `lockstep report`: builds an HTML page about a run that has finished or is running."""

from __future__ import annotations

import os
from pathlib import Path

import click

from lockstep.cli.output import write_json
from lockstep.errors import SettingError
from lockstep.file_paths import check_path_of_this_system
from lockstep.language import translate
from lockstep.units import format_bytes


@click.command(
    short_help="Builds an HTML report of a finished or running job.",
    epilog="Exit code 0: done; 1: no record was found; 2: a setting is wrong.",
)
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Where to write the page.  [default: RUN/report.html]")  # fmt: skip
@click.option(
    "--live", is_flag=True, help="Serve the page on this machine while the run is in progress."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port for --live; 0: any free port."
)
@click.option("--to", "tracker", type=click.Choice(["tensorboard", "wandb", "mlflow"]),
              help="Write the curves to this tracker instead.")  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE", help="Write the report as JSON instead; - is stdout."
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("others", nargs=-1, metavar="[OTHER]...", type=click.Path(path_type=Path))
def command(
    run: Path,
    out: Path | None,
    live: bool,
    port: int,
    tracker: str | None,
    json_file: str | None,
    others: tuple[Path, ...],
) -> None:
    """Builds a page from folder RUN, recorded with `lockstep run --report RUN`.

    The page is one self-contained file: what failed, hung or was slow and what to do about it, the
    loss and all other curves, where each rank spends the time of a step, the command and settings,
    and which samples were trained on. With OTHER runs, RUN is compared with them.
    """
    from lockstep.extensions.report.reading import Record

    _check_json_alone(json_file, out, live, tracker)

    record = Record(run)
    if tracker is not None:
        if others:
            raise SettingError(
                f"--to {tracker} of several runs",
                "it writes the curves of one run",
                "call it once for each run",
            )

        from lockstep.extensions.report.trackers import follow, write

        summary = follow(record, tracker) if live else write(record, tracker)
        _say(summary)
        return

    other_records = [Record(folder) for folder in others]
    if json_file is not None:
        from lockstep.extensions.report.summary import summarize

        write_json(json_file, summarize(record, other_records))
        return

    if live:
        from lockstep.extensions.report.live import serve

        serve(record, other_records, port, _say)
        return

    from lockstep.extensions.report.page import render

    page = render(record, other_records)
    path = out or run / "report.html"
    check_path_of_this_system(f"--out {path}", path)
    if _is_stdout(path):
        click.echo(page.encode(), nl=False)
        return

    _write_page(path, page)


def _say(line: str) -> None:
    """Prints an English line in the language of this process."""
    click.echo(translate(line))


def _check_json_alone(
    json_file: str | None, out: Path | None, live: bool, tracker: str | None
) -> None:
    """Checks that --json is not combined with an option that asks for something else.

    Raises:
        SettingError: --json is given together with --out, --live or --to.
    """
    if json_file is None:
        return

    for option, is_given in (
        ("--out", out is not None),
        ("--live", live),
        ("--to", tracker is not None),
    ):
        if is_given:
            raise SettingError(
                f"--json {json_file} with {option}",
                "--json writes no page and no curves",
                "call the command once for each",
            )


def _is_stdout(path: Path) -> bool:
    """Returns True if a path is the standard output of this process.

    This is the case for /dev/stdout, and for a file to which the shell redirects standard output.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # there is no such file yet
        return False


def _write_page(path: Path, page: str) -> None:
    """Writes the page to a file, completely or not at all, and prints the size of the file.

    The page may also be written to a pipe or a device. Then no size is printed: with
    `--out /dev/stdout` it would become a part of the page.

    Raises:
        SettingError: the file cannot be written.
    """
    from lockstep.run.watch.evidence import write_atomically

    try:
        is_pipe_or_device = path.exists() and not path.is_file()
        if is_pipe_or_device:  # it cannot be replaced by a new file
            path.write_text(page, encoding="utf-8")
        else:
            target = Path(os.path.realpath(path))  # so that a symbolic link is kept
            write_atomically(target, page)
    except OSError as error:
        found = f"it cannot be written: {error.strerror}"
        raise SettingError(f"--out {path}", found, "name another file") from error

    if not is_pipe_or_device:
        click.echo(f"{click.format_filename(path)}: {format_bytes(len(page.encode()))}")

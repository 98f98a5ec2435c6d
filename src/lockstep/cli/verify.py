"""`lockstep verify`: whether a script computes on several processes what it computes on one."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.errors import SettingError, UsageError

if TYPE_CHECKING:
    from lockstep.verify.record import Way


_EVERY_S = 30.0
"""Seconds between two lines on how far it is, where there is no terminal."""
_STEPS, _SECONDS = 50, 5.0
"""How many are compared by default, unless that takes longer on one process."""
_FED_STEPS = 10
"""The same with --same-samples, where the run on several processes comes first."""
_CODES = {"EQUAL": 0, "NOT KNOWN": 2, "FAILED": 2, "DIFFERENT": 1}
"""Exit code of each verdict; the worst comes last."""


@click.command(
    short_help="Compares what several processes compute with one.",
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 EQUAL, 1 DIFFERENT, 2 FAILED, NOT KNOWN, or nothing could be compared, "
    "5 an error of verify itself.",
)
@click.option(
    "--nproc", type=click.IntRange(2), default=2, metavar="N", help="Processes to compare with one."
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="K",
    help=f"Steps to compare. Default: at least 3, and at most {_STEPS} in {_SECONDS:g} seconds.",
)
@click.option("--accumulate", type=click.IntRange(2), metavar="K", help="With K micro-batches too.")
@click.option("--shares", metavar="A:B:...", help="Compare with these shares of the batch too.")
@click.option(
    "--strategy",
    multiple=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="With this too; repeatable.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp64", "fp32"]),
    default="fp64",
    help="In float32 rounding differs: small differences are then passed over.",
)
@click.option(
    "--batch-per-process",
    is_flag=True,
    help="The script's batch size is that of one process: on one process its DataLoaders get N "
    "times as much.",
)
@click.option(
    "--same-samples",
    is_flag=True,
    help="One process trains on the batches that torch's DataLoaders give all ranks: for scripts "
    "whose order, batches or augmentation differ, to compare what lies behind.",
)
@click.option("--json", "as_json", metavar="FILE", help="Write the verdict there; - is stdout.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, /, script: str, args: tuple[str, ...], as_json: str | None, **options: Any
) -> None:
    """Runs SCRIPT on one process and on several, and compares what they compute, step by step.

    The script stops after a few optimizer steps; it neither resumes nor saves checkpoints. Samples,
    losses, gradients, learning rates, parameters and buffers are compared in float64, and the
    first difference is named with its likely cause.
    """
    alone, *others = _ways(script, args, options)
    same = options["same_samples"]
    count = 1 + len(others) + sum(way.apart for way in others)
    names = "; ".join(way.name for way in (alone, *others))
    click.echo(f"{count} runs of {script}: {names}", err=True)  # what follows imports torch

    from lockstep.cli.run import misplaced  # what is refused by then needs no torch
    from lockstep.verify.record import record
    from lockstep.verify.verdict import check_reference, judge

    start = _Runs(count).start
    verdicts = []
    prefix = "lockstep-verify-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        first = None
        if same:
            kept = Path(folder) / "batches"
            # Ranks must end in one step, so it cannot be the time that ends them.
            way = replace(others[0], batches=kept, steps=options["steps"] or _FED_STEPS)
            first = record(way, Path(folder) / "0", start)
            steps = first.steps if first.until else alone.steps
            alone = replace(alone, batches=kept, seconds=None, steps=steps)
        reference = record(alone, Path(folder) / "reference", start)
        words = ["lockstep", "run", *["-m"] * options["module"], script, *args]
        asked = [f"--{name}" for name in ("accumulate", "shares", "strategy") if options[name]]
        told = f"lockstep verify {script}", asked, shlex.join(words), "script"
        if reference.error.startswith("sys.exit(2)") and (hint := misplaced(ctx, script, args)):
            raise UsageError(f"lockstep verify {script}", hint, "move it there")
        check_reference(reference, *told)
        if (
            reference.until and not same
        ):  # else the script has come to its end, and others may make more
            others = [replace(way, steps=reference.steps) for way in others]
        for number, way in enumerate(others):
            against = reference
            if way.apart:
                against = record(way.alone(), Path(folder) / f"reference {number}", start)
                check_reference(against, *told)
            found = first or record(way, Path(folder) / str(number), start)
            verdict = judge(against, found)
            verdicts.append(verdict)
            show(verdict.lines(), as_json)
            off = verdict.other.notes
            if number == 0 and off:
                show([f"  switched off for the comparison: {', '.join(off)}"], as_json)
    worst = max(verdicts, key=lambda verdict: list(_CODES).index(verdict.word))
    write_json(as_json, {**worst.as_json(), "ways": [v.as_json() for v in verdicts]})
    ctx.exit(_CODES[worst.word])


class _Runs:
    """Starts the runs, and says on standard error which one it is, its step and the time left.

    On a terminal that is one line, which goes when the run has ended; elsewhere a line when a run
    starts, after its first step, and every half minute.
    """

    def __init__(self, count: int) -> None:
        self._count, self._number = count, 0
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._whole: float | None = None
        """Seconds that a run takes, by what was seen last; None: nothing yet."""

    def start(self, folder: Path, way: Way) -> str:
        """Starts a run; returns what it printed when it has ended."""
        from lockstep.verify.record import by_command

        self._number += 1
        self._begun, self._steps = time.monotonic(), -1
        try:
            return by_command(folder, way, partial(self._tell, way))
        finally:
            self._whole = time.monotonic() - self._begun
            if self._terminal:
                click.echo("\r\x1b[K", nl=False, err=True)

    def _tell(self, way: Way, steps: int) -> None:
        from lockstep.extensions.report.console import clock

        now = time.monotonic()
        seconds, steps = now - self._begun, min(steps, way.steps)
        if steps > self._steps:
            if steps < 2 or self._steps < 1:
                self._first, self._due = seconds, now
            if steps:
                each = (seconds - self._first) / max(1, steps - 1)
                rest = each * (way.steps - steps)
                self._whole = seconds + min(rest, way.seconds or rest)
            self._steps = steps
        if not self._terminal and now < self._due:
            return
        self._due = now + _EVERY_S
        left = "how long it takes is known after the first step"
        if self._whole is not None:
            rest = max(0.0, self._whole - seconds) + (self._count - self._number) * self._whole
            left = f"{clock(rest)} left of about {clock(now - self._start + rest)}"
            if rest < 1.0:  # longer than expected: nothing is known of the rest
                left = "about to end"
        most = f"at most {way.steps}" if way.seconds else way.steps
        line = f"run {self._number} of {self._count}, {way.name}: step {steps} of {most}"
        line = f"{line}, {left}"
        click.echo(f"\r{line}\x1b[K" if self._terminal else line, nl=not self._terminal, err=True)


def _ways(script: str, args: tuple[str, ...], options: dict[str, Any]) -> list[Way]:
    """The reference, and what is compared with it."""
    from lockstep.run.start.script import check_script
    from lockstep.run.start.source_hints import read_script
    from lockstep.run.start.worker import Script
    from lockstep.verify.record import OWN_PROCESSES, Way

    nproc = options["nproc"]
    if options["same_samples"]:
        _check_alone(options)
    program = Script(path=script, arguments=args, module=options["module"])
    check_script(program, "lockstep verify")
    reading = read_script(program)
    if reading.spawns_ranks:
        raise UsageError(
            f"lockstep verify {script}",
            "the script starts its ranks itself, as by mp.spawn, and those are not seen",
            OWN_PROCESSES,
        )
    way = Way(
        name=f"{nproc} processes",
        nproc=nproc,
        script=replace(program, local_rank_flag=reading.local_rank_flag),
        steps=options["steps"] or _STEPS,
        precision=options["precision"],
    )
    alone = way.alone(nproc if options["batch_per_process"] else 1)
    ways = [replace(alone, seconds=None if options["steps"] else _SECONDS), way]
    if count := options["accumulate"]:
        name = f"{way.name}, {count} micro-batches"
        ways.append(replace(way, name=name, instead={"min_micro_batches": count}))
    if shares := options["shares"]:
        ways.append(replace(way, name=f"{way.name}, shares {shares}", instead={"shares": shares}))
    for strategy in options["strategy"]:
        processes = 1 if strategy.partition(":")[0] == "dp" else nproc  # for all its devices
        instead = {"strategy": strategy}
        ways.append(replace(way, name=f"strategy {strategy}", nproc=processes, instead=instead))
    return ways


def _check_alone(options: dict[str, Any]) -> None:
    """Raises SettingError where --same-samples is given with what it cannot be combined with."""
    names = ("batch_per_process", "accumulate", "shares", "strategy")
    others = [f"--{name.replace('_', '-')}" for name in names if options[name]]
    if others:
        raise SettingError(
            f"lockstep verify --same-samples {' '.join(others)}",
            "with the same samples on one process nothing of that is left to do",
            "leave one of them out",
        )


def show(lines: Sequence[str], as_json: str | None) -> None:
    """Prints lines for people, unless standard output is for JSON alone."""
    if as_json != "-":
        click.echo("\n".join(lines))


def write_json(to: str | None, values: dict[str, Any]) -> None:
    """Writes a file; `-` is standard output, and None writes nothing.

    What JSON has no number for is text there: "NaN", "Infinity".

    Raises:
        SettingError: the file cannot be written.
    """
    text = json.dumps(json.loads(json.dumps(values), parse_constant=str), indent=2)
    if to == "-":
        click.echo(text)
    elif to is not None:
        try:
            Path(to).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingError(f"--json {to}", str(error.strerror), "name another file") from None

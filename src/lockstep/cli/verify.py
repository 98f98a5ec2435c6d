"""`lockstep verify`: whether a script computes on several processes what it computes on one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.verify.runs import Plan, Recorded, Way


_CODES = {"EQUAL": 0, "FAILED": 2, "DIFFERENT": 1}
"""Exit code of each verdict; the worst comes last."""


@click.command(
    short_help="Compares what several processes compute with one.",
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: 0 EQUAL, 1 DIFFERENT, 2 FAILED, or nothing could be compared.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    metavar="N",
    help="Processes to compare with one.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="K",
    help="Optimizer steps to compare.",
)
@click.option(
    "--accumulate",
    type=click.IntRange(min=2),
    metavar="K",
    help="Compare with K micro-batches a step too.",
)
@click.option("--shares", metavar="A:B:...", help="Compare with these shares of the batch too.")
@click.option(
    "--strategy", multiple=True, metavar="NAME", help="Compare with this too; may be repeated."
)
@click.option(
    "--precision",
    type=click.Choice(["fp64", "fp32"]),
    default="fp64",
    show_default=True,
    help="In float32 rounding differs: small differences are then passed over.",
)
@click.option(
    "--batch-per-process",
    is_flag=True,
    help="The script's batch size is that of one process: on one process its DataLoaders get N "
    "times as much.",
)
@click.option(
    "--json", "as_json", metavar="FILE", help="Write the verdict there; - is standard output."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    script: str,
    args: tuple[str, ...],
    as_json: str | None,
    **options: Any,
) -> None:
    """Runs SCRIPT on one process and on several, and compares what they compute, step by step.

    The script stops after a few optimizer steps; it neither resumes nor saves checkpoints. Samples,
    losses, gradients, learning rates, parameters and buffers are compared in float64, and the
    first difference is named with its likely cause.
    """
    ctx.exit(_verify(script, args, as_json, options))


def _verify(
    script: str, args: tuple[str, ...], as_json: str | None, options: dict[str, Any]
) -> int:
    from lockstep.verify.compare import FLOAT32, FLOAT64
    from lockstep.verify.runs import by_command, record
    from lockstep.verify.verdict import judge

    plan = _plan(script, args, options)
    first, *others = _ways(options)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
    try:
        reference = record(first, plan, folder / "reference", by_command)
        _check_reference(reference, plan, options)
        verdicts = []
        for number, way in enumerate(others):
            other = record(way, plan, folder / str(number), by_command)
            verdict = judge(reference, other, FLOAT64 if plan.double else FLOAT32)
            verdicts.append(verdict)
            show(verdict.lines(), as_json)
            if number == 0 and other.notes:
                show([f"  switched off for the comparison: {', '.join(other.notes)}"], as_json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    worst = max(verdicts, key=lambda verdict: list(_CODES).index(verdict.word))
    write_json(as_json, {**worst.as_json(), "ways": [v.as_json() for v in verdicts]})
    return _CODES[worst.word]


def _plan(script: str, args: tuple[str, ...], options: dict[str, Any]) -> Plan:
    from lockstep.launcher.script import check_script, read_script
    from lockstep.verify.record import OWN_PROCESSES
    from lockstep.verify.runs import Plan

    module: bool = options["module"]
    check_script(script, module=module, command="lockstep verify")
    reading = read_script(script, module=module)
    if reading.own_processes:
        raise UsageError(
            f"lockstep verify {script}",
            "the script starts its ranks itself, as by mp.spawn, and those are not seen",
            OWN_PROCESSES,
        )
    return Plan(
        script=script,
        arguments=args,
        module=module,
        local_rank_flag=reading.local_rank_flag,
        steps=options["steps"],
        double=options["precision"] == "fp64",
    )


def _ways(options: dict[str, Any]) -> list[Way]:
    """The reference, and what is compared with it."""
    from lockstep.verify.runs import Way, alone

    nproc: int = options["nproc"]

    def way(name: str, processes: int = nproc, **settings: Any) -> Way:
        instead = {"precision": options["precision"], **settings}
        return Way(name=name, nproc=processes, instead=instead)

    several = f"{nproc} processes"
    ways = [
        alone(options["precision"], nproc if options["batch_per_process"] else 1),
        way(several),
    ]
    if count := options["accumulate"]:
        ways.append(way(f"{several}, {count} micro-batches", min_micro_batches=count))
    if shares := options["shares"]:
        ways.append(way(f"{several}, shares {shares}", shares=shares))
    for strategy in options["strategy"]:
        processes = 1 if strategy == "dp" else nproc  # for all its devices
        ways.append(way(f"strategy {strategy}", processes, strategy=strategy))
    return ways


def _check_reference(reference: Recorded, plan: Plan, options: dict[str, Any]) -> None:
    """Whether there is something to compare with."""
    was_set = f"lockstep verify {plan.script}"
    if reference.error or not reference.updates:
        words = ["-m", plan.script] if plan.module else [plan.script]
        found = "the script made no optimizer step on one process"
        do = "give it arguments with which it trains; processes that it starts itself are not seen"
        if reference.error:
            found = f"on one process the script ended with {reference.error}"
            do = f"make this work: {shlex.join(['lockstep', 'run', *words, *plan.arguments])}"
        if plan.double and re.search("dtype|double", reference.error, re.IGNORECASE):
            do = "the script names dtypes itself; try --precision fp32"
        printed = [f"| {line}" for line in reference.output.splitlines()]
        raise UsageError(was_set, "\n         ".join([*found.splitlines(), *printed]), do)
    asked = [f"--{name}" for name in ("accumulate", "shares", "strategy") if options[name]]
    if asked and not reference.of_lockstep:
        raise UsageError(
            f"{was_set} with {asked[0]}",
            "the script does not train by Lockstep, so nothing would come of it",
            "leave it out, or let the script use lockstep.init and world.prepare",
        )


def show(lines: Sequence[str], as_json: str | None) -> None:
    """Prints lines for people, unless standard output is for JSON alone."""
    if as_json != "-":
        click.echo("\n".join(lines))


def write_json(to: str | None, values: dict[str, Any]) -> None:
    """Writes a file; `-` is standard output, and None writes nothing."""
    text = json.dumps(values, indent=2)
    if to == "-":
        click.echo(text)
    elif to is not None:
        Path(to).write_text(text + "\n", encoding="utf-8")

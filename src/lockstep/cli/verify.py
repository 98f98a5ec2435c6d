"""Implements `lockstep verify`: checks whether a script computes the same on several processes as
on one.

A `RunConfig` describes a run of the script: the number of processes and the settings. The
*reference* is the run on one process. Every other run is compared with it and gets a *verdict*:
EQUAL, DIFFERENT, FAILED or NOT KNOWN.
"""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.misplaced_options import misplaced_option_hint, say_if_options_are_not_read
from lockstep.cli.output import print_for_people, say, write_json
from lockstep.cli.verify_progress import VerifyProgress
from lockstep.errors import SettingError, UsageError
from lockstep.language import translate
from lockstep.strategies.registry import entry_of

if TYPE_CHECKING:
    from lockstep.verify.comparison_plan import ComparisonPlan
    from lockstep.verify.run_config import RunConfig
    from lockstep.verify.run_record import RunRecord


# Without --steps, the reference makes steps until one of these limits is reached.
DEFAULT_STEPS = 50
DEFAULT_SECONDS = 5.0
# With one of these options, runs are compared within a tolerance, and not bit by bit.
OPTIONS_WITHOUT_BITS = ("accumulate", "same_samples", "batch_per_process", "precision")
EXIT_CODES = {"EQUAL": 0, "NOT KNOWN": 2, "FAILED": 2, "DIFFERENT": 1}
"""The exit code of each verdict, from the best verdict to the worst."""


@click.command(
    short_help="Compares what several processes compute with one.",
    context_settings={"allow_interspersed_args": False},
    epilog="Exit code 0: EQUAL; 1: DIFFERENT; 2: FAILED, NOT KNOWN, or nothing could be compared; "
    "5: verify itself failed.",
)
@click.option(
    "--nproc", type=click.IntRange(2), default=2, metavar="N", help="Compare N processes with one."
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="K",
    help=f"Compare K steps. Default: at least 3, then up to {DEFAULT_STEPS} for "
    f"{DEFAULT_SECONDS:g} seconds.",
)
@click.option(
    "--accumulate", type=click.IntRange(2), metavar="K", help="Also compare with K micro-batches."
)
@click.option(
    "--shares", metavar="A:B:...", help="Also compare with the batch split in this ratio."
)
@click.option(
    "--strategy",
    multiple=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="Also compare under this strategy; may be repeated.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp64", "fp32"]),
    help="Compare only within a tolerance. With fp32, differences within rounding are ignored.",
)
@click.option(
    "--bits/--float64",
    "by_bits",
    default=None,
    help="Compare only bit by bit, or only in float64, if the script uses Lockstep. Default: bit "
    "by bit, then in float64 unless it sets virtual_ranks itself and all bits are equal.",
)
@click.option(
    "--batch-per-process",
    is_flag=True,
    help="The script's batch size is per process: the run on one process uses a batch N times as "
    "large.",
)
@click.option(
    "--same-samples",
    is_flag=True,
    help="Give the run on one process the batches that torch's DataLoaders give all ranks. For "
    "scripts whose order, batches or augmentation differ, to compare everything else.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the verdict to FILE; - is stdout.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, /, script: str, args: tuple[str, ...], json_file: str | None, **options: Any
) -> None:
    """Runs SCRIPT on one process and on several, and compares what they compute, step by step.

    The script stops after a few optimizer steps; it neither resumes nor saves checkpoints. Samples,
    losses, gradients, learning rates, parameters and buffers are compared in float64, and the
    first difference is named with its likely cause. Scripts that use Lockstep are compared bit by
    bit first, with virtual ranks, in their own precision and with dropout.
    """
    plan = _plan_comparison(script, args, options)
    say_if_options_are_not_read(ctx, script, args, say)

    # A run whose strategy trains several replicas needs a reference of its own.
    num_runs = 1 + len(plan.ways) + len([way for way in plan.ways if way.trains_replicas])
    descriptions = "; ".join(config.name for config in (plan.reference, *plan.ways))

    # This is printed before torch is imported, which takes seconds.
    if plan.by_bits and plan.source_uses_lockstep:
        num_bit_runs = 1 + len(plan.ways)
        num_runs = num_bit_runs if plan.only_bits else num_bit_runs + num_runs
        text = f"at most {num_runs} runs of {script}, first by bits: {descriptions}"
    else:
        text = f"{num_runs} runs of {script}: {descriptions}"
    click.echo(translate(text), err=True)

    from lockstep.verify.bit_verdict import BitVerdict
    from lockstep.verify.comparison import Comparison
    from lockstep.verify.verdict import Verdict

    progress = VerifyProgress(num_runs)

    def check_reference(reference: RunRecord) -> None:
        """Checks that a run on one process recorded something to compare with."""
        _check_arguments(ctx, reference, script, args)
        _check_reference(reference, script, args, options)

    verdicts: list[Verdict | BitVerdict] = []
    with tempfile.TemporaryDirectory(
        prefix="lockstep-verify-", ignore_cleanup_errors=True
    ) as temporary_folder:
        comparison = Comparison(
            plan, Path(temporary_folder), progress.run, check_reference, progress.expect_more_runs
        )
        for result in comparison.results():
            verdict = result.verdict
            print_for_people(verdict.lines(), json_file)

            switched_off = verdict.parallel.switched_off
            is_first_of_kind = not any(type(earlier) is type(verdict) for earlier in verdicts)
            if is_first_of_kind and switched_off:  # the same for all runs, so it is printed once
                text = f"switched off for the comparison: {', '.join(switched_off)}"
                print_for_people([f"  {translate(text)}"], json_file)

            if result.notes:
                print_for_people(result.notes, json_file)

            verdicts.append(verdict)

    from_best_to_worst = list(EXIT_CODES)
    worst = max(verdicts, key=lambda verdict: from_best_to_worst.index(verdict.word))
    verdicts_as_json = [verdict.as_json() for verdict in verdicts]
    values = {**worst.as_json(), "ways": verdicts_as_json}
    values["bits_not_compared"] = comparison.reason_without_bits or plan.reason_without_bits
    write_json(json_file, values)
    ctx.exit(EXIT_CODES[worst.word])


def _check_arguments(
    ctx: click.Context, reference: RunRecord, script: str, args: tuple[str, ...]
) -> None:
    """Checks whether the script failed because it was given an option of `lockstep verify`.

    Args:
        ctx: the context of the command, which knows its options.
        reference: the run on one process.
        script: the script.
        args: the arguments of the script.

    Raises:
        UsageError: the script failed, and one of its arguments is an option of this command. The
            error says that the option belongs before the script.
    """
    # argparse and click end a script with `sys.exit(2)` if it does not know one of its arguments.
    # The record names this call as the error of the run.
    refused_arguments = reference.error.startswith("sys.exit(2)")
    if not refused_arguments:
        return

    hint = misplaced_option_hint(ctx, script, args)
    if hint:
        raise UsageError(f"lockstep verify {script}", hint, "move it there")


def _check_reference(
    reference: RunRecord, script: str, args: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Checks that the reference has trained without an error, so that runs can be compared with it.

    Args:
        reference: the record of the run on one process.
        script: the script.
        args: the arguments of the script.
        options: the options of the command.

    Raises:
        UsageError: the reference has failed, or no run can be compared with it.
    """
    from lockstep.verify.reference_check import check_reference

    module_flag = ["-m"] if options["module"] else []
    command_without_verify = shlex.join(["lockstep", "run", *module_flag, script, *args])

    # These options only have an effect on a script that trains with Lockstep. If this one does not,
    # the error names them.
    lockstep_options = []
    for name in ("accumulate", "shares", "strategy"):
        if options[name]:
            lockstep_options.append(f"--{name}")

    check_reference(
        reference,
        heading=f"lockstep verify {script}",
        lockstep_options=lockstep_options,
        command=command_without_verify,
        subject="script",
    )


def _plan_comparison(script: str, args: tuple[str, ...], options: dict[str, Any]) -> ComparisonPlan:
    """Decides which runs to make and how to compare them.

    Raises:
        SettingError: there is no such script, or options cannot be combined.
        UsageError: the script starts its ranks itself.
    """
    from lockstep.run.start.script_check import check_script
    from lockstep.run.start.source_hints import read_script
    from lockstep.run.start.worker import Script
    from lockstep.verify.comparison_plan import ComparisonPlan
    from lockstep.verify.run_config import RunConfig
    from lockstep.verify.unsupported import OWN_PROCESSES_HINT

    if options["same_samples"]:
        _check_options_with_same_samples(options)
    if options["by_bits"]:
        _check_options_with_bits(options)

    program = Script(path=script, arguments=args, module=options["module"])
    check_script(program, "lockstep verify")
    source = read_script(program)
    if source.spawns_ranks:
        raise UsageError(
            f"lockstep verify {script}",
            "the script starts its ranks itself, as by mp.spawn, and those are not seen",
            OWN_PROCESSES_HINT,
        )

    # The plain run on several processes. All further runs differ from it in a few settings.
    nproc = options["nproc"]
    several = RunConfig(
        name=f"{nproc} processes",
        nproc=nproc,
        script=replace(program, local_rank_flag=source.local_rank_flag),
        steps=options["steps"] or DEFAULT_STEPS,
        precision=options["precision"] or "fp64",
    )

    # With --batch-per-process, the batch of the one process is as large as those of all processes
    # together.
    reference = several.reference_config(
        batch_size_factor=nproc if options["batch_per_process"] else 1
    )
    if options["steps"] is None:
        reference = replace(reference, seconds=DEFAULT_SECONDS)

    reason = ""
    if options["accumulate"]:
        count = options["accumulate"]
        reason = (
            f"--accumulate {count} computes in pieces of another size, so sums are rounded "
            "differently"
        )

    excluded = [name for name in OPTIONS_WITHOUT_BITS if options[name]]
    return ComparisonPlan(
        reference=reference,
        ways=_runs_to_compare(several, options),
        steps=options["steps"],
        same_samples=options["same_samples"],
        by_bits=options["by_bits"] is not False and not excluded,
        only_bits=options["by_bits"] is True,
        reason_without_bits=reason,
        source_uses_lockstep=source.imports_lockstep,
    )


def _runs_to_compare(several: RunConfig, options: dict[str, Any]) -> list[RunConfig]:
    """Returns the runs that are compared with the reference.

    These are the plain run, and one run for --accumulate, for --shares, and for each --strategy.

    Args:
        several: the plain run on several processes.
        options: the options of the command.
    """
    configs = [several]
    if options["accumulate"]:
        count = options["accumulate"]
        name = f"{several.name}, {count} micro-batches"
        configs.append(replace(several, name=name, overrides={"min_micro_batches": count}))

    if options["shares"]:
        shares = options["shares"]
        name = f"{several.name}, shares {shares}"
        configs.append(replace(several, name=name, overrides={"shares": shares}))

    for strategy in options["strategy"]:
        # Under dp, which is `torch.nn.DataParallel`, a single process uses all devices.
        processes = 1 if entry_of(strategy).uses_all_devices else several.nproc
        configs.append(
            replace(
                several,
                name=f"strategy {strategy}",
                nproc=processes,
                overrides={"strategy": strategy},
            )
        )

    return configs


def _check_options_with_bits(options: dict[str, Any]) -> None:
    """Checks that --bits is not given together with an option that changes the rounding of runs.

    Raises:
        SettingError: such an option is given.
    """
    options_that_change_rounding = []
    for name in OPTIONS_WITHOUT_BITS:
        if options[name]:
            options_that_change_rounding.append(f"--{name.replace('_', '-')}")

    if options_that_change_rounding:
        raise SettingError(
            f"lockstep verify --bits {' '.join(options_that_change_rounding)}",
            "such runs are rounded in another way, so they cannot have the same bits",
            "leave one of them out",
        )


def _check_options_with_same_samples(options: dict[str, Any]) -> None:
    """Checks that no option is given that cannot be combined with --same-samples.

    With --same-samples, one process trains on the batches of the run on several processes. The
    options that are excluded change the size of a batch, or ask for further runs, which would have
    other batches.

    Raises:
        SettingError: such an option is given.
    """
    excluded = []
    for name in ("batch_per_process", "accumulate", "shares", "strategy"):
        if options[name]:
            excluded.append(f"--{name.replace('_', '-')}")

    if excluded:
        raise SettingError(
            f"lockstep verify --same-samples {' '.join(excluded)}",
            "one process trains on the batches of a single other run, and these options change the "
            "batches or add runs",
            "leave out --same-samples or the other options",
        )

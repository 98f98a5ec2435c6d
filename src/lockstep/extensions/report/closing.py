"""Prints the last lines of a training on rank 0: how fast it was, and what was sent and saved."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.communication.traffic import Traffic
from lockstep.extensions.report.console import duration, print_labelled_note, rate, thousands
from lockstep.session.step import Step
from lockstep.strategies.registry import entry_of
from lockstep.units import format_bytes


def print_closing(
    step: Step,
    folders: Sequence[str],
    network_traffic: Traffic,
    strategy: str,
    *,
    resumed_step: int | None = None,
) -> None:
    """Prints the last lines of a training, or nothing if no optimizer step was made.

    Args:
        step: the step of the run, which has counted its samples.
        folders: the folders of the checkpoints that were saved.
        network_traffic: the bytes that rank 0 sent to other ranks.
        strategy: the name of the run's strategy.
        resumed_step: the step of the checkpoint that was resumed; None if none was.
    """
    if not step.number:
        return

    if step.number == resumed_step:
        print_labelled_note("trained", f"nothing after step {step.number}, which was resumed")

    # The samples of this process. They are 0 if it made no step after resuming, or if the script
    # has no prepared loader, which would count them.
    samples = step.samples
    seconds = step.seconds
    if samples:
        speed = f"{thousands(samples)} samples in {duration(seconds)}, {rate(samples, seconds)}"
        print_labelled_note("trained", speed)

    # With some strategies torch itself sends the data, so Lockstep cannot count the bytes.
    is_counted = not entry_of(strategy).communicates_within_passes
    if network_traffic.sent and is_counted:
        text = f"{format_bytes(network_traffic.sent)} by rank 0 to other ranks"
        if network_traffic.shared:
            text += f", {format_bytes(network_traffic.shared)} into shared memory"
        print_labelled_note("sent", text)

    if folders:
        print_labelled_note("checkpoint", str(folders[-1]))

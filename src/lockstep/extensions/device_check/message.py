"""Builds the error message for a device that has computed wrongly.

Ranks that should have the same bits have different ones. A `Computation` is a difference between
what two ranks have computed for the same samples (a *virtual rank*): gradients, or buffers such as
running statistics. A `HeldTensors` is a difference between tensors that ranks hold, such as
parameters. A `Verdict` says which ranks are wrong, as far as that is known.

A defective device is not the only cause of different bits. Others are a script that computes
something else on some rank, an operation without a fixed order of additions, and processors or
libraries that differ. The messages name these causes, too, and say what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.checkpoint import layout
from lockstep.distributed.numerics import describe_rank_differences
from lockstep.errors import CheckpointError, WrongDeviceError
from lockstep.extensions.device_check.votes import Kind, Verdict
from lockstep.wording import conjugate, count_noun, format_ranks, join_first

PARAMETERS = "parameters"
OPTIMIZER_STATE = "optimizer state"
BUFFERS = "buffers"


class Device(NamedTuple):
    """The device of a rank."""

    name: str
    """The name of the device, for example `cuda:1`."""
    host: str
    numerics: Mapping[str, str]
    """The hardware and software on which the bits of results depend, as
    `distributed.numerics.read_numerics` returns them."""


class Computation(NamedTuple):
    """A virtual rank for which two ranks have computed different results."""

    virtual_rank: int
    owner: int
    checker: int
    buffers: Sequence[str] = ()
    """The names of those tensors that are buffers. All others are parameters, of which the
    gradients differ."""


class HeldTensors(NamedTuple):
    """Tensors that several ranks hold, and that should have the same bits on all of them."""

    kind: str
    """`PARAMETERS`, `OPTIMIZER_STATE` or `BUFFERS`."""
    ranks: Sequence[int]


def wrong_device_error(
    verdict: Verdict,
    difference: Computation | HeldTensors,
    tensors: Sequence[str],
    devices: Sequence[Device],
    *,
    every: int | None,
    step: int,
    checkpoint: str,
) -> WrongDeviceError:
    """Returns the error for ranks that have different bits although these should be equal.

    Args:
        verdict: which ranks are wrong.
        difference: what differs: a computed result, or tensors that the ranks hold.
        tensors: the names of the parameters, their optimizer state, or the buffers that differ.
        devices: the devices of all ranks.
        every: the setting `check_devices`: devices are checked once in this many global batches.
        step: the number of the optimizer step that is being computed, from 1.
        checkpoint: a clause about the checkpoint to resume from, as `describe_checkpoint` returns
            it; may be empty.
    """
    if isinstance(difference, Computation):
        found = f"step {step}, virtual rank {difference.virtual_rank}: "
        found += _describe_computation(verdict, difference, devices)
        found += _describe_computed_tensors(tensors, difference.buffers)
    else:
        # The tensors are compared before a step begins.
        kind_of_tensors = difference.kind
        found = f"before step {step}, in the {kind_of_tensors} {join_first(tensors)}: "
        found += _describe_held_tensors(verdict, difference, devices)

    do = _advise(verdict, devices)
    other_numerics = describe_rank_differences([device.numerics for device in devices])
    if other_numerics:  # the hardware or software differs, which may be the cause
        found += f"; {other_numerics}"
        do = (
            "make all ranks equal in what decides bits, since they may have different bits without "
            f"being wrong; if they still differ: {do}"
        )

    if checkpoint:
        do += f"; {checkpoint}"

    return WrongDeviceError(f"the same bits on every process (check_devices={every})", found, do)


def _describe_computation(
    verdict: Verdict, difference: Computation, devices: Sequence[Device]
) -> str:
    """Describes which ranks have computed which bits: a clause without a full stop.

    Two ranks have computed the virtual rank first, and then, if they could, all ranks again.
    """
    wrong = name_devices(verdict.ranks, devices)
    both = name_devices([difference.owner, difference.checker], devices)
    num_others = len(devices) - len(verdict.ranks)
    match verdict.kind:
        # A majority of all ranks agrees, now that all have computed it.
        case Kind.WRONG:
            return (
                f"all ranks computed it again, and {wrong} got different bits than "
                f"{count_noun(num_others, 'rank')} that agree"
            )
        case Kind.WRONG_ONCE:
            return (
                f"{wrong} got different bits than all ranks did when they computed it again, so "
                "the error came once"
            )

        # There are two ranks, and no majority.
        case Kind.CHANGING:
            return (
                f"{wrong} got different bits each of two times, and the other rank the same both "
                "times"
            )
        case Kind.ONE_OF_TWO:
            return (
                f"{both} got different bits, each the same ones both times, and one of the two is "
                "wrong"
            )

        # There may be more ranks, and no majority.
        case Kind.ALL_CHANGING:
            return f"{both} got different bits each time"
        case Kind.NO_MAJORITY:
            return f"all {len(devices)} ranks computed it again, and no bits have a majority"

        # It was not computed again.
        case Kind.NOT_REPEATED:
            return (
                f"{both} got different bits, of which one is wrong, and as the training loop gets "
                "batches ahead they could not be computed again"
            )


def _describe_computed_tensors(tensors: Sequence[str], buffers: Sequence[str]) -> str:
    """Describes which results of a virtual rank differ: "; the gradients that differ: fc.weight".

    Args:
        tensors: the names of the parameters whose gradients differ, and of the buffers that do.
        buffers: those of these names that are buffers.
    """
    text = ""
    gradients = [name for name in tensors if name not in buffers]
    if gradients:
        text += f"; the gradients that differ: {join_first(gradients)}"
    if buffers:
        text += f"; the buffers that differ: {join_first(buffers)}"
    return text


def _describe_held_tensors(
    verdict: Verdict, difference: HeldTensors, devices: Sequence[Device]
) -> str:
    """Describes which ranks hold different bits: a clause without a full stop.

    Example: "rank 1 (cuda:1 of node7) has different bits than 3 ranks that agree".
    """
    wrong = name_devices(verdict.ranks, devices)
    if verdict.kind is Kind.WRONG:  # a majority of the others agrees
        verb = conjugate("has", len(verdict.ranks))
        others = len(difference.ranks) - len(verdict.ranks)
        return f"{wrong} {verb} different bits than {count_noun(others, 'rank')} that agree"

    if verdict.kind is Kind.ONE_OF_TWO:  # the verdict names both
        return f"{wrong} have different bits, and one of the two is wrong"

    # There are more ranks, and no majority, so no rank is named as the wrong one.
    return f"{format_ranks(difference.ranks)} have different bits, of which none have a majority"


def _advise(verdict: Verdict, devices: Sequence[Device]) -> str:
    """Returns the advice for the user: what to do about the difference."""
    ranks = format_ranks(verdict.ranks)
    places = " and ".join(f"{devices[rank].name} of {devices[rank].host}" for rank in verdict.ranks)

    # It is known which ranks are wrong.
    if verdict.kind in (Kind.WRONG, Kind.CHANGING):
        return (
            f"look first whether the script does something else on {ranks} (world.rank, "
            f"world.is_main); if not, take {places} out of the run and test it"
        )

    # It is known which rank was wrong, but the error did not come again.
    if verdict.kind is Kind.WRONG_ONCE:
        return (
            f"take {places} out of the run if the error comes again; if it comes on other ranks "
            "too, look for an operation that does not give the same bits each time"
        )

    # One of two ranks is wrong, and it is not known which.
    if verdict.kind in (Kind.ONE_OF_TWO, Kind.NOT_REPEATED):
        return (
            "look first whether the script does something else on one of them (world.rank, "
            "world.is_main); if not, run on three processes or more, of which the majority shows "
            f"which is wrong, or test {places} one by one"
        )

    # `Kind.ALL_CHANGING` and `Kind.NO_MAJORITY`: any rank may be wrong, or the script.
    return (
        "look for what differs from process to process or from time to time: the rank, the clock, "
        "the order of a set, an operation without a fixed order of additions; if there is no such "
        "thing, test the devices one by one"
    )


def name_devices(ranks: Collection[int], devices: Sequence[Device]) -> str:
    """Returns the ranks with their devices: "rank 1 (cuda:1 of node7)"."""
    texts = []
    for rank in sorted(ranks):
        device = devices[rank]
        torch_device = device.name
        host = device.host
        texts.append(f"rank {rank} ({torch_device} of {host})")
    return " and ".join(texts)


def describe_checkpoint(folders: Sequence[str], last_good_step: int | None) -> str:
    """Describes which checkpoint is older than the difference, so that it is not affected.

    Args:
        folders: the folders in which the run saves checkpoints.
        last_good_step: the number of optimizer steps before the latest check that found no
            difference; None if there was no such check. With 100, the check was made in step 101,
            and looked at the state after 100 steps. So a checkpoint of step 100 is good.

    Returns:
        A clause; empty if there is no checkpoint.
    """
    paths = []
    for folder in folders:
        # The caller is about to raise a more important error than one about reading the folder.
        with suppress(CheckpointError):
            paths += layout.list_checkpoints(Path(folder))
    if not paths:
        return ""
    if last_good_step is None:
        return "this is the first check since the run was started, so checkpoints may be wrong too"

    checked = f"the check in step {last_good_step + 1} found no difference"
    old_enough = [path for path in paths if layout.step_of(path) <= last_good_step]
    if not old_enough:
        return f"{checked}, and all checkpoints are newer, so they may be wrong"
    newest = max(old_enough, key=layout.step_of)
    return f"{checked}: resume from a checkpoint that is older, {newest}"

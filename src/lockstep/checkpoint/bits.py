"""Stores in a checkpoint what the bits of a run's results depend on, and checks it when resuming.

With *virtual ranks* a run gives the same results, bit by bit, on any number of processes. So does a
run that resumes it, if it has the same number of virtual ranks and threads, and the same
*numerics*: the processor, the libraries and their settings (`distributed.numerics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.distributed.determinism import pin_threads
from lockstep.distributed.numerics import describe_differences, read_numerics
from lockstep.errors import CheckpointError, warn
from lockstep.machine import process_copy
from lockstep.machine.process_copy import WAY_TO_SEVERAL_THREADS
from lockstep.settings import Settings, is_whole_number
from lockstep.wording import count_noun


def facts_about_bits(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Returns what the bits of the results depend on, for the manifest of a checkpoint.

    The result is empty without virtual ranks, since the results then depend on the number of
    processes anyway.

    Args:
        settings: the settings of the run that saves.
        device: the device on which this process computes.
    """
    if settings.virtual_ranks is None:
        return {}
    return {
        "virtual_ranks": settings.virtual_ranks,
        "sync_batchnorm": settings.synchronises_batchnorm,
        "threads": torch.get_num_threads(),
        "numerics": _numerics(device),
    }


def _numerics(device: torch.device) -> dict[str, str]:
    """Returns the numerics of this process, with the version of Lockstep."""
    from lockstep import __version__  # the package itself imports this module

    return {**read_numerics(device), "Lockstep": __version__}


def check_virtual_ranks(path: Path | str, manifest: Mapping[str, Any], settings: Settings) -> None:
    """Checks that a run has as many virtual ranks as the run that saved a checkpoint.

    If both have virtual ranks, the numbers must be equal, and BatchNorm must take its statistics
    from the same samples. If only the checkpoint has them, the run may resume it, but a warning is
    given: a checkpoint can be resumed under every strategy, also under one without virtual ranks.
    If the checkpoint has none, nothing is checked.

    Args:
        path: the folder of the checkpoint, or a description such as "step 12 in memory".
        manifest: the manifest of the checkpoint.
        settings: the settings of this run.

    Raises:
        CheckpointError: the number of virtual ranks or the statistics of BatchNorm differ.
    """
    saved = manifest.get("virtual_ranks")
    num_virtual_ranks = settings.virtual_ranks
    if saved is None:
        return

    if num_virtual_ranks is None:
        warn(
            f"resuming from {path} without virtual_ranks",
            found=f"it was saved with virtual_ranks={saved}; from here on bits depend on the "
            "number of processes",
            do=f"to keep them, continue with virtual_ranks={saved} "
            f"(lockstep run --virtual-ranks {saved})",
        )
        return

    if num_virtual_ranks != saved:
        raise CheckpointError(
            f"resuming from {path} with virtual_ranks={num_virtual_ranks}",
            f"it was saved with virtual_ranks={saved}: parts of global batches and random numbers "
            "would be others from here on",
            f"continue with virtual_ranks={saved}, on any number of processes",
        )
    _check_batchnorm(path, manifest, settings)


def _check_batchnorm(path: Path | str, manifest: Mapping[str, Any], settings: Settings) -> None:
    """Checks that BatchNorm takes its statistics from the same samples as before.

    With `sync_batchnorm` it takes them from the whole global batch, otherwise from the part of each
    virtual rank.

    Args:
        path: the folder of the checkpoint, or a description such as "step 12 in memory".
        manifest: the manifest of a checkpoint with as many virtual ranks.
        settings: the settings of this run.

    Raises:
        CheckpointError: the statistics would be taken from other samples.
    """
    was_synchronised = manifest["sync_batchnorm"]
    is_synchronised = settings.synchronises_batchnorm
    if is_synchronised == was_synchronised:
        return

    if is_synchronised:
        raise CheckpointError(
            f"resuming from {path} with sync_batchnorm=True",
            "it was saved without it: BatchNorm would take its statistics from other samples from "
            "here on",
            "leave sync_batchnorm out",
        )

    # BatchNorm can synchronise processes only, so each of them must have one virtual rank.
    num_processes_needed = settings.virtual_ranks
    raise CheckpointError(
        f"resuming from {path} without sync_batchnorm=True",
        "it was saved with it: BatchNorm would take its statistics from other samples from here on",
        f"continue with sync_batchnorm=True, on {num_processes_needed} processes",
    )


def restore_threads_and_note_differences(
    manifest: Mapping[str, Any], num_virtual_ranks: int | None, device: torch.device
) -> str:
    """Sets the number of threads to that of a checkpoint, and compares the numerics.

    With the same number of threads and the same numerics, the run goes on with the same bits. In a
    copy of a process the number of threads stays 1 (`machine.process_copy`).

    Args:
        manifest: the manifest of the checkpoint.
        num_virtual_ranks: number of virtual ranks of this run. If it has none (None), nothing is
            done.
        device: the device on which this process computes.

    Returns:
        What was changed, and what may change the bits, as the end of a message: "; 4 threads as
        saved, not 8". It begins with a semicolon, or is "" if there is nothing to say.
    """
    if num_virtual_ranks is None:
        return ""
    if manifest.get("virtual_ranks") is None:
        return f"; it was saved without virtual ranks, and has {num_virtual_ranks} from here on"
    return _restore_threads(manifest) + _note_about_numerics(manifest, device)


def _restore_threads(manifest: Mapping[str, Any]) -> str:
    """Sets the number of threads to that of a checkpoint, and returns a note about it.

    Examples of the note: "; 4 threads as saved, not 8", and "" if the number is the same, or not
    known. In a copy of a process the number cannot be set; the note then says that bits are not
    promised.
    """
    num_threads = manifest.get("threads")
    threads_before = torch.get_num_threads()
    if not is_whole_number(num_threads) or num_threads == threads_before:
        return ""

    if process_copy.is_copy():
        return (
            f"; bits are not promised: it was saved with {count_noun(num_threads, 'thread')}, "
            f"and this process computes with one: {process_copy.WHY_ONE_THREAD}; to keep them, "
            f"{WAY_TO_SEVERAL_THREADS}"
        )
    pin_threads(num_threads)
    return f"; {count_noun(num_threads, 'thread')} as saved, not {threads_before}"


def _note_about_numerics(manifest: Mapping[str, Any], device: torch.device) -> str:
    """Returns a note if this process has other numerics than a checkpoint; "" if not."""
    saved_numerics = manifest.get("numerics")
    if not isinstance(saved_numerics, dict):
        return ""
    differences = describe_differences(_numerics(device), saved_numerics)
    return f"; bits are not promised: this run has {differences}" if differences else ""

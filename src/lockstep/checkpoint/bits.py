"""What a checkpoint says about the bits of a run with virtual ranks, and what a resumed run keeps.

With virtual ranks a run has the same bits on any number of processes, and so has a run that resumes
it, if it has as many virtual ranks and threads, and the same *numerics*: the processor, the
libraries and their settings (`distributed.numerics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.distributed.numerics import describe_differences, read_numerics
from lockstep.errors import CheckpointError, warn
from lockstep.settings import Settings, is_whole_number
from lockstep.wording import count_noun


def facts_about_bits(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Returns what the manifest of a checkpoint says about bits; empty without virtual ranks.

    Args:
        settings: of the run that saves.
        device: the device that this process computes on.
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
    """Checks that a run has the same virtual ranks as the one that has saved a checkpoint.

    BatchNorm must take its statistics from the same samples, too.

    A run that has none may resume every checkpoint, with a warning: a checkpoint can be resumed
    under every strategy, also under those that have no virtual ranks, and nothing was set that
    contradicts it. Two numbers contradict each other.

    Args:
        path: the path of the checkpoint, or a description of where it was.
        manifest: the manifest of the checkpoint.
        settings: of this run.

    Raises:
        CheckpointError: the checkpoint has another number, or other statistics of BatchNorm.
    """
    saved = manifest.get("virtual_ranks")
    num_virtual_ranks = settings.virtual_ranks
    if saved is None:
        return
    if saved == num_virtual_ranks:
        _check_batchnorm(path, manifest, settings)
        return
    if num_virtual_ranks is not None:
        raise CheckpointError(
            f"resuming from {path} with virtual_ranks={num_virtual_ranks}",
            f"it was saved with virtual_ranks={saved}: parts of global batches and random numbers "
            "would be others from here on",
            f"continue with virtual_ranks={saved}, on any number of processes",
        )
    warn(
        f"resuming from {path} without virtual_ranks",
        f"it was saved with virtual_ranks={saved}; from here on bits depend on the number of "
        "processes",
        f"to keep them, continue with virtual_ranks={saved} (lockstep run --virtual-ranks {saved})",
    )


def _check_batchnorm(path: Path | str, manifest: Mapping[str, Any], settings: Settings) -> None:
    """Checks that BatchNorm takes its statistics from the same samples as before.

    Args:
        path: see `check_virtual_ranks`.
        manifest: of a checkpoint with as many virtual ranks. One of an earlier version does not say
            how the statistics were taken; they were those of each virtual rank.
        settings: of this run.

    Raises:
        CheckpointError: it takes them from others.
    """
    was_synchronised = manifest.get("sync_batchnorm", False)
    if was_synchronised and not settings.synchronises_batchnorm:
        raise CheckpointError(
            f"resuming from {path} without sync_batchnorm=True",
            "it was saved with it: BatchNorm would take its statistics from other samples from "
            "here on",
            f"continue with sync_batchnorm=True, on {settings.virtual_ranks} processes",
        )
    if settings.synchronises_batchnorm and not was_synchronised:
        raise CheckpointError(
            f"resuming from {path} with sync_batchnorm=True",
            "it was saved without it: BatchNorm would take its statistics from other samples from "
            "here on",
            "leave sync_batchnorm out",
        )


def restore_threads(
    manifest: Mapping[str, Any], num_virtual_ranks: int | None, device: torch.device
) -> str:
    """Sets the number of threads that a checkpoint was saved with, and compares the numerics.

    With the same number of threads and the same numerics, the run goes on with the same bits.

    Args:
        manifest: the manifest of the checkpoint.
        num_virtual_ranks: how many virtual ranks this run has. None: it has none, and nothing is
            done.
        device: the device that this process computes on.

    Returns:
        The end of a sentence that says what was done, and what may change the bits; "" if nothing.
    """
    if num_virtual_ranks is None:
        return ""
    if manifest.get("virtual_ranks") is None:
        return f"; it was saved without virtual ranks, and has {num_virtual_ranks} from here on"
    text = ""
    num_threads = manifest.get("threads")
    threads_before = torch.get_num_threads()
    if is_whole_number(num_threads) and num_threads != threads_before:
        torch.set_num_threads(num_threads)
        text += f"; {count_noun(num_threads, 'thread')} as saved, not {threads_before}"
    saved_numerics = manifest.get("numerics")
    differences = ""
    if isinstance(saved_numerics, dict):
        differences = describe_differences(_numerics(device), saved_numerics)
    if differences:
        text += f"; bits are not promised: this run has {differences}"
    return text

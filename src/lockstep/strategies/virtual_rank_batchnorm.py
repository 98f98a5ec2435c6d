"""Decides from which samples BatchNorm takes its statistics in runs with virtual ranks.

A *virtual rank* computes a fixed part of every global batch. By default each of them takes
statistics from its own part, as ranks do under DDP without SyncBatchNorm. With
`sync_batchnorm=True`, or a SyncBatchNorm in the model, statistics are taken from the whole global
batch. Every virtual rank then needs the sums of all others in the middle of its forward pass, and
again in its backward pass. So all of them must be computed at the same time, each in its own
process. (A process that computes several gets the inputs of the second one only when the training
loop is done with the first.)
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lockstep.communication.tree_sum import TreeSums
from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError
from lockstep.settings import Choice
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, convert
from lockstep.torch_compat import BatchNorm
from lockstep.wording import count_noun


def is_synchronised(module: nn.Module, run: Run) -> bool:
    """Returns True if BatchNorm layers of a module take statistics of the global batch.

    Args:
        module: the user's module.
        run: a run with virtual ranks.
    """
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm):
            return True
        if isinstance(layer, BatchNorm) and run.settings.synchronises_batchnorm:
            return True
    return False


def synchronise_batchnorm(module: nn.Module, run: Run, statistics_of: str) -> list[Choice]:
    """Makes BatchNorm layers take their statistics from the samples of all virtual ranks.

    A converted layer sums over the virtual ranks in a fixed order, that of the binary tree in which
    gradients are summed. So its statistics have the same bits on any number of machines.

    Args:
        module: a module for which `is_synchronised` is True.
        run: a run with virtual ranks.
        statistics_of: a description of the samples, for the printed lines.

    Returns:
        The lines to print.

    Raises:
        SettingError: a process computes several virtual ranks, devices are checked, or a
            SyncBatchNorm of the model is restricted to some ranks.
    """
    _check_can_synchronise(module, run)
    _convert_layers(module, all_layers=run.settings.synchronises_batchnorm)

    # Every rank computes the virtual rank with its own number. So the bounds are 0, 1, 2, ..., the
    # first virtual rank of each rank. Virtual ranks without samples contribute zeros to the sums.
    num_ranks = run.topology.size
    tree_sums = TreeSums(
        present=(True,) * num_ranks,
        bounds=tuple(range(num_ranks + 1)),
        process=run.topology.rank,
    )

    num_synchronised = 0
    num_others = 0
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.tree_sums = tree_sums
            num_synchronised += 1
        elif isinstance(layer, BatchNorm):  # not converted
            num_others += 1

    reason = f"statistics of {statistics_of}, added up in the tree of virtual ranks"
    choices = [Choice("batchnorm", f"{num_synchronised} synchronised", reason)]
    if num_others:
        reason = "not a SyncBatchNorm"
        if run.settings.synchronises_batchnorm:  # `convert` leaves layers with own code alone
            reason = "they have a forward of their own"
        choices.append(Choice("batchnorm", f"{num_others} per virtual rank", reason))

    return choices


def _convert_layers(module: nn.Module, *, all_layers: bool) -> None:
    """Converts layers to Lockstep's `SyncBatchNorm`, in place.

    Args:
        module: the user's module.
        all_layers: True for all BatchNorm layers, False for torch's own `SyncBatchNorm` only.
    """
    if all_layers:
        convert(module)
        return
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            convert(layer)


def _check_can_synchronise(module: nn.Module, run: Run) -> None:
    """Raises SettingError if BatchNorm layers cannot take statistics from all virtual ranks.

    Each layer sums over all virtual ranks while they run. So all of them must run at the same time,
    one in each process, and a layer cannot sum over only some of them.

    Args:
        module: the user's module.
        run: a run with virtual ranks.
    """
    settings = run.settings
    assert settings.virtual_ranks is not None
    num_ranks = run.topology.size
    if settings.sync_batchnorm:
        was_set = f"virtual_ranks={settings.virtual_ranks} with sync_batchnorm=True"
    else:
        was_set = f"virtual_ranks={settings.virtual_ranks} with a SyncBatchNorm in the model"

    if settings.virtual_ranks != num_ranks:
        raise SettingError(
            was_set,
            f"{count_noun(num_ranks, 'process')}: in each layer a virtual rank needs "
            "the sums of all others, and a process computes its virtual ranks one after the other",
            f"start {settings.virtual_ranks} processes, which may share devices; or take the "
            "statistics of each virtual rank: sync_batchnorm=False, and no SyncBatchNorm in the "
            "model",
        )

    if settings.check_devices is not None:
        raise SettingError(
            f"check_devices={settings.check_devices} and {was_set}",
            "to check a device, a virtual rank is computed again by itself, and BatchNorm would "
            "need the sums of all others",
            "leave check_devices out, or take the statistics of each virtual rank: "
            "sync_batchnorm=False, and no SyncBatchNorm in the model",
        )

    for layer in module.modules():
        if not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm):
            continue
        group = layer.process_group
        is_restricted_to_some_ranks = group is not None and dist.get_world_size(group) != num_ranks
        if is_restricted_to_some_ranks:
            raise SettingError(
                was_set,
                "the SyncBatchNorm has a process_group of some ranks, whose sums have no place in "
                "the tree over all virtual ranks",
                "build it without process_group",
            )

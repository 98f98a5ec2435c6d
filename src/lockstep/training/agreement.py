"""Checks that all ranks give the same objects to `prepare`. They compare short descriptions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.batch.consistency import DRAW_BEFORE_PREPARE, check_samples
from lockstep.batch.loader import Loader
from lockstep.distributed.process_group import Run
from lockstep.errors import RanksDifferError

LOADER_PREFIX = "a loader over "
"""The beginning of the description of a loader."""
CHECKSUM_PREFIX = " (checksum"
"""The text before the checksum in the description of a loader."""


def check_equal_on_ranks(call: str, objects: Sequence[Any], run: Run) -> None:
    """Compares objects over the ranks, which all call this together.

    If all ranks have the same objects, some samples of each loader are compared, too.

    Args:
        call: the function that the user has called, for the message.
        objects: the objects, in the order in which the user gave them.
        run: the run of this process.

    Raises:
        RanksDifferError: on all ranks, unless all of them have the same objects in the same order.
    """
    own_descriptions = [describe(thing) for thing in objects]
    descriptions_by_rank: list[list[str]] = run.collectives.exchange(own_descriptions)
    all_are_equal = all(other == own_descriptions for other in descriptions_by_rank)
    if not all_are_equal:
        raise _objects_differ_error(call, descriptions_by_rank)

    for loader in objects:
        if isinstance(loader, Loader):
            check_samples(loader.source, loader.seed, run.collectives)
            if run.settings.ledger is not None:
                # The ledger records the fingerprint, a property that is computed when it is first
                # used. Compute it now, before the training begins.
                _ = loader.fingerprint


def _objects_differ_error(
    call: str, descriptions_by_rank: Sequence[Sequence[str]]
) -> RanksDifferError:
    """Returns the error for ranks that have different objects.

    Args:
        call: the function that the user has called.
        descriptions_by_rank: for each rank, the descriptions of its objects, in order.
    """
    ranks = []
    for rank, descriptions in enumerate(descriptions_by_rank):
        ranks.append(f"rank {rank}: {'; '.join(descriptions)}")
    advice = "build the same on every rank: same code, arguments, seed and data"
    only_data_differs = _only_loaders_differ(descriptions_by_rank)
    if not only_data_differs:
        return RanksDifferError(call, "; ".join(ranks), advice)

    # A split that was drawn without a seed is the usual reason for different data.
    advice += f"; {DRAW_BEFORE_PREPARE}"
    # If only checksums differ, the loaders have different contents of the same length.
    code = "LS105" if _only_checksums_differ(descriptions_by_rank) else "LS104"
    return RanksDifferError(call, "; ".join(ranks), advice, code=code)


def describe(thing: Any) -> str:
    """Describes an object by the properties that must be equal on all ranks.

    For a module these are the names, shapes and dtypes of its tensors, as a digest; for a loader
    its dataset, length and order; for anything else only the type.
    """
    if isinstance(thing, nn.Module):
        tensors = [*thing.named_parameters(), *thing.named_buffers()]
        shapes = []
        for name, tensor in tensors:
            shapes.append([name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad])
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
        num_elements = sum(parameter.numel() for parameter in thing.parameters())
        return f"{type(thing).__name__} of {num_elements:,} parameters (shapes {digest})"

    if isinstance(thing, Loader):
        return thing.source.description

    return type(thing).__name__


def _only_loaders_differ(descriptions_by_rank: Sequence[Sequence[str]]) -> bool:
    """Returns True if all ranks have equally many objects, and only loaders differ between them.

    Args:
        descriptions_by_rank: for each rank, the descriptions of its objects, in order.
    """
    numbers_of_objects = {len(descriptions) for descriptions in descriptions_by_rank}
    if len(numbers_of_objects) > 1:
        return False

    for descriptions_of_object in zip(*descriptions_by_rank, strict=True):  # one for each rank
        is_equal_on_all = len(set(descriptions_of_object)) == 1
        all_are_loaders = all(text.startswith(LOADER_PREFIX) for text in descriptions_of_object)
        if not is_equal_on_all and not all_are_loaders:
            return False
    return True


def _only_checksums_differ(descriptions_by_rank: Sequence[Sequence[str]]) -> bool:
    """Returns True if the descriptions of each object differ in nothing but a checksum.

    Args:
        descriptions_by_rank: for each rank, the descriptions of its objects, in order. All ranks
            have equally many.
    """
    for descriptions_of_object in zip(*descriptions_by_rank, strict=True):
        # The checksum stands at the end of a description.
        without_checksum = {text.partition(CHECKSUM_PREFIX)[0] for text in descriptions_of_object}
        if len(without_checksum) > 1:
            return False
    return True

"""Do all ranks give the same objects to `prepare`? They compare short descriptions of them."""

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
"""How the description of a loader begins."""
CHECKSUM_PREFIX = " (checksum"
"""What follows the length of the data in the description of a loader."""


def check_equal_on_ranks(call: str, objects: Sequence[Any], run: Run) -> None:
    """Compares objects over the ranks; all ranks call it together.

    Args:
        call: what the user has called.
        objects: in the order in which the user gave them.
        run: of this process.

    Raises:
        RanksDifferError: on all ranks, unless all have brought the same in the same order.
    """
    own_descriptions = [describe(thing) for thing in objects]
    descriptions_by_rank: list[list[str]] = run.collectives.exchange(own_descriptions)
    if any(descriptions != own_descriptions for descriptions in descriptions_by_rank):
        ranks = []
        for rank, descriptions in enumerate(descriptions_by_rank):
            ranks.append(f"rank {rank}: {'; '.join(descriptions)}")
        code = _catalogue_code(descriptions_by_rank)
        advice = "build the same on every rank: same code, arguments, seed and data"
        if code is not None:  # only data differs
            advice += f"; {DRAW_BEFORE_PREPARE}"
        raise RanksDifferError(call, "; ".join(ranks), advice, code=code)
    for loader in objects:
        if isinstance(loader, Loader):
            check_samples(loader.source, loader.seed, run.collectives)
            if run.settings.ledger is not None:
                _ = loader.fingerprint  # the ledger holds it; it is read before the training


def describe(thing: Any) -> str:
    """Returns what must be equal on all ranks of an object given to `prepare`, or of a loader."""
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


def _catalogue_code(descriptions_by_rank: Sequence[Sequence[str]]) -> str | None:
    """Returns the code of the catalogue if nothing but data differs, else None.

    Args:
        descriptions_by_rank: the descriptions that each rank has brought, in order.
    """
    counts = {len(descriptions) for descriptions in descriptions_by_rank}
    if len(counts) > 1:
        return None
    only_contents_differ = True
    for descriptions in zip(*descriptions_by_rank, strict=True):
        if len(set(descriptions)) == 1:
            continue
        if not all(description.startswith(LOADER_PREFIX) for description in descriptions):
            return None
        sizes = {description.partition(CHECKSUM_PREFIX)[0] for description in descriptions}
        if len(sizes) > 1:
            only_contents_differ = False
    return "LS105" if only_contents_differ else "LS104"

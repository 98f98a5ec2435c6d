"""What must be brought to `world.prepare` and `world.loader`, and by all ranks alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.data.loader import Loader
from lockstep.data.same_samples import check_samples
from lockstep.errors import RanksDifferError, UsageError, some
from lockstep.runtime.run import Run


def agree(run: Run, what: str, mine: list[str]) -> None:
    """Raises RanksDifferError on all ranks unless all brought the same descriptions."""
    texts = run.collectives.exchange(json.dumps(mine))
    if len(set(texts)) > 1:
        brought: list[list[str]] = [json.loads(text) for text in texts]
        raise RanksDifferError(
            what,
            "; ".join(f"rank {rank}: {'; '.join(each)}" for rank, each in enumerate(brought)),
            "build the same on every rank: same code, arguments, seed and data",
            code=_code_of(brought),
        )


def agree_on_loader(run: Run, loader: Loader) -> None:
    """Raises RanksDifferError on all ranks unless all have the same data in the same order."""
    agree(run, "world.loader", [describe(loader)])
    check_samples(loader.source, loader.seed, run.collectives)


def _code_of(brought: list[list[str]]) -> str | None:
    """Of the catalogue, where it is nothing but data that differs."""
    alike = len({len(each) for each in brought}) == 1
    differing = [set(of_all) for of_all in zip(*brought, strict=False) if len(set(of_all)) > 1]
    data = all(text.startswith(_LOADER) for texts in differing for text in texts)
    if not (alike and data):
        return None
    sizes = [{text.partition(" (checksum")[0] for text in texts} for texts in differing]
    return "LS105" if all(len(each) == 1 for each in sizes) else "LS104"


_LOADER = "a loader over "


def describe(thing: Any) -> str:
    """What must be equal on all ranks of an object given to `prepare`, or of a loader."""
    if isinstance(thing, nn.Module):
        shapes = [
            [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
            for named in (thing.named_parameters(), thing.named_buffers())
            for name, tensor in named
        ]
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
        numbers = sum(p.numel() for p in thing.parameters())
        return f"{type(thing).__name__} of {numbers:,} parameters (shapes {digest})"
    if isinstance(thing, Loader):
        return thing.source.description
    return type(thing).__name__


def check_model(module: nn.Module) -> None:
    """Raises UsageError where a module averages gradients itself, or its shapes are not known."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise UsageError(
                "world.prepare of a model in DistributedDataParallel",
                f"{name or 'it'} averages its gradients itself; here they would be averaged twice, "
                "and not weighted",
                "leave DistributedDataParallel out: world.prepare wraps the plain model",
            )
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise UsageError(
            f"world.prepare of a {type(module).__name__} with lazy layers",
            f"{some(lazy)} have no shape before the first input",
            "run one forward pass of the model on a sample batch first, then build the optimizer",
        )

"""What can be told of a batch: a digest of each sample, and what it may weigh."""

from __future__ import annotations

import hashlib
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed.torch_compat import pytree

_IGNORED = -100
"""torch's `ignore_index`: labels that count for nothing."""


class Seen(NamedTuple):
    """Of a batch."""

    size: int
    """Samples."""
    contents: tuple[str, ...]
    shape: str
    weights: dict[str, float]


def look_at(batch: Any, count: int | None = None) -> Seen:
    """Takes a batch apart.

    Args:
        batch: a nest of tensors, each with one row a sample.
        count: of samples; None: the rows of the first tensor.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [t.detach().cpu() for t in leaves if t.layout == torch.strided and t.dim()]
    if count is None:
        count = len(tensors[0]) if tensors else 0
    rows = [t for t in tensors if len(t) == count]
    shape = "; ".join(f"{t.dtype} {list(t.shape[1:])}" for t in rows)
    return Seen(count, _digests(rows, count), shape, _weights(rows, count))


def random_streams() -> list[str]:
    """A digest of each stream that reading and training may draw from: torch's, numpy's, Python's.

    That of a GPU comes last, where one is used.
    """
    kind, keys, position, *_ = np.random.get_state()
    states = [
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(keys).tobytes() + f"{kind}{position}".encode(),
        repr(random.getstate()).encode(),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return [hashlib.blake2b(state, digest_size=8).hexdigest() for state in states]


def digest(tensor: Tensor) -> str:
    """Of all values of a dense tensor, bit for bit."""
    # A copy: storage that numpy looks at cannot be freed, as FSDP does with what it has gathered.
    plain = tensor.detach().cpu().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()


def _digests(rows: list[Tensor], count: int) -> tuple[str, ...]:
    if not rows:
        return ()
    plain = [t.reshape(count, -1).contiguous().view(torch.uint8).numpy() for t in rows if t.numel()]
    found = []
    for number in range(count):
        each = (hashlib.blake2b(v[number].tobytes(), digest_size=6).hexdigest() for v in plain)
        found.append(".".join(each))
    return tuple(found)


def _weights(rows: list[Tensor], count: int) -> dict[str, float]:
    """Samples, and of each whole-number tensor what is not ignored, not zero, or set."""
    found = {"samples": float(count)}
    for number, tensor in enumerate(rows):
        if tensor.is_complex() or tensor.is_floating_point():
            is_mask = bool(((tensor == 0) | (tensor == 1)).all())
            if is_mask and tensor.dim() > 1:
                found[f"ones in tensor {number}"] = float(tensor.sum())
            continue
        kept = tensor[tensor != _IGNORED] if tensor.dtype != torch.bool else tensor
        found[f"labels in tensor {number}"] = float(kept.numel())
        found[f"non-zero values in tensor {number}"] = float(kept.count_nonzero())
    return found

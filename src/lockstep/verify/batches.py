"""Batches that a training loop is handed: what is in them, what they drew, and when they count."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.verify.patches import IGNORED, mark
from lockstep.verify.training_record import Batch


def look_at(batch: Any, count: int | None = None, **known: Any) -> Batch:
    """Takes a batch apart.

    Args:
        batch: a nest of tensors, each with one row a sample.
        count: of samples; None: the rows of the first tensor.
        **known: what else is known of it.
    """
    plain = [t for t in tensors(batch) if t.layout == torch.strided and t.dim()]
    held = [t.detach().cpu() for t in plain]
    if count is None:
        count = len(held[0]) if held else 0
    rows = [t for t in held if len(t) == count]
    shape = "; ".join(f"{t.dtype} {list(t.shape[1:])}" for t in rows)
    contents = _digests(rows, count)
    return Batch(contents=contents, shape=shape, weights=_weights(rows, count), **known)


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


_STREAMS = "torch", "numpy's global stream", "the global stream of Python's random", "the GPU's"


def streams_that_moved(before: Sequence[str]) -> dict[str, str]:
    """What was drawn from since, but for torch's stream: its numbers are seen themselves."""
    both = zip(_STREAMS, before, random_streams(), strict=False)
    return {kind: was for kind, was, now in both if was != now and kind != "torch"}


def _digests(rows: list[Tensor], count: int) -> list[str]:
    plain = [t.reshape(count, -1).contiguous().view(torch.uint8).numpy() for t in rows if t.numel()]
    return [
        ".".join(hashlib.blake2b(v[n].tobytes(), digest_size=6).hexdigest() for v in plain)
        for n in range(count if rows else 0)
    ]


def _weights(rows: list[Tensor], count: int) -> dict[str, float]:
    """Samples, and of each whole-number tensor what is not ignored, not zero, or set.

    Also without the first column, as the loss of a language model leaves it out, and what is not
    the value that ends most rows, which may be padding.
    """
    found = {"samples": float(count)}
    tensors = {f"tensor {number}": tensor for number, tensor in enumerate(rows)}
    for name, tensor in list(tensors.items()):
        if tensor.dim() > 1 and tensor.shape[1] > 1:
            tensors[f"{name} without its first column"] = tensor[:, 1:]
    for name, tensor in tensors.items():
        if tensor.is_complex() or tensor.is_floating_point():
            is_mask = bool(((tensor == 0) | (tensor == 1)).all())
            if is_mask and tensor.dim() > 1:
                found[f"ones in {name}"] = float(tensor.sum())
            continue
        kept = tensor[tensor != IGNORED] if tensor.dtype != torch.bool else tensor
        found[f"labels in {name}"] = float(kept.numel())
        found[f"non-zero values in {name}"] = float(kept.count_nonzero())
        if tensor.dim() == 2 and tensor.numel():
            padding = int(tensor[:, -1].long().mode().values)
            found[f"values but {padding} in {name}"] = float((tensor != padding).sum())
    return found


class Fetched:
    """Batches of torch's loaders that no model has been called with so far.

    Of loaders whose batches are recognised in what models are called with, they belong to a later
    update.
    """

    def __init__(self) -> None:
        self._number = 0
        self._unused: dict[int, Batch] = {}
        self._recognised: set[int] = set()
        """Loaders."""
        self.only_seen: list[Batch] = []
        """What the script looked at in a pass of its own."""

    def add(self, batch: Any, taken: Batch) -> None:
        """One more, as it was handed out."""
        self._number += 1
        mark(batch, batch=self._number)
        self._unused[self._number] = taken

    def used(self, number: int) -> None:
        """A model is called with what was made of a batch; those before it are over."""
        if used := self._unused.get(number):
            self._recognised.add(used.loader)
            for each, taken in list(self._unused.items()):
                if each <= number and taken.loader == used.loader:
                    self.only_seen += [taken] if taken.epoch < used.epoch else []
                    del self._unused[each]

    def ahead(self) -> list[Batch]:
        """What belongs to a later update; the rest is forgotten."""
        kept = {n: taken for n, taken in self._unused.items() if taken.loader in self._recognised}
        self._unused, self.only_seen = kept, []
        return list(kept.values())

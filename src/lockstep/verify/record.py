"""What a training did, update by update, on every rank: what `lockstep verify` compares.

An update is one step of one optimizer. All values are plain: numbers, text and numpy arrays. Each
rank writes its own to disk: a line of JSON and a file of tensors for each update.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from lockstep.errors import LockstepError, UsageError
from lockstep.watchdog.exit_status import describe

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A batch that a training loop was handed."""

    loader: int
    """Which of the script's loaders, in the order of their first use."""
    epoch: int
    ids: tuple[int, ...] | None
    """Indices in the dataset; None: nobody knows them, as of a stream."""
    contents: tuple[str, ...]
    """Of each sample the digests of its tensors, with a dot between them; empty where the batch
    could not be taken apart."""
    shape: str
    """Of the samples; digests are comparable where it is the same."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the batch may weigh: its samples, and what is not padding in each of its tensors."""
    drew: bool = False
    """Random numbers were drawn, in this process, while it was read."""
    stream: str = ""
    """A digest of what was drawn."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the script's that matters for the gradients."""

    name: str
    line: str
    of_graph: bool = False
    """Its input carries a gradient."""
    of_gradient: bool = False
    """Its input is the gradient of a parameter."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """An update on one rank."""

    optimizer: int
    """Which of the script's optimizers, in the order of their first steps."""
    step: int
    """Which of its steps, from 0."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    taken: tuple[Taken, ...]
    """What was handed out since the update before."""
    losses: tuple[float, ...]
    """What backward passes were made of, weighted, since the update before."""
    counts: bool
    """Whether this rank's losses count: under a pipeline those of the other ranks do not."""
    calls: tuple[Call, ...]
    drew: bool
    """Random numbers were drawn between the last batch and the step."""
    draw_line: str
    past_wrapper: str
    """The line of a training forward pass around DDP; empty: there was none."""
    not_averaged: tuple[str, ...]
    """Parameters to train that DDP does not know."""
    statistics: tuple[str, ...]
    """BatchNorm layers that took statistics of what this rank alone has."""
    before: Mapping[str, Array]
    """Parameters before the first update; empty at later ones."""
    held: Mapping[str, str]
    """A digest of each parameter before the update, of those that are whole on this rank."""
    gradients: Mapping[str, Array]
    """As the optimizer found them."""
    local: tuple[Mapping[str, Array], ...]
    """As each backward pass of this rank left them, before they were averaged; may be empty."""
    parameters: Mapping[str, Array]
    """After the update: those that the optimizer holds."""
    buffers: Mapping[str, Array]
    """After the update."""


Update = Sequence[RankUpdate]
"""One update on all ranks."""


def merged(update: Update, what: str) -> dict[str, Any]:
    """The arrays of all ranks, by name; of what several have, that of the lowest rank."""
    found: dict[str, Any] = {}
    for rank in reversed(update):
        found.update(getattr(rank, what))
    return found


def losses_of(update: Update) -> list[float]:
    """Of each rank that has any, the sum of its losses."""
    return [sum(rank.losses) for rank in update if rank.counts and rank.losses]


def loss_of(update: Update) -> float | None:
    """The mean over ranks of the sums of their losses; None: no rank had one."""
    sums = losses_of(update)
    return sum(sums) / len(sums) if sums else None


def backward_passes(update: Update) -> int:
    """On the rank that made the most."""
    return max((len(rank.losses) for rank in update), default=0)


Sample = tuple[int, int, int | str]
"""Loader, epoch, and the index or a digest of the content."""


def indices_of(update: Update) -> list[Sample] | None:
    """All samples of the update in the order of ranks; None: some have no known index."""
    batches = _batches(update)
    if any(taken.ids is None for taken in batches):
        return None
    return [(taken.loader, taken.epoch, sample) for taken in batches for sample in taken.ids or ()]


def contents_of(update: Update) -> list[Sample] | None:
    """The same by their content; None: it cannot be told, or is drawn anew by every process."""
    batches = _batches(update)
    if any(t.drew or (t.ids is not None and len(t.ids) != len(t.contents)) for t in batches):
        return None
    return [(taken.loader, taken.epoch, sample) for taken in batches for sample in taken.contents]


def count_of(update: Update) -> int:
    """Samples of the update."""
    return sum(len(taken.ids or taken.contents) for taken in _batches(update))


def shapes_of(update: Update) -> set[str]:
    """Of its samples."""
    return {taken.shape for taken in _batches(update) if taken.contents}


def _batches(update: Update) -> list[Taken]:
    return [taken for rank in update if rank.counts for taken in rank.taken]


def scale_of(arrays: Mapping[str, Array]) -> float:
    """The largest absolute value of all."""
    return max(map(largest, arrays.values()), default=0.0)


def largest(array: Array) -> float:
    """Its largest absolute value; 0 where it is empty."""
    return float(np.abs(array).max()) if array.size else 0.0


_KINDS = ("before", "gradients", "parameters", "buffers")
_LOCAL = "local"
ENDED = "ended.json"
"""What a rank's script ended with, beside its updates."""
OWN_PROCESSES = (
    "verify a script that is one rank, as for torchrun: with RANK and WORLD_SIZE from the "
    "environment, or with lockstep.init"
)
"""What to do with a script that starts its ranks itself."""


class Writer:
    """Writes the updates of one rank.

    Args:
        folder: of the run; the rank makes one of its own in it.
        rank: whose.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder / f"rank{rank}"
        self.folder.mkdir(parents=True)
        self._count = 0
        self._owner = os.getpid()

    def write(self, update: RankUpdate) -> None:
        """One more update; its line is written when its tensors are there.

        Raises:
            UsageError: it was made in a copy of the process that is recorded.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                "an optimizer step in a process that the script has started itself",
                "lockstep verify records only the processes that it starts",
                OWN_PROCESSES,
            )
        arrays = {
            f"{kind}|{name}": np.ascontiguousarray(array)
            for kind in _KINDS
            for name, array in getattr(update, kind).items()
        }
        for number, part in enumerate(update.local):
            for name, array in part.items():
                arrays[f"{_LOCAL}{number}|{name}"] = np.ascontiguousarray(array)
        save_file(arrays, self.folder / f"{self._count}.safetensors")
        plain = {
            name: value
            for name, value in vars(update).items()
            if name not in _KINDS and name not in (_LOCAL, "taken", "calls")
        }
        plain["taken"] = [asdict(taken) for taken in update.taken]
        plain["calls"] = [asdict(call) for call in update.calls]
        plain["pieces"] = len(update.local)
        with (self.folder / "updates.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
        self._count += 1

    def end(
        self, error: BaseException | None, notes: Sequence[str] = (), *, of_lockstep: bool = False
    ) -> None:
        """The script has ended.

        Args:
            error: with which; None: as it should.
            notes: what was switched off.
            of_lockstep: whether it trains by Lockstep.
        """
        told = {
            "error": None if error is None else _in_words(error),
            "code": error.code if isinstance(error, LockstepError) else None,
            "exited": isinstance(error, SystemExit),
            "time": time.time(),
            "notes": list(notes),
            "of_lockstep": of_lockstep,
        }
        (self.folder / ENDED).write_text(json.dumps(told), encoding="utf-8")


def read_updates(folder: Path, size: int) -> list[Update]:
    """The updates that all ranks have recorded."""
    ranks = [list(_read_rank(folder / f"rank{rank}")) for rank in range(size)]
    return [list(update) for update in zip(*ranks, strict=False)]


def read_ends(folder: Path, size: int) -> list[dict[str, Any] | None]:
    """What each rank's script ended with; None: it did not come to its end."""
    paths = [folder / f"rank{rank}" / ENDED for rank in range(size)]
    return [json.loads(p.read_text(encoding="utf-8")) if p.exists() else None for p in paths]


def _in_words(error: BaseException) -> str:
    if isinstance(error, LockstepError):
        return f"{type(error).__name__}: {error}"
    made = describe(error)
    exited = isinstance(error, SystemExit)
    text = made.headline if exited else f"{made.type}: {made.message}"
    return text if made.line is None else f"{text}\n  at:    {made.line}"


def _read_rank(folder: Path) -> Iterator[RankUpdate]:
    lines = folder / "updates.jsonl"
    if not lines.exists():
        return
    with lines.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            yield _update(json.loads(line), load_file(folder / f"{number}.safetensors"))


def _update(plain: dict[str, Any], arrays: Mapping[str, Array]) -> RankUpdate:
    kinds: dict[str, dict[str, Array]] = {}
    for key, array in arrays.items():
        kind, _, name = key.partition("|")
        kinds.setdefault(kind, {})[name] = array
    pieces = plain.pop("pieces")
    taken = tuple(
        Taken(
            **{
                **entry,
                "ids": None if entry["ids"] is None else tuple(entry["ids"]),
                "contents": tuple(entry["contents"]),
            }
        )
        for entry in plain.pop("taken")
    )
    calls = tuple(Call(**entry) for entry in plain.pop("calls"))
    values: dict[str, Any] = {
        **{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()},
        **{kind: kinds.get(kind, {}) for kind in _KINDS},
        "taken": taken,
        "calls": calls,
        "local": tuple(kinds.get(f"{_LOCAL}{number}", {}) for number in range(pieces)),
    }
    return RankUpdate(**values)

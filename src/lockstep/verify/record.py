"""What one rank records of its updates, on disk: a line of JSON and a file of tensors for each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lockstep.errors import LockstepError, UsageError
from lockstep.verify.updates import Array, Call, RankUpdate, Taken, Update
from lockstep.watchdog.exit_status import describe

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

"""What is at a path: the checkpoints of a run and their health, and the tensors of one of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import layout
from lockstep.checkpoint.health import Health, examine
from lockstep.checkpoint.stored import Contents, Stored, open_contents


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found."""

    path: Path
    checkpoints: tuple[Health, ...]
    """Of a run's folder all of them, the oldest first; of a checkpoint itself."""
    leftovers: tuple[Path, ...]
    """Of saves that were interrupted, or are going on."""
    contents: Contents | None
    """Of the path, or of the latest complete checkpoint in it; None where there is none."""

    @property
    def sound(self) -> bool:
        """Whether something is there and nothing of it is broken."""
        return self.contents is not None and not any(h.problems for h in self.checkpoints)

    def as_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        contents = self.contents
        return {
            "path": str(self.path),
            "sound": self.sound,
            "checkpoints": [
                {"path": str(health.path), "problems": list(health.problems)}
                for health in self.checkpoints
            ],
            "leftovers": [str(path) for path in self.leftovers],
            "contents": contents
            and {
                "path": str(contents.path),
                "kind": contents.kind,
                "facts": dict(contents.facts),
                "files": dict(contents.files),
                "modules": list(contents.modules),
                "tensors": _rows(contents.tensors.values()),
                "training": _rows(contents.training.values()),
                "extra": list(contents.extra),
                "totals": totals(contents.tensors.values()),
            },
        }


def inspect(path: Path, *, name: str | None = None, trust: bool = False) -> Inspection:
    """Looks at a file, a checkpoint or a run's folder; reads no values.

    Args:
        path: as for `open_contents`.
        name: one model of several.
        trust: a torch file may run code of its author's while it is read.

    Raises:
        CheckpointError: it is no checkpoint, and cannot be read.
        SettingError: there is no such name.
    """
    path = named(path)
    checkpoints = tuple(map(examine, checkpoints_at(path)))
    run = path.is_dir() and path not in [health.path for health in checkpoints]
    leftovers = tuple(sorted(layout.leftovers(path))) if run else ()
    readable = [health.path for health in checkpoints if not health.problems]
    if readable:
        path_read = max(readable, key=lambda p: (layout.step_of(p), not p.name.startswith(".")))
    elif checkpoints or leftovers:
        return Inspection(path, checkpoints, leftovers, None)
    else:
        path_read = path
    contents = open_contents(path_read, name=name, trust=trust, everything=True, training=True)
    return Inspection(path, checkpoints, leftovers, contents)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints in a run's folder, whole or not, the oldest first; one that `path` is.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if not path.is_dir():
        return []
    with layout.plain_errors("looking at", path):
        found = [path] if _is_checkpoint(path) else list(path.iterdir())
    found = [p for p in found if p.is_dir() and _is_checkpoint(p)]
    return sorted(found, key=lambda p: (layout.step_of(p), p.name))


def named(path: Path) -> Path:
    """The same path, with a name at its end: not `.` or `..`."""
    return Path(os.path.abspath(path)) if path.name in ("", "..") else path


def totals(tensors: Iterable[Stored]) -> dict[str, Any]:
    """How much it is in all; a tensor with several names counts once."""
    own = [stored for stored in tensors if stored.tied_to is None]
    kinds = Counter(dtype_name(stored) for stored in own)
    return {
        "tensors": len(own),
        "values": sum(stored.count for stored in own),
        "bytes": sum(stored.nbytes for stored in own),
        "dtypes": dict(kinds.most_common()),
    }


def dtype_name(stored: Stored) -> str:
    """Such as `float32`."""
    return str(stored.dtype).removeprefix("torch.")


def _rows(tensors: Iterable[Stored]) -> list[dict[str, Any]]:
    return [
        {
            "name": stored.name,
            "shape": list(stored.shape),
            "dtype": dtype_name(stored),
            "bytes": stored.nbytes,
            "tied_to": stored.tied_to,
        }
        for stored in tensors
    ]


def _is_checkpoint(path: Path) -> bool:
    try:
        layout.step_of(path)
    except ValueError:
        return False
    return True

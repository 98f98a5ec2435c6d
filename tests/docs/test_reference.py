"""docs/reference.md names all that is public, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pages
import pytest
import torch

import lockstep
from lockstep import errors, optim, strategies, testing
from lockstep.batch.loader import Loader
from lockstep.checkpoint.checkpointer import Checkpoint
from lockstep.cli.main import COMMANDS

pytestmark = pytest.mark.unit

PAGE = (pages.ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
OF_THE_RUN = {"rank", "size", "local_rank", "local_size", "node_rank", "device", "is_main"}
CHECKPOINT = {"last_resume_note"}


def named(heading: str, column: int = 0) -> set[str]:
    """The names in one column of a section's tables."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    return {n for row in rows for n in re.findall(r"`(?:lockstep )?(\w+)[^`]*`", row[column])}


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("lockstep", set(lockstep.__all__)),
        ("World", public(lockstep.World) | OF_THE_RUN | {"strategy"}),
        ("Prepared loaders", public(Loader)),
        ("Checkpoints", public(Checkpoint) | CHECKPOINT),
        ("lockstep.optim", set(optim.__all__)),
        ("lockstep.strategies", set(strategies.__all__)),
        ("lockstep.testing", set(testing.__all__)),
        ("Commands", set(COMMANDS)),
    ],
)
def test_the_names(heading: str, names: set[str]) -> None:
    assert named(heading) == names


def test_the_options_of_the_strategies() -> None:
    fields = {
        f.name for n in strategies.__all__ for f in dataclasses.fields(getattr(strategies, n))
    }
    # A row may name another strategy: "those of `FSDP`, and `shard_size`".
    assert named("lockstep.strategies", 1) - set(strategies.__all__) == fields


def test_the_attributes_that_are_set_are_there(tmp_path: Path) -> None:
    with lockstep.init() as world:
        assert all(hasattr(world, name) for name in OF_THE_RUN)
        checkpoint = world.checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
        assert all(hasattr(checkpoint, name) for name in CHECKPOINT)


def test_the_errors() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.LockstepError) and kind is not errors.LockstepError
    }
    both = named("lockstep.errors") | named("Errors while joining")
    assert both == kinds

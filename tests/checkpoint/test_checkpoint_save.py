from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.checkpoint import layout, save
from lockstep.checkpoint.save import write_checkpoint
from lockstep.errors import CheckpointError


def write(folder: Path, step: int, value: float, keep: int = 2) -> Path:
    files = {
        "model.safetensors": {"w": torch.full((3,), value)},
        "training.safetensors": {"m": torch.tensor(value)},
    }
    return write_checkpoint(folder, step, files, {"epoch": 1}, keep=keep)


def value_in(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["w"][0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_complete_and_says_what_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "b", 120, 1.5)
    assert path == tmp_path / "a" / "b" / "step-000000120"
    assert names(path) == ["manifest.json", "model.safetensors", "training.safetensors"]
    manifest = layout.read_manifest(path)
    assert manifest["step"] == 120
    assert manifest["epoch"] == 1
    assert manifest["files"] == {
        name: (path / name).stat().st_size for name in names(path) if name != "manifest.json"
    }
    assert layout.latest(tmp_path / "a" / "b") == path
    assert value_in(path) == 1.5


def test_files_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write(tmp_path, 1, 0.0)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


def test_the_newest_are_kept_and_numbers_order_them(tmp_path: Path) -> None:
    for step in (5, 10, 999_999_999, 1_000_000_000):
        write(tmp_path, step, float(step), keep=2)
    assert [layout.step_of(p) for p in layout.list_checkpoints(tmp_path)] == [
        999_999_999,
        1_000_000_000,
    ]
    assert len(names(tmp_path)) == 2


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3, 1.0)
    write(tmp_path, 3, 2.0)
    assert names(tmp_path) == ["step-000000003"]
    assert value_in(tmp_path / "step-000000003") == 2.0


def test_a_run_that_did_not_resume_cannot_hide_behind_a_later_step(tmp_path: Path) -> None:
    write(tmp_path, 200, 1.0)
    with pytest.raises(CheckpointError, match="step-000000200 is there already") as caught:
        write(tmp_path, 20, 2.0)
    assert "checkpoint.resume()" in caught.value.do
    assert names(tmp_path) == ["step-000000200"]


def test_foreign_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-000000007").write_text("a file of that name")
    (tmp_path / "step-000000009").mkdir()
    (tmp_path / ".step-000000001.tmp-mine").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    before = names(tmp_path)
    write(tmp_path, 8, 1.0, keep=1)
    write(tmp_path, 10, 1.0, keep=1)
    assert names(tmp_path) == sorted([*before, "step-000000010"])
    assert layout.latest(tmp_path) == tmp_path / "step-000000010"


def damage_no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_half_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def damage_other_json(path: Path) -> None:
    (path / "manifest.json").write_text("[1, 2]")


def damage_short_file(path: Path) -> None:
    os.truncate(path / "model.safetensors", 20)


def damage_missing_file(path: Path) -> None:
    (path / "training.safetensors").unlink()


def damage_path_outside(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    outside = path.parent / "outside"
    outside.write_text("x")
    manifest["files"] = {"../outside": 1}
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [
    damage_no_manifest,
    damage_half_manifest,
    damage_other_json,
    damage_short_file,
    damage_missing_file,
    damage_path_outside,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_what_is_incomplete_is_passed_over(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    good, bad = write(tmp_path, 1, 1.0), write(tmp_path, 2, 2.0)
    damage(bad)
    assert layout.latest(tmp_path) == good
    assert layout.list_checkpoints(tmp_path) == [good]
    assert layout.incomplete(tmp_path) == [bad]
    with pytest.raises(CheckpointError, match="not complete"):
        layout.read_manifest(bad)
    assert write(tmp_path, 2, 3.0) == bad
    assert layout.latest(tmp_path) == bad
    assert value_in(bad) == 3.0


def test_a_newer_format_is_refused_not_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 1.0)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "lockstep": "9.0"}))
    assert layout.latest(tmp_path) == path
    with pytest.raises(CheckpointError, match="format is 2") as caught:
        layout.read_manifest(path)
    assert "Lockstep 9.0" in caught.value.do


class Killed(BaseException):
    """Stands for the end of the process: nothing cleans up after it."""


CALLS = [
    (os, "fsync"),
    (os, "replace"),
    (save, "save_file"),
    (save, "write_text"),
    (shutil, "rmtree"),
    (Path, "mkdir"),
    (Path, "touch"),
    (Path, "chmod"),
]


def stop_at(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Counts the calls that change the disk; the one of that number and all later ones raise."""
    done: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) > number:
                if kwargs.get("ignore_errors"):
                    return None
                raise error
            return original(*args, **kwargs)

        patch.setattr(owner, name, call)

    for owner, name in CALLS:
        wrap(owner, name)
    return done


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "broken")], ids=["kill", "error"])
def test_stopped_anywhere_there_is_a_whole_checkpoint(
    tmp_path: Path, step: int, error: BaseException
) -> None:
    """Stops a second save before each call that changes the disk, then reads and saves again."""
    outcomes = []
    for number in range(100):
        folder = tmp_path / str(number)
        write(folder, 1, 1.0, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            calls = stop_at(patch, number, error)
            try:
                write(folder, step, 2.0, keep=1)
                stopped = False
            except (Killed, CheckpointError):
                stopped = True
        newest = layout.latest(folder)
        assert newest is not None, f"nothing to load when stopped before call {number}: {calls}"
        assert value_in(newest) in (1.0, 2.0)
        assert float(load_file(newest / "training.safetensors")["m"]) == value_in(newest)
        outcomes.append(value_in(newest))
        write(folder, step, 3.0, keep=1)
        assert names(folder) == [layout.step_folder(folder, step).name]
        assert value_in(layout.list_checkpoints(folder)[0]) == 3.0
        if not stopped and len(calls) <= number:
            break
    assert outcomes == sorted(outcomes), "once the new one is there, it stays"
    assert outcomes[0] == 1.0
    assert outcomes[-1] == 2.0
    assert outcomes.count(1.0) > 8


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


FULL = SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


@pytest.mark.parametrize(
    ("owner", "name", "error", "found"),
    [
        (save, "save_file", FULL, "no space is left"),
        (os, "fsync", OSError(errno.ENOSPC, "No space left on device"), "no space is left"),
        (Path, "mkdir", PermissionError(errno.EACCES, "denied"), "permission is denied"),
        (Path, "mkdir", OSError(errno.EROFS, "Read-only file system"), "permission is denied"),
        (save, "save_file", SafetensorError("odd"), "odd"),
        (save, "save_file", KeyError(torch.bits8), "cannot store torch.bits8"),
    ],
)
def test_what_the_disk_says_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: Exception,
    found: str,
) -> None:
    write(tmp_path, 1, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(error))
        with pytest.raises(CheckpointError, match=found):
            write(tmp_path, 2, 2.0)
    assert names(tmp_path) == ["step-000000001"]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="a file is where a folder should be"):
            write(folder, 1, 1.0)
        with pytest.raises(CheckpointError, match="a file is where a folder should be"):
            layout.latest(folder)


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert layout.latest(tmp_path / "none") is None
    assert layout.list_checkpoints(tmp_path / "none") == []

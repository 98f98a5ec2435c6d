from __future__ import annotations

import errno
import json
import os
import resource
import signal
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from safetensors.torch import load_file, save_file

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.formats.safetensors import write_tensors
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.unit


def write(folder: Path, step: int, value: float, keep: int = 2, **more: Any) -> Path:
    files = {
        "model.safetensors": {"w": torch.full((3,), value)},
        "training.safetensors": {"m": torch.tensor(value)},
    }
    manifest = {"epoch": 1, "modules": {"model": {}}, "training": {}, **more}
    return saved.write(folder, step, files, manifest, keep=keep)


def value_in(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["w"][0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_complete_and_its_manifest_describes_it(tmp_path: Path) -> None:
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


def test_the_umask_decides_who_may_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write(tmp_path, 1, 0.0)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


def test_the_checkpoints_of_the_highest_steps_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 999_999_999, 1_000_000_000):
        write(tmp_path, step, float(step), keep=2)
    assert [layout.step_of(p) for p in layout.list_checkpoints(tmp_path)] == [
        999_999_999,
        1_000_000_000,
    ]
    assert len(names(tmp_path)) == 2


def test_a_link_to_a_checkpoint_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path / "run", 1, 1.0)
    moved = tmp_path / "moved"
    path = layout.step_folder(tmp_path / "run", 1)
    path.rename(moved)
    path.symlink_to(moved)
    files = names(moved)
    write(tmp_path / "run", 2, 2.0, keep=1)
    assert names(tmp_path / "run") == ["step-000000002"]
    assert names(moved) == files


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 3, 1.0)
    write(tmp_path, 3, 2.0)
    assert names(tmp_path) == ["step-000000003"]
    assert value_in(tmp_path / "step-000000003") == 2.0


def test_a_save_before_a_later_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 200, 1.0)
    with pytest.raises(CheckpointError, match="step-000000200 is there already") as caught:
        write(tmp_path, 20, 2.0)
    assert "checkpoint.resume()" in caught.value.do
    assert names(tmp_path) == ["step-000000200"]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
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
def test_incomplete_checkpoints_are_passed_over(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    good, bad = write(tmp_path, 1, 1.0), write(tmp_path, 2, 2.0)
    damage(bad)
    assert layout.latest(tmp_path) == good
    assert layout.list_checkpoints(tmp_path) == [good]
    assert layout.candidates(tmp_path) == [bad, good]
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


def test_a_manifest_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 1.0)
    file = path / "manifest.json"
    sound = file.read_bytes()
    accepted = []
    for bit in range(8 * len(sound)):
        content = bytearray(sound)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        with suppress(CheckpointError):
            accepted.append((bit, layout.read_manifest(path)))
    assert accepted == []


class Killed(BaseException):
    """Stands for the end of the process: nothing cleans up after it."""


CALLS = ["make_folder", "create", "write", "sync", "close", "rename", "unlink", "remove_folder"]


def stop_at(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Counts the calls that change the disk; the one of that number and all later ones raise."""
    done: list[str] = []

    def wrap(name: str) -> None:
        original = getattr(storage, name)

        def call(*args: Any) -> Any:
            done.append(name)
            if len(done) > number:
                if name == "close":
                    original(*args)
                raise error
            # What was written outlives a process, whether it is on the disk yet or not.
            return None if name == "sync" else original(*args)

        patch.setattr(storage, name, call)

    for name in CALLS:
        wrap(name)
    return done


def test_every_operation_on_the_disk_is_stopped_in_these_tests() -> None:
    """Every function of the module that changes something is among those that are stopped."""
    defined = {
        n for n, v in vars(storage).items() if getattr(v, "__module__", "") == storage.__name__
    }
    use_the_others = {"replacing", "new_file", "remove_tree", "sync_path"}
    assert defined - set(CALLS) == use_the_others


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "broken")], ids=["kill", "error"])
def test_a_save_that_is_stopped_anywhere_leaves_a_complete_checkpoint(
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


@pytest.mark.parametrize(
    ("name", "code", "found", "do"),
    [
        ("write", errno.ENOSPC, "no space is left", "free some space"),
        ("sync", errno.ENOSPC, "no space is left", "the last complete checkpoint is untouched"),
        ("write", errno.EDQUOT, "your quota", "ask for more"),
        ("close", errno.EDQUOT, "your quota", "ask for more"),
        ("make_folder", errno.EACCES, "permission is denied", "change its permissions"),
        ("make_folder", errno.EROFS, "the file system is read-only", "a disk that fails"),
        ("create", errno.ESTALE, "does not answer as it should", "look at the mount"),
        ("write", errno.EIO, "does not answer as it should", "the machine's log"),
        ("create", errno.ENOENT, "went away meanwhile", "still mounted"),
    ],
)
def test_errors_of_the_disk_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, found: str, do: str
) -> None:
    write(tmp_path, 1, 1.0)
    with monkeypatch.context() as patch:
        original = getattr(storage, name)

        def fail(*arguments: Any) -> Any:
            if name == "close":
                original(*arguments)
            raise OSError(code, os.strerror(code))

        patch.setattr(storage, name, fail)
        with pytest.raises(CheckpointError, match=found) as caught:
            write(tmp_path, 2, 2.0)
    assert do in caught.value.do
    assert names(tmp_path) == ["step-000000001"]


def test_a_limit_on_the_size_of_files_is_reported(tmp_path: Path) -> None:
    """A real one, set by the system."""
    write(tmp_path, 1, 1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(CheckpointError, match="limit on the size of a file"):
            write(tmp_path, 2, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["step-000000001"]


def test_a_dtype_without_a_code_in_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"torch.bits8, which the safetensors format cannot"):
        write_tensors(tmp_path / "x", {"w": torch.empty(2, dtype=torch.bits8)})


def test_written_files_are_equal_to_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "é.weight": torch.randn(3, 2),
        "half": torch.randn(5).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    written = write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    loaded, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert loaded.keys() == theirs.keys()
    assert all(torch.equal(loaded[name], theirs[name]) for name in theirs)
    assert written.num_bytes == (tmp_path / "ours").stat().st_size
    assert written.checksum == f"crc32:{zlib.crc32((tmp_path / 'ours').read_bytes()):08x}"


def test_a_file_with_the_name_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="a file is where a folder should be"):
            write(folder, 1, 1.0)
        with pytest.raises(CheckpointError, match="a file is where a folder should be"):
            layout.latest(folder)


def test_a_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert layout.latest(tmp_path / "none") is None
    assert layout.list_checkpoints(tmp_path / "none") == []

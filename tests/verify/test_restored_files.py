"""Files that a script changes are as before when a run of it is over."""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import warm

from lockstep.verify.restored_files import FilesBefore, restore

pytestmark = pytest.mark.unit

BEFORE = {
    "log": "1\n",
    "state": "a",
    "moved": "b",
    "gone": "c",
    "old/best": "d",
    "old/deep/er": "d",
    "read": "e",
}


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with files, a link and an empty folder."""
    folder = tmp_path / "user"
    for name, text in BEFORE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latest").symlink_to("state")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def watched(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose changes of files are seen."""
    monkeypatch.setattr(builtins, "open", builtins.open)
    monkeypatch.setattr(io, "open", io.open)
    for name in (
        *("remove", "unlink", "rename", "replace", "truncate"),
        *("open", "mkdir", "rmdir", "symlink", "link"),
    ):
        monkeypatch.setattr(os, name, getattr(os, name))
    monkeypatch.setattr(shutil, "rmtree", shutil.rmtree)
    run = tmp_path / "runs" / "0"
    (run / "before").mkdir(parents=True)
    os.utime(run / "before", (2e9, 2e9))  # the files of the test are older
    FilesBefore(run).watch()
    return run


def found_in(folder: Path) -> dict[str, str]:
    """All that is in a folder: texts of files, targets of links, and folders."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "folder" if path.is_dir() else path.read_text()
    return found


def test_what_was_written_over_moved_or_removed_comes_back(watched: Path, user: Path) -> None:
    before = found_in(user)
    with open(user / "log", "a") as file:
        file.write("2\n")
    (user / "state").write_text("other")
    (user / "new").write_text("x")
    (user / "new").write_text("y")
    os.replace(user / "moved", user / "there")
    (user / "gone").unlink()
    shutil.rmtree(user / "old")
    assert (user / "read").read_text() == "e"
    (watched / "own").write_text("of the run")
    restore(watched)
    assert found_in(user) == before
    assert (watched / "own").exists()


def _opens_a_descriptor(user: Path) -> None:
    descriptor = os.open(user / "state", os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, b"other")
    os.close(descriptor)
    os.close(os.open(user / "new", os.O_WRONLY | os.O_CREAT))


def _empties_a_file_by_its_flag_alone(user: Path) -> None:
    os.close(os.open(user / "state", os.O_RDONLY | os.O_TRUNC))


def _gives_paths_by_keyword(user: Path) -> None:
    os.rename(src=user / "moved", dst=user / "there")
    os.remove(path=user / "gone")
    os.symlink(src="state", dst=user / "best")


def _makes_a_link_anew(user: Path) -> None:
    os.remove(user / "latest")
    os.symlink("new", user / "latest")
    (user / "best").symlink_to("state")
    os.link(user / "state", user / "same")


def _writes_through_a_link(user: Path) -> None:
    (user / "latest").write_text("other")


def _replaces_a_link(user: Path) -> None:
    (user / "new").symlink_to("gone")
    os.replace(user / "new", user / "latest")


def _moves_a_folder(user: Path) -> None:
    os.makedirs(user / "made" / "part")
    (user / "made" / "part" / "state").write_text("x")
    os.rename(user / "made", user / "kept")
    os.rename(user / "old", user / "older")
    (user / "older" / "best").write_text("y")


def _makes_and_removes_folders(user: Path) -> None:
    os.makedirs(user / "one" / "two")
    (user / "three").mkdir()
    os.rmdir(user / "empty")
    shutil.move(user / "old" / "deep", user / "elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        _opens_a_descriptor,
        _empties_a_file_by_its_flag_alone,
        _gives_paths_by_keyword,
        _makes_a_link_anew,
        _writes_through_a_link,
        _replaces_a_link,
        _moves_a_folder,
        _makes_and_removes_folders,
    ],
)
def test_links_and_folders_are_as_before_too(
    watched: Path, user: Path, change: Callable[[Path], None]
) -> None:
    before = found_in(user)
    change(user)
    assert found_in(user) != before
    restore(watched)
    assert found_in(user) == before


RESUMES = """
import os, pickle, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists(sys.argv[1]):
    with open(sys.argv[1], "rb") as file:
        model.load_state_dict(pickle.load(file))
for batch in torch.randn(48, 4).split(12):
    mine = batch.chunk(size)[rank]
    optimizer.zero_grad()
    F.mse_loss(model(mine), mine[:, :1]).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= size
    optimizer.step()
    if rank == 0:
        with open(sys.argv[1], "wb") as file:
            pickle.dump(model.state_dict(), file)
"""


@pytest.mark.thorough
def test_a_script_does_not_resume_what_the_run_before_has_saved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESUMES)
    saved = tmp_path / "state.pickle"
    verdict = warm.verify(script, str(saved))
    assert verdict.word == "EQUAL", verdict.lines()
    assert not saved.exists()

"""Files that a script changes are as before when a run of it is over."""

from __future__ import annotations

import builtins
import io
import os
import shutil
from pathlib import Path

import pytest
import warm

from lockstep.verify.files import FilesBefore, restore


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose changes of files are seen."""
    monkeypatch.setattr(builtins, "open", builtins.open)
    monkeypatch.setattr(io, "open", io.open)
    for name in ("remove", "unlink", "rename", "replace", "truncate"):
        monkeypatch.setattr(os, name, getattr(os, name))
    monkeypatch.setattr(shutil, "rmtree", shutil.rmtree)
    run = tmp_path / "runs" / "0"
    (run / "before").mkdir(parents=True)
    os.utime(run / "before", (2e9, 2e9))  # the files of the test are older
    FilesBefore(run).watch()
    return run


def test_what_was_written_over_moved_or_removed_comes_back(watched: Path, tmp_path: Path) -> None:
    user = tmp_path / "user"
    (user / "old").mkdir(parents=True)
    before = {"log": "1\n", "state": "a", "moved": "b", "gone": "c", "old/best": "d", "read": "e"}
    for name, text in before.items():
        descriptor = os.open(user / name, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, text.encode())
        os.close(descriptor)
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
    found = {p.relative_to(user).as_posix(): p for p in user.rglob("*") if p.is_file()}
    assert {name: path.read_text() for name, path in found.items()} == before
    assert (watched / "own").exists()


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

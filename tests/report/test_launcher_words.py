"""What the launcher writes into the record of a run, and the page says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import launch

from lockstep.extensions.report.analysis import find
from lockstep.extensions.report.reading import Record

pytestmark = pytest.mark.launcher

SCRIPT = """
import os, signal
import torch, lockstep
from torch.utils.data import TensorDataset

with lockstep.init() as world:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    for (x,) in world.loader(TensorDataset(torch.ones(12, 1)), 4):
        world.backward(model(x).mean())
        optimizer.step()
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and world.rank == 1 and world.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_and_the_restart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ["run", "--nproc", "2", "--max-restarts", "1", "--report", "runs/a", "train.py"]
    ended = launch(arguments, tmp_path)
    assert ended.returncode == 0, ended.stderr
    record = Record(tmp_path / "runs" / "a")
    assert [start.num_ranks for start in record.starts] == [2, 2]
    assert record.starts[1].end == "ok"
    assert [line["kind"] for start in record.starts for line in start.launcher_lines] == [
        "failure",
        "restart",
        "end",
    ]
    findings = find(record)
    assert findings[0].level == "error"
    assert findings[0].text.startswith("FIRST FAILURE: rank 1 on host")
    assert "  killed by SIGKILL" in findings[0].evidence[0]
    assert "exit code 71" in findings[0].evidence
    assert findings[1].text.startswith("start 1, of 2 ranks, ended by a failure")


def test_a_rank_that_fails_before_init(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('odd')\n"
        "import lockstep\nlockstep.init()\n"
    )
    arguments = ["run", "--nproc", "2", "--report", "runs/a", "train.py", "--width", "2"]
    assert launch(arguments, tmp_path).returncode == 1
    record = Record(tmp_path / "runs" / "a")
    (start,) = record.starts
    assert (start.reached_init, start.num_ranks, start.end) == (False, 2, "failed")
    assert start.main.header["command"] == ["train.py", "--width", "2"]
    error, note = find(record)
    assert error.text.startswith("FIRST FAILURE: rank 1 on host")
    lines = "  ValueError: odd", "  train.py:3: raise ValueError('odd')", "exit code 1"
    assert set(lines) <= set(error.evidence)
    assert note.text.startswith("no rank came to lockstep.init")


def test_a_record_that_cannot_be_written_is_told_where_the_script_does_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = launch(["run", "--report", "train.py/x", "train.py"], tmp_path)
    assert done.returncode == 0
    assert "lockstep: no record is written: train.py/x: Not a directory\n" in done.stderr

"""The command as a user gives it; tests/watchdog/test_ledger_report.py has what it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.cli.main import main

pytestmark = pytest.mark.unit


def test_a_run_and_its_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    with lockstep.init(device="cpu", ledger=folder) as world:
        loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=4)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for (x,) in loader:
            world.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    result = CliRunner().invoke(main, ["ledger", str(folder), "--json", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    assert f"{folder}: 3 optimizer steps" in result.stdout
    assert "epoch 0: 10 samples in 3 of 3 global batches" in result.stdout
    assert json.loads((tmp_path / "report").read_text())["findings"] == []
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    result = CliRunner().invoke(main, ["ledger", str(folder), "--json", "-"])
    assert json.loads(result.stdout)["steps"] == 2


def test_there_is_no_ledger(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["ledger", str(tmp_path)])
    assert result.exit_code == 1
    assert "the folder holds none" in result.stderr
    result = CliRunner().invoke(main, ["ledger", str(tmp_path / "no")])
    assert result.exit_code == 1
    assert "there is no such folder" in result.stderr

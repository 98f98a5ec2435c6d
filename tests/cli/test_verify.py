"""The command as a user gives it; what it finds is tested in tests/verify."""

import json
import os
import subprocess
import sys
from pathlib import Path

TRAINS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import lockstep

world = lockstep.init(seed=0)
torch.manual_seed(0)
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12, shuffle=True)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = world.prepare(model, optimizer, loader)
checkpoint = world.checkpoint("run", model=model)
checkpoint.resume()
assert sys.argv[1:] == ["--an", "argument"]
for epoch in world.epochs(5):
    for x, y in loader:
        world.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save()
raise AssertionError("the script was to be stopped before")
"""


def verify(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", "verify", *map(str, words)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ways_of_computing_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    options = "--shares", "1:3", "--accumulate", 2, "--strategy", "fsdp", "--json", "verdict.json"
    ended = verify(tmp_path, *options, "train.py", "--an", "argument")
    lines = ended.stdout.splitlines()
    assert [line[:21].split()[0] for line in lines if not line.startswith(" ")] == [
        "EQUAL",
        "DIFFERENT",
        "EQUAL",
        "EQUAL",
    ], ended.stdout + ended.stderr
    assert lines[0] == (
        "EQUAL      2 processes: 3 optimizer steps, 12 samples each, losses, 6 gradients, "
        "6 parameters, 3 buffers, learning rates"
    )
    assert lines[1].startswith("  switched off for the comparison: dropout layers, checkpoints")
    assert "  cause   LS307" in ended.stdout  # BatchNorm's statistics are of a micro-batch
    assert ended.returncode == 1
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["verdict"] == "DIFFERENT"
    assert [way["verdict"] for way in verdict["ways"]] == [
        "EQUAL",
        "DIFFERENT",
        "EQUAL",
        "EQUAL",
    ]
    assert verdict["findings"][0]["code"] == "LS307"
    assert sorted(p.name for p in tmp_path.iterdir() if "lockstep-verify" in p.name) == []
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import torch\nraise ValueError('no data')\n")
    ended = verify(tmp_path, "fails.py")
    assert ended.returncode == 2
    assert "on one process the script ended with ValueError: no data" in ended.stderr


def test_wrong_uses(tmp_path: Path) -> None:
    for words, text in (
        (["nowhere.py"], "there is no such file"),
        ([], "Give a script, or --ledger"),
        (["--nproc", 1, "train.py"], "x>=2"),
    ):
        ended = verify(tmp_path, *words)
        assert ended.returncode == 2
        assert text in ended.stderr

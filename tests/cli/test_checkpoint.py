from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from ranks import HANG_S
from safetensors.torch import load_file
from saved import checkpoint
from torch import nn

from lockstep.checkpoint.checksums import seal_manifest
from lockstep.checkpoint.weights import save_weights
from lockstep.cli.main import main

pytestmark = pytest.mark.launcher


def lockstep(*words: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, words)])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight


def run_folder(folder: Path) -> Path:
    for step in (5, 6):
        checkpoint(folder, step, model=Tied(), training={"lr": 0.1, "mean": torch.ones(7)})
    return folder


def test_inspect_a_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    result = lockstep("inspect", run)
    assert result.exit_code == 0, result.output
    text = result.output
    assert text.count(": complete\n") == 2
    for line in (
        f"{run}/step-000000006: a checkpoint of Lockstep",
        "  step         6",
        "  epoch        2",
        "  world size   3",
        "  lockstep     0.1.0",
        "embedding.weight  [5, 3]  float32                 60 B",
        "out.weight        [5, 3]  float32  is embedding.weight",
        "total: 1 tensors (1 float32), 15 values, 60 B",
        "training state: 1 tensors (1 float32), 7 values, 28 B",
    ):
        assert f"\n{line}\n" in text, text
    os.truncate(run / "step-000000006" / "model.safetensors", 40)
    result = lockstep("inspect", run)
    assert result.exit_code == 1
    assert "step-000000006: model.safetensors has 40 bytes, the manifest says" in result.output
    assert "step-000000005: a checkpoint of Lockstep" in result.output
    result = lockstep("inspect", run / "step-000000006")
    assert result.exit_code == 1
    assert "no complete checkpoint is there" in result.output


def test_inspect_shows_the_metric_and_the_best(tmp_path: Path) -> None:
    for step, metric in ((5, 0.25), (6, 0.5)):
        path = checkpoint(tmp_path, step, model=net())
        manifest = json.loads((path / "manifest.json").read_text())
        manifest |= {"metric": metric, "best": "min"}
        (path / "manifest.json").write_bytes(seal_manifest(manifest))
    text = lockstep("inspect", tmp_path).output
    assert "step-000000005: complete, metric 0.25, the best\n" in text
    assert "step-000000006: complete, metric 0.5\n" in text
    assert "  metric       0.5\n" in text


def test_inspect_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")
    monkeypatch.chdir(run / "step-000000005")
    result = lockstep("inspect", ".", "--json")
    found = json.loads(result.output)
    assert found["sound"] is True
    assert found["contents"]["facts"]["step"] == 5
    assert found["contents"]["totals"]["values"] == 15
    assert [t["tied_to"] for t in found["contents"]["tensors"]] == [None, "embedding.weight"]
    assert [t["name"] for t in found["contents"]["training"]] == ["mean"]
    sizes = {p.name: p.stat().st_size for p in Path().iterdir()}
    assert found["contents"]["files"] == sizes


def test_inspect_files(tmp_path: Path) -> None:
    model = net()
    save_weights(model, tmp_path / "w.safetensors", shard_size=60)
    torch.save({"epoch": 3, "note": "a\x1b[2Jb", "model": model.state_dict()}, tmp_path / "w.pt")
    for path in (tmp_path / "w.safetensors", tmp_path / "w.pt"):
        text = lockstep("inspect", path, "--sort", "size", "--limit", "2").output
        assert text.index("0.weight") < text.index("2.weight"), text
        assert "... and 7 more (--limit 0 shows all)" in text
        assert "total: 9 tensors (8 float32, 1 int64), 36 values, 148 B" in text
        text = lockstep("inspect", path, "--limit", "0", "--sort", "file").output
        assert "1.num_batches_tracked  []      int64     8 B" in text
    text = lockstep("inspect", tmp_path / "w.pt").output
    assert "  epoch        3\n" in text
    assert "  read         ['model']\n" in text
    assert "a?[2Jb" in text
    assert "safetensors in 3 files" in lockstep("inspect", tmp_path / "w.safetensors").output


def test_a_pickled_model_needs_trust(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(nn.Linear(2, 2), path)
    for words in (("inspect", path), ("convert", path, tmp_path / "o.safetensors")):
        result = lockstep(*words)
        assert result.exit_code == 1
        assert "runs whatever code its author put there" in result.output
        assert lockstep(*words, "--trust").exit_code == 0
    assert lockstep("diff", path, path).exit_code == 2
    assert lockstep("diff", path, path, "--trust").exit_code == 0


def test_diff(tmp_path: Path) -> None:
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    state: dict[str, Any] = dict(net().state_dict())
    torch.save(state, a)
    torch.save({f"module.{name}": value for name, value in state.items()}, b)
    result = lockstep("diff", a, a)
    assert (result.exit_code, result.output) == (0, "0 of 9 tensors differ\n")
    result = lockstep("diff", a, b)
    assert result.exit_code == 1
    assert "18 of 18 tensors differ" in result.output
    assert "with --match they would pair after this: removed the prefix 'module.'" in result.output
    assert lockstep("diff", a, b, "--match").exit_code == 0
    state["0.bias"] = state["0.bias"].clone()
    state["0.bias"][1] += 0.5
    state["2.bias"] = torch.tensor([float("nan"), state["2.bias"][1].item()])
    state["2.weight"] = torch.zeros(7)
    state["1.bias"] = state["1.bias"].half()
    state["new"] = state.pop("1.weight")
    torch.save(state, b)
    lines = [line.split() for line in lockstep("diff", a, b).output.splitlines()]
    rows = {line[0]: " ".join(line[1:]) for line in lines}
    assert rows["0.bias"].startswith("values float32 [3] float32 [3] 1/3 0.5")
    assert rows["2.bias"] == "values, NaN 0/1 float32 [2] float32 [2] 1/2 0 0"
    assert rows["2.weight"] == "shape float32 [2, 3] float32 [7]"
    assert rows["1.bias"] == "dtype float32 [3] float16 [3] 0"
    assert rows["1.weight"] == "in a alone float32 [3]"
    assert rows["new"] == "in b alone float32 [3]"
    assert rows["6"] == "of 10 tensors differ"
    torch.save({"w": torch.ones(3)}, a)
    torch.save({"w": torch.ones(3) + 1e-6}, b)
    assert lockstep("diff", a, b).exit_code == 1
    assert lockstep("diff", a, b, "--atol", "1e-5").exit_code == 0
    assert "w     equal" in lockstep("diff", a, a, "--all").output
    assert lockstep("diff", a, tmp_path / "absent.pt").exit_code == 2


def test_diff_of_checkpoints(tmp_path: Path) -> None:
    model = net()
    steps = [
        checkpoint(tmp_path, i, model=model, training={"mean": torch.full((2,), float(i))})
        for i in (1, 2)
    ]
    save_weights(model, tmp_path / "w.safetensors")
    assert lockstep("diff", *steps).exit_code == 0
    assert lockstep("diff", steps[0], tmp_path / "w.safetensors").exit_code == 0
    result = lockstep("diff", *steps, "--training")
    assert result.exit_code == 1
    assert "training: mean  values" in result.output


def test_convert(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", generator=net(), critic=nn.Linear(2, 2))
    out = tmp_path / "o.safetensors"
    result = lockstep("convert", tmp_path / "run", out)
    assert result.exit_code == 1
    assert "it holds 2 modules" in result.output
    words = ("convert", tmp_path / "run", out, "--name", "critic", "--dtype", "bf16")
    result = lockstep(*words, "--prefix", "module.")
    assert result.exit_code == 0, result.output
    assert "tensors 2; 2 renamed; 2 converted to bf16" in result.output
    held = load_file(out)
    assert {name: value.dtype for name, value in held.items()} == {
        "module.weight": torch.bfloat16,
        "module.bias": torch.bfloat16,
    }
    result = lockstep(*words)
    assert result.exit_code == 2
    assert "is there already" in result.output
    assert lockstep(*words, "--overwrite", "--shard-size", "8").exit_code == 0
    assert not out.exists()
    assert lockstep(*words).exit_code == 2
    back = tmp_path / "o.pt"
    result = lockstep("convert", out, back, "--prefix", "x.", "--remove-prefix", "w")
    assert torch.load(back).keys() == {"x.eight", "x.bias"}
    result = lockstep("convert", out, tmp_path / "p.pt", "--remove-prefix", "module.")
    assert result.exit_code == 2
    assert "no name begins with it" in result.output
    assert lockstep("convert", out, tmp_path / "p.safetensors", "--shard-size", "x").exit_code == 2


def test_repair(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    assert lockstep("repair", run).output == f"{run}: nothing is wrong\n"
    broken = run / "step-000000006"
    os.truncate(broken / "model.safetensors", 40)
    result = lockstep("repair", run, "--yes")
    assert result.exit_code == 1
    assert "0 done, 1 left as they are" in result.output
    for path in (broken, *broken.iterdir()):
        os.utime(path, (0, 0))
    result = lockstep("repair", run)
    assert result.exit_code == 1
    assert "do:    remove it\nnothing was changed; add --yes to do it\n" in result.output
    assert broken.exists()
    result = lockstep("repair", run, "--yes")
    assert (result.exit_code, broken.exists()) == (0, False)
    assert os.listdir(run) == ["step-000000005"]
    assert lockstep("repair", tmp_path).exit_code == 1


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path / "absent", tmp_path):
        result = lockstep("inspect", path)
        assert result.exit_code == 1
        assert "lockstep: reading weights from" in result.output


@pytest.mark.parametrize("words", [[], ["inspect"], ["diff"], ["convert"], ["repair"]])
def test_help_does_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "checkpoint", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout

"""The examples do what their pages say: each is run as a user would run it."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import launch
from ranks import HANG_S
from safetensors.torch import load_file

pytestmark = pytest.mark.launcher

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits"
FASHION = EXAMPLES / "fashion_mnist"
FINETUNE = EXAMPLES / "finetune"  # `make real` runs it
TINY = ["--made", "64", "--limit", "48", "--batch-size", "16", "--epochs", "1", "--workers", "0"]
UNTIDY = re.compile(r"warn|destroy_process_group|leaked|terminate called|Traceback", re.IGNORECASE)


def run(*command: object, path: Path | None = None) -> str:
    """Runs `python ...`; returns what it printed. Standard error must hold no warning."""
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return checked(done)


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed, if all went well."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not UNTIDY.search(done.stderr), done.stderr
    return done.stdout


def lockstep_run(*command: object) -> str:
    """Runs `lockstep run --nproc 2 ...`."""
    done = launch(["run", "--nproc", "2", *map(str, command)], Path.cwd())
    return checked(done)


def accuracies(output: str) -> list[float]:
    """The percentages of all lines that say how much was right, in order."""
    return [float(found) for found in re.findall(r"([\d.]+)% of .*right", output)]


def statements(script: Path) -> list[str]:
    """The lines of a script but for docstrings, imports, comments and blank lines."""
    text = script.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if alone or isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    code = [line.partition("  #")[0].rstrip() for line in lines]
    return [line for line in code if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize(
    ("folder", "added", "removed"), [(DIGITS, 4, 2), (FASHION, 11, 7), (FINETUNE, 29, 11)]
)
def test_the_pair_differs_in_few_lines(folder: Path, added: int, removed: int) -> None:
    pair = [statements(folder / name) for name in ("plain_torch.py", "with_lockstep.py")]
    signs = [line[0] for line in difflib.ndiff(*pair)]
    assert (signs.count("+"), signs.count("-")) == (added, removed)


def test_statements_leaves_out_what_is_no_statement(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        '"""Two\nlines."""\n\nimport os\nfrom re import (\n    sub,\n)\n\nx = 1  # one\n'
    )
    assert statements(script) == ["x = 1"]


@pytest.mark.thorough
def test_digits_on_one_and_on_two_processes() -> None:
    plain = accuracies(run(DIGITS / "plain_torch.py"))
    one = accuracies(run(DIGITS / "with_lockstep.py"))
    two = accuracies(lockstep_run(DIGITS / "with_lockstep.py"))
    assert len(plain) == len(one) == len(two) == 5, "each epoch is printed once"
    assert min(plain[-1], one[-1], two[-1]) > 97
    assert one == two, (
        "as the README says; another processor may have different numbers than it shows"
    )


@pytest.mark.thorough
def test_digits_have_the_same_bits_on_one_and_on_two_processes() -> None:
    lines = []
    for number, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        command = ["run", "--nproc", str(number), "--strategy", strategy, "--virtual-ranks", "4"]
        done = launch([*command, str(DIGITS / "same_bits.py")], Path.cwd())
        lines += re.findall(r"loss .*  weights [0-9a-f]{16}", done.stdout)
    assert len(lines) == 3
    assert len(set(lines)) == 1


def test_digits_train_resumes_and_gets_better(tmp_path: Path) -> None:
    command = [DIGITS / "train.py", "--folder", tmp_path]
    first = lockstep_run(*command, "--epochs", 1)
    assert "resumed" not in first
    more = run(*command, "--epochs", 4)
    assert more.count(f"resumed from {tmp_path} at epoch 1 of 4") == 1
    shown = [line.split("  ")[0] for line in more.splitlines() if line.startswith("epoch ")]
    assert shown == ["epoch 1", "epoch 2", "epoch 3"]
    [before], [after] = accuracies(first), accuracies(more)
    assert after > max(before, 90)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def no_datasets(tmp_path: Path) -> Path:
    """A folder that hides Hugging Face `datasets`, where it is installed."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "datasets.py").write_text("raise ImportError('datasets is not here')\n")
    return folder


@pytest.mark.thorough
def test_fashion_on_one_and_on_two_processes(tmp_path: Path, no_datasets: Path) -> None:
    scripts = {"plain": "plain_torch.py", "one": "with_lockstep.py", "two": "spawn.py"}
    printed = {
        name: run(FASHION / script, *TINY, "--folder", tmp_path / name, path=no_datasets)
        for name, script in scripts.items()
    }
    for output in printed.values():
        assert output.count("64 MADE images, so the accuracy means nothing (as --made 64") == 1
        assert len(accuracies(output)) == 1
    assert "lockstep 0" not in printed["plain"]
    assert "1 process on 1 host" in printed["one"]
    assert "2 processes on 1 host" in printed["two"]

    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() == load_weights(tmp_path / "plain" / "weights.pt").keys()
    for name in ("bn1", "layer1.0.bn1"):  # of the same samples, over both ranks
        for statistic in ("running_mean", "running_var"):
            pair = (state[f"{name}.{statistic}"] for state in (one, two))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)

"""The command as a user gives it; what it finds is tested in tests/verify."""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemas
from click.testing import CliRunner
from ranks import HANG_S

from lockstep.cli.verify import command
from lockstep.cli.verify_progress import VerifyProgress
from lockstep.errors import UsageError
from lockstep.run.start.worker import Script
from lockstep.verify.reference_check import check_reference
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord
from lockstep.verify.training_record import RankUpdate, Update

pytestmark = pytest.mark.launcher

TRAINS = """
import argparse
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
checkpoint = world.checkpoint("run", model=model, best="min")
checkpoint.resume()
assert checkpoint.best is None
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)  # as torchrun gave it once
parser.add_argument("--an")
arguments = parser.parse_args()
assert (arguments.local_rank, arguments.an) == (world.local_rank, "argument")
for epoch in world.epochs(5):
    for x, y in loader:
        world.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(metric=1.0)
raise AssertionError("the script was to be stopped before")
"""


def verify(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", "verify", *map(str, words)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.thorough
def test_ways_of_computing_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    options = (
        "--steps",
        3,
        "--shares",
        "1:3",
        "--accumulate",
        2,
        "--strategy",
        "fsdp",
        "--json",
        "verdict.json",
    )
    ended = verify(tmp_path, *options, "train.py", "--an", "argument")
    lines = ended.stdout.splitlines()
    headlines = [line for line in lines if line and not line.startswith(" ")]
    assert [line.split()[0] for line in headlines] == [
        "EQUAL",
        "DIFFERENT",
        "EQUAL",
        "EQUAL",
    ], ended.stdout + ended.stderr
    assert lines[0] == (
        "EQUAL      2 processes: the first 3 optimizer steps, 12 samples each, losses, "
        "6 gradients, 6 parameters, 3 buffers, learning rates"
    )
    assert lines[1].startswith("  until   step 3, batch 3 of 4 of epoch 1; ")
    assert lines[2].startswith("  switched off for the comparison: dropout layers, checkpoints")
    assert "  cause   LS307" in ended.stdout  # BatchNorm's statistics are of a micro-batch
    assert ended.returncode == 1
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    schemas.check("verify", verdict)
    assert verdict["verdict"] == "DIFFERENT"
    assert [way["verdict"] for way in verdict["ways"]] == [
        "EQUAL",
        "DIFFERENT",
        "EQUAL",
        "EQUAL",
    ]
    assert verdict["findings"][0]["code"] == "LS307"
    said = [line.split(":")[0] for line in ended.stderr.splitlines() if line.startswith("run ")]
    assert list(dict.fromkeys(said)) == [
        "run 1 of 5, 1 process",
        "run 2 of 5, 2 processes",
        "run 3 of 5, 2 processes, 2 micro-batches",
        "run 4 of 5, 2 processes, shares 1",
        "run 5 of 5, strategy fsdp",
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if "lockstep-verify" in p.name) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_collective_that_one_rank_alone_calls_is_named(tmp_path: Path) -> None:
    """Gloo ends rank 0 in its all-reduce, which has met one of rank 1's backward pass."""
    script = Path(__file__).parents[1] / "verify/blind/third/wrong/w10_eval_on_main.py"
    ended = verify(tmp_path, script)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "FIRST FAILURE: rank 0 on host" in ended.stdout
    assert "w10_eval_on_main.py:23: dist.all_reduce(hits)" in ended.stdout
    assert "what to do: the ranks came to this collective with tensors of other" in ended.stdout


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys\nprint('no data')\nsys.exit(5)\n")
    ended = verify(tmp_path, "fails.py")
    assert ended.returncode == 2
    at_once, first, *lines = ended.stderr.splitlines()
    assert at_once == "2 runs of fails.py: 1 process; 2 processes"
    assert first == (
        "run 1 of 2, 1 process: step 0 of at most 50, "
        "how long it takes is known after the first step"
    )
    lines = [line for line in lines if line != first]  # said again every half minute
    assert lines[:2] == [
        "lockstep: lockstep verify fails.py",
        "  found: on one process it ended with sys.exit(5)",
    ]
    assert lines[3] == "         | no data"
    assert lines[-1] == "  do:    make this work: lockstep run fails.py"


@pytest.mark.parametrize("terminal", [False, True])
def test_while_it_works_it_says_how_far_it_is(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0

    def run(folder: Path, way: RunConfig, tell: Callable[[int], None]) -> str:
        nonlocal now
        for seconds, steps in [(0, 0), (8, 0), (2, 1), (1, 1), (9, 2), (31, 2), (9, 3)]:
            now += seconds
            tell(steps)
        return ""

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr("lockstep.verify.run_processes.run_by_command", run)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    progress = VerifyProgress(2)
    for name in ("1 process", "2 processes"):
        progress.run(Path(), RunConfig(name=name, nproc=1, script=Script(path="train.py")))
    printed = capsys.readouterr().err
    said = re.findall(r"run .*?(?=\x1b|\n)", printed)
    assert (len(said), printed.count("\n")) == ((14, 0) if terminal else (6, 6))
    assert said[0] == (
        "run 1 of 2, 1 process: step 0 of 3, how long it takes is known after the first step"
    )
    of_first = "run 1 of 2, 1 process: step 1 of 3, 0:10 left of about 0:20"
    assert said[2 if terminal else 1] == of_first
    assert said[-1 if terminal else -3] == (
        "run 2 of 2, 2 processes: step 3 of 3, about to end"
        if terminal
        else "run 2 of 2, 2 processes: step 0 of 3, 1:00 left of about 2:00"
    )
    assert printed.endswith("\r\x1b[K") == terminal


def test_wrong_uses(tmp_path: Path) -> None:
    for words, text in (
        (["nowhere.py"], "lockstep verify nowhere.py\n  found: there is no such file"),
        ([], "Missing argument 'SCRIPT'"),
        (["--nproc", 1, "train.py"], "x>=2"),
        (["--npoc", 3, "train.py"], "No such option"),
    ):
        ended = verify(tmp_path, *words)
        assert ended.returncode == 2
        assert text in ended.stderr


@pytest.mark.parametrize(("error", "hinted"), [("sys.exit(2)", True), ("sys.exit(1)", False)])
def test_an_option_after_the_script_that_the_script_does_not_know(
    error: str, hinted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "lockstep.verify.run_record.record_run", lambda way, *_: RunRecord(way, [], error)
    )
    result = CliRunner().invoke(command, ["train.py", "--nproc=2"])
    assert isinstance(result.exception, UsageError)
    assert ("--nproc=2 stands after train.py" in str(result.exception)) is hinted


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ValueError: x", "make this work: lockstep run train.py"),
        ("RuntimeError: expected m1 and m2 to have the same dtype", "try precision fp32"),
        ("RuntimeError: Input type (torch.DoubleTensor) and weight type", "try precision fp32"),
        ("", "give it arguments with which it trains"),
    ],
)
def test_advice_where_there_is_nothing_to_compare_with(error: str, advice: str) -> None:
    way = RunConfig(name="1 process", nproc=1, script=Script(path="train.py"))
    with pytest.raises(UsageError, match=re.escape(advice)):
        check_reference(RunRecord(way, [], error), "verify", [], "lockstep run train.py", "script")


ZERO = {"Net/w": np.zeros(2)}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"losses": []}, "it made 2 optimizer steps on one process, but never called backward()"),
        ({"losses": [1.0]}, "but no parameter had a gradient, so nothing was trained"),
        ({"losses": [1.0], "gradients": ZERO}, "but all gradients were 0, so nothing was trained"),
        # What trains: gradients, or an optimizer that needs none.
        ({"gradients": {"Net/w": np.array([0, math.nan])}}, ""),
        ({"parameters": ZERO}, ""),
        ({"parameters": ZERO, "gradients": ZERO}, ""),
        ({"parameter_sums": ZERO}, ""),
        ({"stepped": False}, ""),  # a script without modules changes its tensors itself
        ({"optimizer_parameters": ["Net/w", ""]}, ""),  # something of which nothing is recorded
    ],
)
def test_a_script_that_trains_nothing_is_not_compared(fields: dict[str, Any], found: str) -> None:
    way = RunConfig(name="1 process", nproc=1, script=Script(path="train.py"))
    kept = {"Net/w": np.ones(2)}
    first = RankUpdate(initial=kept, parameters=kept, parameter_sums=kept)
    updates = [Update([first]), Update([replace(first, initial={}, **fields)])]
    run = RunRecord(way, updates, final_sums=[kept])
    expected = pytest.raises(UsageError, match=re.escape(found)) if found else nullcontext()
    with expected:
        check_reference(run, "verify", [], "", "script")


def test_lockstep_s_settings_are_for_scripts_that_use_it() -> None:
    asked = ["--strategy"]
    update = Update([RankUpdate(gradients={"Net/w": np.ones(1)})])
    way = RunConfig(name="1 process", nproc=1, script=Script(path="train.py"))
    run = RunRecord(way, [update])
    with pytest.raises(UsageError, match="does not train by Lockstep"):
        check_reference(run, "verify", asked, "", "script")
    check_reference(replace(run, uses_lockstep=True), "verify", asked, "", "script")
    check_reference(run, "verify", [], "", "script")


def test_ranks_that_the_script_starts_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("torch.multiprocessing.spawn(main, nprocs=2)")
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main(['verify', 'train.py'])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[:2] == [
        "lockstep: lockstep verify train.py",
        "  found: the script starts its ranks itself, as by mp.spawn, and those are not seen",
    ]


@pytest.mark.thorough
def test_ranks_that_only_a_condition_starts_are_refused_when_they_are_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nimport torch.multiprocessing as mp\n"
        "if sys.argv[1:] == ['--spawn']:\n"
        "    mp.spawn(print, nprocs=2)\n"
    )
    ended = verify(tmp_path, "train.py", "--spawn")
    assert ended.returncode == 2
    assert "ranks that the script starts itself, by torch.multiprocessing" in ended.stderr
    assert "train.py:4: mp.spawn(print, nprocs=2)" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("  do:    verify a script that is one rank")


OWN_RANKS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank):
    store = f"file://{os.path.abspath('store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(3):
        weight.grad = torch.ones(1)
        dist.all_reduce(weight.grad)
        torch.optim.SGD([weight]).step()

if __name__ == "__main__":
    process = mp.get_context(sys.argv[1]).Process
    others = [process(target=train, args=(rank,)) for rank in range(len(sys.argv) - 2, 2)]
    for other in others:
        other.start()
    if len(sys.argv) > 2:
        train(0)
    for other in others:
        other.join()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_ranks_that_the_script_starts_one_by_one_are_told(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_RANKS)
    ended = verify(tmp_path, "train.py", how)
    assert ended.returncode == 2
    last = ended.stderr[ended.stderr.rindex("\nlockstep: ") :]
    assert "  found: it made no optimizer step on one process" in last
    assert "it started processes of its own, which are not seen: train.py:20: other.start()" in last
    assert "  do:    verify a script that is one rank" in last


def test_a_script_that_starts_the_other_ranks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_RANKS)
    ended = verify(tmp_path, "train.py", "spawn", "and be one")
    assert ended.returncode == 2
    last = ended.stderr[ended.stderr.rindex("\nlockstep: ") :]
    assert "ranks that the script starts itself, by torch.multiprocessing" in last
    assert "train.py:9: dist.init_process_group(" in last
    assert "  do:    verify a script that is one rank" in last

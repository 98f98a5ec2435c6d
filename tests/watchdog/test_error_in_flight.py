"""Exceptions that a rank handles while it raises another one, or waits in a collective."""

from __future__ import annotations

import json
import linecache
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_snapshots import make_call, make_snapshots, rank_state, stack_in_op
from launched import launch

from lockstep.error_in_flight import ErrorInFlight, note_step
from lockstep.run.watch.error_record import ErrorRecord, describe_error
from lockstep.run.watch.hang import find
from lockstep.run.watch.verdict import Verdict

pytestmark = pytest.mark.launcher

LOAD = """
def load():
    raise ValueError("bad sample 4711")
"""


def record_of(folder: Path, code: str, **names: Any) -> ErrorRecord:
    """Runs a script, and describes the exception that ends it."""
    script = folder / "train.py"
    script.write_text(LOAD + code)
    linecache.checkcache()
    try:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__", **names})
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return describe_error(error)
    raise AssertionError("the script has not failed")


WILL_BE_RAISED_AGAIN = {
    "finally": "try:\n    load()\nfinally:\n    [][0]\n",
    "raise": "try:\n    load()\nexcept Exception:\n    [][0]\n    raise\n",
    "raise by name": "try:\n    load()\nexcept ValueError as e:\n    [][0]\n    raise e\n",
    "with": (
        "class Trainer:\n"
        "    def __enter__(self): pass\n"
        "    def __exit__(self, *error): [][0]\n"
        "with Trainer():\n    load()\n"
    ),
    "generator": (
        "import contextlib\n"
        "@contextlib.contextmanager\n"
        "def trainer():\n"
        "    try:\n        yield\n    finally:\n        [][0]\n"
        "with trainer():\n    load()\n"
    ),
    "hidden on the way": (
        "def clean():\n"
        "    try:\n        {}['a']\n    except KeyError:\n        raise IndexError('x') from None\n"
        "try:\n    load()\nfinally:\n    clean()\n"
    ),
}


@pytest.mark.parametrize("code", WILL_BE_RAISED_AGAIN.values(), ids=WILL_BE_RAISED_AGAIN)
def test_the_first_exception_is_the_cause_if_it_would_have_ended_the_rank(
    tmp_path: Path, code: str
) -> None:
    record = record_of(tmp_path, code)
    assert record.headline == "ValueError: bad sample 4711"
    assert record.line == 'train.py:3: raise ValueError("bad sample 4711")'
    (later,) = record.raised_meanwhile
    assert later.startswith("IndexError: ")
    assert "train.py:" in later
    assert record.handled == ""


def test_an_exception_that_was_caught_is_only_mentioned(tmp_path: Path) -> None:
    code = "try:\n    load()\nexcept ValueError:\n    [][0]\n"
    record = record_of(tmp_path, code)
    assert record.headline == "IndexError: list index out of range"
    assert record.raised_meanwhile == ()
    assert record.handled.startswith("ValueError: bad sample 4711, train.py:3: ")

    # What the author names, or hides, is left to the author.
    for ending in ("raise TypeError('x') from error", "raise TypeError('x') from None"):
        record = record_of(
            tmp_path, f"try:\n    load()\nexcept ValueError as error:\n    {ending}\n"
        )
        assert (record.headline, record.handled) == ("TypeError: x", "")
    # The end of an iterator is no failure.
    code = "try:\n    next(iter([]))\nexcept StopIteration:\n    load()\n"
    assert record_of(tmp_path, code).handled == ""
    # `sys.exit` in `finally` keeps its own headline.
    code = "import sys\ntry:\n    load()\nfinally:\n    sys.exit(3)\n"
    record = record_of(tmp_path, code)
    assert record.headline == "sys.exit(3) while handling ValueError: bad sample 4711"


def test_an_exception_is_survived_if_training_went_on(tmp_path: Path) -> None:
    code = "try:\n    load()\nexcept Exception:\n    step()\n    [][0]\n    raise\n"
    goes_on = record_of(tmp_path, code, step=note_step)
    assert goes_on.headline == "IndexError: list index out of range"
    stands = record_of(tmp_path, code, step=lambda: None)
    assert stands.headline == "ValueError: bad sample 4711"


ERROR = ErrorInFlight(headline="ValueError: bad sample", line="train.py:3: load()")


def verdict_on(*errors: ErrorInFlight | None, ops: tuple[str, ...], **fields: Any) -> Verdict:
    states = []
    for rank, (error, op) in enumerate(zip(errors, ops, strict=True)):
        stack = stack_in_op(op, 10)
        states.append(rank_state(rank, stack, make_call(op, 1), in_flight=error, **fields))
    verdict = find(*make_snapshots(*states), 20.0)
    assert verdict is not None
    assert verdict.kind == "deadlock"
    return verdict


def test_an_exception_is_blamed_only_if_it_explains_where_the_ranks_are() -> None:
    ops = ("all_reduce", "barrier")
    blamed = verdict_on(None, ERROR, ops=ops, steps=6, trained_steps=6)
    assert blamed.ranks == (1,)
    assert blamed.headline.startswith(
        "deadlock after an exception: rank 1 waits in barrier while handling ValueError: bad sample"
    )
    assert blamed.rows[1].handles == "ValueError: bad sample, train.py:3: load()"
    assert json.loads(blamed.key)["step"] == 6
    # The step of the training is not known.
    assert verdict_on(None, ERROR, ops=ops, steps=6).key == ""

    survived = replace(ERROR, training_went_on=True)
    for errors in ((ERROR, ERROR), (None, survived)):
        verdict = verdict_on(*errors, ops=ops)
        assert verdict.headline.startswith("deadlock: ranks 0-1 wait in collectives")
        assert verdict.rows[1].handles  # it is still said


PLAIN = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(steps):
    for i in range(steps):
        if rank == 1 and i == 5:
            raise ValueError("bad sample 4711")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

"""
WITH_LOCKSTEP = """
import torch, lockstep
from torch.utils.data import DataLoader, TensorDataset
world = lockstep.init(seed=0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader(TensorDataset(torch.ones(48, 1)), batch_size=4)
model, optimizer, loader = world.prepare(model, optimizer, loader)
try:
    for epoch in world.epochs(2):
        for (x,) in loader:
            if world.rank == 1 and world.step == 6:
                raise ValueError("bad sample 4711")
            world.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
finally:
    world.barrier()
"""
CAUSE = '  ValueError: bad sample 4711\n  train.py:{line}: raise ValueError("bad sample 4711")\n'


def run(folder: Path, script: str, *flags: str) -> tuple[int, str, str]:
    """Returns the exit code, what the launcher has said, and what it has said last."""
    (folder / "train.py").write_text(script)
    flags = ("run", "--nproc=2", "--device=cpu", "--log-dir=logs", *flags)
    done = launch([*flags, "train.py"], folder)
    _, _, block = done.stderr.rpartition("lockstep: FIRST FAILURE: ")
    return done.returncode, done.stderr, block


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code",
    [
        "try:\n    train(9)\nfinally:\n    dist.barrier()\n",
        "try:\n    train(9)\nexcept Exception:\n    dist.barrier()\n    raise\n",
    ],
    ids=["finally", "except"],
)
def test_a_rank_in_a_collective_after_an_exception(tmp_path: Path, code: str) -> None:
    code, _, block = run(tmp_path, PLAIN + code, "--hang-after=1")
    assert code == 70
    assert block.startswith("rank 1 on host ")
    assert "rank 1 waits in barrier while handling ValueError: bad sample 4711; nothing" in block
    assert "while handling ValueError: bad sample 4711, train.py:14: raise ValueError" in block
    assert "what to do: look at the exception first" in block
    assert "number of batches" not in block
    (hang_txt,) = tmp_path.glob("logs/*/attempt_0/hang.txt")
    assert hang_txt.read_text().count("while handling ValueError: bad sample 4711") == 3
    states = json.loads(hang_txt.with_suffix(".json").read_text())["ranks"]
    assert states[0]["in_flight"] is None
    assert states[1]["in_flight"]["headline"] == "ValueError: bad sample 4711"


@pytest.mark.thorough
def test_a_script_that_trains_on_in_except_is_not_blamed_for_that(tmp_path: Path) -> None:
    code = """
try:
    if rank == 0:
        open("no checkpoint")
    train(3)
except FileNotFoundError:
    train(3)
    dist.barrier()
dist.all_reduce(torch.ones(3))
"""
    code, _, block = run(tmp_path, PLAIN + code, "--hang-after=1")
    assert code == 70
    assert "deadlock: ranks 0-1 wait in collectives that do not match" in block
    assert "while handling FileNotFoundError" in block


@pytest.mark.thorough
def test_an_error_of_code_that_cleans_up_is_a_consequence(tmp_path: Path) -> None:
    code = "try:\n    train(9)\nfinally:\n    os.remove('missing')\n"
    code, _, block = run(tmp_path, PLAIN + code)
    assert code == 1
    assert CAUSE.format(line=14) in block
    (consequences,) = [line for line in block.splitlines() if line.startswith("consequences:")]
    assert "rank 1 itself, while handling it (FileNotFoundError: " in consequences
    assert "train.py:21: os.remove('missing'))" in consequences
    assert ", rank 0 (" in consequences


@pytest.mark.thorough
def test_locksteps_collectives_in_finally_do_not_hide_the_exception(tmp_path: Path) -> None:
    code, said, block = run(tmp_path, WITH_LOCKSTEP, "--max-restarts=3")
    assert code == 4
    assert "the same failure twice after step 6 of the training" in said
    assert said.count("FIRST FAILURE") == 2
    assert block.startswith("rank 1 on host ")
    assert CAUSE.format(line=13) in block
    assert "world.is_main" not in block
    # A busy launcher may end rank 0 before it has read what the ranks called.
    (consequences,) = [line for line in block.splitlines() if line.startswith("consequences:")]
    assert "rank 0 (" in consequences
    # The whole traceback of the rank is shown too.
    assert "[rank 1] ValueError: bad sample 4711\n" in said
    assert "look first at the ValueError that this rank was handling when it called" in said

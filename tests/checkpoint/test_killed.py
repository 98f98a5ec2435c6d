"""kill -9 at any moment: the run goes on from a sound checkpoint, with the very same numbers.

`LOCKSTEP_KILLS=200` kills as often as that at random moments.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_clean_process
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.checkpointer import Checkpoint
from lockstep.checkpoint.health import examine

pytestmark = pytest.mark.ranks

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "30"))
STEPS = 40
assert Checkpoint, "imported before the processes are forked, not in each of them"
CALLS = ["make_folder", "create", "write", "sync", "close", "rename", "unlink", "remove_folder"]

Say = Callable[..., None]


def digest(*states: dict[str, Any]) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(value[key])
        elif isinstance(value, Tensor):
            found.update(value.numpy().tobytes())

    for state in states:
        add(state)
    return found.hexdigest()


def train(folder: Path, say: Say, *, every: int | None = None, until: int = STEPS) -> None:
    """Trains from the last checkpoint on, says what it has at each step, and saves at the end."""
    torch.set_num_threads(1)
    with lockstep.init(seed=0) as world:
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 60).reshape(10, 6))
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(data, 2, shuffle=True)
        checkpoint = world.checkpoint(
            folder, every=every, model=model, optimizer=optimizer, loader=loader
        )
        resumed = checkpoint.resume()
        step = checkpoint._progress
        say("resumed" if resumed else "new", step.number, state_of(model, optimizer))
        for _ in world.epochs(STEPS // loader.steps):
            for (inputs,) in loader:
                world.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                say("step", step.number, state_of(model, optimizer))
                checkpoint.step()
                if step.number % 7 == 0:
                    checkpoint.wait()
                    say("safe", step.number, "")
                if step.number == until:
                    checkpoint.save()
                    checkpoint.wait()
                    say("safe", step.number, "")
                    return


def state_of(model: nn.Module, optimizer: Any) -> str:
    return digest(model.state_dict(), optimizer.state_dict()["state"])


class Process:
    """A run in a copy of this process; what it says can be read while it runs and after."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        self._reads, writes = os.pipe()
        self.said: list[tuple[str, int, str]] = []
        self._rest = b""
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                work(lambda *words: os.write(writes, json.dumps(words).encode() + b"\n") and None)
                code = 0
            finally:
                os._exit(code)
        os.close(writes)

    def read(self) -> bool:
        """Reads what it says next; False at its end."""
        data = os.read(self._reads, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [tuple(json.loads(line)) for line in lines]
        return bool(data)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def end(self) -> int:
        """Reads to the end; its exit code, or minus the signal's number."""
        while self.read():
            pass
        os.close(self._reads)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def uninterrupted(folder: Path) -> dict[int, str]:
    """What a run has at each step."""
    whole = Process(lambda say: train(folder, say))
    assert whole.end() == 0
    return {step: state for kind, step, state in whole.said if kind in ("new", "step")}


@pytest.mark.thorough
@in_clean_process
def test_killed_at_random_moments_around_saves(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path / "whole")
    assert len(expected) == STEPS + 1
    folder, draw = tmp_path / "run", random.Random(5)
    kills, resumed, safe, furthest = 0, 0, 0, 0
    while kills < KILLS:
        run = Process(lambda say: train(folder, say, every=1))
        while not run.said and run.read():
            pass
        kind, step, state = run.said[0]
        assert state == expected[step], f"resumed at step {step} with other numbers"
        assert step >= safe, f"step {safe} was on disk, and it resumed at {step}"
        resumed += kind == "resumed"
        lines = draw.randrange(1, 14)
        while len(run.said) < lines and run.read():
            pass
        time.sleep(draw.uniform(0, 0.01))  # not to wait for anything: to kill at any moment
        run.kill()
        killed = run.end() == -signal.SIGKILL
        for kind, step, state in run.said:
            assert kind == "safe" or state == expected[step]
            safe = max(safe, step if kind == "safe" else 0)
            furthest = max(furthest, step)
        kills += killed
        if safe == STEPS or not killed:
            shutil.rmtree(folder)
            safe = 0
    assert resumed > KILLS // 3, "mostly it died before the first save, and this shows little"
    assert furthest > 10


def die_at(number: int) -> None:
    """Ends this process before the operation of this number; a write is done by half."""
    count = 0

    def wrap(name: str) -> None:
        original = getattr(storage, name)

        def call(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:
                if name == "write":
                    descriptor, data = arguments
                    os.write(descriptor, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # The disk outlives the process: waiting for it would show nothing here.
            return None if name == "sync" else original(*arguments)

        setattr(storage, name, call)

    for name in CALLS:
        wrap(name)


@pytest.mark.parametrize("interval", [3, pytest.param(1, marks=pytest.mark.thorough)])
@in_clean_process
def test_killed_at_the_operations_of_a_save(tmp_path: Path, interval: int) -> None:
    """Kills a save at every `interval`-th of its operations, and goes on from what is left."""
    expected = uninterrupted(tmp_path / "whole")
    start = tmp_path / "start"

    assert Process(lambda say: train(start, say, until=2)).end() == 0
    for number in range(0, 200, interval):
        folder = tmp_path / str(number)
        shutil.copytree(start, folder)

        def next_save(say: Say, folder: Path = folder, number: int = number) -> None:
            die_at(number)
            train(folder, say, until=4)

        dies = Process(next_save)
        killed = dies.end() == -signal.SIGKILL
        latest = layout.latest(folder)
        assert latest is not None
        assert not examine(latest, values=True).problems
        if killed and number // interval % 3:
            shutil.rmtree(folder)
            continue
        goes_on = Process(lambda say, folder=folder: train(folder, say, until=5))
        assert goes_on.end() == 0
        kind, step, state = goes_on.said[0]
        assert (kind, state) == ("resumed", expected[step])
        assert step in (2, 4)
        assert [layout.step_of(path) for path in layout.list_checkpoints(folder)][-1] == 5
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        if not killed:
            break
        shutil.rmtree(folder)
    assert step == 4
    assert number > 20

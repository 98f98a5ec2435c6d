"""The sample ledger of real runs: killed in mid-epoch, and taken up on other numbers of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import mlp, tensors
from ranks import RankFailed, run_ranks
from torch.utils.data import IterableDataset

import lockstep
from lockstep.errors import SettingError
from lockstep.extensions.ledger.judge import judge

pytestmark = pytest.mark.ranks

SAMPLES, BATCH, EPOCHS = 23, 4, 3


class Rows(IterableDataset[Any]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from tensors(SAMPLES)


def train(folder: Path, stop: int | None = None, stream: bool = False, kill: bool = True) -> int:
    """Trains to the end, or to a number of steps; saves after every third step."""
    with lockstep.init(seed=1, ledger=folder / "ledger") as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        data = Rows() if stream else tensors(SAMPLES)
        unused = world.loader(tensors(5), 5)
        train = world.loader(data, BATCH, shuffle=not stream, micro_batch_size=1)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": train}
        checkpoint = world.checkpoint(folder / "checkpoints", **state)
        checkpoint.resume()
        for _ in unused:  # with gradients, but no step: it is not trained on
            pass
        steps = 0
        for epoch in world.epochs(EPOCHS):
            for x, y in train:
                world.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if not train.current.last:
                    continue
                steps = epoch * 6 + train.state_dict()["step"]
                if steps % 3 == 0:
                    checkpoint.save()
                    checkpoint.wait()
                if steps == stop and kill and world.rank == world.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if steps == stop and not kill:
                    return steps
    return steps


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_run_that_was_killed_and_taken_up_on_other_numbers_of_ranks(stream, tmp_path):
    with pytest.raises(RankFailed):
        run_ranks(train, 2, tmp_path, 8, stream)
    with pytest.raises(RankFailed):
        run_ranks(train, 3, tmp_path, 13, stream)
    train(tmp_path, None, stream)
    report = judge(tmp_path / "ledger")
    assert report.findings == []
    assert report.steps == 18
    starts = [(a["ranks"], a["first"], a["last"], a["again"]) for a in report.attempts]
    assert starts == [(2, 0, 7, 0), (3, 6, 12, 2), (1, 12, 17, 1)]
    assert report.again == 3
    assert [epoch["samples"] for epoch in report.epochs] == [SAMPLES] * EPOCHS
    text = report.lines()
    if stream:
        assert text[-1].startswith("every position of the streams once (loader 1): nothing was")
    else:
        assert text[-1] == "every sample once: nothing was trained twice, nothing was left out"
    assert "3 ranks, steps 6 to 12; trained 2 steps again" in text[2]


def test_what_a_resume_without_its_loader_does_is_found(tmp_path):
    train(tmp_path, 8, kill=False)
    with lockstep.init(seed=1, ledger=tmp_path / "ledger") as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        world.loader(tensors(5), 5)
        train_set = world.loader(tensors(SAMPLES), BATCH, shuffle=True, micro_batch_size=1)
        world.load_state_dict(world.state_dict() | {"step": 8, "epoch": 1})  # and no position
        for x, y in train_set:
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    codes = [finding.code for finding in judge(tmp_path / "ledger").findings]
    assert codes == ["LS101"]


def test_starts_keep_their_order_when_the_clock_was_set_back(tmp_path, monkeypatch):
    train(tmp_path, 8, kill=False)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)  # in 2001
    train(tmp_path, None)
    report = judge(tmp_path / "ledger")
    first, later = report.attempts
    assert (first["first"], first["last"], later["last"]) == (0, 7, 17)
    assert report.findings == []


def test_a_run_that_ended_before_its_first_step(tmp_path):
    with lockstep.init(device="cpu", ledger=tmp_path / "ledger") as world:
        world.loader(tensors(SAMPLES), BATCH)
    report = judge(tmp_path / "ledger")
    assert "no optimizer step is written down" in report.notes
    assert not report.findings


def refused(folder: str) -> str:
    with pytest.raises(SettingError) as caught:
        lockstep.init(ledger=folder)
    return caught.value.found


def test_a_folder_that_cannot_be_written_is_said_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    for found in run_ranks(refused, 2, str(tmp_path / "file")):
        assert "it cannot be written: rank 0" in found

"""`assert_same`: as someone's own test suite would use it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import mean_loss, mlp, tensors
from ranks import HANG_S, in_clean_process
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.run.start.spawn import launch
from lockstep.run.start.worker import Script
from lockstep.strategies import DDP
from lockstep.testing import assert_same
from lockstep.verify.rank import main
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_processes import run_by_command
from lockstep.verify.run_record import record_run
from lockstep.verify.verdict import judge

pytestmark = pytest.mark.launcher


def train(rate: float = 0.1, strategy: Any = None) -> None:
    """By Lockstep."""
    with lockstep.init(strategy, seed=0) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        train = DataLoader(tensors(), batch_size=8, shuffle=True)
        model, optimizer, train = world.prepare(model, optimizer, train)
        for _ in world.epochs(100):  # it is ended before
            for batch in train:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


def train_for_torchrun(reduction: str = "mean") -> None:
    """The batch size is that of a process; with `sum` N processes have N times the gradient."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(tensors(48), shuffle=False)
    for x, y in DataLoader(tensors(48), batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
    dist.destroy_process_group()


class Watched(TensorDataset):
    """Says which sample is read that is not to be compared."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        assert index < 24, "read in vain"
        return super().__getitem__(index)


def train_on_watched(by_lockstep: bool) -> None:
    """Three batches of 8 samples are compared."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Watched(*tensors().tensors), batch_size=8)
    with lockstep.init() as world:
        if by_lockstep:
            model, optimizer, loader = world.prepare(model, optimizer, loader)
        for batch in loader:
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def by_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that cannot be imported: copies of this process run it, at once."""
    return lambda *args: function(*args)


@pytest.mark.thorough
def test_a_function_of_a_module_is_run_by_fresh_processes() -> None:
    assert_same(train, (0.2,), timeout=HANG_S)


@in_clean_process
def test_a_function_that_trains_alike_in_every_way() -> None:
    assert_same(by_copies(train), steps=8)  # with the end of an epoch
    assert_same(by_copies(train), accumulate=3, shares="1:3", precision="fp32")
    assert_same(by_copies(train), strategy="fsdp")
    assert_same(by_copies(train), nproc=1, accumulate=2)


@in_clean_process
def test_compressed_gradients_are_a_choice_and_all_else_is_compared(tmp_path: Path) -> None:
    program = partial(by_copies(train), 0.1, DDP(compress="int8"))
    way = RunConfig(name="2 processes", nproc=2, script=Script(path="train"))

    def start(folder: Path, way: RunConfig) -> str:
        launch(main, (folder, program), way.nproc, env=way.environment())
        return ""

    reference = record_run(way.reference_config(), tmp_path / "reference", start)
    verdict = judge(reference, record_run(way, tmp_path / "other", start))
    first, second, *_ = verdict.lines()
    assert first == (
        "DIFFERENT by choice: gradients are sent as int8; all else is compared without"
    )
    assert second.startswith("EQUAL      2 processes: the first 3 optimizer steps")
    assert (verdict.word, verdict.as_json()["by_choice"]) == (
        "EQUAL", "gradients are sent as int8"
    )  # fmt: skip


def times_that_openmp_spins(folder: Path, environment: dict[str, str]) -> set[str]:
    """How often OpenMP looks for the other threads before it sleeps, as its own report says."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text("import torch")
    config = RunConfig(name="1 process", nproc=1, script=Script(path=str(script)))
    config.write(folder)
    with patch.dict(os.environ, {"OMP_DISPLAY_ENV": "verbose", **environment}):
        report = run_by_command(folder, config)
    return set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", report))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the report is that of GNU's OpenMP")
def test_openmps_threads_sleep_while_they_wait_unless_the_user_has_said_how(tmp_path: Path) -> None:
    with patch.dict(os.environ):
        os.environ.pop("OMP_WAIT_POLICY", None)
        assert times_that_openmp_spins(tmp_path / "default", {}) == {"0"}
    (chosen,) = times_that_openmp_spins(tmp_path / "chosen", {"OMP_WAIT_POLICY": "active"})
    assert int(chosen) > 1_000_000


@in_clean_process
def test_what_is_not_compared_is_not_read() -> None:
    assert_same(by_copies(train_on_watched), (True,))
    assert_same(by_copies(train_on_watched), (False,), nproc=1)


@in_clean_process
def test_what_a_process_takes_is_a_part_or_a_whole() -> None:
    assert_same(by_copies(train_for_torchrun), batch_per_process=True)
    with pytest.raises(AssertionError, match=r"cause   LS110"):
        assert_same(by_copies(train_for_torchrun))


@in_clean_process
def test_the_verdict_is_the_text_of_the_assertion() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same(by_copies(train_for_torchrun), ("sum",), batch_per_process=True)
    text = str(caught.value)
    assert text.startswith("DIFFERENT  2 processes, first in gradients")
    assert "\n  cause   LS202" in text
    assert '\n  do      With plain DDP: `reduction="mean"`' in text
    assert "\n  more    lockstep explain LS202" in text


def end(how: str) -> None:
    """Trains on one process; on several rank 1 ends otherwise."""
    if os.environ["RANK"] == "1":
        if how == "raise":
            raise ValueError("no such file")
        if how == "exit":
            sys.exit("a bad configuration")
        os._exit(3)
    train()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "ValueError: no such file"),
        ("exit", "a bad configuration"),
        ("die", "exit code 3; no exception was recorded"),
    ],
)
@in_clean_process
def test_a_process_that_fails_is_told(how: str, text: str) -> None:
    with pytest.raises(AssertionError, match="FAILED  ") as caught:
        assert_same(by_copies(end), (how,))
    assert text in str(caught.value)


@in_clean_process
def test_where_nothing_can_be_compared_that_is_said() -> None:
    def broken() -> None:
        raise ValueError("no such file")

    def idle() -> None:
        pass

    with pytest.raises(UsageError, match=r"on one process it ended with ValueError: no such file"):
        assert_same(broken)
    with pytest.raises(UsageError, match="it made no optimizer step on one process"):
        assert_same(idle)
    with pytest.raises(UsageError, match="accumulate, shares would have no effect"):
        assert_same(by_copies(train_for_torchrun), accumulate=2, shares="1:2")

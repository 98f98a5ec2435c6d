"""Saving while the training goes on: what is written, what waits, who hears of errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import HANG_S, run_ranks
from safetensors.torch import load_file
from test_checkpointer import Counter, Training, caught, checkpoint_of, in_gloo_group, joined

import lockstep
from lockstep import language
from lockstep.checkpoint import host_copies, layout, storage
from lockstep.checkpoint.host_copies import HostCopies
from lockstep.checkpoint.schedule import Policy
from lockstep.errors import (
    CheckpointError,
    LockstepWarning,
    RanksDifferError,
    SettingError,
    UsageError,
)

pytestmark = pytest.mark.launcher

LATER = Policy()


class Held:
    """Holds the writing thread before its first write, until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        self.reached = threading.Event()
        original = storage.write

        def write(*arguments: Any) -> None:
            self.reached.set()
            self._go.wait(30)
            original(*arguments)

        patch.setattr(storage, "write", write)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def held() -> Iterator[Held]:
    with pytest.MonkeyPatch.context() as patch:
        made = Held(patch)
        try:
            yield made
        finally:
            made.let_go()


def failing_once(patch: pytest.MonkeyPatch, code: int) -> None:
    original, failed = storage.write, []

    def write(*arguments: Any) -> None:
        if not failed:
            failed.append(True)
            raise OSError(code, os.strerror(code))
        original(*arguments)

    patch.setattr(storage, "write", write)


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_save_stores_the_state_at_the_time_of_the_call(tmp_path: Path, held: Held) -> None:
    own = Counter({"mean": torch.ones(3), "list": [1]})
    run = Training(tmp_path, policy=LATER, own=own)
    run.train(2)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    moments = [s["exp_avg"].clone() for s in run.optimizer.state.values()]
    path = run.checkpoint.save()
    assert path == tmp_path / "step-000000002"
    assert layout.latest(tmp_path) is None
    run.train(3)
    own.state["mean"].zero_()
    own.state["list"].append(2)
    held.let_go()
    run.checkpoint.wait()
    saved = weights_in(path)
    assert all(torch.equal(saved[name], before[name]) for name in before)
    other = Training(tmp_path, own=Counter())
    other.checkpoint.resume()
    assert other.world.step == 2
    loaded = [s["exp_avg"] for s in other.optimizer.state.values()]
    assert all(map(torch.equal, loaded, moments))
    run.end()
    assert threading.active_count() == 1


def test_a_save_during_another_waits_or_is_skipped(tmp_path: Path, held: Held) -> None:
    skips = Training(tmp_path / "a", policy=Policy(busy="skip"))
    skips.train(1)
    assert skips.checkpoint.save() is not None
    skips.train(1)
    assert skips.checkpoint.save() is None
    waits = Training(tmp_path / "b", policy=LATER)
    waits.train(1)
    waits.checkpoint.save()
    waits.train(1)
    timer = threading.Timer(0.05, held.let_go)
    timer.start()
    waits.checkpoint.save()
    assert layout.latest(tmp_path / "b") is not None, "the first is complete"
    timer.join()
    skips.checkpoint.wait()
    skips.train(1)
    assert skips.checkpoint.save() is not None
    for run, steps in ((skips, [1, 3]), (waits, [1, 2])):
        run.end()
        assert [layout.step_of(p) for p in layout.list_checkpoints(run.checkpoint.folder)] == steps


def test_the_next_call_raises_an_error_of_the_writing_thread(tmp_path: Path) -> None:
    def save(run: Training) -> None:
        run.train(1)
        run.checkpoint.save()

    first = Training(tmp_path, policy=LATER)
    save(first)
    followers: list[Callable[[], object]] = [
        lambda: save(first),
        first.checkpoint.wait,
        first.checkpoint.resume,
        first.end,
    ]
    for follows in followers:
        with pytest.MonkeyPatch.context() as patch:
            first.checkpoint.wait()
            failing_once(patch, errno.ENOSPC)
            save(first)
            with pytest.raises(CheckpointError, match="no space is left"):
                follows()
        assert not [name for name in os.listdir(tmp_path) if ".tmp-" in name]
    assert len(layout.list_checkpoints(tmp_path)) == 1, "the last good one is untouched"
    run = Training(tmp_path, policy=LATER)
    assert run.checkpoint.resume()
    save(run)
    run.checkpoint.wait()
    run.end()
    assert len(layout.list_checkpoints(tmp_path)) == 2


def test_a_failed_run_finishes_the_save_that_was_begun(tmp_path: Path) -> None:
    run = Training(tmp_path, policy=LATER)
    run.checkpoint.save()
    run.end(failed=True)
    assert layout.latest(tmp_path) is not None
    again = Training(tmp_path, policy=LATER)
    assert again.checkpoint.resume()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        failing_once(patch, errno.EIO)
        again.checkpoint.save()
        again.end(failed=True)
    assert "the last checkpoint is not there" in str(said[0].message)
    assert os.listdir(tmp_path) == ["step-000000000"]


def test_that_the_last_checkpoint_is_not_there_is_said_in_the_language_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "language", lambda: "zh")
    run = Training(tmp_path, policy=LATER)
    failing_once(monkeypatch, errno.ENOSPC)
    run.checkpoint.save()
    with pytest.warns(LockstepWarning) as said:
        run.end(failed=True)
    text = str(said[0].message)
    assert "最后一个检查点不存在：没有剩余空间" in text
    assert "最后一个完整的检查点没有受影响" in text


def test_host_copies_use_their_memory_again() -> None:
    copies = HostCopies()
    own = [torch.randn(4, 3), torch.randn(5)[::2], torch.tensor(2.0)]
    fresh = torch.randn(7)

    def take() -> list[torch.Tensor]:
        copies.begin([own])
        taken = [copies.copy(tensor) for tensor in own]
        copies.finish()
        return taken

    first = take()
    assert all(torch.equal(a, b) for a, b in zip(first, own, strict=True))
    assert all(tensor.is_contiguous() for tensor in first)
    places = [tensor.data_ptr() for tensor in first]
    own[0] += 1
    second = take()
    assert [tensor.data_ptr() for tensor in second] == places
    assert torch.equal(second[0], own[0])
    own[1] = torch.randn(6).double()
    assert torch.equal(take()[1], own[1])
    copies.begin([own])
    assert copies.copy(fresh).data_ptr() == fresh.data_ptr(), "made for the checkpoint alone"


DTYPES = (torch.float32, torch.bool, torch.bfloat16, torch.complex128, torch.int64, torch.uint8)


def test_copies_are_packed_and_none_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain_empty = torch.empty

    def noted_empty(size: Any, *, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:  # which needs a GPU
            sizes.append(int(size))
        return plain_empty(size, **kwargs)

    monkeypatch.setattr(torch, "empty", noted_empty)
    monkeypatch.setattr(host_copies, "FIRST_CHUNK_BYTES", 2**10)
    monkeypatch.setattr(host_copies, "MAX_CHUNK_BYTES", 2**19)
    memory = host_copies._ReusedMemory(pinned=True)
    large = 5 * 2**14 + 3  # its chunk is larger than MAX_CHUNK_BYTES
    shapes = [torch.Size(shape) for shape in [(), (0, 4), (3, 1), (2_500,), (large,)] * 12]
    addresses: list[list[int]] = []
    for _ in range(2):
        memory.begin()
        taken = [memory.take(shape, DTYPES[n % 6]) for n, shape in enumerate(shapes)]
        for number, tensor in enumerate(taken):
            tensor.fill_(number % 2)
        for number, tensor in enumerate(taken):
            assert tensor.eq(number % 2).all(), "it shares memory with another one"
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        memory.free_unused()
        addresses.append([tensor.data_ptr() for tensor in taken])
    assert addresses[0] == addresses[1]
    needed = sum(tensor.nbytes for tensor in taken)
    rounded = sum(2 ** (tensor.nbytes - 1).bit_length() for tensor in taken if tensor.nbytes)
    assert all(size.bit_count() == 1 for size in sizes), "torch rounds up what is no power of two"
    assert sum(sizes) < 1.2 * needed < rounded

    memory.begin()
    memory.take(torch.Size([3]), torch.float32)
    memory.free_unused()
    assert [chunk.num_bytes for chunk in memory._chunks] == [host_copies.FIRST_CHUNK_BYTES]


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"every": 0}, "a number of optimizer steps, or a time"),
        ({"every": 2.5}, "a number of optimizer steps, or a time"),
        ({"every": timedelta(0)}, "a number of optimizer steps, or a time"),
        ({"best": "accuracy"}, "which metric is the best"),
        ({"busy": "never"}, "while an earlier one is being written"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, Any], found: str) -> None:
    with pytest.raises(SettingError) as error:
        Policy(**wrong)
    assert found in error.value.found


def test_the_checkpoint_with_the_best_metric_is_kept(tmp_path: Path) -> None:
    run = Training(tmp_path, policy=Policy(best="min", keep=1, asynchronous=False))
    kept = []
    for metric in (3.0, torch.tensor(1.0), 2.0, float("nan"), 1.0, None):
        run.train(1)
        run.checkpoint.save(metric)
        kept.append([layout.step_of(path) for path in layout.list_checkpoints(tmp_path)])
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 5], [2, 6]]
    assert run.checkpoint.best == tmp_path / "step-000000002"
    with pytest.raises(UsageError, match=r"world.checkpoint\(..., best="):
        checkpoint_of(tmp_path, {"own": Counter(1)}).best  # noqa: B018


def test_step_saves_every_given_number_of_steps(tmp_path: Path) -> None:
    run = Training(tmp_path, policy=Policy(every=3, keep=9))
    saved = []
    for _ in range(7):
        run.train(1)
        saved += [run.checkpoint.step(), run.checkpoint.step()]  # as in several micro-batches
    assert [layout.step_of(path) for path in saved if path] == [3, 6]
    run.end()
    again = Training(tmp_path, policy=Policy(every=3, keep=9))
    again.checkpoint.resume()
    assert again.checkpoint.step() is None, "this step is there already"


# --- several processes


@in_gloo_group
def together(folder: str) -> list[Any]:
    collectives = joined()
    rank = collectives.topology.rank
    seen: list[Any] = []
    run = Training(Path(folder) / "a", collectives, LATER)

    def save() -> None:
        run.train(1)
        run.checkpoint.save()

    for follows in (save, run.checkpoint.wait, run.end):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                failing_once(patch, errno.ENOSPC)
            save()
            seen.append(caught(follows))
    run.checkpoint.save()
    run.end()

    # All leave the same save out, though only rank 0 knows that it writes.
    skips = Training(Path(folder) / "b", collectives, Policy(busy="skip"))
    with pytest.MonkeyPatch.context() as patch:
        held = Held(patch)
        skips.train(1)
        first = skips.checkpoint.save()
        skips.train(1)
        seen.append((first is not None, skips.checkpoint.save()))
        held.let_go()
        skips.end()

    # Rank 0's clock decides, and a wish of any rank counts, in one step everywhere.
    timed = Training(Path(folder) / "c", collectives, Policy(every=timedelta(seconds=5), keep=99))
    schedule = timed.checkpoint._schedule
    schedule._clock = lambda: timed.run.step.number * (1.0 if rank == 0 else 0.0)
    schedule._saved_at_s = 0.0
    schedule._last_exchange_step = 0
    schedule._last_exchange_at_s = 0.0
    steps = []
    for number in range(1, 30):
        timed.train(1)
        if number == 12 and rank == 1:
            schedule._requests._save_requested = True
        if timed.checkpoint.step():
            steps.append(number)
    seen.append(steps)
    timed.end()

    metric = Training(Path(folder) / "d", collectives, LATER)
    with pytest.raises(RanksDifferError, match=r"rank 0: 0\.0, rank 1: 1\.0"):
        metric.checkpoint.save(metric=float(rank))
    metric.end()
    return seen


def test_all_ranks_raise_errors_and_save_in_the_same_steps(tmp_path: Path) -> None:
    zero, one = run_ranks(together, 2, str(tmp_path))
    space = "no space is left for it ([Errno 28] No space left on device)"
    assert zero[:3] == [("CheckpointError", space)] * 3
    assert one[:3] == [("CheckpointError", f"rank 0: {space}")] * 3
    assert zero[3:] == one[3:]
    assert zero[3] == (True, None)
    assert zero[4] == [5, 10, 12, 17, 22, 27]
    assert len(layout.list_checkpoints(tmp_path / "a")) == 1
    assert not list(tmp_path.glob("*/.*"))


def in_a_world(folder: str, how: str) -> None:
    """Saves at the end of a run, which ends in the given way."""
    world = lockstep.init(seed=0)
    model = world.prepare(torch.nn.Linear(4, 4))
    world.checkpoint(folder, model=model).save()
    if how == "raises":
        with pytest.raises(ZeroDivisionError), world:
            raise ZeroDivisionError
    else:
        world.close()


def test_the_end_of_the_run_waits_for_the_last_save(tmp_path: Path) -> None:
    for how in ("closes", "raises"):
        run_ranks(in_a_world, 2, str(tmp_path / how), how)
        assert layout.latest(tmp_path / how) is not None
        assert os.listdir(tmp_path / how) == ["step-000000000"]


AT_EXIT = """
import torch, lockstep
from lockstep.checkpoint import storage

world = lockstep.init(seed=0)
model = world.prepare(torch.nn.Linear(2, 2))
full, good = (world.checkpoint(name, model=model) for name in ("full", "good"))
full.save()
full.wait()
write = storage.write
def fails_in_one(descriptor, data):
    if good._writer.busy:
        write(descriptor, data)
    else:
        raise OSError(28, "No space left on device")
storage.write = fails_in_one
full.save()
full._writer._thread.join()
good.save()
"""


def test_a_script_that_ends_without_closing_the_run_finishes_its_save(tmp_path: Path) -> None:
    """It finishes what was handed over, and does not end well where that was not possible."""
    (tmp_path / "script.py").write_text(AT_EXIT)
    line = [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1, done.stderr
    assert "no space is left for it" in done.stderr
    for name in ("full", "good"):
        assert os.listdir(tmp_path / name) == ["step-000000000"]
        assert layout.latest(tmp_path / name) is not None

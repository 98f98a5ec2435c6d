"""Ctrl-C, SIGTERM and failures while a checkpoint is written: nothing half written stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched
from ranks import HANG_S, context, in_clean_process, in_gloo_group, run_ranks
from test_async_save import Held
from test_checkpointer import Training, caught, joined

from lockstep.checkpoint import layout, storage, termination, writer
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.schedule import Policy
from lockstep.checkpoint.weights import save_weights

pytestmark = pytest.mark.launcher


def only_the_first_is_there(folder: Path) -> None:
    """The checkpoint of step 1 is whole, and there is nothing else."""
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["step-000000001"]
    assert not examine(folder / "step-000000001", values=True).problems


def with_one_checkpoint(folder: Path) -> Training:
    run = Training(folder, policy=Policy())
    run.train(1)
    run.checkpoint.save()
    run.checkpoint.wait()
    run.train(1)
    return run


def test_ctrl_c_before_the_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    run = with_one_checkpoint(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writer.Writer, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.checkpoint.save()
    only_the_first_is_there(tmp_path)
    run.end(failed=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupted_wait_at_the_end_removes_the_unfinished_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a second Ctrl-C."""

    def interrupted(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "MAX_WAIT_FOR_THREAD_S", 0.0)  # the disk does not answer
    run = with_one_checkpoint(tmp_path)
    with monkeypatch.context() as patch:
        held = Held(patch)
        run.checkpoint.save()
        assert held.reached.wait(30), "the thread writes to a folder that is still there"
        patch.setattr(run.checkpoint._writer, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.end(failed=True)
        only_the_first_is_there(tmp_path)
        assert not (tmp_path / ".lock").exists()
        held.let_go()
    run.checkpoint._writer.finish()
    only_the_first_is_there(tmp_path)


def test_ctrl_c_does_not_make_a_thread_that_writes_look_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own Thread.join does, in 3.11 and 3.12."""
    run = with_one_checkpoint(tmp_path)
    waits, may_write = threading.Event(), threading.Event()
    write, interruptions = storage.write, []

    def interrupt_once(*_: Any) -> None:
        interruptions.append(1)
        if len(interruptions) == 1:
            raise KeyboardInterrupt

    def interrupts(*arguments: Any) -> None:
        waits.wait()
        # Again and again: a signal just before a thread begins to wait does not wake it.
        while not may_write.wait(0.02):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        write(*arguments)

    before = signal.signal(signal.SIGINT, interrupt_once)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", interrupts)
        run.checkpoint.save()
        with pytest.raises(KeyboardInterrupt):
            waits.set()
            run.checkpoint.wait()
        assert run.checkpoint._writer.busy
        may_write.set()
        run.end(failed=True)
    signal.signal(signal.SIGINT, before)
    latest = layout.latest(tmp_path)
    assert latest is not None
    assert latest.name == "step-000000002", "one Ctrl-C lets it be finished"


@in_gloo_group
def another_rank_cannot_hand_over(folder: Path) -> tuple[str, str]:
    collectives = joined()
    run = Training(folder, collectives, Policy())
    run.train(1)
    run.checkpoint.save()
    run.checkpoint.wait()
    run.train(1)
    writer = run.checkpoint._writer
    finish, calls = writer.finish, []

    def fails_when_rank_0_has_made_the_folder() -> None:
        calls.append(1)
        if collectives.topology.rank == 1 and len(calls) == 2:
            raise ValueError("the disk of rank 1")
        finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "finish", fails_when_rank_0_has_made_the_folder)
        error = caught(run.checkpoint.save)
    collectives.barrier()
    only_the_first_is_there(folder)
    run.train(1)
    run.checkpoint.save()
    run.end()
    return error


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_rank_that_cannot_prepare_its_part_stops_the_save(tmp_path: Path, size: int) -> None:
    errors = run_ranks(another_rank_cannot_hand_over, size, tmp_path)
    assert all("the disk of rank 1" in found for _, found in errors)
    steps = [layout.step_of(path) for path in layout.list_checkpoints(tmp_path)]
    assert steps == [1, 3]


def saves_weights(path: Path, says: Connection, shard_size: int | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    save_weights(model, path, shard_size=shard_size)
    write, calls = storage.write, 0

    def stuck_in_the_second_file(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= (6 if shard_size else 2):
            says.send("writes")
            threading.Event().wait()
        write(*arguments)

    storage.write = stuck_in_the_second_file
    save_weights(model, path, shard_size=shard_size)


@pytest.mark.parametrize("shard_size", [None, 300])
def test_sigterm_removes_half_written_weights(tmp_path: Path, shard_size: int | None) -> None:
    hears, says = context.Pipe(duplex=False)
    arguments = (tmp_path / "net.safetensors", says, shard_size)
    process = context.Process(target=saves_weights, args=arguments)
    process.start()
    assert hears.recv() == "writes"
    assert [name for name in os.listdir(tmp_path) if ".tmp-" in name]
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    left = sorted(os.listdir(tmp_path))
    assert not [name for name in left if ".tmp-" in name or "-v2-" in name]
    assert len(left) == (3 if shard_size else 1)


@in_clean_process
def test_a_signal_to_a_child_does_not_end_its_parent() -> None:
    """DataLoaders end their workers by SIGTERM, which are forked with our handler and pipe."""
    called: list[int] = []

    def cleanup() -> None:
        called.append(os.getpid())

    with termination.cleaned_up_on_failure(cleanup):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writes, b"x")
            threading.Event().wait()
        os.read(reads, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.close(reads)
        os.close(writes)
    assert called == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# Each rank that writes stops in the middle of its first file, as if the disk did not answer.
STUCK = """
import glob, os, sys, threading, time, torch, lockstep
from lockstep.checkpoint import storage, writer

strategy, asynchronous, then = sys.argv[1:4]
writer.MAX_WAIT_FOR_THREAD_S = 0.1
# Through Gloo a rank waits for the others in C++, where no handler of Python's runs.
world = lockstep.init(strategy, device="cpu", backend="gloo", seed=0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = world.prepare(model, optimizer)
checkpoint = world.checkpoint(
    "run", model=model, optimizer=optimizer, asynchronous=asynchronous == "asynchronous"
)

def train():
    world.backward(model(torch.ones(6, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()

train()
checkpoint.save()
checkpoint.wait()
write = storage.write

def stuck(descriptor, data):
    write(descriptor, memoryview(data)[: len(data) // 2])
    if world.rank == 0:
        print("rank 0 writes", flush=True)
    threading.Event().wait()

storage.write = stuck
train()
checkpoint.save()
if world.rank == 1:
    while then == "raises" and not glob.glob("run/.step*/*.safetensors"):
        time.sleep(0.01)
    if then == "raises":
        raise ValueError("rank 1 fails")
    threading.Event().wait()
torch.distributed.barrier()
"""


def test_sigterm_while_all_ranks_write_and_one_waits_in_c(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STUCK)
    arguments = ["run", "--nproc", "2", "train.py", "fsdp", "asynchronous", "waits"]
    with Launched(arguments, cwd=tmp_path, merged=True) as run:
        run.until("rank 0 writes")
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert "SIGKILL" not in run.said
    only_the_first_is_there(tmp_path / "run")
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("saved", "strategy", "size"),
    [("asynchronous", "ddp", "2"), ("synchronous", "fsdp", "2"), ("asynchronous", "fsdp", "3")],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_launcher_leave_no_unfinished_save(
    tmp_path: Path, number: int, saved: str, strategy: str, size: str
) -> None:
    (tmp_path / "train.py").write_text(STUCK)
    arguments = ["run", "--nproc", size, "train.py", strategy, saved, "waits"]
    with Launched(arguments, cwd=tmp_path, merged=True) as run:
        run.until("rank 0 writes")
        run.send_signal(number)
        assert run.wait() == 128 + number
    only_the_first_is_there(tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_rank_raises_while_a_checkpoint_is_written(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(STUCK)
    arguments = ["run", "--nproc", "2", "train.py", strategy, "asynchronous", "raises"]
    with Launched(arguments, cwd=tmp_path, merged=True) as run:
        assert run.wait() == 1
        assert "rank 1 fails" in run.said
    only_the_first_is_there(tmp_path / "run")


@pytest.mark.thorough
def test_sigterm_to_a_launcher_that_knows_nothing_of_lockstep(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STUCK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line = [*torchrun, "--nproc-per-node=2", "train.py", "fsdp", "asynchronous", "waits"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # torchrun leaves its logs there
    with subprocess.Popen(
        line, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        while "rank 0 writes" not in run.stdout.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        run.stdout.read()
        assert run.wait(HANG_S) != 0
    only_the_first_is_there(tmp_path / "run")

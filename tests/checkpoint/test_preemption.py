"""Signals, through the real command: all ranks save in one step and go on or end; one is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched import Launched
from namespaces import until

from lockstep.checkpoint import layout

pytestmark = pytest.mark.netns

# Trains for ever, in steps of a few milliseconds, and says how far it is. The workers of the loader
# must outlive a SIGTERM, or there is nothing to make the next step with.
SCRIPT = """
import sys, time, torch, lockstep

class Points(torch.utils.data.Dataset):
    def __len__(self): return 60
    def __getitem__(self, i): return torch.full((3,), i / 60)

with lockstep.init(seed=0) as world:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = world.prepare(model, optimizer)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if sys.argv[1:] else {}
    loader = world.loader(Points(), 2, **workers)
    checkpoint = world.checkpoint("run", model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    print(f"rank {world.rank} is process {__import__('os').getpid()}", flush=True)
    for epoch in world.epochs(10**6):
        for points in loader:
            world.backward(model(points).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            if saved := checkpoint.step():
                checkpoint.wait()
                print(f"rank {world.rank} saved {saved.name}", flush=True)
        print(f"rank {world.rank} epoch {epoch}", flush=True)
"""


def steps(folder: Path) -> list[int]:
    return [layout.step_of(path) for path in layout.list_checkpoints(folder / "run")]


def run_of(folder: Path, *arguments: str) -> Launched:
    return Launched(["run", "--nproc", "2", "train.py", *arguments], cwd=folder, merged=True)


def pid_of(rank: int, said: str) -> int:
    return int(said.partition(f"rank {rank} is process ")[2].split()[0])


def test_all_ranks_save_in_one_step_and_the_run_goes_on_or_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with run_of(tmp_path, "workers") as run:
        run.until("rank 0 epoch 0")
        run.until("rank 1 epoch 0")
        run.send_signal(signal.SIGUSR1)  # to the launcher, which passes it on
        run.until("rank 1 saved")
        [first] = steps(tmp_path)
        os.kill(pid_of(1, run.said), signal.SIGUSR1)  # to one rank that is not the first
        until(lambda: run.said.count("saved step") == 4)
        assert steps(tmp_path)[0] == first
        assert steps(tmp_path)[-1] > first
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        last = steps(tmp_path)[-1]
        assert f"stopped by SIGTERM; run/step-{last:09d} is complete" in run.said
        assert "was sent SIGTERM" in run.said
        assert "Traceback" not in run.said
        assert not (tmp_path / "run" / ".lock").exists()

    with run_of(tmp_path) as run:
        # Where it resumes at the end of an epoch, the first is told before a step listens.
        until(lambda: run.said.count("rank 1 epoch") >= 2)
        os.kill(pid_of(1, run.said), signal.SIGTERM)  # to one rank; nothing to the launcher
        assert run.wait() == 128 + signal.SIGTERM
        assert steps(tmp_path)[-1] > last
        assert "stopped by SIGTERM" in run.said


DIES = """
import os, signal, sys, torch, lockstep
from lockstep.checkpoint import storage

with lockstep.init("fsdp", device="cpu", seed=0) as world:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = world.prepare(model, optimizer)
    checkpoint = world.checkpoint("run", model=model, optimizer=optimizer)
    resumed = checkpoint.resume()
    print("resumed" if resumed else "new", world.state_dict()["step"], flush=True)
    for number in range(3):
        world.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and not resumed and world.rank == int(sys.argv[1]):
            def dies(descriptor, data):
                os.write(descriptor, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            storage.write = dies
        checkpoint.save()
        checkpoint.wait()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path, rank: int) -> None:
    (tmp_path / "train.py").write_text(DIES)
    with run_of(tmp_path, str(rank)) as run:
        assert run.wait() != 0
        assert "SIGKILL" in run.said
        steps = [layout.step_of(path) for path in layout.list_checkpoints(tmp_path / "run")]
        assert steps == [1, 2], "the third is not there, not even in part"
    with run_of(tmp_path, str(rank)) as run:
        assert run.wait() == 0
        assert "resumed 2" in run.said
        assert not list((tmp_path / "run").glob(".*"))

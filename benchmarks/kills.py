"""Kills ranks at random moments of a run through shared memory, and looks at what is left.

Each run trains 60 steps on two or three ranks, saves a checkpoint after every fifth step, and may
start once more (`--max-restarts 1`). At a random moment a random rank is killed with SIGKILL. Of
each run it is checked that it ends with 0, that the launcher named the rank and the signal, that
the weights are those of a run that nobody disturbed, bit for bit, and that no process and no name
in /dev/shm is left.

    python benchmarks/kills.py [--runs 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SCRIPT = """
import hashlib, os, sys
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(960, 64), torch.randint(10, (960,)))
with lockstep.init("ddp", device="cpu", seed=0) as world:
    model = torch.nn.Sequential(torch.nn.Linear(64, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=48, shuffle=True)
    model, optimizer, loader = world.prepare(model, optimizer, loader)
    checkpoint = world.checkpoint(sys.argv[1], model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    for epoch in world.epochs(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            world.print("STEP", world.step)
            if world.step % 5 == 0:
                checkpoint.save()
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    world.print("WEIGHTS", hashlib.sha256(data).hexdigest())
"""


def run(folder: Path, size: int, step: int | None, drawn: random.Random) -> str:
    """What launcher and ranks have said; a rank is killed soon after a step; None: nobody is."""
    (folder / "script.py").write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("lockstep")), "run", "--nproc", str(size)]
    command += ["--max-restarts", "1", "script.py", str(folder / "checkpoints")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    ranks = wait_for_ranks(started.pid, size)
    seen = set(psutil.Process(started.pid).children(recursive=True))
    said = ""
    for line in started.stdout:
        said += line
        if line.endswith(f"STEP {step}\n"):
            time.sleep(drawn.uniform(0, 0.01))
            with contextlib.suppress(psutil.NoSuchProcess):
                drawn.choice(ranks).kill()
            step = None
    started.wait()
    left = psutil.wait_procs(seen, timeout=60)[1]
    assert not left, f"left behind: {left}\n{said}"
    return f"{said}\nexit code {started.returncode}"


def wait_for_ranks(launcher: int, size: int) -> list[psutil.Process]:
    """The processes that map the memory, once all do."""
    while True:
        ranks = []
        for process in psutil.Process(launcher).children(recursive=True):
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            if "memfd:lockstep" in maps:
                ranks.append(process)
        if len(ranks) == size:
            return ranks
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    expected: dict[int, str] = {}
    names = set(os.listdir("/dev/shm"))
    outcomes = {"told and restarted": 0, "ended before it was killed": 0}
    for number in range(options.runs):
        size = drawn.choice((2, 3))
        if size not in expected:
            with tempfile.TemporaryDirectory() as folder:
                said = run(Path(folder), size, None, drawn)
            expected[size] = re.findall(r"WEIGHTS (\w+)", said)[0]
        with tempfile.TemporaryDirectory() as folder:
            said = run(Path(folder), size, drawn.randint(1, 59), drawn)
        assert re.findall(r"WEIGHTS (\w+)", said)[-1:] == [expected[size]], said
        assert said.endswith("exit code 0"), said
        if len(re.findall("WEIGHTS", said)) == 1 and "SIGKILL" not in said:
            outcomes["ended before it was killed"] += 1
        else:
            assert re.search(r"rank \d.*SIGKILL", said, re.DOTALL), said
            outcomes["told and restarted"] += 1
        print(f"\r{number + 1} runs: {outcomes}", end="", flush=True)
    named = {name for name in set(os.listdir("/dev/shm")) - names if "lockstep" in name}
    print(f"\nnames left in /dev/shm: {named or 'none'}; weights equal in all runs")


if __name__ == "__main__":
    main()

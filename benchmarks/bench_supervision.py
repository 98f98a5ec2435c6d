"""What supervision costs a training step, and whether it cries wolf.

    python benchmarks/bench_supervision.py [--rounds 15] [--out benchmarks/results/supervision.json]

Step: the MLP of bench_step.py under raw DDP at two processes (Gloo, one thread each), started by
torchrun and by `lockstep run` in turns; the same script, the same steps. `lockstep run` adds to
each rank the heartbeat (an optimizer hook), Flight Recorder, and a thread that waits; the launcher
reads the heartbeats twice a second and takes a snapshot for stragglers now and then.

Parts: what is added to a step, timed on its own in one process, in microseconds: it resolves what
two runs on a shared machine cannot.

    python benchmarks/bench_supervision.py --false-alarms [--minutes 5]

A run with slow first batches, evaluations of rank 0 alone, long checkpoints behind a barrier, and
pauses. Everything that is said is printed; any verdict that stops the run or calls a deadlock is a
failure. `make thorough` runs more honest programs: tests/faults/honest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone"],
    "lockstep run": [str(BIN / "lockstep"), "run"],
}
STEPS, BLOCK = 1500, 50

STEP = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                      nn.Linear(128, 10))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
times = []
for step in range({steps}):
    begin = time.perf_counter()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    json.dump(times[100:], open(sys.argv[1], "w"))
dist.destroy_process_group()
"""

HONEST = """
import os, random, sys, time
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
drawn = random.Random(0)
end = time.monotonic() + 60 * float(sys.argv[1])

def work(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(200, 200) @ torch.randn(200, 200)

def train(steps, first):
    work(first)
    for _ in range(steps):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        time.sleep(0.002)

def shall_end():
    said = torch.tensor([float(time.monotonic() > end)])
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return said.item() > 0

epoch = 0
while not shall_end():
    train(500, first=drawn.uniform(0, 8))
    if rank == 0:
        work(drawn.uniform(1, 15))  # evaluates alone
    dist.barrier()
    if rank == 1:
        time.sleep(drawn.uniform(1, 10))  # a slow disk
    dist.barrier()
    time.sleep(drawn.uniform(0, 7))  # both pause
    epoch += 1
    if rank == 0:
        print(f"epoch {epoch} done", flush=True)
dist.destroy_process_group()
"""


def environment(folder: str) -> dict[str, str]:
    """Compiled once, as what is installed is; one thread a process."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": folder, "GLOO_SOCKET_IFNAME": "lo"}


def step_times(rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of every step, by launcher and round."""
    found: dict[str, list[list[float]]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "step.py", Path(folder) / "times.json"
        script.write_text(STEP.format(steps=STEPS))
        for at in range(rounds + 1):
            for name in list(LAUNCHERS)[:: 1 if at % 2 else -1]:
                line = [*LAUNCHERS[name], "--nproc-per-node", "2", str(script), str(out)]
                subprocess.run(line, env=environment(folder), capture_output=True, check=True)
                if at:
                    found[name].append(json.loads(out.read_text()))
    return found


def ratio(times: list[list[float]], base: list[list[float]], percent: int) -> list[float]:
    """Ratio of a percentile over all steps, and its 95 % interval by bootstrap over the rounds."""
    import numpy as np

    own, other = (np.percentile(np.array(x), percent, axis=1) for x in (times, base))
    draw = np.random.default_rng(0)
    picks = draw.integers(0, len(own), (2000, len(own)))
    ratios = np.median(own[picks], axis=1) / np.median(other[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return [float(np.median(own) / np.median(other)), float(low), float(high)]


def parts() -> dict[str, float]:
    """Microseconds that supervision adds: to an optimizer step, and to a collective."""
    code = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from lockstep.run.watch import probe
from lockstep.run.watch.evidence import Evidence
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
tensor = torch.ones(1)
def us(call, n=20000):
    best = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(n):
            call()
        best.append((time.perf_counter() - begin) / n * 1e6)
    return min(best)
found = {"step": us(optimizer.step), "collective": us(lambda: dist.all_reduce(tensor), 5000)}
if sys.argv[2] == "on":
    probe.install(Evidence.in_folder(Path(sys.argv[1])))
    found["step"] = us(optimizer.step)
print(json.dumps(found))
os._exit(0)
"""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for how, size in (("off", "0"), ("on", "2000")):
            own = {**environment(folder), "TORCH_FR_BUFFER_SIZE": size}
            line = [sys.executable, "-c", code, folder, how]
            done = subprocess.run(line, env=own, capture_output=True, text=True, check=True)
            found[how] = json.loads(done.stdout)
    return {name: found["on"][name] - found["off"][name] for name in ("step", "collective")}


def false_alarms(minutes: float) -> int:
    """Runs an honest program, and prints what is said of it; the number of wrong verdicts."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "honest.py"
        script.write_text(HONEST)
        line = [*LAUNCHERS["lockstep run"], "--nproc", "2", str(script), str(minutes)]
        done = subprocess.run(line, env=environment(folder), capture_output=True, text=True)
    wrong = int(done.returncode != 0)
    wrong += sum(word in done.stderr for word in ("deadlock", "FIRST FAILURE"))
    end = f"exit code {done.returncode}: {wrong} false alarms\n"
    print(f"{done.stdout}{done.stderr}{end}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--false-alarms", action="store_true")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "supervision.json")
    given = parser.parse_args()
    if given.false_alarms:
        sys.exit(min(1, false_alarms(given.minutes)))
    added = parts()
    print(f"added to a step: {added['step']:.2f} us; to a collective: {added['collective']:.2f} us")
    times = step_times(given.rounds)
    import numpy as np

    facts: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "torch-lockstep")}
        | {"python": platform.python_version()},
        "rounds": given.rounds,
        "added_us": added,
        "ratio": {},
        "quartiles_us": {},
    }
    for name, rounds in times.items():
        quartiles = [float(np.percentile(rounds, p)) * 1e6 for p in (25, 50)]
        facts["quartiles_us"][name] = quartiles
        print(f"{name:14} lower quartile {quartiles[0]:8.1f} us, median {quartiles[1]:8.1f} us")
    for percent in (25, 50):
        found = ratio(times["lockstep run"], times["torchrun"], percent)
        facts["ratio"][str(percent)] = found
        print(f"percentile {percent}: {found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}] of torchrun")
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()

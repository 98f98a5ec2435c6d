"""From the command to the first collective: torchrun and `lockstep run`, warm and with --no-warm.

The contestants run one after another in rounds, in an order that rotates, each as a user types the
command. Times are taken on one clock: the command before it is started, and rank 0 behind its
first all-reduce (Gloo). Equal between them: script, number of ranks, threads a process.

`restart`: every rank of the first attempt fails behind its first all-reduce, and the time runs
from there to behind the first all-reduce of the second attempt (`--max-restarts 1`). Its script
keeps the keys of each attempt apart by itself: torchrun of torch 2.13 leaves those of the first in
the store, and Gloo then connects to ranks that are gone (at 8 ranks, every time).
`training`: the script also builds a model and an optimizer and makes a step, as every user's does;
the first optimizer imports a large part of torch.

    python benchmarks/bench_start.py [--rounds 7] [--ranks 2 8] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

BIN = Path(sys.executable).parent
CONTESTANTS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone"],
    "lockstep run": [str(BIN / "lockstep"), "run"],
    "lockstep run --no-warm": [str(BIN / "lockstep"), "run", "--no-warm"],
}
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
{join}
dist.all_reduce(torch.ones(1))
{more}
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "a") as file:
        file.write(f"{{time.time()}}\\n")
fails = sys.argv[2] == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if fails:
    dist.barrier()
    os._exit(1)
dist.destroy_process_group()
"""
JOIN = 'dist.init_process_group("gloo")'
JOIN_AGAIN = """
env = os.environ
store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(env["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=int(env["RANK"]),
                        world_size=int(env["WORLD_SIZE"]))
"""
TRAINING = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
"""
TRIES = 3
"""Of a run: now and then a rank of torchrun's is ended by Gloo's abort while it leaves."""
KINDS = ("start", "training", "restart")


def seconds(command: list[str], ranks: int, kind: str, folder: Path) -> float:
    """One run."""
    script = folder / f"{kind}.py"
    join = JOIN_AGAIN if kind == "restart" else JOIN
    script.write_text(SCRIPT.format(join=join, more=TRAINING if kind == "training" else ""))
    times = folder / "times"
    restarts = ["--max-restarts", "1"] if kind == "restart" else []
    # Compiled once, as what is installed is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    line = [*command, *restarts, "--nproc-per-node", str(ranks), str(script), str(times), kind]
    for left in reversed(range(TRIES)):
        times.unlink(missing_ok=True)
        began = time.time()
        try:
            subprocess.run(
                line, env=environment, capture_output=True, text=True, timeout=300, check=True
            )
            break
        except subprocess.SubprocessError as error:
            print(f"failed, {left} tries left: {' '.join(line)}", flush=True)
            if not left:
                raise RuntimeError(f"{error}\n{error.stdout}{error.stderr}") from None
    reached = [float(line) for line in times.read_text().split()]
    return reached[1] - reached[0] if kind == "restart" else reached[0] - began


def measure(rounds: int, sizes: list[int], kinds: list[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds by `kind, ranks` and contestant."""
    found: dict[str, dict[str, list[float]]] = {}
    names = list(CONTESTANTS)
    with tempfile.TemporaryDirectory() as folder:
        for at in range(rounds + 1):
            for kind in kinds:
                for size in sizes:
                    into = found.setdefault(f"{kind}, {size} ranks", {name: [] for name in names})
                    for name in names[at % 3 :] + names[: at % 3]:
                        took = seconds(CONTESTANTS[name], size, kind, Path(folder))
                        if at:  # the first round fills the disk's cache
                            into[name].append(took)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'':22} {'contestant':24} {'median s':>9} {'min':>7} {'max':>7} {'torchrun / it':>22}")
    for what, times in found.items():
        base = times["torchrun"]
        for name, taken in times.items():
            ratios = sorted(b / t for b, t in zip(base, taken, strict=True))
            spread = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
            print(
                f"{what:22} {name:24} {statistics.median(taken):9.2f} {min(taken):7.2f} "
                f"{max(taken):7.2f} {spread:>22}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/start.json")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    given = parser.parse_args()
    found = measure(given.rounds, given.ranks, given.kinds)
    show(found)
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "torch-lockstep")}
        | {"python": platform.python_version()},
        "rounds": given.rounds,
        "seconds": found,
    }
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()

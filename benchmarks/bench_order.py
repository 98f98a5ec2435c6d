"""What the order of a shuffled dataset costs: computed where it is read, or drawn as a whole.

python benchmarks/bench_order.py [--whole-up-to 100000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

BATCH = 64
LENGTHS = (10_000, 1_000_000, 100_000_000, 1_000_000_000_000)
SMALL = (1_797, 60_000)


def peak() -> float:
    """Of this process, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(length: int, whole: bool, out: Path) -> None:
    """On one rank: a pass is begun, and of a small dataset also read to its end."""
    import torch
    from torch.utils.data import Dataset, TensorDataset

    import lockstep
    from lockstep.batch import plan as batch_plan

    class Synthetic(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(float(index % 7))

    if whole:
        batch_plan.is_permuted = lambda length: False
    torch.set_num_threads(1)
    with lockstep.init(seed=0) as world:
        small = length in SMALL
        data = TensorDataset(torch.zeros(length, 1)) if small else Synthetic()
        loader = world.loader(data, BATCH, shuffle=True)
        before, begun = peak(), time.perf_counter()
        passing = iter(loader)
        next(passing)
        first = time.perf_counter() - begun
        for _ in islice(passing, 100):
            pass
        found = {"first": first * 1e3, "memory": peak() - before}
        passing.close()
        if small:
            passes, begun = max(1, 120_000 // length), time.process_time()
            batches = sum(1 for _ in range(passes) for _ in loader)
            found["batch"] = (time.process_time() - begun) / batches * 1e6
        if world.is_main:
            out.write_text(json.dumps(found), encoding="utf-8")


def run(length: int, whole: bool, ranks: int) -> dict[str, float]:
    """One run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        own = [__file__, "--measure", str(length), "--out", str(out), *["--whole"] * whole]
        command = [sys.executable, "-m", "lockstep", "run", "--nproc", str(ranks), *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
        found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
        return found


def medians(rounds: int, **what: Any) -> dict[str, float]:
    rows = [run(**what) for _ in range(rounds)]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole-up-to", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure, given.whole, given.out)
        return
    ways = {"drawn whole": True, "Lockstep": False}
    print("| samples | ranks | " + " | ".join(f"first batch, memory: {way}" for way in ways) + " |")
    for length in LENGTHS:
        for ranks in (1, 2):
            cells = []
            for whole in ways.values():
                if whole and length > given.whole_up_to:
                    cells.append("-")
                    continue
                rounds = 1 if whole and length > 10**7 else given.rounds
                found = medians(rounds, length=length, whole=whole, ranks=ranks)
                cells.append(f"{found['first']:.1f} ms, {found['memory']:.1f} MiB")
            print(f"| {length} | {ranks} | " + " | ".join(cells) + " |", flush=True)
    print("| samples | " + " | ".join(f"a batch, {way}" for way in ways) + " |")
    for length in SMALL:
        found = [medians(given.rounds, length=length, whole=w, ranks=1) for w in ways.values()]
        print(f"| {length} | " + " | ".join(f"{row['batch']:.1f} us" for row in found) + " |")


if __name__ == "__main__":
    main()

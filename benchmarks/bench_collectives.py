"""All-reduce through shared memory and over Gloo, and a plain copy of the same bytes as the limit.

All take turns in the same processes, one thread each, in blocks of calls that follow each other and
in an order that rotates.
Equal between them: tensor (float32), processes, result (compared once a size). Figures are of rank
0: the lower quartile, which what else the machine does disturbs less, and the median.

    python benchmarks/bench_collectives.py [--ranks 2 4 8] [--largest 268435456] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SIZES = [4 << 2 * n for n in range(14)]
"""Bytes: 4 B, 16 B, ... 256 MiB."""
WAYS = ["copy", "gloo", "shared memory"]
SECONDS = 2.0
"""For a size, about; of the largest there are three rounds, however long they take."""


def time_all(largest: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds, by size and way."""
    import torch
    import torch.distributed as dist

    import lockstep
    from lockstep.communication import routing

    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    with lockstep.init(device="cpu") as world:
        shared = routing.shared_memory()
        assert shared is not None, "this machine cannot share memory"
        for size in (size for size in SIZES if size <= largest):
            own = torch.randn(size // 4)
            other, target = own.clone(), torch.empty_like(own)
            calls: dict[str, Callable[[], object]] = {
                "copy": lambda t=target, s=own: t.copy_(s),
                "gloo": lambda t=other: dist.all_reduce(t),
                "shared memory": lambda t=own: shared.all_reduce(t),
            }
            calls["gloo"](), calls["shared memory"]()
            torch.testing.assert_close(own, other)
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            block, turns, begun = max(1, min(20, (1 << 20) // size)), 3, time.perf_counter()
            for turn in itertools.count():
                if turn == 3:  # all ranks take as many as the first one has time for
                    each = (time.perf_counter() - begun) / turn
                    turns = world.broadcast(max(3, min(100, int(SECONDS / each))))
                if turn == turns:
                    break
                first = turn % len(WAYS)
                for way in WAYS[first:] + WAYS[:first]:
                    own.fill_(1.0), other.fill_(1.0)
                    dist.barrier()
                    begin = time.perf_counter()
                    for _ in range(block):
                        calls[way]()
                    times[way].append((time.perf_counter() - begin) * 1e6 / block)
            found[str(size)] = times
        world.barrier()
    return found


def worker(largest: str, out: str) -> None:
    found = time_all(int(largest))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


def on(ranks: int, largest: int) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(HERE), "--worker", str(largest), str(out)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return dict(json.loads(out.read_text()))


def readable(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import numpy as np
    import torch

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "microseconds": {},
    }
    print(f"{results['machine']}; torch {torch.__version__}; all-reduce of float32, microseconds")
    for ranks in options.ranks:
        found = on(ranks, options.largest)
        results["microseconds"][str(ranks)] = found
        print(f"\n{ranks} ranks: lower quartile and median")
        print(f"  {'':>8}" + "".join(f"{way:>24}" for way in WAYS) + f"{'gloo / shared':>16}")
        for size, times in found.items():
            quartiles = {way: np.percentile(times[way], [25, 50]) for way in WAYS}
            cells = "".join(f"{low:12.0f}{middle:12.0f}" for low, middle in quartiles.values())
            gained = quartiles["gloo"][0] / quartiles["shared memory"][0]
            print(f"  {readable(int(size)):>8}{cells}{gained:16.1f}")
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()

"""Two machines with two ranks each on a shaped link: raw DDP over Gloo, and Lockstep's hierarchy.

The machines are network namespaces joined by a veth cable whose two ends `tc tbf` limits; it takes
root. Both contestants train the transformer of bench_step.py in the same four processes (one thread
each), in blocks of steps that alternate. Figures are of rank 0: steps a second, and the bytes that
its machine has put on the cable for each step. The weights are compared at the end.

    python benchmarks/bench_network.py [--mbits 10000 1000 100] [--blocks 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_step import contestant

HERE = Path(__file__).resolve()
ADDRESSES = "10.98.0.1", "10.98.0.2"
WAYS = ["ddp", "lockstep"]
COMPRESSED = ["bf16", "int8", "powersgd"]


def time_all(blocks: int, steps: int) -> dict[str, Any]:
    """Seconds and bytes of each block, by contestant."""
    import torch
    import torch.distributed as dist

    import lockstep

    torch.set_num_threads(1)
    sent = Path("/sys/class/net/lan/statistics/tx_bytes")
    found: dict[str, Any] = {way: {"seconds": [], "bytes": []} for way in WAYS}
    with lockstep.init("ddp", device="cpu") as world:
        made = {way: contestant(way, "transformer 16", True, {"lockstep": world}) for way in WAYS}
        streams = {way: made[way][2]() for way in WAYS}
        for turn in range(blocks + 1):
            for way in WAYS:
                dist.barrier()
                begin, before = time.perf_counter(), int(sent.read_text())
                for _ in range(steps):
                    made[way][1](next(streams[way]))
                dist.barrier()
                if turn:  # the first builds buckets
                    found[way]["seconds"].append((time.perf_counter() - begin) / steps)
                    found[way]["bytes"].append((int(sent.read_text()) - before) / steps)
        pairs = zip(*(made[way][0].parameters() for way in WAYS), strict=True)
        found["largest difference"] = max(float((a - b).abs().max().detach()) for a, b in pairs)
        for stream in streams.values():
            stream.close()
        del made, streams, pairs
    for way in [None, *COMPRESSED]:
        found[way or "advice"] = time_alone(way, max(blocks, 5))
    return found


def time_alone(compress: Any, blocks: int) -> dict[str, Any]:
    """Seconds and bytes of each step with compressed gradients, and what the run says of them.

    A run has one strategy, so that these do not alternate with others.
    """
    import torch.distributed as dist

    import lockstep

    sent = Path("/sys/class/net/lan/statistics/tx_bytes")
    found: dict[str, Any] = {"seconds": [], "bytes": []}
    said = io.StringIO()
    options = lockstep.strategies.DDP(compress=compress, powersgd_start=0)
    with contextlib.redirect_stdout(said), lockstep.init(options, device="cpu") as world:
        model, step, batches = contestant("lockstep", "transformer 16", True, {"lockstep": world})
        stream = batches()
        for turn in range(13 if compress is None else 3 + blocks):
            dist.barrier()
            begin, before = time.perf_counter(), int(sent.read_text())
            step(next(stream))
            dist.barrier()
            if turn >= 3:
                found["seconds"].append(time.perf_counter() - begin)
                found["bytes"].append(int(sent.read_text()) - before)
        stream.close()
        del model, step, batches, stream
    lines = [line.strip() for line in said.getvalue().splitlines()]
    found["said"] = [line for line in lines if line.startswith(("link ", "network  ", "sent "))]
    return found


def on_two_machines(mbits: int | None, ranks: int, *script: str | Path) -> dict[str, Any]:
    """What the script has written to a file, its last argument, on a cable of so many Mb/s."""
    names = [f"lockstep-bench-{os.getpid()}-{number}" for number in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        try:
            for name in names:
                ip("netns", "add", name)
            cable = "link add lan type veth peer name lan netns"
            ip("-n", names[0], *cable.split(), names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "lan")
                for interface in ("lan", "lo"):
                    ip("-n", name, "link", "set", interface, "up")
                if mbits:
                    burst = max(32, min(256, mbits // 16))  # half a millisecond, where it can be
                    limit = f"rate {mbits}mbit burst {burst}kb latency 200ms"
                    shape = f"qdisc add dev lan root tbf {limit}"
                    subprocess.run(["tc", "-n", name, *shape.split()], check=True)
            command = [str(Path(sys.executable).with_name("lockstep")), "run", "--nnodes", "2"]
            command += ["--nproc-per-node", str(ranks), "--master-addr", ADDRESSES[0]]
            script = *script, out
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "LOCKSTEP_TOKEN": "of-this-benchmark-alone",
            }
            runs = [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command, "--node-rank", str(number), *script],
                    env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
                for number, name in enumerate(names)
            ]  # fmt: skip
            said = [run.communicate()[0] for run in runs]
            if any(run.returncode for run in runs):
                raise SystemExit("\n".join(said))
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "del", name])
        return dict(json.loads(out.read_text()))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def worker(blocks: str, steps: str, out: str) -> None:
    found = time_all(int(blocks), int(steps))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbits", type=int, nargs="+", default=[10_000, 1_000, 100])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import numpy as np
    import torch

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "links": {},
    }
    print(f"{results['machine']}; torch {torch.__version__}; two machines, two ranks on each")
    for mbits in options.mbits:
        steps = 1 if mbits < 1_000 else 4
        found = on_two_machines(mbits, 2, HERE, "--worker", str(options.blocks), str(steps))
        results["links"][str(mbits)] = found
        print(f"\n{mbits} Mb/s; largest difference of weights {found['largest difference']:.1e}")
        base = float(np.median(found["ddp"]["seconds"]))
        for way in [*WAYS, *COMPRESSED]:
            seconds = np.median(found[way]["seconds"])
            sent = np.median(found[way]["bytes"]) / 1e6
            print(
                f"  {way:<9}{1 / seconds:8.2f} steps/s  {base / seconds:5.2f} times DDP"
                f"{sent:10.1f} MB a step"
            )
        print("\n".join(f"  {line}" for line in found["advice"]["said"]))
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()

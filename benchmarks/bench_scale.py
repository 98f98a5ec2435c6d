"""Many ranks on one machine: how long they need to start, to a verdict, and to the end.

The ranks have no model: they join, compare their manifests, pass barriers and end; or one of them
fails, or hangs. The traffic of the store is what the kernel has counted on its connections.

python benchmarks/bench_scale.py [--ranks 16 64 256] [--launchers 1 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

SCENARIOS = ("end", "fail", "hang")
BARRIERS = 5
SHARING_TO_THE_END = 512
"""With more ranks, torch's operators are not taken down at exit: that writes to 26 MiB a rank which
all have shared until then, and 24 GiB would not hold it."""
FIRST_WORDS = re.compile("deadlock|hang|waits? for|RuntimeError: planted")


def rank(scenario: str, out: Path) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist

    import lockstep

    if int(os.environ["WORLD_SIZE"]) > SHARING_TO_THE_END:
        for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            each.atexit = False
    with lockstep.init() as world:
        world.barrier()
        begun = time.perf_counter()
        for _ in range(BARRIERS):
            world.barrier()
        barrier = (time.perf_counter() - begun) / BARRIERS
        if world.is_main:
            found = {
                "joined": time.time(),
                "barrier": barrier,
                "store": traffic(int(os.environ["MASTER_PORT"])),
                "free": free(),
            }
            out.write_text(json.dumps(found), encoding="utf-8")
        world.barrier()
        if world.rank == world.size // 2 and scenario == "fail":
            raise RuntimeError("planted")
        if world.rank == world.size // 2 and scenario == "hang":
            dist.recv(torch.zeros(1), 0)  # which nobody sends
        world.barrier()


def traffic(port: int) -> int:
    """Bytes that have gone over the open connections to a port of this machine."""
    command = ["ss", "-tinH", "state", "established", f"( dport = :{port} )"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"bytes_(?:sent|received):(\d+)", shown)))


def free() -> float:
    """Memory that is available on this machine, in MiB."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return int(text.split("MemAvailable:")[1].split()[0]) / 1024


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def run(ranks: int, launchers: int, scenario: str, folder: Path, limit: float) -> dict[str, Any]:
    """One run; times in seconds from its start, memory and traffic in MiB."""
    out, before, port = folder / "found.json", free(), free_port()
    own = [__file__, "--rank", scenario, "--out", str(out)]
    nodes = ["--nnodes", str(launchers), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "lockstep", "run", "--nproc", str(ranks // launchers)]
    command += ["--log-dir", str(folder / "logs"), "--join-timeout", str(limit)]
    logs = [folder / f"launcher{n}.txt" for n in range(launchers)]
    begun = time.time()
    started = []
    for number, log in enumerate(logs):
        of_node = [*nodes, "--node-rank", str(number)] if launchers > 1 else []
        with log.open("w", encoding="utf-8") as file:
            started.append(
                subprocess.Popen(
                    [*command, *of_node, *own],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"LOCKSTEP_TOKEN": "of the benchmark"},
                )
            )
    said = None
    while any(process.poll() is None for process in started) and time.time() < begun + limit:
        time.sleep(0.05)
        texts = [log.read_text(encoding="utf-8") for log in logs] if out.exists() else []
        if said is None and any(map(FIRST_WORDS.search, texts)):
            said = time.time()
    late = [process for process in started if process.poll() is None]
    for process in late:
        process.terminate()
    codes = [process.wait() for process in started]
    ended = time.time()
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    shown = [log.read_text(encoding="utf-8").splitlines() for log in logs]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "ranks": ranks,
        "launchers": launchers,
        "scenario": scenario,
        "joined": found.get("joined", 0.0) - begun,
        "barrier": found.get("barrier"),
        "said": said and said - found.get("joined", 0.0),
        "ended": ended - found.get("joined", 0.0),
        "store": found.get("store", 0) / 2**20,
        "memory": before - found.get("free", 0.0),
        "lines": max(len(lines) for lines in shown),
        "files": sum(path.stat().st_size for path in files) / 2**20,
        "codes": sorted(set(codes)),
        "late": bool(late),
        "last": shown[0][-60:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--launchers", type=int, nargs="+", default=[1])
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS))
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank(given.rank, given.out)
        return
    rows = []
    print(
        "| ranks, launchers | | joined | barrier | first words | end | store | memory | lines "
        "| files |"
    )
    for ranks in given.ranks:
        for launchers in given.launchers:
            for scenario in given.scenarios:
                with tempfile.TemporaryDirectory() as folder:
                    found = run(ranks, launchers, scenario, Path(folder), given.limit)
                rows.append(found)
                said = "" if found["said"] is None else f"{found['said']:.1f} s"
                print(
                    f"| {ranks}, {launchers} | {scenario}{', LATE' * found['late']} "
                    f"| {found['joined']:.1f} s | {1e3 * (found['barrier'] or 0):.0f} ms | {said} "
                    f"| {found['ended']:.1f} s | {found['store']:.2f} MiB "
                    f"| {found['memory']:.0f} MiB | {found['lines']} | {found['files']:.1f} MiB |",
                    flush=True,
                )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

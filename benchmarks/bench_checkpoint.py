"""What a checkpoint costs: Lockstep, torch.save and DCP beside the disk itself.

    nothing      is saved
    disk         the same number of bytes, written one after the other and flushed; read likewise
    torch.save   of the two state dicts, whole, on rank 0; flushed, then renamed
    dcp          torch.distributed.checkpoint: every rank writes its part; it flushes by itself
    dcp async    the same in its background thread
    waiting      Lockstep with asynchronous=False
    lockstep     Lockstep as it comes: a thread of rank 0 writes

All live in the same processes (Gloo, one thread each) and take turns, in another order each round.
Equal between them: model, AdamW and their state (Lockstep adds random streams and step, some
kilobytes), folder, file system, and that all is on the disk in the end; before something is read,
the kernel is told to forget the files.

A save stops the training for `call`. After it the training goes on for a number of steps, the same
for all, during which the asynchronous ones write; `slower` is what these steps take beyond those of
`nothing` in the same round. `stall` is both, and its share is that of a save each minute.
Peak memory is resident memory beyond that of a step, each contestant in processes of its own.

    python benchmarks/bench_checkpoint.py [--rounds 7] [--out benchmarks/results/checkpoint.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_step import installed

HERE = Path(__file__).resolve()
CASES = {"single": 1, "ddp": 2, "fsdp": 2}
"""Processes of each strategy."""
CONTESTANTS = ["nothing", "disk", "torch.save", "dcp", "dcp async", "waiting", "lockstep"]
PIECE = 2**20  # bytes written at a time to the disk itself


class Training:
    """A model with its optimizer, and its state in the forms that the contestants take."""

    def __init__(self, strategy: str, width: int, blocks: int) -> None:
        import torch
        from torch import nn

        import lockstep

        torch.set_num_threads(1)
        self.world = world = lockstep.init(strategy, device="cpu")
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer = world.prepare(model, optimizer)
        self.batch = torch.randn(32, width)
        self.step()  # the optimizer has a state then
        self.bytes = 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def step(self) -> float:
        """One step; its seconds."""
        begin = time.perf_counter()
        self.world.backward(self.model(self.batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin

    def split(self) -> dict[str, Any]:
        """The state as DCP takes it: every rank's part."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer.inner)
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> dict[str, Any]:
        """The state as torch.save takes it: whole, on rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        if self.world.strategy == "fsdp":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model, optimizer = get_state_dict(self.model, self.optimizer.inner, options=options)
            return {"model": model, "optimizer": optimizer}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.inner.state_dict(),
        }

    def take(self, state: dict[str, Any], *, full: bool) -> None:
        """Takes a state up."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        if full and self.world.strategy != "fsdp":
            self.model.load_state_dict(state["model"])
            self.optimizer.inner.load_state_dict(state["optimizer"])
            return
        options = StateDictOptions(full_state_dict=full)
        set_state_dict(
            self.model,
            self.optimizer.inner,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )


class Contestant:
    """One way to save and to read; `save` returns what waits until all is on the disk."""

    def __init__(self, name: str, training: Training, folder: Path) -> None:
        import torch.distributed as dist

        self.name, self.training = name, training
        self.folder = folder / name.replace(" ", "-")
        self.main = training.world.is_main
        self.checkpoint: Any = None
        if name in ("waiting", "lockstep"):
            self.checkpoint = training.world.checkpoint(
                self.folder,
                keep=1,
                asynchronous=name == "lockstep",
                model=training.model,
                optimizer=training.optimizer,
            )
        self.rounds = 0
        self.random = memoryview(os.urandom(PIECE))
        # Its thread exchanges among the ranks while the training does.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self) -> tuple[Path, Callable[[], Any]]:
        """Begins, or does, a save: where it will be, and what waits for it."""
        import torch
        import torch.distributed.checkpoint as dcp

        if self.checkpoint is not None:
            return self.checkpoint.save(), self.checkpoint.wait
        self.rounds += 1
        path = self.folder / str(self.rounds)
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.name == "nothing":
            return self.folder, lambda: None
        if self.name == "disk" and self.main:
            write(path, self.training.bytes, self.random)
        elif self.name == "torch.save":
            state = self.training.whole()
            if self.main:
                with open(f"{path}.tmp", "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(f"{path}.tmp", path)
        elif self.name == "dcp":
            dcp.save(self.training.split(), checkpoint_id=path)
        elif self.name == "dcp async":
            future = dcp.async_save(
                self.training.split(), checkpoint_id=path, process_group=self.group
            )
            return path / ".metadata", future.result
        return path, lambda: None

    def read(self) -> None:
        """Takes up what was saved last."""
        import torch
        import torch.distributed.checkpoint as dcp

        path = self.folder / str(self.rounds)
        if self.checkpoint is not None:
            assert self.checkpoint.resume()
        elif self.name == "disk" and self.main:
            memory = bytearray(PIECE)
            with open(path, "rb", buffering=0) as file:
                while file.readinto(memory):
                    pass
        elif self.name == "torch.save":
            self.training.take(torch.load(path, map_location="cpu"), full=True)
        elif self.name.startswith("dcp"):
            state = self.training.split()
            dcp.load(state, checkpoint_id=path)
            self.training.take(state, full=False)

    def clean(self) -> None:
        """Removes all but the last."""
        if self.main and self.folder.exists() and self.checkpoint is None:
            for path in self.folder.iterdir():
                if path.name != str(self.rounds):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget(self) -> None:
        """Tells the kernel that the files need not stay in its memory."""
        for path in self.folder.rglob("*") if self.main else ():
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(path: Path, size: int, piece: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size, PIECE):
            file.write(piece[: min(PIECE, size - begin)])
        os.fsync(file.fileno())


def watched(path: Path, begin: float, seconds: list[float], stop: threading.Event) -> None:
    """Notes when the file or folder is there."""
    while not path.exists():
        if stop.wait(0.002):
            return
    seconds.append(time.perf_counter() - begin)


def measure_save(contestant: Contestant, steps: int) -> dict[str, float]:
    """Seconds of one save, of the steps after it, and until it is on the disk."""
    world = contestant.training.world
    os.sync()  # what others have written and removed is not on its account
    world.barrier()
    begin = time.perf_counter()
    path, wait = contestant.save()
    call = time.perf_counter() - begin
    there: list[float] = []
    stop = threading.Event()
    watcher = threading.Thread(target=watched, args=(path, begin, there, stop))
    watcher.start()
    each = [contestant.training.step() for _ in range(steps)]
    wait()
    stop.set()
    watcher.join()
    late = time.perf_counter() - begin
    world.barrier()
    contestant.clean()
    return {"call": call, "steps": sum(each), "written": there[0] if there else late}


def time_all(strategy: str, rounds: int, width: int, blocks: int, folder: Path) -> dict[str, Any]:
    """All contestants in turns; the figures of rank 0."""
    training = Training(strategy, width, blocks)
    contestants = [Contestant(name, training, folder) for name in CONTESTANTS]
    one = sorted(training.step() for _ in range(9))[4]
    slowest = max(measure_save(c, 2)["written"] for c in contestants[1:])
    steps = training.world.max(int(2 * slowest / one) + 5)
    found: dict[str, Any] = {name: [] for name in CONTESTANTS}
    draw = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        gc.collect()
        for contestant in draw.sample(contestants, len(contestants)):
            figures = measure_save(contestant, steps)
            contestant.forget()
            training.world.barrier()
            begin = time.perf_counter()
            contestant.read()
            training.world.barrier()
            found[contestant.name].append({**figures, "read": time.perf_counter() - begin})
    return {"bytes": training.bytes, "steps": steps, "times": found}


def peak_memory(strategy: str, name: str, width: int, blocks: int, folder: Path) -> float:
    """MiB of resident memory beyond that of a step, of the rank that takes most."""
    training = Training(strategy, width, blocks)
    contestant = Contestant(name, training, folder)
    grown = 0.0
    for _ in range(2):
        gc.collect()
        before = peak(training.step)

        def save() -> None:
            _, wait = contestant.save()
            training.step()
            wait()

        grown = max(grown, peak(save) - before)
    return float(training.world.max(grown))


def peak(work: Callable[[], Any]) -> float:
    """MiB of resident memory at most while this is done."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:"))


def worker(arguments: list[str]) -> None:
    what, strategy, extra, width, blocks, folder, out = arguments
    sizes = int(width), int(blocks), Path(folder)
    if what == "time":
        found: Any = time_all(strategy, int(extra), *sizes)
    else:
        found = peak_memory(strategy, extra, *sizes)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # DCP's threads may outlive the process group


def run_worker(what: str, strategy: str, extra: str, options: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        out = Path(folder) / "out.json"
        # Large blocks go back to the system when they are freed, so that a peak is a peak.
        limits = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(CASES[strategy]), str(HERE), "--worker"]
        sizes = [str(options.width), str(options.blocks), str(Path(folder) / "saved")]
        done = subprocess.run(
            [*command, what, strategy, extra, *sizes, str(out)],
            env={**installed(), **limits, "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads(out.read_text())


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, and the quartiles."""
    import numpy as np

    middle, low, high = np.percentile(values, [50, 25, 75])
    return float(middle), float(low), float(high)


def table(found: dict[str, Any], memory: dict[str, float]) -> None:
    size = found["bytes"] / 1e6
    print("               call [quartiles] s     slower   stall  share    written          read")
    quiet = found["times"]["nothing"]
    for name, rounds in found["times"].items():
        if name == "nothing":
            continue
        call, low, high = spread([r["call"] for r in rounds])
        slower = spread([r["steps"] - q["steps"] for r, q in zip(rounds, quiet, strict=True)])[0]
        stall = 0.0 if name == "disk" else call + slower
        rates = []
        for what in ("written", "read"):
            ratios = [
                r[what] / d[what] for r, d in zip(rounds, found["times"]["disk"], strict=True)
            ]
            seconds = spread([r[what] for r in rounds])[0]
            rates.append(f"{size / seconds:6.0f} MB/s {1 / spread(ratios)[0]:5.2f}")
        share = f"{stall / 60:6.2%}" if name != "disk" else "     -"
        print(
            f"  {name:<11}{call:6.3f} [{low:.3f}, {high:.3f}]{slower:9.3f}{stall:8.3f} {share}  "
            f"{'  '.join(rates)}  {memory.get(name, 0.0):6.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--width", type=int, default=1024, help="of each block: width² values")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured", default=None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rounds": options.rounds,
        "cases": {},
    }
    print(f"{results['machine']}; {results['versions']}; {options.rounds} rounds")
    print("rates: bytes of the state by seconds, and that in parts of the disk's own; then memory")
    for case in options.cases:
        found = run_worker("time", case, str(options.rounds), options)
        memory = {name: run_worker("memory", case, name, options) for name in CONTESTANTS[2:]}
        results["cases"][case] = {**found, "memory": memory}
        one = spread([r["steps"] for r in found["times"]["nothing"]])[0] / found["steps"]
        print(
            f"\n{case}, {CASES[case]} process(es): {found['bytes'] / 1e6:.0f} MB of state, "
            f"{found['steps']} steps of {one * 1e3:.0f} ms after each save"
        )
        table(found, memory)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        main()

"""What bench_recovery.py starts: a training that writes down what it does, of one contestant.

It is a file of its own because `lockstep run` reads the source of a script, and takes fresh
interpreters for one that sets variables such as those that bench_recovery.py sets for others.

    ... recovery_training.py memory|disk|torchrun|torchft|SAMPLES,ROUNDS MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 64
SAVE_EVERY_S = 30.0
STEPS_BETWEEN_CLOCKS = 10
"""Rank 0 looks at the clock after so many steps, and tells the others whether a save is due."""


def append(path: Path, *words: object) -> None:
    """Writes a line, in one call, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (" ".join(str(word) for word in words) + "\n").encode())
    os.close(descriptor)


def forked_at() -> float:
    """When this process was started, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class Diary:
    """What a rank writes down for the process that measures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        append(folder / "ranks", self.attempt, self.rank, os.getpid())

    def mark(self, name: str, at: float | None = None) -> None:
        if self.rank == 0:
            append(self.folder / "marks", self.attempt, name, at or time.time())

    def step(self, number: int, weight: float = 1.0) -> None:
        append(self.folder / "steps", self.attempt, number, time.time(), weight)

    def save_is_due(self) -> float:
        """1.0 if the last checkpoint is old; to be agreed on."""
        clock = self.folder / "saved"
        clock.touch() if not clock.exists() else None
        return float(time.time() - clock.stat().st_mtime >= SAVE_EVERY_S)

    def has_saved(self) -> None:
        if self.rank == 0:
            (self.folder / "saved").touch()


def problem(name: str) -> tuple[Any, Any]:
    """Model and data; both transformers read so many tokens a sample."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "digits":
        sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "digits"))
        from digits import Net, load_digits

        return Net(dropout=0.2), load_digits()[0]
    if name == "mlp":
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(128, 10)), made_up(2048, 64)
    tokens = int(name.split()[1])
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(tokens * 256, 10))
    return model, made_up(1024, tokens, 256)


def made_up(*shape: int) -> Any:
    """Samples without meaning, in ten classes."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(*shape, generator=generator)
    return TensorDataset(samples, torch.randint(10, shape[:1], generator=generator))


def train_with_lockstep(kind: str, name: str, folder: Path) -> None:
    diary = Diary(folder)
    diary.mark("forked", forked_at())
    diary.mark("script")
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    import lockstep

    model, data = problem(name)
    diary.mark("imported")
    world = lockstep.init("ddp", device="cpu", seed=0)
    diary.mark("init")
    optimizer = torch.optim.AdamW(model.parameters())
    loader: Any = DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=True)
    model, optimizer, loader = world.prepare(model, optimizer, loader)
    checkpoint = world.checkpoint(
        folder / "checkpoints",
        keep=1,
        memory=False if kind == "disk" else None,
        model=model,
        optimizer=optimizer,
        loader=loader,
    )
    diary.mark("prepared")
    checkpoint.resume()
    diary.mark("resumed")
    first = True
    for _ in world.epochs(10**9):
        for x, y in loader:
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if first:
                diary.mark("step")
                first = False
            if diary.rank == 0:
                diary.step(world.step)
            if world.step % STEPS_BETWEEN_CLOCKS == 0 and world.max(diary.save_is_due()):
                checkpoint.save()
                diary.has_saved()
            checkpoint.step()


def train_with_torchrun(kind: str, name: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    diary = Diary(folder)
    env = os.environ
    # torchrun leaves the keys of an attempt in the store, and Gloo would connect to ranks that are
    # gone; see bench_start.py.
    store: Any = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(str(diary.attempt), store)
    size = int(env["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=diary.rank, world_size=size)
    model, data = problem(name)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / "checkpoint.pt"
    number = 0
    if path.exists():
        saved = torch.load(path)
        number = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            if diary.rank == 0:
                diary.step(number)
            if number % STEPS_BETWEEN_CLOCKS == 0:
                due = torch.tensor(diary.save_is_due())
                dist.all_reduce(due, dist.ReduceOp.MAX)
                if due and diary.rank == 0:
                    state = {"step": number, "model": model.state_dict()}
                    torch.save({**state, "optimizer": optimizer.state_dict()}, f"{path}.tmp")
                    os.replace(f"{path}.tmp", path)
                    diary.has_saved()


def train_with_torchft(kind: str, name: str, folder: Path) -> None:
    from datetime import timedelta

    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    diary = Diary(folder)
    made, data = problem(name)
    inner = torch.optim.AdamW(made.parameters())

    def load(state: Any) -> None:
        made.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    timeout = timedelta(seconds=5)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), min_replica_size=1, timeout=timeout,
        replica_id=f"replica{diary.rank}", store_addr="localhost", store_port=store.port, rank=0,
        world_size=1, lighthouse_addr=os.environ["LIGHTHOUSE"], hostname="localhost",
        load_state_dict=load,
        state_dict=lambda: {"model": made.state_dict(), "optimizer": inner.state_dict()},
    )  # fmt: skip
    model = DistributedDataParallel(manager, made)
    optimizer = Optimizer(manager, inner)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // 2, shuffle=True)
    while True:
        for x, y in loader:
            before = manager.current_step()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if manager.current_step() > before:
                diary.step(manager.current_step(), manager.num_participants() / 2)


def measure_cost(kind: str, name: str, folder: Path) -> None:
    """Blocks of steps with and without memory, in turns."""
    import torch
    import torch.nn.functional as F

    import lockstep

    samples, rounds = (int(word) for word in kind.split(","))
    with lockstep.init("ddp", device="cpu", seed=0) as world:
        model, data = problem(name)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = world.prepare(model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        with_memory = world.checkpoint(folder / "with", **state)
        without = world.checkpoint(folder / "without", memory=False, **state)
        with_memory.resume()
        begin = int(os.environ["RANK"]) * samples
        x, y = data[begin : begin + samples]

        def block(steps: int, checkpoint: Any) -> float:
            world.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                world.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
            world.barrier()
            return (time.perf_counter() - begin) / steps

        block(10, with_memory)
        steps = max(24, int(0.8 / world.max(block(10, without))))
        block(4 * steps, with_memory)  # how often a step is kept settles in these
        times: dict[str, list[float]] = {"with": [], "without": []}
        pairs = [("with", with_memory), ("without", without)]
        for turn in range(rounds):
            for what, checkpoint in pairs if turn % 2 else reversed(pairs):
                times[what].append(block(steps, checkpoint))
        held = 0
        for path in os.environ["LOCKSTEP_STEP_MEMORY"].split():
            held += os.stat(path).st_blocks * 512
        if world.is_main:
            every = with_memory._kept._keeper.every
            found = {"steps": steps, "times": times, "held": held, "every": every}
            (folder / "found.json").write_text(json.dumps(found))


WORKERS: dict[str, Callable[[str, str, Path], None]] = {
    "memory": train_with_lockstep,
    "disk": train_with_lockstep,
    "torchrun": train_with_torchrun,
    "torchft": train_with_torchft,
}


if __name__ == "__main__":
    _, kind, name, folder = sys.argv
    WORKERS.get(kind, measure_cost)(kind, name, Path(folder))

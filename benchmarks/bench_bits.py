"""What the same bits cost: virtual ranks beside plain torch, DDP, FSDP2 and Lockstep without them.

Every contestant has processes of its own, one thread each. They take turns in short blocks, in an
order that rotates, so that whatever disturbs the machine disturbs all of them; those whose turn it
is not sleep. Equal between the contestants: model and initial weights, data, global batch (32
samples a virtual rank), optimizer (AdamW).

`torch, 4 passes` computes the parts of the virtual ranks one after the other, in plain torch, and
adds their gradients in the same tree by hand: what is above it is Lockstep's. `alone` is a loop
without communication, with the local batch of one of two processes. `alone, one barrier a step`
adds the cheapest barrier that Lockstep has, which is the limit of whatever synchronises.

    python benchmarks/bench_bits.py [--rounds 30] [--out benchmarks/results/bits.json]
    python benchmarks/bench_bits.py --table benchmarks/results/bits.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench_step import median, problem, ratio

HERE = Path(__file__).resolve()
SAMPLES_OF_VIRTUAL_RANK = 32


class Contestant(NamedTuple):
    """A training loop, and the processes that it runs on."""

    name: str
    processes: int
    loop: str
    """`torch`, `torch in passes`, `ddp`, `alone`, `alone with a barrier` or `lockstep`."""
    strategy: str = ""
    virtual_ranks: int | None = None


class Comparison(NamedTuple):
    """Contestants with the same global batch; the first is what the others are compared with."""

    title: str
    global_batch: int
    contestants: list[Contestant]


COMPARISONS = [
    Comparison(
        "one process, 4 virtual ranks",
        4 * SAMPLES_OF_VIRTUAL_RANK,
        [
            Contestant("torch", 1, "torch"),
            Contestant("torch, 4 passes", 1, "torch in passes"),
            Contestant("lockstep", 1, "lockstep", "single"),
            Contestant("virtual ranks", 1, "lockstep", "single", 4),
        ],
    ),
    Comparison(
        "two processes, 2 virtual ranks",
        2 * SAMPLES_OF_VIRTUAL_RANK,
        [
            Contestant("raw DDP", 2, "ddp"),
            Contestant("alone", 2, "alone"),
            Contestant("alone, one barrier a step", 2, "alone with a barrier"),
            Contestant("lockstep ddp", 2, "lockstep", "ddp"),
            Contestant("virtual ranks, ddp", 2, "lockstep", "ddp", 2),
        ],
    ),
    Comparison(
        "two processes, 2 virtual ranks, sharded",
        2 * SAMPLES_OF_VIRTUAL_RANK,
        [
            Contestant("lockstep fsdp", 2, "lockstep", "fsdp"),
            Contestant("virtual ranks, fsdp", 2, "lockstep", "fsdp", 2),
        ],
    ),
]


class Row(NamedTuple):
    """A row of the table in docs/benchmarks.md: the time of one contestant relative to another."""

    title: str
    comparison: int
    contestant: str
    base: str


ROWS = [
    Row("one process, 4 virtual ranks: to plain torch", 0, "virtual ranks", "torch"),
    Row("the same passes in plain torch: to plain torch", 0, "torch, 4 passes", "torch"),
    Row("one process, 4 virtual ranks: to these passes", 0, "virtual ranks", "torch, 4 passes"),
    Row(
        "two processes, 2 virtual ranks: to `ddp` without them",
        1,
        "virtual ranks, ddp",
        "lockstep ddp",
    ),
    Row("the same: to raw DDP", 1, "virtual ranks, ddp", "raw DDP"),
    Row("`ddp` without virtual ranks: to raw DDP", 1, "lockstep ddp", "raw DDP"),
    Row(
        "no gradients sent, one barrier a step: to raw DDP",
        1,
        "alone, one barrier a step",
        "raw DDP",
    ),
    Row(
        "two processes, 2 virtual ranks, `fsdp`: to `fsdp` without them",
        2,
        "virtual ranks, fsdp",
        "lockstep fsdp",
    ),
]
STEPS_IN_BLOCK = {"mlp": 40, "digits": 10, "transformer 16": 2, "resnet18": 1}


# In the processes of a contestant


def make_step(contestant: Contestant, kind: str, global_batch: int) -> Callable[[], None]:
    """Returns a function that makes one optimizer step."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    model, data, _ = problem(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world: Any = None
    barrier: Callable[[], object] | None = None
    batch_size = global_batch
    if contestant.loop == "lockstep":
        import lockstep

        world = lockstep.init(
            contestant.strategy,
            device="cpu",
            sync_batchnorm=False,
            virtual_ranks=contestant.virtual_ranks,
        )
        torch.set_num_threads(1)
    elif contestant.loop == "alone with a barrier":
        import lockstep
        from lockstep.communication import routing

        lockstep.init("ddp", device="cpu")
        torch.set_num_threads(1)
        shared = routing.shared_memory()
        assert shared is not None
        number = torch.zeros(1)
        barrier = lambda: shared.all_reduce(number)
        batch_size = global_batch // contestant.processes
    elif contestant.processes > 1:
        dist.init_process_group("gloo")
        batch_size = global_batch // contestant.processes
        if contestant.loop == "ddp":
            model = DistributedDataParallel(model)
    loader: Any = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
    if world is not None:
        model, optimizer, loader = world.prepare(model, optimizer, loader)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    stream = batches()

    if contestant.loop == "torch in passes":
        return lambda: step_in_passes(model, optimizer, *next(stream))

    def step() -> None:
        while True:
            images, labels = next(stream)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            if world is None:
                loss.backward()
            else:
                world.backward(loss)
            optimizer.step()
            if world is None or world.is_last_micro_batch:
                break
        if barrier is not None:
            barrier()

    return step


def step_in_passes(model: Any, optimizer: Any, images: Any, labels: Any) -> None:
    """Computes the gradient of each part by itself, and adds the gradients in a binary tree."""
    import torch
    import torch.nn.functional as F

    parameters = list(model.parameters())
    images_of_parts = images.split(SAMPLES_OF_VIRTUAL_RANK)
    labels_of_parts = labels.split(SAMPLES_OF_VIRTUAL_RANK)
    num_parts = len(images_of_parts)
    sums: list[list[Any]] = []
    for part in range(num_parts):
        optimizer.zero_grad()
        F.cross_entropy(model(images_of_parts[part]), labels_of_parts[part]).backward()
        sums.append([parameter.grad for parameter in parameters])
    while len(sums) > 1:
        for left, right in zip(sums[::2], sums[1::2], strict=True):
            torch._foreach_add_(left, right)
        sums = sums[::2]
    (total,) = sums
    torch._foreach_mul_(total, 1 / num_parts)
    for parameter, gradient in zip(parameters, total, strict=True):
        parameter.grad = gradient
    optimizer.step()


def worker(kind: str, comparison: int, number: int) -> None:
    """Makes a block of steps for each line on standard input, and prints their seconds."""
    compared = COMPARISONS[comparison]
    contestant = compared.contestants[number]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the block of choices prints goes elsewhere
    step = make_step(contestant, kind, compared.global_batch)
    gc.disable()
    for _ in sys.stdin:
        gc.collect(0)
        seconds = []
        for _ in range(STEPS_IN_BLOCK[kind]):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        answers.write(json.dumps(seconds) + "\n")
        answers.flush()
    os._exit(0)  # torch's process groups may abort while the interpreter shuts down


# In the process that compares


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start(kind: str, comparison: int, number: int) -> list[subprocess.Popen[str]]:
    """Starts the processes of a contestant."""
    contestant = COMPARISONS[comparison].contestants[number]
    port = free_port()
    processes = []
    for rank in range(contestant.processes):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank),
            "WORLD_SIZE": str(contestant.processes),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(contestant.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, str(HERE), "--worker", kind, str(comparison), str(number)]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        processes.append(process)
    return processes


def block(processes: list[subprocess.Popen[str]]) -> list[float]:
    """Lets a contestant make a block of steps; returns the seconds of rank 0."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("block\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended: {process.args}")
        answers.append(json.loads(line))
    seconds: list[float] = answers[0]
    return seconds


def compare(kind: str, comparison: int, rounds: int) -> dict[str, list[list[float]]]:
    """Returns the seconds of each step, by contestant and block."""
    contestants = COMPARISONS[comparison].contestants
    started = [start(kind, comparison, number) for number in range(len(contestants))]
    times: dict[str, list[list[float]]] = {contestant.name: [] for contestant in contestants}
    try:
        for turn in range(2 + rounds):
            first = turn % len(contestants)
            order = [*range(first, len(contestants)), *range(first)]
            for number in order:
                seconds = block(started[number])
                if turn >= 2:  # the first rounds build buckets and warm caches
                    times[contestants[number].name].append(seconds)
    finally:
        for processes in started:
            for process in processes:
                process.kill()
                process.wait()
    return times


def print_table(results: dict[str, Any]) -> None:
    """Prints the table of docs/benchmarks.md. A contestant without times has a dash."""
    for row in ROWS:
        cells = [row.title]
        for kind in STEPS_IN_BLOCK:
            times = results["step"].get(f"{kind}, {COMPARISONS[row.comparison].title}", {})
            if row.contestant in times and row.base in times:
                middle, _, _ = ratio(times[row.contestant], times[row.base])
                cells.append(f"{middle:.2f}")
            else:
                cells.append("-")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--problems", nargs="+", default=list(STEPS_IN_BLOCK))
    parser.add_argument("--comparisons", nargs="+", type=int, default=range(len(COMPARISONS)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="only print the table of these results")
    options = parser.parse_args()
    if options.table:
        print_table(json.loads(options.table.read_text()))
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    results: dict[str, Any] = {"machine": machine, "rounds": options.rounds, "step": {}}
    print(f"{machine}; {options.rounds} rounds")
    for kind in options.problems:
        for number in options.comparisons:
            compared = COMPARISONS[number]
            times = compare(kind, number, options.rounds)
            results["step"][f"{kind}, {compared.title}"] = times
            base = compared.contestants[0].name
            print(f"\n{kind}, {compared.title}: median step; ratio to {base} [95 % interval]")
            print("  of the median, and of the lower quartile")
            for name, seconds in times.items():
                middle, low, high = ratio(seconds, times[base])
                text = f"{middle:6.3f} [{low:.3f}, {high:.3f}]"
                middle, low, high = ratio(seconds, times[base], 25)
                text += f"  {middle:6.3f} [{low:.3f}, {high:.3f}]"
                print(f"  {name:<27}{median(seconds) * 1e3:9.3f} ms  {text}", flush=True)
    print_table(results)
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()

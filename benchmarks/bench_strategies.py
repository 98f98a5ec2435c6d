"""What each strategy costs beside the plain torch that it is made of.

    dp        nn.DataParallel; on CPUs, which it does not know, its parts one after the other
    ddp       DistributedDataParallel
    fsdp      fully_shard of every block and of the model
    pipeline  torch.distributed.pipelining, ScheduleGPipe and Schedule1F1B

Each pair lives in the same two processes (dp: in one), Gloo, one thread each, taking turns in short
blocks whose order rotates, so that whatever disturbs the machine disturbs both. A step takes as
long as on the rank where it takes longest: the two have the stages of a pipeline on other ranks.
Equal between them: model and initial weights, global batch, optimizer (SGD), threads; the weights
are compared at the end. Peak memory is resident memory after the first steps, each contestant in
processes of its own; `ddp default` is DistributedDataParallel as it comes, which keeps gradients
beside its buckets.

    python benchmarks/bench_strategies.py [--rounds 30] [--out benchmarks/results/strategies.json]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench_step import installed, median, ratio

HERE = Path(__file__).resolve()
STRATEGIES = {"dp": 1, "ddp": 2, "fsdp": 2, "gpipe": 2, "1f1b": 2}
"""Processes of each; the last two are the pipeline under its two schedules."""
WIDER = {"gpipe wide": "gpipe", "1f1b wide": "1f1b"}
"""Pipelines once more over longer micro-batches: what is done between them takes the same time."""
SMALL = {"width": 128, "blocks": 4, "length": 32, "batch": 16}
WIDE = {"width": 256, "blocks": 4, "length": 64, "batch": 16}
LARGE = {"width": 256, "blocks": 16, "length": 8, "batch": 8}
"""For memory: 50 MiB of parameters in small pieces, beside which activations are small."""
WORDS, PIECES = 1000, 8
GLOBAL_BATCHES = 50
"""Of an epoch, where batches come from a loader: both pipelines read theirs, as Lockstep's loader
hands out the micro-batches. The other strategies train on one batch again and again."""
Step = Callable[[], None]


def network(width: int, blocks: int, length: int, batch: int) -> tuple[Any, Any, Any]:
    """A small transformer as a chain of modules, words `(batch, length)` and the next ones."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(blocks)
    ]
    model = nn.Sequential(nn.Embedding(WORDS, width), *layers, nn.Linear(width, WORDS))
    words = torch.randint(WORDS, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return model, words[:, :-1].contiguous(), words[:, 1:].contiguous()


def middle(model: Any) -> int:
    """The module that begins the second stage of the pipeline."""
    return len(model) // 2


def loss_of(output: Any, target: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def plain_loop(model: Any, optimizer: Any, backward: Any, x: Any, y: Any) -> Step:
    def step() -> None:
        backward(loss_of(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_parts(model: Any, parts: int) -> Callable[[Any], Any]:
    """What nn.DataParallel does, over replicas that are all on the CPU."""
    import torch

    return lambda x: torch.cat([model(part) for part in x.chunk(parts)])


def epoch(x: Any, y: Any) -> Any:
    """A dataset of the same global batch again and again."""
    from torch.utils.data import TensorDataset

    return TensorDataset(x.repeat(GLOBAL_BATCHES, 1), y.repeat(GLOBAL_BATCHES, 1))


def endless(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def raw(kind: str, size: dict[str, int]) -> tuple[Step, Any]:
    """One training step in plain torch, and the module whose weights it trains."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    model, x, y = network(**size)
    if kind in ("gpipe", "1f1b"):
        return raw_pipeline(kind, model, x, y)
    called: Any = model
    if kind == "dp":
        gpus = torch.cuda.device_count() > 1
        called = DataParallel(model.cuda()) if gpus else in_parts(model, 2)
    else:
        rank, count = dist.get_rank(), dist.get_world_size()
        x, y = x.chunk(count)[rank], y.chunk(count)[rank]
    if kind in ("ddp", "ddp default"):
        called = DistributedDataParallel(model, gradient_as_bucket_view=kind == "ddp")
    elif kind == "fsdp":
        for block in list(model)[1:-1]:
            fully_shard(block)
        called = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return plain_loop(called, optimizer, lambda loss: loss.backward(), x, y), model


def raw_pipeline(kind: str, model: Any, x: Any, y: Any) -> tuple[Step, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.utils.data import DataLoader

    rank = dist.get_rank()
    cut = middle(model)
    part = model[:cut] if rank == 0 else model[cut:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule_class = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
    schedule = schedule_class(stage, PIECES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    batches = endless(DataLoader(epoch(x, y), batch_size=len(x)))

    def step() -> None:
        inputs, target = next(batches)
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)
        optimizer.step()
        optimizer.zero_grad()

    return step, part


def ours(kind: str, size: dict[str, int], world: Any) -> tuple[Step, Any]:
    """The same under Lockstep."""
    import torch

    model, x, y = network(**size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind in ("gpipe", "1f1b"):
        called, optimizer = world.prepare(model, optimizer)
        batches = endless(world.loader(epoch(x, y), len(x), sample_rng=False))

        def step() -> None:
            for inputs, target in itertools.islice(batches, PIECES):
                world.backward(loss_of(called(inputs), target))
                optimizer.step()
                optimizer.zero_grad()

        return step, called.module
    called, optimizer = world.prepare(model, optimizer)
    if kind != "dp":
        x, y = x.chunk(world.size)[world.rank], y.chunk(world.size)[world.rank]
    return plain_loop(called, optimizer, world.backward, x, y), getattr(called, "module", called)


def open_world(kind: str, size: dict[str, int]) -> Any:
    """Joins the run as Lockstep does, for both of a pair."""
    import torch

    import lockstep
    from lockstep import strategies

    torch.set_num_threads(1)
    if kind == "dp":
        return lockstep.init(strategies.DP(replicas=2), device="cpu")
    if kind in ("gpipe", "1f1b"):
        options = {
            "schedule": kind,
            "split": [str(middle(network(**size)[0]))],
            "num_micro_batches": PIECES,
        }
        return lockstep.init(strategies.Pipeline(stages=2, **options), device="cpu")
    return lockstep.init("ddp" if kind == "ddp default" else kind, device="cpu")


def weights(module: Any, world: Any) -> dict[str, Any]:
    """The whole model's weights, from all ranks."""
    import torch

    own = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if not value.is_meta:
            own[name] = value.to("cpu", copy=True)
    whole: dict[str, torch.Tensor] = {}
    for part in on_all_ranks(own, world):
        whole |= part
    return whole


def on_all_ranks(value: Any, world: Any) -> list[Any]:
    """Every rank's value; under a pipeline `world.gather` has those of the last stage alone."""
    import torch.distributed as dist

    every = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(every, value)
    return every


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a weight."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((a - other[name]).abs().max()) for name, a in one.items())


def time_pair(kind: str, rounds: int) -> dict[str, Any]:
    """Seconds of each step, by contestant and block, interleaved in these processes."""
    size = WIDE if kind in WIDER else SMALL
    kind = WIDER.get(kind, kind)
    world = open_world(kind, size)
    made = {"torch": raw(kind, size), "lockstep": ours(kind, size, world)}
    before = {name: weights(module, world) for name, (_, module) in made.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in made}
    names = list(made)
    gc.disable()
    for turn in range(2 + rounds):
        gc.collect(0 if turn % 20 else 2)
        for name in names if turn % 2 else names[::-1]:
            world.barrier()
            each = []
            for _ in range(2):
                begin = time.perf_counter()
                made[name][0]()
                each.append(time.perf_counter() - begin)
            if turn >= 2:  # the first rounds build buckets and warm caches
                times[name].append([round(seconds, 7) for seconds in each])
    after = {name: weights(module, world) for name, (_, module) in made.items()}
    return {
        "times": {name: slowest(blocks, world) for name, blocks in times.items()},
        "difference": difference(after["torch"], after["lockstep"]),
        "trained": difference(before["torch"], after["torch"]),
    }


def slowest(blocks: list[list[float]], world: Any) -> list[list[float]]:
    """The time of each step on the rank where it took longest."""
    ranks = on_all_ranks(blocks, world)
    return [[max(step) for step in zip(*block, strict=True)] for block in zip(*ranks, strict=True)]


def peak_memory(kind: str, who: str) -> dict[str, float]:
    """MiB of resident memory: before the model, and the most in a step after the first ones.

    Of the rank that grows most: the pipelines have their stages on different ranks.
    """
    world = open_world(kind, LARGE)
    before = status("VmRSS")
    step, _module = ours(kind, LARGE, world) if who == "lockstep" else raw(kind, LARGE)
    for turn in range(8):
        if turn == 3:  # what was needed once, to build buckets, is not in it
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
        step()
    found = {"before": before, "peak": status("VmHWM")}
    return max(on_all_ranks(found, world), key=lambda rank: rank["peak"] - rank["before"])


def status(name: str) -> float:
    """MiB, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith(f"{name}:"))


def worker(arguments: list[str]) -> None:
    what, kind, extra, out = arguments
    found = time_pair(kind, int(extra)) if what == "time" else peak_memory(kind, extra)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # see bench_step: raw DDP's process group may abort at the interpreter's end


def run_worker(processes: int, *arguments: str, **environ: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        environ = {**installed(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), str(HERE)]
        done = subprocess.run(
            [*command, "--worker", *arguments, str(out)],
            env=environ,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads(out.read_text())


def memory(kinds: list[str]) -> Iterator[tuple[str, str, dict[str, float]]]:
    for kind in kinds:
        rows = [(kind, "torch"), (kind, "lockstep")]
        for raw_kind, who in [("ddp default", "torch"), *rows] if kind == "ddp" else rows:
            # Large blocks go back to the system when they are freed, so that the peak is a peak.
            found = run_worker(
                STRATEGIES[kind], "memory", raw_kind, who, MALLOC_MMAP_THRESHOLD_=str(2**16)
            )
            yield raw_kind, who, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rounds": options.rounds,
        "step": {},
        "memory": {},
    }
    print(f"{results['machine']}; {results['versions']}; {options.rounds} rounds of 2 steps")
    print("\nmedian step; ratio to plain torch [95 % interval] of the median and of the lower")
    print("quartile; largest difference of a weight at the end, beside how far training moved it")
    wider = [wide for wide, kind in WIDER.items() if kind in options.strategies]
    for kind in [*options.strategies, *wider]:
        processes = STRATEGIES[WIDER.get(kind, kind)]
        found = run_worker(processes, "time", kind, str(options.rounds))
        results["step"][kind] = found
        base = found["times"]["torch"]
        for name, times in found["times"].items():
            intervals = ""
            for percent in (50, 25):
                middle, low, high = ratio(times, base, percent)
                intervals += f"  {middle:6.3f} [{low:.3f}, {high:.3f}]"
            print(f"  {kind:<12}{name:<10}{median(times) * 1e3:9.3f} ms{intervals}", end="")
            same = f"  {found['difference']:.1e} of {found['trained']:.1e}"
            print(same if name == "lockstep" else "")
    print("\npeak resident memory of a rank in a step, and the growth since before the model, MiB")
    for kind, who, found in memory(options.strategies):
        results["memory"][f"{kind} {who}"] = found
        growth = found["peak"] - found["before"]
        print(f"  {kind:<12}{who:<10}{found['peak']:9.1f}  {growth:9.1f}")
    if "ddp" in options.strategies:
        copy = sum(p.numel() * p.element_size() for p in network(**LARGE)[0].parameters()) / 2**20
        default = _grown(results, "ddp default torch")
        saved = {who: default - _grown(results, f"ddp {who}") for who in ("torch", "lockstep")}
        results["bucket_views"] = {"saved_mib": saved, "gradients_mib": copy}
        shown = ", ".join(f"{who} {mib:.1f}" for who, mib in saved.items())
        print(f"\ngradients as bucket views, MiB less: {shown}; one copy is {copy:.1f} MiB")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results) + "\n")


def _grown(results: dict[str, Any], name: str) -> float:
    figures = results["memory"][name]
    return float(figures["peak"] - figures["before"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        main()

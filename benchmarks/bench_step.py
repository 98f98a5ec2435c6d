"""What a wrapper costs per training step: raw DDP, Accelerate, Fabric and Lockstep side by side.

All contestants live in the same two processes (Gloo, one thread each), taking turns in short
blocks, in an order that rotates, so that whatever disturbs the machine disturbs all of them.
`alone` is the physical limit: the same local batch without any communication. `alone, barrier`
adds the cheapest barrier that Lockstep has to each step, which is the limit of whatever
synchronises; what raw DDP takes beyond it is avoidable. Equal between the contestants: model and
initial weights, data, global batch, optimizer (AdamW), threads; after the run with a fixed batch
the weights are compared bit for bit.

    python benchmarks/bench_step.py [--rounds 30] [--out benchmarks/results/step.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from psutil import Process

HERE = Path(__file__).resolve()
BARRIER = "alone, barrier"
CONTESTANTS = ["alone", BARRIER, "ddp", "ddp tuned", "accelerate", "fabric", "lockstep"]
PROBLEMS = {
    "mlp": (10, 10),
    "digits": (5, 4),
    "transformer 4": (3, 2),
    "transformer 16": (2, 2),
    "resnet18": (1, 1),
}
"""Steps in a block, and blocks in a round: the shorter a step, the more of them are needed. The
transformers read so many tokens a sample; both have 6 blocks and width 256."""
BY_LOCKSTEP_RUN = "started by lockstep run"


def problem(name: str) -> tuple[Any, Any, int]:
    """Model, dataset and samples a rank."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if name == "mlp":
        model: nn.Module = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        shape: tuple[int, ...] = (64,)
    elif name == "digits":
        sys.path.insert(0, str(HERE.parent.parent / "examples" / "digits"))
        from digits import Net

        model, shape = Net(dropout=0.2), (1, 8, 8)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # so that weights can be compared
    elif name.startswith("transformer"):
        tokens = int(name.split()[1])
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(tokens * 256, 10))
        shape = tokens, 256
    else:
        sys.path.insert(0, str(HERE.parent.parent / "examples" / "fashion_mnist"))
        from resnet import ResNet18

        model, shape = ResNet18(classes=10), (3, 28, 28)
    images = torch.randn(2048 if name in ("mlp", "digits") else 256, *shape, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    return model, TensorDataset(images, labels), 32


def contestant(
    name: str, kind: str, fixed: bool, shared: dict[str, Any]
) -> tuple[Any, Callable[[Any], None], Callable[[], Iterator[Any]]]:
    """The wrapped model, one training step, and endless batches: one, or epochs of them."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    model, data, local = problem(kind)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    foreach = True if name == "ddp tuned" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    loader: Any = DataLoader(data, batch_size=local, shuffle=True)
    backward: Callable[[Any], None] = lambda loss: loss.backward()
    if name.startswith("ddp"):
        assert dist.is_initialized()
        loader = DataLoader(data, batch_size=local, sampler=DistributedSampler(data))
        model = DistributedDataParallel(model, gradient_as_bucket_view=name == "ddp tuned")
    elif name == "accelerate":
        accelerator = shared["accelerate"]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    elif name == "fabric":
        fabric = shared["fabric"]
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        backward = fabric.backward
    elif name == "lockstep":
        world = shared["lockstep"]
        loader = DataLoader(data, batch_size=local * size, shuffle=True)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        backward = world.backward

    wait: Callable[[], object] = lambda: None
    if name == BARRIER:
        from lockstep.communication import routing

        memory_of_ranks = routing.shared_memory()
        assert memory_of_ranks is not None
        number = torch.zeros(1)
        wait = lambda: memory_of_ranks.all_reduce(number)

    def step(batch: Any) -> None:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        wait()
        optimizer.step()
        optimizer.zero_grad()

    def batches() -> Iterator[Any]:
        same = data[rank * local : (rank + 1) * local]
        while True:
            if fixed:
                yield same
            else:
                yield from loader

    return model, step, batches


def open_shared(names: list[str]) -> dict[str, Any]:
    """What each contestant needs once a process; Lockstep opens the process group they share."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    shared: dict[str, Any] = {}
    if "lockstep" in names or BARRIER in names:
        import lockstep

        shared["lockstep"] = lockstep.init("ddp", device="cpu", sync_batchnorm=False)
    else:
        dist.init_process_group("gloo")
    if "accelerate" in names:
        from accelerate import Accelerator

        shared["accelerate"] = Accelerator(cpu=True)
    if "fabric" in names:
        from lightning_fabric import Fabric

        shared["fabric"] = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        shared["fabric"].launch()
    return shared


def time_all(kind: str, fixed: bool, rounds: int) -> dict[str, Any]:
    """Seconds of each step, by contestant and block, interleaved in this pair of processes."""
    import torch
    import torch.distributed as dist

    shared = open_shared(CONTESTANTS)
    steps, blocks = PROBLEMS[kind]
    made = {name: contestant(name, kind, fixed, shared) for name in CONTESTANTS}
    streams = {name: made[name][2]() for name in CONTESTANTS}
    times: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    gc.disable()
    for turn in range(2 + rounds * blocks):
        first = turn % len(CONTESTANTS)
        gc.collect(0 if turn % 20 else 2)
        for name in CONTESTANTS[first:] + CONTESTANTS[:first]:
            step, stream = made[name][1], streams[name]
            dist.barrier()
            each = []
            for _ in range(steps):
                begin = time.perf_counter()
                step(next(stream))
                each.append(time.perf_counter() - begin)
            if turn >= 2:  # the first rounds build buckets and warm caches
                times[name].append([round(seconds, 7) for seconds in each])
    reference = [p.detach().clone() for p in made["ddp"][0].parameters()]
    same = {}
    for name in CONTESTANTS:
        pairs = zip(reference, made[name][0].parameters(), strict=True)
        same[name] = all(torch.equal(a, b) for a, b in pairs)
    for stream in streams.values():
        stream.close()
    dist.barrier()
    return {"times": times, "same_weights": same if fixed else {}}


def peak_memory(kind: str, name: str, starter: int) -> dict[str, float]:
    """MiB of this rank at the end of imports and at most while training; of the run at its end.

    The run is all that the process `starter` has started, launcher and ranks, and what they share
    counts once.
    """
    import torch.distributed as dist

    shared = open_shared([name])
    before = _resident()
    _, step, batches = contestant(name, kind, True, shared)
    stream = batches()
    for _ in range(10):
        step(next(stream))
    stream.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    dist.barrier()
    started = Process(starter).children(recursive=True)
    # By what each holds in equal parts with others.
    whole = sum(child.memory_full_info().pss for child in started) / 2**20
    dist.barrier()
    return {"before": before, "peak": peak, "run": whole}


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def worker(arguments: list[str]) -> None:
    what, kind, extra, out = arguments
    if what == "time":
        fixed, rounds = extra.split(",")
        found: Any = time_all(kind, fixed == "fixed", int(rounds))
    else:
        name, starter = extra.split(",")
        found = peak_memory(kind, name, int(starter))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    # torch keeps a DDP model's process group, with its threads, through the interpreter's shutdown,
    # where they may abort the process; Lockstep prevents that, the others have nothing for it.
    sys.stdout.flush()
    os._exit(0)


def installed() -> dict[str, str]:
    """The environment in which Lockstep is compiled once, as what is installed is."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def on_two(*arguments: str, by: Sequence[str] = ("-m", "torch.distributed.run")) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        environ = {**installed(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, *by, "--standalone"]
        command += ["--nproc-per-node", "2", str(HERE), "--worker", *arguments, str(out)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads(out.read_text())


def memory(kind: str) -> dict[str, dict[str, float]]:
    """Of rank 0, by contestant: all started by torchrun, and Lockstep by its own command, too."""
    own = os.getpid()
    trained_together = [name for name in CONTESTANTS if not name.startswith("alone")]
    found = {name: on_two("memory", kind, f"{name},{own}") for name in trained_together}
    command = str(Path(sys.executable).with_name("lockstep"))
    found[BY_LOCKSTEP_RUN] = on_two("memory", kind, f"lockstep,{own}", by=(command, "run"))
    return found


def import_times(rounds: int) -> dict[str, list[float]]:
    """Seconds to import, alternating, in fresh processes."""
    statements = {
        "torch": "import torch",
        "lockstep": "import torch, lockstep; lockstep.init, lockstep.World, lockstep.launch",
        "accelerate": "import torch, accelerate",
        "fabric": "import torch, lightning_fabric",
    }
    times: dict[str, list[float]] = {name: [] for name in statements}
    for turn in range(rounds + 1):
        for name, statement in statements.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True, env=installed())
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(times: list[Any], base: list[Any], percent: int = 50) -> tuple[float, float, float]:
    """Ratio of a percentile over all steps, and its 95 % interval by bootstrap over the blocks."""
    import numpy as np

    own, other = (np.array(x).reshape(len(x), -1) for x in (times, base))
    draw = np.random.default_rng(0)
    picks = draw.integers(0, len(own), (1000, len(own)))
    ratios = [np.percentile(own[p], percent) / np.percentile(other[p], percent) for p in picks]
    whole = np.percentile(own, percent) / np.percentile(other, percent)
    return float(whole), *(float(x) for x in np.percentile(ratios, [2.5, 97.5]))


def share_gone(times: dict[str, list[Any]]) -> float:
    """Returns which part of what raw DDP takes beyond the limit Lockstep does not take."""
    limit = median(times[BARRIER])
    return (median(times["ddp"]) - median(times["lockstep"])) / (median(times["ddp"]) - limit)


def median(times: list[Any]) -> float:
    import numpy as np

    return float(np.median(np.array(times)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--only-steps", action="store_true", help="no memory, no imports")
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
    from importlib.metadata import version

    for name in ("accelerate", "lightning-fabric", "torch-lockstep"):
        results["versions"][name] = version(name)
    print(f"{results['machine']}; {results['versions']}; {options.rounds} rounds, two processes")
    for kind in options.problems:
        for data in ("fixed", "loader"):
            found = on_two("time", kind, f"{data},{options.rounds}")
            results["step"][f"{kind} {data}"] = found
            title = "the same batch again" if data == "fixed" else "with its data loader"
            print(f"\n{kind}, {title}: median step; ratio to raw DDP [95 % interval] of the median")
            print("  and of the lower quartile, which what else the machine does disturbs less")
            for name in CONTESTANTS:
                times = found["times"][name]
                middle, low, high = ratio(times, found["times"]["ddp"])
                same = found["same_weights"].get(name)
                note = {True: "  bit-equal weights", False: "", None: ""}[same]
                milliseconds = median(times) * 1e3
                interval = f"{middle:6.3f} [{low:.3f}, {high:.3f}]"
                middle, low, high = ratio(times, found["times"]["ddp"], 25)
                interval += f"  {middle:6.3f} [{low:.3f}, {high:.3f}]"
                print(f"  {name:<14}{milliseconds:9.3f} ms  {interval}{note}")
            gone = share_gone(found["times"])
            print(f"  of what raw DDP takes beyond `{BARRIER}`, Lockstep leaves out {gone:.0%}")
        if options.only_steps:
            continue
        results["memory"][kind] = memory(kind)
        print(f"\n{kind}: peak resident memory of rank 0, its growth while training, and memory of")
        print("  the whole run, launcher and two ranks, with what they share counted once")
        for name, figures in results["memory"][kind].items():
            shown = (figures["peak"], figures["peak"] - figures["before"], figures["run"])
            print(f"  {name:<24}" + "  ".join(f"{value:8.1f} MiB" for value in shown))
    if not options.only_steps:
        results["import"] = import_times(max(5, options.rounds // 3))
        print("\nimport: median seconds, ratio to torch [95 % interval]")
    for name, times in results.get("import", {}).items():
        middle, low, high = ratio(times, results["import"]["torch"])
        print(f"  {name:<11}{median(times):9.3f} s   {middle:6.3f} [{low:.3f}, {high:.3f}]")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        main()

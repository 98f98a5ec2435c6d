"""Stage `speed`: time of a step and memory against plain PyTorch on the same device.

Contestants train the same model on the same batches in one process and take turns, block by block;
the medians of the blocks are compared. Times of several ranks that share one GPU say nothing, so
only SyncBatchNorm and FSDP are measured with two, against torch's own in the same place.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.one_gpu import backend_for_several_ranks, init_options, on_ranks
from benchmarks.gpu.results import NotRun, Stage

BLOCKS = 9
PREFETCH_FACTOR = 2
EPOCHS_FOR_MEMORY = 40
MIB_A_BATCH = 48


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians_of_blocks(
    contestants: dict[str, Callable[[], None]], steps: int, device: Any, blocks: int = BLOCKS
) -> dict[str, float]:
    """Microseconds of a step, by contestant: the median over blocks of `steps` steps each."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        for _ in range(3):
            step()
    for _ in range(blocks):
        for name, step in contestants.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - began) / steps * 1e6)
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


def mlp_step(device_name: str) -> dict[str, float]:
    """A step of a small MLP in fp32, where nearly all of the time is the host's."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import lockstep

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    steps = 200 if device_name == "cuda" else 20
    with lockstep.init(device=device_name) as world:
        data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
        plain: Any = model().to(world.device)
        plain_optimizer = torch.optim.AdamW(plain.parameters())
        prepared: Any = model()
        optimizer: Any = torch.optim.AdamW(prepared.parameters())
        prepared, optimizer = world.prepare(prepared, optimizer)
        batches = endless(world.loader(data, 32))
        x, y = (tensor[:32].to(world.device) for tensor in data.tensors)

        def step_of_torch() -> None:
            F.cross_entropy(plain(x), y).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()

        def step_of_lockstep() -> None:
            images, labels = next(batches)
            world.backward(F.cross_entropy(prepared(images), labels))
            optimizer.step()
            optimizer.zero_grad()

        def only_the_loader() -> None:
            next(batches_alone)

        found = medians_of_blocks(
            {"torch_us": step_of_torch, "lockstep_with_its_loader_us": step_of_lockstep},
            steps,
            world.device,
        )
        batches.close()
        batches_alone = endless(world.loader(data, 32))
        found |= medians_of_blocks({"loader_alone_us": only_the_loader}, steps, world.device)
        batches_alone.close()
    step_alone = found["lockstep_with_its_loader_us"] - found["loader_alone_us"]
    found["overhead_of_a_step_us"] = round(step_alone - found["torch_us"], 1)
    return found


def endless(loader: Any) -> Any:
    """The batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def gpt_step(device_name: str, mode: str | None) -> dict[str, float]:
    """A step of a GPT of 124 million parameters in bf16 (a small one in a rehearsal).

    Args:
        device_name: `cuda` or `cpu`.
        mode: of `torch.compile`, with two layers instead of twelve; None to compile nothing.
    """
    import torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset

    import lockstep
    from benchmarks.gpu.models import GPT

    on_gpu = device_name == "cuda"
    width, layers, heads = (768, 12, 12) if on_gpu else (64, 2, 4)
    if mode is not None:  # compiling twelve layers twice would take all of the stage's time
        layers = 2
    words, length, batch = (50304, 512, 8) if on_gpu else (128, 32, 4)
    with lockstep.init(device=device_name, precision="bf16") as world:
        tokens = torch.randint(0, words, (batch * 4, length))
        plain: Any = GPT(words, length, width, layers, heads).to(world.device)
        prepared: Any = GPT(words, length, width, layers, heads)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=on_gpu)
        optimizer: Any = torch.optim.AdamW(prepared.parameters(), lr=1e-4, fused=on_gpu)
        prepared, optimizer = world.prepare(prepared, optimizer)
        parameters = sum(parameter.numel() for parameter in plain.parameters())
        forward_plain = torch.compile(plain, mode=mode) if mode else plain
        forward_prepared = torch.compile(prepared, mode=mode) if mode else prepared
        batches = endless(world.loader(TensorDataset(tokens), batch))
        x = tokens[:batch].to(world.device)

        def loss_of(logits: Any, inputs: Any) -> Any:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), inputs[:, 1:].flatten())

        def step_of_torch() -> None:
            with torch.autocast(world.device.type, torch.bfloat16):
                logits = forward_plain(x)
            loss_of(logits, x).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()

        def step_of_lockstep() -> None:
            (inputs,) = next(batches)
            world.backward(loss_of(forward_prepared(inputs), inputs))
            optimizer.step()
            optimizer.zero_grad()

        steps = 5 if on_gpu else 1
        contestants = {"torch_us": step_of_torch, "lockstep_us": step_of_lockstep}
        found = medians_of_blocks(contestants, steps, world.device, blocks=7)
        batches.close()
    found["ratio"] = round(found["lockstep_us"] / found["torch_us"], 4)
    found["million_parameters"] = round(parameters / 1e6, 1)
    return found


def prefetch(device_name: str) -> dict[str, float]:
    """Milliseconds a batch of 150 MB takes to come to the device beside some work on it."""
    import torch
    from torch.utils.data import DataLoader

    import lockstep
    from benchmarks.gpu.models import Images, unchanged

    on_gpu = device_name == "cuda"
    batch, pixels = (256, 224) if on_gpu else (16, 32)
    number = 24

    def time_of(batches: Any, move: bool, device: torch.device) -> float:
        layer = torch.nn.Conv2d(3, 64, 7, stride=2, device=device)
        times = []
        last = time.perf_counter()
        for images in batches:
            if move:
                images = images.to(device, non_blocking=True)
            with torch.no_grad():
                for _ in range(2):
                    layer(images)
            times.append((time.perf_counter() - last) * 1e3)
            last = time.perf_counter()
        synchronize(device)
        return statistics.median(times[4:])

    num_workers = 4 if on_gpu else 1
    bytes_of_batch = batch * 3 * pixels * pixels * 4
    num_batches_at_once = 2 * num_workers * PREFETCH_FACTOR  # of both loaders
    if shutil.disk_usage("/dev/shm").free < num_batches_at_once * bytes_of_batch:
        num_workers = 0  # workers pass their batches on through shared memory
    found: dict[str, list[float]] = {"torch_ms": [], "lockstep_ms": []}
    with lockstep.init(device=device_name) as world:
        data = Images(batch, number, pixels)
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": PREFETCH_FACTOR if num_workers else None,
            "collate_fn": unchanged,
            # As in a script; this process itself comes from a fork server.
            "multiprocessing_context": "fork" if num_workers else None,
        }
        plain = DataLoader(data, batch, pin_memory=on_gpu, **options)
        prepared = world.loader(data, batch, sample_rng=False, **options)
        for _ in range(2):
            found["torch_ms"].append(time_of(plain, True, world.device))
            found["lockstep_ms"].append(time_of(prepared, False, world.device))
    best = {name: round(min(times), 2) for name, times in found.items()}
    best["ratio"] = round(best["lockstep_ms"] / best["torch_ms"], 3)
    best["mb_a_batch"] = round(bytes_of_batch / 1e6, 1)
    best["num_workers"] = num_workers
    return best


def memory_over_epochs(device_name: str) -> dict[str, Any]:
    """MiB that torch has reserved on the GPU after some epochs of three batches each."""
    import torch
    from torch.utils.data import TensorDataset

    import lockstep

    on_gpu = device_name == "cuda"
    width = 4096 if on_gpu else 64
    reserved = {}
    with lockstep.init(device=device_name) as world:
        data = TensorDataset(torch.randn(9 * 1024 if on_gpu else 96, width))
        loader = world.loader(data, 3 * 1024 if on_gpu else 32)  # MIB_A_BATCH on a GPU
        for epoch in world.epochs(EPOCHS_FOR_MEMORY):
            for (x,) in loader:
                x.square().mean()
            if on_gpu and epoch + 1 in (1, 2, 5, 10, 20, 40):
                reserved[f"after_{epoch + 1}"] = torch.cuda.memory_reserved() // 2**20
    return reserved


def sync_batchnorm(device_name: str, backend: str, kind: str) -> float:
    """Microseconds of a step of ten convolutions with BatchNorm over two ranks."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import lockstep

    def layers() -> nn.Module:
        torch.manual_seed(0)
        found: list[nn.Module] = []
        for _ in range(10):
            found += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        return nn.Sequential(*found)

    with lockstep.init("ddp", **init_options(device_name, backend)) as world:
        x = torch.randn(16, 32, 28, 28, device=world.device)
        model: Any = layers()
        backward: Any = torch.autograd.backward
        if kind == "torch":
            converted = nn.SyncBatchNorm.convert_sync_batchnorm(model.to(world.device))
            model = DistributedDataParallel(converted, device_ids=[world.device.index])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "lockstep":
            model, optimizer = world.prepare(model, optimizer)
            backward = world.backward

        def step() -> None:
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        steps = 5 if world.device.type == "cuda" else 1
        found = medians_of_blocks({"step_us": step}, steps, world.device, blocks=3)
    return found["step_us"]


def fsdp_step(device_name: str, backend: str, autocast: bool) -> dict[str, float]:
    """A step of a GPT in bf16 on two ranks, by Lockstep and by FSDP2 with the policy of bf16.

    Args:
        device_name: `cuda` or `cpu`.
        backend: over which the ranks talk.
        autocast: of the strategy.
    """
    import gc

    import lockstep
    from lockstep.strategies import FSDP

    strategy = FSDP(autocast=autocast)
    options = init_options(device_name, backend)
    with lockstep.init(strategy, precision="bf16", seed=0, **options) as world:
        found = compare_with_fsdp2(world)
        gc.collect()  # torch's model must be gone before the process group is closed
    return found


def compare_with_fsdp2(world: Any) -> dict[str, float]:
    """Times and memory of a step; see `fsdp_step`.

    Memory is the most that a step takes beside what was there before it, in units of the model's
    parameters in fp32.
    """
    import torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset

    from benchmarks.gpu.models import GPT
    from benchmarks.gpu.nccl import shard_by_torch
    from lockstep import torch_compat

    on_gpu = world.device.type == "cuda"
    width, layers, heads = (512, 8, 8) if on_gpu else (256, 4, 4)
    words, length, batch = (8192, 256, 8) if on_gpu else (512, 32, 4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (batch * 4, length), generator=generator)
    prepared: Any = GPT(words, length, width, layers, heads)
    num_bytes = sum(parameter.nbytes for parameter in prepared.parameters())
    optimizer: Any = torch.optim.AdamW(prepared.parameters(), lr=1e-4)
    prepared, optimizer = world.prepare(prepared, optimizer)
    batches = endless(world.loader(TensorDataset(tokens), batch))
    plain: Any = GPT(words, length, width, layers, heads).to(world.device)
    mesh = shard_by_torch(plain.blocks.layers, plain)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    x = tokens[:batch].chunk(world.size)[world.rank].to(world.device)

    def loss_of(logits: Any, inputs: Any) -> Any:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), inputs[:, 1:].flatten())

    def step_of_torch() -> None:
        loss_of(plain(x), x).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def step_of_lockstep() -> None:
        (inputs,) = next(batches)
        world.backward(loss_of(prepared(inputs), inputs))
        optimizer.step()
        optimizer.zero_grad()

    contestants = {"torch": step_of_torch, "lockstep": step_of_lockstep}
    # Few steps: the ranks on one GPU send hundreds of MB through sockets in each.
    times = medians_of_blocks(contestants, 2, world.device, blocks=3)
    found = {f"{name}_us": time_us for name, time_us in times.items()}
    found["ratio"] = round(times["lockstep"] / times["torch"], 4)
    if on_gpu:
        for name, step in contestants.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            taken = torch.cuda.max_memory_allocated() - before
            found[f"{name}_memory"] = round(taken / num_bytes, 4)
        memory_ratio = found["lockstep_memory"] / found["torch_memory"]
        found["ratio_of_memory"] = round(memory_ratio, 4)
    batches.close()
    torch_compat.drop_fsdp_groups([*plain.blocks.layers, plain], mesh)
    return found


def measure(stage: Stage, name: str, fn: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Runs a measurement in a process of its own and writes what it found."""
    with stage.check(name) as values:
        [found] = on_ranks(fn, 1, stage.device, *arguments, timeout=stage.time_limit(reserve=1))
        values.update(found)


def check_memory_over_epochs(stage: Stage) -> None:
    """Passes over a loader use the memory of earlier passes again."""
    with stage.check("memory reserved over 40 short epochs") as values:
        seconds = stage.time_limit(reserve=1)
        values.update(on_ranks(memory_over_epochs, 1, stage.device, timeout=seconds)[0])
        if not stage.on_gpu:
            raise NotRun("torch counts the memory that it has reserved on a GPU alone")
        grown = values["after_40"] - values["after_5"]
        assert grown <= MIB_A_BATCH, "each pass over a loader keeps memory of its own"


def main() -> None:
    stage = Stage("speed")
    measure(stage, "a step of a small MLP", mlp_step)
    measure(stage, "a step of a GPT in bf16", gpt_step, None)
    measure(stage, "prefetch of large batches", prefetch)
    check_memory_over_epochs(stage)
    for name, autocast in {"fsdp in bf16": False, "fsdp in bf16 under autocast": True}.items():
        with stage.check(f"a step of {name}, two ranks on one device") as values:
            backend = backend_for_several_ranks(stage)
            values["backend"] = backend
            limit = stage.time_limit(reserve=1)
            values.update(on_ranks(fsdp_step, 2, stage.device, backend, autocast, timeout=limit)[0])
    with stage.check("SyncBatchNorm, two ranks on one device") as values:
        backend = backend_for_several_ranks(stage)
        values["backend"] = backend
        values["lockstep_us"] = on_ranks(sync_batchnorm, 2, stage.device, backend, "lockstep")[0]
        if backend != "nccl":
            raise NotRun("torch's SyncBatchNorm takes CUDA tensors alone, here over NCCL")
        values["torch_us"] = on_ranks(sync_batchnorm, 2, stage.device, backend, "torch")[0]
        values["ratio"] = round(values["lockstep_us"] / values["torch_us"], 3)
    for mode in ("default", "reduce-overhead"):
        with stage.check(f"a step of a GPT in bf16, compiled with mode={mode!r}") as values:
            if mode == "reduce-overhead" and not stage.on_gpu:
                raise NotRun("torch makes CUDA graphs on a GPU alone")
            # In this process: what compiles leaves threads behind, which forked ranks may not.
            values.update(gpt_step(stage.device, mode))

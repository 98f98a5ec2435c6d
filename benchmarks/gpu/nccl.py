"""Stage `nccl`: 2 and 4 ranks over NCCL compute what one process computes on the CPU.

Each case trains some steps twice: once on one process on the CPU, and once on ranks that share the
GPU over NCCL. The weights are compared, relative to each tensor's largest element. What depends on
how a batch is divided (compressed gradients) is compared with equally many ranks over Gloo.

With virtual ranks, the bits of the weights are compared with those of one process on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.commands import pool_of_checks
from benchmarks.gpu.one_gpu import backend_for_several_ranks, init_options, on_ranks
from benchmarks.gpu.results import NotRun, Stage

BATCH = 16
EPOCHS = 2
MAX_NORM = 0.05
"""Smaller than the gradients are, so that clipping changes the weights."""
TOLERANCE = {"float64": 1e-9, "float32": 2e-4}
"""In float32 a GPU adds in another order, and a few steps of training carry that on."""


@dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        ranks: how many share the GPU.
        strategy: gives the strategy for that many ranks.
        alone: gives the strategy of the process that it is compared with; None: `single`.
        samples: of the data set; a last batch that is not full has fewer samples than ranks or not.
        batch_norm: the model has BatchNorm layers.
        clip: gradients are clipped.
        micro_batch_size: the most samples a rank computes at a time.
        shares: how a batch is divided over the ranks.
        dtypes: in which it is computed.
        same_ranks: it is compared with as many ranks over Gloo, not with one process.
        tolerance: in place of the dtype's.
    """

    ranks: int
    strategy: Callable[[], Any]
    alone: Callable[[], Any] | None = None
    samples: int = 44
    batch_norm: bool = False
    clip: bool = False
    micro_batch_size: int | None = None
    shares: str | None = None
    dtypes: tuple[str, ...] = ("float64", "float32")
    same_ranks: bool = False
    tolerance: float | None = None


def ddp(**options: Any) -> Callable[[], Any]:
    """The strategy of these options, made in the rank."""

    def make() -> Any:
        from lockstep.strategies import DDP

        return DDP(**options)

    return make


def fsdp() -> Any:
    from torch import nn

    from lockstep.strategies import FSDP

    return FSDP(blocks=nn.Linear)


def hsdp() -> Any:
    from torch import nn

    from lockstep.strategies import HSDP

    return HSDP(blocks=nn.Linear, shard_size=2)


def pipeline(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from lockstep.strategies import Pipeline

        return Pipeline(num_micro_batches=2, **options)

    return make


def diloco() -> Any:
    from lockstep.strategies import DiLoCo

    return DiLoCo(replicas=2, every=3)


CASES: dict[str, Case] = {
    "ddp": Case(2, ddp()),
    "fsdp, clipping": Case(2, fsdp, clip=True),
    "pipeline, 1f1b": Case(2, pipeline(split=["2"])),
    "hsdp, 2 x 2": Case(4, hsdp, clip=True),
    "ddp, SyncBatchNorm, uneven parts": Case(2, ddp(), batch_norm=True, samples=45),
    "diloco": Case(2, diloco, alone=diloco),
    "ddp, a rank without samples": Case(2, ddp(), samples=33),
    "ddp, clipping and accumulation": Case(2, ddp(), clip=True, micro_batch_size=4),
    "ddp, gradients as bf16": Case(
        2, ddp(compress="bf16"), dtypes=("float32",), same_ranks=True, tolerance=2e-2
    ),
    "fsdp, a rank without samples": Case(2, fsdp, samples=33),
    "pipeline, interleaved": Case(2, pipeline(split=["2", "4", "6"], interleave=2)),
    "pipeline, 2 x 2": Case(4, pipeline(stages=2, split=["2"])),
    "ddp, 4 ranks": Case(4, ddp()),
    "ddp, uneven shares": Case(2, ddp(), shares="1:3"),
    "ddp, SyncBatchNorm": Case(2, ddp(), batch_norm=True),
    "fsdp": Case(2, fsdp),
}
"""The most valuable first: the time of the stage may not suffice for all."""


def train_in_all_dtypes(
    name: str, device: str, backend: str, alone: bool
) -> dict[str, dict[str, Any]]:
    """By dtype, the weights after the training; in one process, as starting one takes long."""
    found = {}
    for dtype_name in CASES[name].dtypes:
        found[dtype_name] = train(name, dtype_name, device, backend, alone)
    return found


def train(name: str, dtype_name: str, device: str, backend: str, alone: bool) -> dict[str, Any]:
    """The weights after the training, on the CPU, by name."""
    import torch
    from problems import CLASSES, FEATURES, mean_loss, tensors
    from saved import full_state_dict
    from torch import nn

    import lockstep

    case = CASES[name]
    strategy = case.strategy()
    over = init_options(device, backend)
    if alone:
        strategy = case.alone() if case.alone else "single"
        over = {"device": "cpu"}
    dtype = getattr(torch, dtype_name)
    shares = None if alone else case.shares
    with lockstep.init(strategy, seed=5, shares=shares, **over) as world:
        torch.manual_seed(3)
        middle = [nn.BatchNorm1d(16)] if case.batch_norm else [nn.LayerNorm(16)]
        model: Any = nn.Sequential(
            nn.Linear(FEATURES, 16),
            *middle,
            nn.Linear(16, 16),
            nn.GELU(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, CLASSES),
        ).to(dtype)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = world.prepare(model, optimizer)
        data = tensors(case.samples, dtype)
        micro = None if alone else case.micro_batch_size
        loader = world.loader(data, BATCH, shuffle=True, micro_batch_size=micro)
        for _ in world.epochs(EPOCHS):
            for x, y in loader:
                world.backward(mean_loss(model, (x, y)))
                if case.clip:
                    world.clip_grad_norm_(model, MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        found = {}
        for key, value in full_state_dict(model.state_dict()).items():
            if not value.is_meta:
                found[key.removeprefix("module.")] = value.detach().cpu().clone()
        return found


def expected_weights(name: str) -> list[dict[str, dict[str, Any]]]:
    """By rank, what `train_in_all_dtypes` returns on the CPU."""
    case = CASES[name]
    if case.same_ranks:
        return on_ranks(train_in_all_dtypes, case.ranks, name, "cpu", "gloo", False)
    return on_ranks(train_in_all_dtypes, 1, name, "cpu", "gloo", True)


def compare(
    stage: Stage, name: str, backend: str, expected: Callable[[], list[dict[str, dict[str, Any]]]]
) -> None:
    """Checks one case in all of its dtypes.

    Args:
        stage: this stage.
        name: the name of the case.
        backend: over which the ranks on the GPU talk.
        expected: waits for what `expected_weights` returns.
    """
    from problems import difference

    case = CASES[name]
    with stage.check(name) as values:
        values["ranks"] = case.ranks
        values["backend"] = backend
        expected_ranks = expected()
        found_ranks = on_ranks(train_in_all_dtypes, case.ranks, name, stage.device, backend, False)
        problems = []
        for dtype_name in case.dtypes:
            ranks = [rank[dtype_name] for rank in found_ranks]
            found: dict[str, Any] = {}
            for rank in ranks:  # ranks of a pipeline have a part of the model each
                found |= rank
            off_by = difference(expected_ranks[0][dtype_name], found)
            apart = difference_between_ranks(ranks)
            values[f"difference_in_{dtype_name}"] = off_by
            limit = case.tolerance or TOLERANCE[dtype_name]
            if not off_by <= limit:
                problems.append(f"{dtype_name}: differs by {off_by:.3g}, more than {limit}")
            if apart != 0.0:
                problems.append(f"{dtype_name}: ranks hold weights that differ by {apart:.3g}")
        assert not problems, "; ".join(problems)


def difference_between_ranks(ranks: list[dict[str, Any]]) -> float:
    """The largest difference between what two ranks hold under the same name."""
    worst = 0.0
    for rank in ranks[1:]:
        for name in rank.keys() & ranks[0].keys():
            worst = max(worst, float((rank[name] - ranks[0][name]).abs().max()))
    return worst


OVERFLOWING_STEP = 1
LARGE = 1e6
"""By this the loss is multiplied, so that its scaled gradients are more than fp16 can hold."""


def overflow_on_one_rank(device: str, backend: str) -> dict[str, Any]:
    """Trains in fp16, with an overflow on rank 1 alone; tells which steps moved the weights."""
    import torch
    from problems import CLASSES, FEATURES, mean_loss, tensors
    from torch import nn

    import lockstep

    options = init_options(device, backend)
    with lockstep.init(precision="fp16", seed=1, **options) as world:
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        data = tensors(64, torch.float32)
        moved = []
        for number, (x, y) in enumerate(world.loader(data, BATCH)):
            before = [p.detach().clone() for p in model.parameters()]
            loss = mean_loss(model, (x, y))
            if number == OVERFLOWING_STEP and world.rank == 1:
                loss = loss * LARGE
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            pairs = zip(before, model.parameters(), strict=True)
            moved.append(any(bool((a != b).any()) for a, b in pairs))
        weights = [p.detach().cpu().clone() for p in model.parameters()]
        return {"moved": moved, "weights": weights}


def check_overflow(stage: Stage, backend: str) -> None:
    """A step that overflows on one rank is left out on all."""
    import torch

    with stage.check("fp16, an overflow on one rank") as values:
        ranks = on_ranks(overflow_on_one_rank, 2, stage.device, backend)
        values["backend"] = backend
        values["steps_that_moved_the_weights"] = [rank["moved"] for rank in ranks]
        assert ranks[0]["moved"] == ranks[1]["moved"], "the ranks left out other steps"
        left_out = [number for number, moved in enumerate(ranks[0]["moved"]) if not moved]
        assert left_out == [OVERFLOWING_STEP], f"steps left out: {left_out}"
        for mine, theirs in zip(ranks[0]["weights"], ranks[1]["weights"], strict=True):
            assert torch.equal(mine, theirs), "the ranks hold different weights"
            assert bool(torch.isfinite(mine).all())


TIMEOUT_S = 77.0


def timeouts_of_two_runs(device: str, backend: str) -> list[float]:
    """Two runs of one process under `hsdp`; the timeouts of all groups that the second one has."""
    import gc

    timeouts: set[float] = set()
    for _ in range(2):
        with lockstep_init(hsdp(), device, backend) as world:
            timeouts = train_and_list_timeouts(world)
            gc.collect()  # the model's groups must be gone before the run's is closed
    return sorted(timeouts)


def lockstep_init(strategy: Any, device: str, backend: str) -> Any:
    """Joins a run with a timeout of its own."""
    import lockstep

    return lockstep.init(strategy, collective_timeout=TIMEOUT_S, **init_options(device, backend))


def train_and_list_timeouts(world: Any) -> set[float]:
    """One step of a small model; the timeouts in seconds of every backend of every group."""
    import torch
    import torch.distributed as dist
    from torch import nn

    model: Any = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = world.prepare(model)
    world.backward(model(torch.ones(4, 8, device=world.device)).sum())
    timeouts = set()
    for group in dist.distributed_c10d._world.pg_names:
        for device_type in {"cpu", world.device.type}:
            options = group._get_backend(torch.device(device_type)).options
            timeouts.add(options._timeout.total_seconds())
    return timeouts


def check_timeouts(stage: Stage, backend: str) -> None:
    """Every group has the timeout of the run, also in a process's second run."""
    with stage.check("collective_timeout of all groups, in a second run under hsdp") as values:
        ranks = on_ranks(timeouts_of_two_runs, 4, stage.device, backend)
        values["backend"] = backend
        values["timeouts_s"] = ranks
        assert all(timeouts == [TIMEOUT_S] for timeouts in ranks), ranks


VIRTUAL_RANKS = 4
SIZES_WITH_VIRTUAL_RANKS = (2, 3)
"""Of 3 ranks, not every one computes a complete subtree of the sum: they send partial sums."""


def bits_of_virtual_ranks(device: str, backend: str) -> dict[str, str]:
    """A hash of the weights, by strategy and precision; in one process, as starting one is slow."""
    import gc
    import os

    found = {}
    strategies = ["ddp", "fsdp"]
    if os.environ["WORLD_SIZE"] == "1":
        strategies = ["single"]
    for strategy in strategies:
        for precision in ("fp32", "bf16"):
            key = f"{strategy}, {precision}"
            found[key] = hash_of_weights(device, backend, strategy, precision)
            gc.collect()  # the model's groups must be gone before the next run's are opened
    return found


def hash_of_weights(device: str, backend: str, strategy: str, precision: str) -> str:
    """Trains with virtual ranks, BatchNorm, dropout and clipping."""
    import hashlib

    import torch
    from problems import CLASSES, FEATURES, mean_loss, tensors
    from saved import full_state_dict
    from torch import nn

    import lockstep

    options = init_options(device, backend)
    options |= {"precision": precision, "virtual_ranks": VIRTUAL_RANKS, "seed": 5}
    with lockstep.init(strategy, **options) as world:
        torch.manual_seed(3)
        model: Any = nn.Sequential(
            nn.Linear(FEATURES, 64),
            nn.BatchNorm1d(64),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(64, CLASSES),
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = world.prepare(model, optimizer)
        data = tensors(44, torch.float32)
        for _ in world.epochs(EPOCHS):
            for x, y in world.loader(data, BATCH, shuffle=True):
                world.backward(mean_loss(model, (x, y)))
                world.clip_grad_norm_(model, MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        digest = hashlib.sha256()
        for name, value in sorted(full_state_dict(model.state_dict()).items()):
            digest.update(name.removeprefix("module.").encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def check_virtual_ranks(stage: Stage, backend: str) -> None:
    """Sums over virtual ranks have the bits of one process on the same device."""
    hashes_of_one: dict[str, str] = {}
    with stage.check("virtual ranks, one process") as values:
        [hashes_of_one] = on_ranks(bits_of_virtual_ranks, 1, stage.device, backend)
        values["hashes"] = hashes_of_one
    for size in SIZES_WITH_VIRTUAL_RANKS:
        with stage.check(f"virtual ranks, {size} ranks: the bits of one process") as values:
            if not hashes_of_one:
                raise NotRun("the run on one process failed")
            ranks = on_ranks(bits_of_virtual_ranks, size, stage.device, backend)
            values["backend"] = backend
            values["hashes"] = ranks[0]
            for hashes in ranks:
                for strategy_and_precision, found in hashes.items():
                    _, precision = strategy_and_precision.split(", ")
                    assert found == hashes_of_one[f"single, {precision}"], strategy_and_precision


LARGE_LAYERS = 8


def peak_memory_of_fsdp(device: str, backend: str, kind: str, width: int) -> dict[str, float]:
    """The most that a rank allocates in a step of bf16, in units of one layer in fp32.

    Args:
        device: `cuda` or `cpu`.
        backend: over which the ranks talk.
        kind: `lockstep`, or `fsdp2` for torch's own with its mixed precision policy.
        width: of the layers.
    """
    import gc

    from torch import nn

    import lockstep
    from lockstep.strategies import FSDP

    options = init_options(device, backend)
    if kind == "lockstep":
        options |= {"strategy": FSDP(blocks=nn.Linear), "precision": "bf16"}
    with lockstep.init(**options) as world:
        found = train_large_layers(world, kind, width)
        gc.collect()  # the model's groups must be gone before the run's is closed
    return found


def train_large_layers(world: Any, kind: str, width: int) -> dict[str, float]:
    """Some steps of the model; see `peak_memory_of_fsdp`."""
    import torch
    from torch import nn

    from lockstep import torch_compat

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LARGE_LAYERS)))
    step: Any = torch.autograd.backward
    if kind == "fsdp2":
        model = model.to(world.device)
        mesh = shard_by_torch(model, model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    if kind == "lockstep":
        model, optimizer = world.prepare(model, optimizer)
        step = world.backward
    on_gpu = world.device.type == "cuda"
    unit = width * width * 4
    found = {}
    x = torch.randn(8, width, device=world.device)
    for _ in range(3):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        loss = model(x).float().square().mean()
        if on_gpu:
            found["after_forward"] = round(torch.cuda.memory_allocated() / unit, 3)
        step(loss)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            found["peak"] = round(torch.cuda.max_memory_allocated() / unit, 3)
    if kind == "fsdp2":
        torch_compat.drop_fsdp_groups([*model, model], mesh)
    return found


def shard_by_torch(layers: Any, model: Any) -> Any:
    """Shards a model by FSDP2, with parameters gathered as bf16 and gradients reduced in fp32.

    Args:
        layers: the submodules that are gathered as units.
        model: the model, on its device.

    Returns:
        The mesh.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device_type = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(dist.group.WORLD, device_type)  # it opens no group of its own
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return mesh


def check_peak_memory(stage: Stage, backend: str) -> None:
    """How much an FSDP rank holds in bf16, beside torch's own FSDP2."""
    width = 4096 if stage.on_gpu else 256
    peaks = {}
    for kind in ("fsdp2", "lockstep"):
        with stage.check(f"peak memory in bf16 of 8 layers, {kind}") as values:
            [found, _] = on_ranks(peak_memory_of_fsdp, 2, stage.device, backend, kind, width)
            values["backend"] = backend
            values["shards_of_a_rank_in_layers"] = LARGE_LAYERS / 2
            if not found:
                raise NotRun("the memory of a step is measured on a GPU alone")
            values["in_layers_of_fp32"] = found
            peaks[kind] = found["peak"]
            if len(peaks) == 2:
                values["ratio"] = round(peaks["lockstep"] / peaks["fsdp2"], 4)


def main() -> None:
    stage = Stage("nccl")
    backend = backend_for_several_ranks(stage)
    # What is expected is computed on the CPU meanwhile. The ranks on the GPU run one case after the
    # other: side by side, the GPU would turn to all of their processes in every collective.
    with pool_of_checks() as pool:
        expected = {name: pool.submit(expected_weights, name) for name in CASES}
        for name, future in expected.items():
            compare(stage, name, backend, future.result)
    check_peak_memory(stage, backend)
    check_virtual_ranks(stage, backend)
    check_overflow(stage, backend)
    check_timeouts(stage, backend)

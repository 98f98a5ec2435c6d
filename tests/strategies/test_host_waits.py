"""No step waits for the GPU: each place of Lockstep's that would is listed here, with its reason.

The GPU is made up (`made_up_gpu`). The stage `syncs` of `benchmarks/gpu` counts on a real one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_up_gpu import MadeUpGpu, make_up_gpu
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.run.start.step_memory import StepMemory
from lockstep.strategies import DDP, FSDP
from lockstep.torch_compat import to_local

pytestmark = pytest.mark.ranks

WARM_UP_STEPS = 10
"""Ranks compare parameters and buffers in steps 1, 2, 3 and 10, and then seldom."""
COUNTED_STEPS = 4
BATCH = 12

SCALER = {"optim/precision.py step": COUNTED_STEPS}
"""The step of a scaled gradient is left out if it overflowed, which the host has to know."""
ALLOCATED_FOR_TORCH = {"torch_compat/tensors.py copy_to_each": 3}
"""No wait on a GPU: torch has Lockstep allocate a unit's gradient on a device that it was told is
the CPU, and the made-up GPU cannot tell. Once for each virtual rank of a process."""
DEVICE_CHECK = {
    "extensions/device_check/check.py as_numbers": 2 * COUNTED_STEPS,
    "strategies/bit_sums.py _on_first_device": COUNTED_STEPS,
}
"""The user has asked for bits to be compared in every second step: of gradients, and of the state,
part of which optimizers keep in host memory."""
NO_SAMPLES = {
    "extensions/checks/loss.py after_backward": 1,
    "extensions/checks/loss.py <genexpr>": 1,
}
"""Of a rank without samples, once in an epoch: whether its loss is NaN, and has made gradients NaN,
has to be known before the optimizer steps."""


@dataclass(frozen=True)
class Case:
    """A training, and what it may wait for."""

    strategy: Any
    loop: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    """Settings whose value is a folder."""
    allowed: dict[str, int] = field(default_factory=dict)
    """How often each place may wait in the counted steps."""


KEPT_STEP = {"checkpoint/background_copy.py run": COUNTED_STEPS}
"""The thread that copies a step to host memory waits for its copies. The training thread computes
the next gradients meanwhile."""
ON_ONE_PROCESS = [
    Case("single"),
    Case("single", "log", {"precision": "bf16"}, files=["report", "journal"]),
    Case("single", "clip", {"precision": "fp16"}, allowed=SCALER),
    Case("single", "batchnorm", {"micro_batch_size": 3}),
    Case("dp", "batchnorm"),
    Case("single", "kept", allowed=KEPT_STEP),
]
ON_SEVERAL = [
    Case("ddp", "log", files=["report", "journal"]),
    Case("ddp", "batchnorm", {"precision": "bf16"}),
    Case("ddp", "clip", {"precision": "fp16", "micro_batch_size": 4}, allowed=SCALER),
    Case("ddp", "last of one", allowed=NO_SAMPLES),
    Case("fsdp", "clip", {"precision": "bf16", "micro_batch_size": 4}),
    Case("fsdp", "scalar"),
    Case(DDP(find_unused_parameters=True), "unused"),
    Case(FSDP(find_unused_parameters=True), "unused"),
    Case(DDP(compress="powersgd", powersgd_start=1)),
]
MORE_ON_SEVERAL = [
    Case("ddp", "clip", {"virtual_ranks": 6}, files=["journal"]),
    Case("ddp", options={"virtual_ranks": 6, "check_devices": 2}, allowed=DEVICE_CHECK),
    Case("fsdp", "log", files=["report", "journal"]),
    Case("fsdp", "clip", {"precision": "fp16"}, allowed=SCALER),
    Case("fsdp", "clip", {"virtual_ranks": 6}, files=["journal"], allowed=ALLOCATED_FOR_TORCH),
    Case("pipeline", "clip"),
    Case(DDP(compress="bf16"), options={"micro_batch_size": 4}),
    Case("fsdp", "scalar", {"precision": "fp16", "micro_batch_size": 4}, allowed=SCALER),
]
ON_TWO = [Case("hsdp", "clip", {"precision": "bf16"}), Case("diloco")]


class Scaled(nn.Module):
    """Multiplies by a parameter without dimensions, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Any) -> Any:
        return x * self.scale


class UsesHalf(nn.Module):
    """Has two layers, of which no forward pass uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.used(x)


def train(case: Case, gpu: MadeUpGpu, folder: Path) -> dict[str, int]:
    """Returns how often each place has waited for the GPU in the counted steps."""
    options: dict[str, Any] = {**case.options, "strategy": case.strategy}
    for name in case.files:
        options[name] = str(folder / name)
    memory = StepMemory(1, keeps_every_step=True)
    if case.loop == "kept":
        os.environ.update(memory.variables)
    gpu.begin()
    with lockstep.init(device="cuda", backend="gloo", seed=0, **options) as world:
        torch.manual_seed(0)
        middle: list[nn.Module] = []
        if case.loop == "batchnorm":
            momentum = None if world.size > 1 else 0.1  # with None torch's own BatchNorm waits
            middle = [nn.BatchNorm1d(16, momentum=momentum)]
        elif case.loop in ("scalar", "unused"):
            middle = [Scaled() if case.loop == "scalar" else UsesHalf()]
        layers = [nn.Linear(8, 16), *middle, nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4)]
        model: Any = nn.Sequential(*layers)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        samples = BATCH * (WARM_UP_STEPS + COUNTED_STEPS)
        if case.loop == "last of one":
            samples += 1
        data = TensorDataset(torch.randn(samples, 8), torch.randint(0, 4, (samples,)))
        loader: Any = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        if case.loop == "kept":
            kept = world.checkpoint(folder / "kept", model=model, optimizer=optimizer, memory=True)
            kept.resume()
        found: dict[str, int] = {}
        for x, y in world.progress(loader) if case.loop == "log" else loader:
            if world.step == WARM_UP_STEPS and gpu.num_steps < WARM_UP_STEPS:
                gpu.waits.clear()
            gpu.num_steps = world.step
            loss = F.cross_entropy(model(x), y)
            world.backward(loss)
            if case.loop in ("clip", "scalar"):
                world.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if case.loop == "log":
                world.log(loss=loss)
            found = dict(gpu.waits)  # without what the end of the pass waits for
        assert x.is_cuda
        assert world.step >= WARM_UP_STEPS + COUNTED_STEPS
    return found


def train_all(cases: Sequence[Case], folder: str) -> list[dict[str, int]]:
    gpu = make_up_gpu(setattr)
    with gpu:
        return [train(case, gpu, Path(folder) / str(n)) for n, case in enumerate(cases)]


def check(cases: Sequence[Case], size: int, folder: Path) -> None:
    for found_of_cases in run_ranks(train_all, size, cases, str(folder)):
        for case, found in zip(cases, found_of_cases, strict=True):
            not_allowed = {place: n for place, n in found.items() if n > case.allowed.get(place, 0)}
            assert not_allowed == {}, case


def test_a_step_of_one_process_waits_for_nothing(tmp_path: Path) -> None:
    check(ON_ONE_PROCESS, 1, tmp_path)


def test_a_step_of_two_ranks_waits_for_nothing(tmp_path: Path) -> None:
    check(ON_SEVERAL, 2, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cases", "size"),
    [(MORE_ON_SEVERAL, 2), (ON_TWO, 2), ([*ON_SEVERAL, *MORE_ON_SEVERAL], 3)],
)
def test_a_step_of_more_trainings_waits_for_nothing(
    cases: Sequence[Case], size: int, tmp_path: Path
) -> None:
    check(cases, size, tmp_path)


def seen_by_the_made_up_gpu() -> list[str]:
    """For each call, what it was noted as; a call that need not wait is not noted."""
    gpu = make_up_gpu(setattr)
    found = []
    with gpu:
        x = torch.ones(4, device="cuda")
        host = torch.ones(4)
        event = torch.cuda.Event()
        waits: list[Callable[[], Any]] = [
            *(lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.cpu(), lambda: x.tolist()),
            *(lambda: torch.equal(x, x), lambda: x.nonzero(), lambda: x[x > 0], lambda: x[[0]]),
            *(lambda: torch.tensor(1.0, device="cuda"), lambda: host.to("cuda")),
            *(lambda: x.to("cpu"), lambda: host.copy_(x), event.synchronize),
        ]
        goes_on: list[Callable[[], Any]] = [
            *(lambda: host.sum().item(), lambda: x.float() + 1, lambda: x[host.shape[0] - 1]),
            *(lambda: torch.full((), 1.0, device="cuda"), lambda: host.copy_(x, non_blocking=True)),
            lambda: host.to("cuda", non_blocking=True),
        ]
        for call in (*waits, *goes_on):
            gpu.begin()
            call()
            found.append("waits" if gpu.waits else "goes on")
        assert x.device.type == "cuda"
        assert not host.is_cuda
    return found


def test_the_made_up_gpu_sees_what_waits():
    assert run_ranks(seen_by_the_made_up_gpu, 1) == [["waits"] * 13 + ["goes on"] * 6]


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))  # cannot be sharded
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Any) -> Any:
        return x @ self.weight * self.scale + self.shift


def on_gpu_with_offload(build: str) -> dict[str, bool]:
    """Which tensors of a model with offloaded shards are on the GPU."""
    gpu = make_up_gpu(setattr)
    strategy = FSDP(cpu_offload=True)
    with gpu, lockstep.init(strategy, device="cuda", backend="gloo", seed=0) as world:
        with lockstep.deferred_init() if build == "deferred" else nullcontext():
            model: Any = WithScalar()
        model = world.prepare(model)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: gpu.is_on_gpu(to_local(tensor)) for name, tensor in named.items()}


@pytest.mark.parametrize("build", ["on the CPU", "deferred"])
def test_offloading_leaves_what_is_not_sharded_on_the_gpu(build: str) -> None:
    expected = {"weight": False, "scale": True, "shift": True}
    assert run_ranks(on_gpu_with_offload, 2, build) == [expected] * 2


def refused_in_a_graph() -> str:
    with make_up_gpu(setattr), lockstep.init("single", device="cuda") as world:
        model: Any = nn.Linear(8, 4)
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(2, 8, device="cuda")).mean()
        torch.cuda.is_current_stream_capturing = lambda: True
        with pytest.raises(UsageError) as error:
            world.backward(loss)
        assert optimizer is not None
        return str(error.value)


def test_a_cuda_graph_of_a_whole_step_is_refused():
    [said] = run_ranks(refused_in_a_graph, 1)
    assert "while a CUDA graph is captured" in said

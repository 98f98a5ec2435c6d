"""Profiling runs: what they find, and that they leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import UsageError
from lockstep.extensions.profiling import ForwardCall, ProfilingRun, record_calls
from lockstep.strategies.sync_batchnorm import SyncBatchNorm

pytestmark = pytest.mark.unit


@dataclass
class Output:
    logits: Tensor
    name: str = "x"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = SyncBatchNorm(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.sizes: list[int] = []
        self.last: Tensor | None = None
        self.fits = 1000
        self.error = "CUDA out of memory"

    def forward(self, x: Tensor, *, extra: dict[str, Any], mask: Tensor) -> Output:
        self.sizes.append(len(x))
        assert len(extra["y"]) == len(x)
        assert extra["flag"] == "as it is"
        assert mask.shape == (5, 3)
        self.last = x * 2
        if len(x) > self.fits:
            raise RuntimeError(self.error)
        self.count = self.count + 1
        np.random.rand()
        random.random()
        return Output(self.drop(self.norm(self.layer(x))) * extra["y"])


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init(seed=1) as made:
        yield made


def call(model: nn.Module, local: int = 2) -> ForwardCall:
    x = torch.randn(local, 3, requires_grad=True)
    extra = {"y": torch.randn(local, 1), "flag": "as it is"}
    return ForwardCall(model, (x,), {"extra": extra, "mask": torch.ones(5, 3)})


def profiled(world: lockstep.World, *calls: ForwardCall, local: int = 2) -> ProfilingRun:
    return ProfilingRun(world._run, calls, local)


def trained_by(optimizer_class: Any, steps: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    """A model of 16 trained weights, with its optimizer after some steps."""
    model = nn.Linear(3, 4)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "options", "steps", "values_per_weight"),
    [
        (torch.optim.AdamW, {}, 0, 2),
        (torch.optim.AdamW, {}, 1, 0),  # its state is there already
        (torch.optim.SGD, {}, 0, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 0, 1),
        (torch.optim.SGD, {"momentum": 0.9}, 1, 0),
        (torch.optim.Adadelta, {}, 0, 2),
    ],
)
def test_only_state_that_is_not_there_yet_is_reserved(
    world, optimizer_class: Any, options: dict[str, Any], steps: int, values_per_weight: int
) -> None:
    model, optimizer = trained_by(optimizer_class, steps, **options)
    profiling = ProfilingRun(world._run, [ForwardCall(model, (), {})], 2, [optimizer])
    assert profiling._missing_state_bytes(torch.device("cpu")) == 16 * 4 * values_per_weight
    assert profiling._missing_state_bytes(torch.device("cuda", 1)) == 0


def test_memory_is_reserved_on_every_gpu(world, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained_by(torch.optim.AdamW)
    profiling = ProfilingRun(world._run, [ForwardCall(model, (), {})], 2, [optimizer])
    totals = {torch.device("cuda", 0): 1000, torch.device("cuda", 1): 2000}
    profiling._gpus = list(totals)
    reserved: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (0, totals[gpu]))
    monkeypatch.setattr(profiling, "_missing_state_bytes", lambda gpu: 7 if gpu.index == 0 else 0)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: reserved.append((size, device)))
    with profiling._reserve_memory():
        assert reserved == [(57, torch.device("cuda", 0)), (100, torch.device("cuda", 1))]


def state(model: nn.Module) -> list[Any]:
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(p.grad.clone() for p in model.parameters()),
        torch.get_rng_state(),
        torch.as_tensor(np.random.get_state()[1].astype(np.int64)),
        torch.as_tensor(random.getstate()[1]),
    ]


def test_nothing_is_left_behind(world):
    model = Model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seen, buffer = call(model), model.count
    model.last = last = torch.ones(())
    before = state(model)
    tried = profiled(world, seen)
    assert tried.fits(7)
    assert tried.seconds_per_sample(5) > 0
    model.fits = 8
    assert not tried.fits(9)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert model.count is buffer
    assert model.last is last  # also after the pass that did not fit
    assert seen.args[0].grad is None
    assert world._run.collectives.blocked_reason is None
    assert "forward" not in vars(model.norm)
    assert model.sizes[:2] == [7, 5]
    assert model.sizes[-1] == 9
    assert set(model.sizes[1:-1]) == {5}


def test_several_calls_are_alive_together(world):
    """As where two views of a batch are compared."""
    model = Model()
    assert profiled(world, call(model), call(model)).fits(4)
    assert model.sizes == [4, 4]


@pytest.mark.parametrize(
    "text", ["DefaultCPUAllocator: can't allocate memory", "not enough memory"]
)
def test_the_allocator_of_the_cpu_is_known_too(world, text):
    model = Model()
    model.fits, model.error = 3, text
    assert not profiled(world, call(model)).fits(4)


def test_other_errors_are_raised_and_leave_nothing_behind(world):
    model = Model()
    model.fits, model.error = 3, "something else"
    with pytest.raises(RuntimeError, match="something else"):
        profiled(world, call(model)).fits(4)
    assert "forward" not in vars(model.norm)
    assert world._run.collectives.blocked_reason is None
    assert not model.norm.num_batches_tracked


def test_the_backward_pass_counts(world):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            if len(dy) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            assert dy.stride() != (0, 0), "the gradient of a loss is a tensor of its own"
            return dy

    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Backward.apply(super().forward(x))

    late = Late(3, 4)
    tried = profiled(world, ForwardCall(late, (torch.randn(2, 3),), {}))
    assert tried.fits(3)
    assert not tried.fits(4)
    assert late.weight.grad is None


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([], "no forward pass"),
        (
            [ForwardCall(nn.Linear(3, 3), (torch.randn(5, 3),), {})],
            "no tensor among its arguments has 2",
        ),
        ([ForwardCall(nn.Flatten(), (torch.randn(2, 3),), {})], "no tensor with a gradient"),
    ],
)
def test_what_cannot_be_tried(world, calls, said):
    with pytest.raises(UsageError, match=said):
        profiled(world, *calls).fits(4)


def test_calls_with_gradients_are_seen_until_closed():
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with record_calls([model]) as calls:
        model(x)
        with torch.no_grad():
            model(x)
        model(input=x)
    model(x)
    assert [(c.args, c.kwargs) for c in calls] == [((x,), {}), ((), {"input": x})]
    assert not model._forward_pre_hooks


OUTPUTS: dict[str, Any] = {
    "a loss": lambda x: x.mean(),
    "complex numbers": lambda x: torch.complex(x, x),
    "numbers beside": lambda x: {"a": [x, 3], "b": None},
    "one number a sample": lambda x: x.sum(-1),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_all_kinds(world, kind):
    class Some(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return OUTPUTS[kind](super().forward(x))

    assert profiled(world, ForwardCall(Some(3, 4), (torch.randn(2, 3),), {})).fits(6)


class Wide(nn.Module):
    """Keeps a 64th of the GPU's memory for each sample."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(memory // (64 * 8 * 4)))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        for _ in range(8):
            h = h.sigmoid()
        return h.mean(1, keepdim=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_a_gpu() -> None:
    with lockstep.init(micro_batch_size="auto") as world:
        model = Wide(torch.cuda.mem_get_info()[1])
        model, optimizer = world.prepare(model, torch.optim.Adam(model.parameters()))
        loader = world.loader(torch.utils.data.TensorDataset(torch.randn(256, 1)), 128)
        for (x,) in loader:
            world.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert 2 < loader.micro_batches <= 6
    torch.cuda.empty_cache()

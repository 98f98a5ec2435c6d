"""The state of an optimizer comes back in the dtypes that it was saved in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from saved import full_state_dict
from test_session import checkpoint_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep.strategies import DiLoCo

pytestmark = pytest.mark.ranks

BF16, FP32 = torch.bfloat16, torch.float32


class Momentum(torch.optim.Optimizer):
    """SGD with momentum and a copy of the weights, both in a dtype of the optimizer's own."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=self.dtype)
                    state["weights"] = p.detach().to(self.dtype, copy=True)
                state["momentum"].mul_(0.9).add_(p.grad.to(self.dtype))
                state["weights"].sub_(group["lr"] * state["momentum"])
                p.copy_(state["weights"])


class Setup:
    def __init__(
        self, world: lockstep.World, folder: Path, dtypes: tuple[torch.dtype, ...]
    ) -> None:
        self.dtype = dtypes[0]
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(self.dtype)
        optimizer = Momentum(model.parameters(), dtypes[1])
        self.world = world
        self.model, self.optimizer = world.prepare(model, optimizer)
        x = torch.linspace(-1, 1, 90).view(18, 5).to(self.dtype)
        self.loader = world.loader(TensorDataset(x), 6)
        self.checkpoint = world.checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def train(self) -> None:
        for (x,) in self.loader:
            self.world.backward(self.model(x).float().square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> list[dict[str, Tensor]]:
        entries = self.optimizer.state_dict()["state"].values()
        whole = [full_state_dict(entry) for entry in entries]
        return [{key: value.clone() for key, value in entry.items()} for entry in whole]


def save(folder: Path, strategy: Any, dtypes: tuple[torch.dtype, ...]) -> list[dict[str, Tensor]]:
    with lockstep.init(strategy, device="cpu") as world:
        run = Setup(world, folder, dtypes)
        run.train()
        run.checkpoint.save()
        return run.state()


def resume(folder: Path, strategy: Any, dtypes: tuple[torch.dtype, ...]) -> list[dict[str, Tensor]]:
    with lockstep.init(strategy, device="cpu") as world:
        run = Setup(world, folder, dtypes)
        assert run.checkpoint.resume()
        for entry in run.optimizer.state.values():
            for value in entry.values():
                assert isinstance(value, DTensor) is (strategy in ("fsdp", "hsdp"))
        found = run.state()
        run.train()
        return found


def check_equal(saved: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> None:
    for before, after in zip(saved, found, strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert after[key].dtype == value.dtype, key
            assert torch.equal(after[key], value), key


def save_and_resume(folder: Path, strategy: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check_equal(save(folder, strategy, dtypes), resume(folder, strategy, dtypes))


def test_states_in_another_dtype_than_the_parameters_are_kept(tmp_path: Path) -> None:
    run_ranks(save_and_resume, 2, tmp_path, "fsdp", (BF16, FP32))


@pytest.mark.thorough
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16)])
@pytest.mark.parametrize(
    ("before", "after", "sizes"),
    [
        ("single", "single", (1, 1)),
        ("single", "fsdp", (1, 3)),
        ("ddp", "ddp", (2, 2)),
        ("ddp", "hsdp", (3, 2)),
        ("fsdp", "ddp", (2, 3)),
        ("fsdp", "fsdp", (2, 2)),
        (DiLoCo(replicas=2, every=3), DiLoCo(replicas=2, every=3), (2, 1)),
        (DiLoCo(replicas=2, every=2), DiLoCo(replicas=2, every=2), (1, 2)),
    ],
)
def test_dtypes_of_optimizer_states_are_kept_across_strategies(
    tmp_path: Path, before: Any, after: Any, sizes: tuple[int, int], dtypes: Any
) -> None:
    saved = run_ranks(save, sizes[0], tmp_path, before, dtypes)
    for found in run_ranks(resume, sizes[1], tmp_path, after, dtypes):
        if isinstance(before, str):
            check_equal(saved[0], found)
        else:  # each rank shows the state of the first of its own replicas
            for entry in found:
                assert all(value.dtype == dtypes[1] for value in entry.values())


class Odd(torch.optim.Optimizer):
    """Its state has all that a checkpoint can hold."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "name": "odd"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.tensor(7.0),
                    "codes": torch.arange(p.numel(), dtype=torch.uint8).view_as(p),
                    "scales": {"blocks": [torch.ones(2, dtype=torch.float64)], "kind": "int8"},
                    "count": torch.tensor(2**40 + 1),
                    "seen": torch.tensor([True, False]),
                    "half": torch.full_like(p, 0.1, dtype=torch.float16),
                    "eighth": torch.full_like(p, 0.1).to(torch.float8_e4m3fn),
                    "phase": torch.full_like(p, 1 + 2j, dtype=torch.complex64),
                    "label": "a text",
                    "history": np.arange(3),
                    "pair": (torch.tensor([3], dtype=torch.int32), 4, None),
                }
        self.state["all"] = {"total": torch.tensor(3, dtype=torch.int16)}  # type: ignore[index]


def alike(one: Any, other: Any) -> bool:
    """Whether two states have the same values in the same types and dtypes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    return bool(one == other)


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_in_an_optimizer_state_is_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    optimizer = Odd(model.parameters())
    optimizer.step()
    checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).save()
    other = nn.Linear(3, 2).to(dtype)
    resumed = Odd(other.parameters())
    assert checkpoint_of(tmp_path, {"model": other, "optimizer": resumed}).resume()
    assert alike(resumed.state_dict(), optimizer.state_dict())


def test_a_state_in_the_dtype_of_its_parameter_follows_the_parameter(tmp_path: Path) -> None:
    """The model is resumed in another dtype, in which Adam needs its state."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2).to(torch.bfloat16)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        checkpoint = checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer})
        checkpoint.resume()
        model(torch.ones(1, 3, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
        checkpoint.save()
    for entry in optimizers[1].state.values():
        assert entry["exp_avg"].dtype == torch.bfloat16
        assert entry["step"].dtype == torch.float32

"""The state of an optimizer comes back in the dtypes that it was saved in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from saved import full_state_dict
from test_checkpointer import checkpoint_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import layout
from lockstep.checkpoint.checksums import seal_manifest
from lockstep.errors import CheckpointError
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


class Layers(nn.Module):
    """Layers of the same shapes, which are defined in this order. "c" and "d" are one layer."""

    def __init__(self, order: str = "abcd") -> None:
        super().__init__()
        tied = nn.Linear(3, 3, bias=False)
        for name in order:
            setattr(self, name, tied if name in "cd" else nn.Linear(3, 3))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter another gradient, and makes a step."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in parameters}


def test_each_parameter_gets_its_own_state_in_any_order(tmp_path: Path) -> None:
    """The order of the layers, that given to the optimizer, parameters that nothing names."""
    model = Layers()
    temperatures = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.Adam([*model.named_parameters(), *zip("xy", temperatures, strict=True)])
    for number, temperature in enumerate(temperatures):
        temperature.grad = torch.full_like(temperature, number + 1.0)
    make_step(model, optimizer)
    checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).save()
    expected = state_by_name(model, optimizer)

    other = Layers("dbac")
    other_temperatures = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    parameters = [("x", other_temperatures[0]), *list(other.named_parameters())[::-1]]
    resumed = torch.optim.Adam([*parameters, ("y", other_temperatures[1])])
    assert checkpoint_of(tmp_path, {"model": other, "optimizer": resumed}).resume()
    check_equal([expected], [state_by_name(other, resumed)])
    for number, temperature in enumerate(other_temperatures):
        assert torch.all(resumed.state[temperature]["exp_avg"] == 0.1 * (number + 1))
    names = ["x", "a.bias", "a.weight", "b.bias", "b.weight", "c.weight", "y"]
    assert resumed.param_groups[0]["param_names"] == names


def parameters_that_do_not_fit(model: Layers) -> dict[str, Any]:
    """What an optimizer is given, by what the error must say."""
    all_of_them = list(model.parameters())
    return {
        "parameter groups was 1 in the checkpoint, and is 2 now": [
            {"params": all_of_them[:2]},
            {"params": all_of_them[2:]},
        ],
        r"in the checkpoint alone model.a.bias; in this run alone none": [
            parameter for parameter in all_of_them if parameter is not model.a.bias
        ],
        "was 5 in the checkpoint, and is 6 now": [*all_of_them, nn.Parameter(torch.zeros(1))],
    }


def test_an_optimizer_of_other_parameters_or_another_class_is_refused(tmp_path: Path) -> None:
    """Nothing is changed before."""
    model = Layers()
    optimizer = torch.optim.Adam(model.parameters())
    make_step(model, optimizer)
    path = checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).save()
    assert path is not None

    def refused(found: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        checkpoint = checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer})
        with pytest.raises(CheckpointError, match=found) as caught:
            checkpoint.resume()
        assert caught.value.was_set == f"resuming optimizer from {path}"
        check_equal([before], [model.state_dict()])
        assert not optimizer.state

    for found in parameters_that_do_not_fit(Layers()):
        other = Layers()
        refused(found, other, torch.optim.Adam(parameters_that_do_not_fit(other)[found]))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adamax, lockstep.optim.LAMB):
        other = Layers()
        found = f"saved from the optimizer Adam, and this run has {kind.__name__}"
        refused(found, other, kind(other.parameters(), lr=0.1))


def test_a_parameter_without_a_name_is_refused_the_state_of_another_shape(tmp_path: Path) -> None:
    """Such parameters are in no module that is saved, and are matched in their order."""
    model = nn.Linear(3, 2)
    temperatures = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adam([*model.parameters(), *temperatures])
    for parameter in [*model.parameters(), *temperatures]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).save()

    resumed = torch.optim.Adam([*model.parameters(), *reversed(temperatures)])
    with pytest.raises(CheckpointError, match=r"shape \[2\], and the parameter has \[3\]"):
        checkpoint_of(tmp_path, {"model": model, "optimizer": resumed}).resume()
    assert not resumed.state


def test_a_state_that_depends_on_the_order_is_refused_in_another(tmp_path: Path) -> None:
    """LBFGS keeps all parameters in one vector."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).save()
    assert checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).resume()
    optimizer = torch.optim.LBFGS([model.bias, model.weight])
    with pytest.raises(CheckpointError, match="its parameters in another order"):
        checkpoint_of(tmp_path, {"model": model, "optimizer": optimizer}).resume()


def test_a_manifest_with_damaged_optimizers_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    path = checkpoint_of(tmp_path, state).save()
    assert path is not None
    manifest = layout.read_manifest(path)
    sound = json.loads(json.dumps(manifest["optimizers"]))
    assert sound == {"optimizer": {"class": "SGD", "parameters": [["model.weight", "model.bias"]]}}
    for damaged in (
        None,
        3,
        {"optimizer": 3},
        {"optimizer": {"class": "SGD"}},
        {"optimizer": {"class": 3, "parameters": []}},
        {"optimizer": {"class": "SGD", "parameters": [3]}},
        {"optimizer": {"class": "SGD", "parameters": [[3]]}},
    ):
        manifest["optimizers"] = damaged
        (path / layout.MANIFEST).write_bytes(seal_manifest(manifest))
        with pytest.raises(CheckpointError, match="about its optimizers is damaged"):
            layout.read_manifest(path)


def test_a_manifest_with_virtual_ranks_says_where_batchnorm_took_its_statistics(
    tmp_path: Path,
) -> None:
    path = checkpoint_of(tmp_path, {"model": nn.Linear(3, 2)}).save()
    assert path is not None
    manifest = layout.read_manifest(path)
    manifest["virtual_ranks"] = 2
    (path / layout.MANIFEST).write_bytes(seal_manifest(manifest))
    with pytest.raises(CheckpointError, match="does not say where BatchNorm took its statistics"):
        layout.read_manifest(path)


def save_replicas(folder: Path) -> None:
    with lockstep.init(DiLoCo(replicas=2, every=2), device="cpu") as world:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model, optimizer = world.prepare(model, torch.optim.Adam(model.parameters()))
        world.checkpoint(folder, model=model, optimizer=optimizer).save()


def resume_replicas(folder: Path) -> None:
    """The layers, or the parameters of the optimizer, are in another order."""
    for layers_differ in (True, False):
        with lockstep.init(DiLoCo(replicas=2, every=2), device="cpu") as world:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            if layers_differ:
                first = model._modules.pop("0")
                model._modules["0"] = first
            order = 1 if layers_differ else -1
            optimizer = torch.optim.Adam(list(model.parameters())[::order])
            model, optimizer = world.prepare(model, optimizer)
            checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer)
            found = (
                "its layers in another order" if layers_differ else "parameters in another order"
            )
            with pytest.raises(CheckpointError, match=found):
                checkpoint.resume()


@pytest.mark.thorough
def test_replicas_are_refused_in_another_order(tmp_path: Path) -> None:
    run_ranks(save_replicas, 2, tmp_path)
    run_ranks(resume_replicas, 2, tmp_path)

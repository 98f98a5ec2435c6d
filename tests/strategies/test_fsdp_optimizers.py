"""Optimizers and averaged models over shards: they compute what one device does, or say why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lockstep
from lockstep.errors import UsageError
from lockstep.strategies import HSDP

pytestmark = pytest.mark.ranks


def whole(module: torch.nn.Module) -> dict[str, Tensor]:
    state = module.state_dict().items()
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in state}


def train(strategy: Any, make: Any, averaged: dict[str, Any] | None = None) -> Any:
    """The weights, or those of an averaged model; or what is said."""
    try:
        with lockstep.init(strategy, seed=1) as world:
            model = mlp(batch_norm=averaged is not None)
            copy = None if averaged is None else AveragedModel(model, **averaged)
            optimizer = make(model.parameters())
            model, optimizer = world.prepare(model, optimizer)
            ema = None if copy is None else world.prepare(copy)
            for batch in world.loader(tensors(40), 10):
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if ema is not None:
                    ema.update_parameters(model)
            return whole(model if ema is None else ema)
    except UsageError as error:
        return error.message


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


AVERAGED: dict[str, dict[str, Any]] = {
    "means": {"use_buffers": True},
    "exponential": {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "each by itself": {"use_buffers": True, "avg_fn": get_ema_avg_fn(0.9)},
    "without buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
}


def in_all_cases(strategy: Any) -> dict[str, Any]:
    found = {name: train(strategy, sgd, averaged) for name, averaged in AVERAGED.items()}
    for kind in (torch.optim.Adagrad, torch.optim.Rprop, torch.optim.Adafactor):
        found[kind.__name__] = train(strategy, kind)
    return found


def compare(strategy: Any, size: int) -> None:
    [expected] = run_ranks(in_all_cases, 1, "single")
    for found in run_ranks(in_all_cases, size, strategy):
        for name in (*AVERAGED, "Adagrad"):
            assert isinstance(found[name], dict), (name, found[name])
            assert difference(expected[name], found[name]) < 1e-9, name
        for name in ("Rprop", "Adafactor"):
            assert f"{name}.step() on the shards of a model" in found[name] or (
                f"{name} on the shards of a model, with torch {torch.__version__}" in found[name]
            )
            assert f"use strategy='ddp' with {name}" in found[name]


class Pretrained(torch.nn.Sequential):
    """Writes its state as models of Hugging Face do, with plain tensors alone."""

    def save_pretrained(self, folder: str, *, suffix: str = "") -> str:
        state = self.state_dict()
        assert not any(isinstance(value, DTensor) for value in state.values())
        torch.save(state, f"{folder}/model{suffix}.pt")
        return folder


def save_pretrained(folder: str) -> str | None:
    with lockstep.init("fsdp", seed=1) as world:
        model = world.prepare(Pretrained(mlp()))
        returned = model.save_pretrained(folder, suffix="-1")
        assert isinstance(model.state_dict()["0.0.weight"], DTensor)
        return returned


def test_save_pretrained_writes_whole_weights(tmp_path: Path):
    assert run_ranks(save_pretrained, 2, str(tmp_path)) == [str(tmp_path), None]
    found = torch.load(tmp_path / "model-1.pt", weights_only=True)
    assert difference(Pretrained(mlp()).state_dict(), found) == 0


def test_optimizers_and_averages_of_shards():
    compare("fsdp", 2)


def step_with_a_gradient_of_its_own() -> str:
    with lockstep.init("fsdp", seed=1) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(8), 8)
        for batch in loader:
            world.backward(mean_loss(model, batch))
            for parameter in model.parameters():
                parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
            with pytest.raises(UsageError) as error:
                optimizer.step()
        return error.value.message


def test_a_gradient_that_is_no_shard_is_told_from_an_optimizer_that_cannot_use_shards():
    for message in run_ranks(step_with_a_gradient_of_its_own, 2):
        assert "with a gradient that the script has made itself" in message
        assert "the gradient of a parameter of shape" in message
        assert "use strategy=" not in message


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fsdp", HSDP(shard_size=1), HSDP(shard_size=3)])
def test_optimizers_and_averages_on_three_ranks(strategy: Any):
    compare(strategy, 3)

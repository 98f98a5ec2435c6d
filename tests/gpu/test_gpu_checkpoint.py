"""Checkpoints of what is on a GPU: resumed there bit by bit, random streams too, and on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_devices import DEVICES, ON_RANKS, run_on, settings
from problems import CLASSES, FEATURES, difference, mean_loss, tensors
from torch import Tensor, nn

import lockstep

pytestmark = pytest.mark.ranks

DROP = 0.4


def net(drop: float) -> nn.Module:
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(drop)]
    return nn.Sequential(nn.Linear(FEATURES, 16), *middle, nn.Linear(16, CLASSES)).double()


def train(
    device: str, folder: str, epochs: int, drop: float = DROP, strategy: Any = None
) -> dict[str, Any]:
    """Trains from the last checkpoint on, if there is one."""
    with lockstep.init(strategy, seed=4, **settings(device)) as world:
        model = net(drop)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(), 16, shuffle=True)
        saved = world.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        resumed = saved.resume()
        for _ in world.epochs(epochs):
            for batch in loader:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            saved.save()
        plain = getattr(model, "module", model)
        moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        assert {t.device.type for t in [*plain.state_dict().values(), *moments]} == {device}
        drawn = torch.rand(3, device=world.device)
        if world.is_main:
            lockstep.save_weights(model, Path(folder) / "weights.safetensors")
        world.barrier()
        values = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
        values |= {f"moment {n}": moment.cpu() for n, moment in enumerate(moments)}
        return {"resumed": resumed, "values": values, "drawn": drawn.cpu()}


@pytest.mark.parametrize(("device", "size"), [("cpu", 1), *ON_RANKS[1:]])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(
    device: str, size: int, tmp_path: Path
) -> None:
    whole = run_on(train, size, device, str(tmp_path / "whole"), 4)
    run_on(train, size, device, str(tmp_path / "parts"), 2)
    parts = run_on(train, size, device, str(tmp_path / "parts"), 4)
    for one, other in zip(whole, parts, strict=True):
        assert (one["resumed"], other["resumed"]) == (False, True)
        # Dropout draws on the device: with another stream there all of this would differ.
        assert difference(one["values"], other["values"]) < 1e-12
        assert torch.equal(one["drawn"], other["drawn"])
    loaded = net(DROP)
    lockstep.load_weights(loaded, tmp_path / "parts" / "weights.safetensors")
    for name, value in loaded.state_dict().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, parts[0]["values"][name])


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_it_is_resumed_on_the_other_kind_of_device(first: str, then: str, tmp_path: Path) -> None:
    """On another number of ranks, too."""
    [whole] = run_on(train, 1, "cpu", str(tmp_path / "whole"), 3, 0.0)
    run_on(train, 2, first, str(tmp_path / "parts"), 2, 0.0)
    [rest] = run_on(train, 1, then, str(tmp_path / "parts"), 3, 0.0)
    assert rest["resumed"]
    assert difference(whole["values"], rest["values"]) < 1e-9


def shaken(device: str) -> list[Tensor]:
    """Draws from the streams of a run, put back in between."""
    from lockstep.checkpoint.encoding import rng_state_from_text, rng_state_to_text
    from lockstep.distributed import seeding

    with lockstep.init(seed=4, **settings(device)) as world:
        text = rng_state_to_text(seeding.rng_state(world.device))
        first = torch.rand(4, device=world.device).cpu()
        other = torch.rand(4, device=world.device).cpu()
        seeding.set_rng_state(rng_state_from_text(text), world.device)
        return [first, other, torch.rand(4, device=world.device).cpu()]


@pytest.mark.parametrize("device", DEVICES)
def test_the_random_state_of_a_device(device: str) -> None:
    [[first, other, again]] = run_on(shaken, 1, device)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def built_without_memory(device: str, folder: str, strategy: str) -> dict[str, dict[str, Tensor]]:
    """The weights of a model that is drawn, and of one that is read from a folder."""
    found = {}
    with lockstep.init(strategy, seed=4, **settings(device)) as world:
        for name in ("drawn", "read"):
            with lockstep.deferred_init():
                model = net(0.0)
            if name == "read":
                lockstep.load_weights(model, folder)
            model = world.prepare(model)
            assert {parameter.device.type for parameter in model.parameters()} == {device}
            path = Path(folder) / strategy / f"{name}.safetensors"
            lockstep.save_weights(model, path)
            world.barrier()
            loaded = net(DROP)
            lockstep.load_weights(loaded, path)
            found[name] = loaded.state_dict()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("device", "size"), ON_RANKS)
def test_a_model_that_was_built_without_memory(
    device: str, size: int, strategy: str, tmp_path: Path
) -> None:
    """Values are computed on the CPU and have its bits, wherever the model is."""
    saved = net(DROP)
    with torch.no_grad():
        saved[0].weight.mul_(2.0)
    lockstep.save_weights(saved, tmp_path / "model.safetensors")
    for found in run_on(built_without_memory, size, device, str(tmp_path), strategy):
        for name, expected in (("drawn", net(DROP)), ("read", saved)):
            for key, value in expected.state_dict().items():
                assert torch.equal(found[name][key], value), (name, key)

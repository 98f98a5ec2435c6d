"""Two models that are trained against each other, each with an optimizer of its own."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

pytestmark = pytest.mark.ranks


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def train(strategy: str) -> list[float]:
    """The generator's losses over the global batches."""
    with lockstep.init(strategy, seed=1) as world:
        torch.manual_seed(0)
        generator, critic = network(4, 6), network(6, 1)
        makes = torch.optim.Adam(generator.parameters(), lr=1e-2)
        judges = torch.optim.Adam(critic.parameters(), lr=1e-2)
        generator, critic, makes, judges = world.prepare(generator, critic, makes, judges)
        numbers = torch.Generator().manual_seed(3)
        real = torch.randn(26, 6, generator=numbers, dtype=torch.float64)
        noise = torch.randn(26, 4, generator=numbers, dtype=torch.float64)
        losses = []
        for x, z in world.loader(TensorDataset(real, noise), 8, shuffle=True):
            judges.zero_grad()
            world.backward((critic(generator(z).detach()) - critic(x)).mean())
            judges.step()
            makes.zero_grad()
            loss = -critic(generator(z)).mean()
            world.backward(loss)
            makes.step()
            losses.append(world.sum(loss.item() * len(z)))
        return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_losses_are_those_of_one_device(strategy):
    expected = run_ranks(train, 1, "single")[0]
    for found in run_ranks(train, 2, strategy):
        assert found == pytest.approx(expected, rel=1e-9)

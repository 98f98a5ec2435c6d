"""Two models that are trained against each other, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from digests import digest_of
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import World
from lockstep.errors import RanksDifferError, WrongDeviceError

pytestmark = pytest.mark.ranks


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def prepare_with_optimizers(world: World, generator: nn.Module, critic: nn.Module) -> Sequence[Any]:
    """Returns both models prepared, and then the prepared optimizer of each of them."""
    makes = torch.optim.Adam(generator.parameters(), lr=1e-2)
    judges = torch.optim.Adam(critic.parameters(), lr=1e-2)
    return world.prepare(generator, critic, makes, judges)


def train(strategy: str) -> list[float]:
    """The generator's losses over the global batches."""
    with lockstep.init(strategy, seed=1) as world:
        torch.manual_seed(0)
        generator, critic = network(4, 6), network(6, 1)
        generator, critic, makes, judges = prepare_with_optimizers(world, generator, critic)
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


def with_batchnorm(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs))


def digests_with_batchnorm(**settings: Any) -> list[str]:
    """Trains two models with BatchNorm on one loss; returns a digest of each."""
    with lockstep.init("ddp", seed=1, **settings) as world:
        torch.manual_seed(0)
        generator, critic = with_batchnorm(4, 6), with_batchnorm(6, 1)
        generator, critic, makes, judges = prepare_with_optimizers(world, generator, critic)
        numbers = torch.Generator().manual_seed(3)
        real = torch.randn(32, 6, generator=numbers)
        noise = torch.randn(32, 4, generator=numbers)
        for x, z in world.loader(TensorDataset(real, noise), 8, shuffle=True):
            world.backward(critic(generator(z)).mean() - critic(x).square().mean())
            judges.step()
            makes.step()
            judges.zero_grad()
            makes.zero_grad()
        return [digest_of(generator), digest_of(critic)]


def digests_in_two_ways() -> list[list[str]]:
    own_statistics = digests_with_batchnorm(sync_batchnorm=False)
    return [own_statistics, digests_with_batchnorm(virtual_ranks=2)]


def test_buffers_of_a_model_are_compared_after_the_step_of_its_own_optimizer() -> None:
    (_, of_virtual_ranks_alone), *_ = run_ranks(digests_in_two_ways, 1)
    first, second = run_ranks(digests_in_two_ways, 2)
    assert first == second
    assert first[1] == of_virtual_ranks_alone


def with_buffers(inputs: int, outputs: int) -> nn.Module:
    """Of both kinds: running statistics, which are averaged, and the vectors of a spectral norm."""
    head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, outputs))
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), head)


def digests_of_alternating_steps() -> list[str]:
    """Trains a critic in two of three steps, and the generator in the third; with virtual ranks."""
    with lockstep.init(seed=1, virtual_ranks=4) as world:
        torch.manual_seed(0)
        generator, critic = with_buffers(4, 6), with_buffers(6, 1)
        generator, critic, makes, judges = prepare_with_optimizers(world, generator, critic)
        numbers = torch.Generator().manual_seed(3)
        real = torch.randn(72, 6, generator=numbers)
        noise = torch.randn(72, 4, generator=numbers)
        for x, z in world.loader(TensorDataset(real, noise), 8, shuffle=True):
            if world.step % 3 == 2:
                world.backward(-critic(generator(z)).mean())
                makes.step()
                makes.zero_grad()
            else:
                fake = generator(z).detach()
                world.backward((critic(fake) - critic(x)).mean())
                judges.step()
            judges.zero_grad()
        return [digest_of(generator), digest_of(critic)]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_a_generator_that_rests_in_some_steps_has_the_bits_of_one_process(strategy: str) -> None:
    """Its forward passes make DDP expect gradients that do not come before its own next step."""
    (alone,) = run_ranks(digests_of_alternating_steps, 1)
    env = {"LOCKSTEP_STRATEGY": strategy}
    assert run_ranks(digests_of_alternating_steps, 2, env=env) == [alone] * 2


def train_with_generator_that_rests(**settings: Any) -> None:
    """Changes a generator on one rank while it rests."""
    with lockstep.init("ddp", seed=1, **settings) as world:
        generator, critic = nn.Linear(4, 6), nn.Linear(6, 1)
        generator, critic, makes, judges = prepare_with_optimizers(world, generator, critic)
        noise = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
        for number, (z,) in enumerate(world.loader(TensorDataset(noise), 8), start=1):
            world.backward(critic(generator(z)).mean())
            judges.step()
            # The generator steps in the first and the fifth of six batches. Models are compared
            # after the batches 1, 2, 3 and 10, so it rests in all of these but the first.
            if number in (1, 5):
                makes.step()
            if number == 4 and world.rank == 1:
                with torch.no_grad():
                    next(generator.parameters()).add_(1.0)
            judges.zero_grad()
            makes.zero_grad()


def train_until_models_differ() -> str:
    with pytest.raises(RanksDifferError) as raised:
        train_with_generator_that_rests()
    return str(raised.value)


def train_until_a_rank_is_named() -> str:
    with pytest.raises(WrongDeviceError) as raised:
        train_with_generator_that_rests(virtual_ranks=3, check_devices=1000)
    return str(raised.value)


def test_a_model_that_rests_when_models_are_compared_is_compared_after_its_next_step() -> None:
    for said in run_ranks(train_until_models_differ, 2):
        assert "step 5" in said


def test_check_devices_names_the_rank_of_a_model_that_rests_when_models_are_compared() -> None:
    """The check that models are equal knows no rank, and must not be the first to compare them."""
    for said in run_ranks(train_until_a_rank_is_named, 3):
        assert "rank 1 (cpu" in said

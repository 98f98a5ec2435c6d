"""The gradient of each virtual rank is the same, whichever process and strategy computes it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lockstep
from lockstep.session.extension import Extension, Place
from lockstep.session.micro_batch import MicroBatch

pytestmark = pytest.mark.ranks

NUM_VIRTUAL_RANKS = 5


class Net(nn.Module):
    """Has rows that three processes cannot share equally."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.convolution = nn.Conv2d(2, 7, 2).to(memory_format=memory_format)
        self.head = nn.Linear(7, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.convolution(images).tanh().mean((2, 3))
        output: Tensor = self.head(features * self.scale)
        return output


class Leaves(Extension):
    """Keeps a digest of each gradient that it is told of, by step, virtual rank and parameter."""

    def __init__(self, run: Any, model: nn.Module) -> None:
        self.run = run
        self.model = model
        self.digests: dict[tuple[int, int | None, str], str] = {}

    def leaf_gradient(
        self,
        micro_batch: MicroBatch,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert gradient is not None
            assert not isinstance(gradient, DTensor)
            name = names[id(parameter)].removeprefix("module.")
            key = (self.run.step.number, micro_batch.virtual_rank_number, name)
            assert key not in self.digests
            content = gradient.contiguous().numpy().tobytes()
            self.digests[key] = hashlib.sha256(content).hexdigest()


def leaves_of_two_steps(memory_format: torch.memory_format) -> dict[Any, str]:
    """Trains on a batch of 11 samples and one of 3, in which two virtual ranks have none."""
    with lockstep.init(virtual_ranks=NUM_VIRTUAL_RANKS) as world:
        model = Net(memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images = torch.randn(14, 2, 4, 4, generator=torch.Generator().manual_seed(1))
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(list(images), batch_size=11, micro_batch_size=2)
        run = world._run
        leaves = Leaves(run, model)
        run.extensions.add(leaves, Place.OBSERVER)
        for batch in loader:
            optimizer.zero_grad()
            world.backward(model(batch).square().mean())
            optimizer.step()
        return leaves.digests


@pytest.mark.parametrize(
    ("memory_format", "runs"),
    [
        # DDP keeps gradients in the memory format of the weights.
        (torch.channels_last, [(3, "ddp")]),
        pytest.param(
            torch.contiguous_format, [(2, "fsdp"), (3, "fsdp")], marks=pytest.mark.thorough
        ),
    ],
)
def test_leaves_do_not_depend_on_process_and_strategy(
    memory_format: torch.memory_format, runs: list[tuple[int, str]]
) -> None:
    (alone,) = run_ranks(leaves_of_two_steps, 1, memory_format)
    assert len(alone) == (NUM_VIRTUAL_RANKS + 3) * 5  # a scale and four of layers
    assert len(set(alone.values())) == len(alone)
    for size, strategy in runs:
        joined: dict[Any, str] = {}
        env = {"LOCKSTEP_STRATEGY": strategy}
        for digests in run_ranks(leaves_of_two_steps, size, memory_format, env=env):
            assert not set(joined) & set(digests)
            joined.update(digests)
        assert joined == alone

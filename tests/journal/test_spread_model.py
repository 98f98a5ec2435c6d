"""The journal of a model that is spread over several GPUs, which are made up (`made_up_gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_up_gpu import make_up_gpu
from ranks import run_ranks
from torch import Tensor, nn

import lockstep
from lockstep.extensions.journal.hashing import MAX_COPIED_BYTES_ON_GPU
from lockstep.extensions.journal.reading import read_journal

pytestmark = pytest.mark.ranks

WIDTH = 520


class TwoLayers(nn.Module):
    """Has a large and a small weight on each device. The second layer may be on another GPU."""

    def __init__(self, second_device: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).to("cuda:0")
        self.second = nn.Linear(WIDTH, WIDTH).to(second_device)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        output: Tensor = self.second(hidden.to(self.second.weight.device))
        return output


def train(folder: str, second_device: str) -> None:
    """Trains two steps on two virtual ranks."""
    with lockstep.init(
        device="cuda", seed=0, virtual_ranks=2, journal=folder, journal_every=1
    ) as world:
        model = TwoLayers(second_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        samples = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
        model, optimizer = world.prepare(model, optimizer)
        for batch in world.loader(samples, batch_size=4):
            world.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def train_on_one_and_two_gpus(folder: str) -> None:
    with make_up_gpu(setattr, count=2):
        train(f"{folder}/one", "cuda:0")
        train(f"{folder}/two", "cuda:1")


def test_hashes_do_not_depend_on_the_gpu_of_a_layer(tmp_path: Path) -> None:
    assert WIDTH * WIDTH * 4 > MAX_COPIED_BYTES_ON_GPU  # so the weights are hashed in place
    run_ranks(train_on_one_and_two_gpus, 1, str(tmp_path))
    one = read_journal(tmp_path / "one")
    two = read_journal(tmp_path / "two")
    assert one.steps == two.steps == [0, 1]
    for number in one.steps:
        on_one = one.read_step(number)
        on_two = two.read_step(number)
        assert on_one.gradients.keys() == on_two.gradients.keys() == {0, 1}
        for virtual_rank, hashes in on_one.gradients.items():
            assert len(set(hashes.tolist())) == 4
            assert hashes.tolist() == on_two.gradients[virtual_rank].tolist()
        assert on_one.weights.tolist() == on_two.weights.tolist()
        assert on_one.state.tolist() == on_two.state.tolist()

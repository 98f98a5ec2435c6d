from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from problems import mean_loss, mlp, tensors
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep.errors import SettingError

pytestmark = pytest.mark.ranks

if TYPE_CHECKING:
    from lockstep.strategies.fsdp_blocks import Blocks


class Block(nn.Module):
    def __init__(self, layer: nn.Linear | None = None) -> None:
        super().__init__()
        self.first = layer or nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


def find_blocks(module: nn.Module, chosen: object = None) -> Blocks:
    from lockstep.strategies import fsdp  # the ranks below look at when it is imported

    return fsdp.find_blocks(module, chosen)


def names(module: nn.Module, chosen: object = None) -> list[str]:
    return [name for name, _ in find_blocks(module, chosen).found]


def test_repeated_blocks_are_found():
    stages = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(4, 4))
    )
    assert names(stages) == ["1.0", "1.1", "2.0"]
    assert str(find_blocks(stages)) == "3 x Block"
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert str(find_blocks(encoder)) == "3 x TransformerEncoderLayer"
    assert names(mlp()) == []


def test_blocks_are_chosen_by_class_name_and_function():
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.Sequential(Block()))
    assert names(model, Block) == ["1", "2.0"]
    assert names(model, (Block, nn.Linear)) == ["0", "1", "2.0"]
    assert names(model, "*.first") == ["1.first", "2.0.first"]
    assert names(model, lambda m: isinstance(m, nn.Tanh | Block)) == ["1", "2.0"]
    with pytest.raises(SettingError, match=r"blocks=Conv2d\n.*no submodule matches\n.*Block"):
        find_blocks(model, nn.Conv2d)


def test_a_block_without_parameters_is_no_unit():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Tanh) == []


def test_blocks_that_share_a_parameter_with_the_outside_stay_with_the_whole():
    one = nn.Linear(4, 4)
    blocks = find_blocks(nn.Sequential(Block(one), Block(), Block(one), Block()))
    assert [name for name, _ in blocks.found] == ["1", "3"]
    assert blocks.tied_to_outside == ["0", "2"]


def test_a_block_in_two_places_is_one():
    block, other = Block(), Block()
    model = nn.Sequential(block, other, block)
    assert names(model) == ["0", "1"]
    assert names(model, Block) == ["0", "1"]


def by_name() -> tuple[bool, float]:
    """What the strategy needs is imported while the process group is open already."""
    before = "torch.distributed.fsdp" in sys.modules
    with lockstep.init("fsdp") as world:
        model = world.prepare(mlp())
        for batch in world.loader(tensors(8), 8):
            loss = mean_loss(model, batch)
            world.backward(loss)
    return before, loss.item()


@pytest.mark.thorough
def test_the_strategy_is_imported_when_it_is_asked_for_and_leaves_no_thread():
    for before, loss in run_ranks(by_name, 2, fresh=True):
        assert not before
        assert loss > 0

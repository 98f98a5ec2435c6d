"""What a type checker is to know of a script: mypy reads this file, nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import lockstep
from lockstep.batch.loader import Loader


class Net(torch.nn.Linear):
    def extra(self) -> str:
        return "of the user's class"


def train(train_data: DataLoader[int], test_data: DataLoader[str]) -> None:
    world = lockstep.init(seed=0)
    net = Net(2, 1)
    adam = torch.optim.AdamW(net.parameters())
    schedule = StepLR(adam, 10)

    assert_type(world.prepare(net), Net)
    assert_type(world.prepare(net).extra(), str)
    assert_type(world.prepare(train_data), Loader)
    assert_type(world.prepare(net, adam), tuple[Net, torch.optim.AdamW])
    model, optimizer, scheduler, loader, test = world.prepare(
        net, adam, schedule, train_data, test_data
    )
    assert_type(model, Net)
    assert_type(optimizer, torch.optim.AdamW)
    assert_type(scheduler, StepLR)
    assert_type(loader, Loader)
    assert_type(test, Loader)
    # DataLoaders before other objects: prepared as well, but of no known type.
    assert_type(world.prepare(train_data, net), Any)

    loss = torch.zeros(())
    assert_type(world.sum(loss), torch.Tensor)
    assert_type(world.sum(3), int)
    assert_type(world.sum(True), int)
    assert_type(world.sum(0.5), float)
    assert_type(world.sum({"right": 3}), Any)
    assert_type(world.mean(loss), torch.Tensor)
    assert_type(world.mean(3), float)
    assert_type(world.max(loss), torch.Tensor)
    assert_type(world.min([1, 2]), list[int])
    assert_type(world.gather(loss), torch.Tensor)
    assert_type(world.gather(world.rank), list[int])
    assert_type(world.gather("name"), list[str])
    assert_type(world.broadcast("name" if world.is_main else None), str)

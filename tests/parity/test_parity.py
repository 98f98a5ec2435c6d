"""The promise: the same numbers on any number of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import Augmented, difference, mean_loss, mlp, tensors, weights
from ranks import in_gloo_group, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lockstep
from lockstep.batch.plan import plan_epoch

pytestmark = pytest.mark.ranks

BATCH = 16
CASES: dict[str, dict[str, Any]] = {
    "plain": {"samples": 48},
    "short last batch, fewer samples than ranks": {"samples": 50},
    "BatchNorm": {"samples": 54, "batch_norm": True},
    "augmentation": {"samples": 50, "augment": True},
    "3 micro-batches": {"samples": 50, "micro": True},
    "shares": {"samples": 50, "uneven": True},
    "clipping": {"samples": 50, "clip": 0.05},
    "weighted": {"samples": 50, "weighted": True, "uneven": True, "micro": True},
    "all together": {
        "samples": 54,
        "batch_norm": True,
        "augment": True,
        "micro": True,
        "uneven": True,
        "clip": 0.5,
    },
}
SHARES = {1: "1", 2: "1:2", 3: "1:2:1"}
MICRO = {(1, False): 6, (2, False): 3, (3, False): 2, (1, True): 6, (2, True): 4, (3, True): 3}


def train(
    samples: int,
    batch_norm: bool = False,
    augment: bool = False,
    micro: bool = False,
    uneven: bool = False,
    clip: float | None = None,
    weighted: bool = False,
) -> dict[str, torch.Tensor]:
    """20 steps in float64; what comes out must not depend on the world size."""
    with lockstep.init(seed=5) as world:
        model = mlp(batch_norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
        model, optimizer, scheduler = world.prepare(model, optimizer, scheduler)
        loader = world.loader(
            Augmented(samples) if augment else tensors(samples),
            BATCH,
            shuffle=True,
            shares=SHARES[world.size] if uneven else None,
            micro_batch_size=MICRO[world.size, uneven] if micro else None,
            weight=(lambda batch: (batch[1] + 1).sum()) if weighted else None,
        )
        assert loader.micro_batches == (3 if micro else 1)
        while world._run.step.number < 20:
            for x, y in loader:
                if weighted:
                    each = F.cross_entropy(model(x), y, reduction="none")
                    loss = (each * (y + 1)).sum() / (y + 1).sum()
                else:
                    loss = mean_loss(model, (x, y))
                world.backward(loss)
                if clip is not None:
                    world.clip_grad_norm_(model, clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if world._run.step.number == 20:
                    break
        assert scheduler.get_last_lr() == [0.1 * 0.5**2]
        return weights(model)


def train_all() -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(**case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> dict[int, list[Any]]:
    return {size: run_ranks(train_all, size) for size in (1, 2, 3)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_weights_do_not_depend_on_the_world_size(results, case, size):
    expected = results[1][0][case]
    for rank in range(size):
        assert difference(expected, results[size][rank][case]) < 1e-9


def test_the_cases_differ_from_each_other(results):
    """A comparison of things that are all the same would prove nothing."""
    one = results[1][0]
    shuffles = ["BatchNorm", "augmentation", "clipping", "weighted", "plain"]
    for i, a in enumerate(shuffles):
        for b in shuffles[i + 1 :]:
            if one[a].keys() == one[b].keys():
                assert difference(one[a], one[b]) > 1e-6


def convnet() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(8 * 36, 5),
    )  # fmt: skip


def images() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(70, 1, 6, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(5, (70,), generator=generator))


def plain_loop() -> dict[str, torch.Tensor]:
    """30 steps of plain torch over the planned batches."""
    torch.manual_seed(9)
    model, data = convnet(), images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    torch.manual_seed(4)
    for epoch in range(6):
        for batch in plan_batches(epoch):
            x, y = data[batch]
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return weights(model)


def plan_batches(epoch: int) -> list[torch.Tensor]:
    plan = plan_epoch(70, 16, seed=9, epoch=epoch)
    return [torch.from_numpy(plan[step]) for step in range(len(plan))]


def lockstep_loop() -> dict[str, torch.Tensor]:
    with lockstep.init(seed=9) as world:
        model = convnet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        train = DataLoader(images(), batch_size=16, shuffle=True)
        model, optimizer, scheduler, train = world.prepare(model, optimizer, scheduler, train)
        torch.manual_seed(4)
        for _epoch in world.epochs(6):
            for x, y in train:
                loss = F.cross_entropy(model(x), y)
                world.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert world._run.step.number == 30
        return weights(model)


def test_one_process_is_bit_equal_to_plain_torch():
    expected, found = plain_loop(), lockstep_loop()
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


@in_gloo_group
def raw_ddp() -> dict[str, torch.Tensor]:
    """A DDP loop by hand: 32 steps, each rank computing its half of the planned batch."""
    rank = dist.get_rank()
    torch.manual_seed(9)
    model = DistributedDataParallel(mlp(dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = tensors(64, torch.float32)
    for epoch in range(8):
        plan = plan_epoch(64, 16, seed=9, epoch=epoch)
        for step in range(len(plan)):
            x, y = data[torch.from_numpy(plan[step][8 * rank : 8 * rank + 8])]
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def lockstep_ddp() -> dict[str, torch.Tensor]:
    with lockstep.init("ddp", seed=9) as world:
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train = DataLoader(tensors(64, torch.float32), batch_size=16, shuffle=True)
        model, optimizer, train = world.prepare(model, optimizer, train)
        for _epoch in world.epochs(8):
            for x, y in train:
                loss = F.cross_entropy(model(x), y)
                world.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert world._run.step.number == 32
        return weights(model)


def test_two_processes_are_bit_equal_to_raw_ddp():
    expected, found = run_ranks(raw_ddp, 2), run_ranks(lockstep_ddp, 2)
    for rank in range(2):
        for name in expected[0]:
            assert torch.equal(expected[0][name], found[rank][name]), (rank, name)

"""Bad input: what a user may get wrong, and the whole of what Lockstep says about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from messages import MESSAGES
from problems import mlp, tensors
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import lockstep
from lockstep.errors import LockstepError

pytestmark = pytest.mark.ranks

Case = Callable[[], Any]


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield 1


def model_and_optimizer(world: lockstep.World) -> Any:
    model = mlp()
    return world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def scalar() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


def prepare_twice(world: lockstep.World) -> None:
    model = mlp()
    world.prepare(model)
    world.prepare(model)


def prepare_optimizer_twice(world: lockstep.World) -> None:
    _, optimizer = model_and_optimizer(world)
    world.prepare(optimizer)


def add_param_group(world: lockstep.World) -> None:
    _, optimizer = model_and_optimizer(world)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def scheduler_alone(world: lockstep.World) -> None:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    world.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))


def wrong_weight(world: lockstep.World) -> None:
    next(iter(world.loader(tensors(), 4, weight=lambda batch: "many")))


def closed(world: lockstep.World) -> None:
    world.close()
    world.prepare(mlp())


def plain_backward_of_micro_batches(world: lockstep.World) -> None:
    model, optimizer = model_and_optimizer(world)
    for x, _ in world.loader(tensors(), 8, micro_batch_size=4):
        model(x).mean().backward()
        optimizer.step()


def init(**settings: Any) -> None:
    lockstep.init(**settings).close()


def within(use: Callable[[lockstep.World], Any]) -> None:
    with lockstep.init() as world:
        use(world)


ALONE_CASES: dict[str, Case] = {
    "batch size 0": lambda: within(lambda w: w.loader(tensors(), 0)),
    "batch size of a fraction": lambda: within(lambda w: w.loader(tensors(), 2.5)),  # type: ignore[arg-type]
    "no batch size": lambda: within(lambda w: w.loader(tensors())),
    "two batch sizes": lambda: within(lambda w: w.loader(tensors(), 4, batch_size_per_device=2)),
    "dataset without length": lambda: within(lambda w: w.loader(NoLength(), 4)),
    "stream": lambda: within(lambda w: w.loader(Stream(), 2, shuffle=True)),
    "not a dataset": lambda: within(lambda w: w.loader(7, 4)),  # type: ignore[arg-type]
    "DataLoader without batch size": lambda: within(
        lambda w: w.prepare(DataLoader(tensors(), batch_size=None))
    ),
    "DistributedSampler": lambda: within(
        lambda w: w.prepare(
            DataLoader(tensors(), batch_size=2, sampler=DistributedSampler(tensors(), 2, 0))
        )
    ),
    "DataLoader and batch size": lambda: within(
        lambda w: w.loader(DataLoader(tensors(), batch_size=2), 4)
    ),
    "more shares than ranks": lambda: init(shares="1:2"),
    "shares of nothing": lambda: init(shares="0"),
    "shares of words": lambda: init(shares="half"),
    "micro-batch of nothing": lambda: within(lambda w: w.loader(tensors(), 4, micro_batch_size=0)),
    "unknown strategy": lambda: init(strategy="pipelin"),
    "unknown precision": lambda: init(precision="bf61"),
    "unknown device": lambda: init(device="gpu"),
    "nccl on the CPU": lambda: init(device="cpu", backend="nccl"),
    "rank without world size": lambda: init(rank=0),
    "timeout below zero": lambda: init(join_timeout=-1),
    "timeout without an end": lambda: init(collective_timeout=float("inf")),
    "seed of words": lambda: init(seed="lucky"),
    "foreign parameters": lambda: within(
        lambda w: w.prepare(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    ),
    "prepare twice": lambda: within(prepare_twice),
    "prepare an optimizer twice": lambda: within(prepare_optimizer_twice),
    "prepare a dataset": lambda: within(lambda w: w.prepare(tensors())),
    "prepare nothing": lambda: within(lambda w: w.prepare()),
    "scheduler without its optimizer": lambda: within(scheduler_alone),
    "parameters added after prepare": lambda: within(add_param_group),
    "loss that is a number": lambda: within(lambda w: w.backward(0.3)),  # type: ignore[arg-type]
    "loss that is not a scalar": lambda: within(
        lambda w: w.backward(torch.ones(4, requires_grad=True))
    ),
    "loss without gradient": lambda: within(lambda w: w.backward(torch.ones(()))),
    "loss that is NaN": lambda: within(lambda w: w.backward(scalar() * float("nan"))),
    "weight that is no number": lambda: within(wrong_weight),
    "loss.backward() of a part": lambda: within(plain_backward_of_micro_batches),
    "sum of an object": lambda: within(lambda w: w.sum(object)),
    "init twice": lambda: within(lambda w: lockstep.init()),
    "prepare after close": lambda: within(closed),
}


def message_of(case: Case) -> str:
    """What the error says, without its last line, which must name a line of this file."""
    with pytest.raises(LockstepError) as caught:
        case()
    text, _, place = str(caught.value).rpartition("\n  at:    ")
    assert re.search(r"test_wrong_uses\.py:\d+: \S", place), place
    return text


@pytest.mark.parametrize("name", ALONE_CASES)
def test_on_one_process(name):
    assert message_of(ALONE_CASES[name]) == MESSAGES[name]


def test_outside_and_inside_contradict_each_other(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PRECISION", "bf16")
    assert message_of(lambda: init(precision="fp16")) == MESSAGES["contradiction"]
    init(precision="bf16")
    monkeypatch.setenv("LOCKSTEP_MICRO_BATCH_SIZE", "few")
    assert message_of(init) == MESSAGES["variable that does not parse"]


def step(world: lockstep.World, change: Callable[[nn.Module], Any], **options: Any) -> None:
    """Training steps with something wrong in them."""
    model, optimizer = model_and_optimizer(world)
    for x, y in world.loader(tensors(24), 8, **options):
        loss = nn.functional.cross_entropy(change(model)(x), y)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def half_used(world: lockstep.World) -> None:
    model = HalfUsed()
    model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    world.backward(model(tensors()[:4][0]).mean())
    optimizer.step()


def plain_backward(world: lockstep.World) -> None:
    model, optimizer = model_and_optimizer(world)
    for x, y in world.loader(tensors(9), 9):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def layer_added(world: lockstep.World) -> None:
    def change(model: nn.Module) -> nn.Module:
        model.module[0] = nn.Linear(6, 16).double()
        return model

    step(world, change)


def change_at_fifth_step(
    world: lockstep.World, model: nn.Module, change: Callable[[nn.Module], Any]
) -> None:
    """Changes the model before a step at which its parameters are not all looked at."""
    model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x, y) in enumerate(world.loader(tensors(48), 8), 1):
        if number == 5:
            change(model)
        dtype = next(model.parameters()).dtype
        world.backward(nn.functional.cross_entropy(model(x.to(dtype)), y))
        optimizer.step()
        optimizer.zero_grad()
        assert number < 5, "the step with the changed model was made"


def converted_in_pass(world: lockstep.World) -> None:
    change_at_fifth_step(world, mlp(), lambda model: model.float())


def unfrozen_in_pass(world: lockstep.World) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    change_at_fifth_step(world, model, lambda model: model.module[0].requires_grad_(True))


def changed_by_hand(world: lockstep.World) -> None:
    def change(model: nn.Module) -> nn.Module:
        if world.rank == 1:
            with torch.no_grad():
                model.module[2].bias[0] += 1e-3
        return model

    step(world, change)


def plateau(world: lockstep.World) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    _, _, scheduler = world.prepare(model, optimizer, scheduler)
    scheduler.step(0.5 + world.rank)


def save_alone(world: lockstep.World) -> None:
    model, _ = model_and_optimizer(world)
    checkpoint = world.checkpoint("never written", model=model)
    if world.is_main:
        checkpoint.save()
    world.barrier()


def sum_in_evaluation(world: lockstep.World) -> None:
    with torch.no_grad():
        for x, _ in world.loader(tensors(5), 4):  # rank 1 has none of the last batch
            world.sum(len(x))


def other_encoder(world: lockstep.World) -> None:
    model, optimizer = model_and_optimizer(world)
    for x, _ in world.loader(tensors(8), 8):
        hidden = model.module[0](x)  # a method or layer of the inner module
        world.backward(model.module[2](torch.tanh(hidden)).mean())
        optimizer.step()


def ddp_around(world: lockstep.World) -> None:
    model, _ = model_and_optimizer(world)
    with by_hand(model) as around:
        around(tensors()[:4][0])


@contextmanager
def by_hand(model: nn.Module) -> Iterator[nn.Module]:
    around: Any = DistributedDataParallel(model)
    try:
        yield around
    finally:  # it would keep the process group's threads alive
        around.reducer = around.logger = around.process_group = None


def prepare_ddp(world: lockstep.World) -> None:
    with by_hand(mlp()) as model:
        world.prepare(model)


def prepare_data_parallel(world: lockstep.World) -> None:
    on_several_gpus = nn.DataParallel(mlp())
    on_several_gpus.device_ids = [0, 1]
    world.prepare(nn.Sequential(on_several_gpus))


def sum_of_one_rank_while_others_train(world: lockstep.World) -> None:
    """Rank 0 has left the loop. The others are in the forward pass, whose BatchNorm gathers."""
    model = world.prepare(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with pytest.raises(LockstepError) as caught:
        world.sum(1) if world.is_main else model(torch.ones(4, 2))
    assert caught.value.__cause__ is None  # it would say the same once more
    raise caught.value


TOGETHER_CASES: dict[str, Callable[[lockstep.World], Any]] = {
    "forward through .module": lambda w: step(w, lambda model: model.module),
    "layers of .module": other_encoder,
    "unused parameters": half_used,
    "loss.backward() of uneven parts": plain_backward,
    "layer added after prepare": layer_added,
    "model converted in a pass": converted_in_pass,
    "layer unfrozen in a pass": unfrozen_in_pass,
    "replicas part": changed_by_hand,
    "DDP around it": ddp_around,
    "DDP by hand": prepare_ddp,
    "DataParallel on several processes": prepare_data_parallel,
    "other models": lambda w: w.prepare(nn.Linear(2 + w.rank, 1)),
    "data of other lengths": lambda w: w.loader(tensors(8 + w.rank), 4),
    "data of other content": lambda w: w.loader(TensorDataset(torch.ones(8) + w.rank), 4),
    "plateau of other metrics": plateau,
    "sum in an evaluation loop": sum_in_evaluation,
    "checkpoint.save() of one rank": save_alone,
    "sum of one rank": lambda w: w.sum(1) if w.is_main else w.mean(1),
    "shapes that do not match": lambda w: w.sum(torch.ones(2 + w.rank)),
    "sum of rank 0 while others train": sum_of_one_rank_while_others_train,
}


def collect_messages() -> dict[str, str]:
    found = {}
    for name, use in TOGETHER_CASES.items():
        with lockstep.init() as world:
            found[name] = message_of(lambda use=use, world=world: use(world))
    found["single on two"] = message_of(lambda: init(strategy="single"))
    found["shares for three"] = message_of(lambda: init(shares="1:2:3"))
    return found


def test_on_two_processes():
    first, second = run_ranks(collect_messages, 2)
    assert first == {name: MESSAGES[name] for name in first}
    assert first.keys() == second.keys()
    # The first names this rank's own part; of the second, only rank 0 called something by name.
    differ = ["loss.backward() of uneven parts", "sum of rank 0 while others train"]
    assert [name for name in first if first[name] != second[name]] == differ
    assert len(MESSAGES) >= 50

"""What is looked at in every training: found, said once with a code, and nothing else is said."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from problems import mlp, tensors
from ranks import run_ranks
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import lockstep
from lockstep.errors import LockstepError, LockstepWarning, UsageError
from lockstep.strategies import DDP, HSDP

pytestmark = pytest.mark.ranks

Use = Callable[[lockstep.World], Any]


def said(use: Use, **settings: Any) -> list[str]:
    """The codes of all warnings, and of the error, if there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        with lockstep.init(seed=0, **settings) as world:
            try:
                use(world)
            except LockstepError as raised:
                error = raised
    codes = []
    for warning in caught:
        assert issubclass(warning.category, LockstepWarning), warning.message
        assert warning.filename == __file__
        codes.append(f"warning {str(warning.message)[-6:-1]}")
    return codes + ([] if error is None else [f"{type(error).__name__} {error.code}"])


# The model after `prepare`.


def train(
    world: lockstep.World,
    change: Callable[[nn.Module], Any] = lambda model: None,
    model: nn.Module | None = None,
    steps: int = 3,
) -> None:
    """Some steps, with a change of the user's model after it is prepared."""
    torch.manual_seed(0)
    user_model = mlp() if model is None else model
    optimizer = torch.optim.SGD(user_model.parameters(), lr=0.1)
    prepared, optimizer = world.prepare(user_model, optimizer)
    change(user_model)
    for x, y in world.loader(tensors(8 * steps), 8):
        world.backward(nn.functional.cross_entropy(prepared(x), y.to(x.device)))
        optimizer.step()
        optimizer.zero_grad()


def replace(model: nn.Module) -> None:
    model[2] = nn.Linear(16, 4).double()


def add(model: nn.Module) -> None:
    model.append(nn.Linear(4, 4).double())


def unfreeze(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model[0].requires_grad_(False)


def assign(model: nn.Module) -> None:
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def frozen() -> nn.Module:
    model = mlp()
    freeze(model)
    return model


def move(model: nn.Module) -> None:
    model.float()
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


LATER: dict[str, Use] = {
    "replaced": lambda w: train(w, replace),
    "added": lambda w: train(w, add),
    "unfrozen": lambda w: train(w, unfreeze, frozen()),
    "assigned": lambda w: train(w, assign),
}
UNCHANGED: dict[str, Use] = {
    "as it was": train,
    "frozen": lambda w: train(w, model=frozen()),
    "tied": lambda w: train(w, model=tied()),
    "weights loaded": lambda w: train(w, lambda m: m.load_state_dict(m.state_dict())),
}


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)).double()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("name", LATER)
def test_on_one_process_a_changed_model_is_warned_of_once(name):
    assert said(LATER[name]) == ["warning LS303"]


def test_a_moved_model_is_warned_of():
    assert said(lambda w: train(w, move)) == ["warning LS303"]


def train_virtual_ranks(world: lockstep.World, change: Use, when: str) -> None:
    """Two passes of two global batches over 4 virtual ranks; `when` the model is changed."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = world.prepare(model, optimizer)
    loader = world.loader(tensors(16), 8)
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            if when == "in a pass" and (epoch, number) == (0, 5):
                change(model)
            loss = nn.functional.cross_entropy(prepared(x.to(model[2].weight.dtype)), y)
            if when == "before a backward pass" and (epoch, number) == (0, 1):
                change(model)
            world.backward(loss)
            if when == "before the step" and (epoch, number) == (0, 7):
                change(model)
            optimizer.step()
            optimizer.zero_grad()
        if when == "between passes":
            change(model)


WHEN = ["in a pass", "before a backward pass", "before the step", "between passes"]


@pytest.mark.parametrize("when", WHEN)
def test_a_converted_model_of_virtual_ranks_on_one_process_is_refused_as_on_several(when):
    def convert(world: lockstep.World) -> None:
        train_virtual_ranks(world, nn.Module.float, when)

    assert said(convert, virtual_ranks=4) == ["UsageError LS303"]


def test_a_replaced_layer_of_virtual_ranks_is_refused_as_its_gradients_are_not_averaged():
    assert said(lambda w: train(w, replace), virtual_ranks=4) == ["UsageError LS303"]


def test_a_converted_layer_of_virtual_ranks_on_one_process_is_named():
    def convert_bias(model: nn.Module) -> None:
        bias = model[0].bias
        bias.data = bias.data.float()
        bias.grad = None

    with lockstep.init(seed=0, virtual_ranks=4) as world, pytest.raises(UsageError) as caught:
        train_virtual_ranks(world, convert_bias, "before the step")
    assert str(caught.value).startswith(
        "parameters added, replaced, unfrozen or moved after world.prepare\n"
        "  found: 0.bias now torch.float32, was torch.float64; their gradients are not averaged "
        "over the ranks\n"
        "  do:    change the model first, then call world.prepare\n"
        "  more:  [LS303: lockstep explain LS303]"
    )


def test_a_layer_of_virtual_ranks_on_one_process_may_be_unfrozen():
    def unfreeze_first(model: nn.Module) -> None:
        unfreeze(model)

    assert said(lambda w: train(w, unfreeze_first, frozen()), virtual_ranks=4) == ["warning LS303"]


def test_the_warning_of_an_unfrozen_layer_hides_no_later_change():
    def change(world: lockstep.World) -> None:
        model = frozen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(16), 8)
        for change_model in (unfreeze, assign):
            change_model(model)
            for x, y in loader:
                world.backward(nn.functional.cross_entropy(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()

    assert said(change, virtual_ranks=4) == ["warning LS303", "UsageError LS303"]


@pytest.mark.parametrize("name", UNCHANGED)
def test_an_unchanged_model_is_not_warned_of(name):
    assert said(UNCHANGED[name]) == []


def test_freezing_and_thawing_what_was_trained_is_no_change():
    def thaw(model: nn.Module) -> None:
        freeze(model)
        unfreeze(model)

    assert said(lambda w: train(w, freeze)) == []
    assert said(lambda w: train(w, thaw)) == []


def test_what_is_said_of_a_changed_model():
    with (
        pytest.warns(LockstepWarning) as caught,
        lockstep.init() as world,
    ):
        train(world, replace)
    (warning,) = caught
    assert str(warning.message) == (
        "parameters added, replaced, unfrozen or moved after world.prepare\n"
        "  found: 2.weight replaced, 2.bias replaced; with several processes their gradients would "
        "not be averaged\n"
        "  do:    change the model first, then call world.prepare\n"
        "  more:  [LS303: lockstep explain LS303]"
    )
    with open(__file__, encoding="utf-8") as file:
        assert file.readlines()[warning.lineno - 1].strip() == "optimizer.step()"


# Schedulers.


def schedule(
    world: lockstep.World, *, every: str = "step", on: str = "before", give: bool = False
) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if on == "before":
        scheduler = StepLR(optimizer, 1, 0.5)
        prepared = world.prepare(model, optimizer, *([scheduler] if give else []))
        model, optimizer = prepared[:2]
        scheduler = prepared[2] if give else scheduler
    else:
        model, optimizer = world.prepare(model, optimizer)
        scheduler = StepLR(optimizer, 1, 0.5)
    loader = world.loader(tensors(24), 8)
    for _ in range(2):
        for x, y in loader:
            world.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if every == "step":
                scheduler.step()
        if every == "epoch":
            scheduler.step()


@pytest.mark.parametrize("on", ["before", "after"])
def test_a_scheduler_of_steps_that_is_not_prepared_is_warned_of_once(on):
    assert said(lambda w: schedule(w, on=on)) == ["warning LS401"]
    assert said(lambda w: schedule(w, on=on, every="epoch")) == []


def test_a_prepared_scheduler_is_not_warned_of():
    assert said(lambda w: schedule(w, give=True)) == []
    assert said(lambda w: schedule(w, give=True, every="epoch")) == []


def test_rates_set_by_hand_are_not_warned_of():
    def by_hand(world: lockstep.World) -> None:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x, y) in enumerate(world.loader(tensors(24), 8)):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            world.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    assert said(by_hand) == []


# The order of the samples.


class Fixed(Sampler[int]):
    """Shuffles with a seed of its own; from some pass on with one of this rank."""

    def __init__(self, length: int, *, rank_from: int | None = None) -> None:
        self.length, self.epoch, self.passes, self.rank_from = length, 0, 0, rank_from

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        late = self.rank_from is not None and self.passes > self.rank_from
        rank = torch.distributed.get_rank() if late else 0
        yield from np.random.RandomState((self.epoch, rank)).permutation(self.length).tolist()


class ByLength(Sampler[int]):
    """In order."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def passes(world: lockstep.World, sampler: Any = None, **options: Any) -> None:
    data = tensors(24)
    made = DataLoader(data, 8 if "batch_sampler" not in options else 1, sampler=sampler, **options)
    model = mlp()
    model, optimizer, loader = world.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), made
    )
    for _ in range(3):
        for x, y in loader:
            world.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


class Told(Fixed):
    """A sampler that is told the epoch, as by the training loop."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()


def test_a_sampler_with_the_same_order_every_epoch_is_warned_of_once():
    assert said(lambda w: passes(w, Fixed(24))) == ["warning LS103"]
    batches = BatchSampler(Fixed(24), 8, drop_last=False)
    assert said(lambda w: passes(w, batch_sampler=batches)) == ["warning LS103"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"shuffle": True},
        lambda: {"sampler": Told(24)},
        lambda: {"sampler": ByLength()},
        lambda: {"sampler": [5, 3, 1, *range(6, 24)]},  # written down: it is meant
        lambda: {"sampler": RandomSampler(range(24), generator=torch.Generator())},
        lambda: {"sampler": WeightedRandomSampler([1.0] * 24, 24)},
        lambda: {"sampler": SubsetRandomSampler(range(4))},  # few samples repeat by chance
        lambda: {"sampler": Fixed(4)},
        lambda: {},
    ],
)
def test_other_orders_are_not_warned_of(make):
    assert said(lambda w: passes(w, **make())) == []


# Several processes.


class Copy(Dataset[Any]):
    """What a rank has of the data: on rank 1 it may be another copy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rank = torch.distributed.get_rank()
        self.images = torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(1)).double()
        self.numbers = np.random.default_rng()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        image, label, name = self.images[index], index % 4, f"name {index}"
        other = self.rank == 1
        if self.kind == "other labels" and other and index == 11:
            label += 1
        elif self.kind == "other order" and other:
            image = self.images[11 - index]
        elif self.kind == "other names" and other:
            name = f"name {index + 1}"
        elif self.kind == "rounded" and other:
            image = image * (1 + 1e-6)
        elif self.kind == "augmented":
            image = image + torch.randn(3, 8)
        elif self.kind == "augmented by itself":
            image = image + self.numbers.standard_normal()
        elif self.kind == "paths":
            name = f"/tmp/{self.rank}/{index}"
        elif self.kind == "not readable" and other:
            raise FileNotFoundError(index)
        elif self.kind == "slow":
            time.sleep(0.3 if index == 0 else 3600)
        return {"image": image, "label": label, "name": name, "extra": (None, np.float32(0.5))}


COPIES = {
    "same": [],
    "other labels": ["RanksDifferError LS104"],
    "other order": ["RanksDifferError LS104"],
    "other names": ["RanksDifferError LS104"],
    "rounded": [],
    "augmented": [],
    "augmented by itself": [],
    "paths": [],
    "not readable": [],
    "slow": [],
}


def bn() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double()


def change_one(model: nn.Module) -> None:
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            bias = model[2].bias
            (bias.to_local() if hasattr(bias, "to_local") else bias)[:] += 1.0


def forget_statistics(model: nn.Module) -> None:
    if torch.distributed.get_rank() == 1:
        model[1].running_mean += 1.0


def shards(world: lockstep.World) -> None:
    sampler = Fixed(24, rank_from=0)
    world.prepare(DataLoader(tensors(24), 8, sampler=sampler))


def on_two() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind in COPIES:
        for workers in (0, 1) if kind in ("same", "other labels") else (0,):

            def load(world: lockstep.World, kind: str = kind, workers: int = workers) -> None:
                state = torch.get_rng_state()
                context = "fork" if workers else None
                world.loader(Copy(kind), 4, num_workers=workers, multiprocessing_context=context)
                assert torch.equal(state, torch.get_rng_state())

            found[f"{kind}, {workers} workers"] = said(load)
    for name, use in LATER.items():
        found[f"{name} ddp"] = said(use, strategy="ddp")
        if name != "added":  # its layers get whole tensors of the sharded model
            found[f"{name} fsdp"] = said(use, strategy="fsdp")
    for name, use in UNCHANGED.items():
        found[f"{name} fsdp"] = said(use, strategy="fsdp")
    found["one replica changed, hsdp"] = said(
        lambda w: train(w, change_one), strategy=HSDP(shard_size=1)
    )
    found["one shard changed, fsdp"] = said(lambda w: train(w, change_one), strategy="fsdp")
    found["one replica changed"] = said(lambda w: train(w, change_one), strategy=DDP())
    found["statistics"] = said(lambda w: train(w, forget_statistics, bn()))
    found["a sampler for each rank"] = said(shards)
    found["other lengths"] = said(lambda w: w.loader(tensors(24 + w.rank), 8))
    found["one order at first"] = said(lambda w: passes(w, Told(24, rank_from=1)))
    found["fixed order"] = said(lambda w: passes(w, Fixed(24)))
    found["drawn with repeats"] = said(lambda w: passes(w, WeightedRandomSampler([1.0] * 24, 20)))
    found["drop_last"] = said(lambda w: passes(w, drop_last=True, shuffle=True))
    return found


def test_on_two_processes():
    first, second = run_ranks(on_two, 2)
    expected = {
        **{f"{kind}, 0 workers": codes for kind, codes in COPIES.items()},
        "same, 1 workers": [],
        "other labels, 1 workers": ["RanksDifferError LS104"],
        **{f"{name} ddp": ["UsageError LS303"] for name in LATER},
        **{f"{name} fsdp": ["UsageError LS303"] for name in LATER if name != "added"},
        "unfrozen fsdp": [],  # it averages what is trained, whenever that began
        **{f"{name} fsdp": [] for name in UNCHANGED},
        "one replica changed, hsdp": ["RanksDifferError LS304"],
        "one shard changed, fsdp": [],  # a shard is on one rank
        "one replica changed": ["RanksDifferError LS304"],
        "statistics": ["RanksDifferError LS309"],
        "a sampler for each rank": ["RanksDifferError LS105"],
        "other lengths": ["RanksDifferError LS104"],
        "one order at first": ["RanksDifferError LS105"],
        "fixed order": ["warning LS103"],
        "drawn with repeats": [],
        "drop_last": [],
    }
    assert first == expected
    assert second == {**expected, "fixed order": []}  # rank 0 warns for all

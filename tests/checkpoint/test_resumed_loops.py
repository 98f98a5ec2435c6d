"""Loops of different forms, stopped after each of their steps and resumed: every sample once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import lockstep

pytestmark = pytest.mark.unit

EPOCHS, BATCH = 3, 2
Sample = tuple[int, int]
"""The epoch, and the first sample of a batch."""


def numbers(first: int, count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(first, first + count).double()[:, None]), BATCH)


def one_loader(model: Any, step: Callable[[Tensor], None], one: Any, other: Any) -> Iterator[int]:
    for (x,) in one:
        step(model(x).mean())
        yield int(x[0, 0])


def two_at_a_time(model: Any, step: Callable[[Tensor], None], one: Any, other: Any) -> Any:
    for (x,), (y,) in zip(one, other, strict=False):
        step(model(x).mean() + model(y).mean())
        yield 100 * int(x[0, 0]) + int(y[0, 0])


def one_after_the_other(model: Any, step: Callable[[Tensor], None], one: Any, other: Any) -> Any:
    yield from one_loader(model, step, one, other)
    yield from one_loader(model, step, other, one)


def train(
    folder: Path, form: Callable[..., Iterator[int]], stop_after: int | None, saves_at_end: bool
) -> tuple[list[Sample], float]:
    """Trains until a step, or to the end; returns what was trained on, and a weight."""
    seen: list[Sample] = []
    with lockstep.init(seed=0) as world:
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        parts = world.prepare(model, optimizer, numbers(0, 6), numbers(20, 6))
        model, optimizer, one, other = parts
        checkpoint = world.checkpoint(
            folder, every=1, model=model, optimizer=optimizer, one=one, other=other
        )
        checkpoint.resume()

        def step(loss: Tensor) -> None:
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        for epoch in world.epochs(EPOCHS):
            for sample in form(model, step, one, other):
                seen.append((epoch, sample))
                checkpoint.step()
                if world.step == stop_after:
                    return seen, 0.0
            if saves_at_end:
                checkpoint.save()
        return seen, model.weight.item()


@pytest.mark.parametrize("form", [one_loader, two_at_a_time, one_after_the_other])
def test_a_loop_that_is_resumed_after_any_step_trains_on_every_sample_once(
    tmp_path: Path, form: Callable[..., Iterator[int]]
) -> None:
    whole, weight = train(tmp_path / "whole", form, None, saves_at_end=False)
    for stop_after in range(1, len(whole)):
        folder = tmp_path / "stopped"
        before, _ = train(folder, form, stop_after, saves_at_end=False)
        after, resumed_weight = train(folder, form, None, saves_at_end=False)
        shutil.rmtree(folder)
        assert before + after == whole, stop_after
        assert resumed_weight == weight, stop_after


@pytest.mark.parametrize("form", [one_loader, two_at_a_time, one_after_the_other])
def test_an_epoch_that_was_resumed_after_its_last_step_is_done(
    tmp_path: Path, form: Callable[..., Iterator[int]]
) -> None:
    """The epoch is evaluated and saved when no batch of it is left, and is not trained again."""
    whole, weight = train(tmp_path / "whole", form, None, saves_at_end=True)
    steps_per_epoch = len(whole) // EPOCHS
    folder = tmp_path / "stopped"
    first, _ = train(folder, form, steps_per_epoch, saves_at_end=True)

    # This start saves at the end of epoch 0, trains one step of epoch 1, and is stopped.
    second, _ = train(folder, form, steps_per_epoch + 1, saves_at_end=True)
    shutil.rmtree(folder / f"step-{steps_per_epoch + 1:09d}")  # the checkpoint of epoch 0 is newest

    third, resumed_weight = train(folder, form, None, saves_at_end=True)
    assert second == third[:1]
    assert first + third == whole
    assert resumed_weight == weight


def test_a_loop_within_a_loop_is_resumed_at_the_batch_of_the_outer_one(tmp_path: Path) -> None:
    """The step of an inner loop is no step for the batch of the outer one."""
    with lockstep.init(seed=0) as world:
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model, optimizer, outer, inner = world.prepare(
            model, optimizer, numbers(0, 6), numbers(20, 6)
        )
        positions = []
        for (x,) in outer:
            for (y,) in inner:
                world.backward(model(y).mean())
                optimizer.step()
                optimizer.zero_grad()
                positions.append(outer.state_dict()["step"])
            world.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            positions.append(outer.state_dict()["step"])

    # At the first batches of both, a loop within a loop cannot be told from `zip`.
    assert positions[1:] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


class LoaderState:
    """An object of a script's own that saves the state of a loader in a form of its own."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["position"])


def train_one_step(
    folder: Path, save: Callable[[Any], dict[str, Any]], epoch: int = 0, skipped: int = 0
) -> bool:
    """Evaluates, and trains one step from a checkpoint, if there is one; returns if there was."""
    with lockstep.init(seed=0) as world:
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model, optimizer, loader, evaluated = world.prepare(
            model, optimizer, numbers(0, 6), numbers(20, 6)
        )
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, **save(loader))
        has_resumed = checkpoint.resume()
        with torch.no_grad():
            list(evaluated)
        if epoch > 0:
            loader.set_epoch(epoch)
        for position, (x,) in enumerate(loader):
            if position < skipped:
                continue
            world.backward(model(x).mean())
            optimizer.step()
            checkpoint.save()
            break
        return has_resumed


def test_a_resumed_run_warns_of_a_loader_that_is_trained_on_and_not_saved(tmp_path: Path) -> None:
    def save_nothing(loader: Any) -> dict[str, Any]:
        return {}

    assert not train_one_step(tmp_path, save_nothing)
    with pytest.warns(lockstep.errors.LockstepWarning, match="without loader 0") as said:
        assert train_one_step(tmp_path, save_nothing)
    [warning] = said  # loader 1 is only evaluated
    assert "LS113" in str(warning.message)


@pytest.mark.parametrize(
    ("save", "how"),
    [
        (lambda loader: {"loader": loader}, {}),
        (lambda loader: {"own": LoaderState(loader)}, {}),
        # The script says itself with which epoch or batch it goes on.
        (lambda loader: {}, {"epoch": 1}),
        (lambda loader: {}, {"skipped": 1}),
    ],
)
def test_a_resumed_run_does_not_warn_of_a_loader_that_goes_on(
    tmp_path: Path, save: Callable[[Any], dict[str, Any]], how: dict[str, int]
) -> None:
    for has_checkpoint in (False, True):
        assert train_one_step(tmp_path, save, **how) == has_checkpoint


class FirstRun:
    """A run in one process that has resumed nothing; `train` steps with batches of loaders."""

    def __init__(self, folder: Path, world: Any, *loaders: Any) -> None:
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.world = world
        self.folder = folder
        self.model, self.optimizer, *self.loaders = world.prepare(model, optimizer, *loaders)
        self.checkpoint: Any = None

    def make_checkpoint(self, **objects: Any) -> None:
        self.checkpoint = self.world.checkpoint(
            self.folder, model=self.model, optimizer=self.optimizer, **objects
        )
        assert not self.checkpoint.resume()

    def train(self, *batches: Any, saves: bool = False) -> None:
        loss = sum(self.model(x).mean() for (x,) in batches)
        self.world.backward(loss)
        self.optimizer.step()
        if saves:
            self.checkpoint.save()


def saves_in_the_epoch(run: FirstRun) -> None:
    run.make_checkpoint()
    for batch in run.loaders[0]:
        run.train(batch, saves=True)


def saves_after_each_epoch(run: FirstRun) -> None:
    run.make_checkpoint()
    for _ in run.world.epochs(3):
        for batch in run.loaders[0]:
            run.train(batch)
        run.checkpoint.save()


def saves_before_the_optimizer_steps(run: FirstRun) -> None:
    run.make_checkpoint()
    for batch in run.loaders[0]:
        run.checkpoint.save()
        run.train(batch)


def saves_when_the_first_loader_is_used_up(run: FirstRun) -> None:
    warmup, loader = run.loaders
    run.make_checkpoint()
    for batch in warmup:
        run.train(batch)
    run.checkpoint.save()
    for batch in loader:
        run.train(batch, saves=True)


@pytest.mark.parametrize(
    ("loop", "number"),
    [
        (saves_in_the_epoch, 0),
        (saves_after_each_epoch, 0),
        (saves_before_the_optimizer_steps, 0),
        (saves_when_the_first_loader_is_used_up, 1),
    ],
)
def test_a_first_run_warns_once_of_a_loader_that_is_trained_on_and_not_saved(
    tmp_path: Path, loop: Callable[[FirstRun], None], number: int
) -> None:
    with lockstep.init(seed=0) as world:
        run = FirstRun(tmp_path, world, numbers(0, 8), numbers(20, 8))
        with pytest.warns(lockstep.errors.LockstepWarning) as said:
            loop(run)
    (warning,) = said
    text = str(warning.message)
    assert f"without loader {number}" in text
    assert "a resumed run begins with its first epoch" in text
    assert "start anew with world.checkpoint(..., loader=loader)" in text
    assert "LS113" in text
    assert warning.filename == __file__
    line_of_warning = Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert "self.world.checkpoint(" in line_of_warning


def trains_on_two_at_a_time(run: FirstRun) -> None:
    run.make_checkpoint()
    for one, other in zip(*run.loaders, strict=True):
        run.train(one, other, saves=True)


def test_a_first_run_warns_of_both_loaders_of_a_zip(tmp_path: Path) -> None:
    with lockstep.init(seed=0) as world:
        run = FirstRun(tmp_path, world, numbers(0, 8), numbers(20, 8))
        with pytest.warns(lockstep.errors.LockstepWarning) as said:
            trains_on_two_at_a_time(run)
    texts = [str(warning.message) for warning in said]
    assert len(texts) == 2
    assert "without loader 0" in texts[0]
    assert "without loader 1" in texts[1]


def evaluates_with_gradients(run: FirstRun) -> None:
    trained, evaluated = run.loaders
    run.make_checkpoint(trained=trained)
    evaluations = iter(evaluated)
    for batch in trained:
        run.train(batch, saves=True)
        (x,) = next(evaluations)
        run.model(x)


def uses_one_up_before_the_first_save(run: FirstRun) -> None:
    warmup, loader = run.loaders
    run.make_checkpoint(loader=loader)
    warmup_batches = iter(warmup)
    for _ in range(3):  # the iterator stays open
        run.train(next(warmup_batches))
    for batch in loader:
        run.train(batch, saves=True)


def begins_with_one_after_the_save(run: FirstRun) -> None:
    run.make_checkpoint()
    run.checkpoint.save()
    for batch in run.loaders[0]:
        run.train(batch)


def saves_once_at_the_end(run: FirstRun) -> None:
    run.make_checkpoint()
    for position, batch in enumerate(run.loaders[0]):
        run.train(batch)
        if position == 2:
            run.checkpoint.save()
            break


def saves_after_the_loop(run: FirstRun) -> None:
    run.make_checkpoint()
    for batch in run.loaders[0]:
        run.train(batch)
    run.checkpoint.save()


def sets_the_epochs_itself(run: FirstRun) -> None:
    run.make_checkpoint()
    for epoch in range(3):
        run.loaders[0].sampler.set_epoch(epoch)
        for batch in run.loaders[0]:
            run.train(batch)
        run.checkpoint.save()


def saves_the_state_in_an_object_of_its_own(run: FirstRun) -> None:
    run.make_checkpoint(own=LoaderState(run.loaders[0]))
    for batch in run.loaders[0]:
        run.train(batch, saves=True)


def saves_weights_alone(run: FirstRun) -> None:
    run.checkpoint = run.world.checkpoint(run.folder, model=run.model)
    for batch in run.loaders[0]:
        run.train(batch, saves=True)


def saves_the_best_without_and_the_latest_with_it(run: FirstRun) -> None:
    run.make_checkpoint(loader=run.loaders[0])
    best = run.world.checkpoint(
        run.folder.with_name("best"), model=run.model, optimizer=run.optimizer
    )
    for _ in range(3):
        for batch in run.loaders[0]:
            run.train(batch)
        best.save()
        run.checkpoint.save()


@pytest.mark.parametrize(
    "loop",
    [
        saves_the_best_without_and_the_latest_with_it,
        evaluates_with_gradients,
        uses_one_up_before_the_first_save,
        begins_with_one_after_the_save,
        saves_once_at_the_end,
        saves_after_the_loop,
        sets_the_epochs_itself,
        saves_the_state_in_an_object_of_its_own,
        saves_weights_alone,
    ],
)
def test_a_first_run_does_not_warn_of_a_loader_whose_position_is_not_needed(
    tmp_path: Path, loop: Callable[[FirstRun], None]
) -> None:
    with lockstep.init(seed=0) as world:
        loop(FirstRun(tmp_path, world, numbers(0, 8), numbers(20, 8)))


def in_one_batch() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8).double()[:, None]), batch_size=8)


def with_replacement() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(8).double()[:, None])
    sampler = RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def test_a_first_run_warns_of_samples_that_are_drawn_with_replacement(tmp_path: Path) -> None:
    """The draws of epoch 0 would be made again."""
    with lockstep.init(seed=0) as world:
        run = FirstRun(tmp_path, world, with_replacement())
        with pytest.warns(lockstep.errors.LockstepWarning, match="without loader 0"):
            saves_in_the_epoch(run)


def test_a_first_run_warns_although_an_epoch_has_a_single_batch(tmp_path: Path) -> None:
    """It has other samples in each epoch."""
    data = TensorDataset(torch.arange(8).double()[:, None])
    with lockstep.init(seed=0) as world:
        loader = DataLoader(data, batch_size=5, shuffle=True, drop_last=True)
        run = FirstRun(tmp_path, world, loader)
        with pytest.warns(lockstep.errors.LockstepWarning, match="without loader 0"):
            saves_after_each_epoch(run)


def test_neither_run_warns_of_a_loader_whose_position_does_not_matter(tmp_path: Path) -> None:
    for has_checkpoint in (False, True):
        with lockstep.init(seed=0) as world:
            run = FirstRun(tmp_path, world, in_one_batch())
            run.checkpoint = world.checkpoint(tmp_path, model=run.model, optimizer=run.optimizer)
            assert run.checkpoint.resume() == has_checkpoint
            for _ in range(3):
                for batch in run.loaders[0]:
                    run.train(batch, saves=True)


class SamplerWithState:
    """A sampler that goes on where it was, if its state is loaded."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        for index in range(self.position, 8):
            self.position = index + 1
            yield index
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def as_sampler(data: TensorDataset, sampler: SamplerWithState) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def inside_a_batch_sampler(data: TensorDataset, sampler: SamplerWithState) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH, drop_last=False))


@pytest.mark.parametrize("make", [as_sampler, inside_a_batch_sampler])
def test_neither_run_warns_of_a_loader_whose_sampler_is_saved(
    tmp_path: Path, make: Callable[[TensorDataset, SamplerWithState], DataLoader[Any]]
) -> None:
    for has_checkpoint in (False, True):
        with lockstep.init(seed=0) as world:
            sampler = SamplerWithState()
            data = TensorDataset(torch.arange(8).double()[:, None])
            run = FirstRun(tmp_path, world, make(data, sampler))
            run.checkpoint = world.checkpoint(
                tmp_path, model=run.model, optimizer=run.optimizer, sampler=sampler
            )
            assert run.checkpoint.resume() == has_checkpoint
            for _ in range(2):
                for batch in run.loaders[0]:
                    run.train(batch, saves=True)

"""`World.log` works anywhere, waits for nobody, and gives the means over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import mlp, tensors
from ranks import run_ranks

import lockstep
from lockstep.errors import UsageError
from lockstep.extensions.report.charts import logged_values
from lockstep.extensions.report.reading import Record, Start
from lockstep.extensions.report.trackers import scalars

pytestmark = pytest.mark.ranks

SAMPLES, BATCH, EPOCHS = 22, 5, 2


def train(folder: Path, options: dict[str, Any], shown: bool) -> list[dict[str, float]]:
    """Returns what the script is told of each epoch."""
    told: list[dict[str, float]] = []
    with lockstep.init(seed=1, report=folder, **options) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(SAMPLES), BATCH, shuffle=True)
        validation = world.loader(tensors(7), 4)
        assert world.means() == {}
        for _ in world.epochs(EPOCHS):
            for x, y in world.progress(loader) if shown else loader:
                loss = F.cross_entropy(model(x), y)
                world.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                world.log(loss=loss, size=2.0)
                if world.step == 3 and world.is_last_micro_batch:
                    evaluate(world, model, validation)
                    assert set(world.means()) == {"right"}  # those of the loop that has ended
            means = world.means()
            last_loss = world.loss()
            evaluate(world, model, validation)
            of_validation = world.means()
            if world.is_main:  # nobody else takes part
                world.log(rate=0.25)
            world.log(found=of_validation["right"], loss=7.0, rank=float(world.rank))
            told.append({**means, **of_validation, "last": last_loss})
    return told


def evaluate(world: lockstep.World, model: torch.nn.Module, loader: Any) -> None:
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            world.log(right=(model(x).argmax(1) == y).double().mean())
    model.train()


def check_record(start: Start, told: list[dict[str, float]], size: int) -> None:
    """What is recorded agrees with what the script was told."""
    steps_of_epoch = -(-SAMPLES // BATCH)
    curves = logged_values(start)
    ends = [steps_of_epoch, 2 * steps_of_epoch]
    of_training = {"loss (training)": "loss", "size (training)": "size"}
    for title, name in of_training.items():
        steps, values = curves[title]
        found = dict(zip(steps.tolist(), values.tolist(), strict=True))
        assert [found[end] for end in ends] == pytest.approx([each[name] for each in told])
    steps, values = curves["right (evaluation)"]
    assert steps.tolist() == [3, *ends]
    assert values[1:].tolist() == pytest.approx([each["right"] for each in told])
    assert curves["found"][1].tolist() == pytest.approx([each["right"] for each in told])
    assert curves["rate"][1].tolist() == [0.25] * EPOCHS
    assert curves["loss (logged)"][1].tolist() == [7.0] * EPOCHS
    assert curves["rank"][1].tolist() == [(size - 1) / 2] * EPOCHS
    names = {scalar.name for scalar in scalars(start)}
    assert {"training/loss", "evaluation/right", "found", "rate", "logged/loss", "loss"} <= names


CASES: list[Any] = [
    (2, {"micro_batch_size": 1}),
    pytest.param(3, {"shares": (1, 2, 1)}, marks=pytest.mark.thorough),
    pytest.param(2, {"shown": True, "micro_batch_size": 2}, marks=pytest.mark.thorough),
    pytest.param(2, {"virtual_ranks": 4}, marks=pytest.mark.thorough),
    pytest.param(2, {"strategy": "fsdp"}, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("size", "options"), CASES)
def test_the_means_are_those_of_one_process(
    size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    shown = options.pop("shown", False)
    alone = {"virtual_ranks": 4} if "virtual_ranks" in options else {}
    [expected] = run_ranks(train, 1, tmp_path / "alone", alone, shown)
    for told in run_ranks(train, size, tmp_path / "together", options, shown):
        for epoch, each in enumerate(told):
            assert each == pytest.approx(expected[epoch], rel=1e-9)
    check_record(Record(tmp_path / "alone").starts[0], expected, 1)
    check_record(Record(tmp_path / "together").starts[0], expected, size)


def leave_early() -> dict[str, float]:
    """What is logged in loops that are left, in which ranks log different things."""
    with lockstep.init(seed=1) as world:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        loader = world.loader(tensors(SAMPLES), BATCH)
        with pytest.raises(UsageError, match="backward was not given"):
            world.loss()
        with pytest.raises(UsageError, match=r"call world\.backward\(loss\), and then") as raised:
            world.loss(model(tensors(SAMPLES)[0][0]).sum())
        assert Path(str(raised.value.line).split(":")[0]).name == Path(__file__).name
        for number, (x, y) in enumerate(loader):
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            world.log(number=number)
            if world.rank == 0:
                world.log(mine=1.0)
            world.log(text="1")  # type: ignore[arg-type]  # left out, with a warning
            if number == 2:
                break
        assert world.loss() > 0
        return world.means()


def test_a_loop_that_is_left_and_ranks_that_log_other_names() -> None:
    assert run_ranks(leave_early, 2) == [{"number": 1.0, "mine": 1.0}] * 2


def evaluate_within_training(logs: bool) -> list[dict[str, float]]:
    """Returns the means after an evaluation in each second step, and then after a further log."""
    found = []
    with lockstep.init(seed=1) as world:
        training = world.loader(torch.arange(12.0), 3)
        test = world.loader(torch.arange(100.0, 102.0), 2)  # a third rank has no sample
        for number, x in enumerate(training):
            world.log(loss=x.mean() if len(x) else 0.0)
            if number % 2 == 0:
                continue
            with torch.no_grad():
                for y in test:
                    if logs:
                        world.log(loss=y.mean())
            found.append(world.means())
            world.log(loss=x.mean() if len(x) else 0.0)
        found.append(world.means())
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_the_means_after_an_evaluation_within_a_training_loop_are_its_own(size: int) -> None:
    of_training = run_ranks(evaluate_within_training, size, False)
    of_evaluation = run_ranks(evaluate_within_training, size, True)
    for first, second in zip(of_training, of_evaluation, strict=True):
        assert [means["loss"] for means in second[:-1]] == [100.5, 100.5]
        assert second[-1] == first[-1]  # after the loop: those of the training
        assert all(means["loss"] < 12 for means in first)


def last_losses() -> list[float]:
    """Returns what `World.loss` says after loops that were left at different places."""
    found = []
    with lockstep.init(seed=1) as world:
        model: Any = torch.nn.Linear(1, 1)
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def train(loss: float) -> None:
            world.backward(model(torch.ones(1, 1)).mean() * 0 + loss)
            optimizer.step()
            optimizer.zero_grad()

        train(1000.0)  # a warm-up, outside of any loop
        found.append(world.loss())
        loader = world.loader(torch.arange(6.0), 2)
        for number, _ in enumerate(loader):
            train(float(number))
        found.append(world.loss())
        for number, _ in enumerate(loader):
            if number == 2:  # before it is trained on
                break
            train(10.0 + number)
        found.append(world.loss())
        for _ in loader:
            break
        found.append(world.loss())
        train(2000.0)
        found.append(world.loss())
        for _ in world.loader(torch.arange(6.0), 4, num_micro_batches=2):
            world.backward(model(torch.ones(1, 1)).mean() * 0 + 3000.0)
            break
        with pytest.raises(UsageError, match="backward was not given a loss"):
            world.loss()
    return found


def test_the_loss_after_a_loop_is_that_of_the_last_global_batch() -> None:
    assert run_ranks(last_losses, 2) == [[1000.0, 2.0, 11.0, 11.0, 2000.0]] * 2

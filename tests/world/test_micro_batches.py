"""A training loop in global batches: what it may ask of them, on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import mean_loss, mlp, tensors
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.strategies import Pipeline

pytestmark = pytest.mark.ranks

STEPS = 12
RATES = [0.5 / (1 + step) for step in range(STEPS)]


def tokens() -> TensorDataset:
    """50 sequences of 6 tokens; of the labels most of a sample may be padding, or all."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randint(11, (50, 6), generator=generator)
    kept = torch.rand(50, 6, generator=generator) < torch.rand(50, 1, generator=generator)
    return TensorDataset(inputs, torch.where(kept, inputs.roll(1, 1), -100))


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the tokens that count."""
    scores, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
    return F.cross_entropy(scores, labels, ignore_index=-100, reduction="sum") / max(
        1, int((labels != -100).sum())
    )


def counted(batch: tuple[Tensor, Tensor]) -> Tensor:
    """What a batch weighs."""
    return (batch[1] != -100).sum()


def problem(kind: str) -> Any:
    """Model, data, loss, weight."""
    if kind == "tokens":
        torch.manual_seed(3)
        return nn.Embedding(11, 11).double(), tokens(), token_loss, counted
    return mlp(), tensors(), mean_loss, None


def on_one_device(kind: str) -> list[float]:
    """The losses of the global batches, each computed in one piece."""
    model, data, loss_of, _ = problem(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATES[step]
        begin = step % 4 * 16  # the fourth has 2 samples
        loss = loss_of(model, data[begin : min(begin + 16, 50)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_global_batches(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The loop of nanoGPT: a learning rate at the top, logging and evaluation now and then."""
    losses: list[float] = []
    evaluated, turns = [], 0
    with lockstep.init(**settings) as world:
        model, data, loss_of, weight = problem(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        train = world.loader(data, 16, weight=weight)
        test = world.loader(data, 10, micro_batch_size=2)
        assert (world.step, world.is_last_micro_batch) == (0, True)
        while world.step < STEPS:
            for batch in train:
                turns += 1
                optimizer.param_groups[0]["lr"] = RATES[world.step]
                world.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                loss = world.loss()
                if not world.is_last_micro_batch:
                    assert loss is None
                    continue
                losses.append(loss)
                assert world.step == len(losses)
                if world.step % 5 == 0:
                    with torch.no_grad():
                        assert all(world.is_last_micro_batch for _ in test)
                    evaluated.append(world.step)
                    assert world.loss() == loss
    return {"losses": losses, "evaluated": evaluated, "turns": turns}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["samples", "tokens"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"micro_batch_size": 3}, {"micro_batch_size": 2, "shares": "uneven"}],
    ids=["whole", "micro-batches", "uneven"],
)
def test_a_loop_knows_its_global_batches(kind: str, settings: dict[str, Any], size: int) -> None:
    if settings.get("shares"):  # the last rank has no sample of the last batch
        settings = {**settings, "shares": tuple(range(size, 0, -1))}
    expected = on_one_device(kind)
    for found in run_ranks(in_global_batches, size, kind, settings):
        assert found["losses"] == pytest.approx(expected, rel=1e-12)
        assert found["evaluated"] == [5, 10]
        assert (found["turns"] > STEPS) == bool(settings)


def test_under_a_pipeline_all_stages_know_the_loss() -> None:
    strategy = Pipeline(num_micro_batches=3)
    for found in run_ranks(in_global_batches, 2, "samples", {"strategy": strategy}):
        assert found["losses"] == pytest.approx(on_one_device("samples"), rel=1e-12)


def test_without_a_loader_each_step_is_a_global_batch() -> None:
    with lockstep.init() as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for step in range(3):
            losses = [mean_loss(model, tensors()[:4]) for _ in range(2)]
            for loss in losses:
                world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert (world.step, world.is_last_micro_batch) == (step + 1, True)
            assert world.loss() == pytest.approx(2 * losses[0].item())


def flags_of_a_loop_that_skips(numbers: set[int], after_forward: bool = False) -> list[bool]:
    """`is_last_micro_batch` of each micro-batch, in global batches of 4 and 3 samples."""
    flags = []
    with lockstep.init(num_micro_batches=2) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, batch in enumerate(world.loader(tensors(28), 7)):
            flags.append(world.is_last_micro_batch)
            loss = mean_loss(model, batch) if after_forward else None
            if number in numbers:
                continue
            world.backward(mean_loss(model, batch) if loss is None else loss)
            optimizer.step()
            optimizer.zero_grad()
    return flags


@pytest.mark.parametrize("skipped", [{2, 3, 5}, {0}, {0, 1}, {0, 1, 2}, {2, 3, 4}])
def test_a_loop_knows_its_global_batches_after_it_has_skipped_some(skipped: set[int]) -> None:
    assert flags_of_a_loop_that_skips(skipped) == [False, True] * 4


def weights_without(left_out: set[int], how: str) -> Tensor:
    """The weights after a training in global batches of 4 and 3 samples that leaves some out."""
    with lockstep.init(num_micro_batches=2) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, batch in enumerate(world.loader(tensors(28), 7)):
            if number in left_out and how == "continue":
                continue
            loss = mean_loss(model, batch)
            world.backward(0 * loss if number in left_out else loss)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("left_out", [{0}, {0, 1, 2}, {2, 3, 4}])
def test_batches_that_are_skipped_count_as_those_whose_loss_is_0(left_out: set[int]) -> None:
    skipped = weights_without(left_out, "continue")
    assert torch.equal(skipped, weights_without(left_out, "0 * loss"))


def test_a_loop_that_has_fetched_ahead_is_at_the_batch_that_it_holds() -> None:
    with lockstep.init(num_micro_batches=2) as world:
        batches = iter(world.loader(tensors(28), 7))
        first = next(batches)
        second = next(batches)
        assert not world.is_last_micro_batch  # the loop may train on the first of them
        del first
        assert world.is_last_micro_batch
        del second, batches


def test_skipped_batches_of_other_weight_are_said() -> None:
    with pytest.raises(UsageError, match="a loop that skips batches which weigh differently"):
        flags_of_a_loop_that_skips({2, 5}, after_forward=True)


def test_gradients_of_an_earlier_global_batch_may_be_set_to_zero() -> None:
    """The loop skips the first micro-batch of the second global batch."""
    with lockstep.init(num_micro_batches=2) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        numbers = []
        for number, batch in enumerate(world.loader(tensors(16), 8)):
            if number == 2:
                continue
            world.backward(mean_loss(model, batch))
            numbers.append(number)
            if world.is_last_micro_batch:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        assert numbers == [0, 1, 3]


def test_a_closure_that_is_called_again_and_again_counts_once() -> None:
    with lockstep.init() as world:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        model, optimizer = world.prepare(model, optimizer)
        for batch in world.loader(tensors(), 10):
            values = []

            def closure(batch: Any = batch, values: list[float] = values) -> Tensor:
                optimizer.zero_grad()
                values.append(mean_loss(model, batch))
                world.backward(values[-1])
                return values[-1]

            optimizer.step(closure)
            assert len(values) > 1
            assert world.loss() == values[-1].item()


def test_a_loss_that_is_not_known_is_not_made_up() -> None:
    with lockstep.init() as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for batch in world.loader(tensors(), 10, micro_batch_size=5):
            loss = mean_loss(model, batch)
            if world.is_last_micro_batch:
                with pytest.raises(UsageError, match="was not given a loss of this micro-batch"):
                    world.loss()
            world.backward(loss)
            loss_of_last_batch = world.loss()
            optimizer.step()
        assert world.loss() == loss_of_last_batch  # after the loop, that of the last global batch


def test_a_resumed_training_goes_on_counting(tmp_path: Any) -> None:
    for begun in (0, 5):
        with lockstep.init(micro_batch_size=5) as world:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            train = world.loader(tensors(), 10)
            checkpoint = world.checkpoint(tmp_path, model=model, optimizer=optimizer, loader=train)
            checkpoint.resume()
            assert world.step == begun
            for batch in train:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            checkpoint.save()
            assert world.step == begun + 5

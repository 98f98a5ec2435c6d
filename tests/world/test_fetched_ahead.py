"""Loops that fetch batches before they train on them: the factor belongs to the batch."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors, weights
from ranks import RankFailed, run_ranks

import lockstep
from lockstep.errors import LockstepWarning, UsageError

pytestmark = pytest.mark.ranks

SAMPLES, BATCH = 26, 8  # on 3 ranks all parts are uneven, and the last batch is short

Order = Callable[[Iterable[Any]], Iterable[Any]]


def prefetched(loader: Iterable[Any], depth: int = 1) -> Iterator[Any]:
    """Gives each batch when `depth` further ones are fetched."""
    waiting = iter(loader)
    fetched = list(itertools.islice(waiting, depth))
    for batch in waiting:
        fetched.append(batch)
        yield fetched.pop(0)
    yield from fetched


def read_by_a_thread(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches that are all fetched by another thread first."""
    batches: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: [batches.put(batch) for batch in loader])
    thread.start()
    thread.join()
    while not batches.empty():
        yield batches.get()


def repeated(loader: Iterable[Any]) -> Iterator[Any]:
    return itertools.islice(itertools.cycle(loader), 24)


def one_batch(loader: Iterable[Any]) -> Iterator[Any]:
    return itertools.repeat(next(iter(loader)), 3)


def without_the_third(loader: Iterable[Any]) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number != 2:
            yield batch


def shuffled(loader: Iterable[Any]) -> list[Any]:
    batches = list(loader)
    random.Random(3).shuffle(batches)
    return batches


WHOLE: dict[str, Order] = {
    "prefetched": prefetched,
    "prefetched, three": partial(prefetched, depth=3),
    "list": list,
    "thread": read_by_a_thread,
    "cycle": repeated,
    "one batch": one_batch,
    "one left out": without_the_third,
    "shuffled": shuffled,
}
IN_PIECES = ["prefetched", "prefetched, three", "list", "thread"]


def train(
    world: lockstep.World,
    order: Order,
    prepare: Callable[[Any], Any] = lambda x: x,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Two epochs over batches in some order; the weights, and the losses of the global batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer = world.prepare(model, optimizer)
    loader = world.loader(tensors(SAMPLES), BATCH, shuffle=True, **options)
    losses = []
    for _ in range(2):
        for x, y in order(loader):
            world.backward(mean_loss(model, (prepare(x), y)))
            loss = world.loss()
            if loss is not None:
                losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), losses


def all_orders(**options: Any) -> dict[str, Any]:
    with lockstep.init() as world:
        found = {name: train(world, order) for name, order in WHOLE.items()}
        for name in IN_PIECES:
            found[f"{name}, pieces"] = train(world, WHOLE[name], micro_batch_size=1)
        return found


def on_one_device(order: Order, epochs: list[list[Any]]) -> tuple[Any, list[float]]:
    """The same training in plain torch, on whole global batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for batches in epochs:
        for batch in order(batches):
            loss = mean_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return weights(model), losses


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with lockstep.init() as world:
        loader = world.loader(tensors(SAMPLES), BATCH, shuffle=True)
        epochs = [list(loader) for _ in range(2)]
    return {name: on_one_device(order, epochs) for name, order in WHOLE.items()}


@pytest.mark.parametrize(
    "size",
    [pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough), 3],
)
def test_the_factor_is_that_of_the_batch_that_the_loss_came_from(size, expected):
    for found in run_ranks(all_orders, size):
        for name, (trained, losses) in found.items():
            plain, plain_losses = expected[name.removesuffix(", pieces")]
            assert losses == pytest.approx(plain_losses), name
            assert difference(plain, trained) < 1e-12, name


def errors() -> list[str]:
    """What loops are told whose batches cannot be known from what the model is called with."""
    found = []
    with lockstep.init() as world:
        for order, options in [
            (prefetched, {}),
            (list, {}),
            (one_batch, {}),
            (shuffled, {"micro_batch_size": 1}),
        ]:
            prepare = (lambda x: x) if options else (lambda x: x * 1.0)
            try:
                train(world, order, prepare, **options)
            except UsageError as error:
                found.append(str(error))
            else:
                found.append("")
    return found


def test_where_it_cannot_be_known_it_is_an_error():
    for ahead, listed, single, order in run_ranks(errors, 3):
        assert "the loop holds several batches that no backward pass has followed" in ahead
        assert "so its loss counts differently for each" in ahead
        assert "the loop holds several batches of a loader that has ended" in listed
        assert "the loop holds a batch of a loader that has ended" in single
        assert "do not follow each other" in order


def derived_and_left_out() -> tuple[float, float]:
    """Loops that are as usual, with tensors made of what the loader gave."""
    with lockstep.init() as world:
        usual, _ = train(world, lambda loader: loader, lambda x: x * 1.0)
        same, _ = train(world, lambda loader: loader)
        return difference(usual, same), world.step


def test_usual_loops_may_convert_their_batches():
    for size in (1, 3):
        for found, steps in run_ranks(derived_and_left_out, size):
            assert found == 0
            assert steps == 16


def fetched_before_the_step() -> str:
    """A loop that fetches between the backward pass and the step."""
    with lockstep.init() as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model, optimizer = world.prepare(model, optimizer)
        batches = iter(world.loader(tensors(SAMPLES), BATCH))
        world.backward(mean_loss(model, next(batches)))
        next(batches)
        try:
            optimizer.step()
        except UsageError as error:
            return str(error)
    return ""


def test_a_batch_that_is_fetched_before_the_step():
    for message in run_ranks(fetched_before_the_step, 3):
        assert "optimizer.step() after another batch was fetched" in message


def two_loaders(apart: bool) -> Any:
    """Trains on two loaders at a time, whose batches weigh differently on 3 ranks."""
    with lockstep.init() as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model, optimizer = world.prepare(model, optimizer)
        one = world.loader(tensors(32), 8, shuffle=True)
        other = world.loader(tensors(48), 12)
        losses = []
        for a, b in zip(one, other, strict=True):
            if apart:
                world.backward(mean_loss(model, a))
                world.backward(mean_loss(model, b))
            else:
                world.backward(mean_loss(model, a) + mean_loss(model, b))
            losses.append(world.loss())
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), losses


def test_two_loaders_at_a_time_are_exact_on_any_number_of_ranks():
    expected, expected_losses = run_ranks(two_loaders, 1, False)[0]
    for size in (1, 3):
        for trained, losses in run_ranks(two_loaders, size, True):
            assert losses == pytest.approx(expected_losses)
            assert difference(expected, trained) < 1e-12


def test_one_loss_of_two_loaders_that_weigh_differently():
    with pytest.raises(RankFailed, match="for batches that weigh differently") as failed:
        run_ranks(two_loaders, 3, False)
    assert "world.backward for each batch by itself" in str(failed.value)


def as_given(x: torch.Tensor) -> torch.Tensor:
    return x


def converted(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


Prepare = Callable[[torch.Tensor], torch.Tensor]


def one_loss(
    world: lockstep.World,
    one: Iterable[Any],
    other: Iterable[Any],
    of_one: Prepare,
    of_other: Prepare,
) -> str:
    """Trains on one loss of two loaders; what an error or a warning says of it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = world.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LockstepWarning)
        try:
            for (a, a_labels), (b, b_labels) in zip(one, other, strict=False):
                loss = mean_loss(model, (of_one(a), a_labels))
                world.backward(loss + mean_loss(model, (of_other(b), b_labels)))
                optimizer.step()
                optimizer.zero_grad()
        except UsageError as error:
            return str(error)
    return "".join(str(each.message) for each in caught if "two loaders" in str(each.message))


def converted_batches_of_two_loaders() -> dict[str, str]:
    """What is said where the batches of two loaders cannot all be recognised."""
    found = {}
    for name, of_one in [("cycle", converted), ("cycle, one is known", as_given)]:
        with lockstep.init() as world:
            ends_first = itertools.cycle(world.loader(tensors(16), 8))
            other = world.loader(tensors(29), 8)
            found[name] = one_loss(world, ends_first, other, of_one, converted)
    for name, size in [("zip", 8), ("alike", 9)]:
        with lockstep.init() as world:
            one, other = world.loader(tensors(4 * size), size), world.loader(tensors(48), 12)
            found[name] = one_loss(world, one, other, as_given, converted)
    return found


def test_a_loss_of_two_loaders_whose_batches_are_converted():
    by_rank = run_ranks(converted_batches_of_two_loaders, 3)
    for found in by_rank:
        assert "several batches of two loaders, one of which has ended" in found["cycle"]
        assert "instead of itertools.cycle" in found["cycle"]
        assert found["alike"] == ""
    for name in ("cycle, one is known", "zip"):
        assert "so its weight is wrong if these tensors were made of the other" in by_rank[0][name]
        assert [found[name] for found in by_rank[1:]] == ["", ""]


def train_and_clear_first(
    world: lockstep.World, depth: int, clear: str, **options: Any
) -> dict[str, torch.Tensor]:
    """Trains with the gradients cleared before each forward pass, or after each step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer = world.prepare(model, optimizer)
    loader = world.loader(tensors(SAMPLES), BATCH, shuffle=True, **options)
    for _ in range(2):
        for batch in prefetched(loader, depth):
            if clear == "before the forward pass":
                optimizer.zero_grad()
            world.backward(mean_loss(model, batch))
            optimizer.step()
            if clear == "after the step":
                optimizer.zero_grad()
            if clear == "through the model":
                model.zero_grad()
    return weights(model)


PLACES_OF_ZERO_GRAD = ["before the forward pass", "after the step"]


def clear_first_in_all_loops(virtual_ranks: int | None) -> dict[str, Any]:
    """Returns what each loop trains, by its name.

    The loader ends while the loop still has batches, in the middle of a global batch too.
    """
    with lockstep.init(virtual_ranks=virtual_ranks) as world:
        found = {"plain": train_and_clear_first(world, 0, "after the step")}
        for depth, clear, size in itertools.product([1, 2], PLACES_OF_ZERO_GRAD, [None, 1]):
            name = f"{depth} ahead, cleared {clear}, micro-batches of {size}"
            found[name] = train_and_clear_first(world, depth, clear, micro_batch_size=size)
        return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_loop_that_fetches_ahead_may_clear_gradients_before_the_forward_pass(size: int) -> None:
    for virtual_ranks in (None, 2):
        for found in run_ranks(clear_first_in_all_loops, size, virtual_ranks):
            plain = found.pop("plain")
            for name, trained in found.items():
                assert difference(plain, trained) < 1e-12, (virtual_ranks, name)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_clearing_through_the_model_is_noticed_with_virtual_ranks(depth: int) -> None:
    """The loop clears what virtual rank 0 has computed, before virtual rank 1 adds to it."""
    with (
        lockstep.init(virtual_ranks=2) as world,
        pytest.raises(UsageError, match="gradients cleared between the micro-batches"),
    ):
        train_and_clear_first(world, depth, "through the model")

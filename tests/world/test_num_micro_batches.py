"""BatchNorm and micro-batches: what is said, and the setting that keeps the numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors, weights
from ranks import run_ranks

import lockstep
from lockstep.errors import LockstepWarning, SettingError
from lockstep.settings import resolve_settings

pytestmark = pytest.mark.ranks


def train(world: lockstep.World, **options: Any) -> tuple[Any, list[float]]:
    """Two epochs of 26 samples in batches of 8, with BatchNorm."""
    model = mlp(batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer = world.prepare(model, optimizer)
    loader = world.loader(tensors(26), 8, shuffle=True, **options)
    losses = []
    for _ in range(2):
        for batch in loader:
            world.backward(mean_loss(model, batch))
            loss = world.loss()
            if loss is not None:
                losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), losses


def of_run_and_loader() -> Any:
    with lockstep.init(num_micro_batches=3) as world:
        of_run = train(world)
    with lockstep.init() as world:
        return of_run, train(world, num_micro_batches=3), train(world, num_micro_batches=2)


def test_a_number_of_micro_batches_keeps_the_statistics_on_any_number_of_ranks():
    expected = of_run_and_loader()
    assert difference(expected[0][0], expected[1][0]) == 0
    assert difference(expected[0][0], expected[2][0]) > 0.01
    for found in run_ranks(of_run_and_loader, 3):
        for (one, one_losses), (several, losses) in zip(expected, found, strict=True):
            assert losses == pytest.approx(one_losses)
            assert difference(one, several) < 1e-11


def said(**options: Any) -> tuple[list[str], list[str]]:
    """The warnings, and the rows about BatchNorm in the block of choices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_run = {k: v for k, v in options.items() if k != "of_loader"}
        with lockstep.init(**of_run) as world:
            model = mlp(batch_norm=True)
            rows = world._preparer.choices
            print_choices = world._print_choices
            world._print_choices = lambda: None  # type: ignore[method-assign]
            world.prepare(model)
            world.loader(tensors(24), 24, **options.get("of_loader", {}))
            chosen = [f"{row.value}: {row.reason}" for row in rows if row.name == "batchnorm"]
            del print_choices
    return [str(w.message) for w in caught if issubclass(w.category, LockstepWarning)], chosen


def all_said() -> Any:
    return (
        said(),
        said(micro_batch_size=4),
        said(num_micro_batches=3),
        said(of_loader={"micro_batch_size": 4}),
        said(micro_batch_size=24),
    )


def test_what_batchnorm_normalises_by_is_said_as_it_is():
    whole, by_size, by_number, of_loader, one_piece = run_ranks(all_said, 2)[0]
    assert whole == ([], ["1 synchronised: statistics of the global batch, as on one device"])
    for messages, chosen in (by_size, by_number, of_loader):
        assert "of each micro-batch" in chosen[-1]
        assert "not of the global batch" in chosen[-1]
        assert len(messages) == (messages is not by_number[0])
    assert "micro_batch_size=4 and a model with BatchNorm" in by_size[0][0]
    assert "num_micro_batches=3 instead gives these numbers everywhere" in of_loader[0][0]
    assert one_piece[0] == []


def test_one_process_is_warned_too():
    messages, _ = said(micro_batch_size=4)
    assert "num_micro_batches=6 instead" in messages[0]


def test_either_the_number_or_the_size():
    with pytest.raises(SettingError, match="either says how a global batch is cut"):
        resolve_settings({"LOCKSTEP_MICRO_BATCH_SIZE": "4"}, num_micro_batches=2)
    with pytest.raises(SettingError, match="not a whole number of at least 1"):
        resolve_settings({}, num_micro_batches=0)
    assert resolve_settings({"LOCKSTEP_NUM_MICRO_BATCHES": "4"}).num_micro_batches == 4
    with lockstep.init(micro_batch_size=2) as world:
        assert world.loader(tensors(24), 8, num_micro_batches=2).micro_batches == 2
        with pytest.raises(SettingError, match="either says"):
            world.loader(tensors(24), 8, num_micro_batches=2, micro_batch_size=2)
    with lockstep.init(num_micro_batches=2) as world:
        assert world.loader(tensors(24), 8).micro_batches == 2
        assert world.loader(tensors(24), 8, micro_batch_size=8).micro_batches == 1

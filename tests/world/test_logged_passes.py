"""A value belongs to a pass over a loader, which all ranks know by the same identity.

Every loop here is one in which the ranks, or the order of the calls, are not alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.extensions.report.charts import logged_values
from lockstep.extensions.report.metrics import SumsCopy, WeightedSums
from lockstep.extensions.report.reading import Record

pytestmark = pytest.mark.ranks

BATCH = 6
STEPS = 4


def samples(*values: float) -> TensorDataset:
    """A data set of these values, each in six samples."""
    return TensorDataset(
        torch.tensor(values, dtype=torch.float32).repeat_interleave(BATCH).reshape(-1, 1)
    )


class Training:
    """A model that is trained on the values 0 to 3, a batch of each."""

    def __init__(self, world: lockstep.World) -> None:
        self.world = world
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model, self.optimizer = world.prepare(model, optimizer)
        self.loader = world.loader(samples(*range(STEPS)), BATCH)

    def step(self, x: torch.Tensor) -> None:
        self.world.backward(self.model(x).pow(2).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank_has_no_samples(world: lockstep.World) -> Any:
    """Evaluates three times after one step.

    Rank 0 has all samples of the first evaluation, and logs in the third alone.
    """
    training = Training(world)
    one = world.loader(TensorDataset(torch.zeros(1, 1)), BATCH)
    other = world.loader(samples(10.0, 30.0), 2 * BATCH)
    found = []
    for (x,) in training.loader:
        training.step(x)
    with torch.no_grad():
        for loader in (one, other):
            for (x,) in loader:
                world.log(acc=x.mean())
            found.append(world.means()["acc"])
        for turn in (0, 1):
            for (x,) in other:
                if turn == 1 or world.is_main:
                    world.log(twice=x.mean())
    found.append(world.means()["twice"])
    return found


def rank_0_looks_alone(world: lockstep.World) -> Any:
    """Rank 0 alone evaluates within the loop, and looks at a batch, before all evaluate."""
    training = Training(world)
    validation = world.loader(samples(10.0, 30.0), 2 * BATCH)
    for (x,) in training.loader:
        training.step(x)
        world.log(rank=float(world.rank))
        if world.is_main:
            with torch.no_grad():
                next(iter(validation))
                for _ in training.loader:
                    world.log(alone=1.0)
                    break
    found = [world.means()]
    with torch.no_grad():
        for (x,) in validation:
            world.log(acc=x.mean())
    return [*found, world.means()]


def many_names(world: lockstep.World) -> Any:
    """Each rank meets forty classes in another order."""
    training = Training(world)
    for (x,) in training.loader:
        training.step(x)
        for number in range(40):
            world.log(**{f"acc_{(number + 13 * world.rank) % 40}": float(world.rank)})
    return set(world.means().values()), len(world.means())


def fetched_ahead(world: lockstep.World) -> Any:
    """A loop that fetches a batch ahead trains on the last one when the loader is at its end."""
    training = Training(world)
    batches = iter(training.loader)
    following = next(batches)
    while following is not None:
        (x,) = following
        following = next(batches, None)
        training.step(x)
        world.log(value=x.mean())
    means = world.means()
    world.log(outside=7.0)
    return means


def kept_batches(world: lockstep.World) -> Any:
    """A loop over `list(loader)`, of which the last global batch has fewer samples."""
    training = Training(world)
    loader = world.loader(TensorDataset(torch.tensor([[1.0]] * BATCH + [[4.0]] * 3)), BATCH)
    for (x,) in list(loader):
        training.step(x)
        world.log(value=x.mean() if len(x) else float("nan"))
    means = world.means()
    world.log(value=7.0)  # the loop is over
    return means


kept: list[Any] = []


def kept_iterators(world: lockstep.World) -> Any:
    """The iterators of a training and of an evaluation are never closed."""
    training = Training(world)
    validation = world.loader(samples(10.0, 30.0), BATCH)
    batches = iter(training.loader)
    with torch.no_grad():
        validated = iter(validation)
    kept.extend([batches, validated])
    for step in range(STEPS):
        (x,) = next(batches)
        training.step(x)
        world.log(value=x.mean())
        if step == 1:
            with torch.no_grad():
                (x,) = next(validated)
                world.log(validated=x.mean())
    return world.means()


def left_early(world: lockstep.World) -> Any:
    """Loops with a bar that are left by `break`; those without one are recorded likewise."""
    training = Training(world)
    found = []
    for _ in range(2):
        for (x,) in world.progress(training.loader):
            training.step(x)
            world.log(rank=float(world.rank))
            if world.step % 2 == 0:
                break
        found.append(world.means())
    return found


class LateEvent:
    """An event that arrives when it was asked for twice."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 2

    def synchronize(self) -> None:
        self._asked = 2


def late_copies(world: lockstep.World) -> Any:
    """On rank 1 what was logged arrives later on the host than on the other ranks."""
    training = Training(world)
    start_copy = WeightedSums.start_copy

    def start_late(sums: WeightedSums) -> SumsCopy:
        return start_copy(sums)._replace(arrived=LateEvent())

    if world.rank == 1:
        WeightedSums.start_copy = start_late  # type: ignore[method-assign]
    try:
        for (x,) in training.loader:
            training.step(x)
            world.log(rank=float(world.rank))
        world.close()
    finally:
        WeightedSums.start_copy = start_copy  # type: ignore[method-assign]


def other_loops(world: lockstep.World) -> Any:
    """Ranks that ask for the means of different loops are told so."""
    training = Training(world)
    for (x,) in training.loader:
        training.step(x)
        world.log(value=1.0)
    if world.is_main:
        with torch.no_grad():
            for _ in training.loader:
                world.log(value=2.0)
    warnings.simplefilter("ignore")  # that rank 0 has evaluated alone
    with pytest.raises(UsageError, match="different loops: rank 0 over loader 0, begun after step"):
        world.means()


def spread_over_ranks(world: lockstep.World) -> Any:
    """A DTensor of which each rank has a part is left out: rank 0 alone may log it."""
    training = Training(world)
    for (x,) in training.loader:
        training.step(x)
        if world.is_main:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                world.log(norm=training.model.weight.norm(), value=1.0)
            assert len(warned) == (world.step == 1)
            assert all("values.full_tensor()" in str(warning.message) for warning in warned)
    return world.means()


Loop = Callable[[lockstep.World], Any]

MAIN_LOOPS: list[Loop] = [
    rank_has_no_samples, rank_0_looks_alone, fetched_ahead, kept_iterators, left_early,
]  # fmt: skip
OTHER_LOOPS: list[Loop] = [
    many_names, kept_batches, late_copies, other_loops, spread_over_ranks,
]  # fmt: skip


def run_loops(loops: list[Loop], folder: Path) -> dict[str, Any]:
    """Returns what the script is told in each loop."""
    told = {}
    for loop in loops:
        strategy = "fsdp" if loop is spread_over_ranks else None
        world = lockstep.init(strategy, seed=1, report=folder / loop.__name__)
        with warnings.catch_warnings(action="error"), world:
            told[loop.__name__] = loop(world)
    return told


def recorded(folder: Path, loop: Callable[..., Any]) -> dict[str, list[tuple[int, float]]]:
    """Returns the values of each curve, with their steps."""
    (start,) = Record(folder / loop.__name__).starts
    curves = {}
    for title, (steps, values) in logged_values(start).items():
        pairs = zip(steps.tolist(), values.tolist(), strict=True)
        curves[title] = [(int(step), round(value, 5)) for step, value in pairs]
    return curves


def each_step(value: float) -> list[tuple[int, float]]:
    return [(step, value) for step in range(1, STEPS + 1)]


def expected_of(size: int) -> dict[Loop, tuple[Any, dict[str, list[tuple[int, float]]]]]:
    """Returns what the script is told in each loop, and what is recorded."""
    mean_rank = (size - 1) / 2
    of_rank = {"rank (training)": each_step(mean_rank)}
    means = [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.5)]
    names = {f"acc_{number} (training)": each_step(mean_rank) for number in range(40)}
    return {
        rank_has_no_samples: (
            [0.0, 20.0, 20.0],
            {
                "acc (evaluation)": [(4, 0.0)],
                "acc (evaluation 2)": [(4, 20.0)],
                "twice (evaluation)": [(4, 20.0)],
            },
        ),
        rank_0_looks_alone: (
            [{"rank": mean_rank}, {"acc": 20.0}],
            {**of_rank, "alone (evaluation)": each_step(1.0), "acc (evaluation)": [(4, 20.0)]},
        ),
        fetched_ahead: ({"value": 1.5}, {"value (training)": means, "outside": [(4, 7.0)]}),
        kept_iterators: (
            {"value": 1.5},
            {"value (training)": means, "validated (evaluation)": [(4, 10.0)]},
        ),
        left_early: ([{"rank": mean_rank}] * 2, of_rank),
        many_names: (({mean_rank}, 40), names),
        kept_batches: (
            {"value": 2.0},
            {"value (training)": [(1, 1.0), (2, 2.0)], "value": [(2, 7.0)]},
        ),
        late_copies: (None, of_rank),
        other_loops: (
            None,
            {"value (training)": each_step(1.0), "value (evaluation)": [(4, 2.0)]},
        ),
        spread_over_ranks: ({"value": 1.0}, {"value (training)": each_step(1.0)}),
    }


@pytest.mark.parametrize(
    ("size", "loops"),
    [
        (2, MAIN_LOOPS),
        pytest.param(2, OTHER_LOOPS, marks=pytest.mark.thorough),
        pytest.param(3, MAIN_LOOPS + OTHER_LOOPS, marks=pytest.mark.thorough),
    ],
)
def test_loops_in_which_ranks_are_not_alike(size: int, loops: list[Loop], tmp_path: Path) -> None:
    told, *others = run_ranks(run_loops, size, loops, tmp_path)
    assert others == [told] * (size - 1)
    expected = expected_of(size)
    for loop in loops:
        assert (told[loop.__name__], recorded(tmp_path, loop)) == expected[loop], loop


class Hangs:
    """An event of a GPU that never arrives."""

    def __init__(self, *, has_failed: bool) -> None:
        self._has_failed = has_failed

    def query(self) -> bool:
        if self._has_failed:
            raise RuntimeError("CUDA error")
        return False

    def synchronize(self) -> None:
        pytest.fail("it is waited for a device that may never answer")


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("is_shown", [False, True])
def test_after_an_error_no_device_is_waited_for(
    is_shown: bool, has_failed: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    start_copy = WeightedSums.start_copy

    def start_in_vain(sums: WeightedSums) -> SumsCopy:
        copy = start_copy(sums)
        if world.step == 1:
            return copy
        if has_failed and world.step == 3:
            raise RuntimeError("CUDA error")
        return copy._replace(arrived=Hangs(has_failed=has_failed))

    with pytest.raises(KeyboardInterrupt), lockstep.init(report=tmp_path) as world:
        monkeypatch.setattr(WeightedSums, "start_copy", start_in_vain)
        model: Any = nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(torch.ones(8, 1), 2)
        for x in world.progress(loader) if is_shown else loader:
            world.backward(model(x).mean())
            optimizer.step()
            world.log(value=float(world.step))
            if world.step == 3:
                raise KeyboardInterrupt
    record = Record(tmp_path).starts[0]
    assert record.end == "failed"
    assert record.main.has_lost_lines
    assert [(mean.step, mean.mean) for mean in record.logged] == [(1, 1.0)]

from __future__ import annotations

import math
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lockstep.distributed.collectives import Collectives
from lockstep.extensions.report.metrics import RunningMeans, WeightedSums
from lockstep.machine.topology import Topology

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


def finished(means: RunningMeans) -> dict[str, float]:
    means.finish()
    return means.values


def alone(every: int = 1) -> RunningMeans:
    return RunningMeans(Collectives(Topology(), CPU), every)


def test_weighted_mean_of_floats_and_tensors() -> None:
    means = alone()
    means.sums.add(3, loss=torch.tensor(2.0), acc=1.0)
    means.sums.add(1, loss=torch.tensor([4.0]), acc=0)
    means.samples = 4
    assert finished(means) == {"loss": 2.5, "acc": 0.75}
    assert means.total_samples == 4


def test_no_graph_is_kept_and_the_value_is_not_changed() -> None:
    means = alone()
    parameter = torch.ones(1, requires_grad=True)
    loss = (parameter * 3).sum()
    means.sums.add(2, loss=loss)
    assert loss.item() == 3
    assert not means.sums._sums["loss"].total.requires_grad
    assert finished(means) == {"loss": 3.0}


def test_empty_share_adds_nothing_not_even_nan() -> None:
    nan = torch.tensor(float("nan"))
    means = alone()
    means.sums.add(0, loss=nan, acc=float("nan"))
    assert finished(means) == {}
    means.sums.add(5, loss=1.5, acc=1.0)
    assert finished(means) == {"loss": 1.5, "acc": 1.0}


def test_a_real_nan_is_shown() -> None:
    means = alone()
    means.sums.add(1, loss=torch.tensor(float("nan")))
    means.sums.add(1, loss=torch.tensor(1.0))
    assert str(finished(means)["loss"]) == "nan"


def test_names_may_come_and_go() -> None:
    means = alone()
    for step in range(4):
        means.sums.add(1, loss=float(step))
        if step == 2:
            means.sums.add(1, weight=7.0)
    assert finished(means) == {"loss": 1.5, "weight": 7.0}


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(True),
        torch.tensor(1, dtype=torch.int32),
        torch.tensor(1.0).half(),
        1,
        np.int64(1),
        torch.tensor(1, dtype=torch.uint64),
    ],
)
def test_kinds_of_numbers(value: Any) -> None:
    means = alone()
    means.sums.add(3, x=value)
    assert finished(means) == {"x": 1.0}


def test_sums_are_kept_in_float64() -> None:
    means = alone()
    for value in (1e8, 1.0, -1e8):
        means.sums.add(1, x=torch.tensor(value, dtype=torch.float32))
    assert finished(means) == {"x": pytest.approx(1 / 3, rel=1e-12)}


def test_inference_mode_and_normal_mode_mix() -> None:
    means = alone()
    with torch.inference_mode():
        means.sums.add(1, x=torch.tensor(1.0) * 1)
    means.sums.add(1, x=torch.tensor(3.0))
    with torch.inference_mode():
        means.sums.add(1, x=torch.tensor(5.0) * 1)
        assert finished(means) == {"x": 3.0}


def test_known_every_so_many_global_batches() -> None:
    means = alone(every=3)
    known = []
    for step in range(7):
        means.sums.add(1, x=step)
        means.step()
        known.append(means.values.get("x"))
    assert known == [None, None, 1.0, 1.0, 1.0, 2.5, 2.5]
    assert finished(means) == {"x": 3.0}


class Raises:
    """Its value cannot be had."""

    def __float__(self) -> float:
        raise KeyError("value")


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5), np.array(1.5), np.array([1.5]), Fraction(3, 2),
        Decimal("1.5"), torch.tensor([[1.5]]).to_sparse(),
        torch.tensor(1.5).to(torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_other_kinds_of_numbers(value: Any) -> None:
    means = alone()
    with warnings.catch_warnings(action="error"):
        means.sums.add(2, x=value)
    assert finished(means) == {"x": 1.5}
    means.sums.add(2, large=6 * 10**25)
    assert finished(means)["large"] == 6e25


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (10**400, "an int that is too large for a float, so it is left out"),
        (Raises(), "a Raises, not one number"),
        (torch.ones((), device="meta"), "a tensor on the meta device, which has no value"),
        (np.ones(2), "a ndarray, not one number"),
        (1j, "a complex, not one number"),
    ],
)
def test_what_is_no_number_ends_no_training(value: Any, found: str) -> None:
    means = alone()
    with pytest.warns(UserWarning, match=found):
        means.sums.add(1, x=value, y=1.0)
    assert finished(means) == {"y": 1.0}


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones((), dtype=torch.cfloat), "1", None])
def test_what_is_not_one_number_is_left_out_with_one_warning(value: Any) -> None:
    means = alone()
    with pytest.warns(UserWarning, match="not one number"):
        means.sums.add(1, loss=value, accuracy=0.5)
    with warnings.catch_warnings(action="error"):
        means.sums.add(1, loss=value, accuracy=0.5)
    assert finished(means) == {"accuracy": 0.5}


def test_names_after_the_32nd_are_not_shown_with_one_warning() -> None:
    means = alone()
    means.sums.add(1, **{f"x{i:02}": 1.0 for i in reversed(range(40))})
    with pytest.warns(UserWarning, match="the first 32 in alphabetical order"):
        assert sorted(finished(means)) == [f"x{i:02}" for i in range(32)]
    with warnings.catch_warnings(action="error"):
        assert len(finished(means)) == 32
    assert len(means.sums.read()) == 40


def test_a_copy_has_the_means_of_one_rank() -> None:
    sums = WeightedSums(CPU)
    sums.add(3, x=torch.tensor(1.0))
    sums.add(1, x=5.0)
    sums.add(0, x=math.nan, y=1.0)
    copy = sums.start_copy()
    sums.add(1, x=9.0)
    assert (copy.means(), copy.weights) == ({"x": 2.0}, {"x": 4.0})
    assert sums.read() == {"x": (17.0, 5.0), "y": (0.0, 0.0)}


def joined(every: int = 0) -> RunningMeans:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = Topology(rank=rank, size=size, local_rank=rank, local_size=size)
    return RunningMeans(Collectives(topology, CPU), every)


def value_of(rank: int, step: int) -> float:
    return 0.1 * step + rank


def weight_of(rank: int, step: int) -> int:
    """Uneven, and now and then nothing."""
    return (rank * 3 + step * 2) % 5


def log_unevenly(every: int) -> tuple[dict[str, float], int, list[float]]:
    means = joined(every)
    rank = dist.get_rank()
    seen = []
    for step in range(10):
        weight = weight_of(rank, step)
        value = value_of(rank, step) if weight else float("nan")
        means.sums.add(weight, loss=torch.tensor(value, dtype=torch.float64))
        means.sums.add(weight, **({"b": 1.0, "a": value} if rank else {"a": value, "b": 1.0}))
        means.samples += weight
        means.step()
        seen.append(means.values.get("loss", -1.0))
    means.finish()
    dist.destroy_process_group()
    return means.values, means.total_samples, seen


def exact_mean(size: int, steps: int) -> float:
    places = [(r, t) for r in range(size) for t in range(steps)]
    total = sum(weight_of(*place) * value_of(*place) for place in places)
    return total / sum(weight_of(*place) for place in places)


@pytest.mark.parametrize(("size", "every"), [(2, 1), (3, 4), (3, 0)])
def test_mean_over_ranks_is_exact_for_uneven_weights(size: int, every: int) -> None:
    prefixes = {exact_mean(size, steps) for steps in range(1, 11)}
    for values, samples, seen in run_ranks(log_unevenly, size, every):
        assert values["loss"] == pytest.approx(exact_mean(size, 10), rel=1e-12)
        assert values["a"] == pytest.approx(exact_mean(size, 10), rel=1e-12)
        assert values["b"] == 1.0
        assert samples == sum(weight_of(r, t) for r in range(size) for t in range(10))
        # What is shown on the way is the mean over all ranks up to one of the steps.
        for value in seen:
            assert value == -1.0 or any(value == pytest.approx(p, rel=1e-12) for p in prefixes)
        if every == 0:
            assert seen == [-1.0] * 10


def log_where_there_are_samples() -> dict[str, float]:
    means = joined()
    if dist.get_rank() != 1:
        means.sums.add(2, correct=torch.tensor(float(dist.get_rank())))
        means.samples += 2
    final = finished(means)
    dist.destroy_process_group()
    return final


def test_a_rank_without_batches_in_an_evaluation_needs_to_log_nothing() -> None:
    assert run_ranks(log_where_there_are_samples, 3) == [{"correct": 1.0}, {}, {"correct": 1.0}]


def log_other_names(mine: dict[int, list[str]]) -> tuple[dict[str, float], list[str]]:
    means = joined()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                means.samples += 1
                means.sums.add(1, **dict.fromkeys(mine.get(dist.get_rank(), ["loss"]), 1.0))
                means.finish()
        return means.values, [str(warning.message) for warning in warned]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mine", [{0: ["loss", "acc"]}, {0: []}, {1: ["lost"]}])
def test_ranks_that_log_other_names_are_told_and_go_on(mine: dict[int, list[str]]) -> None:
    for rank, (values, warned) in enumerate(run_ranks(log_other_names, 3, mine)):
        assert values == {}
        [text] = warned
        assert (
            f"this rank logged {', '.join(sorted(mine.get(rank, ['loss']))) or 'nothing'}" in text
        )

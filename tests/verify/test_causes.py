"""Divergences made up of numbers, each with its cause."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.verify.catalogue import ENTRIES
from lockstep.verify.causes import Cause, cause_of
from lockstep.verify.compare import (
    FLOAT32,
    FLOAT64,
    Divergence,
    RankUpdate,
    ScriptCall,
    Taken,
    Update,
    first_divergence,
)

RANDOM = np.random.default_rng(1)
ONE, OTHER = RANDOM.normal(size=(6, 4)), RANDOM.normal(size=(6, 4))
"""What the backward passes over two halves of a batch leave."""
WHOLE = (ONE + OTHER) / 2


def taken(*ids: int, **values: Any) -> Taken:
    found: dict[str, Any] = {
        "ids": ids,
        "contents": tuple(f"content {i}" for i in ids),
        "shape": "f",
        "weights": {"samples": float(len(ids))},
        **values,
    }
    return Taken(**found)


def update(gradient: np.ndarray, *batches: Taken, **values: Any) -> RankUpdate:
    found: dict[str, Any] = {
        "rates": (0.1,),
        "losses": (1.0,),
        "initial": {"w": np.ones((6, 4))},
        "held": {"w": "same"},
        "gradients": {"w": gradient},
        "parameters": {"w": 1 - 0.1 * gradient},
        **values,
    }
    return RankUpdate(taken=list(batches), **found)


ALONE = update(WHOLE, taken(0, 1, 2, 3))


def parting(
    reference: Sequence[Sequence[RankUpdate]], other: Sequence[Sequence[RankUpdate]]
) -> Divergence | None:
    return first_divergence(list(map(Update, reference)), list(map(Update, other)), FLOAT64)


def found(many: Sequence[RankUpdate], one: RankUpdate = ALONE) -> tuple[Divergence, Cause]:
    divergence = parting([[one]], [many])
    assert divergence is not None
    cause = cause_of(divergence)
    assert cause.code in ENTRIES
    assert cause.seen
    return divergence, cause


def two(gradient: np.ndarray, **values: Any) -> list[RankUpdate]:
    return [
        update(gradient, taken(0, 1), local=({"w": ONE},), **values),
        update(gradient, taken(2, 3), local=({"w": OTHER},), **values),
    ]


def test_what_is_equal_has_no_divergence() -> None:
    assert parting([[ALONE]], [two(WHOLE)]) is None
    almost = WHOLE * (1 + 1e-12)
    assert parting([[ALONE]], [two(almost)]) is None


def test_a_gradient_that_vanishes_may_differ_by_rounding() -> None:
    one = update(WHOLE, taken(0), gradients={"w": WHOLE, "bias": np.full(3, 1e-18)})
    many = [update(WHOLE, taken(0), gradients={"w": WHOLE, "bias": np.full(3, -2e-17)})]
    assert parting([[one]], [many]) is None


@pytest.mark.parametrize(
    ("factor", "code"), [(2.0, "LS201"), (0.5, "LS202"), (1.7, "LS209"), (-1.0, "LS209")]
)
def test_a_constant_ratio(factor: float, code: str) -> None:
    divergence, cause = found(two(factor * WHOLE))
    assert (divergence.what, divergence.names, cause.code) == ("gradients", ("w",), code)
    assert cause.ratio == pytest.approx(factor)


@pytest.mark.parametrize(("factor", "code"), [(0.5, "LS203"), (2.0, "LS204")])
def test_a_ratio_of_the_numbers_of_backward_passes_goes_first(factor: float, code: str) -> None:
    one = update(WHOLE, taken(0, 1), taken(2, 3), losses=(1.0, 1.0))
    assert found(two(factor * WHOLE), one)[1].code == code


@pytest.mark.parametrize("key", ["samples", "labels in tensor 1"])
def test_a_mean_of_means_is_known_by_what_the_parts_should_weigh(key: str) -> None:
    one = update(0.25 * ONE + 0.75 * OTHER, taken(0, 1, 2, 3))
    weighs = [{"samples": 2.0, key: 5.0}, {"samples": 2.0, key: 15.0}]
    many = [
        update(WHOLE, taken(0, 1, weights=weighs[0]), local=({"w": ONE},)),
        update(WHOLE, taken(2, 3, weights=weighs[1]), local=({"w": OTHER},)),
    ]
    cause = found(many, one)[1]
    assert cause.code == ("LS206" if key == "samples" else "LS205")
    assert any("0.25 : 0.75" in text and "0.5 : 0.5" in text for text in cause.seen)


def test_a_batch_that_each_process_draws_for_itself() -> None:
    cause = found(two(WHOLE), update(ONE, taken(0, 1, 2, 3)))[1]
    assert cause.code == "LS110"
    assert "1 of the 2 backward passes" in cause.seen[0]


def test_clipping_before_averaging() -> None:
    clip = ScriptCall(name="clip", line="train.py:9")
    many = two(0.5 * (0.3 * ONE + 0.9 * OTHER), calls=(clip,))
    assert found(many)[1].code == "LS404"


def test_a_gather_goes_before_the_ratio_it_leaves() -> None:
    gather = ScriptCall(name="all_gather", line="train.py:7: dist.all_gather(x)", of_graph=True)
    cause = found(two(0.5 * WHOLE, calls=(gather,)))[1]
    assert cause.code == "LS207"
    assert "train.py:7: dist.all_gather(x)" in cause.seen


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"statistics": ("bn1",)}, "LS306"),
        ({"drew": True, "draw_line": "train.py:3"}, "LS308"),
        ({}, "LS208"),
    ],
)
def test_what_is_no_sum_of_the_ranks_gradients(values: dict[str, Any], code: str) -> None:
    assert found(two(RANDOM.normal(size=(6, 4)), **values))[1].code == code


def test_in_float32_a_ratio_of_some_gradients_is_known_in_spite_of_rounding() -> None:
    one = update(WHOLE, taken(0, 1), gradients={"w": WHOLE, "b": ONE})
    gradients = {"w": 2 * WHOLE * (1 + 1e-6 * RANDOM.normal(size=(6, 4))), "b": OTHER}
    many = [update(WHOLE, taken(sample), gradients=gradients) for sample in (0, 1)]
    divergence = first_divergence([Update([one])], [Update(many)], FLOAT32)
    assert divergence is not None
    assert cause_of(divergence).seen == ("2 times: w", "in no constant ratio: b")


def test_without_the_ranks_own_gradients_nothing_is_guessed() -> None:
    many = [update(RANDOM.normal(size=(6, 4)), taken(0, 1, 2, 3), local=()) for _ in range(1)]
    assert found(many)[1].code == "LS210"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"not_averaged": ("w",)}, "LS303"),
        ({"past_wrapper": "train.py:5"}, "LS302"),
        ({"calls": (ScriptCall(name="all_reduce", line="", of_gradient=True),)}, "LS406"),
        ({}, "LS301"),
    ],
)
def test_ranks_with_gradients_of_their_own(values: dict[str, Any], code: str) -> None:
    many = [
        update(ONE, taken(0, 1), local=({"w": ONE},), **values),
        update(OTHER, taken(2, 3), local=({"w": OTHER},), **values),
    ]
    assert found(many)[1].code == code


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([(0, 1, 2, 3), (0, 1, 2, 3)], "LS101"),
        ([(0, 1), (1, 2)], "LS101"),
        ([(0, 1), (2,)], "LS102"),
        ([(0, 1), (4, 5)], "LS109"),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], "LS110"),
    ],
)
def test_other_samples(parts: list[tuple[int, ...]], code: str) -> None:
    many = [update(WHOLE, taken(*ids)) for ids in parts]
    divergence, cause = found(many)
    assert (divergence.what, cause.code) == ("samples", code)


def test_samples_that_are_known_by_their_content_are_told_by_their_index() -> None:
    cause = found([update(WHOLE, taken(0, 1)), update(WHOLE, taken(2))])[1]
    assert cause.seen[1] == "left out: 3"
    cause = found([update(WHOLE, taken(0, 1)), update(WHOLE, taken(1, 2))])[1]
    assert cause.seen[1].endswith("by several ranks: 1")


def test_the_order_within_the_global_batch_does_not_matter() -> None:
    many = [update(WHOLE, taken(3, 1)), update(WHOLE, taken(0, 2))]
    assert parting([[ALONE]], [many]) is None


def test_a_stream_that_is_the_same_on_all_ranks() -> None:
    batch = taken(0, 1, ids=None)
    one = update(WHOLE, taken(0, 1, ids=None))
    assert found([update(WHOLE, batch), update(WHOLE, batch)], one)[1].code == "LS108"


@pytest.mark.parametrize(
    ("contents", "streams", "code"),
    [
        (("content 0", "content 1"), ("", ""), "LS105"),
        (("new", "newer"), ("", ""), "LS104"),
        (("new", "newer"), ("x", "x"), "LS106"),
        (("new", "newer"), ("x", "y"), "LS107"),
    ],
)
def test_other_content(contents: tuple[str, str], streams: tuple[str, str], code: str) -> None:
    many = [
        update(WHOLE, taken(0, 1, stream=streams[0])),
        update(WHOLE, taken(2, 3, contents=contents, stream=streams[1])),
    ]
    divergence, cause = found(many)
    assert (divergence.what, cause.code) == ("contents", code)


def test_datasets_that_are_parts_of_one_are_known_by_their_content() -> None:
    many = [
        update(WHOLE, taken(0, 1)),
        update(WHOLE, taken(0, 1, contents=("content 2", "content 3"))),
    ]
    assert parting([[ALONE]], [many]) is None


def test_content_is_compared_only_where_the_samples_have_one_shape() -> None:
    many = [
        update(WHOLE, taken(0, 1, contents=("padded", "padded too"), shape="longer")),
        update(WHOLE, taken(2, 3)),
    ]
    assert parting([[ALONE]], [many]) is None


def test_what_comes_after_equal_gradients() -> None:
    assert found(two(WHOLE, rates=(0.2,)))[1].code == "LS402"
    assert found(two(WHOLE, losses=(2.0,)))[1].code == "LS501"
    assert found(two(WHOLE, parameters={"w": WHOLE}))[1].code == "LS403"
    assert found(two(WHOLE, buffers={"bn.running_mean": ONE}))[1].code == "LS306"
    assert found(two(WHOLE, buffers={"centre": ONE}))[1].code == "LS309"
    parted = [*two(WHOLE)[:1], *two(WHOLE, parameters={"w": ONE})[1:]]
    assert found(parted)[1].code == "LS304"


def test_what_comes_before_the_first_step() -> None:
    divergence, cause = found(two(WHOLE, initial={"w": ONE}))
    assert (divergence.what, cause.code) == ("initial", "LS305")
    divergence, cause = found([*two(WHOLE)[:1], *two(WHOLE, held={"w": "other"})[1:]])
    assert (divergence.what, cause.code) == ("replicas", "LS304")
    assert "rank 1" in cause.seen[0]


def test_a_rate_that_parts_later_is_the_schedules() -> None:
    later = update(WHOLE, taken(4), step=1)
    faster = update(WHOLE, taken(4), step=1, rates=(0.05,))
    reference, other = [[ALONE], [later]], [two(WHOLE), [faster]]
    divergence = parting(reference, other)
    assert divergence is not None
    assert divergence.update == 1
    assert cause_of(divergence).code == "LS401"


def test_fewer_steps() -> None:
    divergence = parting([[ALONE], [ALONE]], [two(WHOLE)])
    assert divergence is not None
    cause = cause_of(divergence)
    assert cause.code == "LS405"
    assert cause.seen == ("one process took 2 steps, 2 took 1",)

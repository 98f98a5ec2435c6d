import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep.verify import algebra

pytestmark = pytest.mark.unit

RANDOM = np.random.default_rng(0)


def gradient(scale: float = 1.0) -> dict[str, np.ndarray]:
    return {"a": scale * RANDOM.normal(size=(4, 5)), "b": scale * RANDOM.normal(size=7)}


def added(*weighed: tuple[float, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {n: sum(w * part[n] for w, part in weighed) for n in weighed[0][1]}


@given(st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3))
def test_a_constant_ratio_is_found_whatever_it_is(ratio: float) -> None:
    one = gradient()
    assert algebra.constant_ratio(one, added((ratio, one))) == pytest.approx(ratio)


def test_there_is_no_ratio_where_one_tensor_has_another() -> None:
    one = gradient()
    other = {"a": 2 * one["a"], "b": 3 * one["b"]}
    assert algebra.constant_ratio(one, other) is None
    for name, ratio in (("a", 2.0), ("b", 3.0)):
        found = algebra.constant_ratio({name: one[name]}, {name: other[name]})
        assert found == pytest.approx(ratio)


def test_zero_has_no_ratio() -> None:
    one = gradient()
    zero = added((0.0, one))
    assert algebra.constant_ratio(one, zero) is None
    assert algebra.constant_ratio(zero, one) is None
    assert algebra.constant_ratio({}, {}) is None


def test_the_weights_of_a_sum_come_back() -> None:
    parts = [gradient(), gradient(1e-3), gradient(1e3)]
    target = added((0.2, parts[0]), (-3.0, parts[1]), (0.7, parts[2]))
    assert algebra.fit_weights(target, parts) == pytest.approx((0.2, -3.0, 0.7))


def test_a_part_without_anything_weighs_nothing() -> None:
    part = gradient()
    empty = added((0.0, part))
    assert algebra.fit_weights(added((2.0, part)), [part, empty]) == pytest.approx((2.0, 0.0))
    assert algebra.fit_weights(part, [empty, empty]) is None
    assert algebra.fit_weights(part, [{"a": part["a"]}, {"b": part["b"]}]) == pytest.approx((1, 1))


def test_what_is_no_sum_of_the_parts_has_no_weights() -> None:
    assert algebra.fit_weights(gradient(), [gradient(), gradient()]) is None


def test_a_few_values_prove_nothing() -> None:
    tiny = {"a": np.array([1.0, 2.0])}
    assert (
        algebra.fit_weights(tiny, [{"a": np.array([1.0, 0.0])}, {"a": np.array([0.0, 1.0])}])
        is None
    )


def test_parts_that_cannot_be_told_apart_have_no_weights() -> None:
    part = gradient()
    assert algebra.fit_weights(part, [part, added((2.0, part))]) is None


def test_proportional() -> None:
    assert algebra.proportional((0.25, 0.75), (10, 30))
    assert not algebra.proportional((0.25, 0.75), (10, 31))
    assert not algebra.proportional((0.0, 0.0), (0, 0))

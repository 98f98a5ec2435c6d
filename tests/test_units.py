"""Numbers in texts have a few digits and no exponent."""

from __future__ import annotations

import pytest

from lockstep.doctor.base import gib
from lockstep.units import GIB, format_number

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (123.4, "123"),
        (999.7, "1000"),
        (1000, "1000"),
        (1234.4, "1234"),
        (-1234.4, "-1234"),
        (0, "0"),
    ],
)
def test_large_numbers_are_written_in_full(value: float, text: str) -> None:
    assert format_number(value) == text


def test_fewer_digits_are_for_small_numbers_only() -> None:
    assert format_number(0.123, digits=2) == "0.12"
    assert format_number(123.4, digits=2) == "123"


def test_a_disk_of_more_than_1000_gib() -> None:
    assert gib(1021.4 * GIB) == "1021 GiB"

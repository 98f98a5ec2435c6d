"""The tree in which virtual ranks are added up has one shape on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from lockstep.communication.summation_tree import (
    Node,
    count_merges,
    largest_nodes,
    plan_sums,
)

pytestmark = pytest.mark.unit


def sum_as_ranks(present: tuple[bool, ...], bounds: tuple[int, ...]) -> Any:
    """Returns the sum as nested pairs of leaves, computed by ranks with stacks."""
    sums = plan_sums(present, bounds)
    nodes: list[Any] = []
    for rank, leaves in enumerate(sums.leaves_of_rank):
        nodes_of_rank = stacked(list(leaves), sums.merges_of_rank[rank])
        assert len(nodes_of_rank) == sums.num_partial_sums_of_rank[rank]
        nodes += nodes_of_rank
    (total,) = stacked(nodes, sums.merges)
    return total


def stacked(values: list[Any], merges: tuple[int, ...]) -> list[Any]:
    stack: list[Any] = []
    for value, number in zip(values, merges, strict=True):
        stack.append(value)
        for _ in range(number):
            right = stack.pop()
            left = stack.pop()
            stack.append((left, right))
    return stack


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    size = draw(st.integers(1, 33))
    present = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    bounds = draw(st.lists(st.integers(0, size), max_size=8))
    return tuple(present), (0, *sorted(bounds), size)


@given(trees())
def test_the_order_of_additions_does_not_depend_on_the_ranks(
    tree: tuple[tuple[bool, ...], tuple[int, ...]],
) -> None:
    present, bounds = tree
    assert sum_as_ranks(present, bounds) == sum_as_ranks(present, (0, len(present)))


def test_a_complete_tree_is_balanced() -> None:
    total = sum_as_ranks((True,) * 8, (0, 3, 6, 8))
    assert total == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def test_an_absent_leaf_leaves_its_parent_the_other_child() -> None:
    assert sum_as_ranks((True, False, False, True), (0, 2, 4)) == (0, 3)


def test_a_range_has_few_nodes() -> None:
    whole = Node(0, 1024)
    assert len(largest_nodes(whole, 1, 1023)) == 18  # 2 log2(1024) - 2
    assert largest_nodes(whole, 512, 768) == [Node(512, 768)]


def test_only_nodes_below_the_root_are_counted() -> None:
    leaves = [Node(leaf, leaf + 1) for leaf in range(4)]
    assert count_merges(leaves, into=[Node(2, 4)]) == (0, 1)

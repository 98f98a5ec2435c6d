"""Sums over virtual ranks have the bits of the naive tree, whoever computes them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from ranks import as_on_machines, run_ranks
from torch import Tensor

import lockstep
from lockstep.communication import routing, shared_memory
from lockstep.communication.summation_tree import Node
from lockstep.communication.traffic import traffic
from lockstep.communication.tree_sum import TreeSums, add_rows_in_tree

pytestmark = pytest.mark.ranks

LENGTHS = (1, 5, 1000, 70_001)


def naive_sum(node: Node, values: Sequence[Tensor | None]) -> Tensor | None:
    """Adds up the values of the leaves below a node; None: none has a value."""
    if node.end - node.begin == 1:
        return values[node.begin]
    left, right = (naive_sum(child, values) for child in node.children())
    if left is None or right is None:
        return right if left is None else left
    return left + right


def test_rows_are_added_in_the_order_of_the_tree() -> None:
    generator = torch.Generator().manual_seed(3)
    for num_rows in range(1, 20):
        rows = torch.randn(num_rows, 50, generator=generator)
        assert torch.equal(add_rows_in_tree(rows), naive_sum(Node(0, num_rows), list(rows)))


def push(sums: TreeSums, values: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns the nodes of this process, computed from its leaves."""
    nodes: list[Tensor] = []
    for leaf, merges in zip(sums.leaves, sums.merges, strict=True):
        value = values[leaf]
        assert value is not None
        nodes.append(value.clone())
        for _ in range(merges):
            right = nodes.pop()
            nodes[-1] += right
    return nodes


def compare_with_naive_sums(machine_sizes: tuple[int, ...], slot_bytes: int | None) -> int:
    """Makes random sums in all ways; returns how many were compared."""
    if slot_bytes is not None:  # so that tensors go in many pieces
        shared_memory.CHUNK_BYTES = slot_bytes
        shared_memory.MAX_BYTES_READ_BY_ALL = 64
    as_on_machines(machine_sizes)
    num_compared = 0
    with lockstep.init(measure_link=False) as world:
        draw = random.Random(1)
        generator = torch.Generator().manual_seed(2)
        for number in range(12):
            num_leaves = draw.randint(1, 11)
            present = tuple(draw.random() < 0.8 for _ in range(num_leaves))
            if not any(present):
                continue
            inner_bounds = sorted(draw.choices(range(num_leaves + 1), k=world.size - 1))
            sums = TreeSums(present, (0, *inner_bounds, num_leaves), world.rank)
            length = LENGTHS[number % len(LENGTHS)]
            dtype = (torch.float32, torch.bfloat16)[number % 2]
            values: list[Tensor | None] = []
            for has_value in present:
                value = torch.randn(length, generator=generator).to(dtype)
                values.append(value if has_value else None)
            expected = naive_sum(Node(0, num_leaves), values)
            assert expected is not None
            total = torch.empty(length, dtype=dtype)
            wait = sums.start(push(sums, values), total, scale=0.25)
            wait()
            assert torch.equal(total, expected * 0.25)
            # The same as a reduce-scatter of equal slices.
            padded = length + -length % world.size
            slices_of_partial_sums = []
            for node in push(sums, values):
                whole = torch.nn.functional.pad(node, (0, padded - length))
                slices_of_partial_sums.append(whole.chunk(world.size))
            own = torch.empty(padded // world.size, dtype=dtype)
            wait = sums.start_reduce_scatter(slices_of_partial_sums, own, scale=1.0)
            wait()
            whole = torch.nn.functional.pad(expected, (0, padded - length))
            assert torch.equal(own, whole.chunk(world.size)[world.rank])
            num_compared += 1
    return num_compared


@pytest.mark.parametrize("slot_bytes", [None, 4096])
@pytest.mark.parametrize(
    "machine_sizes",
    [
        (3,),
        pytest.param((2,), marks=pytest.mark.thorough),
        pytest.param((1, 1, 1), marks=pytest.mark.thorough),
        (2, 2),
        pytest.param((2, 1), marks=pytest.mark.thorough),
    ],
)
def test_sums_have_the_bits_of_the_naive_tree(
    machine_sizes: tuple[int, ...], slot_bytes: int | None
) -> None:
    numbers = run_ranks(compare_with_naive_sums, sum(machine_sizes), machine_sizes, slot_bytes)
    assert min(numbers) > 8


def bytes_between_machines() -> tuple[int, int, int]:
    """Returns what this rank sends for an all-reduce, a sum and a reduce-scatter of 4 leaves."""
    as_on_machines((2, 2))
    with lockstep.init(measure_link=False) as world:
        tensor = torch.ones(40_000)
        before = traffic.sent
        routing.start_all_reduce(tensor)()
        of_all_reduce = traffic.sent - before
        sums = TreeSums((True,) * 4, (0, 1, 2, 3, 4), world.rank)
        before = traffic.sent
        sums.start([tensor], tensor, scale=1.0)()
        of_sum = traffic.sent - before
        before = traffic.sent
        sums.start_reduce_scatter([tensor.chunk(4)], torch.empty(10_000), scale=1.0)()
        return of_all_reduce, of_sum, traffic.sent - before


def test_two_machines_send_no_more_than_for_an_all_reduce() -> None:
    for of_all_reduce, of_sum, of_reduce_scatter in run_ranks(bytes_between_machines, 4):
        assert of_sum == of_all_reduce
        assert of_reduce_scatter == of_all_reduce // 2

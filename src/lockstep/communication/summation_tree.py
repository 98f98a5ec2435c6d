"""The fixed binary tree in which numbers of virtual ranks are added up.

Floating-point addition is not associative: which numbers are added first decides the last bits of a
sum. So the order is fixed by a binary tree whose *leaves* are the virtual ranks. Its shape depends
on their number alone, and not on how many processes compute them. A *node* is a range of leaves
`(begin, end)`; its value is the value of its left child plus that of its right child. A leaf may be
absent, if a virtual rank has no samples of a short global batch: its parent then has the value of
the other child.

A process that has the leaves of a range adds up all nodes that lie in it, and hands the largest of
them on. A range of `n` leaves has at most `2 log2 n` of these. The order in which the children of a
node are added does not matter: addition is commutative, in floating point too.

Sums are computed with a stack. The values are pushed in the order of their leaves; after each push
a number of *merges* follows, in which the two topmost values are replaced by their sum. These
numbers are what this module computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A node of the tree: the virtual ranks from `begin` to `end - 1`."""

    begin: int
    end: int

    def children(self) -> tuple[Node, Node]:
        """Returns the left and the right child of a node that is no leaf.

        The left one has the largest power of two of leaves that is less than those of this node, so
        it is a complete tree.
        """
        size = self.end - self.begin
        size_of_left = 1 << (size - 1).bit_length() - 1
        middle = self.begin + size_of_left
        return Node(self.begin, middle), Node(middle, self.end)


def push(
    stack: list[Value], value: Value, num_merges: int, add: Callable[[Value, Value], object]
) -> None:
    """Pushes a value onto a stack of partial sums, and makes the merges that follow it.

    Args:
        stack: the partial sums.
        value: of the next leaf, or of the next node.
        num_merges: how often the two topmost values are replaced by their sum.
        add: adds its second argument to its first one, in place.
    """
    stack.append(value)
    for _ in range(num_merges):
        right = stack.pop()
        add(stack[-1], right)


class RankSums(NamedTuple):
    """How a tree is summed by several ranks, each of which has the leaves of a range."""

    leaves_of_rank: tuple[tuple[int, ...], ...]
    """The leaves that are present, for each rank."""
    merges_of_rank: tuple[tuple[int, ...], ...]
    """For each rank, and each of these leaves: how many merges follow when it was pushed."""
    nodes_of_rank: tuple[int, ...]
    """How many values a rank has on its stack at the end."""
    merges: tuple[int, ...]
    """For each of these values, in the order of the ranks: how many merges follow when it was
    pushed. One value is left: the sum."""


@lru_cache(maxsize=256)
def plan_sums(present: tuple[bool, ...], bounds: tuple[int, ...]) -> RankSums:
    """Plans how ranks sum a tree.

    Each rank first adds up its own leaves, which gives the values of one or more nodes. Then the
    nodes of all ranks are added up.

    Args:
        present: for each leaf, whether it has a value.
        bounds: rank r has the leaves from `bounds[r]` to `bounds[r + 1] - 1`.
    """
    leaves_of_rank = []
    merges_of_rank = []
    nodes_of_ranks = _nodes_of_ranges(present, bounds)  # what each rank hands on
    nodes_of_all_ranks: list[Node] = []
    for rank, nodes in enumerate(nodes_of_ranks):
        leaves = [leaf for leaf in range(bounds[rank], bounds[rank + 1]) if present[leaf]]
        pushed = [Node(leaf, leaf + 1) for leaf in leaves]
        merges: list[int] = []
        for node in nodes:
            merges += count_merges(node, pushed)
        leaves_of_rank.append(tuple(leaves))
        merges_of_rank.append(tuple(merges))
        nodes_of_all_ranks += nodes
    return RankSums(
        leaves_of_rank=tuple(leaves_of_rank),
        merges_of_rank=tuple(merges_of_rank),
        nodes_of_rank=tuple(len(nodes) for nodes in nodes_of_ranks),
        merges=tuple(count_merges(Node(0, len(present)), nodes_of_all_ranks)),
    )


class MachineSums(NamedTuple):
    """How a tree is summed by several machines, each of which sums the leaves of its ranks first.

    `RankSums` of the machines say how their sums are added up.
    """

    nodes_of_rank: tuple[int, ...]
    """For each rank of this machine: how many values it has."""
    merges: tuple[int, ...]
    """For each of these values, in the order of the ranks: how many merges follow when it was
    pushed. The values that are left are those of the machine's nodes."""
    num_nodes: int
    """How many values are left."""
    between_machines: RankSums


@lru_cache(maxsize=256)
def plan_sums_of_machines(
    present: tuple[bool, ...], bounds: tuple[int, ...], ranks_per_machine: int, machine: int
) -> MachineSums:
    """Plans how ranks sum a tree if each machine sums up the leaves of its own ranks first.

    Args:
        present: see `plan_sums`.
        bounds: see `plan_sums`.
        ranks_per_machine: every machine has this number of neighbouring ranks.
        machine: the number of this one.
    """
    # What each rank of this machine has: the values that are pushed.
    first_rank = machine * ranks_per_machine
    bounds_on_machine = bounds[first_rank : first_rank + ranks_per_machine + 1]
    nodes_of_ranks = _nodes_of_ranges(present, bounds_on_machine)
    pushed: list[Node] = []
    for nodes in nodes_of_ranks:
        pushed += nodes
    # What the machine hands on: the values to which these are added up.
    bounds_of_machines = bounds[::ranks_per_machine]
    nodes_of_machine = _nodes_of_ranges(present, bounds_of_machines)[machine]
    merges: list[int] = []
    for node in nodes_of_machine:
        merges += count_merges(node, pushed)
    return MachineSums(
        nodes_of_rank=tuple(len(nodes) for nodes in nodes_of_ranks),
        merges=tuple(merges),
        num_nodes=len(nodes_of_machine),
        between_machines=plan_sums(present, bounds_of_machines),
    )


def _nodes_of_ranges(present: tuple[bool, ...], bounds: tuple[int, ...]) -> list[list[Node]]:
    """Returns, for each range of leaves, its largest nodes that have a value.

    Args:
        present: for each leaf, whether it has a value.
        bounds: range r has the leaves from `bounds[r]` to `bounds[r + 1] - 1`.
    """
    whole = Node(0, len(present))
    nodes_of_ranges = []
    for begin, end in itertools.pairwise(bounds):
        nodes = []
        for node in largest_nodes(whole, begin, end):
            if any(present[node.begin : node.end]):
                nodes.append(node)
        nodes_of_ranges.append(nodes)
    return nodes_of_ranges


def largest_nodes(node: Node, begin: int, end: int) -> list[Node]:
    """Returns the largest nodes at or below a node that lie in a range of leaves, in order."""
    if end <= node.begin or node.end <= begin:  # the node has no leaf of the range
        return []
    if begin <= node.begin and node.end <= end:
        return [node]
    left, right = node.children()
    return largest_nodes(left, begin, end) + largest_nodes(right, begin, end)


def count_merges(root: Node, pushed: Sequence[Node]) -> list[int]:
    """Returns the number of merges after each push, if the value of a node is computed.

    Args:
        root: the node whose value is computed.
        pushed: the nodes whose values are pushed, in order. None lies within another. Those that
            are not at or below the root are ignored.

    Returns:
        A number for each pushed node at or below the root.
    """
    merges: list[int] = []
    nodes = set(pushed)

    def visit(node: Node) -> bool:
        """Appends to `merges` for each pushed node at or below a node; returns True if any is."""
        if node in nodes:
            merges.append(0)
            return True
        if node.end - node.begin == 1:  # an absent leaf
            return False
        left, right = node.children()
        left_has_value = visit(left)
        right_has_value = visit(right)
        if left_has_value and right_has_value:
            merges[-1] += 1  # they are merged after the last push, which was below the right child
        return left_has_value or right_has_value

    visit(root)
    return merges

"""Plans in which order the values of virtual ranks are added, so that sums have the same bits.

The result of a floating-point sum depends on the order of the additions. A fixed binary tree
decides it. Its *leaves* are the virtual ranks, however many processes compute them. A *node* is a
range of leaves; its value is the sum of its two children. A sum is computed with a stack: values
are pushed from left to right, and a *merge* replaces the two topmost values by their sum.

For 3 leaves the tree is `(0 + 1) + 2`. The values are pushed in order, followed by 0, 1 and 1
merges. This module computes these numbers of merges.

A leaf is absent if its virtual rank has no samples in a short global batch. Its parent then has the
value of the other child. A process that has a range of leaves computes the largest nodes within the
range, and passes their values on; `n` leaves have at most `2 log2 n` of them. The two children of a
node may be added in either order, because floating-point addition is commutative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A node of the tree: the virtual ranks from `begin` to `end - 1`."""

    begin: int
    end: int

    def children(self) -> tuple[Node, Node]:
        """Returns the left and the right child of a node that is not a leaf.

        The left child is a complete tree: it has the largest power of two that is less than the
        number of leaves, e.g. `(0, 5) -> (0, 4), (4, 5)`.
        """
        size = self.end - self.begin
        size_of_left = 1 << (size - 1).bit_length() - 1
        middle = self.begin + size_of_left
        return Node(self.begin, middle), Node(middle, self.end)


def push(
    stack: list[Value], value: Value, num_merges: int, add: Callable[[Value, Value], object]
) -> None:
    """Pushes a value onto a stack of partial sums, then merges the topmost values.

    Args:
        stack: the partial sums.
        value: value of the next leaf or node.
        num_merges: how often the two topmost values are replaced by their sum.
        add: function that adds its second argument to its first one, in place.
    """
    stack.append(value)
    for _ in range(num_merges):
        right = stack.pop()
        add(stack[-1], right)


def sum_in_order(numbers: Iterable[float]) -> float:
    """Adds numbers from left to right, and rounds after each addition.

    Python's `sum` does the same before Python 3.12, and compensates for the rounding from then on.
    """
    total = 0.0
    for number in numbers:
        total += number
    return total


class TreeOrder(NamedTuple):
    """The order of the additions: each rank first sums its own leaves, then the results are summed.

    The numbers of merges are those of a stack: `merges[i]` merges follow push i.
    """

    leaves_of_rank: tuple[tuple[int, ...], ...]
    """For each rank, its leaves that are present."""
    merges_of_rank: tuple[tuple[int, ...], ...]
    """For each rank and each of these leaves, how many merges follow its push."""
    num_partial_sums_of_rank: tuple[int, ...]
    """For each rank, how many values are left on its stack. It passes these values on."""
    merges: tuple[int, ...]
    """For each value that some rank passes on, in the order of the ranks, how many merges follow
    its push. After the last one only the sum is left."""


@lru_cache(maxsize=256)
def plan_sums(present: tuple[bool, ...], bounds: tuple[int, ...]) -> TreeOrder:
    """Plans how ranks sum a tree: first each rank its own leaves, then all ranks together.

    The plan says how many merges follow each push: `merges[i]` merges follow push i.

    Example: 2 ranks sum 4 leaves, `(0 + 1) + (2 + 3)`, with the bounds `(0, 3, 4)`: rank 0 has the
    leaves 0 to 2, and rank 1 has leaf 3.

        rank 0     push 0                  stack: 0
                   push 1, 1 merge         stack: 0+1
                   push 2                  stack: 0+1, 2           merges_of_rank[0] = (0, 1, 0)
        rank 1     push 3                  stack: 3                merges_of_rank[1] = (0,)
        together   push 0+1                stack: 0+1
                   push 2                  stack: 0+1, 2
                   push 3, 2 merges        stack: (0+1)+(2+3)      merges = (0, 0, 2)

    Args:
        present: for each leaf, True if it has a value.
        bounds: rank r has the leaves from `bounds[r]` to `bounds[r + 1] - 1`.
    """
    # What each rank has on its stack in the end, and passes on: in the example the nodes 0+1 and 2
    # on rank 0, and the node 3 on rank 1.
    nodes_of_ranks = _largest_nodes_of_ranges(present, bounds)

    # First, each rank pushes its leaves, and merges them into these nodes.
    leaves_of_rank = []
    merges_of_rank = []
    for rank, nodes_of_rank in enumerate(nodes_of_ranks):
        leaves_in_range = range(bounds[rank], bounds[rank + 1])
        leaves = [leaf for leaf in leaves_in_range if present[leaf]]
        pushed_leaves = [Node(leaf, leaf + 1) for leaf in leaves]
        leaves_of_rank.append(tuple(leaves))
        merges_of_rank.append(count_merges(pushed_leaves, into=nodes_of_rank))

    # Then the nodes of all ranks are pushed, and merged into the root, which is the whole sum.
    pushed_nodes = list(itertools.chain(*nodes_of_ranks))
    root = Node(0, len(present))
    merges = count_merges(pushed_nodes, into=[root])

    return TreeOrder(
        leaves_of_rank=tuple(leaves_of_rank),
        merges_of_rank=tuple(merges_of_rank),
        num_partial_sums_of_rank=tuple(len(nodes) for nodes in nodes_of_ranks),
        merges=merges,
    )


class MachineOrder(NamedTuple):
    """The order of the additions if each machine first sums the values of its ranks."""

    num_partial_sums_of_rank: tuple[int, ...]
    """For each rank of this machine, how many values it passes on."""
    merges_on_machine: tuple[int, ...]
    """For each of these values, in the order of the ranks, how many merges follow its push."""
    num_sums_of_machine: int
    """How many values are left then: the machine passes them on."""
    between_machines: TreeOrder
    """How the values of the machines are summed, with each machine in the place of a rank."""


@lru_cache(maxsize=256)
def plan_sums_of_machines(
    present: tuple[bool, ...], bounds: tuple[int, ...], ranks_per_machine: int, machine: int
) -> MachineOrder:
    """Plans how ranks sum a tree if each machine sums up the leaves of its own ranks first.

    Example: 2 machines with 2 ranks each sum 4 leaves, one of each rank. The tree is
    `(0 + 1) + (2 + 3)`.

                    1. each rank    2. each machine     3. all machines
        rank 0      0
        rank 1      1               0 + 1
        rank 2      2
        rank 3      3               2 + 3               (0 + 1) + (2 + 3)

    The result for machine 0 is

        MachineOrder(
            num_partial_sums_of_rank=(1, 1),  # 0 of rank 0, and 1 of rank 1
            merges_on_machine=(0, 1),  # push 0; push 1, 1 merge
            num_sums_of_machine=1,  # 0 + 1
            between_machines=plan_sums(present, (0, 2, 4)),
        )

    A rank or a machine passes on several sums if its leaves are not those of one node: see the
    example of `plan_sums`.

    Args:
        present: for each leaf, True if it has a value.
        bounds: rank r has the leaves from `bounds[r]` to `bounds[r + 1] - 1`.
        ranks_per_machine: number of ranks on each machine. Their numbers are consecutive.
        machine: number of this machine.
    """
    # 1. Each rank of this machine passes on the largest nodes within its leaves. For machine 0 in
    # the example: [[Node(0, 1)], [Node(1, 2)]].
    first_rank = machine * ranks_per_machine
    bounds_on_machine = bounds[first_rank : first_rank + ranks_per_machine + 1]
    nodes_of_ranks = _largest_nodes_of_ranges(present, bounds_on_machine)

    # 2. The machine pushes these nodes in the order of the ranks, and merges them into the largest
    # nodes within the leaves of all its ranks: into Node(0, 2) in the example.
    pushed_nodes = list(itertools.chain(*nodes_of_ranks))
    bounds_of_machines = bounds[::ranks_per_machine]  # (0, 2, 4)
    nodes_of_machine = _largest_nodes_of_ranges(present, bounds_of_machines)[machine]
    merges_on_machine = count_merges(pushed_nodes, into=nodes_of_machine)  # (0, 1)

    # 3. The machines sum their nodes as ranks would.
    between_machines = plan_sums(present, bounds_of_machines)

    return MachineOrder(
        num_partial_sums_of_rank=tuple(len(nodes) for nodes in nodes_of_ranks),
        merges_on_machine=merges_on_machine,
        num_sums_of_machine=len(nodes_of_machine),
        between_machines=between_machines,
    )


def _largest_nodes_of_ranges(
    present: tuple[bool, ...], bounds: tuple[int, ...]
) -> list[list[Node]]:
    """Returns, for each range of leaves, the largest nodes that lie within the range.

    A range with the leaves 0, 1 and 2 of 4 leaves has the nodes `(0, 2)` and `(2, 3)`. A node
    without any value is left out.

    Args:
        present: for each leaf, True if it has a value. A node has a value if any of its leaves has.
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
    """Returns the largest nodes within a range of leaves, from left to right.

    In the tree of 4 leaves, the leaves 1 to 3 have the largest nodes `(1, 2), (2, 4)`.

    Args:
        node: the node at and below which nodes are searched.
        begin: first leaf of the range.
        end: the leaf after the last one of the range.
    """
    is_outside = end <= node.begin or node.end <= begin
    if is_outside:
        return []

    lies_within = begin <= node.begin and node.end <= end
    if lies_within:
        return [node]

    left, right = node.children()
    return largest_nodes(left, begin, end) + largest_nodes(right, begin, end)


def count_merges(pushed: Sequence[Node], *, into: Sequence[Node]) -> tuple[int, ...]:
    """Returns how many merges follow each push when pushed values are merged into given nodes.

    If the leaves 0 to 3 are pushed and merged into the node `(0, 4)`, the result is `(0, 1, 0, 2)`:
    after the second push the leaves 0 and 1 are merged, after the last one the leaves 2 and 3, and
    then the two sums. If the leaves 0, 1 and 2 are merged into the nodes `(0, 2)` and `(2, 3)`, the
    result is `(0, 1, 0)`.

    Args:
        pushed: the nodes whose values are pushed, from left to right. They do not overlap. Nodes
            that lie within none of `into` are ignored.
        into: the nodes whose values are left on the stack at the end, from left to right.
    """
    merges: list[int] = []
    for node in into:
        merges += _merges_below(node, frozenset(pushed))
    return tuple(merges)


def _merges_below(node: Node, pushed: frozenset[Node]) -> list[int]:
    """Returns how many merges follow each push while the value of a node is computed.

    For example, the node `(0, 3)` is `(0 + 1) + 2`, which is computed by "push 0, push 1, merge,
    push 2, merge": 0 merges follow the first push, and 1 merge each of the others. The list of a
    node has those of its children, and one merge more after the last push, which adds them up:

        node (0, 1)     [0]
        node (0, 2)     [0] + [0 + 1]       = [0, 1]
        node (0, 3)     [0, 1] + [0 + 1]    = [0, 1, 1]

    Args:
        node: the node whose value is left on the stack in the end.
        pushed: the nodes that are pushed. Those that do not lie within `node` are ignored.

    Returns:
        From left to right, a number of merges for each pushed node that is `node` itself or lies
        below it. The list is empty if nothing is pushed there, so that `node` has no value.
    """
    if node in pushed:  # its value is pushed as it is
        return [0]

    is_leaf = node.end - node.begin == 1
    if is_leaf:  # it was not pushed, because it is absent
        return []

    left, right = node.children()
    merges_of_left = _merges_below(left, pushed)
    merges_of_right = _merges_below(right, pushed)

    both_have_values = merges_of_left and merges_of_right
    if both_have_values:
        merges_of_right[-1] += 1
    return merges_of_left + merges_of_right

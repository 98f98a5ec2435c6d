"""Reads in a script whether it divides a sum over the ranks by the length of a loader.

`world.sum(total_loss) / len(test)`, where `total_loss` adds up the means of batches, is right on
one process. On N ranks the sum has the batches of all ranks, and `len(test)` counts those of one,
so the result is N times too large. Values do not show it, so the script's own source is parsed: the
statement that calls `world.sum`, and the one that calls `len` of a prepared loader.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

SIZE_NAMES = {"size", "world_size", "num_ranks", "nproc"}
"""A statement with one of these names seems to divide by the number of ranks itself."""


def divides_sum_by_length(source: str, sum_line: int, length_line: int) -> bool:
    """Returns True if a script divides a sum over the ranks by the length of a loader.

    Args:
        source: the text of the script.
        sum_line: the line, from 1, that has called `world.sum`.
        length_line: the line, from 1, that has called `len` of a prepared loader.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    summing = _simple_statement_at(tree, sum_line)
    dividing = _simple_statement_at(tree, length_line)
    if summing is None or dividing is None:
        return False
    if _mentions_number_of_ranks(summing) or _mentions_number_of_ranks(dividing):
        return False
    if summing is dividing:
        # loss = world.sum(total) / len(test), or loss = world.sum(total / len(test))
        for division in _divisions_by_length(summing):
            if _has_sum(division.left) or _is_in_argument_of_sum(summing, division):
                return True
        return False
    if sum_line < length_line:
        # total = world.sum(total)
        # loss = total / len(test)
        if not _has_sum(summing):
            return False
        sums = _assigned_names(summing)
        return not sums.isdisjoint(_names_divided_by_length(dividing))
    # mean = total / len(test)
    # loss = world.sum(mean)
    if not any(_divisions_by_length(dividing)):
        return False
    means = _assigned_names(dividing)
    for call in _sum_calls(summing):
        for node in ast.walk(call):
            if isinstance(node, ast.Name) and node.id in means:
                return True
    return False


def _simple_statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """Returns the innermost statement that a line belongs to, if that contains no others.

    It is None for a line that begins a block, such as `for x in test:`, because the statement of
    such a line goes on to the end of its block.
    """
    innermost = None
    for node in ast.walk(tree):  # outer statements come before inner ones
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        if node.lineno <= line <= (node.end_lineno or 0):
            innermost = node
    return innermost


def _names_divided_by_length(statement: ast.stmt) -> set[str]:
    """Returns the variables that a statement divides: `total / len(x)` or `total /= len(x)`."""
    names: set[str] = set()
    for division in _divisions_by_length(statement):
        if isinstance(division.left, ast.Name):
            names.add(division.left.id)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div):
        if _is_length(statement.value):
            names |= _assigned_names(statement)
    return names


def _divisions_by_length(node: ast.AST) -> Iterator[ast.BinOp]:
    """Yields all divisions `... / len(...)` inside a node of the syntax tree."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) and _is_length(part.right):
            yield part


def _is_length(node: ast.AST) -> bool:
    """Returns True for a call `len(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _sum_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yields all calls `....sum(...)` inside a node of the syntax tree."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        if isinstance(part.func, ast.Attribute) and part.func.attr == "sum":
            yield part


def _has_sum(node: ast.AST) -> bool:
    return any(True for _ in _sum_calls(node))


def _is_in_argument_of_sum(statement: ast.stmt, division: ast.BinOp) -> bool:
    """Returns True if a division stands in the argument of a sum: `world.sum(total / len(x))`."""
    for call in _sum_calls(statement):
        for part in ast.walk(call):
            if part is division:
                return True
    return False


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Returns the names of the variables that a statement gives a value to."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _mentions_number_of_ranks(statement: ast.stmt) -> bool:
    """Returns True if a statement has one of `SIZE_NAMES`: `size`, `world.size`, ..."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and node.attr in SIZE_NAMES:
            return True
        if isinstance(node, ast.Name) and node.id in SIZE_NAMES:
            return True
    return False

"""Does a script divide a sum over the ranks by the number of one rank's batches?

`world.sum(total_loss) / len(test)`, where `total_loss` adds up the means of batches, is right on
one process. On N ranks the sum has the batches of all ranks, and `len(test)` counts those of one,
so the result is N times too large. Values do not show it, so the script's own source is read: the
line that has summed, and the line that has asked a prepared loader for its length.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

SIZE_NAMES = {"size", "world_size", "num_ranks", "nproc"}
"""Where a statement has one of these names, it seems to divide by the number of ranks itself."""


def divides_sum_by_length(source: str, sum_line: int, length_line: int) -> bool:
    """Whether a sum that a line of a script makes is divided by a length that a line asks for.

    Args:
        source: of the script.
        sum_line: has called `world.sum`.
        length_line: has called `len` of a prepared loader.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    summing = _statement(tree, sum_line)
    dividing = _statement(tree, length_line)
    if summing is None or dividing is None or _names_size(summing) or _names_size(dividing):
        return False
    if summing is dividing:
        return any(
            _has_sum(division.left) or _is_in_sum(summing, division)
            for division in _divisions_by_length(summing)
        )
    if sum_line < length_line:  # total = world.sum(total); loss = total / len(test)
        summed = _assigned(summing) if _has_sum(summing) else set()
        divided = {
            division.left.id
            for division in _divisions_by_length(dividing)
            if isinstance(division.left, ast.Name)
        }
        if isinstance(dividing, ast.AugAssign) and isinstance(dividing.op, ast.Div):
            divided |= _assigned(dividing) if _is_length(dividing.value) else set()
        return bool(summed & divided)
    # mean = total / len(test); loss = world.sum(mean)
    means = _assigned(dividing) if any(_divisions_by_length(dividing)) else set()
    return any(
        isinstance(node, ast.Name) and node.id in means
        for call in _sums(summing)
        for node in ast.walk(call)
    )


def _statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement that a line is part of; None: a line of a `for` or `with` itself."""
    found = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            if not hasattr(node, "body"):
                found = node
    return found


def _divisions_by_length(node: ast.AST) -> Iterator[ast.BinOp]:
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) and _is_length(part.right):
            yield part


def _is_length(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _sums(node: ast.AST) -> Iterator[ast.Call]:
    for part in ast.walk(node):
        called = part.func if isinstance(part, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "sum":
            yield part  # type: ignore[misc]


def _has_sum(node: ast.AST) -> bool:
    return any(True for _ in _sums(node))


def _is_in_sum(statement: ast.stmt, division: ast.BinOp) -> bool:
    """Whether a division stands in the argument of a sum."""
    return any(part is division for call in _sums(statement) for part in ast.walk(call))


def _assigned(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value to."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _names_size(statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if name in SIZE_NAMES:
            return True
    return False

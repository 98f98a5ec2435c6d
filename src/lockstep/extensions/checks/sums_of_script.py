"""Reads what a script does with its sums over the ranks.

`world.sum` takes a *nest*: a tensor or number, or lists and dicts of them. The *leaves* of a nest
are its tensors and numbers. What becomes of the sum is not seen in its values, so statements of the
script are parsed: whether they divide by the number of ranks, or by the length of a loader.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lockstep.torch_compat import pytree
from lockstep.user_code import parse_source

MAX_NUMBERS_IN_TENSOR = 64
"""A tensor with more numbers than this is read as one number, its sum."""

SIZE_NAMES = {"size", "world_size", "num_ranks", "nproc", "get_world_size"}
"""A statement that has one of these names probably divides by the number of ranks itself."""


def numbers_in(nest: Any) -> list[float]:
    """Returns the numbers in the leaves of a nest, with 0.0 in place of NaN and infinity.

    A large tensor gives one number, its sum, so that few numbers are copied from a GPU. Complex
    tensors give none.
    """
    numbers: list[float] = []
    for leaf in pytree.tree_leaves(nest):
        if not isinstance(leaf, Tensor):
            values = [leaf]  # a number
        elif leaf.is_complex():
            values = []
        elif leaf.numel() <= MAX_NUMBERS_IN_TENSOR:
            values = leaf.flatten().tolist()
        else:
            values = [leaf.sum().item()]

        for value in values:
            numbers.append(value if math.isfinite(value) else 0.0)
    return numbers


def lines_mention_number_of_ranks(source: str, first_line: int, num_lines: int) -> bool:
    """Returns True if a script has the number of ranks in one of some lines.

    Then it seems to divide by that number. It also returns True if the source cannot be parsed, so
    that no check warns without reason.

    Args:
        source: text of the script.
        first_line: the first of the lines, from 1.
        num_lines: how many lines are read.
    """
    tree = parse_source(source)
    if tree is None:
        return True
    lines = range(first_line, first_line + num_lines)
    return any(node.lineno in lines for node in _numbers_of_ranks(tree))


def divides_sum_by_number(source: str, sum_line: int, num_lines: int, number: int) -> bool:
    """Returns True if a script divides a sum over the ranks by a number that it spells out.

    With the number 10000, that is `world.sum(hits) / 10000`, or `hits, n = world.sum((hits, n))`
    and then `100 * hits.item() / 10000`.

    Args:
        source: text of the script.
        sum_line: line that called `world.sum`, from 1.
        num_lines: how many lines are read after the statement of that line.
        number: the number.
    """
    tree = parse_source(source)
    if tree is None:
        return False
    sum_statement = _simple_statement_at(tree, sum_line)
    if sum_statement is None:
        return False

    end_of_statement = sum_statement.end_lineno or sum_line
    lines = range(sum_statement.lineno, end_of_statement + num_lines + 1)
    sums = _assigned_names(sum_statement)
    for division in _divisions_by_number(tree, number):
        if division.lineno in lines and (_has_sum(division.left) or _uses(division.left, sums)):
            return True
    return False


def divides_sum_by_length(source: str, sum_line: int, length_line: int) -> bool:
    """Returns True if a script divides a sum over the ranks by the length of a loader.

    `world.sum(total_loss) / len(test)`, where `total_loss` adds up the means of batches, is right
    on one process. On N ranks, the sum covers the batches of all ranks, but `len(test)` is the
    number of batches of one rank, so the result is N times too large. The statement that calls
    `world.sum` and the one that calls `len` of a prepared loader are parsed.

    Args:
        source: text of the script.
        sum_line: line that called `world.sum`, from 1.
        length_line: line that called `len` of a prepared loader, from 1.
    """
    tree = parse_source(source)
    if tree is None:
        return False

    sum_statement = _simple_statement_at(tree, sum_line)
    length_statement = _simple_statement_at(tree, length_line)
    if sum_statement is None or length_statement is None:
        return False

    # A script that uses the number of ranks there seems to divide by it, which is right.
    for statement in (sum_statement, length_statement):
        if _uses_number_of_ranks(statement):
            return False

    if sum_statement is length_statement:
        return _sums_and_divides(sum_statement)
    if sum_line < length_line:
        return _sums_then_divides(sum_statement, length_statement)
    return _divides_then_sums(length_statement, sum_statement)


def _sums_and_divides(statement: ast.stmt) -> bool:
    """Returns True for a statement that sums and divides by a length.

    The division may be outside the sum, as in `loss = world.sum(total) / len(test)`, or inside it,
    as in `loss = world.sum(total / len(test))`.
    """
    for division in _divisions_by_length(statement):
        if _has_sum(division.left) or _is_in_argument_of_sum(statement, division):
            return True
    return False


def _sums_then_divides(sum_statement: ast.stmt, length_statement: ast.stmt) -> bool:
    """Returns True if the second statement divides the sum of the first.

    For example `total = world.sum(total)`, then `loss = total / len(test)`.
    """
    if not _has_sum(sum_statement):
        return False
    sums = _assigned_names(sum_statement)
    return not sums.isdisjoint(_names_divided_by_length(length_statement))


def _divides_then_sums(length_statement: ast.stmt, sum_statement: ast.stmt) -> bool:
    """Returns True if the second statement sums the quotient of the first.

    For example `mean = total / len(test)`, then `loss = world.sum(mean)`.
    """
    if not any(_divisions_by_length(length_statement)):
        return False
    means = _assigned_names(length_statement)
    return any(_uses(call, means) for call in _sum_calls(sum_statement))


def _simple_statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """Returns the statement that a line belongs to. Statements with a block are skipped.

    with open(name) as file:        None
        x = file.read()             x = file.read()
        a = 1; b = 2                b = 2, the last statement of the line
    """
    simple_statements = []
    for node in ast.walk(tree):
        has_block = hasattr(node, "body")
        if isinstance(node, ast.stmt) and not has_block:
            simple_statements.append(node)

    # `ast.walk` yields the statements of a line from left to right.
    at_line = [node for node in simple_statements if node.lineno <= line <= (node.end_lineno or 0)]
    return at_line[-1] if at_line else None


def _names_divided_by_length(statement: ast.stmt) -> set[str]:
    """Returns the variables that a statement divides by a length.

    For `total / len(x)` and `total /= len(x)`, that is `{"total"}`.
    """
    names: set[str] = set()
    for division in _divisions_by_length(statement):
        if isinstance(division.left, ast.Name):
            names.add(division.left.id)

    # `total /= len(x)` assigns to the variable that it divides.
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div):
        if _is_length(statement.value):
            names |= _assigned_names(statement)
    return names


def _divisions_by_length(node: ast.AST) -> Iterator[ast.BinOp]:
    """Yields all divisions `... / len(...)` within a node of the syntax tree."""
    for division in _divisions(node):
        if _is_length(division.right):
            yield division


def _divisions_by_number(node: ast.AST, number: int) -> Iterator[ast.BinOp]:
    """Yields all divisions by a number that is spelt out, such as `... / 10000`, within a node."""
    for division in _divisions(node):
        if isinstance(division.right, ast.Constant) and division.right.value == number:
            yield division


def _divisions(node: ast.AST) -> Iterator[ast.BinOp]:
    """Yields all divisions `... / ...` within a node of the syntax tree."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
            yield part


def _is_length(node: ast.AST) -> bool:
    """Returns True if a node is a call `len(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _sum_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yields all calls of a method `sum`, such as `world.sum(x)`, within a node."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        if isinstance(part.func, ast.Attribute) and part.func.attr == "sum":
            yield part


def _has_sum(node: ast.AST) -> bool:
    """Returns True if a node contains a call such as `world.sum(x)`."""
    return any(True for _ in _sum_calls(node))


def _uses(node: ast.AST, names: set[str]) -> bool:
    """Returns True if a node contains one of these variables."""
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _is_in_argument_of_sum(statement: ast.stmt, division: ast.BinOp) -> bool:
    """Returns True if a division is part of the argument of a sum: `world.sum(total / len(x))`."""
    for call in _sum_calls(statement):
        for part in ast.walk(call):
            if part is division:
                return True
    return False


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Returns the names of the variables that a statement assigns to."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _uses_number_of_ranks(statement: ast.stmt) -> bool:
    """Returns True if a statement contains what seems to be the number of ranks."""
    return any(True for _ in _numbers_of_ranks(statement))


def _numbers_of_ranks(node: ast.AST) -> Iterator[ast.Attribute | ast.Name]:
    """Yields what seems to be the number of ranks in a part of a script, as in `world.size`.

    The method `size` of a tensor, as in `x.size(0)`, is not meant.
    """
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    called_functions = {call.func for call in calls}  # the node of `x.size` in `x.size(0)`
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in SIZE_NAMES:
            is_called = part in called_functions
            is_method_of_tensor = part.attr == "size" and is_called
            if not is_method_of_tensor:
                yield part
        if isinstance(part, ast.Name) and part.id in SIZE_NAMES:
            yield part

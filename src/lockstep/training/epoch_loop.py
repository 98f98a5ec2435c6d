"""Finds out from a script's source how many epochs its training loop makes.

While it runs, a loop such as `for epoch in range(20)` does not tell its length. So the source of
the script is parsed. Constants, variables and attributes in it are looked up in the running frame;
no code is called.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from lockstep.user_code import Location, parse_source, user_frames

NAMES_OF_RANGE = ("range", "trange")
NAMES_OF_PRINTING = ("print", "log", "debug", "info", "warning", "write", "append")
SIMPLE_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


def epochs_of_loop() -> int | None:
    """Returns how many epochs the script's loop makes in total; None if that is not certain.

    It is called when a loop over a loader has just ended, so that the script's present line is the
    head of this loop. The number is certain if exactly one loop is around that line, of the form
    `for ... in range(n)`, possibly with a progress bar around it, or `for ... in world.epochs(n)`.
    """
    loops = []
    for frame in user_frames():
        loops_of_frame = _loops_around(frame)
        if loops_of_frame is None:  # the source is unknown
            return None
        loops += [(loop, frame) for loop in loops_of_frame]

    if len(loops) != 1:
        return None

    loop, frame = loops[0]
    if isinstance(loop, ast.While):
        return None

    return _count(loop.iter, frame)


def may_become_argument(line: Location) -> bool:
    """Returns True if the value of an expression may become an argument of another call.

    It is called with a line that uses `len(loader)`, to find out whether this length may be passed
    to a learning-rate scheduler. True for `build(3 * len(loader))`, for `return 3 * len(loader)`,
    and for `steps = 3 * len(loader)` if `build(steps)` follows. False for `print(len(loader))` and
    for the head of a loop, and if the source is unknown.

    Args:
        line: the line of the script that contains the expression.
    """
    file, number = line
    tree = parse_source("".join(linecache.getlines(file)))
    if tree is None:
        return False

    # The head of a loop, such as `for i in range(len(loader))`, is no simple statement, so no
    # statement is found there.
    statements = [node for node in ast.walk(tree) if isinstance(node, SIMPLE_STATEMENTS)]
    statement = _statement_at(number, statements)
    if statement is None or _contains_print(statement):
        return False
    return _passes_on_value(statement) or _reaches_call(statement, statements)


def _passes_on_value(statement: ast.stmt) -> bool:
    """Returns True if a statement passes on a value that `len(loader)` in it is part of.

    return 3 * len(loader)               True
    build(3 * len(loader))               True: an `ast.Expr`, that is an expression by itself
    schedule = build(3 * len(loader))    True
    steps = 3 * len(loader)              False
    """
    is_return_or_expression = isinstance(statement, ast.Return | ast.Expr)
    return is_return_or_expression or _contains_other_call_than_len(statement)


def _statement_at(line_number: int, statements: Sequence[ast.stmt]) -> ast.stmt | None:
    """Returns the first of the statements that covers a line, or None."""
    for statement in statements:
        last_line = statement.end_lineno or statement.lineno
        if statement.lineno <= line_number <= last_line:
            return statement
    return None


def _contains_other_call_than_len(statement: ast.stmt) -> bool:
    """Returns True for `schedule = build(3 * len(loader))`, False for `steps = 3 * len(loader)`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") != "len":
            return True
    return False


def _reaches_call(assignment: ast.stmt, statements: Sequence[ast.stmt]) -> bool:
    """Returns True if an assigned value is used in a call, perhaps through other variables.

    Example: `steps = 3 * len(loader)` is followed by `total = 2 * steps` and `build(total)`.

    Args:
        assignment: the statement that assigns the value.
        statements: all simple statements of the script.
    """
    names_with_value = _names_assigned(assignment)
    while True:
        users = [each for each in statements if _computes_with(each, names_with_value)]
        if any(_contains_call(statement) for statement in users):
            return True

        further_names = set().union(*map(_names_assigned, users)) - names_with_value
        if not further_names:
            return False
        names_with_value |= further_names


def _computes_with(statement: ast.stmt, names: set[str]) -> bool:
    """Returns True if a statement reads one of some variables, and not only prints."""
    reads_one = not names.isdisjoint(_names_read(statement))
    return reads_one and not _contains_print(statement)


def _contains_call(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


def _names_assigned(statement: ast.stmt) -> set[str]:
    """Returns the names of the variables and attributes that a statement assigns to.

    `x.y = z` assigns to y.
    """
    return {name for name, is_assigned in _names(statement) if is_assigned}


def _names_read(statement: ast.stmt) -> set[str]:
    """Returns the names of the variables and attributes that a statement reads.

    `x.y = z` reads x and z.
    """
    return {name for name, is_assigned in _names(statement) if not is_assigned}


def _names(statement: ast.stmt) -> Iterator[tuple[str, bool]]:
    """Yields the names of variables and attributes, each with True if the statement assigns it."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.Attribute):
            yield node.attr, isinstance(node.ctx, ast.Store)


def _contains_print(statement: ast.stmt) -> bool:
    """Returns True if some part of a statement prints or logs; see `_prints`."""
    return any(_prints(part) for part in ast.walk(statement))


def _prints(node: ast.AST) -> bool:
    """Returns True for `print(...)`, `logger.info(...)` and for the values in an f-string."""
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Call) and _name_of_called(node) in NAMES_OF_PRINTING


def _name_of_called(call: ast.Call) -> str:
    """Returns "info" for `logger.info(...)` and "print" for `print(...)`; else an empty string."""
    called = call.func
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _loops_around(frame: FrameType) -> list[ast.For | ast.AsyncFor | ast.While] | None:
    """Returns the loops of a function whose body contains its present line.

    It is None if the source of the function is not known.
    """
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    tree = parse_source("".join(lines))
    if tree is None or not lines:
        return None

    loops = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.For | ast.AsyncFor | ast.While):
            continue
        # The tree is that of the whole file. A loop before the function may be around its
        # definition, and then also contains the present line.
        begins_in_function = node.lineno >= frame.f_code.co_firstlineno
        first_line = node.body[0].lineno
        last_line = node.body[-1].end_lineno
        assert last_line is not None  # it is known for what was parsed from a source
        body_contains_line = first_line <= frame.f_lineno <= last_line
        if begins_in_function and body_contains_line:
            loops.append(node)

    return loops


def _count(iterated: ast.expr, frame: FrameType) -> int | None:
    """Returns the number of epochs of a loop, including those before a restart; None if unknown.

    - `range(20)`: 20 epochs.
    - `range(1, 21)`: 20 epochs. The constant 1 is only where the script begins to count.
    - `range(start, 20)`: 20 epochs. If `start` is a variable, a resumed run goes on at this epoch.
      The epochs before it were trained earlier, and belong to the training too.
    - `world.epochs(20)`: 20 epochs.

    Args:
        iterated: the expression that the loop iterates over.
        frame: the frame in which names are looked up.
    """
    if not isinstance(iterated, ast.Call) or not iterated.args:
        return None

    name = _name_of_called(iterated)
    if name in ("tqdm", "track"):  # a progress bar
        return _count(iterated.args[0], frame)

    numbers = [_evaluate(argument, frame) for argument in iterated.args]
    if name == "epochs" and len(numbers) == 1:  # `world.epochs(n)`
        return numbers[0]
    if name not in NAMES_OF_RANGE or len(numbers) > 2:
        return None

    stop = numbers[-1]
    starts_at_constant = len(numbers) == 2 and isinstance(iterated.args[0], ast.Constant)
    if not starts_at_constant:
        return stop  # 20 for `range(20)` and `range(start, 20)`

    start = numbers[0]
    if start is None or stop is None:
        return None
    return stop - start  # 20 for `range(1, 21)`


def _evaluate(node: ast.expr, frame: FrameType) -> int | None:
    """Returns the value of an expression if it is an integer; None if that is not certain."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left = _evaluate(node.left, frame)
        right = _evaluate(node.right, frame)
        if left is None or right is None:
            return None
        return left + right if isinstance(node.op, ast.Add) else left - right

    value = _look_up(node, frame)
    return value if type(value) is int else None


def _look_up(node: ast.expr, frame: FrameType) -> Any:
    """Returns the value of `20`, `epochs`, `args.epochs` or `config["epochs"]`; None if unknown."""
    if isinstance(node, ast.Constant):
        return node.value

    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if node.id in names:
                return names[node.id]
        return None

    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, frame)
        attributes = getattr(owner, "__dict__", {})
        return attributes.get(node.attr)

    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _look_up(node.value, frame)
        if type(owner) is dict:
            return owner.get(node.slice.value)

    return None

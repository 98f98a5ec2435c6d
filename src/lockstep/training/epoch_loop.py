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

    It is called at the end of a loop over a loader. The number is certain if exactly one other loop
    is running in the script, of the form `for ... in range(n)`, possibly with a progress bar around
    it, or `for ... in world.epochs(n)`.
    """
    loops = []
    for frame in user_frames():
        loops_of_frame = _loops_around(frame)
        if loops_of_frame is None:
            return None
        loops += [(loop, frame) for loop in loops_of_frame]

    if len(loops) != 1:
        return None

    loop, frame = loops[0]
    if isinstance(loop, ast.While):
        return None

    return _count(loop.iter, frame)


def may_pass_value_on(line: Location) -> bool:
    """Returns True if the value of an expression may become an argument of another call.

    True for `build(3 * len(loader))`, for `return 3 * len(loader)`, and for `steps = 3 *
    len(loader)` if `build(steps)` follows. False for `print(len(loader))` and for the head of a
    loop, and if the source is unknown.

    Args:
        line: the line of the script that contains the expression.
    """
    file, number = line
    tree = parse_source("".join(linecache.getlines(file)))
    if tree is None:
        return False

    statements = [node for node in ast.walk(tree) if isinstance(node, SIMPLE_STATEMENTS)]
    for statement in statements:
        if statement.lineno <= number <= (statement.end_lineno or statement.lineno):
            if any(_prints(part) for part in ast.walk(statement)):
                return False
            if isinstance(statement, ast.Return | ast.Expr):
                return True
            if _calls_more_than_len(statement):
                return True
            return _reaches_call(statement, statements)

    return False


def _calls_more_than_len(statement: ast.stmt) -> bool:
    """Returns True for `schedule = build(3 * len(loader))`, False for `steps = 3 * len(loader)`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") != "len":
            return True
    return False


def _reaches_call(assignment: ast.stmt, statements: Sequence[ast.stmt]) -> bool:
    """Returns True if an assigned value is an argument of a call, perhaps through other variables.

    Args:
        assignment: the statement that assigns the value.
        statements: all simple statements of the script.
    """
    names = _names(assignment, stored=True)
    is_growing = True
    while is_growing:
        size_before = len(names)
        for statement in statements:
            reads_it = not names.isdisjoint(_names(statement, stored=False))
            if not reads_it or any(_prints(part) for part in ast.walk(statement)):
                continue
            if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
                return True
            names |= _names(statement, stored=True)

        is_growing = len(names) > size_before

    return False


def _names(statement: ast.stmt, *, stored: bool) -> set[str]:
    """Returns the names of the variables and attributes that a statement assigns to, or reads.

    Args:
        statement: the statement.
        stored: True for the names that it assigns to, False for those that it reads.
    """
    names = set()
    for node in ast.walk(statement):
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        if isinstance(node.ctx, ast.Store) == stored:
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


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
    """Returns the loops of a function whose body contains its present line; None without source."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    tree = parse_source("".join(lines))
    if tree is None or not lines:
        return None

    loops = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.For | ast.AsyncFor | ast.While):
            continue
        is_of_function = node.lineno >= frame.f_code.co_firstlineno
        last_line = node.body[-1].end_lineno or 0
        if is_of_function and node.body[0].lineno <= frame.f_lineno <= last_line:
            loops.append(node)

    return loops


def _count(iterated: ast.expr, frame: FrameType) -> int | None:
    """Returns the number of epochs of a loop, including those before a restart; None if unknown.

    `range(start, n)` counts as n epochs if `start` is a variable, because a resumed run sets it.

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
    if name == "epochs" and len(numbers) == 1:
        return numbers[0]
    if name not in NAMES_OF_RANGE or len(numbers) > 2:
        return None

    stop = numbers[-1]
    if len(numbers) == 2 and isinstance(iterated.args[0], ast.Constant):
        start = numbers[0]
        return None if start is None or stop is None else stop - start

    return stop


def _evaluate(node: ast.expr, frame: FrameType) -> int | None:
    """Returns the value of an expression if it is an integer; None if that is not certain."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left = _evaluate(node.left, frame)
        right = _evaluate(node.right, frame)
        if left is None or right is None:
            return None
        return left + right if isinstance(node.op, ast.Add) else left - right

    values = list(_look_up(node, frame))
    if len(values) != 1 or type(values[0]) is not int:
        return None

    return values[0]


def _look_up(node: ast.expr, frame: FrameType) -> Iterator[Any]:
    """Yields the value of `20`, `epochs`, `args.epochs` or `config["epochs"]`, if known."""
    if isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if node.id in names:
                yield names[node.id]
                return
    elif isinstance(node, ast.Attribute):
        for owner in _look_up(node.value, frame):
            attributes = getattr(owner, "__dict__", {})
            if node.attr in attributes:
                yield attributes[node.attr]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        for owner in _look_up(node.value, frame):
            if type(owner) is dict and node.slice.value in owner:
                yield owner[node.slice.value]

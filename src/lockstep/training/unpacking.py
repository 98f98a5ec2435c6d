"""Finds scripts that unpack the results of `world.prepare` in another order or number.

`prepare` returns its results in the order in which the objects were given. Three cases are found:

- `model, optimizer = world.prepare(model, optimizer, loader)` is rejected before anything is
prepared, in place of Python's error "too many values to unpack".
- `test, train = world.prepare(train, test)` is rejected before anything is prepared. Both results
have the same type, so no error would follow. The script's source names the variables that get the
results; if one of them holds another of the given objects, the results are mixed up.
- Otherwise Python raises an error later, such as "'PreparedOptimizer' object is not callable". It
gets a note that says what `prepare` has returned, and in which order.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from lockstep.batch.loader import Loader
from lockstep.errors import LockstepError, UsageError, add_note_once
from lockstep.language import translate_sentences
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.training.scheduler import PreparedScheduler
from lockstep.user_code import is_user_file, parse_source
from lockstep.wording import describe_type

MISSING_ATTRIBUTE = re.compile(r"'(?P<class>\w+)' object has no attribute '(?P<attribute>\w+)'")
NOT_CALLABLE = re.compile(r"'(?P<class>\w+)' object is not callable")
NOT_ITERABLE = re.compile(r"'(?P<class>\w+)' object is not iterable")


def check_unpacking(objects: Sequence[Any], frame: FrameType | None) -> None:
    """Raises UsageError if the results of `prepare` are unpacked in the wrong order or number.

    Args:
        objects: the objects that `prepare` was given.
        frame: the frame of the function that has called `prepare`. Nothing is checked if its
            statement does not unpack the results, or has no source.
    """
    if frame is None or len(objects) < 2 or not is_user_file(frame.f_code.co_filename):
        return

    unpacking = _find_unpacking(frame)
    if unpacking is None:
        return

    targets, argument_expressions = unpacking
    if len(targets) != len(objects):
        _check_number(targets, argument_expressions, num_results=len(objects))
        return

    # In `test, train = world.prepare(train, test)` the first variable, `test`, would get the result
    # for the first argument, `train`. But it holds the second argument.
    held_objects = [_value_of(target, frame) for target in targets]
    for argument, held_object in zip(objects, held_objects, strict=True):
        other_arguments = [other for other in objects if other is not argument]
        variable_holds_other_argument = any(held_object is other for other in other_arguments)
        if variable_holds_other_argument:
            variables = [ast.unparse(target) for target in targets]
            arguments = _names_of_arguments(objects, variables, held_objects)
            raise UsageError(
                f"{', '.join(variables)} = world.prepare({', '.join(arguments)})",
                f"the result for {describe_type(argument)} would go to the variable that holds "
                f"{describe_type(held_object)}",
                "unpack the results in the order in which the objects are given",
            )


def _check_number(
    targets: Sequence[ast.expr], arguments: Sequence[ast.expr], num_results: int
) -> None:
    """Raises UsageError if the results of `prepare` are unpacked into too many or few variables.

    Args:
        targets: the variables.
        arguments: the arguments of the call.
        num_results: the number of results, one for each object.
    """
    # `model, *others = world.prepare(...)` takes any number of results, and `*objects` in
    # `world.prepare(*objects)` stands for any number of arguments.
    if any(isinstance(each, ast.Starred) for each in (*targets, *arguments)):
        return

    # There must be one argument for each result. Otherwise the arguments are those of another
    # `prepare` in the statement.
    are_arguments_of_this_call = len(arguments) == num_results
    if not are_arguments_of_this_call:
        return

    variable_texts = ", ".join(ast.unparse(target) for target in targets)
    argument_texts = ", ".join(ast.unparse(argument) for argument in arguments)
    raise UsageError(
        f"{variable_texts} = world.prepare({argument_texts})",
        f"there are {len(targets)} variables for the results of {num_results} objects",
        "unpack one result for each object",
    )


def _names_of_arguments(
    arguments: Sequence[Any], variables: Sequence[str], held_objects: Sequence[Any]
) -> list[str]:
    """Returns the variable that holds each argument; if there is none, the argument's class."""
    variable_by_id = {}
    for variable, held_object in zip(variables, held_objects, strict=True):
        variable_by_id[id(held_object)] = variable
    return [variable_by_id.get(id(argument), type(argument).__name__) for argument in arguments]


def note_order(error: BaseException | None, returned: Sequence[Sequence[Any]]) -> None:
    """Adds a note about the order of results to an error that may come from mixing them up.

    Args:
        error: an uncaught error; None if there was none.
        returned: the results of each call of `prepare`.
    """
    # Errors of Lockstep, some of which are also AttributeErrors, have advice of their own.
    if not isinstance(error, TypeError | AttributeError) or isinstance(error, LockstepError):
        return
    for results in returned:
        if len(results) > 1 and _may_be_mixed_up(str(error), results):
            kinds = ", ".join(_describe_result(result) for result in results)
            note = translate_sentences(
                f"world.prepare returned, in the order in which they were given: {kinds}.",
                "Unpack them in this order.",
            )
            add_note_once(error, "order", note)
            return


class _Unpacking(NamedTuple):
    """The statement `a, b = world.prepare(x, y)`, as expressions of Python's syntax tree."""

    targets: list[ast.expr]
    arguments: list[ast.expr]


def _find_unpacking(frame: FrameType) -> _Unpacking | None:
    """Returns the running statement `a, b = world.prepare(...)`; None if it is another one."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    tree = parse_source("".join(lines))
    if tree is None:
        return None

    unpacking = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        last_line = node.end_lineno or node.lineno
        is_running = node.lineno <= frame.f_lineno <= last_line
        if is_running and _is_call_of_prepare(node.value) and isinstance(target, ast.Tuple):
            # If several stand in one line, the last one counts.
            unpacking = _Unpacking(target.elts, node.value.args)

    return unpacking


def _is_call_of_prepare(value: ast.expr) -> TypeGuard[ast.Call]:
    """Returns True if an expression is a call of a method named `prepare`."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return value.func.attr == "prepare"


def _value_of(target: ast.expr, frame: FrameType) -> Any:
    """Returns the value of a variable, or of an attribute of a variable; None if it is unknown.

    No code of the script is run, so the values of properties are unknown.
    """
    if isinstance(target, ast.Name):
        return frame.f_locals.get(target.id, frame.f_globals.get(target.id))
    if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
        return None

    owner = _value_of(target.value, frame)
    attributes = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):  # submodules are not in its `__dict__`
        attributes.update(owner.named_children())

    return attributes.get(target.attr)


def _may_be_mixed_up(message: str, results: Sequence[Any]) -> bool:
    """Returns True if an error shows that one result was used in place of another one.

    Args:
        message: the message of Python's error, which names the class of the object that was used.
            For example, "'PreparedOptimizer' object is not callable" shows that an optimizer was
            used in place of a module.
        results: the results of one call of `prepare`.
    """
    used_class, would_have_worked = _read_error(message)
    for used in results:
        # A wrapper delegates to the user's object, so the message may name either class.
        names = {type(used).__name__, type(_without_wrapper(used)).__name__}
        if used_class not in names:
            continue
        others = [other for other in results if other is not used]
        if any(would_have_worked(other) for other in others):
            return True
    return False


def _read_error(message: str) -> tuple[str, Callable[[Any], bool]]:
    """Reads which class of object was used in a wrong way, from the message of Python's error.

    Returns:
        The name of the class, or "" if the message is about something else; and a function that
        returns True for an object with which there would have been no error.
    """
    # "'Loader' object has no attribute 'zero_grad'"
    match = MISSING_ATTRIBUTE.match(message)
    if match is not None:
        attribute = match["attribute"]
        return match["class"], lambda other: hasattr(other, attribute)

    # "'PreparedOptimizer' object is not callable"
    match = NOT_CALLABLE.match(message)
    if match is not None:
        return match["class"], lambda other: isinstance(other, nn.Module)

    # "'Net' object is not iterable"
    match = NOT_ITERABLE.match(message)
    if match is not None:
        return match["class"], lambda other: isinstance(other, Loader)

    return "", lambda other: False


def _without_wrapper(result: Any) -> Any:
    """Returns the user's object from which `prepare` has made a result."""
    if isinstance(result, PreparedOptimizer | PreparedScheduler):
        return result.inner
    if isinstance(result, nn.Module):
        return getattr(result, "module", result)
    return result


def _describe_result(result: Any) -> str:
    """Describes a result: "the loader", "the optimizer SGD", "the model Net"."""
    if isinstance(result, Loader):
        return "the loader"
    name = type(_without_wrapper(result)).__name__
    if isinstance(result, PreparedOptimizer):
        return f"the optimizer {name}"
    if isinstance(result, PreparedScheduler):
        return f"the scheduler {name}"
    return f"the model {name}"

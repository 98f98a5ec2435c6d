"""Finds the exceptions that are *in flight*: raised, and being handled while other code runs.

The code of a `finally` block, of an `except` block and of a context manager's `__exit__` runs while
an exception is in flight. If that code calls a collective, the other ranks are probably at another
one. If it raises an exception of its own, Python keeps the earlier one as its *context*.

An exception in flight will be *raised again* if nothing has caught it for good: it is handled by
`finally`, by `with`, or by an `except` block with a `raise` at its end. It would have ended the
rank, whatever came later. Other `except` blocks have caught it, and the program goes on.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from lockstep.user_code import is_user_file, parse_source

_MAX_ERRORS = 20
_TRAINING_WENT_ON = "_lockstep_training_went_on"
"""An attribute of exceptions in whose handling an optimizer has made a step."""
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit)


@dataclass(frozen=True, kw_only=True)
class ErrorInFlight:
    """An exception that a rank handles."""

    headline: str
    """The type and the message of the exception, such as `ValueError: no data`."""
    line: str | None
    """The user's line that raised it, such as `train.py:12: load()`; None if it is not known."""
    training_went_on: bool = False
    """True if the rank has made an optimizer step since then, so that it has survived it."""

    def describe(self) -> str:
        """Describes it in one line: `ValueError: no data, train.py:12: load()`."""
        return self.headline if self.line is None else f"{self.headline}, {self.line}"


def note_step(*_: object) -> None:
    """Notes that training goes on while exceptions are handled. This is a step hook of torch's
    optimizers.

    A script may train in an `except` block, after it has found no checkpoint, for example. That
    exception is then no reason for what happens later.
    """
    error = sys.exception()
    if error is None:  # this is the usual case
        return
    for handled in _with_contexts(error):
        setattr(handled, _TRAINING_WENT_ON, True)


def training_went_on(error: BaseException) -> bool:
    """Returns True if an optimizer has made a step while this exception was handled."""
    return hasattr(error, _TRAINING_WENT_ON)


def error_handled_by(thread: int) -> BaseException | None:
    """Returns the exception that a thread of this process handles, or None."""
    handled: object = sys._current_exceptions().get(thread)
    if isinstance(handled, tuple):  # Python 3.11: type, value and traceback
        handled = handled[1]
    return handled if isinstance(handled, BaseException) else None


def find_error_that_led_here(error: BaseException) -> BaseException | None:
    """Returns the exception in flight that is probably why its rank runs the present code, or None.

    Args:
        error: the exception that this thread handles.
    """
    handled = find_handled_error(error)
    if handled is None or training_went_on(handled):
        return None
    return handled


def find_handled_error(error: BaseException) -> BaseException | None:
    """Finds the exception to report, of all that a thread handles.

    For example, a `finally` block handles a `ValueError` and raises a `KeyError`, which another
    `finally` block handles. Python will raise both again, and the `ValueError` is reported.

    Args:
        error: the exception that the thread handles: the `KeyError`. It may have been raised while
            another one was handled.

    Returns:
        The earliest exception that will be raised again; if there is none, the latest one that the
        user's own code handles, or None.
    """
    latest_first = [error, *errors_before(error)]
    earliest_first = latest_first[::-1]
    for raised_again in _errors_raised_again(earliest_first):
        return raised_again

    for handled in latest_first:
        if is_handled_by_user(handled):
            return handled
    return None


def find_uncaught_before(error: BaseException) -> BaseException | None:
    """Returns the exception that would have ended this rank if `error` had not been raised while
    it was handled; None if there is none.
    """
    latest_first = [error, *errors_before(error)]
    for raised_again in _errors_raised_again(latest_first[::-1]):
        if raised_again is not error:
            return raised_again  # the earliest
    return None


def errors_before(error: BaseException) -> list[BaseException]:
    """Returns the contexts of an exception, the nearest first.

    A context that `raise ... from ...` hides is left out, but those before it are not: they were in
    flight already.
    """
    errors = []
    for later in _with_contexts(error):
        earlier = later.__context__
        if earlier is not None and not later.__suppress_context__:
            errors.append(earlier)
    return errors


def is_handled_by_user(error: BaseException) -> bool:
    """Returns True if the user's own code handles an exception, and it is no mere end of a loop."""
    if isinstance(error, _CONTROL_FLOW) or error.__traceback__ is None:
        return False
    return is_user_file(error.__traceback__.tb_frame.f_code.co_filename)


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and all its contexts, the nearest first."""
    earlier: BaseException | None = error
    for _ in range(_MAX_ERRORS):  # the contexts may be circular
        if earlier is None:
            return
        yield earlier
        earlier = earlier.__context__


def _errors_raised_again(earliest_first: Sequence[BaseException]) -> Iterator[BaseException]:
    """Yields the exceptions that will be raised again, the earliest first.

    Args:
        earliest_first: exceptions, each raised while the one before it was handled.
    """
    for index, error in enumerate(earliest_first):
        if isinstance(error, _CONTROL_FLOW) or training_went_on(error):
            continue
        later_errors = earliest_first[index + 1 :]
        if _will_be_raised_again(error, later_errors):
            yield error


def _will_be_raised_again(error: BaseException, later_errors: Sequence[BaseException]) -> bool:
    """Returns True if the source shows that the code that handles an exception raises it again.

    Here line 2 has raised the exception (`raising_line`). While line 4 handles it
    (`handling_line`), it is in flight. After line 4 Python raises it again:

        1  try:
        2      train()
        3  finally:
        4      save()

    Args:
        error: the exception.
        later_errors: those that were raised while it was handled.
    """
    # The traceback of an exception begins at the frame that handles it.
    trace = error.__traceback__
    if trace is None:
        return False
    source = "".join(linecache.getlines(trace.tb_frame.f_code.co_filename))
    tree = parse_source(source)
    if tree is None:
        return False

    raising_line = trace.tb_lineno
    handling_line = _handling_line(trace.tb_frame, later_errors)
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.TryStar):
            if _try_raises_again(node, raising_line, handling_line):
                return True
        elif isinstance(node, ast.With | ast.AsyncWith):
            if _with_raises_again(node, raising_line, handling_line):
                return True
    return False


def _handling_line(frame: FrameType, later_errors: Sequence[BaseException]) -> int:
    """Returns the line of a frame that runs while an exception is handled.

    If this line has raised a later exception, it is in the traceback of that exception. (The frame
    itself may have come to another line by now, or have ended.) Otherwise the frame is still at it.
    """
    for later in later_errors:
        trace = later.__traceback__
        while trace is not None:
            if trace.tb_frame is frame:
                return trace.tb_lineno
            trace = trace.tb_next
    return frame.f_lineno


def _try_raises_again(node: ast.Try | ast.TryStar, raising_line: int, handling_line: int) -> bool:
    """Returns True if a `try` statement raises an exception again after it has handled it.

    For example:

         1  try:
         2      train()
         3  except ValueError:
         4      save()
         5      raise
         6  except KeyError:
         7      skip()
         8  else:
         9      report()
        10  finally:
        11      close()

        raising line    handling line    result
        2, 4, 7 or 9    11               True: Python raises it again after `finally`
        2               4                True: line 5 raises it again
        2               7                False

    Args:
        node: the statement.
        raising_line: the line that has raised the exception.
        handling_line: the line that runs while the exception is handled.
    """
    before_finally: list[ast.stmt | ast.ExceptHandler] = [*node.body, *node.handlers, *node.orelse]
    if _contains(node.finalbody, handling_line) and _contains(before_finally, raising_line):
        return True

    # An `except` block handles exceptions of the body alone.
    if not _contains(node.body, raising_line):
        return False
    for handler in node.handlers:
        if _contains(handler.body, handling_line):
            later_statements = [each for each in handler.body if each.lineno > handling_line]
            return any(_raises_what_is_handled(each, handler) for each in later_statements)
    return False


def _raises_what_is_handled(statement: ast.stmt, handler: ast.ExceptHandler) -> bool:
    """Returns True for `raise`, and for `raise error` in a block `except ValueError as error:`."""
    if not isinstance(statement, ast.Raise):
        return False
    raised = statement.exc
    return raised is None or (isinstance(raised, ast.Name) and raised.id == handler.name)


def _with_raises_again(
    node: ast.With | ast.AsyncWith, raising_line: int, handling_line: int
) -> bool:
    """Returns True if an exception of the body of a `with` statement is handled by `__exit__`.

    Python calls `__exit__` at the line of `with`, and raises the exception again after the call.
    """
    first_line_of_body = node.body[0].lineno
    exit_is_running = node.lineno <= handling_line < first_line_of_body
    return exit_is_running and _contains(node.body, raising_line)


def _contains(nodes: Sequence[ast.stmt | ast.ExceptHandler], line: int) -> bool:
    """Returns True if a line belongs to one of these statements."""
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in nodes)

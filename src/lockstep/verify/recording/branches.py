"""Records which way a script goes at each of its `if` and `while` statements.

The source of the user's files is changed when it is imported, so that the *test* of each statement
(in `if rank == 0:`, the expression `rank == 0`) is passed to a function that records whether it was
true. That line becomes `if __lockstep_test__(("train.py", 12, 15), rank == 0):`. The tuple is the
*place* of the test: the file, and the first and last line of the statement.
"""

from __future__ import annotations

import ast
import builtins
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

import torch

from lockstep.user_code import is_user_file
from lockstep.verify.training_record import WAS_FALSE, WAS_TRUE, Place

NOTE_OUTCOME = "__lockstep_test__"
"""Name of the recording function in `builtins`."""
COMPILER_WORDS = ("jit", "vectorize")
"""Parts of the names of decorators that compile a function, such as `numba.njit`. They could not
compile a call of the recording function."""
REPORTING_FUNCTIONS = {
    *("print", "write", "flush", "info", "debug", "warning", "error", "log", "log_metrics"),
    *("add_scalar", "add_scalars", "set_postfix", "set_description", "append", "item"),
    *("write_line", "writerow", "echo", "display", "strftime", "time", "perf_counter", "join"),
    *("format", "round", "float", "int", "str", "len", "max", "min", "sum", "mean", "makedirs"),
    *("detach", "cpu", "tolist", "numpy", "open", "close", "dump", "dumps", "save", "state_dict"),
}
"""Functions that a script calls to report on its training; they do not change the training."""


class Branches:
    """Collects the outcomes of tests in the user's files, once `install` was called."""

    def __init__(self) -> None:
        self._outcomes: dict[Place, int] = {}

    def install(self) -> None:
        """Patches Python's loader, so that tests are recorded in all files imported later.

        Python calls `get_code` to import a module. It reads a cached `.pyc` file, or else calls
        `source_to_code` to compile the source. Both are replaced: `get_code` to ignore `.pyc` files
        of the user's modules, and `source_to_code` to record their tests.
        """
        setattr(builtins, NOTE_OUTCOME, self._note_outcome)  # the changed source calls it
        loader_class: Any = SourceFileLoader
        original_get_code = loader_class.get_code
        original_source_to_code = loader_class.source_to_code

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> CodeType:
            """Compiles the source of a file; tests in a user's file are recorded."""
            # Tools may also pass a syntax tree of their own, which is compiled unchanged.
            is_source = isinstance(path, str) and isinstance(data, bytes | str)
            if is_source and is_user_file(path):
                data = add_notes(ast.parse(data, path), path)
            compiled: CodeType = original_source_to_code(loader, data, path, **options)
            return compiled

        def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
            """Returns the code of a module; a user's module is never read from a `.pyc` file."""
            path = loader.get_filename(name)
            if not is_user_file(path):
                return original_get_code(loader, name)  # type: ignore[no-any-return]

            source = loader.get_data(path)
            return source_to_code(loader, source, path)

        loader_class.get_code = get_code
        loader_class.source_to_code = source_to_code

    def _note_outcome(self, place: Place, value: Any) -> Any:
        """Records the outcome of a test, and returns it. The changed source calls this.

        Outcomes are combined as bits: a test that was true once and false later has the value
        `WAS_TRUE | WAS_FALSE`.

        Args:
            place: file, first line and last line of the statement.
            value: value of the test, such as that of `rank == 0`.

        Returns:
            The outcome as True or False. While torch compiles a function, `value` itself, which the
            compiler traces.
        """
        if torch.compiler.is_compiling():  # the compiler cannot trace the lines below
            return value

        is_true = bool(value)
        outcome = WAS_TRUE if is_true else WAS_FALSE
        self._outcomes[place] = self._outcomes.get(place, 0) | outcome
        return is_true

    def pop_outcomes(self) -> dict[Place, int]:
        """Returns the outcomes recorded since the last call, by place, and clears them.

        Each outcome is `WAS_TRUE`, `WAS_FALSE`, or both combined.
        """
        outcomes = self._outcomes
        self._outcomes = {}
        return outcomes


def add_notes(tree: ast.Module, path: str) -> ast.Module:
    """Changes the syntax tree of a file so that its tests are recorded, and returns it."""
    changed: ast.Module = _TestNoter(path).visit(tree)
    return ast.fix_missing_locations(changed)


class _TestNoter(ast.NodeTransformer):
    """Replaces tests in a file by calls of the recording function, if they may matter.

    `NodeTransformer` calls `visit_If` for every `if` of the file, `visit_While` for every `while`,
    and so on.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def visit_If(self, node: ast.If) -> ast.AST:
        """Records the test of an `if`, unless it only decides what is printed, logged or saved.

        Such a test may differ between ranks without harm, as in `if rank == 0: print(loss)`.
        """
        self.generic_visit(node)  # for statements nested in this one
        if _are_reports([*node.body, *node.orelse]):
            return node
        return self._with_note(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        return self._with_note(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return self._with_note(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leaves a function unchanged if a decorator compiles it, as numba's decorators do."""
        for decorator in node.decorator_list:
            text = ast.unparse(decorator)  # such as "numba.njit(cache=True)"
            if any(word in text for word in COMPILER_WORDS):
                return node
        return self.generic_visit(node)

    def _with_note(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        """Changes `if test:` to `if __lockstep_test__((path, first line, last line), test):`."""
        if isinstance(node.test, ast.Constant):  # as in `while True`
            return node

        place: Any = (self._path, node.lineno, node.end_lineno)
        function = ast.Name(NOTE_OUTCOME, ast.Load())
        call = ast.Call(function, [ast.Constant(place), node.test], keywords=[])
        # With the location of the original test, tracebacks still show the right line.
        node.test = ast.copy_location(call, node.test)
        return node


def _are_reports(statements: list[ast.stmt]) -> bool:
    """True if every statement only prints, logs or saves something; also for an empty list."""
    return all(_is_report(statement) for statement in statements)


def _is_report(statement: ast.stmt) -> bool:
    """True if a statement only calls functions that report something, such as `print`."""
    if isinstance(statement, ast.Pass):
        return True
    # Blocks, such as `with open(path, "w") as file:`, report if all statements inside do.
    if isinstance(statement, ast.If | ast.For):
        return _are_reports([*statement.body, *statement.orelse])
    if isinstance(statement, ast.With):
        return _are_reports(statement.body)
    if not isinstance(statement, ast.Expr):  # such as an assignment or a `break`
        return False

    # In `logger.info(f"{loss.item()}")`, both `info` and `item` must be reporting functions.
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            names.add(_name_of_function(node.func))

    # An expression that calls nothing, such as a docstring, reports nothing.
    return bool(names) and names <= REPORTING_FUNCTIONS


def _name_of_function(function: ast.expr) -> str:
    """Returns `info` for `logger.info` and `print` for `print`; empty for anything else."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    return ""

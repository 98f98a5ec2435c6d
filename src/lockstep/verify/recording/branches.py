"""Records which way a script goes at its `if`s and `while`s.

The source of the user's files is changed when it is imported: every test of an `if`, a `while` or
a conditional expression becomes an argument of a function that notes its outcome. In
`if rank == 0:`, the *test* is `rank == 0`, and its *place* is the file and the lines that it
decides about. The changed line is `if __lockstep_test__(("train.py", 12, 15), rank == 0):`.
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
"""The name of the function that notes outcomes, in `builtins`."""
COMPILER_WORDS = ("jit", "vectorize")
"""Words in the names of decorators that compile a function, such as `numba.njit`. They cannot
compile a call of our function."""
REPORTING_FUNCTIONS = {
    *("print", "write", "flush", "info", "debug", "warning", "error", "log", "log_metrics"),
    *("add_scalar", "add_scalars", "set_postfix", "set_description", "append", "item"),
    *("write_line", "writerow", "echo", "display", "strftime", "time", "perf_counter", "join"),
    *("format", "round", "float", "int", "str", "len", "max", "min", "sum", "mean", "makedirs"),
    *("detach", "cpu", "tolist", "numpy", "open", "close", "dump", "dumps", "save", "state_dict"),
}
"""Names of functions that a script calls to report on its training, which change nothing in it."""


class Branches:
    """The outcomes of tests in the user's files, from the call of `install` on."""

    def __init__(self) -> None:
        self._outcomes: dict[Place, int] = {}

    def install(self) -> None:
        """Patches Python's loader of source files, to change what is imported or run from here on.

        The user's modules are compiled from their source even if there is a cached `.pyc` file,
        and none is written.
        """
        setattr(builtins, NOTE_OUTCOME, self._note_outcome)  # the changed source calls it
        loader_class: Any = SourceFileLoader
        original_get_code = loader_class.get_code
        original_source_to_code = loader_class.source_to_code

        def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
            """Compiles a module that is imported; Python's own method may read a `.pyc` file."""
            path = self.get_filename(name)
            if not is_user_file(path):
                return original_get_code(self, name)  # type: ignore[no-any-return]
            return source_to_code(self, self.get_data(path), path)

        def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> CodeType:
            """Compiles the source of a file, with calls that note outcomes if it is the user's."""
            # Tools may also hand over a syntax tree that they have made: it is compiled as it is.
            is_source = isinstance(path, str) and isinstance(data, bytes | str)
            if is_source and is_user_file(path):
                data = add_notes(ast.parse(data, path), path)
            compiled: CodeType = original_source_to_code(self, data, path, **options)
            return compiled

        loader_class.get_code = get_code
        loader_class.source_to_code = source_to_code

    def _note_outcome(self, place: Place, value: Any) -> Any:
        """Notes the outcome of a test and returns it; the changed source calls this at each test.

        Outcomes are bits: a test that was true and later false has WAS_TRUE | WAS_FALSE.

        Args:
            place: where the test is.
            value: of the test, such as that of `rank == 0`.
        """
        if torch.compiler.is_compiling():  # the compiler cannot follow what is noted here
            return value
        is_true = bool(value)
        outcome = WAS_TRUE if is_true else WAS_FALSE
        self._outcomes[place] = self._outcomes.get(place, 0) | outcome
        return is_true

    def pop_outcomes(self) -> dict[Place, int]:
        """Returns the outcomes by place since the last call, and forgets them.

        Each is WAS_TRUE, WAS_FALSE, or both bits.
        """
        outcomes = self._outcomes
        self._outcomes = {}
        return outcomes


def add_notes(tree: ast.Module, path: str) -> ast.Module:
    """Changes the syntax tree of a file so that its tests are noted, and returns it."""
    changed: ast.Module = _TestNoter(path).visit(tree)
    return ast.fix_missing_locations(changed)


class _TestNoter(ast.NodeTransformer):
    """Puts each test of a file into a call of `NOTE_OUTCOME`, if it may change the training.

    Python calls `visit_If` for every `if` of the file, and so on.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def visit_If(self, node: ast.If) -> ast.AST:
        """Lets the test of an `if` be noted, unless it only decides what is printed or logged.

        Such a test may rightly have another outcome on each rank: `if rank == 0: print(loss)`.
        """
        self.generic_visit(node)  # tests inside of it
        if _only_report([*node.body, *node.orelse]):
            return node
        return self._with_note(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        return self._with_note(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return self._with_note(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leaves functions unchanged that a compiler such as numba's compiles."""
        for decorator in node.decorator_list:
            text = ast.unparse(decorator)  # such as "numba.njit(cache=True)"
            if any(word in text for word in COMPILER_WORDS):
                return node
        return self.generic_visit(node)

    def _with_note(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        """Changes `if test:` to `if NOTE_OUTCOME((path, first line, last line), test):`."""
        if isinstance(node.test, ast.Constant):  # as in `while True`
            return node
        place: Any = (self._path, node.lineno, node.end_lineno)
        function = ast.Name(NOTE_OUTCOME, ast.Load())
        call = ast.Call(function, [ast.Constant(place), node.test], keywords=[])
        node.test = ast.copy_location(call, node.test)  # tracebacks still show the right line
        return node


def _only_report(statements: list[ast.stmt]) -> bool:
    """True if all statements only print, log or save something; also if there are none."""
    return all(_only_reports(statement) for statement in statements)


def _only_reports(statement: ast.stmt) -> bool:
    """True if all functions that a statement calls report something, and it does nothing else."""
    if isinstance(statement, ast.Pass):
        return True
    # Blocks, such as `with open(path, "w") as file:`, report if all statements inside do.
    if isinstance(statement, ast.If | ast.For):
        return _only_report([*statement.body, *statement.orelse])
    if isinstance(statement, ast.With):
        return _only_report(statement.body)
    if not isinstance(statement, ast.Expr):  # such as an assignment or a `break`
        return False

    # A call such as `logger.info(f"{loss.item()}")`: both `info` and `item` must be known ones.
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            names.add(_name_of_function(node.func))

    return bool(names) and names <= REPORTING_FUNCTIONS


def _name_of_function(function: ast.expr) -> str:
    """Returns `info` for `logger.info` and `print` for `print`; empty for anything else."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    return ""

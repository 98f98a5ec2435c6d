"""Which way a script went at its `if`s and `while`s, and what it wrote to tensors, by rank.

A rank counts the outcomes of the tests in the user's files. Where ranks part, the test that had
another outcome for the first time, or the line that wrote on some of them only, is worth a look.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

import torch

from lockstep.user_code import format_source_line, is_user_file
from lockstep.verify.catalogue import Cause, of_runs
from lockstep.verify.compare import Divergence
from lockstep.verify.training_record import Place
from lockstep.wording import format_ranks

_NAME = "__lockstep_test__"
_OUTCOMES = ("not reached", "true", "false", "both")
_COMPILERS = "jit", "vectorize"
"""In the names of decorators."""
_MOST = 2
"""Tests that are shown."""


class Branches:
    """Tells the outcomes of the tests in the user's files, once it is installed."""

    def __init__(self) -> None:
        self._seen: dict[Place, int] = {}

    def install(self) -> None:
        """All that is imported or run from source from here on is seen."""
        setattr(builtins, _NAME, self._test)
        loader: Any = SourceFileLoader
        plain, compiled = loader.get_code, loader.source_to_code

        def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
            path = self.get_filename(name)
            if not is_user_file(path):
                return plain(self, name)  # type: ignore[no-any-return]
            return loader.source_to_code(self, self.get_data(path), path)  # type: ignore[no-any-return]

        def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> CodeType:
            if isinstance(path, str) and isinstance(data, bytes | str) and is_user_file(path):
                data = ast.fix_missing_locations(_Tests(path).visit(ast.parse(data, path)))
            return compiled(self, data, path, **options)  # type: ignore[no-any-return]

        loader.get_code, loader.source_to_code = get_code, source_to_code

    def since(self) -> dict[Place, int]:
        """The outcomes since the last call: 1 of true, 2 of false, 3 of both."""
        seen, self._seen = self._seen, {}
        return seen

    def _test(self, place: Place, value: Any) -> Any:
        if torch.compiler.is_compiling():
            return value
        taken = bool(value)
        self._seen[place] = self._seen.get(place, 0) | (1 if taken else 2)
        return taken


_REPORTS = {
    *("print", "write", "flush", "info", "debug", "warning", "error", "log", "log_metrics"),
    *("add_scalar", "add_scalars", "set_postfix", "set_description", "append", "item"),
    *("write_line", "writerow", "echo", "display", "strftime", "time", "perf_counter", "join"),
    *("format", "round", "float", "int", "str", "len", "max", "min", "sum", "mean", "makedirs"),
    *("detach", "cpu", "tolist", "numpy", "open", "close", "dump", "dumps", "save", "state_dict"),
}
"""Names of what is called to report on a training; it changes nothing in it."""


def _only_reports(node: ast.stmt) -> bool:
    """Whether a statement prints, logs or notes something, and nothing else."""
    if isinstance(node, ast.Pass):
        return True
    if isinstance(node, ast.If | ast.For | ast.With):
        return all(map(_only_reports, (*node.body, *getattr(node, "orelse", ()))))
    if not isinstance(node, ast.Expr):
        return False
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    names = [getattr(func, "attr", getattr(func, "id", "")) for func in calls]
    return bool(names) and {*names} <= _REPORTS


class _Tests(ast.NodeTransformer):
    """Has every test of a file told, but for those that only decide what is reported."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _told(self, node: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, ast.If) and all(map(_only_reports, (*node.body, *node.orelse))):
            return node
        if not isinstance(node.test, ast.Constant):
            where: Any = self._path, node.lineno, node.end_lineno
            call = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(where), node.test], [])
            node.test = ast.copy_location(call, node.test)
        return node

    visit_If = visit_While = visit_IfExp = _told

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """Compilers such as numba's know no function of ours."""
        compiled = any(word in ast.unparse(d) for d in node.decorator_list for word in _COMPILERS)
        return node if compiled else self.generic_visit(node)


def other_ways(case: Divergence, cause: Cause) -> list[str]:
    """Tests that, in this step and in none before, end otherwise than on one process; in words.

    As data decides some, the outcomes of all ranks together are compared. Those of a first step
    say something only where nothing else does.

    Args:
        case: where trainings part.
        cause: what is said of it; tests that stand there are left out.
    """
    shorter = min(len(case.reference_run), len(case.parallel_run))
    if case.reference_run is case.parallel_run or case.update_index >= shorter:
        return []
    if not case.update_index and cause.code != "LS210":
        return []

    def parted(number: int, place: Place) -> bool:
        ranks = [rank.branch_outcomes.get(place, 0) for rank in case.parallel_run[number]]
        every = 0
        for ways in ranks:
            every |= ways
        return every != case.reference_run[number][0].branch_outcomes.get(place, 0)

    places = [
        p
        for p in case.expected[0].branch_outcomes
        if all(p in rank.branch_outcomes for rank in case.actual)
    ]
    now = [place for place in places if parted(case.update_index, place)]
    new = [p for p in now if not any(parted(number, p) for number in range(case.update_index))]
    new = [p for p in new if not any(_line(p) in text for text in cause.seen)]
    ways = [rank.branch_outcomes for rank in (*case.expected, *case.actual)]
    before = ", and in none before," if case.update_index else ""
    text = f"in this step{before} another way was gone at"
    return [f"{text} {_told(place, ways)}" for place in new[:_MOST]]


def ways_of_ranks(ranks: Sequence[Mapping[Place, int]]) -> list[str]:
    """Tests that were true on some ranks and false on the others, in words."""
    places = [p for p in ranks[0] if len({r.get(p, 0) for r in ranks}) > 1] if ranks else []
    clear = [p for p in places if all(rank.get(p, 0) in (1, 2) for rank in ranks)]
    text = "the ranks went different ways at"
    return [f"{text} {_told(p, ranks, alone=False)}" for p in clear[-_MOST:]]


def writes_to(case: Divergence, names: Sequence[str]) -> list[str]:
    """Lines that wrote to tensors, outside of optimizer steps, since the step before; in words."""
    by_line: dict[tuple[str, int], list[int]] = defaultdict(list)
    stacks = [[r.write_stacks[n] for n in names if n in r.write_stacks] for r in case.actual]
    for number, of_rank in enumerate(stacks):
        for stack in of_rank[:1]:
            by_line[stack[0]].append(number)
    words = [
        f"{format_ranks(r)} last wrote to them by {format_source_line(*p)}"
        for p, r in by_line.items()
    ]
    rest = [number for number, of_rank in enumerate(stacks) if not of_rank]
    if not rest or not words:
        return words
    words.append(f"of {format_ranks(rest)} no write was seen")
    stack = next(of_rank[0] for of_rank in stacks if of_rank)
    ways = [rank.branch_outcomes for rank in case.actual]
    around = [
        place
        for file, line in stack
        for place in {place: None for each in ways for place in each}
        if place[0] == file and place[1] <= line <= place[2]
        if len({each.get(place, 0) for each in ways}) > 1
    ]
    under = [f"that is under {_told(place, ways, alone=False)}" for place in around[:1]]
    return ["; ".join(words), *under]


def _line(place: Place) -> str:
    return format_source_line(*place[:2]).rstrip(":")


def _told(place: Place, ways: Sequence[Mapping[Place, int]], *, alone: bool = True) -> str:
    outcomes = [_OUTCOMES[each.get(place, 0)] for each in ways]
    return f"{_line(place)}: {of_runs(outcomes, alone=alone)}"

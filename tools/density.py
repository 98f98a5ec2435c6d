"""How dense Python code is: constructs that a reader has to unroll, per 1,000 lines of code.

    python tools/density.py FOLDER ...

`make house` prints the figures of this project. No figure is a limit; they tell where to look.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PHRASES = ("but for", "so many", "in words", "as far as")
"""Phrases of a translation; they are counted in the whole text, and not per 1,000 lines."""
FIGURES = (
    "comprehensions",
    "nested comprehensions",
    "tuple assignments",
    "conditional expressions",
    "walrus",
)


def count_constructs(tree: ast.AST) -> Counter[str]:
    """Counts the constructs of `FIGURES` in a module."""
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            counts["comprehensions"] += 1
            if len(node.generators) > 1 or _contains_comprehension(node):
                counts["nested comprehensions"] += 1
        elif isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                counts["tuple assignments"] += 1
        elif isinstance(node, ast.IfExp):
            counts["conditional expressions"] += 1
        elif isinstance(node, ast.NamedExpr):
            counts["walrus"] += 1
    return counts


def _contains_comprehension(node: ast.AST) -> bool:
    for child in ast.walk(node):
        if child is not node and isinstance(child, COMPREHENSIONS):
            return True
    return False


def function_lengths(tree: ast.AST) -> Iterator[int]:
    """Yields the number of lines of each function, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                length -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield length


def describe_folder(folder: Path) -> str:
    """Returns one line of figures for the Python files of a folder."""
    counts: Counter[str] = Counter()
    phrases: Counter[str] = Counter()
    lengths: list[int] = []
    num_lines = 0
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text)
        counts += count_constructs(tree)
        lengths += function_lengths(tree)
        for phrase in PHRASES:
            phrases[phrase] += text.lower().count(phrase)
        for line in text.splitlines():
            stripped = line.strip()
            if stripped and not stripped.startswith("#"):
                num_lines += 1
    lengths.sort()
    parts = [f"{name} {1000 * counts[name] / max(1, num_lines):.1f}" for name in FIGURES]
    if lengths:
        median = lengths[len(lengths) // 2]
        ninetieth = lengths[len(lengths) * 9 // 10]
        longer_than_60 = sum(length > 60 for length in lengths)
        parts.append(f"functions {median} / {ninetieth} / {lengths[-1]} ({longer_than_60} over 60)")
    parts += [f"{phrase!r} {phrases[phrase]}" for phrase in PHRASES]
    return f"{folder}: {', '.join(parts)}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(describe_folder(Path(argument)))

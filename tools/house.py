"""What `src/lockstep` looks like as a house: rooms, sizes, circles, fan-in, private torch names.

`make house` prints it; `tests/test_house.py` holds it to the rules that ARCHITECTURE.md gives.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


OF_PYTHON = {"_actions", "_bootstrap", "_inheriting", "_initializing", "_make", "_replace"}
"""Names that begin with an underscore and are not torch's: of tuples, argparse, multiprocessing."""


@dataclass
class Module:
    """One file."""

    name: str
    """Dotted, without `lockstep.`; the package itself is ``."""
    path: Path
    imports: set[str] = field(default_factory=set)
    """The modules of this house that it imports, wherever the import stands."""

    @cached_property
    def text(self) -> str:
        """What is in it."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed."""
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The folder, or the file itself where it lies in none."""
        return self.name.partition(".")[0]

    @property
    def lines(self) -> int:
        """All of them."""
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Lines that hold code: no blanks, comments and docstrings."""
        held: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                held.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            held.difference_update(_documentation(node))
        return len(held)


def _documentation(node: ast.AST) -> Iterator[int]:
    """The lines of the texts that stand alone in a body: docstrings, also those of attributes."""
    body = getattr(node, "body", ())
    for statement in body if isinstance(body, list) else ():  # those of lambdas are no lists
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield from range(statement.lineno, (statement.end_lineno or 0) + 1)


def read_house(source: Path = SOURCE) -> dict[str, Module]:
    """All modules, by name."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path)
    for module in modules.values():
        if module.name:  # the package itself imports its public names when they are asked for
            module.imports = set(_imported(module.tree, modules)) - {module.name}
    return modules


def _imported(tree: ast.AST, modules: dict[str, Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] != "lockstep":
                continue
            inside = name.removeprefix("lockstep").removeprefix(".")
            inside = inside if inside in modules else inside.rpartition(".")[0]
            if inside in modules:
                yield inside


def circles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in modules[name].imports:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in modules:
        if name not in order:
            visit(name)
    return found


def importers(modules: dict[str, Module]) -> dict[str, set[str]]:
    """By whom each module is imported."""
    by: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for name in module.imports:
            by[name].add(module.name)
    return by


def private_torch_names(modules: dict[str, Module]) -> dict[str, list[tuple[int, str]]]:
    """Names of torch's with an underscore in front, by module: line and what stands there.

    An attribute counts as torch's where it is reached from an imported name of torch's, or where
    nothing in this house has an attribute of that name.
    """
    own = {name for module in modules.values() for name in _defined(module.tree)} | OF_PYTHON
    found = defaultdict(list)
    for module in modules.values():
        for line, name in _private(module.tree, own):
            found[module.name].append((line, name))
    return dict(found)


def _private(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    roots: dict[str, str] = {}
    for node in ast.walk(tree):
        for name, whole in _bound(node):
            roots[name] = whole
            if whole.startswith("torch.") and _is_private(whole):
                yield node.lineno, whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(f".{node.attr}"):
            base: ast.expr = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            root = roots.get(base.id, "") if isinstance(base, ast.Name) else ""
            if root.partition(".")[0] == "torch" or not (root or node.attr in own):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and (name := _asked_for(node, own)):
            yield node.lineno, name


def _asked_for(node: ast.Call, own: set[str]) -> str:
    """`getattr(value, "_name")` and its like, as written; "" for any other call."""
    name = node.args[1] if len(node.args) > 1 else None
    if not (ast.unparse(node.func).endswith("attr") and isinstance(name, ast.Constant)):
        return ""
    private = _is_private(f".{name.value}") and name.value not in own
    return ast.unparse(node) if private else ""


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that an import binds, with what they stand for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_private(name: str) -> bool:
    return any(
        part.startswith("_") and not (part.startswith("__") and part.endswith("__"))
        for part in name.split(".")[1:]
    )


def _defined(tree: ast.AST) -> Iterator[str]:
    """Attributes that classes and modules of this house give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in {"self", "made", "cls"}
        ):
            yield node.attr


def main() -> None:
    """Prints the figures."""
    modules = read_house()
    by = importers(modules)
    rooms: dict[str, list[Module]] = defaultdict(list)
    for module in modules.values():
        rooms[module.room].append(module)
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'code':>8}{'longest':>9}")
    for room, inside in sorted(rooms.items()):
        lines, code = sum(m.lines for m in inside), sum(m.code_lines for m in inside)
        longest = max(m.lines for m in inside)
        print(f"{room or '__init__':<16}{len(inside):>6}{lines:>8}{code:>8}{longest:>9}")
    lines, code = (sum(getattr(m, k) for m in modules.values()) for k in ("lines", "code_lines"))
    longest = max(m.lines for m in modules.values())
    print(f"{'all':<16}{len(modules):>6}{lines:>8}{code:>8}{longest:>9}")
    found = circles(modules)
    print(f"\nimport circles: {len(found)}")
    for each in found:
        print(f"  {', '.join(each)}")
    single = [m for m in modules.values() if len(by[m.name]) == 1 and m.path.stem != "__init__"]
    print(f"\nfiles that one other file alone imports: {len(single)}")
    for module in sorted(single, key=lambda m: m.code_lines):
        print(f"  {module.code_lines:>4} {module.name} <- {next(iter(by[module.name]))}")
    private = private_torch_names(modules)
    print(f"\nmodules with private names of torch's: {len(private)}")
    for name, places in sorted(private.items()):
        print(f"  {name}: {', '.join(f'{text}:{line}' for line, text in places)}")


if __name__ == "__main__":
    main()

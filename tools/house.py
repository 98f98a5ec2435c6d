"""What `src/lockstep` looks like as a house: its rooms, their sizes, and who imports whom.

A *room* is a folder of `src/lockstep`, or a file that lies in none. `make house` prints the
figures; `tests/test_house.py` holds the rules that ARCHITECTURE.md gives.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"
TOKENS_WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Module:
    """One file."""

    name: str
    """With dots and without `lockstep.`: `batch.loader`. That of the package itself is empty."""
    path: Path
    imports: set[str] = field(default_factory=set)
    """The modules of this house that it imports, anywhere in the file."""

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The name of the room: `batch` for `batch.loader`."""
        return self.name.partition(".")[0]

    @property
    def lines(self) -> int:
        """The number of all lines."""
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """The number of lines with code: no blank lines, comments and docstrings."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in TOKENS_WITHOUT_CODE:
                first_line = token.start[0]
                last_line = token.end[0]
                lines.update(range(first_line, last_line + 1))
        return len(lines - _documentation_lines(self.tree))


def _documentation_lines(tree: ast.Module) -> set[int]:
    """Returns the lines of texts that are statements: docstrings, also those of attributes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            last_line = node.end_lineno or node.lineno
            lines.update(range(node.lineno, last_line + 1))
    return lines


def read_house(source: Path = SOURCE) -> dict[str, Module]:
    """Returns all modules by their names."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = list(path.relative_to(source).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        modules[name] = Module(name, path)
    for name, module in modules.items():
        # The package imports its public names only when they are asked for.
        if name != "":
            module.imports = set(_imported_modules(module.tree, modules)) - {name}
    return modules


def _imported_modules(tree: ast.AST, modules: Mapping[str, Module]) -> Iterator[str]:
    """Yields the modules of this house that a file imports."""
    for node in ast.walk(tree):
        paths = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        for path in paths:
            package, _, inside = path.partition(".")
            if package != "lockstep":
                continue
            if inside not in modules:
                inside = inside.rpartition(".")[0]  # a name in the module
            if inside in modules:
                yield inside


def circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or through others.

    The groups are the strongly connected components of the graph of imports, found by Tarjan's
    algorithm: R. Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    index: dict[str, int] = {}
    lowest_reachable: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        """Visits a module and, depth first, all that it imports; adds complete components."""
        index[name] = len(index)
        lowest_reachable[name] = index[name]
        stack.append(name)
        for imported in modules[name].imports:
            if imported not in index:
                visit(imported)
                lowest_reachable[name] = min(lowest_reachable[name], lowest_reachable[imported])
            elif imported in stack:
                lowest_reachable[name] = min(lowest_reachable[name], index[imported])
        if lowest_reachable[name] == index[name]:
            # The module is the first of its component; the rest is above it on the stack.
            begin = stack.index(name)
            component = stack[begin:]
            del stack[begin:]
            if len(component) > 1:
                components.append(sorted(component))

    for name in modules:
        if name not in index:
            visit(name)
    return components


def importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Returns, for each module, the names of those that import it."""
    importers_of: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for imported in module.imports:
            importers_of[imported].add(name)
    return importers_of


def print_sizes(modules: Mapping[str, Module]) -> None:
    """Prints a table of the rooms: files, lines, lines of code, lines of the longest file."""
    modules_of_room: dict[str, list[Module]] = defaultdict(list)
    for module in modules.values():
        modules_of_room[module.room].append(module)
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'code':>8}{'longest':>9}")
    for room, inside in sorted(modules_of_room.items()):
        _print_size(room or "__init__", inside)
    _print_size("all", list(modules.values()))


def _print_size(label: str, modules: list[Module]) -> None:
    lines = sum(module.lines for module in modules)
    code_lines = sum(module.code_lines for module in modules)
    longest = max(module.lines for module in modules)
    print(f"{label:<16}{len(modules):>6}{lines:>8}{code_lines:>8}{longest:>9}")


def print_imports(modules: Mapping[str, Module]) -> None:
    """Prints circles of imports, and the files that only one other file imports."""
    found = circles(modules)
    print(f"\nimport circles: {len(found)}")
    for circle in found:
        print(f"  {', '.join(circle)}")
    importers_of = importers(modules)
    imported_once = []
    for name, module in modules.items():
        if len(importers_of[name]) == 1 and module.path.stem != "__init__":
            imported_once.append(module)
    print(f"\nfiles that only one other file imports: {len(imported_once)}")
    for module in sorted(imported_once, key=lambda module: module.code_lines):
        (importer,) = importers_of[module.name]
        print(f"  {module.code_lines:>4} {module.name} <- {importer}")


def print_private_names(modules: Mapping[str, Module]) -> None:
    """Prints the places that use private names of torch."""
    from private_torch_names import find_places

    places_of_module = find_places(modules)
    print(f"\nmodules with private names of torch: {len(places_of_module)}")
    for name, places in sorted(places_of_module.items()):
        print(f"  {name}: {', '.join(f'{place.text}:{place.line}' for place in places)}")


def main() -> None:
    """Prints the figures."""
    modules = read_house()
    print_sizes(modules)
    print_imports(modules)
    print_private_names(modules)


if __name__ == "__main__":
    main()

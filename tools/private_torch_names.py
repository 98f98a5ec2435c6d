"""Finds the places in `src/lockstep` that use private names of torch.

A name is *private* if it begins with one underscore. Torch may rename it in any release, so all
such names stand in `torch_compat/`, which has a test for each. A place is found where

1. something is imported from a private module, or reached by a private name from an import of torch
   (`torch._C._get_tracing_state`),
2. an attribute of any other object (`module._buffers`) has a private name that torch's source
   defines,
3. a class of ours overrides a private method of its base class in torch, unless that is abstract
   and so made to be overridden, or uses a private name of the base class on `self`,
4. a text is such a name (`getattr(module, "_buffers")`, a function that is looked for in a stack).

Nothing tells whose object an attribute belongs to. So a private name counts as ours in the file
that defines it, but not if it is a name of one of `CLASSES_USED_EVERYWHERE` (a file that defines a
`_version` of its own must not hide `tensor._version`), and not in a call such as `getattr`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from house import Module

CLASSES_USED_EVERYWHERE = ("torch.Tensor", "torch.nn.Module", "torch.optim.Optimizer")
ATTRIBUTE_FUNCTIONS = ("getattr", "hasattr", "setattr", "delattr")
PYTHON_NAMES = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""The documented methods of named tuples, whose underscore keeps them apart from the fields."""

# A definition in torch's source: `def _name`, `class _Name`, `self._name = ...`, `_name: int`.
DEFINITION = re.compile(
    r"^[ \t]*(?:async )?(?:def|class) (?P<function>_[A-Za-z]\w*)"
    r"|(?:self|cls)\.(?P<attribute>_[A-Za-z]\w*)\s*(?::[^=\n]+)?=(?!=)"
    r"|^[ \t]*(?P<variable>_[A-Za-z]\w*)\s*(?::|=(?!=))",
    re.MULTILINE,
)
PRIVATE_NAME = re.compile(r"_[A-Za-z]\w*")
# A text that names something in torch: torch._dynamo, torch.utils._pytree.tree_map.
TORCH_PATH = re.compile(r"torch(\.\w+)+")


class Place(NamedTuple):
    """A use of a private name."""

    line: int
    text: str


@cache
def names_in_torch() -> frozenset[str]:
    """Returns every private name that torch's source defines anywhere."""
    import torch

    names: set[str] = set()
    root = Path(torch.__file__).parent
    for pattern in ("*.py", "*.pyi"):
        for path in root.rglob(pattern):
            names |= _defined_names(path.read_text(encoding="utf-8", errors="replace"))
    return frozenset(names | _names_used_everywhere()) - PYTHON_NAMES


@cache
def _names_used_everywhere() -> frozenset[str]:
    names: set[str] = set()
    for path in CLASSES_USED_EVERYWHERE:
        names |= _names_of_class(path)
    return frozenset(names)


@cache
def _names_of_class(path: str) -> frozenset[str]:
    """Returns the private names of a class in torch and of its bases in torch.

    Args:
        path: the class, such as `torch.nn.Module`.
    """
    names: set[str] = set()
    for base in inspect.getmro(_load(path)):
        if not base.__module__.startswith("torch"):
            continue
        names |= {name for name in vars(base) if is_private(name)}
        try:
            names |= _defined_names(inspect.getsource(base))
        except (OSError, TypeError):  # it is written in C++
            continue
    # Every abstract class has these from Python's `abc`.
    return frozenset(name for name in names if not name.startswith("_abc_"))


@cache
def _abstract_names_of_class(path: str) -> frozenset[str]:
    return frozenset(getattr(_load(path), "__abstractmethods__", ()))


@cache
def _load(path: str) -> type:
    """Imports a class, whichever part of its path is the module.

    Returns `object` for something that is not a class, such as a type alias.
    """
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            value = getattr(value, attribute)
        return value if isinstance(value, type) else object
    raise ModuleNotFoundError(path)


def _defined_names(source: str) -> set[str]:
    return {match[match.lastgroup or 0] for match in DEFINITION.finditer(source)}


def is_private(name: str) -> bool:
    """Returns True for `_name`, and False for `name`, `__name__`, `_` and `__name`."""
    return PRIVATE_NAME.fullmatch(name) is not None


def find_places(modules: Mapping[str, Module]) -> dict[str, list[Place]]:
    """Returns the places of each module that has some, in the order of their lines."""
    bases_of_class = _bases_of_classes(modules)
    places_of_module = {}
    for name, module in modules.items():
        places = set(_find_uses(module.tree))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                bases = _torch_bases(f"lockstep.{name}.{node.name}", bases_of_class)
                places.update(_find_overrides(node, bases))
        if places:
            places_of_module[name] = sorted(places)
    return places_of_module


def _find_uses(tree: ast.Module) -> Iterator[Place]:
    """Yields the places of one file, except those that need to know base classes."""
    own_names = _own_names(tree) - _names_used_everywhere()
    foreign_names = names_in_torch() - own_names
    imports = _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for path in _imported_paths(node).values():
                if _is_private_path(path):
                    yield Place(node.lineno, path)
        elif isinstance(node, ast.Attribute):
            if _is_torch_attribute(node, imports, foreign_names):
                yield Place(node.lineno, ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in foreign_names or _is_private_path(node.value):
                yield Place(node.lineno, repr(node.value))
        elif isinstance(node, ast.keyword):
            if node.arg in foreign_names:
                yield Place(node.value.lineno, f"{node.arg}=")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ATTRIBUTE_FUNCTIONS:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in names_in_torch():
                yield Place(name.lineno, repr(name.value))


def _is_torch_attribute(
    node: ast.Attribute, imports: Mapping[str, str], foreign_names: frozenset[str]
) -> bool:
    """Returns True for an attribute with a private name of torch, such as `module._buffers`.

    Args:
        node: the attribute.
        imports: what the imported names of the file stand for.
        foreign_names: the private names in torch that the file does not define itself.
    """
    if not is_private(node.attr):
        return False
    root = _root_of(node)
    if root in imports:
        package, _, _ = imports[root].partition(".")
        return package == "torch"
    is_on_self = isinstance(node.value, ast.Name) and root in ("self", "cls")
    if is_on_self:
        return False  # `_find_overrides` finds those that belong to a base class
    return node.attr in foreign_names


def _is_private_path(path: str) -> bool:
    if TORCH_PATH.fullmatch(path) is None:
        return False
    return any(is_private(part) for part in path.split("."))


def _root_of(attribute: ast.Attribute) -> str:
    """Returns `a` for `a.b._c`, and an empty text if that is not a name, as for `f()._c`."""
    value = attribute.value
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _imports(tree: ast.Module) -> dict[str, str]:
    """Returns what the imported names of a file stand for: `{"nn": "torch.nn"}`."""
    imports: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(_imported_paths(node))
    return imports


def _imported_paths(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Returns the names that an import binds, and what each stands for."""
    paths = {}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            paths[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        else:
            # `import torch.nn` binds the name torch.
            paths[alias.asname or alias.name.partition(".")[0]] = alias.name
    return paths


def _own_names(tree: ast.Module) -> set[str]:
    """Returns the private names that a file defines: functions, classes, variables, attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def _bases_of_classes(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Returns the bases of each class of ours, such as `torch.nn.Module`."""
    bases_of_class = {}
    for name, module in modules.items():
        imports = _imports(module.tree)
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = []
            for base in node.bases:
                if isinstance(base, ast.Subscript):
                    base = base.value  # `Generic[T]`
                first, _, rest = ast.unparse(base).partition(".")
                path = imports.get(first, f"lockstep.{name}.{first}")
                bases.append(f"{path}.{rest}" if rest else path)
            bases_of_class[f"lockstep.{name}.{node.name}"] = bases
    return bases_of_class


def _torch_bases(path: str, bases_of_class: Mapping[str, list[str]]) -> set[str]:
    """Returns the classes of torch that a class of ours derives from, also through others."""
    found: set[str] = set()
    for base in bases_of_class.get(path, ()):
        if base.startswith("torch."):
            found.add(base)
        elif base != path:
            found |= _torch_bases(base, bases_of_class)
    return found


def _find_overrides(node: ast.ClassDef, torch_bases: set[str]) -> Iterator[Place]:
    """Yields private names of its base classes that a class overrides, or uses on `self`."""
    base_names: set[str] = set()
    for base in torch_bases:
        base_names |= _names_of_class(base) - _abstract_names_of_class(base)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name in base_names:
            yield Place(inner.lineno, f"def {inner.name}")
        elif isinstance(inner, ast.Attribute) and inner.attr in base_names:
            owner = ast.unparse(inner.value)
            if owner in ("self", "cls", "super()"):
                yield Place(inner.lineno, f"{owner}.{inner.attr}")

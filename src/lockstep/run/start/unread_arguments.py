"""Finds out, from the source alone, whether a script certainly never reads its arguments.

The script and the modules beside it that it imports are parsed. All other modules that they import
must be known not to read `sys.argv` by themselves. If anything is not known, the script may read
its arguments.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.run.start.source_hints import parse_file, path_of_source
from lockstep.run.start.worker import Script

_PACKAGES_THAT_READ_NOTHING = {
    "PIL", "einops", "lockstep", "matplotlib", "numpy", "pandas", "safetensors", "scipy",
    "sklearn", "torch", "torchaudio", "torchvision", "tqdm",
}  # fmt: skip
"""Installed packages that do not look at `sys.argv` when they are used as a library."""
_STANDARD_MODULES_THAT_READ = {
    "argparse", "code", "cProfile", "doctest", "fileinput", "getopt", "importlib", "optparse",
    "pdb", "runpy", "unittest",
}  # fmt: skip
"""Modules of the standard library that look at `sys.argv`, or may run anything that does."""
_PARTS_OF_TORCH_THAT_READ = (
    "torch.distributed.elastic",
    "torch.distributed.launch",
    "torch.distributed.run",
)
_NAMES_OF_ARGUMENTS = {"argv", "orig_argv"}
_FUNCTIONS_THAT_RUN_ANYTHING = {"__import__", "eval", "exec"}


def never_reads_arguments(script: Script) -> bool:
    """Returns True if a script certainly never reads its arguments."""
    folder = Path(script.folder)
    pending = [path_of_source(script)]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)

        tree = parse_file(path)
        if tree is None:
            return False

        for node in ast.walk(tree):
            if _may_read_arguments(node):
                return False
            for module in _imported_modules(node):
                files = _files_of_module(module, path.parent, folder)
                if files:
                    pending += files
                elif not _reads_nothing(module):
                    return False

    return True


def _may_read_arguments(node: ast.AST) -> bool:
    """Returns True for an expression that has to do with arguments, or that may do anything."""
    if isinstance(node, ast.Attribute):
        return node.attr in _NAMES_OF_ARGUMENTS
    if isinstance(node, ast.alias):
        return node.name in _NAMES_OF_ARGUMENTS
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS_THAT_RUN_ANYTHING
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value in _NAMES_OF_ARGUMENTS or "/cmdline" in node.value
    return False


def _imported_modules(node: ast.AST) -> Iterator[str]:
    """Yields the modules that a statement imports; those of `from . import a` begin with a dot."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        yield module
        for alias in node.names:  # each may be a module of the package
            separator = "" if module.endswith(".") else "."
            yield f"{module}{separator}{alias.name}"


def _files_of_module(module: str, own_folder: Path, script_folder: Path) -> list[Path]:
    """Returns the source files beside the script that are run when a module is imported.

    For `pack.part` these are `pack/__init__.py` and `pack/part.py`. The name `part` of
    `from pack import part` may also be a function, so a file that does not exist is left out.

    Args:
        module: the name of the module.
        own_folder: the folder of the file that imports it.
        script_folder: the folder of the script.
    """
    num_dots = len(module) - len(module.lstrip("."))
    folder = script_folder if num_dots == 0 else own_folder
    for _ in range(num_dots - 1):
        folder = folder.parent
    package_file = folder / "__init__.py"  # of the package that the dots stand for

    files: list[Path] = []
    for name in module.lstrip(".").split("."):
        for path in (folder / name / "__init__.py", folder / f"{name}.py"):
            if path.is_file():
                files.append(path)
        folder = folder / name
    if num_dots and not files:  # `from . import name`, and the package has the name
        files = [path for path in [package_file] if path.is_file()]
    return files


def _reads_nothing(module: str) -> bool:
    """Returns True if an installed module is known not to read arguments by itself."""
    if module.startswith(_PARTS_OF_TORCH_THAT_READ):
        return False

    package = module.partition(".")[0]
    if package in _PACKAGES_THAT_READ_NOTHING:
        return True
    return package in sys.stdlib_module_names and package not in _STANDARD_MODULES_THAT_READ


def words_of_options(arguments: Iterable[str], takes_value: dict[str, bool]) -> list[str]:
    """Returns the words among a script's arguments that are options of the launcher, with values.

    Args:
        arguments: the arguments of the script.
        takes_value: the flags of the launcher, such as `--nproc`, and whether a value follows.
    """
    found: list[str] = []
    value_follows = False
    for word in arguments:
        flag, equals_sign, _ = word.partition("=")
        if value_follows:
            found.append(word)
            value_follows = False
        elif flag in takes_value:
            found.append(word)
            value_follows = takes_value[flag] and not equals_sign
    return found

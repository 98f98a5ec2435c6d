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
    pending = [path_of_source(script)]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)

        imported_files = _files_imported_by(path, Path(script.folder))
        if imported_files is None:  # this file, or a module that it imports, may read the arguments
            return False
        pending += imported_files
    return True


def _files_imported_by(path: Path, script_folder: Path) -> list[Path] | None:
    """Returns the files beside the script that a file imports.

    Args:
        path: the path of the file.
        script_folder: the folder of the script.

    Returns:
        The files; None if the file itself may read the arguments, or an installed module that it
        imports may.
    """
    tree = parse_file(path)
    if tree is None:
        return None

    files: list[Path] = []
    for node in ast.walk(tree):
        if _may_read_arguments(node):
            return None
        for module in _imported_modules(node):
            files_of_module = _files_of_module(module, path.parent, script_folder)
            if not files_of_module and not _never_reads_arguments(module):
                return None
            files += files_of_module
    return files


def _may_read_arguments(node: ast.AST) -> bool:
    """Returns True if an expression may read the arguments, or may run anything."""
    if isinstance(node, ast.Attribute):  # sys.argv
        return node.attr in _NAMES_OF_ARGUMENTS
    if isinstance(node, ast.alias):  # from sys import argv
        return node.name in _NAMES_OF_ARGUMENTS
    if isinstance(node, ast.Name):  # exec
        return node.id in _FUNCTIONS_THAT_RUN_ANYTHING
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        is_name_of_arguments = node.value in _NAMES_OF_ARGUMENTS  # getattr(sys, "argv")
        return is_name_of_arguments or "/cmdline" in node.value  # open("/proc/self/cmdline")
    return False


def _imported_modules(node: ast.AST) -> Iterator[str]:
    """Yields the modules that a statement may import.

    import a.b               "a.b"
    from a import b, c       "a", "a.b" and "a.c", as b and c may be modules
    from . import b          "." and ".b"
    from .a import b         ".a" and ".a.b"
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        dots = "." * node.level
        package = node.module or ""  # empty for `from . import b`
        yield f"{dots}{package}"
        for alias in node.names:
            yield f"{dots}{package}.{alias.name}" if package else f"{dots}{alias.name}"


def _files_of_module(module: str, own_folder: Path, script_folder: Path) -> list[Path]:
    """Returns the source files beside the script that are run when a module is imported.

    For `pack.part`, these four files are looked for, and those that exist are returned:

        pack/__init__.py         pack.py
        pack/part/__init__.py    pack/part.py

    If `part` is a function, there is no file for it.

    Args:
        module: the name of the module.
        own_folder: the folder of the file that imports it.
        script_folder: the folder of the script.
    """
    start_folder = _start_folder(module, own_folder, script_folder)
    folder = start_folder
    files: list[Path] = []
    for name in module.lstrip(".").split("."):
        candidates = (folder / name / "__init__.py", folder / f"{name}.py")
        files += [path for path in candidates if path.is_file()]
        folder = folder / name

    # In `from . import name`, the name may be that of a function, which the `__init__.py` of the
    # package defines.
    is_relative = module.startswith(".")
    package_file = start_folder / "__init__.py"
    if is_relative and not files and package_file.is_file():
        return [package_file]
    return files


def _start_folder(module: str, own_folder: Path, script_folder: Path) -> Path:
    """Returns the folder in which the first part of a module's name is searched for.

    For an import in the file `a/b/train.py`, beside the script `run.py`:

        utils.io      the folder of the script
        .utils.io     a/b, the folder of the file with the import
        ..utils.io    a, the folder above it

    Args:
        module: the name of the module.
        own_folder: the folder of the file with the import.
        script_folder: the folder of the script.
    """
    num_dots = len(module) - len(module.lstrip("."))
    if num_dots == 0:
        return script_folder

    folder = own_folder
    for _ in range(num_dots - 1):
        folder = folder.parent
    return folder


def _never_reads_arguments(module: str) -> bool:
    """Returns True if an installed module is known not to read arguments by itself."""
    if module.startswith(_PARTS_OF_TORCH_THAT_READ):
        return False

    package = module.partition(".")[0]
    if package in _PACKAGES_THAT_READ_NOTHING:
        return True
    return package in sys.stdlib_module_names and package not in _STANDARD_MODULES_THAT_READ


def misplaced_launcher_options(arguments: Iterable[str], takes_value: dict[str, bool]) -> list[str]:
    """Returns the options of the launcher, with their values, among a script's arguments.

    The user may have written them behind the script by mistake.

    Args:
        arguments: the arguments of the script.
        takes_value: the flags of the launcher, such as `--nproc`, and whether a value follows.
    """
    misplaced: list[str] = []
    is_value_of_last_flag = False
    for word in arguments:
        if is_value_of_last_flag:
            misplaced.append(word)
            is_value_of_last_flag = False
            continue

        flag, equals_sign, _ = word.partition("=")
        if flag in takes_value:
            misplaced.append(word)
            is_value_of_last_flag = takes_value[flag] and not equals_sign
    return misplaced

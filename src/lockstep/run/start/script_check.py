"""Checks that the script to start exists and can be run, before anything is started.

The errors name what the user probably meant: a similar name, or the command without `python`.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.file_paths import check_path_of_this_system
from lockstep.run.start.worker import Script

THIS_PACKAGE = __name__.partition(".")[0]

INTERPRETER_PATTERN = re.compile(r"(python|pypy)\d*(\.\d+)?")
"""The name of an interpreter: `python`, `python3`, `python3.12`."""
DASHES = ("\u2012", "\u2013", "\u2014", "\u2015", "\u2212", "\uff0d")
"""Characters that a blog or a word processor shows in place of the two hyphens of an option: the
dashes of Unicode, the minus sign, and the full-width hyphen."""


def check_script(script: Script, command: str = "lockstep run") -> None:
    """Checks that a script exists. The name of a module is only looked up when it is run.

    Args:
        script: the script or module.
        command: the command that the error mentions.

    Raises:
        SettingError: the script does not exist, or a module beside it has the name of a package
            that each rank imports.
    """
    if script.module:
        _check_module(script.path, command)
    else:
        _check_path(script, command)

    _check_names_beside(script, command)


def _check_names_beside(script: Script, command: str) -> None:
    """Checks that no module beside a script hides a package that each rank imports.

    Python finds a module beside the script before an installed one of the same name. Each rank
    imports this package, torch and, with torch, numpy.

    Raises:
        SettingError: there is such a module.
    """
    for name in (THIS_PACKAGE, "torch", "numpy"):
        installed_file = _installed_file(name)
        advice = "rename it"
        if name == THIS_PACKAGE:
            advice = "rename it, or start the script with torchrun"

        for path in (Path(script.folder, f"{name}.py"), Path(script.folder, name, "__init__.py")):
            # The package may lie beside the script itself, as in a clone of its source.
            is_package_itself = path.resolve() == installed_file
            if path.is_file() and not is_package_itself:
                raise SettingError(
                    f"{command} {script.path}",
                    f"{path} has the name of the package {name}, which each rank imports",
                    advice,
                )


def _installed_file(package: str) -> Path | None:
    """Returns the file that Python finds for a package; None if there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve()


def _check_module(name: str, command: str) -> None:
    """Checks that the name given for a module is not that of a file."""
    if name.endswith(".py") and Path(name).is_file():
        raise SettingError(
            f"{command} -m {name}",
            "it is a file, not the name of a module",
            f"{command} {name}, or {command} -m {name.removesuffix('.py')}",
        )


def _check_no_interpreter(script: Script, command: str) -> None:
    """Refuses a command such as `lockstep run python train.py`, which should not name `python`.

    Raises:
        SettingError: the script is the Python interpreter, with another script or a module among
            its arguments.
    """
    is_interpreter = INTERPRETER_PATTERN.fullmatch(Path(script.path).name) is not None
    program = _program_of_interpreter(script.arguments)
    if is_interpreter and program:
        raise SettingError(
            f"{command} {script.path}",
            f"{command} starts the Python interpreter itself",
            f"leave {script.path} out: {command} {program}",
        )


def _program_of_interpreter(arguments: Sequence[str]) -> str:
    """Returns what the Python interpreter would run: `train.py` for `-u train.py --lr 1`.

    Args:
        arguments: the arguments of the interpreter.

    Returns:
        The script, or the module as `-m MODULE`; empty if there is neither.
    """
    for position, argument in enumerate(arguments):
        if argument == "-m":
            return " ".join(arguments[position : position + 2])
        is_option = argument.startswith("-")
        if not is_option:
            return argument
    return ""


def _check_path(script: Script, command: str) -> None:
    """Checks that there is a script at a path.

    Args:
        script: the script, whose path is as the user wrote it.
        command: the command that the error mentions, such as `lockstep run`.
    """
    name = script.path
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise SettingError(
            f"{command} {name}", "it is a folder without __main__.py", "name a script in it"
        )
    _check_no_interpreter(script, command)  # lockstep run python train.py
    if path.is_file() or path.is_dir():
        return
    if path.exists():  # lockstep run <(...), or /dev/stdin
        raise SettingError(
            f"{command} {name}",
            "it is a pipe or a device, which may be read only once; every rank reads the script",
            "write the script to a file, and name that file",
        )
    check_path_of_this_system(f"{command} {name}", name)  # lockstep run D:/work/train.py

    if name.startswith(DASHES):  # an option that was copied from a blog
        option = name.lstrip("-" + "".join(DASHES))
        raise SettingError(
            f"{command} {name}",
            f"its first character {name[0]!r} is a dash, and options begin with hyphens",
            f"type it anew: --{option}",
        )

    raise _missing_file_error(name, command)


def _missing_file_error(name: str, command: str) -> SettingError:
    """Returns the error for a script that does not exist. It suggests a similar name.

    Args:
        name: the path of the script, as the user wrote it.
        command: the command that the error mentions.
    """
    path = Path(name)
    folder = path.parent
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    if f"{path.name}.py" in names:
        similar_names = [f"{path.name}.py"]
    else:
        similar_names = difflib.get_close_matches(path.name, names, n=1)

    if similar_names:
        advice = f"did you mean {folder / similar_names[0]}?"
    else:
        advice = "check the path; -m runs a module"
    return SettingError(f"{command} {name}", "there is no such file", advice)


def check_program(name: str) -> None:
    """Checks that a program exists and can be executed.

    Raises:
        SettingError: it does not or cannot.
    """
    if shutil.which(name) is not None:
        return

    if not Path(name).is_file():
        found = "there is no such program"
        advice = "check its name, and PATH"
    elif "/" not in name:
        found = "there is no such program in PATH"
        advice = f"write ./{name}"
    else:
        found = "it is not executable"
        advice = f"chmod +x {name}"

    raise SettingError(f"lockstep run --no-python {name}", found, advice)

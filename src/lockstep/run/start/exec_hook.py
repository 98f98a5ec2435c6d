"""Keeps a rank visible to the launcher after it has executed another program in its place.

A script may call `os.execv` to set variables that are read when a process starts, such as
LD_LIBRARY_PATH. The new program has the rank's process id and its streams, but not its *probe*,
which makes a rank visible to the launcher (heartbeat, stacks, exceptions).

So `os.execv` and `os.execve`, which all functions `os.exec*` call, are replaced. They put the
folder `executed` at the front of PYTHONPATH. A Python interpreter imports `sitecustomize` from
there when it starts (see the module `site`). This module removes the folder again, and installs the
probe once torch is imported. Some options of the interpreter prevent that; then a warning is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import posix
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from lockstep.errors import warn
from lockstep.run.watch.evidence import EVIDENCE_VARIABLE, FOLDER_VARIABLE, Evidence

EXECUTED_VARIABLE = "LOCKSTEP_EXECUTED"
"""Environment variable that tells `executed/sitecustomize.py` in the new program, as JSON, the
process id of the rank ("pid") and the folder to import Lockstep from ("lockstep_folder").
"""
_HOOK_FOLDER = str(Path(__file__).with_name("executed"))
_PACKAGES_FOLDER = str(Path(__file__).parents[3])
"""The folder that holds this package."""
_HEARTBEAT_MAGIC_BYTES = 8
_PYTHON_PATTERN = re.compile(r"python[\d.]*")
_LONG_OPTION_WITH_VALUE = "--check-hash-based-pycs"
_LETTERS_WITH_VALUE = "WX"
_LETTERS_BEFORE_PROGRAM = "cm"
_LETTERS_THAT_DISABLE_HOOK = "EIS"
"""Python's options that make it ignore its environment variables (E, I) or not import `site` (S).
"""


def watch_executed(evidence: Evidence) -> None:
    """Replaces `os.execv` and `os.execve`, so that the rank stays visible after them.

    Neither function returns, as the new program replaces this one. If it cannot be executed, they
    raise OSError. In a child of the rank, which is not watched, they do what they always do.

    Args:
        evidence: the files of this rank.
    """
    rank_pid = os.getpid()
    original_execv = os.execv
    original_execve = os.execve

    @wraps(original_execve)
    def execve(path: Any, argv: Any, env: Mapping[Any, Any]) -> None:
        """Executes a program, which installs the probe if it is Python."""
        is_child_of_rank = os.getpid() != rank_pid
        if is_child_of_rank:
            original_execve(path, argv, env)  # does not return

        # The new program has no heartbeat at first, and the launcher must not take the last one of
        # this program for a hang.
        _warn_if_hook_is_disabled(argv)
        with _invalid_heartbeat(evidence.heartbeat):
            original_execve(path, argv, variables_with_hook(env, rank_pid))

    @wraps(original_execv)
    def execv(path: Any, argv: Any) -> None:
        is_child_of_rank = os.getpid() != rank_pid
        if is_child_of_rank:
            original_execv(path, argv)
        else:
            execve(path, argv, os.environ)

    # `os` has imported both functions from `posix`.
    os.execv = execv  # type: ignore[assignment]
    os.execve = execve  # type: ignore[assignment]
    posix.execv = execv  # type: ignore[assignment]
    posix.execve = execve  # type: ignore[assignment]


def _warn_if_hook_is_disabled(argv: Sequence[Any]) -> None:
    """Warns if a command line runs Python with an option that keeps it from importing the hook."""
    option = option_that_disables_hook(argv)
    if option:
        warn(
            f"os.exec*: python {option}",
            found="this option keeps the interpreter from importing what watches a rank, so that "
            "lockstep run neither notices when it hangs nor knows its steps",
            do=f"leave out {option}; to make Python ignore variables such as PYTHONPATH, remove "
            "them from os.environ",
            on_this_rank=True,
        )


def option_that_disables_hook(argv: Sequence[Any]) -> str:
    """Finds the option that keeps a Python interpreter from importing the hook: `-E`, `-I`, `-S`.

    Args:
        argv: the command line of any program.

    Returns:
        The option, or an empty string if there is none or the program is not Python.
    """
    if not argv:
        return ""

    program, *words = [os.fsdecode(word) for word in argv]
    if not _PYTHON_PATTERN.fullmatch(os.path.basename(program)):
        return ""

    for letter, word in _options_of_python(words):
        if letter in _LETTERS_THAT_DISABLE_HOOK:
            return word
    return ""


def _options_of_python(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the letters of Python's options, each with the word that it stands in.

    For the words of `python -bE -W ignore train.py -x`, these are `("b", "-bE")`, `("E", "-bE")`
    and `("W", "-W")`. Options without a letter are left out.
    """
    remaining = iter(words)
    for word in remaining:
        is_option = word.startswith("-") and word != "-"
        if not is_option or word == "--":
            return  # from here on, the words belong to the program that Python runs

        if word.startswith("--"):
            if word == _LONG_OPTION_WITH_VALUE:
                next(remaining, "")  # the value
            continue

        letters = _letters_of_options(word)
        for letter in letters:
            yield letter, word

        last_letter = letters[-1]
        if last_letter in _LETTERS_BEFORE_PROGRAM:  # -c CODE or -m MODULE: no options follow
            return
        value_in_word = word.removeprefix(f"-{letters}")  # "ignore" in "-Wignore"
        if last_letter in _LETTERS_WITH_VALUE and not value_in_word:
            next(remaining, "")  # the value is the next word


def _letters_of_options(word: str) -> str:
    """Returns the letters of the options in a word: `bE` for `-bE`.

    What follows an option with a value is the value, and is left out: `bW` for `-bWignore`.
    """
    letters = ""
    for letter in word[1:]:
        letters += letter
        if letter in _LETTERS_WITH_VALUE or letter in _LETTERS_BEFORE_PROGRAM:
            break
    return letters


def variables_with_hook(env: Mapping[Any, Any], rank_pid: int) -> dict[str, str]:
    """Returns environment variables with which a Python interpreter installs the probe.

    Args:
        env: all variables of the program that will be executed.
        rank_pid: process id of the rank.
    """
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}

    # The probe needs these two, even if the script has made up an environment without them.
    for name in (FOLDER_VARIABLE, EVIDENCE_VARIABLE):
        if name in os.environ:
            variables[name] = os.environ[name]

    path = variables.get("PYTHONPATH", "")
    variables["PYTHONPATH"] = f"{_HOOK_FOLDER}{os.pathsep}{path}" if path else _HOOK_FOLDER
    variables[EXECUTED_VARIABLE] = json.dumps(
        {"pid": rank_pid, "lockstep_folder": _PACKAGES_FOLDER}
    )
    return variables


@contextlib.contextmanager
def _invalid_heartbeat(path: Path) -> Iterator[None]:
    """Makes the rank's heartbeat invalid within the block, which executes another program.

    The launcher only sends requests to ranks that have a heartbeat. The other program must not
    receive requests until it has a probe, which writes the heartbeat again.

    Args:
        path: the file with the heartbeat.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # there is no heartbeat
        yield
        return

    try:
        # Without its first bytes, the heartbeat is invalid.
        magic = os.pread(descriptor, _HEARTBEAT_MAGIC_BYTES, 0)
        os.pwrite(descriptor, bytes(len(magic)), 0)
        try:
            yield
        finally:  # only reached if the program could not be executed
            os.pwrite(descriptor, magic, 0)
    finally:
        os.close(descriptor)

"""Finds out which commit of the user's code a run was started from, and which files were changed.

The record of a run names them, so that its code can be found again.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 2.0
"""Git may take long in a large repository on a slow disk, and a run should not wait for it."""
MAX_CHANGED_FILES = 8
"""At most this many changed files are named."""


def describe_commit(script: str) -> dict[str, Any] | None:
    """Describes the commit that is checked out in the repository of a script.

    Args:
        script: the path of the script. If there is no such file, the working folder is used.

    Returns:
        The `commit`, the `branch` (empty if none is checked out), `num_changed`, the number of
        tracked files changed since the commit, and the first few of them as `changed`. None if the
        script is in no repository, or if git is missing or too slow.
    """
    folder = Path(script).resolve().parent if os.path.isfile(script) else Path.cwd()

    # Git must not write anything. Nor must it leave a process behind, so its file system monitor,
    # which would go on running, is turned off.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    command += ["-c", "status.relativePaths=false"]  # paths begin at the repository's top folder
    command += ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        finished = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_status(finished.stdout.decode(errors="replace"))


def _path_after(num_fields: int, line: str) -> str:
    """Returns the path in a line of `git status`, which follows a number of fields.

    A path may contain spaces: `_path_after(2, "M HASH my file.py") -> "my file.py"`.
    """
    return line.split(" ", num_fields)[-1]


def parse_status(text: str) -> dict[str, Any] | None:
    """Parses the output of `git status --porcelain=v2 --branch`.

    For example (the tab in the last line is written as TAB):

        # branch.oid 8fd7c2a1...
        # branch.head main
        1 .M N... 100644 100644 100644 HASH HASH train.py
        2 R. N... 100644 100644 100644 HASH HASH R100 new.pyTABold.py

    Returns:
        The values that `describe_commit` returns, or None if the repository has no commit.
    """
    commit = ""
    branch = ""
    changed = []
    for line in text.splitlines():
        if line.startswith("# branch.oid "):
            commit = line.removeprefix("# branch.oid ")
        elif line.startswith("# branch.head "):
            branch = line.removeprefix("# branch.head ")
        elif line.startswith("1 "):  # a changed file, whose path follows 8 fields
            changed.append(_path_after(8, line))
        elif line.startswith("2 "):  # a renamed file, with its old path after the tab
            new_path, _, _ = _path_after(9, line).partition("\t")
            changed.append(new_path)
        elif line.startswith("u "):  # a file with a conflict
            changed.append(_path_after(10, line))

    if not commit or commit == "(initial)":
        return None
    return {
        "commit": commit,
        "branch": "" if branch == "(detached)" else branch,
        "num_changed": len(changed),
        "changed": changed[:MAX_CHANGED_FILES],
    }

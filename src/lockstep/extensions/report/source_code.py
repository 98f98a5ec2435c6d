"""Which commit of the user's code a run was started from, and whether files differed from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 2.0
"""In a large repository on a slow disk git may take long; a run does not wait for it."""
MAX_CHANGED_FILES = 8
"""So many changed files are named."""


def describe_commit(script: str) -> dict[str, Any] | None:
    """Returns the commit of the repository that a script is in.

    Args:
        script: the path of the script, or anything if there is none.

    Returns:
        The `commit`, the `branch` (empty if none is checked out), `num_changed`, how many tracked
        files were changed since, and some of them as `changed`. None if the script is in no
        repository, or if git is missing or too slow.
    """
    folder = Path(script).resolve().parent if os.path.isfile(script) else Path.cwd()
    # Nothing is written, and no process is left behind, which a file system monitor would be.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    command += ["-c", "status.relativePaths=false"]  # from the top folder, whatever the user's are
    command += ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_status(done.stdout.decode(errors="replace"))


def parse_status(text: str) -> dict[str, Any] | None:
    """Returns what `git status --porcelain=v2 --branch` says; None if there is no commit."""
    commit = ""
    branch = ""
    changed = []
    for line in text.splitlines():
        if line.startswith("# branch.oid "):
            commit = line.removeprefix("# branch.oid ")
        elif line.startswith("# branch.head "):
            branch = line.removeprefix("# branch.head ")
        elif line.startswith(("1 ", "u ", "2 ")):
            # `1` a changed file, `2` one that was renamed, `u` one in conflict; before the path
            # they have 8, 9 and 10 fields. A renamed file is followed by a tab and its old path.
            num_fields = {"1": 8, "2": 9, "u": 10}[line[0]]
            path = line.split(" ", num_fields)[-1]
            changed.append(path.partition("\t")[0])
    if not commit or commit == "(initial)":
        return None
    return {
        "commit": commit,
        "branch": "" if branch == "(detached)" else branch,
        "num_changed": len(changed),
        "changed": changed[:MAX_CHANGED_FILES],
    }

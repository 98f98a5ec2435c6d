"""Checks the token, the secret by which the machines of a run recognize each other.

`gather` reads facts from this machine, `judge` says what is wrong with them, and `fix` makes the
token's file inaccessible to other users.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding
from lockstep.errors import SettingError
from lockstep.run.machines.run_token import TOKEN_VARIABLE, find_token, token_file

MODE_FOR_OTHERS = 0o077  # the bits of a file's mode that give other users any access


def gather(folder: Path) -> Facts:
    """Reads where the token comes from, what is wrong with it, and a part of its digest."""
    facts: dict[str, Any] = {
        "source": None,  # such as the path of its file; None if there is no token yet
        "problem": None,  # why the token cannot be used
        "do": "",  # what to do about the problem
        "open": False,  # whether the user has chosen to have no token
        "digest": None,
    }

    # Without a token, `find_token` would create one, so it is not called.
    path = token_file(os.environ)
    has_token = bool(os.environ.get(TOKEN_VARIABLE)) or path.exists()
    if not has_token:
        return facts

    try:
        token = find_token(os.environ)
    except SettingError as error:
        facts["source"] = str(path)
        facts["problem"] = error.found
        facts["do"] = error.do
        return facts

    facts["source"] = token.source
    facts["open"] = token.open_to_all

    # The key is a hash of the secret. These 16 bits of it are enough to see that two machines
    # differ, but too few to guess the secret.
    facts["digest"] = token.key.hex()[:4]
    return facts


def judge(facts: Facts) -> Finding:
    """Finds a token that other users may read, and runs that are open to everybody."""
    if facts["problem"]:  # such as other users being able to read the file
        return Finding(ERROR, f"{facts['source']}: {facts['problem']}", facts["do"])
    if facts["open"]:
        found = f"{TOKEN_VARIABLE}=none: anyone who can reach the port of a run can join it"
        return Finding(WARNING, found, f"unset {TOKEN_VARIABLE}")
    if facts["source"] is None:
        return Finding(OK, "none yet: the first run on several machines makes one")
    return Finding(OK, f"in {facts['source']}, which this user alone may read")


def fix(facts: Facts) -> list[str]:
    """Makes the token's file readable only by this user, if others may read it.

    Returns:
        A line about the repair, if it was made.
    """
    if not facts["problem"]:
        return []

    # The source is the path of a file, or a text such as the name of an environment variable.
    path = Path(facts["source"])
    if not path.is_file():
        return []

    mode_for_others = path.stat().st_mode & MODE_FOR_OTHERS
    if mode_for_others == 0:  # others may not read it, so the problem is another one
        return []

    path.chmod(0o600)
    return [f"made {path} unreadable for other users (mode 0600)"]

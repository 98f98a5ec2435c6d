"""The token of this user's runs on several machines: is there one, and is it a secret."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding
from lockstep.errors import SettingError
from lockstep.run.machines.run_token import TOKEN_VARIABLE, find_token, token_file


def gather(folder: Path) -> Facts:
    """Where it comes from, what is wrong with it, and a little of its digest, to compare it by."""
    path = token_file(os.environ)
    facts = {"source": None, "problem": None, "do": "", "open": False, "digest": None}
    if not os.environ.get(TOKEN_VARIABLE) and not path.exists():
        return facts  # looking for it would make one
    try:
        token = find_token(os.environ)
    except SettingError as error:
        return {**facts, "source": str(path), "problem": error.found, "do": error.do}
    # Of 16 bits, which tell nobody what it is.
    return {
        **facts,
        "source": token.source,
        "open": token.open_to_all,
        "digest": token.key.hex()[:4],
    }


def judge(facts: Facts) -> Finding:
    """One that others may read, or that can be guessed."""
    if facts["problem"]:
        return Finding(ERROR, f"{facts['source']}: {facts['problem']}", facts["do"])
    if facts["open"]:
        found = f"{TOKEN_VARIABLE}=none: whoever reaches the port of a run may join it"
        return Finding(WARNING, found, f"unset {TOKEN_VARIABLE}")
    if facts["source"] is None:
        return Finding("ok", "none yet: the first run on several machines makes one")
    return Finding("ok", f"in {facts['source']}, which this user alone may read")


def fix(facts: Facts) -> list[str]:
    """Lets this user alone read the file."""
    path = Path(facts["source"] or "")
    if not facts["problem"] or not path.is_file() or not path.stat().st_mode & 0o077:
        return []
    path.chmod(0o600)
    return [f"took {path} from other users' eyes (mode 0600)"]

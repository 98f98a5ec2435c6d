"""The secret that the launchers of one run share; it proves that they belong together.

It is taken from LOCKSTEP_TOKEN. Where that is not set, it is the content of a file in the user's
home folder, made by the first launcher that needs it and readable by the user alone: machines that
share the home folder then need nothing else. (Erlang's `.erlang.cookie` works like this.)
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import SettingError

VARIABLE = "LOCKSTEP_TOKEN"
OPEN = "none"
"""The value of LOCKSTEP_TOKEN that lets everybody in."""
_SHORTEST = 16
_VISIBLE_WITHIN_S = 5.0
"""After it was made on another machine, a file of a network file system may be seen this late."""


@dataclass(frozen=True)
class Token:
    """What launchers prove to each other that they have; it is never sent or printed."""

    key: bytes = field(repr=False)
    source: str
    """Where it comes from, in words."""
    open: bool = False
    """The user has asked to let everybody in."""


def find_token(environ: Mapping[str, str]) -> Token:
    """The token of this user's runs; makes one where there is none.

    Raises:
        SettingError: LOCKSTEP_TOKEN is too short, or the file can be read by others or not at all.
    """
    given = environ.get(VARIABLE, "").strip()
    if given == OPEN:
        return Token(_key(OPEN), f"{VARIABLE}={OPEN}", open=True)
    if given:
        if len(given) < _SHORTEST:
            raise SettingError(
                f"{VARIABLE} (of {len(given)} characters)",
                f"a token of fewer than {_SHORTEST} characters can be guessed",
                "make one with `openssl rand -hex 16` and set it on all machines",
            )
        return Token(_key(given), VARIABLE)
    path = token_file(environ)
    try:
        return Token(_key(_read_or_make(path)), str(path))
    except OSError as error:
        raise SettingError(
            f"a run on several machines, without {VARIABLE}",
            f"the token cannot be kept in {path}: {error.strerror or error}",
            f"set {VARIABLE} to the same text on all machines, made with `openssl rand -hex 16`",
        ) from None


def token_file(environ: Mapping[str, str]) -> Path:
    """Where the token is kept: below XDG_CONFIG_HOME, else below ~/.config."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(base) / "lockstep" / "token"


def _key(text: str) -> bytes:
    return hashlib.sha256(b"lockstep token\n" + text.encode()).digest()


def _read_or_make(path: Path) -> str:
    if not path.exists():
        _make(path)
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            return _read(path)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _make(path: Path) -> None:
    """Writes a new token, unless another launcher was first; the file is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> str:
    with path.open() as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SettingError(
                f"the token of {path}",
                f"other users may read or change the file (its mode is {mode:04o})",
                f"remove it, or run `chmod 600 {path}`, on all machines",
            )
        text = file.read().strip()
    if len(text) < _SHORTEST:
        raise SettingError(
            f"the token of {path}",
            f"the file holds fewer than {_SHORTEST} characters",
            "remove it; the next run makes a new one",
        )
    return text

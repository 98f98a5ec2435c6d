"""Finds or creates the run's token: a secret that all launchers of one run share.

The token proves that launchers belong together, so that nobody else can join their run. It is read
from LOCKSTEP_TOKEN. If that is not set, it is the content of a file in the user's home folder. The
first launcher that needs the file creates it, readable only by the user. So machines that share the
home folder need nothing else. (Erlang's `.erlang.cookie` works in the same way.)
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic

from lockstep.errors import SettingError
from lockstep.machine.network import wait_until

TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
NO_TOKEN = "none"
"""The value of LOCKSTEP_TOKEN that lets everybody join the run."""
MIN_TOKEN_LENGTH = 16
"""The smallest number of characters. A shorter token could be guessed."""
FILE_VISIBLE_TIMEOUT_S = 5.0
"""How late a file created by another machine may become visible on a network file system."""


@dataclass(frozen=True)
class Token:
    """The secret of a run, which is never sent or printed."""

    key: bytes = field(repr=False)
    """The key with which launchers sign (HMAC)."""
    source: str
    """The source of the token, for messages: a variable or a file."""
    open_to_all: bool = False
    """True if the user lets everybody join the run."""


def find_token(environ: Mapping[str, str]) -> Token:
    """Returns the token of this user's runs, and creates the token file if there is none.

    Raises:
        SettingError: LOCKSTEP_TOKEN is too short, or the file can be read by others or not at all.
    """
    text = environ.get(TOKEN_VARIABLE, "").strip()
    if text == NO_TOKEN:
        # The user wants no protection. All launchers then use the same key, which is well known.
        return Token(_derive_key(NO_TOKEN), f"{TOKEN_VARIABLE}={NO_TOKEN}", open_to_all=True)

    if text:
        if len(text) < MIN_TOKEN_LENGTH:
            raise SettingError(
                f"{TOKEN_VARIABLE} (of {len(text)} characters)",
                f"a token of fewer than {MIN_TOKEN_LENGTH} characters can be guessed",
                "make one with `openssl rand -hex 16` and set it on all machines",
            )
        return Token(_derive_key(text), TOKEN_VARIABLE)

    path = token_file(environ)
    try:
        if not path.exists():
            _create_token_file(path)
            # If another machine was faster, its file may not be visible here yet.
            wait_until(path.exists, monotonic() + FILE_VISIBLE_TIMEOUT_S)
        return Token(_derive_key(_read_token_file(path)), str(path))
    except OSError as error:
        raise SettingError(
            f"a run on several machines, without {TOKEN_VARIABLE}",
            f"the token cannot be kept in {path}: {error.strerror or error}",
            f"set {TOKEN_VARIABLE} to the same text on all machines, made with "
            "`openssl rand -hex 16`",
        ) from None


def token_file(environ: Mapping[str, str]) -> Path:
    """Returns the path of the token file, below XDG_CONFIG_HOME or else ~/.config."""
    config_folder = environ.get("XDG_CONFIG_HOME")
    if config_folder:
        return Path(config_folder, "lockstep", "token")
    home = environ.get("HOME") or Path.home()
    return Path(home, ".config", "lockstep", "token")


def _derive_key(text: str) -> bytes:
    return hashlib.sha256(b"lockstep token\n" + text.encode()).digest()


def _create_token_file(path: Path) -> None:
    """Writes a new token, unless another launcher has already done so.

    The token is first written to a temporary file, so that nobody reads a part of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A NamedTemporaryFile has mode 0600. The hard link fails if the token file already exists.
    with NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.") as draft:
        draft.write(secrets.token_hex(32) + "\n")
        draft.flush()
        os.fsync(draft.fileno())
        with suppress(FileExistsError):
            os.link(draft.name, path)


def _read_token_file(path: Path) -> str:
    """Reads the token from its file.

    Raises:
        SettingError: other users may read or change the file, or the token is too short.
    """
    with path.open() as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:  # any right of the group or of other users
            raise SettingError(
                f"the token of {path}",
                f"other users may read or change the file (its mode is {mode:04o})",
                f"remove it, or run `chmod 600 {path}`, on all machines",
            )

        text = file.read().strip()

    if len(text) < MIN_TOKEN_LENGTH:
        raise SettingError(
            f"the token of {path}",
            f"the file holds fewer than {MIN_TOKEN_LENGTH} characters",
            "remove it; the next run makes a new one",
        )

    return text

"""Reads the launch file, in which a project keeps options of `lockstep run`.

    # lockstep.toml
    nproc = 4
    precision = "bf16"

It is `lockstep.toml`, or the table `[tool.lockstep]` in `pyproject.toml`, in the working folder or
the nearest folder above it. A key is an option without its dashes. The command line overrides the
environment, and the environment overrides the file.

If a launcher starts others on more machines, it is the only one that reads the file. The others get
its options on their command lines, with a *source* such as "lockstep.toml: nproc, precision".
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import SettingError

FILE_NAME = "lockstep.toml"
PYPROJECT = "pyproject.toml"
TABLE = "tool.lockstep"


@dataclass(frozen=True)
class LaunchFile:
    """A launch file that was read."""

    name: str
    """The path of the file for messages, relative to the working folder if possible."""
    values: dict[str, Any]
    """The value of each key. The words of a key are joined by dashes, as in options."""
    line_of_key: dict[str, int]
    """The line number of each key. A key that is written in an unusual way may be missing."""

    def place_of(self, key: str) -> str:
        """Says where a key is, for messages: `lockstep.toml, line 3`."""
        line = self.line_of_key.get(key)
        return self.name if line is None else f"{self.name}, line {line}"

    def entry_and_place(self, key: str) -> str:
        """Returns a key with its value and where it is, for messages: `nproc = 4 (lockstep.toml,
        line 3)`.
        """
        value = self.values[key]
        shown = f'"{value}"' if isinstance(value, str) else _as_toml(value)
        return f"{key} = {shown} ({self.place_of(key)})"


def _as_toml(value: Any) -> str:
    """Writes a value as in TOML, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def find_launch_file(folder: Path) -> LaunchFile | None:
    """Reads the launch file of a folder, or of the nearest folder above it that has one.

    A file of another user could start programs in your name. So the search stops at a folder in
    which every user may write, such as /tmp; if that is the working folder, its own files count
    only if they are yours.

    Raises:
        SettingError: the file cannot be read, or is not yours.
    """
    working_folder = folder.absolute()
    for place in (working_folder, *working_folder.parents):
        if _is_writable_by_all(place) and place != working_folder:
            return None

        path = place / FILE_NAME
        if path.is_file():
            if not _is_trusted(path):
                raise SettingError(
                    f"the launch file {path}",
                    "another user may have written it: every user may write in its folder",
                    "--launch-file FILE reads it all the same, --launch-file /dev/null reads none",
                )
            return read_launch_file(path)

        path = place / PYPROJECT
        if path.is_file():
            # Most files called pyproject.toml have nothing to do with Lockstep, so another user's
            # is skipped, without an error.
            file = _read_table(path) if _is_trusted(path) else None
            if file is not None:
                return file

    return None


def _is_trusted(path: Path) -> bool:
    """True unless another user may have written a file.

    In a folder in which every user may write, a file is trusted if it belongs to this user or to
    root, and no other user may write to it.
    """
    if not _is_writable_by_all(path.parent):
        return True
    belongs_to_user_or_root = path.stat().st_uid in (os.getuid(), 0)
    return belongs_to_user_or_root and not _is_writable_by_all(path)


def _is_writable_by_all(path: Path) -> bool:
    """True if every user may write to a file or a folder."""
    return bool(path.stat().st_mode & stat.S_IWOTH)


def _read_table(path: Path) -> LaunchFile | None:
    """Reads the table `[tool.lockstep]` of a `pyproject.toml`, and returns None if it has none.

    Raises:
        SettingError: the file contains the word "lockstep" and is not valid. Any other file that is
            not valid is ignored.
    """
    try:
        launch_file = read_launch_file(path)
    except SettingError:
        if _mentions_lockstep(path):
            raise
        return None

    has_table = bool(launch_file.values)
    return launch_file if has_table else None


def _mentions_lockstep(path: Path) -> bool:
    """Returns True if the file contains the word "lockstep", False also if it cannot be read."""
    try:
        return b"lockstep" in path.read_bytes()
    except OSError:
        return False


def read_launch_file(path: Path) -> LaunchFile:
    """Reads a launch file: the whole file, or the table `[tool.lockstep]` of a `pyproject.toml`.

    Raises:
        SettingError: the file cannot be read.
    """
    name = _name_for_messages(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise SettingError(
            f"the launch file {name}", str(error.strerror), "check its path and its permissions"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(
            f"the launch file {name}",
            f"it is not TOML: {error}",
            'write KEY = VALUE, with texts in quotes: precision = "bf16"',
        ) from None

    is_table_of_pyproject = path.name == PYPROJECT
    if is_table_of_pyproject:
        tool = content.get("tool")
        table = tool.get("lockstep", {}) if isinstance(tool, dict) else {}
        if not isinstance(table, dict):
            raise SettingError(
                f"lockstep in the table [tool] of {name}",
                "it has no options of lockstep run: it is no table",
                "write the options below a line [tool.lockstep]",
            )

        content = table

    values = {}
    for key, value in content.items():
        values[key.replace("_", "-")] = value

    # Errors name the line of a wrong value.
    lines = _lines_of_keys(text, is_pyproject=is_table_of_pyproject)
    return LaunchFile(name, values, lines)


def _name_for_messages(path: Path) -> str:
    """Returns a path relative to the working folder if it is in there, and otherwise as it is."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _lines_of_keys(text: str, *, is_pyproject: bool) -> dict[str, int]:
    """Finds the line number of each key, which the TOML parser does not provide.

    The numbers are only used in messages, so a line that merely looks like a key does no harm.

    Args:
        text: the text of the file.
        is_pyproject: True for `pyproject.toml`, in which only the keys of the table
            `[tool.lockstep]` count. Those of `lockstep.toml` stand before its first table.
    """
    line_of_key: dict[str, int] = {}
    is_among_options = not is_pyproject
    for line_number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        begins_table = stripped.startswith("[")
        if begins_table:
            # TOML also allows `[ tool . lockstep ]`, and a comment after the bracket.
            is_among_options = stripped.replace(" ", "").startswith(f"[{TABLE}]")

        # `max_restarts = 3` or `"max_restarts" = 3`, which is the option --max-restarts.
        match = re.match(r"""["']?([\w-]+)["']?\s*=""", stripped)
        if is_among_options and match is not None:
            key = match[1].replace("_", "-")
            line_of_key.setdefault(key, line_number)

    return line_of_key

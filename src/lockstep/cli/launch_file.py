"""The launch file: options of `lockstep run` that a project keeps in a file.

    # lockstep.toml
    nproc = 4
    precision = "bf16"

It is `lockstep.toml`, or the table `[tool.lockstep]` of `pyproject.toml`, of the working folder or
of the nearest folder above it. A key is an option without its dashes. The command line overrides
the environment, and the environment overrides the file.

Where a launcher starts others on more machines, it alone reads the file: the others are given its
options on their command lines, with a *source* such as "lockstep.toml: nproc, precision".
"""

from __future__ import annotations

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
    """How messages call it: its path, relative to the working folder if it lies there."""
    values: dict[str, Any]
    """The value of each key; the words of a key are joined by dashes, as in options."""
    line_of_key: dict[str, int]
    """The line of each key. A key that is written in an unusual way may be missing."""

    def place_of(self, key: str) -> str:
        """Returns where a key stands, for messages: `lockstep.toml, line 3`."""
        line = self.line_of_key.get(key)
        return self.name if line is None else f"{self.name}, line {line}"

    def written(self, key: str) -> str:
        """Returns a key with its value and its place, for messages."""
        value = self.values[key]
        shown = f'"{value}"' if isinstance(value, str) else _as_toml(value)
        return f"{key} = {shown} ({self.place_of(key)})"


def _as_toml(value: Any) -> str:
    """Returns a value as TOML writes it, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def find_launch_file(folder: Path) -> LaunchFile | None:
    """Reads the launch file of a folder, or of the nearest folder above it that has one.

    A folder in which every user may write, such as /tmp, and those above it are not searched: the
    file of another user could start programs in your name.

    Raises:
        SettingError: the file cannot be read.
    """
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        is_writable_by_all = bool(place.stat().st_mode & stat.S_IWOTH)
        if is_writable_by_all and place != folder:
            return None
        if (place / FILE_NAME).is_file():
            return read_launch_file(place / FILE_NAME)

        if (place / PYPROJECT).is_file():
            file = read_launch_file(place / PYPROJECT)
            if file.values:
                return file

    return None


def read_launch_file(path: Path) -> LaunchFile:
    """Reads a launch file: all of it, or the table `[tool.lockstep]` of a `pyproject.toml`.

    Raises:
        SettingError: it cannot be read.
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
        for part in TABLE.split("."):
            content = content.get(part, {})

    values = {}
    for key, value in content.items():
        values[key.replace("_", "-")] = value

    return LaunchFile(name, values, _lines_of_keys(text, in_table=is_table_of_pyproject))


def _name_for_messages(path: Path) -> str:
    """Returns a path relative to the working folder if it lies there, and otherwise all of it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _lines_of_keys(text: str, *, in_table: bool) -> dict[str, int]:
    """Returns the line of each key, which the parser of TOML does not tell.

    Args:
        text: the file.
        in_table: True if only keys of the table `[tool.lockstep]` count.
    """
    lines: dict[str, int] = {}
    is_inside = not in_table
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            is_inside = stripped.replace(" ", "").startswith(f"[{TABLE}]")
        match = re.match(r"""["']?([\w-]+)["']?\s*=""", stripped)
        if is_inside and match is not None:
            lines.setdefault(match[1].replace("_", "-"), number)

    return lines

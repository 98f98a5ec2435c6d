"""Prints lines of Lockstep's own, and prints and writes the results of commands with `--json FILE`,
where `-` stands for standard output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lockstep.errors import SettingError
from lockstep.language import translate


def say(line: str) -> None:
    """Shows an English line in the language of this process."""
    print_line(translate(line))


def print_line(line: str) -> None:
    """Prints a line of Lockstep itself on standard error, as standard output belongs to the
    script.
    """
    click.echo(f"lockstep: {line}", err=True)


def print_for_people(lines: Sequence[str], json_file: str | None) -> None:
    """Prints lines, unless standard output is reserved for the JSON.

    Args:
        lines: the lines.
        json_file: the value of --json; `-` for standard output, None if it is not given.
    """
    if json_file != "-":
        click.echo("\n".join(lines))


def write_json(json_file: str | None, values: dict[str, Any]) -> None:
    """Writes values as JSON, if the user has asked for that.

    Numbers that do not exist in strict JSON become strings: "NaN", "Infinity".

    Args:
        json_file: the value of --json; `-` for standard output, None if it is not given.
        values: the values.

    Raises:
        SettingError: the file cannot be written.
    """
    if json_file is None:
        return

    # Python writes NaN and Infinity as bare words, which `parse_constant` turns into strings.
    with_strings_for_nan = json.loads(json.dumps(values), parse_constant=str)
    text = json.dumps(with_strings_for_nan, indent=2)
    if json_file == "-":
        click.echo(text)
        return

    try:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingError(
            f"--json {json_file}", str(error.strerror), "name another file"
        ) from None

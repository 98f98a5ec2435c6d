"""Applies a patch (a unified diff) to a text. The defects of the gallery are stored as patches."""

from __future__ import annotations

import re

# Such as `@@ -12,5 +12,6 @@`: the hunk replaces lines from line 12 of the text on.
HUNK_HEADER = re.compile(r"@@ -(?P<first_line>\d+)(,\d+)? \+\d+(,\d+)? @@")


def apply_patch(text: str, patch: str) -> str:
    """Returns the text with the changes of a patch.

    Args:
        text: the text.
        patch: a unified diff, in which every line of context must be as in the text.

    Raises:
        ValueError: a line of the patch is not in the text where it should be.
    """
    lines = text.splitlines(keepends=True)
    patched: list[str] = []
    next_line = 0
    for line in patch.splitlines(keepends=True):
        header = HUNK_HEADER.match(line)
        if header is not None:
            first_line = int(header["first_line"]) - 1
            patched += lines[next_line:first_line]
            next_line = first_line
            continue
        if line.startswith(("---", "+++")) and not patched and next_line == 0:
            continue
        kind = line[0]
        content = line[1:]
        if kind == "+":
            patched.append(content)
            continue
        if next_line >= len(lines) or lines[next_line] != content:
            raise ValueError(f"line {next_line + 1} is not {content!r}")
        if kind == " ":
            patched.append(content)
        next_line += 1
    return "".join(patched + lines[next_line:])

"""Text from files in messages."""

from __future__ import annotations

from lockstep.wording import replace_unprintable


def short(value: object, length: int = 80) -> str:
    """Returns a text from a file for a message: at most `length` characters, all printable."""
    text = replace_unprintable(str(value)[: length + 1])
    if len(text) <= length:
        return text
    return f"{text[: length - 3]}..."

"""Fits texts into the columns of a terminal, where a Chinese character takes two.

`textwrap` counts characters, and breaks lines at spaces alone, of which Chinese has none. A text
without wide characters is left to it.
"""

from __future__ import annotations

import textwrap
import unicodedata

NO_LINE_BEGINS_WITH = "，。；：、！？）」』》”…"
NO_LINE_ENDS_WITH = "（「『《“[("


def width_of(text: str) -> int:
    """Returns how many columns a text takes."""
    return sum(_width_of_char(char) for char in text)


def pad(text: str, width: int) -> str:
    """Returns a text with spaces behind it, so that it takes at least `width` columns."""
    return text + " " * (width - width_of(text))


def join_label(label: str, text: str) -> str:
    """Puts a label, which ends in a colon, before a text. A Chinese colon takes two columns, and
    no space follows it.
    """
    return f"{label} {text}" if label.endswith(":") else f"{label}{text}"


def wrap(
    text: str, width: int, *, subsequent_indent: str = "", break_long_words: bool = True
) -> list[str]:
    """Breaks a text into lines of at most `width` columns, as `textwrap.wrap` does.

    Args:
        text: one paragraph.
        width: of a line; a word that is longer has a line of its own if it is in a Chinese text.
        subsequent_indent: what goes before all lines but the first.
        break_long_words: whether a word that is longer than a line is broken, in a text without
            wide characters.
    """
    if text.isascii() or width_of(text) == len(text):
        return textwrap.wrap(
            text,
            width,
            subsequent_indent=subsequent_indent,
            break_long_words=break_long_words,
            break_on_hyphens=False,
        )

    lines: list[str] = []
    line = ""
    for piece in _unbreakable_pieces(text):
        if line.strip() and width_of(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = subsequent_indent
            piece = piece.lstrip()
        line += piece

    if line.strip():
        lines.append(line.rstrip())
    return lines


def _width_of_char(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _unbreakable_pieces(text: str) -> list[str]:
    """Cuts a text where a line may end: behind spaces, and before and behind wide characters.

    Punctuation stays with what it belongs to.
    """
    pieces = [""]
    for char in text:
        last = pieces[-1][-1:]
        is_at_space = last == " " and char != " "
        is_at_wide_char = last not in ("", " ") and 2 in (
            _width_of_char(char),
            _width_of_char(last),
        )
        belongs_together = char in NO_LINE_BEGINS_WITH or last in tuple(NO_LINE_ENDS_WITH)
        if (is_at_space or is_at_wide_char) and not belongs_together:
            pieces.append("")
        pieces[-1] += char

    return pieces

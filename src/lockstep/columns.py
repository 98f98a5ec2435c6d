"""Fits text into the columns of a terminal, where a Chinese character is two columns wide.

Python's `textwrap` counts characters instead of columns, and breaks lines only at spaces, which
Chinese does not use. It is only used for text without wide characters.
"""

from __future__ import annotations

import itertools
import textwrap
import unicodedata

NO_LINE_BEGINS_WITH = "，。；：、！？）」』》”…"
NO_LINE_ENDS_WITH = "（「『《“[("

COLUMNS_OF_LABEL = len("found: ")
"""The width of the column of labels in messages: `found:` is the longest."""


def width_of(text: str) -> int:
    """Returns the number of columns that a text takes."""
    return sum(_width_of_char(char) for char in text)


def pad(text: str, width: int) -> str:
    """Appends spaces to a text so that it takes at least `width` columns."""
    return text + " " * (width - width_of(text))


def join_label(label: str, text: str) -> str:
    """Puts a label that ends in a colon before a text: `"found:", "x" -> "found: x"`.

    A Chinese colon is two columns wide, and no space follows it.
    """
    return f"{label} {text}" if label.endswith(":") else f"{label}{text}"


def pad_label(label: str, text: str) -> str:
    """Puts a label that ends in a colon before a text, in a column of labels.

    For example, `"do:", "wait" -> "do:    wait"`. The Chinese labels are equally wide, and no space
    follows their colon.
    """
    return f"{pad(label, COLUMNS_OF_LABEL)}{text}" if label.endswith(":") else f"{label}{text}"


def wrap(
    text: str, width: int, *, subsequent_indent: str = "", break_long_words: bool = True
) -> list[str]:
    """Breaks a text into lines of at most `width` columns, as `textwrap.wrap` does.

    Args:
        text: one paragraph.
        width: maximum number of columns in a line.
        subsequent_indent: text before all lines but the first.
        break_long_words: True to break a word that is longer than a line. In a text with wide
            characters such a word is never broken, and exceeds its line.
    """
    if text.isascii() or width_of(text) == len(text):
        return textwrap.wrap(
            text,
            width,
            subsequent_indent=subsequent_indent,
            break_long_words=break_long_words,
            break_on_hyphens=False,
        )

    # The text has wide characters: add one piece after the other to the line while it fits.
    lines: list[str] = []
    line = ""
    for piece in _unbreakable_pieces(text):
        # A piece that does not fit begins a new line, unless the line has no text yet: a new one
        # would have no more room.
        line_has_text = bool(line.strip())
        if line_has_text and width_of(line + piece.rstrip()) > width:
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
    """Splits a text where a line may end: after spaces, and before and after wide characters.

    Punctuation stays with the character before or after it: `"你好，ok (x)"` gives `"你"`,
    `"好，"`, `"ok "` and `"(x)"`.
    """
    pieces = [text[:1]]
    for left, right in itertools.pairwise(text):
        if _may_end_line_between(left, right):
            pieces.append(right)
        else:
            pieces[-1] += right
    return pieces


def _may_end_line_between(left: str, right: str) -> bool:
    """Returns True if a line may end between two neighbouring characters."""
    # Punctuation stays with its word: `，` never begins a line, and `（` never ends one.
    if right in NO_LINE_BEGINS_WITH or left in NO_LINE_ENDS_WITH:
        return False

    # Behind spaces, a new word begins.
    if left == " ":
        return right != " "

    # Chinese has no spaces, so a line may end before and after each of its characters.
    return _width_of_char(left) == 2 or _width_of_char(right) == 2

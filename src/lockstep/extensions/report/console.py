"""What rank 0 prints: plain lines and the block of choices, above a running bar if there is one.

Nothing here asks for the rank: the caller is rank 0. `rich` is imported where it is needed, so
that importing lockstep does not pay for it.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.settings import Choice

if TYPE_CHECKING:
    from rich.console import Console


_INDENT = 2
_MIN_NAME, _MAX_VALUE, _MIN_REASON = 10, 24, 24

_with_bar: Console | None = None


def open_console() -> Console:
    """The console of the running bar, or a new one on stdout as it is now."""
    from rich.console import Console

    columns = launcher_columns()
    return _with_bar or Console(
        markup=False,
        emoji=False,
        highlight=False,
        width=columns,
        force_terminal=None if columns is None else True,
    )


def launcher_columns() -> int | None:
    """How wide a line may be on the terminal of the launcher, which reads stdout through a pipe.

    None: stdout is a terminal itself, or goes elsewhere.
    """
    columns = os.environ.get("LOCKSTEP_TERMINAL_COLUMNS", "")
    piped = not sys.stdout.isatty() and sys.stdout is sys.__stdout__
    return int(columns) if piped and columns.isdigit() else None


def on_terminal() -> bool:
    """Whether stdout can be drawn on; a pipe cannot, whatever is set to force colours on it."""
    return sys.stdout.isatty() and open_console().is_interactive


def set_bar_console(console: Console | None) -> None:
    """A bar runs on `console` from now on, so all lines must go through it; None: no longer."""
    global _with_bar
    _with_bar = console


def print_line(text: str = "") -> None:
    """Prints lines as they are, above the running bar if there is one; for rank 0 alone."""
    if _with_bar is None:
        sys.stdout.write(encodable(text, sys.stdout.encoding) + "\n")
        sys.stdout.flush()
    else:
        from rich.text import Text

        _with_bar.print(Text.from_ansi(encodable(text, _with_bar.encoding)), soft_wrap=True)


def encodable(text: str, encoding: str | None) -> str:
    """The text with `?` for what a stream of this encoding cannot print: no run ends over a dot."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def title_of(size: int, hosts: int, version: str) -> str:
    """Stands above the choices of a run of so many processes."""
    several = "es" * (size > 1), "s" * (hosts > 1)
    return f"lockstep {version} · {size} process{several[0]} on {hosts} host{several[1]}"


def print_choices(title: str, choices: Sequence[Choice]) -> None:
    """Prints the title and one aligned line a choice; for rank 0 alone.

    On a terminal long reasons are wrapped between words; on anything else a choice is one line, so
    that a log can be searched.
    """
    if not _may_be_styled():
        for parts in choice_rows(title, choices, None):
            print_line("".join(parts))
        return
    from rich.text import Text

    console = open_console()
    width = launcher_columns() or (console.width if on_terminal() else None)
    for parts in choice_rows(title, choices, width):
        name, value, reason = (encodable(part, console.encoding) for part in parts)
        console.print(Text.assemble((name, "dim"), (value, "bold"), reason), soft_wrap=True)


def _may_be_styled() -> bool:
    """Whether `rich` should decide; a pipe that nobody forces to be more needs none of it."""
    forced = any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))
    terminal = sys.stdout.isatty() or launcher_columns() is not None
    return terminal or forced or "IPython" in sys.modules or _with_bar is not None


def choice_rows(
    title: str, choices: Sequence[Choice], width: int | None
) -> list[tuple[str, str, str]]:
    """The block as rows of name, value and reason, each padded to stand where it belongs.

    Args:
        title: the line above the block.
        choices: in the order in which they are shown.
        width: columns to stay within, where words are short enough; None: any.
    """
    rows = [("", line, "") for line in _wrap(title, width)]
    name_width = max([_MIN_NAME, *(len(c.name) for c in choices)]) + 2
    fitting = [len(c.value) for c in choices if len(c.value) <= _MAX_VALUE]
    value_width = max([0, *fitting]) + 2
    room = None if width is None else width - _INDENT - name_width
    for name, value, reason in choices:
        text, hanging = f"{value}  {reason}", 2
        if len(value) + 2 <= value_width and (room is None or room - value_width >= _MIN_REASON):
            text, hanging = value.ljust(value_width) + reason, value_width
        first, *others = _wrap(text.rstrip(), room, hanging)
        shown = len(value)
        rows.append((" " * _INDENT + name.ljust(name_width), first[:shown], first[shown:]))
        rows += [(" " * (_INDENT + name_width), "", line) for line in others]
    return rows


def _wrap(text: str, width: int | None, hanging: int = 0) -> list[str]:
    """Lines of whole words, all but the first of them indented; one line where width is None."""
    if width is None:
        return [text]
    return textwrap.wrap(
        text,
        max(width, hanging + 1),
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [text]


def thousands(number: float) -> str:
    """`5 432`; two significant digits below ten."""
    return f"{number:.2g}" if 0 < number < 9.95 else f"{number:,.0f}".replace(",", " ")


def rate(samples: int, seconds: float) -> str:
    """`5 432 samples/s`."""
    return f"{thousands(samples / seconds if seconds > 0 else 0.0)} samples/s"


def clock(seconds: float) -> str:
    """`0:07`, `2:05`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """`1.9 s` below a minute, else as `clock`."""
    return f"{seconds:.1f} s" if seconds < 59.95 else clock(seconds)


def number(value: float) -> str:
    """Four significant digits or all before the point: `0.04120`, `12.35`, `54321`, `1.200e-05`."""
    # What `#.4g` would write with an exponent, as far as it can be read without one.
    text = f"{value:.0f}" if 9999.5 <= abs(value) < 9999999.5 else f"{value:#.4g}"
    return text.rstrip(".")

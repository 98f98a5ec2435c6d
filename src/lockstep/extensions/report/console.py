"""What rank 0 prints: plain lines and the block of choices, and how numbers and times are written.

While a progress bar is shown, all lines go through the *bar's console*, the object of `rich` that
draws the bar, so that they appear above it. Nothing here asks for the rank: the caller is rank 0.
`rich` is imported where it is needed, so that importing lockstep does not pay for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lockstep.columns import pad, width_of, wrap
from lockstep.language import translate
from lockstep.settings import Choice, is_quiet
from lockstep.wording import count_noun

if TYPE_CHECKING:
    from rich.console import Console


# Columns of the block of choices.
INDENT = 2
MIN_NAME_WIDTH = 10
MIN_REASON_WIDTH = 24
MAX_ALIGNED_VALUE_WIDTH = 24  # the reason of a longer value follows it without alignment
GAP = 2

_bar_console: Console | None = None


def open_console() -> Console:
    """Returns the console of the running bar, or a new one on the present stdout."""
    from rich.console import Console

    if _bar_console is not None:
        return _bar_console

    # With None for the two settings below, rich decides by itself.
    force_terminal: bool | None = None
    force_jupyter: bool | None = None

    # To rich, the pipe to the launcher is no terminal, although its text ends on one.
    columns_of_launcher = launcher_columns()
    prints_through_launcher = columns_of_launcher is not None
    if prints_through_launcher:
        force_terminal = True

    # In a notebook, rich prints through the kernel, which replaces `sys.stdout`. In a rank that was
    # forked from the kernel, `sys.stdout` is the ordinary one again, and the notebook would ignore
    # what rich prints through the kernel.
    stdout_is_ordinary = sys.stdout is sys.__stdout__
    if stdout_is_ordinary:
        force_jupyter = False

    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        width=columns_of_launcher,
        force_terminal=force_terminal,
        force_jupyter=force_jupyter,
    )


def launcher_columns() -> int | None:
    """Returns the width of the terminal on which the launcher prints this process's stdout.

    The launcher (`lockstep run`) reads stdout through a pipe and forwards it to its own terminal.
    It passes the width of that terminal in an environment variable.

    Returns:
        The width in columns, or None if stdout does not reach a terminal through the launcher.
    """
    columns = os.environ.get("LOCKSTEP_TERMINAL_COLUMNS", "")
    if not columns.isdigit():  # no launcher has started this process, or it has no terminal
        return None
    if sys.stdout.isatty():  # the process prints on a terminal itself, not through the launcher
        return None
    if sys.stdout is not sys.__stdout__:  # the script has replaced it, by a file for example
        return None
    return int(columns)


def on_terminal() -> bool:
    """Returns True if stdout itself is a terminal on which a bar can be drawn."""
    # `rich` alone cannot be asked: if FORCE_COLOR is set it takes a pipe for a terminal too.
    if not sys.stdout.isatty():
        return False
    return open_console().is_interactive  # False for a terminal that cannot move the cursor


def set_bar_console(console: Console | None) -> None:
    """Sets the console of the running bar, through which all lines go; None if no bar runs."""
    global _bar_console
    _bar_console = console


def print_line(text: str = "") -> None:
    """Prints the text as it is, above the running bar if there is one.

    Characters that stdout cannot encode are printed as `?`.
    """
    if _bar_console is None:
        sys.stdout.write(encodable(text, sys.stdout.encoding) + "\n")
        sys.stdout.flush()
    else:
        from rich.text import Text

        line = Text.from_ansi(encodable(text, _bar_console.encoding))
        _bar_console.print(line, soft_wrap=True)  # rich adds no line breaks


def encodable(text: str, encoding: str | None) -> str:
    """Returns the text with `?` in place of each character that the encoding does not have."""
    if not encoding:  # an object in place of sys.stdout may have none
        encoding = "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def title_of(num_processes: int, num_hosts: int, version: str) -> str:
    """Returns the line above the block of choices: `lockstep 0.1.0 · 2 processes on 1 host`."""
    return translate(
        f"lockstep {version} · {count_noun(num_processes, 'process')} on "
        f"{count_noun(num_hosts, 'host')}"
    )


def print_note(text: str) -> None:
    """Prints a line about the run that the script has not asked for, unless the run is quiet."""
    if not is_quiet(os.environ):
        print_line(text)


def print_labelled_note(label: str, text: str) -> None:
    """Prints a note in the columns of the block of choices.

    Args:
        label: what the note is about, in one word.
        text: the note, in English.
    """
    padded_label = pad(translate(label), MIN_NAME_WIDTH + GAP)
    print_note(" " * INDENT + padded_label + translate(text))


def print_choices(title: str, choices: Sequence[Choice]) -> None:
    """Prints the title and one aligned line per choice, unless the run is quiet.

    The choices are English, and are shown in the language of this process.

    On a terminal long reasons are wrapped between words. Elsewhere each choice is one line, so that
    a log can be searched.
    """
    if is_quiet(os.environ):
        return

    choices = [Choice(*map(translate, choice)) for choice in choices]
    if not _may_be_styled():
        for name, value, reason in choice_rows(title, choices, width=None):
            print_line(name + value + reason)
        return

    from rich.text import Text

    console = open_console()
    for row in choice_rows(title, choices, _wrapping_width(console)):
        name, value, reason = [encodable(part, console.encoding) for part in row]
        line = Text.assemble((name, "dim"), (value, "bold"), reason)
        console.print(line, soft_wrap=True)  # rich must not wrap the line a second time


def _may_be_styled() -> bool:
    """Returns True if `rich` might print bold and dim text on stdout; `rich` itself decides.

    False for an ordinary pipe or file, for which `rich` need not be imported.
    """
    bar_is_shown = _bar_console is not None
    reaches_terminal = sys.stdout.isatty() or launcher_columns() is not None
    in_notebook = "IPython" in sys.modules

    # Users ask `rich` by these variables to style text in a pipe too.
    is_forced = bool(os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"))
    return bar_is_shown or reaches_terminal or in_notebook or is_forced


def choice_rows(
    title: str, choices: Sequence[Choice], width: int | None
) -> list[tuple[str, str, str]]:
    """Lays out the block of choices as rows of name, value and reason.

    For example:

        strategy   ddp           one process per GPU
        batch      32 per rank   given in the script, and it goes on in the
                                 same column of the next line

    Args:
        title: the line above the block.
        choices: the choices, in the order in which they are shown.
        width: the number of columns to wrap at, or None not to wrap. A word that is longer than a
            line is not broken.

    Returns:
        The rows. Each part is padded with blanks, so that joined together they form the line.
    """
    rows = [("", line, "") for line in _wrap(title, width)]
    columns = _lay_out_columns(choices, width)
    for choice in choices:
        rows += _rows_of_choice(choice, columns)
    return rows


class _Columns(NamedTuple):
    """The layout of a block of choices. All widths are numbers of terminal columns."""

    name_width: int
    """The width of the names, with the gap behind them."""
    value_width: int | None
    """The width of the values, with the gap behind them. None on a narrow terminal, which has no
    column of reasons: each reason follows its value directly."""
    rest_width: int | None
    """The width of a value and its reason together; None if it is not limited."""


def _lay_out_columns(choices: Sequence[Choice], width: int | None) -> _Columns:
    """Returns the layout of a block of choices.

    The column of reasons is as far to the right as the longest value needs, not counting very long
    values.

    Args:
        choices: the choices of the block.
        width: how many columns a line may take; None if there is no limit.
    """
    longest_name = max((width_of(choice.name) for choice in choices), default=0)
    name_width = max(MIN_NAME_WIDTH, longest_name) + GAP
    widths_of_values = [width_of(choice.value) for choice in choices]
    aligned_widths = [number for number in widths_of_values if number <= MAX_ALIGNED_VALUE_WIDTH]
    value_width = max(aligned_widths, default=0) + GAP
    if width is None:
        return _Columns(name_width, value_width, rest_width=None)

    rest_width = width - INDENT - name_width
    has_room_for_reasons = rest_width - value_width >= MIN_REASON_WIDTH
    if not has_room_for_reasons:
        # There is no column of reasons then: each reason follows its value directly.
        return _Columns(name_width, value_width=None, rest_width=rest_width)
    return _Columns(name_width, value_width, rest_width)


def _rows_of_choice(choice: Choice, columns: _Columns) -> list[tuple[str, str, str]]:
    """Returns the row of a choice, and further rows for more lines of its reason.

    Each row has the name, the value and the reason, with the blanks between them. For example, the
    line "ddp   2 ranks" of the choice "strategy" becomes ("  strategy  ", "ddp", "   2 ranks"),
    and a second line of the reason ("            ", "", "      on 2 machines").
    """
    # The value and the reason are wrapped as one text. Its first line is split after the value.
    value = choice.value
    value_width = columns.value_width
    if value_width is not None and width_of(value) + GAP <= value_width:
        text = pad(value, value_width) + choice.reason
        hanging_indent = value_width  # further lines begin in the column of reasons
    else:
        text = value + " " * GAP + choice.reason
        hanging_indent = GAP  # further lines begin a little to the right of the value

    first_line, *more_lines = _wrap(text.rstrip(), columns.rest_width, hanging_indent)
    padded_name = " " * INDENT + pad(choice.name, columns.name_width)

    # If the value itself is wrapped, nothing of the first line is left for the reason.
    value_in_line = first_line[: len(value)]
    reason_in_line = first_line[len(value) :]
    rows = [(padded_name, value_in_line, reason_in_line)]
    for line in more_lines:
        rows.append((" " * width_of(padded_name), "", line))
    return rows


def _wrapping_width(console: Console) -> int | None:
    """Returns the width of the terminal that shows what this process prints.

    It is the launcher's terminal, if that prints what this process writes, or else this process's
    own. It is None where no terminal shows it, as in a notebook.
    """
    columns_of_launcher = launcher_columns()
    if columns_of_launcher is not None:
        return columns_of_launcher
    return console.width if on_terminal() else None


def _wrap(text: str, width: int | None, hanging_indent: int = 0) -> list[str]:
    """Splits the text into lines between words; all but the first are indented.

    Args:
        text: one line.
        width: the number of columns of a line; None: the text stays one line.
        hanging_indent: the blanks at the beginning of all lines but the first.
    """
    if width is None:
        return [text]
    limit = max(width, hanging_indent + 1)
    lines = wrap(text, limit, subsequent_indent=" " * hanging_indent, break_long_words=False)
    return lines or [text]


def thousands(number: float) -> str:
    """Returns `5 432` for 5432.1; numbers below ten have two significant digits."""
    if 0 < number < 9.95:
        return f"{number:.2g}"
    return f"{number:,.0f}".replace(",", " ")


def rate(samples: int, seconds: float) -> str:
    """Returns `5 432 samples/s`."""
    samples_per_second = samples / seconds if seconds > 0 else 0.0
    return f"{thousands(samples_per_second)} samples/s"


def clock(seconds: float) -> str:
    """Returns `0:07`, `2:05` or `1:02:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours != 0:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def duration(seconds: float) -> str:
    """Returns `1.9 s` below a minute, and otherwise what `clock` returns."""
    return f"{seconds:.1f} s" if seconds < 59.95 else clock(seconds)


def number(value: float) -> str:
    """Returns four significant digits, or all digits before the point if there are up to seven.

    For example `0.04120`, `12.35`, `54321`, `1.200e-05`.
    """
    if 9999.5 <= abs(value) < 9999999.5:
        return f"{value:.0f}"  # the format below would write 5.432e+04
    return f"{value:#.4g}".rstrip(".")

"""The help of all commands in the language of this process.

Help texts are English where they are declared. Click asks a formatter to write them, which is where
they are translated and fitted into the columns of a terminal. Names of options and of commands stay
as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, Any

import click

from lockstep.cli.unknown_option import describe_unknown_option
from lockstep.columns import join_label, pad, width_of, wrap
from lockstep.language import ENGLISH, language, translate

MAX_WIDTH = 78
"""The width of help texts on wide terminals, as click has it: longer lines are hard to read."""
NOTE_PATTERN = re.compile(r"(.*?)  \[([^\[\]]*)\]", re.DOTALL)
"""The help of an option with the last note behind it, such as "[default: 1]", which click adds
unless the help has one itself."""
DEFAULT_PATTERN = re.compile(r"default: (.*?)((?:; .*)?)", re.DOTALL)


class TranslatedHelp(click.HelpFormatter):
    """Writes help in the language of this process."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Writes how the command is called."""
        label = translate("Usage:")
        super().write_usage(prog, args, prefix=join_label(label, ""))

    def write_heading(self, heading: str) -> None:
        """Writes the title of a section."""
        self.write(" " * self.current_indent + translate(f"{heading}:") + "\n")

    def write_text(self, text: str) -> None:
        """Writes paragraphs, which empty lines separate."""
        indent = " " * self.current_indent
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", text):
            one_line = translate(" ".join(paragraph.split()))
            lines = wrap(one_line, self._text_width() - self.current_indent)
            paragraphs.append("".join(f"{indent}{line}\n" for line in lines))
        self.write("\n".join(paragraphs))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Writes a definition list: terms, such as options, each with its text in a second column.

        This overrides a method of click, which has these names.

        Args:
            rows: the terms and their texts.
            col_max: the largest width of the first column. If a term is wider, its text begins in
                the next line.
            col_spacing: blanks between the columns.
        """
        rows = list(rows)
        widest = max(width_of(term) for term, _ in rows)
        term_width = min(widest, col_max)
        first_column = term_width + col_spacing
        indent = " " * self.current_indent
        text_width = max(self._text_width() - self.current_indent - first_column, 10)

        for term, text in rows:
            text_lines = wrap(_translate_help(text), text_width)
            term_is_too_wide = width_of(term) > term_width
            if term_is_too_wide or not text_lines:
                text_lines.insert(0, "")  # nothing stands beside the term

            first_line, *next_lines = text_lines
            self.write(f"{indent}{pad(term, first_column)}{first_line}".rstrip() + "\n")
            for line in next_lines:
                self.write(f"{indent}{' ' * first_column}{line}\n")

    def _text_width(self) -> int:
        return min(self.width, MAX_WIDTH)


class TranslatedContext(click.Context):
    """The context of a command whose help is translated."""

    formatter_class = TranslatedHelp


class TranslatedUsageError(click.UsageError):
    """An error of click's, such as an unknown option, in the language of this process.

    Args:
        error: the error.
    """

    def __init__(self, error: click.UsageError) -> None:
        if isinstance(error, click.NoSuchOption):
            message = describe_unknown_option(error)
        else:
            message = error.format_message()
        super().__init__(message, error.ctx)

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints how the command is called, and what is wrong."""
        if self.ctx is not None:
            hint = translate(f"Try '{self.ctx.command_path} --help' for help.")
            click.echo(f"{self.ctx.get_usage()}\n{hint}\n", file, err=True)
        click.echo(join_label(translate("Error:"), translate(self.message)), file, err=True)


def translate_help(command: click.Command) -> None:
    """Has the help of a command, and of its subcommands, written in the language of this process.

    English help is left to click.
    """
    if language() == ENGLISH:
        return
    command.context_class = TranslatedContext
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            translate_help(subcommand)


def _translate_help(text: str) -> str:
    """Translates the help of an option, and the notes that click adds to it.

    Click writes "Stop after N steps.  [default: 3]  [env var: LOCKSTEP_STEPS]". The catalogue has
    only "Stop after N steps.", so the notes are taken off the end, one after the other, until the
    rest has a translation or no note is left.
    """
    help_text = text
    notes: list[str] = []
    while True:
        translated = translate(help_text)
        is_translated = translated != help_text
        last_note = NOTE_PATTERN.fullmatch(help_text)
        if is_translated or last_note is None:
            return "".join([translated, *notes])

        # "Stop after N steps.  [default: 3]" gives "Stop after N steps." and "default: 3".
        help_text, note = last_note.groups()
        notes.insert(0, f"  [{_translate_note(note)}]")


def _translate_note(note: str) -> str:
    """Translates what click writes in brackets: "default: 3", but not "env var: LOCKSTEP_STEPS"."""
    default = DEFAULT_PATTERN.fullmatch(note)
    if default is None:
        return note
    value, rest_of_note = default.groups()
    return f"{translate('default:')}{translate(value)}{rest_of_note}"

"""Implements `lockstep explain`: says what a code such as LS303 in a message means, and what
to do.
"""

from __future__ import annotations

import shutil
import textwrap

import click

from lockstep.columns import wrap
from lockstep.language import LANGUAGES, translate
from lockstep.verify import catalogue
from lockstep.verify.catalogue import GROUPS, Entry

MAX_WIDTH = 100  # columns
INDENT = "  "


@click.command(name="explain", short_help="Explains a code such as LS303.")
@click.argument("words", metavar="[CODE | WORDS]...", nargs=-1)
@click.option(
    "--markdown",
    type=click.Choice(LANGUAGES),
    help="Print the whole catalogue as Markdown, in English or Chinese.",
)
def command(words: tuple[str, ...], markdown: str | None) -> None:
    """Explains a code such as LS303, as printed with errors, warnings and verdicts.

    Words search the entries: `lockstep explain batchnorm`. Without arguments it lists all of them.
    """
    if markdown is not None:
        click.echo(catalogue.as_markdown(markdown), nl=False)
        return

    query = " ".join(words)
    entries = catalogue.find(query)  # an empty query finds all entries
    if not entries:
        raise click.UsageError(f"Nothing in the catalogue is about {query!r}: see lockstep explain")

    size_without_terminal = (MAX_WIDTH, 24)  # columns, and lines, which are not used
    width = min(shutil.get_terminal_size(size_without_terminal).columns, MAX_WIDTH)
    if len(entries) > 1:
        click.echo(_format_list(entries, width))
        text = translate(f"To read one of them: lockstep explain {entries[0].code}")
        click.echo(f"\n{text}")
        return

    entry = entries[0]
    spellings_of_code = (entry.code, entry.code.removeprefix("LS"))  # LS303 and 303
    if _is_code(query) and query.upper() not in spellings_of_code:
        # There is no such code, so `find` has returned the entry with the most similar code.
        click.echo(translate(f"There is no {query}; the nearest is:"))

    click.echo(_format_entry(entry, width))


def _is_code(query: str) -> bool:
    """Returns True if a query is a code, such as `LS303` or `303`."""
    return query.upper().removeprefix("LS").isdigit()


def _format_list(entries: list[Entry], width: int) -> str:
    """Writes a line for each entry, below the heading of its group."""
    lines: list[str] = []
    for group, heading in GROUPS.items():  # a group is named by a prefix of its codes: "LS3"
        entries_of_group = [entry for entry in entries if entry.code.startswith(group)]
        if not entries_of_group:
            continue

        if lines:
            lines.append("")  # an empty line between two groups
        lines.append(translate(heading))
        for entry in entries_of_group:
            head = f"{INDENT}{entry.code}  "
            title = translate(entry.title)
            lines += wrap(head + title, width, subsequent_indent=" " * len(head))

    return "\n".join(lines)


def _format_entry(entry: Entry, width: int) -> str:
    """Writes all texts of an entry, wrapped to a width."""
    title = "\n".join(wrap(f"{entry.code}: {translate(entry.title)}", width))
    cause = _wrap_paragraphs(entry.cause, width)
    cure = _wrap_paragraphs(entry.cure, width)
    return "\n\n".join([title, translate("Why"), cause, translate("What to do"), cure])


def _wrap_paragraphs(text: str, width: int) -> str:
    """Translates a text of an entry, indents it, and wraps its paragraphs to a width.

    Paragraphs of code, which are already indented, are not wrapped.
    """
    paragraphs = []
    for paragraph in catalogue.paragraphs_of(text):
        translated = catalogue.translate_paragraph(paragraph, translate)
        if not catalogue.is_code(paragraph):
            translated = "\n".join(wrap(translated, width - len(INDENT)))
        paragraphs.append(textwrap.indent(translated, INDENT))
    return "\n\n".join(paragraphs)

"""`lockstep explain`: what a code such as LS303 in a message means, and what to do about it."""

from __future__ import annotations

import shutil
import textwrap

import click

from lockstep.verify import catalogue
from lockstep.verify.catalogue import GROUPS, Entry

MAX_WIDTH = 100  # columns
INDENT = "  "


@click.command(name="explain", short_help="Explains a code such as LS303.")
@click.argument("words", metavar="[CODE | WORDS]...", nargs=-1)
@click.option("--markdown", is_flag=True, help="Print the whole catalogue as Markdown.")
def command(words: tuple[str, ...], markdown: bool) -> None:
    """Explains a code such as LS303, as printed with errors, warnings and verdicts.

    Words search the entries: `lockstep explain batchnorm`. Without arguments it lists all of them.
    """
    if markdown:
        click.echo(catalogue.as_markdown(), nl=False)
        return
    query = " ".join(words)
    entries = catalogue.find(query)
    if not entries:
        raise click.UsageError(f"Nothing in the catalogue is about {query!r}: see lockstep explain")
    # Without a terminal it is MAX_WIDTH; the number of lines, 24, is not used.
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    if len(entries) > 1:
        click.echo(_format_list(entries, width))
        click.echo(f"\nTo read one of them: lockstep explain {entries[0].code}")
        return
    entry = entries[0]
    code_without_letters = entry.code.removeprefix("LS")
    is_exact = query.upper() in (entry.code, code_without_letters)
    if _is_code(query) and not is_exact:  # a code that does not exist; `find` took a similar one
        click.echo(f"There is no {query}; the nearest is:")
    click.echo(_format_entry(entry, width))


def _is_code(query: str) -> bool:
    """Returns whether a query is a code, such as `LS303` or `303`, and not words."""
    return query.upper().removeprefix("LS").isdigit()


def _format_list(entries: list[Entry], width: int) -> str:
    """Returns a text with a line for each entry, under the headings of their groups."""
    lines: list[str] = []
    for group, heading in GROUPS.items():  # a group is the beginning of its codes, such as "LS3"
        entries_of_group = [entry for entry in entries if entry.code.startswith(group)]
        if not entries_of_group:
            continue
        if lines:
            lines.append("")  # between two groups
        lines.append(heading)
        for entry in entries_of_group:
            head = f"{INDENT}{entry.code}  "
            lines += textwrap.wrap(head + entry.title, width, subsequent_indent=" " * len(head))
    return "\n".join(lines)


def _format_entry(entry: Entry, width: int) -> str:
    """Returns all texts of an entry, wrapped to a width."""
    title = textwrap.fill(f"{entry.code}: {entry.title}", width)
    cause = _wrap_paragraphs(entry.cause, width)
    cure = _wrap_paragraphs(entry.cure, width)
    return "\n\n".join([title, "Why", cause, "What to do", cure])


def _wrap_paragraphs(text: str, width: int) -> str:
    """Returns a text, indented, with its paragraphs wrapped to a width.

    Paragraphs that are indented already are code, and are not wrapped.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        is_code = paragraph.startswith("    ")
        if not is_code:
            one_line = " ".join(paragraph.split())
            paragraph = textwrap.fill(one_line, width - len(INDENT), break_on_hyphens=False)
        paragraphs.append(textwrap.indent(paragraph, INDENT))
    return "\n\n".join(paragraphs)

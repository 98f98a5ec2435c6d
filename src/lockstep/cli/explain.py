"""Implements `lockstep explain`: says what a code such as LS303 in a message means, and what
to do.
"""

from __future__ import annotations

import shutil
import textwrap

import click

from lockstep.cli.explain_topics import EXIT_CODES, TOPICS, Topic, find_topic
from lockstep.columns import wrap
from lockstep.language import ENGLISH, LANGUAGES, language, translate
from lockstep.verify import catalogue
from lockstep.verify.catalogue import GROUPS, Entry

MAX_WIDTH = 100  # columns
INDENT = "  "
DOCS_FOLDER = "docs/"


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

    size_without_terminal = (MAX_WIDTH, 24)  # columns, and lines, which are not used
    width = min(shutil.get_terminal_size(size_without_terminal).columns, MAX_WIDTH)
    codes = catalogue.codes_in(query)
    is_exit_code = query in EXIT_CODES  # such as 75, which is not short for LS75
    if codes and not is_exit_code:
        click.echo("\n\n".join(_explain_code(code, width) for code in codes))
    else:
        click.echo(_explain_words(query, width))


def _explain_code(code: str, width: int) -> str:
    """Returns the entry of a code, or the list of entries whose codes begin with it.

    Args:
        code: such as LS303, or LS3 for a group.
        width: of the text, in columns.

    Raises:
        click.UsageError: there is no such code, and none that is similar.
    """
    entries = catalogue.find(code)
    if not entries:
        groups_of_codes = []
        for group in GROUPS:
            first, *others = [known for known in catalogue.ENTRIES if known.startswith(group)]
            groups_of_codes.append(f"{first}-{others[-1]}" if others else first)
        raise click.UsageError(
            f"There is no {code}. Codes are {', '.join(groups_of_codes)}; lockstep explain lists "
            "all of them"
        )

    if len(entries) == 1:
        text = _format_entry(entries[0], width)
    else:
        text = _format_entries(entries, width)

    # If no code begins with these characters, `find` returns the entries of similar codes.
    are_only_similar = not entries[0].code.startswith(code)
    if not are_only_similar:
        return text

    if len(entries) == 1:
        heading = translate(f"There is no {code}; the nearest is:")
    else:
        heading = translate(f"There is no {code}; the nearest are:")
    all_of_them = translate("To list all of them: lockstep explain")
    return f"{heading}\n{text}\n\n{all_of_them}"


def _explain_words(query: str, width: int) -> str:
    """Returns the topic and the entries that words are about; all entries if there are no words.

    Args:
        query: the words.
        width: of the text, in columns.

    Raises:
        click.UsageError: nothing is about these words.
    """
    topic = find_topic(query)
    # Words that name a topic are spelled correctly, so similar words are not searched for. An empty
    # query matches all entries.
    entries = catalogue.find(query, similar_spellings=topic is None)

    if topic is not None:
        parts = [_format_topic(topic, width)]
        if entries:
            parts.append(translate("Codes in whose texts these words stand:"))
            parts.append(_format_entries(entries, width))
        return "\n\n".join(parts)

    if not entries:
        names = ", ".join(each.name for each in TOPICS)
        raise click.UsageError(
            f"Nothing in the catalogue is about {query!r}. There are topics: {names}. lockstep "
            "explain lists all codes"
        )
    if len(entries) == 1:
        return _format_entry(entries[0], width)
    return _format_entries(entries, width)


def _format_topic(topic: Topic, width: int) -> str:
    """Writes a topic: its name, its text, and where to read more."""
    # "reference#settings" becomes "docs/reference.md#settings".
    page, number_sign, heading = topic.page.partition("#")
    extension = ".md" if language() == ENGLISH else ".zh.md"
    place = f"{DOCS_FOLDER}{page}{extension}{number_sign}{heading}"
    paragraphs = [translate(topic.text), translate(f"More about it: {place}")]
    wrapped = ["\n".join(wrap(paragraph, width - len(INDENT))) for paragraph in paragraphs]
    indented = textwrap.indent("\n\n".join(wrapped), INDENT)
    return f"{topic.name}\n\n{indented}"


def _format_entries(entries: list[Entry], width: int) -> str:
    """Writes the list of several entries, and how to read one of them."""
    text = translate(f"To read one of them: lockstep explain {entries[0].code}")
    return f"{_format_list(entries, width)}\n\n{text}"


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

"""`lockstep explain`: what a code in a message means, how it comes about, and what to write."""

from __future__ import annotations

import shutil
import textwrap

import click

from lockstep.verify import catalogue
from lockstep.verify.catalogue import GROUPS, Entry

_WIDEST = 100


@click.command(name="explain", short_help="Says what a code such as LS303 means.")
@click.argument("words", metavar="[CODE | WORDS]...", nargs=-1)
@click.option("--markdown", is_flag=True, help="Print the whole catalogue, as docs/findings.md.")
def command(words: tuple[str, ...], markdown: bool) -> None:
    """Explains a code such as LS303, which ends errors, warnings and verdicts.

    Words find entries by their text: `lockstep explain batchnorm`. Without any it lists all.
    """
    if markdown:
        click.echo(catalogue.as_markdown(), nl=False)
        return
    asked = " ".join(words)
    found = catalogue.find(asked)
    if not found:
        raise click.UsageError(f"Nothing in the catalogue is about {asked!r}: see lockstep explain")
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    if len(found) > 1:
        click.echo(_listed(found, width))
        click.echo(f"\nlockstep explain {found[0].code} says more of one of them.")
        return
    (entry,) = found
    if asked.upper() not in (entry.code, entry.code[2:]):
        click.echo(f"There is no {asked}; the nearest is:\n" if _is_code(asked) else "", nl=False)
    click.echo(_explained(entry, width))


def _is_code(asked: str) -> bool:
    return asked.upper().removeprefix("LS").isdigit()


def _listed(entries: list[Entry], width: int) -> str:
    lines: list[str] = []
    for group, heading in GROUPS.items():
        of_group = [entry for entry in entries if entry.code.startswith(group)]
        if of_group:
            lines += ["", heading] if lines else [heading]
        for entry in of_group:
            text, later = f"  {entry.code}  {entry.title}", " " * 9
            lines += textwrap.wrap(text, width, subsequent_indent=later)
    return "\n".join(lines)


def _explained(entry: Entry, width: int) -> str:
    title = textwrap.fill(f"{entry.code}: {entry.title}", width)
    cause, cure = _flowing(entry.cause, width), _flowing(entry.cure, width)
    return "\n\n".join([title, "Why", cause, "What to do", cure])


def _flowing(text: str, width: int) -> str:
    """The paragraphs wrapped anew, code as it is; all of it indented."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("    "):
            words = " ".join(paragraph.split())
            paragraph = textwrap.fill(words, width - 2, break_on_hyphens=False)
        paragraphs.append(textwrap.indent(paragraph, "  "))
    return "\n\n".join(paragraphs)

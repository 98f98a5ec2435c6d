"""The catalogue of findings: what can make N processes compute other numbers than one, by code.

An *entry* has a code, such as LS303, a title, a cause, and a cure. Every error or warning that
belongs to an entry carries its code. `lockstep explain CODE` prints the entry, and docs/findings.md
holds all of them. The texts are in `catalogue.toml`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

_TEXTS = tomllib.loads(files("lockstep.verify").joinpath("catalogue.toml").read_text("utf-8"))

# What the beginning of a code means, such as "LS1".
GROUPS: dict[str, str] = _TEXTS["groups"]

# The beginning of docs/findings.md.
_PAGE_HEAD = """\
# Findings of lockstep verify: LS codes

What makes several processes compute other numbers than one, by the codes that end Lockstep's
errors, its warnings and the verdicts of `lockstep verify`:

```text
  more:  [LS303: lockstep explain LS303]
```

`lockstep explain LS303` prints an entry, `lockstep explain batchnorm` searches, `lockstep explain`
lists all. This page is made by `lockstep explain --markdown`.

Warnings are `lockstep.errors.LockstepWarning`, printed once with the line of the script, by rank 0
or by the rank that alone knows of it;
`warnings.simplefilter("error", lockstep.errors.LockstepWarning)` turns them into errors.
"""


@dataclass(frozen=True)
class Entry:
    """One finding: what is seen, how it comes about, and what to write instead."""

    # "LS" and three digits; the first digit is that of the group.
    code: str
    # One line.
    title: str
    # What happens inside of torch, and why nobody notices it.
    cause: str
    # What to do. Lines of code are indented by four spaces.
    cure: str

    @property
    def text(self) -> str:
        """All texts of the entry, for searching."""
        return f"{self.code} {self.title} {self.cause} {self.cure}"


def _read_entries() -> dict[str, Entry]:
    """Returns the entries of `catalogue.toml` by code."""
    entries = {}
    for fields in _TEXTS["entries"]:
        stripped = {name: text.strip("\n") for name, text in fields.items()}
        entries[fields["code"]] = Entry(**stripped)
    return entries


# All entries by code, in the order of the catalogue.
ENTRIES = _read_entries()


def cure_lines(entry: Entry, *, by_lockstep: bool) -> list[str]:
    """Returns the lines of an entry's cure for one kind of script.

    A paragraph that begins with "With Lockstep" or "With plain DDP" is for one kind only. What
    follows belongs to it, up to the next such paragraph.

    Args:
        entry: the entry.
        by_lockstep: whether the script uses Lockstep.
    """
    has_advice_for_ddp = "With plain DDP" in entry.cure
    lines: list[str] = []
    is_for_this_script = True
    for paragraph in entry.cure.split("\n\n"):
        if paragraph.startswith("With Lockstep"):
            # Scripts without Lockstep get this advice too if the entry has no other.
            is_for_this_script = by_lockstep or not has_advice_for_ddp
        elif paragraph.startswith("With plain DDP"):
            is_for_this_script = not by_lockstep
        if is_for_this_script:
            lines += [*paragraph.splitlines(), ""]
    return lines[:-1]  # without the empty line after the last paragraph


def find(words: str) -> list[Entry]:
    """Returns the entries that are meant: by code, by words in their texts, or by similar words.

    Args:
        words: a code (`LS303`, `303`), the beginning of one (`LS3`), or words; empty for all
            entries, since a text without words fits every entry.
    """
    # One to three digits, with or without LS before them.
    code = re.fullmatch(r"(?:LS)?(\d{1,3})", words.strip(), re.IGNORECASE)
    if code is not None:
        return _find_by_code(f"LS{code[1]}")
    return _find_by_words(words.lower().split())


def _find_by_code(beginning: str) -> list[Entry]:
    """Returns the entries whose codes begin like this, or at most two with similar codes."""
    entries = [entry for entry in ENTRIES.values() if entry.code.startswith(beginning)]
    if entries:
        return entries
    return [ENTRIES[code] for code in _similar(beginning, ENTRIES)]


def _find_by_words(words: list[str]) -> list[Entry]:
    """Returns the entries that have all of the words, in lower case.

    The words are looked for in the titles first, then in the texts. If no entry has them, the texts
    are searched for words of the catalogue that are spelled similarly.
    """
    titles = {code: entry.title.lower() for code, entry in ENTRIES.items()}
    texts = {code: entry.text.lower() for code, entry in ENTRIES.items()}
    # Words of at least four letters, such as "batchnorm" and "no_sync".
    catalogue_words = set(re.findall(r"[a-z_]{4,}", "\n".join(texts.values())))
    # For each word, a list of its spellings. A text has the word if it has any of them.
    exact_spellings = [[word] for word in words]
    similar_spellings = [_similar(word, catalogue_words) for word in words]
    attempts = (
        (titles, exact_spellings),
        (texts, exact_spellings),
        (texts, similar_spellings),
    )
    for text_of_code, spellings_of_words in attempts:
        codes = []
        for code, text in text_of_code.items():
            if _has_all_words(text, spellings_of_words):
                codes.append(code)
        if codes:
            return [ENTRIES[code] for code in codes]
    return []


def _has_all_words(text: str, spellings_of_words: list[list[str]]) -> bool:
    """Returns whether a text has, for every word, at least one of its spellings."""
    for spellings in spellings_of_words:
        if not any(spelling in text for spelling in spellings):
            return False
    return True


def _similar(word: str, known_words: Iterable[str]) -> list[str]:
    """Returns at most two known words that are spelled like the word, the most similar first."""
    return difflib.get_close_matches(word, list(known_words), n=2, cutoff=0.75)


def as_markdown() -> str:
    """Returns the text of docs/findings.md."""
    page = _PAGE_HEAD
    for group, heading in GROUPS.items():
        page += f"\n## {heading}\n"
        for entry in ENTRIES.values():
            if not entry.code.startswith(group):  # a group is the beginning of its codes: "LS1"
                continue
            title = entry.title[0].upper() + entry.title[1:]
            page += f"\n### {entry.code}\n\n**{title}.**\n{entry.cause}\n"
            page += f"\n*What to do.* {entry.cure}\n"
    return page

"""The catalogue of findings: what can make N processes compute other numbers than one, by code.

Every error or warning that belongs to an entry carries its code. `lockstep explain CODE` prints the
entry, and docs/findings.md holds all of them. The texts are in `catalogue.toml`.
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
# Findings

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
    """Returns what to write instead, for scripts that use Lockstep or for others.

    A paragraph that begins with "With Lockstep" or "With plain DDP" is for one kind of script. What
    follows belongs to it, up to the next such paragraph.
    """
    lines: list[str] = []
    is_wanted = True
    for paragraph in entry.cure.split("\n\n"):
        if paragraph.startswith("With Lockstep"):
            # Scripts without Lockstep get this advice too if the entry has no other.
            is_wanted = by_lockstep or "With plain DDP" not in entry.cure
        elif paragraph.startswith("With plain DDP"):
            is_wanted = not by_lockstep
        if is_wanted:
            lines += [*paragraph.splitlines(), ""]
    return lines[:-1]


def find(words: str) -> list[Entry]:
    """Returns the entries that are meant: by code, by words in their texts, or by similar words.

    Args:
        words: a code (`LS303`, `303`), the beginning of one (`LS3`), or words; empty: all entries.
    """
    code = re.fullmatch(r"(?:LS)?(\d{1,3})", words.strip(), re.IGNORECASE)
    if code is not None:
        return _find_by_code(f"LS{code[1]}")
    return _find_by_words(words.lower().split())


def _find_by_code(beginning: str) -> list[Entry]:
    """Returns the entries whose codes begin like this, or those with the most similar codes."""
    entries = [entry for entry in ENTRIES.values() if entry.code.startswith(beginning)]
    if entries:
        return entries
    return [ENTRIES[code] for code in _similar(beginning, ENTRIES)]


def _find_by_words(words: list[str]) -> list[Entry]:
    """Returns the entries with all words in their titles, else in their texts.

    If there are none, words of the catalogue that are spelled similarly are looked for.
    """
    titles = {code: entry.title.lower() for code, entry in ENTRIES.items()}
    texts = {code: entry.text.lower() for code, entry in ENTRIES.items()}
    catalogue_words = set(re.findall(r"[a-z_]{4,}", "\n".join(texts.values())))
    # For each word, the spellings that are looked for.
    exact = [[word] for word in words]
    similar = [_similar(word, catalogue_words) for word in words]
    for text_of_code, spellings_of_words in ((titles, exact), (texts, exact), (texts, similar)):
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
    """Returns at most two of the known words that are spelled similarly."""
    return difflib.get_close_matches(word, list(known_words), n=2, cutoff=0.75)


def as_markdown() -> str:
    """Returns the text of docs/findings.md."""
    page = _PAGE_HEAD
    for group, heading in GROUPS.items():
        page += f"\n## {heading}\n"
        for entry in ENTRIES.values():
            if not entry.code.startswith(group):
                continue
            title = entry.title[0].upper() + entry.title[1:]
            page += f"\n### {entry.code}\n\n**{title}.**\n{entry.cause}\n"
            page += f"\n*What to do.* {entry.cure}\n"
    return page

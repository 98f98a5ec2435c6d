"""The catalogue of findings: what can make N processes compute other numbers than one, by code.

An error or a warning that belongs to an entry carries its code; `lockstep explain CODE` prints the
entry, and docs/findings.md holds all of them. The texts are in `catalogue.toml`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

_TEXTS = tomllib.loads(files("lockstep.verify").joinpath("catalogue.toml").read_text("utf-8"))

GROUPS: dict[str, str] = _TEXTS["groups"]
"""What the first digit of a code means."""


@dataclass(frozen=True)
class Entry:
    """One finding: what is seen, how it comes about, and what to write instead."""

    code: str
    """`LS` and three digits; the first is that of its group."""
    title: str
    """One line."""
    cause: str
    """What happens inside torch, and why nobody notices."""
    cure: str
    """What to do; lines of code are indented by four spaces."""


ENTRIES = {
    each["code"]: Entry(**{field: text.strip("\n") for field, text in each.items()})
    for each in _TEXTS["entries"]
}
"""All entries, by code and in its order."""


@dataclass(frozen=True)
class Cause:
    """What explains a divergence best."""

    code: str
    seen: tuple[str, ...]
    """What it was read from, a sentence each."""
    names: tuple[str, ...] = ()
    """Of the tensors that it is about, where they are not all that differ."""
    ratio: float | None = None
    """How many times as large as on one process, where it is one number for all."""
    title: str = ""
    """What is known, where that is less than what the entry's title says; empty: the entry's."""


def shown(things: Sequence[object]) -> str:
    """The first of several things, in words."""
    words = [str(t[-1]) if isinstance(t, tuple) else str(t) for t in things[:6]]
    return ", ".join(words) + (f" and {len(things) - 6} more" if things[6:] else "")


_WRAPPED = re.compile(r"^((_forward_module|_orig_mod|module|_fsdp_wrapped_module)\.)+")
"""What wrappers put before the names of what is inside of them."""


def plain(names: Iterable[str]) -> list[str]:
    """Of tensors as the script calls them: without their model, and what wraps it."""
    return [_WRAPPED.sub("", name.partition("/")[2] or name) for name in names]


def cure_lines(entry: Entry, *, by_lockstep: bool) -> list[str]:
    """What to write instead, for scripts that use Lockstep, or for others.

    A paragraph that begins with "With Lockstep" or "With plain DDP" is for these, up to the next
    one of that kind.
    """
    wanted, found = True, list[str]()
    for paragraph in entry.cure.split("\n\n"):
        if paragraph.startswith("With Lockstep"):
            wanted = by_lockstep or "With plain DDP" not in entry.cure
        elif paragraph.startswith("With plain DDP"):
            wanted = not by_lockstep
        if wanted:
            found += [*paragraph.splitlines(), ""]
    return found[:-1]


def of_runs(values: Sequence[object], *, alone: bool = True) -> str:
    """Values of one process and of each rank, in words; without `alone` of ranks only."""
    runs = [*["one process"][:alone], *(f"rank {n}" for n in range(len(values)))]
    by_value: dict[object, list[str]] = {}
    for run, value in zip(runs, values, strict=False):
        by_value.setdefault(value, []).append(run)
    return ", ".join(f"{value} on {' and '.join(each)}" for value, each in by_value.items())


_HEAD = """\
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


def find(words: str) -> list[Entry]:
    """The entries that are meant: by code, by words that occur in them, or the nearest ones.

    Args:
        words: a code (`LS303`, `303`), the beginning of one (`LS3`), or words; empty: all entries.
    """
    code = re.fullmatch(r"(?:LS)?(\d{1,3})", words.strip(), re.IGNORECASE)
    if code is not None:
        of_group = [e for e in ENTRIES.values() if e.code.startswith(f"LS{code[1]}")]
        return of_group or [ENTRIES[near] for near in _near(f"LS{code[1]}", ENTRIES)]
    titles = {code: entry.title.lower() for code, entry in ENTRIES.items()}
    texts = {code: _everything(entry).lower() for code, entry in ENTRIES.items()}
    known = set(re.findall(r"[a-z_]{4,}", "\n".join(texts.values())))
    wanted = words.lower().split()
    itself, nearest = [[word] for word in wanted], [_near(word, known) for word in wanted]
    for where, what in ((titles, itself), (texts, itself), (texts, nearest)):
        found = [c for c, text in where.items() if all(any(w in text for w in ws) for ws in what)]
        if found:
            break
    return [ENTRIES[code] for code in found]


def as_markdown() -> str:
    """docs/findings.md."""
    page = _HEAD
    for group, heading in GROUPS.items():
        page += f"\n## {heading}\n"
        for entry in (entry for entry in ENTRIES.values() if entry.code.startswith(group)):
            title = entry.title[0].upper() + entry.title[1:]
            page += f"\n### {entry.code}\n\n**{title}.**\n{entry.cause}\n"
            page += f"\n*What to do.* {entry.cure}\n"
    return page


def _everything(entry: Entry) -> str:
    return f"{entry.code} {entry.title} {entry.cause} {entry.cure}"


def _near(word: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(known), n=2, cutoff=0.75)

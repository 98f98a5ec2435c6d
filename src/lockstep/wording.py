"""Small helpers that turn lists, counts and rank numbers into text for messages.

`format_ranks([0, 1, 2, 5])` gives "ranks 0-2, 5"; `count_noun(3, "step")` gives "3 steps".
A *range* here is a run of consecutive numbers, written "3-5".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_RANGES_OF_RANKS = 24
"""`format_ranks` lists no more ranges than this."""
PLURAL_OF_VERB = {
    "is": "are", "was": "were", "has": "have", "waits": "wait", "holds": "hold", "works": "work",
    "comes": "come", "says": "say",
}  # fmt: skip
SIMILARITY_OF_SECOND = 0.6
"""A second word is suggested if it is at least this similar, from 0 to 1, ..."""
MAX_BEHIND_BEST = 0.15
"""... and at most this much less than the first."""


def join_first(names: Sequence[str], max_names: int = 8) -> str:
    """Joins the first names with commas, and adds ", ..." if there are more: "a, b, ..."."""
    text = ", ".join(names[:max_names])
    if len(names) > max_names:
        text += ", ..."
    return text


def join_and_count(names: Sequence[str], max_names: int) -> str:
    """Joins the first names with commas, and says how many others there are: "a, b and 3 more"."""
    text = ", ".join(names[:max_names])
    num_more = len(names) - max_names
    return f"{text} and {num_more} more" if num_more > 0 else text


def count_noun(number: int, noun: str) -> str:
    """Returns the number with the noun in its right form: "1 step", "3 steps", "2 processes"."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("s"):
        return f"{number} {noun}es"
    return f"{number} {noun}s"


def conjugate(text: str, count: int) -> str:
    """Adapts the verb that a text begins with to the count: `"has ended", 2` -> `"have ended"`."""
    if count == 1:
        return text
    verb, space, rest = text.partition(" ")
    plural = PLURAL_OF_VERB.get(verb, verb)  # other verbs, such as "may", have one form
    return f"{plural}{space}{rest}"


def with_article(noun: str) -> str:
    """Returns a noun or the name of a class with its article: "a Linear", "an Adam", "an SGD"."""
    is_read_letter_by_letter = noun[:2].isupper()
    vowels = "AEFHILMNORSX" if is_read_letter_by_letter else "AEIOUaeiou"
    sounds_like_you = noun.lower().startswith(("uni", "use", "ut"))
    if noun[:1] in vowels and not sounds_like_you:
        return f"an {noun}"
    return f"a {noun}"


def describe_type(thing: object) -> str:
    """Describes an object by its class, for messages: "a Linear", "an Adam", "None"."""
    if thing is None:
        return "None"
    return with_article(type(thing).__name__)


def did_you_mean(
    word: object, known_words: Iterable[str], otherwise: str, cutoff: float = 0.6
) -> str:
    """Returns "did you mean 'x'?" for the known word that is most similar to an unknown one.

    If another known word is nearly as similar, both are named: "dpp" may be 'dp' or 'ddp'.

    Args:
        word: what the user wrote.
        known_words: what could have been meant.
        otherwise: text to return if no known word is similar enough.
        cutoff: how similar two words must be, from 0 to 1 (see `difflib.get_close_matches`).
    """
    text = str(word)
    similar = difflib.get_close_matches(text, list(known_words), n=2, cutoff=cutoff)
    if not similar:
        return otherwise

    if len(similar) == 2:
        # `get_close_matches` does not return how similar the words are, from 0 to 1. A `cutoff` may
        # be low, so the second word must also be similar in itself.
        best, second = [difflib.SequenceMatcher(None, known, text).ratio() for known in similar]
        is_nearly_as_similar = best - second <= MAX_BEHIND_BEST
        if is_nearly_as_similar and second >= SIMILARITY_OF_SECOND:
            return f"did you mean {similar[0]!r} or {similar[1]!r}?"
    return f"did you mean {similar[0]!r}?"


def replace_unprintable(text: str) -> str:
    """Replaces characters that could move the cursor by "?", for text from foreign files."""
    return "".join(char if char.isprintable() else "?" for char in text)


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Collects the values of each key, in their order: `[(a, 1), (b, 2), (a, 3)]` gives
    `{a: [1, 3], b: [2]}`.
    """
    values_of_key: dict[K, list[V]] = {}
    for key, value in pairs:
        values_of_key.setdefault(key, []).append(value)
    return values_of_key


def format_ranks(ranks: Iterable[int]) -> str:
    """Names ranks: "rank 3", "ranks 0-2, 5", or "310 ranks (0, 2, 4, ...)" if there are many."""
    ordered = sorted(set(ranks))
    ranges = format_ranges(ordered, MAX_RANGES_OF_RANKS)
    if ranges.endswith("..."):  # not all of them are listed, so their number is given
        return f"{len(ordered)} ranks ({ranges})"
    if len(ordered) > 1:
        return f"ranks {ranges}"
    return f"rank {ranges}"


def format_ranges(numbers: Sequence[int], max_ranges: int | None = None) -> str:
    """Writes consecutive numbers as ranges: `[3, 4, 5, 9]` gives "3-5, 9".

    Args:
        numbers: the numbers, in the order in which they are written.
        max_ranges: how many ranges are written before ", ..."; None to write all.
    """
    ranges: list[tuple[int, int]] = []  # the first and the last number of each
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:  # it continues the last range
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))

    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if max_ranges is None:
        return ", ".join(texts)

    return join_first(texts, max_ranges)

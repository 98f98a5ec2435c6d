"""The language of what is printed for people: English or Chinese.

All texts are English wherever they are made, compared, recorded and sent: ranks on machines with
different locales agree, and programs find the same words everywhere. `translate` is called where a
text is shown to a person, and there alone. It looks the text up in the catalogue of messages
(`locale/`, made by `make messages`).

A *message* of the catalogue is a text or a *template*: `start {next_multiple} processes`. A text
that was made from a template is recognized by what the template has between its fields, and the
values of the fields are translated in turn. What is not in the catalogue stays English. So does a
text that can be read in two ways that say different things: no sentence is shown that may be
false. Call sites are not marked and keep no templates, as many texts reach the place where they
are shown as plain texts: in records, from other ranks and from other machines.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGE_VARIABLE = "LOCKSTEP_LANG"
LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The variables of the locale; the first that is set counts."""
ENGLISH = "en"
CHINESE = "zh"
LANGUAGES = (ENGLISH, CHINESE)
GRAMMATICAL_FIELDS = ("conjugate", "have", "plural", "pronoun", "them", "verb")
"""Fields of one word that only English needs: a translation may leave them out."""
NUMBER = r"-?\d(?:[\d.,]*\d)?(?:e[+-]?\d+)?"
RANGES = r"\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*(?:, \.\.\.)?"  # of `format_ranges`
RANKS = rf"ranks? {RANGES}|\d+ ranks \({RANGES}\)"  # of `format_ranks`
PERCENT = r"\d[\d.]*%"
ANY_TEXT = r"(?:(?!;(?:\s|\Z))[^\n])*"
"""What a field may be of which nothing else is known: no list with semicolons, and one line."""
FIELDS_OF_LISTS = (
    "descriptions",
    "found",
    "ranks_that_came",
    "reasons",
)
"""Fields whose value may be a list with semicolons."""
FIELDS_OF_NUMBERS = (
    "count",
    "early_calls",
    "epoch",
    "exit_code",
    "factor_of_one",
    "factor_of_ranks",
    "file_size",
    "format_version",
    "global_samples",
    "gradient",
    "gradient_in_float64",
    "header_length",
    "largest",
    "last_epoch",
    "last_step",
    "length_of_epoch",
    "listed_size",
    "local_rows",
    "local_size",
    "local_value",
    "loss",
    "losses",
    "max_bytes",
    "maximum",
    "mpi_rank",
    "mpi_size",
    "nbytes",
    "next_first_step",
    "next_multiple",
    "nproc",
    "number",
    "peak_gib",
    "peaks",
    "pid",
    "port",
    "position",
    "rank",
    "relative",
    "samples",
    "samples_of_rank",
    "seq",
    "shard_size",
    "size",
    "st_uid",
    "stage",
    "step",
    "steps",
    "steps_made",
    "storage_nbytes",
    "timeout",
    "times",
    "total",
    "tried",
    "virtual_rank",
    "virtual_rank_number",
)
FIELDS_OF_RANKS = (
    "alive",
    "clipping_ranks",
    "ended_ranks",
    "idle_ranks",
    "missing_ranks",
    "other_ranks",
    "ranks_not_shown",
    "ranks_without_write",
    "silent_ranks",
    "slow_ranks",
    "timed_out_ranks",
    "waiting",
    "who",
)
FIELDS_OF_CATALOGUED_WORDS = (
    "element_type",
    "killed",
    "kind",
    "kind_of_tensors",
    "subject",
    "text",
    "when",
)
"""Fields whose value may be a message of one word. In others such a word is a name of the user's:
a parameter may be called `gradients`."""
PATTERN_OF_FIELD = {
    **dict.fromkeys(FIELDS_OF_NUMBERS, NUMBER),
    **dict.fromkeys(FIELDS_OF_RANKS, RANKS),
    **dict.fromkeys(FIELDS_OF_LISTS, r"[^\n]*(?<!;)(?<!; )"),
    **dict.fromkeys(("fraction", "share_of_step", "share_of_time"), PERCENT),
    **dict.fromkeys(("dtype", "version", "version_here", "version_there"), r"\S+"),
    "context": r"(?:between|in|while) [^()\n]*",  # of a call: "in backward"
    **dict.fromkeys(("compared", "count_noun"), r"\d+ [\w ]+"),
    "carrier": "shared memory|the backend",
    "describe_peers": r"between [^\n]*",
    "does": rf"(?!on ){ANY_TEXT}",  # begins with a verb, and not as "on host a: ..."
    "element_type": r"[A-Za-z]\w*",
    "facts": r"(?:(?![,;] )[^\n])*",  # of a check of `lockstep doctor`
    "file": r"\S+",
    "format_physical_gpu": r"(?: \([^()]*\))?",
    "format_unused_accelerator": r"(?:; [^\n]*)?",
    **dict.fromkeys(("format_bytes", "gib"), r"\d[\d.,]* \w+"),
    "kind_of_tensors": r"parameters|optimizer state",
    "last_batch_text": r"(?:, [^\n]*)?",
    "thousands": r"\d[\d\s.,]*",
    **dict.fromkeys(("host", "hosts"), r"[^\s:,]+(?:, [^\s:,]+)*"),
    "lengths": r"\d[\dx +]*(?: more)?",  # of tensors: "25x4 + 3"
    "operation_name": r"[A-Za-z_]\w*",
    "outcomes": r"(?:true|false|not reached) on (?:(?!: )[^\n])*",  # of a test, by process
    "processes": r"(?:one process|rank \d+)(?: and rank \d+)*",
    "ranges": RANGES,
    "name_call": r"(?:(?![,;] | \(step )[^\n])*",  # of one call
    "single": r"(?:(?![,;] )[^\n])*",  # one entry of a list, and not several
    **dict.fromkeys(("factor", "ratio"), rf"{NUMBER}(?:/{NUMBER})?"),
    "table": r"(?:.|\n)*",
    "tuple": r"\([\d, ]*\)",
    **dict.fromkeys(GRAMMATICAL_FIELDS, r"\S*"),
}
"""What a field of this name may be. What is called `num_...` or `..._s` (seconds) is a number; any
other field may be `ANY_TEXT`."""

MAX_READINGS = 16
"""No more ways are looked for in which a text may have been made from one template."""

MAX_PARTS = 100
"""A line of which more parts are looked at stays as it is: the time would grow without a bound."""
MAX_PARTS_OF_MESSAGE = 4
"""So many parts between semicolons may be one message."""

SEPARATORS = {"\n": "\n", "; ": "；", ": ": "：", ", ": "，"}
"""What stands between the parts of a text that is no message as a whole, and what is put there in
Chinese."""

SEPARATORS_OF_MESSAGES = ("\n", "; ")
"""What stands between messages, each of which is read by itself."""

CHINESE_PUNCTUATION = "，。：；、（）"
"""It has its own space around it."""

RANKS_AND_AMOUNTS = re.compile(r"\branks?\b|\d[\d.,]* ?\w{1,3}\b")
"""What is the same in both languages: "rank", and numbers with their units."""

QUOTED = re.compile(r"""((?<!\w)'[^']*'(?!\w)|"[^"]*"|`[^`]*`)""")
"""A quoted name, which may have punctuation of its own. An apostrophe begins none."""

QUOTATION = re.compile(
    r"\S+:\d+: |File \"[^\"]*\", line \d|[\w.]*(Error|Exception|Exit|Interrupt|Warning): "
)
"""How a line of source begins, or what an exception of the script's says. They stay as they are."""

CATALOGUE_FILE = Path(__file__).parent / "locale" / "zh_CN" / "LC_MESSAGES" / "lockstep.po"


def language_of(environ: Mapping[str, str]) -> str | None:
    """Returns the language that environment variables ask for; None if there is no such language.

    LOCKSTEP_LANG is a language (`zh`) or a locale (`zh_CN.UTF-8`). Without it the locale counts,
    and any locale but a Chinese one means English.
    """
    chosen = environ.get(LANGUAGE_VARIABLE, "")
    if chosen:
        name = re.split(r"[-_.@]", chosen.lower())[0]
        if name in ("c", "posix"):
            return ENGLISH
        return name if name in LANGUAGES else None
    for variable in LOCALE_VARIABLES:
        if environ.get(variable):
            is_chinese = environ[variable].lower().startswith(CHINESE)
            return CHINESE if is_chinese else ENGLISH
    return ENGLISH


@functools.cache
def language() -> str:
    """Returns the language of this process; English if LOCKSTEP_LANG names no language of ours."""
    return language_of(os.environ) or ENGLISH


InLanguage = Callable[[str], str]
"""`in_english` for texts that programs read or that are sent, `translate` for those that people
read."""


def in_english(text: str) -> str:
    """Returns an English text as it is."""
    return text


def translate(text: str) -> str:
    """Returns an English text in the language of this process.

    Call it with what is shown to a person, as late as possible.
    """
    if language() == ENGLISH:
        return text
    return chinese_catalogue().translate(text)


def translate_names(text: str) -> str:
    """Returns a list of the user's names, such as "a, b and 3 more", in the language of this
    process.

    A name may be a word of the catalogue, such as `losses`, and is none of its messages.
    """
    if language() == ENGLISH:
        return text
    return chinese_catalogue().translate(text, may_be_word=False)


@functools.cache
def chinese_catalogue() -> Catalogue:
    """Returns the Chinese messages; they are read when a text is shown for the first time."""
    return Catalogue(read_po(CATALOGUE_FILE.read_text(encoding="utf-8")))


def read_po(text: str) -> dict[str, str]:
    """Reads the messages of a .po file of gettext.

    Of a merge that git could not do itself, the messages of both sides are read.

    Returns:
        The translations by their messages, without the header. A translation may be empty.
    """
    translations: dict[str, str] = {}
    message = ""
    is_translation = False
    for line in text.splitlines():
        if line.startswith("msgid "):
            message = _unquote(line.removeprefix("msgid "))
            is_translation = False
        elif line.startswith("msgstr "):
            translations[message] = _unquote(line.removeprefix("msgstr "))
            is_translation = True
        elif line.startswith('"') and is_translation:
            translations[message] += _unquote(line)
        elif line.startswith('"'):
            message += _unquote(line)
    translations.pop("", None)  # the header
    return translations


def _unquote(text: str) -> str:
    """Returns what stands in the quotes. They are those of C, and JSON's are read much faster than
    Python's.
    """
    value: str = json.loads(text)
    return value


Span = tuple[int, int]
"""Where a part of a text begins and ends."""


@dataclass(frozen=True)
class Translation:
    """What a text says in Chinese."""

    text: str
    kept: tuple[Span, ...]
    """Which parts of the English text it has as they were: names, and what is not known. "rank"
    and numbers with their units are the same in both languages, and do not count."""


def are_within(spans: Sequence[Span], outer_spans: Sequence[Span]) -> bool:
    """Returns True if each span, unless it is empty, is within one of others."""
    for begin, end in spans:
        if begin < end and not any(low <= begin and end <= high for low, high in outer_spans):
            return False
    return True


@dataclass(frozen=True, eq=False)
class Template:
    """A message with fields, and how a text is recognized that was made from it."""

    literals: tuple[str, ...]
    """What stands before, between and behind the fields."""
    fields: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    """What the value of each field may be."""
    longest_literal: str
    """A text without it was not made from this template."""
    num_literal_chars: int
    translation: str

    def readings_of(self, text: str) -> list[tuple[Span, ...]]:
        """Returns the ways in which a text may have been made from this template: where the values
        of its fields are.

        There are several if a value contains what the template has between two fields: "all ranks
        {do} for {reason}" is ambiguous where they "wait for each other for a batch".
        """
        if self.longest_literal not in text:
            return []
        if not text.startswith(self.literals[0]) or not text.endswith(self.literals[-1]):
            return []
        found = self._spans_from(text, 0, len(self.literals[0]), set())
        return list(itertools.islice(found, MAX_READINGS))

    def _spans_from(
        self, text: str, number: int, begin: int, dead_ends: set[tuple[int, int]]
    ) -> Iterator[tuple[Span, ...]]:
        """Yields the spans of a field and those behind it, if its value begins at a place.

        Args:
            text: what is read.
            number: of the field.
            begin: where its value begins.
            dead_ends: numbers and places from which nothing was found.
        """
        if (number, begin) in dead_ends:
            return
        literal = self.literals[number + 1]
        is_last = number == len(self.fields) - 1
        end = len(text) - len(literal) if is_last else text.find(literal, begin)
        was_found = False
        while begin <= end:
            if self._fits(number, text, begin, end):
                if is_last:
                    was_found = True
                    yield ((begin, end),)
                else:
                    next_begin = end + len(literal)
                    for spans in self._spans_from(text, number + 1, next_begin, dead_ends):
                        was_found = True
                        yield ((begin, end), *spans)
            if is_last:
                break
            end = text.find(literal, end + 1)
        if not was_found:
            dead_ends.add((number, begin))

    def _fits(self, number: int, text: str, begin: int, end: int) -> bool:
        """Returns True if the field of a number may have the value that stands in a span."""
        pattern = self.patterns[number]
        if pattern.pattern == ANY_TEXT:  # most are, and this is faster
            value = text[begin:end]
            return "; " not in value and "\n" not in value and not value.endswith(";")
        return pattern.fullmatch(text, begin, end) is not None


@dataclass(frozen=True)
class Known:
    """What is known while a text is translated."""

    words_are_names: bool
    """True for lists of the user's names, in which no word is one of the catalogue's."""
    translations: dict[str, Translation | None] = field(default_factory=dict)
    """Of texts that are one message, and None for those that are none."""


@dataclass(frozen=True)
class Reading:
    """One way in which a text may have been made."""

    template: Template
    spans: tuple[Span, ...]
    """Where the values of the template's fields are."""
    translation: Translation

    def translates_more_than(self, other: Reading) -> bool:
        """Returns True if this reading, of another template, translates all that the other one
        does, and more.
        """
        here = self.translation.kept
        there = other.translation.kept
        is_more = are_within(here, there) and not are_within(there, here)
        return is_more and self.template is not other.template

    def says_what_is_said_by(self, other: Reading) -> bool:
        """Returns True if this template, another one, has all the words of the other one.

        "{who} waits for {waited_s} s" has those of "{subject} for {waited_s} s".
        """
        return self.template is not other.template and are_within(self.spans, other.spans)


class Catalogue:
    """Messages and their translations."""

    def __init__(self, translations: Mapping[str, str]) -> None:
        """Takes the translations by message, both in the form of `str.format`."""
        self._texts: dict[str, str] = {}
        self._templates: list[Template] = []
        for message, translation in translations.items():
            if fields_of(message):
                self._templates.append(make_template(message, translation))
            else:
                self._texts[message.format()] = translation.format()
        self._templates.sort(key=lambda template: -template.num_literal_chars)

    def translate(self, text: str, *, may_be_word: bool = True) -> str:
        """Returns a text in the language of the catalogue, as far as the catalogue has it.

        Args:
            text: what is shown.
            may_be_word: whether one word alone, or in a list, is one of the catalogue's. It may be
                a name of the user's instead.
        """
        known = Known(words_are_names=not may_be_word)
        return self._translation_of(text, known, may_be_word=may_be_word).text

    def _translation_of(self, text: str, known: Known, *, may_be_word: bool) -> Translation:
        """Translates a text, and says which parts of it are as they were.

        Args:
            text: what is shown, or a part of it.
            known: the translations of other parts, which are not computed twice.
            may_be_word: see `translate`.
        """
        stripped = text.strip()
        is_word = not re.search(r"\s", stripped)
        is_quoted = QUOTED.fullmatch(stripped) is not None
        if QUOTATION.match(stripped) or is_quoted or (is_word and not may_be_word):
            return _as_it_is(text)
        if text != stripped:  # an empty value may stand at its beginning or end
            translation = self._translation_of_whole(text, known)
            if translation is not None:
                return translation
        translation = self._translation_of_whole(stripped, known)
        if translation is None:
            translation = self._translation_of_parts(stripped, known, may_be_word=may_be_word)
        begin = len(text) - len(text.lstrip())
        before = text[:begin]
        after = text[begin + len(stripped) :]
        return Translation(before + translation.text + after, _moved(translation.kept, begin))

    def _translation_of_whole(self, text: str, known: Known) -> Translation | None:
        """Translates a text that is one message; returns None if it is none.

        A text that can be read in several ways, which say different things, stays as it is.
        """
        if text in self._texts:
            return Translation(self._texts[text], ())
        if text not in known.translations:
            if len(known.translations) == MAX_PARTS:
                return _as_it_is(text)
            known.translations[text] = None
            known.translations[text] = self._translation_of_template(text, known)
        return known.translations[text]

    def _translation_of_template(self, text: str, known: Known) -> Translation | None:
        """Translates a text that was made from a template; returns None if it was not."""
        readings = []
        for template in self._templates:
            for spans in template.readings_of(text):
                translation = self._translation_of_reading(text, template, spans, known)
                readings.append(Reading(template, spans, translation))
        if len(known.translations) == MAX_PARTS:  # some are not translated as far as they could be
            return _as_it_is(text)
        finest = [
            reading
            for reading in readings
            if not any(other.translates_more_than(reading) for other in readings)
        ]
        most_specific: list[Reading] = []
        for reading in finest:  # those whose templates say more come first
            if not any(other.says_what_is_said_by(reading) for other in most_specific):
                most_specific.append(reading)
        chosen_templates = [reading.template for reading in most_specific]
        texts = {
            reading.translation.text.replace(" ", "")
            for reading in readings
            if reading.template in chosen_templates
        }
        if len(texts) > 1:
            return _as_it_is(text)
        return most_specific[0].translation if most_specific else None

    def _translation_of_reading(
        self, text: str, template: Template, spans: tuple[Span, ...], known: Known
    ) -> Translation:
        """Translates a text that is read in one way."""
        values = {}
        kept: list[Span] = []
        for field_name, (begin, end) in zip(template.fields, spans, strict=True):
            name = name_of_value(field_name)
            value = self._translation_of(
                text[begin:end],
                known,
                may_be_word=not known.words_are_names and name in FIELDS_OF_CATALOGUED_WORDS,
            )
            values[field_name] = value.text
            if name not in GRAMMATICAL_FIELDS:
                kept += _moved(value.kept, begin)
        return Translation(fill_in(template.translation, values), tuple(kept))

    def _translation_of_parts(self, text: str, known: Known, *, may_be_word: bool) -> Translation:
        """Translates the lines of a text or, in one line, what punctuation separates."""
        for separator in SEPARATORS:
            parts = _split_outside_quotes(text, separator)
            if len(parts) == 1:
                continue
            if separator in SEPARATORS_OF_MESSAGES:
                parts = self._join_messages(parts, separator)
            translations: list[Translation] = []
            for part in parts:
                is_last = len(translations) == len(parts) - 1
                mark = "" if is_last else separator.strip()
                known_to_part = known
                if separator in SEPARATORS_OF_MESSAGES:  # each is read by itself
                    known_to_part = Known(known.words_are_names)
                translations.append(
                    self._translation_of_part(part, mark, known_to_part, may_be_word=may_be_word)
                )
            return _joined(parts, _without_torn_values(parts, translations), separator)
        return _as_it_is(text)

    def _join_messages(self, parts: Sequence[str], separator: str) -> list[str]:
        """Returns the parts of a list of messages; a message may have the separator itself."""
        joined = []
        begin = 0
        while begin < len(parts):
            end = begin + 1
            for longer_end in range(begin + 2, min(begin + MAX_PARTS_OF_MESSAGE, len(parts)) + 1):
                if longer_end - begin < len(parts):  # the whole is no message
                    message = separator.join(parts[begin:longer_end])
                    if self._translation_of_whole(message, Known(words_are_names=True)) is not None:
                        end = longer_end
            joined.append(separator.join(parts[begin:end]))
            begin = end
        return joined

    def _translation_of_part(
        self, part: str, mark: str, known: Known, *, may_be_word: bool
    ) -> Translation:
        """Translates a part of a text. A message may end with the mark behind it, as "step 3:"."""
        if mark:
            translation = self._translation_of_whole(part + mark, known)
            translated_mark = SEPARATORS[f"{mark} "]
            # Otherwise a value would end with the mark, which separates it from what follows.
            if translation is not None and translation.text.endswith(translated_mark):
                return Translation(translation.text.removesuffix(translated_mark), translation.kept)
        return self._translation_of(part, known, may_be_word=may_be_word)


def _split_outside_quotes(text: str, separator: str) -> list[str]:
    """Splits a text at a separator, where it does not stand in quotation marks."""
    parts = [""]
    for piece in QUOTED.split(text):
        is_quoted = QUOTED.fullmatch(piece) is not None
        first, *others = [piece] if is_quoted else piece.split(separator)
        parts[-1] += first
        parts += others
    return parts


def _without_torn_values(
    parts: Sequence[str], translations: Sequence[Translation]
) -> list[Translation]:
    """Leaves parts untranslated that may have only a piece of a value.

    Where a part is not known, the separator before it may be in a value that ends the part before:
    "give a number from 1 to x; y" is no list.
    """
    checked = list(translations)
    neighbours = [(number, number + 1) for number in range(len(parts) - 1)]
    # A part that turns out to be torn may tear the next one in turn, in either direction.
    for here, there in [*neighbours, *reversed(neighbours)]:
        left = checked[here]
        right = checked[there]
        left_ends_in_value = any(end == len(parts[here]) for _, end in left.kept)
        right_begins_with_value = any(begin == 0 for begin, _ in right.kept)
        is_left_known = left.text != parts[here] or not left.kept
        is_right_known = right.text != parts[there] or not right.kept
        if is_left_known and left_ends_in_value and not is_right_known:
            checked[here] = _as_it_is(parts[here])
        if is_right_known and right_begins_with_value and not is_left_known:
            checked[there] = _as_it_is(parts[there])
    return checked


def _joined(
    parts: Sequence[str], translations: Sequence[Translation], separator: str
) -> Translation:
    """Joins the translations of the parts between which a separator stood.

    Parts side by side that are not translated may be one name with punctuation in it, and stay
    together as they are.
    """
    joined: list[tuple[str, Translation]] = []
    for part, translation in zip(parts, translations, strict=True):
        if joined and joined[-1][1].text == joined[-1][0] and translation.text == part:
            name = joined.pop()[0] + separator + part
            joined.append((name, _as_it_is(name)))
        else:
            joined.append((part, translation))
    kept: list[Span] = []
    begin = 0
    for part, translation in joined:
        kept += _moved(translation.kept, begin)
        begin += len(part) + len(separator)
    text = SEPARATORS[separator].join(translation.text for _, translation in joined)
    return Translation(text, tuple(kept))


def _as_it_is(text: str) -> Translation:
    """Returns a text that is not translated."""
    words = RANKS_AND_AMOUNTS.sub("", text)
    has_words = any(char.isalpha() for char in words)
    return Translation(text, ((0, len(text)),) if has_words else ())


def _moved(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Returns spans of a part as spans of the text in which it begins at a place."""
    return tuple((begin + by, end + by) for begin, end in spans)


def fields_of(message: str) -> list[str]:
    """Returns the names of a message's fields, in their order."""
    return [name for _, name, _, _ in string.Formatter().parse(message) if name is not None]


def name_of_value(field: str) -> str:
    """Returns the name by which a field is known: `number_2` is the second field `number`."""
    return re.sub(r"_\d+$", "", field)


def pattern_of_field(field: str) -> re.Pattern[str]:
    """Returns what a field may be."""
    name = name_of_value(field)
    is_number = name.startswith("num_") or name.endswith("_s")
    return re.compile(PATTERN_OF_FIELD.get(name, NUMBER if is_number else ANY_TEXT))


def fill_in(translation: str, values: Mapping[str, str]) -> str:
    """Returns a translation with its values, and with spaces as Chinese has them.

    A space stands between a Chinese character and a Latin letter or a digit, and none between two
    Chinese characters or beside Chinese punctuation: the translation cannot know which of them a
    value begins and ends with.
    """
    text = ""
    for literal, name, _, _ in string.Formatter().parse(translation):
        text = _join(text, literal)
        if name is not None:
            text = _join(text, values[name])
    return text


def _join(left: str, right: str) -> str:
    """Joins a text and a value, or a value and a text."""
    if not left.strip() or not right.strip():
        return left + right
    before = left.rstrip()[-1]
    after = right.lstrip()[0]
    has_space = left[-1] == " " or right[0] == " "
    meets_punctuation = before in CHINESE_PUNCTUATION or after in CHINESE_PUNCTUATION
    if meets_punctuation or (_is_chinese(before) and _is_chinese(after)):
        return left.rstrip(" ") + right.lstrip(" ")
    meets_latin = (_is_chinese(before) and (after.isascii() and after.isalnum())) or (
        _is_chinese(after) and (before.isascii() and before.isalnum())
    )
    return f"{left} {right}" if meets_latin and not has_space else left + right


def _is_chinese(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


def make_template(message: str, translation: str) -> Template:
    """Returns the template of a message with fields."""
    literals = [""]
    fields = []
    for literal, name, _, _ in string.Formatter().parse(message):
        literals[-1] += literal
        if name is not None:
            fields.append(name)
            literals.append("")
    return Template(
        literals=tuple(literals),
        fields=tuple(fields),
        patterns=tuple(pattern_of_field(name) for name in fields),
        longest_literal=max(literals, key=len),
        num_literal_chars=sum(len(literal) for literal in literals),
        translation=translation,
    )

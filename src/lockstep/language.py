"""Translates what is printed for people: into Chinese where the user asks for it.

A *message* of the catalogue (`locale/`, made by `make messages`) is a text or a *template* with
*fields*, such as `start {number} processes`. A text made from a template is recognized by what the
template has between its fields; the values of the fields are translated in turn. A *reading* is one
way to split a text into a template and values. What the catalogue does not have stays English, and
so does a text with readings that say different things: no sentence is shown that may be false.

All texts are English wherever they are made, compared, recorded and sent: ranks on machines with
different locales agree, and programs find the same words everywhere. `translate` is called only
where a text is shown to a person. Call sites are not marked and keep no templates, as many texts
reach the place where they are shown as plain texts: in records, from other ranks and from other
machines.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.columns import pad

LANGUAGE_VARIABLE = "LOCKSTEP_LANG"
LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The variables of the locale; the first that is set counts."""
ENGLISH = "en"
CHINESE = "zh"
LANGUAGES = (ENGLISH, CHINESE)
LANGUAGE_OF_WORD = {
    "cn": CHINESE,
    "chinese": CHINESE,
    "mandarin": CHINESE,
    "zhcn": CHINESE,
    "zhtw": CHINESE,
    "tw": CHINESE,
    "hk": CHINESE,
    "中文": CHINESE,
    "english": ENGLISH,
    "us": ENGLISH,
    "uk": ENGLISH,
    "gb": ENGLISH,
}
"""The language that a word means with which LOCKSTEP_LANG may be set by mistake."""
GRAMMATICAL_FIELDS = ("conjugate", "has_or_have", "it_or_them", "plural", "pronoun", "verb")
"""Fields of one word that only English needs: a translation may leave them out."""
NUMBER = r"-?(?:\d(?:[\d.,]*\d)?(?:e[+-]?\d+)?|inf)|nan"
RANGES = r"\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*(?:, \.\.\.)?"  # of `format_ranges`
RANKS = rf"ranks? {RANGES}|\d+ ranks \({RANGES}\)"  # of `format_ranks`
PERCENT = r"\d[\d.]*%"
CLASS_WITH_ARTICLE = r"an? \S+"  # of `with_article`
DEVICE_ON_HOST = r"(?:cpu|cuda|mps|npu|xpu)(?::\d+)? of [^\s:,]+"
ANY_TEXT = r"(?![,:])(?:(?!;(?:\s|\Z))[^\n])*"
"""What a field may be of which nothing else is known: no list with semicolons, one line, and not
what begins with a comma or a colon, which stand between parts of a text."""
FIELDS_OF_LISTS = (
    "advice_on_devices",
    "descriptions",
    "found",
    "meant",
    "ranks_that_came",
    "reasons",
    "signal_and_memory",
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
    "listed_size",
    "local_rows",
    "local_size",
    "local_value",
    "loss",
    "max_bytes",
    "max_senders_per_rank",
    "maximum",
    "micro_batches",
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
    "run_number",
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
    "label",
    "meaning",
    "noun",
    "part",
    "checkpoint_problem",
    "subject",
    "text",
    "when",
)
"""Fields whose value may be a message of one word. In others such a word is a name of the user's:
a parameter may be called `gradients`."""
FIELDS_OF_JOINED_ITEMS = (
    "collective_names",
    "describe_parts",
    "name_ops",
    "shapes",
    "user_calls",
)
"""Fields whose value is a list with `AND` between the items, such as "all_reduce and barrier"."""
AND = " and "
CHINESE_AND = " 和 "
FIELDS_OF_HEADLINES = ("headline_of_error",)
"""Fields whose value is the first line of an error of Lockstep's behind its class, such as
"UsageError: world.broadcast of a nest"."""
FIELDS_OF_TABLES = ("table",)
"""Fields whose value is a table: a line for each row, with two spaces or more between its cells."""
GAP_BETWEEN_CELLS = re.compile(r"(?<=\S)( {2,})(?=\S)")
PATTERN_OF_FIELD = {
    **dict.fromkeys(FIELDS_OF_NUMBERS, NUMBER),
    **dict.fromkeys(FIELDS_OF_RANKS, RANKS),
    **dict.fromkeys(FIELDS_OF_LISTS, r"[^\n]*(?<!;)(?<!; )"),
    **dict.fromkeys(("fraction", "share_of_step", "share_of_time"), PERCENT),
    **dict.fromkeys(("dtype", "version", "version_here", "version_there"), r"\S+"),
    "context": r"(?:between|in|while) [^()\n]*",  # of a call: "in backward"
    **dict.fromkeys(("both", "wrong"), r"rank \d+ \([^()\n]*\)(?: and rank \d+ \([^()\n]*\))*"),
    **dict.fromkeys(("compared", "count_noun"), r"\d+ [\w ]+"),
    "carrier": "shared memory|the backend",
    "clock": r"\d[\d:]*",  # "1:02:05"
    "checkpoint_name": r"step-\d+",
    "describe_peers": r"between [^\n]*",
    "describe_type": rf"None|{CLASS_WITH_ARTICLE}",
    "torch_device": r"(?:cpu|cuda|mps|npu|xpu)(?::\d+)?",
    # Begins with a verb, and not as "on host a: ..." or "has 'a', rank 1 has 'b'".
    "does": rf"(?!on |ha(?:s|ve) ['\"]){ANY_TEXT}",
    "element_type": r"[A-Za-z]\w*",
    "passed": r"step-\d+ \([^\n]*\)",  # "step-000000020 (incomplete), step-000000010 (...)"
    "percentages": rf"{PERCENT}(?: \+ {PERCENT})*",
    # Of `lockstep run`, without their dashes: "nproc, precision".
    "option_names": r"[a-z][a-z-]*(?:, [a-z][a-z-]*)*",
    "launch_file": r"[^\n;]*\.toml",
    "places": rf"{DEVICE_ON_HOST}(?: and {DEVICE_ON_HOST})*",
    "problem_of_value": (
        r"(?:contains itself|has a key that is \S+ \S+|is a numpy value of [^\n]*"
        r"|is a parameter without [^\n]*|is a tensor o[fn] [^\n]*"
        r"|claims \d+ bytes and has \d+"
        rf"|is {CLASS_WITH_ARTICLE}(?:, a kind of tensor [^\n]*)?)"
    ),
    "quoted_value": r"'[^']*'|\"[^\"]*\"|None|none|True|False|[\d.]+",
    "checkpoint_problem": r"(?:(?!\), step-\d)[^\n])*",  # of one checkpoint
    "file": r"\S+",
    "format_physical_gpu": r"(?: \([^()]*\))?",
    "format_unused_accelerator": r"(?:; [^\n]*)?",
    **dict.fromkeys(("format_bytes", "gib"), r"\d[\d.,]* \w+"),
    "headline_of_error": r"[\w.]+: [^\n]*",
    "server": r"rank \d+|the node that serves",
    **dict.fromkeys(("numbers_of_one", "numbers_of_ranks"), rf"(?:{NUMBER})(?:, (?:{NUMBER}))*"),
    "kind_of_tensors": r"parameters|optimizer state",
    **dict.fromkeys(("delay_option", "last_batch_text"), r"(?:, [^\n]*)?"),
    "list": r"\[[^\]\n]*\]",
    "max_steps": r"(?:at most )?\d+",
    **dict.fromkeys(("note", "still_watched"), r"(?:; [^\n]*)?"),
    "thousands": r"\d[\d\s.,]*",
    **dict.fromkeys(("host", "hosts"), r"[^\s:,]+(?:, [^\s:,]+)*"),
    "lengths": r"\d[\dx +]*(?: more)?",  # of tensors: "25x4 + 3"
    **dict.fromkeys(("operation_name", "optimizer_class"), r"[A-Za-z_]\w*"),
    "outcomes": r"(?:true|false|not reached) on (?:(?!: )[^\n])*",  # of a test, by process
    "processes": r"(?:one process|rank \d+)(?: and rank \d+)*",
    "ranges": RANGES,
    "name_call": r"(?:(?![,;] | \(step )[^\n])*",  # of one call
    "signal_name": r"SIG\w+",
    "single": r"(?:(?![,;] )[^\n])*",  # one entry of a list, and not several
    **dict.fromkeys(("factor", "ratio"), rf"(?:{NUMBER})(?:/(?:{NUMBER}))?"),
    "subject": r"(?:(?! on host |;(?:\s|\Z))[^\n])*",  # not a list of several on several hosts
    "table": r"(?:.|\n)*",
    "tuple": r"\([\d, ]*\)",
    # Of a class, perhaps with what an object of it holds: "a dict with 'epoch', 'losses'".
    "with_article": rf"{CLASS_WITH_ARTICLE}(?: (?:of|with) [^\n]*)?",
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

QUOTED_NAME = re.compile(r"""((?<!\w)'[^']*'(?!\w)|"[^"]*"|`[^`]*`)""")
"""A quoted name, which may have punctuation of its own. An apostrophe begins none."""

QUOTATION_BEGINS = re.compile(
    r"\S+:\d+: |File \"[^\"]*\", line \d|[\w.]*(Error|Exception|Exit|Interrupt|Warning): "
)
"""How a line of source begins, or what an exception of the script's says. They stay as they are."""

HEADING = "heading\x04"
"""How the first lines of errors begin among the messages that were read: gettext's *context* and
the character that it puts behind it. They have a catalogue of their own, as templates such as
"{action} with {objects}" would fit many other texts."""

FIELDS_WITH_ARTICLE = ("describe_type", "with_article")
"""Fields whose value is the name of a class behind an article: "a Linear"."""
ARTICLE = re.compile(r"\Aan? ")

AMOUNT = re.compile(r"\{number\} \w+")
"""A message such as "{number} steps", which is a value of many headings."""

CATALOGUE_FILE = Path(__file__).parent / "locale" / "zh_CN" / "LC_MESSAGES" / "lockstep.po"


def language_of(environ: Mapping[str, str]) -> str | None:
    """Returns the language that environment variables ask for.

    LOCKSTEP_LANG is a language (`zh`) or a locale (`zh_CN.UTF-8`). Without it the locale counts,
    and any locale but a Chinese one means English.

    Returns:
        None if LOCKSTEP_LANG names a language that messages are not written in, such as `fr`.
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


def translate_sentences(*sentences: str) -> str:
    """Returns English sentences one after the other, each in the language of this process."""
    separator = " " if language() == ENGLISH else ""
    return separator.join(translate(sentence) for sentence in sentences)


def add_colon(text: str) -> str:
    """Adds a colon to a text in the language of this process."""
    return f"{text}:" if language() == ENGLISH else f"{text}："


def translate_names(text: str) -> str:
    """Returns a list of the user's names, such as "a, b and 3 more", in the language of this
    process.

    A name may be a word of the catalogue, such as `losses`, and is none of its messages.
    """
    if language() == ENGLISH:
        return text
    return chinese_catalogue().translate(text, single_words_are_names=True)


def translate_heading(text: str) -> str:
    """Returns the first line of an error in the language of this process.

    Unlike other texts it is translated as a whole or not at all: most of it may be code.
    """
    if language() == ENGLISH:
        return text
    return chinese_headings().translate_whole(text)


def heading_in_language(text: str, in_language: InLanguage) -> str:
    """Returns the first line of an error by `translate_heading`, or as it is for `in_english`."""
    return text if in_language is in_english else translate_heading(text)


def comma_in_language(in_language: InLanguage) -> str:
    """Returns a comma with the space behind it, which a Chinese comma has in itself."""
    is_english = in_language is in_english or language() == ENGLISH
    return ", " if is_english else SEPARATORS[", "]


@functools.cache
def chinese_catalogue() -> Catalogue:
    """Returns the Chinese messages; they are read when a text is shown for the first time."""
    translations = {}
    for message, translation in _all_translations().items():
        if not message.startswith(HEADING):
            translations[message] = translation
    return Catalogue(translations)


@functools.cache
def chinese_headings() -> Catalogue:
    """Returns the Chinese first lines of errors, and the amounts that are values in them."""
    translations = {}
    for message, translation in _all_translations().items():
        if message.startswith(HEADING) or AMOUNT.fullmatch(message):
            translations[message.removeprefix(HEADING)] = translation
    return Catalogue(translations)


@functools.cache
def _all_translations() -> dict[str, str]:
    return read_po(CATALOGUE_FILE.read_text(encoding="utf-8"))


def read_po(text: str) -> dict[str, str]:
    """Reads the messages of a .po file of gettext.

    These lines give `{"all ranks have ended": "所有 rank 均已结束"}`:

        msgid "all ranks "
        "have ended"
        msgstr "所有 rank 均已结束"

    The first lines of errors have another line above, `msgctxt "heading"`. Their messages begin
    with `HEADING` in the result. All other lines are skipped. Conflict markers of git's are among
    them (`<<<<<<<`), so that the messages of both sides are read.

    Returns:
        The translations by their messages, without the header. A translation may be empty.
    """
    translations: dict[str, str] = {}
    context = ""
    message = ""
    is_translation = False
    for line in text.splitlines():
        if line.startswith("msgctxt "):  # the only context that is in use
            context = HEADING
        elif line.startswith("msgid "):
            message = context + _unquote(line.removeprefix("msgid "))
            context = ""
            is_translation = False
        elif line.startswith("msgstr "):
            translations[message] = _unquote(line.removeprefix("msgstr "))
            is_translation = True
        elif line.startswith('"') and is_translation:  # continues a msgstr
            translations[message] += _unquote(line)
        elif line.startswith('"'):  # continues a msgid
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
    """A text in Chinese, and which parts of it are still English."""

    text: str
    untranslated: tuple[Span, ...]
    """The spans of the English text that the translation has as they were: names, and what the
    catalogue does not have. "rank" and numbers with their units are the same in both languages and
    are not listed."""

    def leaves_english_at(self, position: int) -> bool:
        """Returns True if an untranslated part of the English text touches a position in it."""
        return any(begin <= position <= end for begin, end in self.untranslated)


def are_within(spans: Sequence[Span], outer_spans: Sequence[Span]) -> bool:
    """Returns True if each of `spans` that is not empty lies within `outer_spans`.

    Outer spans that touch, as those of two fields without a text between them, count as one.
    """
    joined = _join_touching(outer_spans)
    for begin, end in spans:
        is_empty = begin >= end
        is_within = any(low <= begin and end <= high for low, high in joined)
        if not (is_empty or is_within):
            return False
    return True


def _join_touching(spans: Sequence[Span]) -> list[Span]:
    """Joins spans that touch or overlap: (0, 2), (2, 5) and (7, 8) become (0, 5) and (7, 8)."""
    joined: list[Span] = []
    last_end = -1
    for begin, end in sorted(spans):
        touches_last = begin <= last_end
        if touches_last:
            begin, _ = joined.pop()
            end = max(end, last_end)
        joined.append((begin, end))
        last_end = end
    return joined


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

    def match(self, text: str) -> list[tuple[Span, ...]]:
        """Returns all ways in which a text may have been made from this template.

        Each way is a tuple with the span of each field's value. There are several if a value
        contains what the template has between two fields: "all ranks {do} for {reason}" is
        ambiguous where the ranks "wait for each other for a batch".
        """
        if self.longest_literal not in text:
            return []
        if not text.startswith(self.literals[0]) or not text.endswith(self.literals[-1]):
            return []
        matches = self._match_fields_from(text, 0, len(self.literals[0]), set())
        return list(itertools.islice(matches, MAX_READINGS))

    def _match_fields_from(
        self, text: str, field_number: int, begin: int, dead_ends: set[tuple[int, int]]
    ) -> Iterator[tuple[Span, ...]]:
        """Yields the spans of a field's value and of all later values, in every way that fits.

        This is a backtracking search. "{a} for {b}" in the text "x for y for z": the value of `a`
        ends at the first " for " or at the second one, so the ways are ("x", "y for z") and
        ("x for y", "z").

        Args:
            text: text that is matched with the template.
            field_number: number of the first field to match.
            begin: where the value of this field begins.
            dead_ends: pairs of `field_number` and `begin` from which no way leads to the end of the
                text. They are not tried again.
        """
        if field_number == len(self.fields):  # all fields have a value
            yield ()
            return
        if (field_number, begin) in dead_ends:
            return

        was_found = False
        for end in self._possible_ends(text, field_number, begin):
            begin_of_next_field = end + len(self._literal_behind(field_number))
            for later_spans in self._match_fields_from(
                text, field_number + 1, begin_of_next_field, dead_ends
            ):
                was_found = True
                yield ((begin, end), *later_spans)

        if not was_found:
            dead_ends.add((field_number, begin))

    def _literal_behind(self, field_number: int) -> str:
        """Returns what the template has behind a field: literal 0 stands before field 0."""
        return self.literals[field_number + 1]

    def _possible_ends(self, text: str, field_number: int, begin: int) -> Iterator[int]:
        """Yields where the value of a field may end: where the literal behind the field begins.

        The template "start {num} ranks" has the literals "start " and " ranks", so the value of
        `num` ends where " ranks" begins.
        """
        literal_behind = self._literal_behind(field_number)
        is_last_field = field_number == len(self.fields) - 1
        if is_last_field:
            # The text ends with the literal, so the value has only one possible end.
            end = len(text) - len(literal_behind)
            if begin <= end and self._fits(field_number, text, begin, end):
                yield end
            return

        # The value may end at any occurrence of the literal.
        end = text.find(literal_behind, begin)
        while end != -1:  # -1: it does not occur again
            if self._fits(field_number, text, begin, end):
                yield end
            end = text.find(literal_behind, end + 1)

    def _fits(self, field_number: int, text: str, begin: int, end: int) -> bool:
        """Returns True if `text[begin:end]` may be the value of a field.

        The value of most fields may be any text that does not reach over the border between two
        messages or lines: "a; b" and "a;" are no values, nor is ": b".
        """
        pattern = self.patterns[field_number]
        if pattern.pattern == ANY_TEXT:  # the pattern of most fields; this is faster than a match
            value = text[begin:end]
            begins_with_separator = value.startswith((",", ":"))
            ends_with_separator = value.endswith(";")
            has_separator = "; " in value or "\n" in value
            return not (begins_with_separator or ends_with_separator or has_separator)
        return pattern.fullmatch(text, begin, end) is not None


@dataclass(frozen=True)
class Cache:
    """The translations that were found while one text is translated: a part of it that occurs
    several times is translated once.
    """

    single_words_are_names: bool
    """True for a list of the user's names: in "losses, hooks" no single word is translated, even if
    the catalogue has that word."""
    translations: dict[str, Translation | None] = field(default_factory=dict)
    """The translation of each part that is one message; None for a part that is no message."""
    in_progress: set[str] = field(default_factory=set)
    """The parts that are being translated: values of values are, before the whole text is."""

    @property
    def is_full(self) -> bool:
        """True if `MAX_PARTS` parts were translated, after which no further one is."""
        return len(self.translations) + len(self.in_progress) == MAX_PARTS

    def of_next_message(self) -> Cache:
        """Returns an empty cache: the limit of `is_full` holds for each message of a text."""
        return Cache(self.single_words_are_names)


@dataclass(frozen=True)
class Reading:
    """One way to read a text as a template with values in its fields, and what it then says in
    Chinese.
    """

    template: Template
    spans: tuple[Span, ...]
    """The places in the text of the values of the template's fields."""
    translation: Translation

    def translates_a_value(self, text: str) -> bool:
        """Returns True if the value of a field, or a part of it, is not as it was in the text."""
        values = {}
        for field_name, (begin, end) in zip(self.template.fields, self.spans, strict=True):
            values[field_name] = text[begin:end]
        return fill_in(self.template.translation, values) != self.translation.text

    def translates_more_than(self, other: Reading) -> bool:
        """Returns True if this reading, of another template, translates all that the other one
        does, and more.
        """
        untranslated_here = self.translation.untranslated
        untranslated_there = other.translation.untranslated
        is_more = are_within(untranslated_here, untranslated_there) and not are_within(
            untranslated_there, untranslated_here
        )
        return is_more and self.template is not other.template

    def is_more_specific_than(self, other: Reading) -> bool:
        """Returns True if the template of this reading has all the words that the other reading's
        template has, and more.

        "{who} waits for {waited_s} s" has all the words of "{subject} for {waited_s} s". Then the
        values of the first are within values of the second.
        """
        has_more_words = are_within(self.spans, other.spans) and not are_within(
            other.spans, self.spans
        )
        return self.template is not other.template and has_more_words


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

    def translate(self, text: str, *, single_words_are_names: bool = False) -> str:
        """Returns a text in the language of the catalogue, as far as the catalogue has it.

        Args:
            text: English text that is shown.
            single_words_are_names: True if a single word, alone or in a list, is a name of the
                user's and stays English.
        """
        cache = Cache(single_words_are_names)
        translation = self._translate_text(
            text, cache, single_words_are_names=single_words_are_names
        )
        return translation.text

    def translate_whole(self, text: str) -> str:
        """Returns the translation of a text that is one message; any other stays English."""
        cache = Cache(single_words_are_names=False)
        translation = self._translate_message(text, cache)
        return text if translation is None else translation.text

    def _translate_text(
        self, text: str, cache: Cache, *, single_words_are_names: bool
    ) -> Translation:
        """Translates a text as one message or, if it is none, part by part.

        Args:
            text: text that is shown, or a part of such a text.
            cache: translations found so far.
            single_words_are_names: True if a single word is a name of the user's and stays English.
        """
        stripped = text.strip()
        if _stays_english(stripped, single_words_are_names=single_words_are_names):
            return _leave_in_english(text)

        # A message can begin or end with a space if a value at its end is empty: "{note} steps"
        # with an empty note is " steps".
        has_spaces_at_ends = text != stripped
        if has_spaces_at_ends:
            translation = self._translate_message(text, cache)
            if translation is not None:
                return translation

        translation = self._translate_message(stripped, cache)
        if translation is None:
            translation = self._translate_parts(
                stripped, cache, single_words_are_names=single_words_are_names
            )
        return _with_spaces_of(text, translation)

    def _translate_message(self, text: str, cache: Cache) -> Translation | None:
        """Translates a text that is one message; returns None if it is none.

        The text stays English if it can be read in several ways that say different things, or if
        the cache is full, so that the time of a long text is bounded.
        """
        if text in self._texts:  # a message without fields
            return Translation(self._texts[text], ())
        if text in cache.translations:
            return cache.translations[text]
        if text in cache.in_progress:
            # This is a call from within the translation of the same text. For example, the template
            # "{name}{note}" reads "ready" as the name "ready" with an empty note, and the value of
            # `name` is to be translated: "ready" again.
            return None
        if cache.is_full:
            return _leave_in_english(text)

        cache.in_progress.add(text)
        translation = self._translate_by_templates(text, cache)
        cache.in_progress.remove(text)
        cache.translations[text] = translation
        return translation

    def _translate_by_templates(self, text: str, cache: Cache) -> Translation | None:
        """Translates a text that was made from a template; returns None if it was not.

        A reading is a template with the values of its fields. There may be several. With the
        template "all ranks {do} for {reason}", the text "all ranks wait for each other for a batch"
        has the readings ("wait", "each other for a batch") and ("wait for each other", "a batch").
        Nothing shows which of them was meant, so the text is translated only if all readings with
        the best templates say the same in Chinese. Otherwise it stays English.
        """
        readings = self._find_readings(text, cache)

        # With a full cache, some values were left in English for that reason alone, so the readings
        # cannot be compared.
        if cache.is_full:
            return _leave_in_english(text)
        if not readings:
            return None

        best_readings = _best_readings(readings)
        best_templates = [reading.template for reading in best_readings]
        plausible_readings = [each for each in readings if each.template in best_templates]
        if _certainly_say_the_same(plausible_readings, text):
            return best_readings[0].translation
        return _leave_in_english(text)

    def _find_readings(self, text: str, cache: Cache) -> list[Reading]:
        """Returns up to `MAX_READINGS` readings of a text with each template.

        The templates are sorted, so readings whose templates have more words come first.
        """
        readings: list[Reading] = []
        for template in self._templates:
            for spans in template.match(text):
                translation = self._translate_reading(text, template, spans, cache)
                readings.append(Reading(template, spans, translation))
        return readings

    def _translate_reading(
        self, text: str, template: Template, spans: tuple[Span, ...], cache: Cache
    ) -> Translation:
        """Translates the values of a template's fields and fills them into its translation.

        For the template "{who} {have} ended" and the text "rank 1 has ended", the values are
        "rank 1" and "has". The result also says where in the text a value stayed English.

        Args:
            text: text that was made from the template.
            template: template that the text is read with.
            spans: where in the text the value of each field is.
            cache: translations found so far.
        """
        values = {}
        untranslated: list[Span] = []
        for field_name, span in zip(template.fields, spans, strict=True):
            name = name_of_value(field_name)
            begin, end = _span_of_value(name, text, span)
            value = self._translate_value(name, text[begin:end], cache)
            values[field_name] = value.text

            # The Chinese text has no word for "has" or "have", so nothing of it stays English.
            is_left_out = name in GRAMMATICAL_FIELDS
            if not is_left_out:
                untranslated += _shift_spans(value.untranslated, begin)

        return Translation(fill_in(template.translation, values), tuple(untranslated))

    def _translate_value(self, name: str, text: str, cache: Cache) -> Translation:
        """Translates the value of a template's field.

        Args:
            name: name of the field (`name_of_value`).
            text: the value, without an article.
            cache: translations found so far.
        """
        if name in FIELDS_WITH_ARTICLE:
            return _leave_in_english(text)  # the name of a class, which may be called `batch`
        if name in FIELDS_OF_TABLES:
            return self._translate_table(text, cache)
        if name in FIELDS_OF_HEADLINES:
            return _translate_headline(text)

        # A value of a single word is usually a name of the user's: a parameter may be called
        # `gradients`. Only a few fields hold single words that are to be translated, and even
        # these stay English if the caller of `translate` has asked for that.
        words_are_names = cache.single_words_are_names or name not in FIELDS_OF_CATALOGUED_WORDS
        if name in FIELDS_OF_JOINED_ITEMS:
            return self._translate_items(text, cache, single_words_are_names=words_are_names)
        return self._translate_text(text, cache, single_words_are_names=words_are_names)

    def _translate_items(
        self, text: str, cache: Cache, *, single_words_are_names: bool
    ) -> Translation:
        """Translates each item of a list: "a collective and barrier" gives "集合通信和 barrier".

        Args:
            text: the items, with `AND` between them.
            cache: translations found so far.
            single_words_are_names: True if an item that is a single word stays English.
        """
        items = text.split(AND)
        translations = []
        for item in items:
            translation = self._translate_text(
                item, cache, single_words_are_names=single_words_are_names
            )
            translations.append(translation)

        chinese = translations[0].text
        for translation in translations[1:]:
            chinese = _join_with_chinese_spacing(chinese, CHINESE_AND)
            chinese = _join_with_chinese_spacing(chinese, translation.text)
        untranslated = _untranslated_of_whole(items, translations, separator=AND)
        return Translation(chinese, untranslated)

    def _translate_table(self, text: str, cache: Cache) -> Translation:
        """Translates the rows of a table (`FIELDS_OF_TABLES`)."""
        rows = text.split("\n")
        translations = [self._translate_row(row, cache) for row in rows]
        chinese = "\n".join(translation.text for translation in translations)
        untranslated = _untranslated_of_whole(rows, translations, separator="\n")
        return Translation(chinese, untranslated)

    def _translate_row(self, row: str, cache: Cache) -> Translation:
        """Translates each cell of a row of a table, and lets it begin in the same column.

        The first cell says what the row is about, such as "missing", so a single word in it is
        translated, unless the caller of `translate` says that single words are names of the user's.
        A single word in another cell always is such a name.
        """
        chinese = ""
        untranslated: list[Span] = []
        begin = 0
        # The pattern has a group, so `split` returns the gaps too: cell, gap, cell, ...
        for number, piece in enumerate(GAP_BETWEEN_CELLS.split(row)):
            end = begin + len(piece)
            is_gap = number % 2 == 1
            if is_gap:
                # Up to the column at which the next English cell begins; at least two spaces.
                chinese = pad(f"{chinese}  ", end)
            else:
                is_first_cell = number == 0
                translation = self._translate_text(
                    piece,
                    cache,
                    single_words_are_names=cache.single_words_are_names or not is_first_cell,
                )
                chinese += translation.text
                untranslated += _shift_spans(translation.untranslated, begin)
            begin = end
        return Translation(chinese, tuple(untranslated))

    def _translate_parts(
        self, text: str, cache: Cache, *, single_words_are_names: bool
    ) -> Translation:
        """Splits a text that is no message at a separator, and translates each part.

        The text is split at the first of `SEPARATORS` that it has. A part that is no message either
        is split in turn, by `_translate_text`. For example, "step 3: rank 1 waits; rank 2 has
        ended" is first split at "; ", which separates messages, and the first part then at ": ",
        which separates parts of a message.

        Args:
            text: text that is no message as a whole.
            cache: translations found so far.
            single_words_are_names: True if a part that is a single word stays English.
        """
        separator = _first_separator(text)
        if separator is None:
            return _leave_in_english(text)

        parts = _split_outside_quotes(text, separator)
        separates_messages = separator in SEPARATORS_OF_MESSAGES
        if separates_messages:
            parts = self._rejoin_messages(parts, separator)

        translations: list[Translation] = []
        for number, part in enumerate(parts, start=1):
            if separates_messages:
                cache = cache.of_next_message()

            # The mark, such as ":", may belong to the message: "step 3:" is one.
            is_last = number == len(parts)
            mark_behind = "" if is_last else separator.strip()
            translation = self._translate_part(
                part, mark_behind, cache, single_words_are_names=single_words_are_names
            )
            translations.append(translation)

        # The split may be wrong: "x; y" may be one value in "give a number from 1 to x; y".
        translations = _keep_doubtful_parts_english(parts, translations)
        return _join_parts(parts, translations, separator)

    def _rejoin_messages(self, parts: Sequence[str], separator: str) -> list[str]:
        """Joins parts again that are one message, because the message itself has the separator.

        "a", "b" and "c" become "a; b" and "c" if "a; b" is a message. The longest message that
        begins with a part is taken. A part with which no longer message begins stays alone.

        Args:
            parts: all parts of a text. All of them together are no message.
            separator: the separator between them.
        """
        messages: list[str] = []
        begin = 0
        while begin < len(parts):
            end = self._end_of_longest_message(parts, begin, separator)
            messages.append(separator.join(parts[begin:end]))
            begin = end
        return messages

    def _end_of_longest_message(self, parts: Sequence[str], begin: int, separator: str) -> int:
        """Returns the `end` of the longest message that can be joined from `parts[begin:end]`.

        For the parts "a", "b" and "c" and `begin` 0, it is 2 if "a; b" is a message. If no two or
        more parts are a message, it is `begin + 1`, so that "a" stays by itself.
        """
        end_of_part = begin + 1
        largest_end = min(begin + MAX_PARTS_OF_MESSAGE, len(parts))
        if begin == 0:
            # All parts together are no message, or the text would not have been split.
            largest_end = min(largest_end, len(parts) - 1)

        for end in range(largest_end, end_of_part, -1):  # the longest first
            candidate = separator.join(parts[begin:end])
            # The translation itself is not used, so it need not translate words within the message.
            translation = self._translate_message(candidate, Cache(single_words_are_names=True))
            is_message = translation is not None
            if is_message:
                return end

        return end_of_part

    def _translate_part(
        self, part: str, mark_behind: str, cache: Cache, *, single_words_are_names: bool
    ) -> Translation:
        """Translates a part of a text that was split at a separator.

        The mark behind the part may belong to its message: "step 3: done" was split into "step 3"
        and "done", and the catalogue has "step {step}:", but no "step {step}". So the part is first
        translated with its mark, and that counts if the translation ends with the Chinese mark:

            "step 3:"    becomes "第 3 步：": the mark belongs to the message
            "see a.py:"  becomes "见 a.py:" by the message "see {file}": it does not

        Args:
            part: the part, without the separator behind it.
            mark_behind: the separator behind the part without its space, such as ":"; empty for the
                last part.
            cache: translations found so far.
            single_words_are_names: True if a single word is a name of the user's and stays English.
        """
        if mark_behind:
            translation = self._translate_message(part + mark_behind, cache)
            if translation is not None:
                chinese_mark = SEPARATORS[f"{mark_behind} "]
                mark_belongs_to_message = translation.text.endswith(chinese_mark)
                if mark_belongs_to_message:
                    without_mark = translation.text.removesuffix(chinese_mark)  # the caller adds it
                    return Translation(without_mark, translation.untranslated)

        return self._translate_text(part, cache, single_words_are_names=single_words_are_names)


def _translate_headline(text: str) -> Translation:
    """Translates the first line of an error, but not its class: "UsageError: world.sum(x)"."""
    error_class, colon, heading = text.partition(": ")
    chinese = chinese_headings().translate_whole(heading)
    is_translated = chinese != heading
    end_of_english = len(error_class + colon) if is_translated else len(text)
    return Translation(f"{error_class}{colon}{chinese}", ((0, end_of_english),))


def _stays_english(text: str, *, single_words_are_names: bool) -> bool:
    """Returns True for a text that is never translated.

    These are the words of a script or an exception (`ValueError: bad input`), a quoted name
    (`'encoder.weight'`), and a name of the user's (`losses`).

    Args:
        text: text without spaces at its ends.
        single_words_are_names: True if a single word is a name of the user's.
    """
    if QUOTATION_BEGINS.match(text) is not None:
        return True
    if QUOTED_NAME.fullmatch(text) is not None:
        return True
    is_single_word = re.search(r"\s", text) is None
    return is_single_word and single_words_are_names


def _certainly_say_the_same(readings: Sequence[Reading], text: str) -> bool:
    """Returns True if all readings of a text say the same in Chinese.

    Args:
        readings: up to `MAX_READINGS` readings with each template; further ones were not looked
            for.
        text: the text that was read.
    """
    # Spaces depend on where the values begin, and say nothing.
    chinese_texts = {reading.translation.text.replace(" ", "") for reading in readings}
    if len(chinese_texts) > 1:
        return False

    return not _unseen_readings_may_differ(readings, text)


def _unseen_readings_may_differ(readings: Sequence[Reading], text: str) -> bool:
    """Returns True if readings that were not looked for may say something else in Chinese.

    There may be such readings with a template that has `MAX_READINGS` known ones. For example,
    "{name}{note} is ready" reads "worker is ready" with a name of "w", "wo", "wor", ... Wherever it
    is divided, the name and the note follow each other in Chinese as in English, so unseen readings
    say the same. If a known reading translates a value, an unseen one may translate another value.

    Args:
        readings: the known readings, which all say the same.
        text: the text that was read.
    """
    num_readings = Counter(id(reading.template) for reading in readings)
    for reading in readings:
        may_have_unseen_readings = num_readings[id(reading.template)] == MAX_READINGS
        if may_have_unseen_readings and reading.translates_a_value(text):
            return True
    return False


def _best_readings(readings: Sequence[Reading]) -> list[Reading]:
    """Returns the best of the readings of a text with different templates.

    "rank 1 waits for 3 s" can be read with "{who} waits for {waited_s} s", where `who` is "rank 1",
    and with "{subject} for {waited_s} s", where `subject` is "rank 1 waits".

    - A reading that leaves less in English is better. If the catalogue cannot translate "rank 1
      waits", the second reading leaves it in English, so the first one is better.
    - If both leave the same, the template that has more of the text's words is better: the first.

    Args:
        readings: all readings of the text, first those whose templates have more words.
    """
    most_translated: list[Reading] = []
    for reading in readings:
        if not any(other.translates_more_than(reading) for other in readings):
            most_translated.append(reading)

    best: list[Reading] = []
    # No later reading has a more specific template, so each is compared with those before it alone.
    for reading in most_translated:
        if not any(other.is_more_specific_than(reading) for other in best):
            best.append(reading)
    return best


def _first_separator(text: str) -> str | None:
    """Returns the first of `SEPARATORS` that a text has; None if it has none of them."""
    for separator in SEPARATORS:
        if len(_split_outside_quotes(text, separator)) > 1:
            return separator
    return None


def _split_outside_quotes(text: str, separator: str) -> list[str]:
    """Splits a text at a separator, but not within a quoted name.

    `set 'a, b' first, then c` becomes `set 'a, b' first` and `then c`.
    """
    parts = [""]

    # The pattern has a group, so `split` returns the quoted names as well as the text between them:
    # `set `, `'a, b'` and ` first, then c`.
    for piece in QUOTED_NAME.split(text):
        is_quoted_name = QUOTED_NAME.fullmatch(piece) is not None
        if is_quoted_name:
            parts[-1] += piece
            continue

        # Up to its first separator, a piece continues the last part. Behind each separator a new
        # part begins.
        continuation, *new_parts = piece.split(separator)
        parts[-1] += continuation
        parts += new_parts

    return parts


def _keep_doubtful_parts_english(
    parts: Sequence[str], translations: Sequence[Translation]
) -> list[Translation]:
    """Leaves a part in English if the text may have been split within a value of that part.

    A separator such as "; " may stand between two messages or within a value. In the first text,
    the number may end at "x" or at "x; y". A part is doubtful if its value and the neighbour at
    this value both stay English:

        text                                translated parts            doubtful
        give a number from 1 to x; y        give a number from 1 to x   it ends with x, before y
        x; y is no number                   y is no number              it begins with y, behind x
        give a number from 1 to 3; y        give a number from 1 to 3   no: it ends with a number

    Returns:
        The translation of each part; doubtful parts are in English.
    """
    checked = list(translations)
    num_separators = len(parts) - 1

    # A part that is left in English may make its neighbour doubtful in turn, so this is repeated
    # until nothing changes.
    before: list[Translation] = []
    while checked != before:
        before = list(checked)
        for index in range(num_separators):
            _keep_english_beside_separator(parts, checked, index)

    return checked


def _keep_english_beside_separator(
    parts: Sequence[str], translations: list[Translation], left: int
) -> None:
    """Leaves a translated part in English if English words stand on both sides of a separator.

    These words may belong together:

        parts                   translations            now in English
        "see x" and "y"         "见 x" and "y"          "see x": it may be about "x; y"
        "x" and "y is missing"  "x" and "缺少 y"        "y is missing": "x; y" may be missing

    Args:
        parts: all parts of the text.
        translations: their translations. One of them may be replaced.
        left: index of the part on the left of the separator.
    """
    right = left + 1
    left_is_translated = _is_translated(parts[left], translations[left])
    right_is_translated = _is_translated(parts[right], translations[right])

    only_left_is_translated = left_is_translated and not right_is_translated
    end_of_left = len(parts[left])
    if only_left_is_translated and translations[left].leaves_english_at(end_of_left):
        translations[left] = _leave_in_english(parts[left])

    only_right_is_translated = right_is_translated and not left_is_translated
    if only_right_is_translated and translations[right].leaves_english_at(0):
        translations[right] = _leave_in_english(parts[right])


def _is_translated(text: str, translation: Translation) -> bool:
    """Returns True if some of a text is translated or it has no words, such as "3 s"."""
    has_no_words = not translation.untranslated
    return translation.text != text or has_no_words


def _join_parts(
    parts: Sequence[str], translations: Sequence[Translation], separator: str
) -> Translation:
    """Joins the translations of the parts of a text that was split at a separator.

    "step 3: done" was split at ": " and is joined with "：". Neighbours that are both left in
    English may be one name with punctuation in it, so the English separator stays between them.
    """
    parts, translations = _join_english_neighbours(parts, translations, separator)
    text = SEPARATORS[separator].join(translation.text for translation in translations)
    untranslated = _untranslated_of_whole(parts, translations, separator)
    return Translation(text, untranslated)


def _untranslated_of_whole(
    parts: Sequence[str], translations: Sequence[Translation], separator: str
) -> tuple[Span, ...]:
    """Returns where the text from which the parts were split stays English.

    Args:
        parts: all parts of the English text.
        translations: their translations, which know where in each part it stays English.
        separator: what stands between the parts.
    """
    untranslated: list[Span] = []
    begin_of_part = 0
    for part, translation in zip(parts, translations, strict=True):
        untranslated += _shift_spans(translation.untranslated, begin_of_part)
        begin_of_part += len(part) + len(separator)
    return tuple(untranslated)


def _join_english_neighbours(
    parts: Sequence[str], translations: Sequence[Translation], separator: str
) -> tuple[list[str], list[Translation]]:
    """Joins neighbouring parts that are both left in English, with the separator between them.

    For example, with the separator ": ", the parts "step 3", "x" and "y" become "step 3" and
    "x: y" if only "step 3" is translated.

    Returns:
        The parts after that, and their translations.
    """
    joined_parts: list[str] = []
    joined_translations: list[Translation] = []
    previous_is_english = False
    for part, translation in zip(parts, translations, strict=True):
        is_english = translation.text == part
        if is_english and previous_is_english:
            joined_parts[-1] += separator + part
            joined_translations[-1] = _leave_in_english(joined_parts[-1])
        else:
            joined_parts.append(part)
            joined_translations.append(translation)
        previous_is_english = is_english
    return joined_parts, joined_translations


def _leave_in_english(text: str) -> Translation:
    """Returns a text that is not translated, as the translation of itself."""
    words = RANKS_AND_AMOUNTS.sub("", text)
    has_words = any(char.isalpha() for char in words)
    return Translation(text, ((0, len(text)),) if has_words else ())


def _with_spaces_of(text: str, translation: Translation) -> Translation:
    """Puts the spaces at the ends of a text around the translation of what is between them."""
    stripped = text.strip()
    num_spaces_before = len(text) - len(text.lstrip())
    before = text[:num_spaces_before]
    after = text[num_spaces_before + len(stripped) :]
    return Translation(
        before + translation.text + after,
        _shift_spans(translation.untranslated, num_spaces_before),
    )


def _span_of_value(name: str, text: str, span: Span) -> Span:
    """Returns the part of a field's span that is to be translated.

    Chinese has no articles: for the span of "a Linear", this is the span of "Linear".

    Args:
        name: name of the field (`name_of_value`).
        text: text that was made from the field's template.
        span: where in the text the field is.
    """
    if name not in FIELDS_WITH_ARTICLE:
        return span
    begin, end = span
    without_article = ARTICLE.sub("", text[begin:end])
    return end - len(without_article), end


def _shift_spans(spans: Iterable[Span], offset: int) -> tuple[Span, ...]:
    """Turns spans of a part into spans of the text in which this part begins at `offset`."""
    return tuple((begin + offset, end + offset) for begin, end in spans)


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
        text = _join_with_chinese_spacing(text, literal)
        if name is not None:
            text = _join_with_chinese_spacing(text, values[name])
    return text


def _join_with_chinese_spacing(left: str, right: str) -> str:
    """Joins two pieces of a Chinese text, with the space between them that Chinese has.

    - No space beside Chinese punctuation or between two Chinese characters.
    - At least one space between a Chinese character and a Latin letter or a digit.
    - Otherwise, the space that the pieces have themselves.
    """
    # A piece that is empty or has only spaces has no character beside which a space is judged.
    if not left.strip() or not right.strip():
        return left + right
    if left.endswith("\n"):  # the spaces of `right` indent a line
        return left + right

    before = left.rstrip()[-1]
    after = right.lstrip()[0]
    before_is_chinese = _is_chinese(before)
    after_is_chinese = _is_chinese(after)

    has_punctuation = before in CHINESE_PUNCTUATION or after in CHINESE_PUNCTUATION
    if has_punctuation or (before_is_chinese and after_is_chinese):
        return left.rstrip(" ") + right.lstrip(" ")

    chinese_before_latin = before_is_chinese and _is_latin(after)
    latin_before_chinese = _is_latin(before) and after_is_chinese
    has_space = left[-1] == " " or right[0] == " "
    if (chinese_before_latin or latin_before_chinese) and not has_space:
        return f"{left} {right}"
    return left + right


def _is_chinese(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


def _is_latin(char: str) -> bool:
    """Returns True for a Latin letter or a digit."""
    return char.isascii() and char.isalnum()


def make_template(message: str, translation: str) -> Template:
    """Returns the template of a message with fields.

    "start {num} ranks" has the field `num` between the literals "start " and " ranks".
    """
    literals = [""]
    fields = []
    # For "a {{ b {n} c", with an escaped brace, `parse` yields ("a {", None), (" b ", "n") and
    # (" c", None). The literals are "a { b " and " c".
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

"""The language of verdicts, of errors' advice and of `lockstep explain`: English or Chinese.

All texts are English wherever they are made, compared, recorded and sent: ranks on machines with
different locales agree, and programs find the same words everywhere. `translate` is called where a
text is shown to a person, and there alone. It looks the text up in the catalogue of messages
(`locale/`, made by `make messages`).

A *message* of the catalogue is a text or a *template*: `start {next_multiple} processes`. A text
that was made from a template is recognized by what the template has between its fields, and the
values of the fields are translated in turn. What is not in the catalogue stays English.
"""

from __future__ import annotations

import functools
import os
import re
import string
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

LANGUAGE_VARIABLE = "LOCKSTEP_LANG"
LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The variables of the locale; the first that is set counts."""
ENGLISH = "en"
CHINESE = "zh"
LANGUAGES = (ENGLISH, CHINESE)
GRAMMATICAL_FIELDS = ("conjugate", "have", "plural", "pronoun", "them", "verb")
"""Fields of one word that only English needs: a translation may leave them out."""
PATTERN_OF_FIELD = {
    "context": r"(?:between|in|while) [^()]*",  # of a call: "in backward"
    "does": r"(?!on ).*?",  # begins with a verb, and not as "on host a: ..."
    "element_type": r"\w+",
    "lengths": r"\d[\dx +]*(?: more)?",  # of tensors: "25x4 + 3"
    "number": r"\d[\d.,]*(?:e[+-]\d+)?",
    "operation_name": r"\w+",
    "outcomes": r"(?:true|false|not reached) on (?:(?!: ).)*",  # of a test, by process
    "processes": r"(?:one process|rank \d+)(?: and rank \d+)*",
    "rank": r"\d+",
    "single": r"(?:(?![,;] ).)*?",  # one entry of a list, and not several
    "steps": r"\d+",
    "ranges": r"\d[\d., -]*",  # of `format_ranks`
    "who": r"ranks? \d[\d., -]*|\d+ ranks \(.*?\)",
    **dict.fromkeys(GRAMMATICAL_FIELDS, r"\S*"),
}
"""What a field of this name may be. Any other field may be any text."""

SEPARATORS = {"\n": "\n", "; ": "；", ": ": "：", ", ": "，"}
"""What stands between the parts of a text that is no message as a whole, and what is put there in
Chinese."""

CHINESE_PUNCTUATION = "，。：；、（）"
"""It has its own space around it."""

QUOTATION = re.compile(r"\S+:\d+: |[\w.]*(Error|Exception|Exit|Interrupt|Warning): ")
"""How a line of source begins, or what an exception of the script's says. They stay as they are."""

_CATALOGUE_FILE = Path(__file__).parent / "locale" / "zh_CN" / "LC_MESSAGES" / "lockstep.mo"
_MAGIC_NUMBER_OF_MO = 0x950412DE


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


@functools.cache
def chinese_catalogue() -> Catalogue:
    """Returns the Chinese messages; they are read when a text is shown for the first time."""
    return Catalogue(read_mo(_CATALOGUE_FILE.read_bytes()))


def read_mo(content: bytes) -> dict[str, str]:
    """Reads a compiled catalogue of gettext (see "The Format of GNU MO Files").

    Returns:
        The translations by their messages, without the header. `gettext` of the standard library
        does not list the messages, and the templates among them must be known.
    """
    magic, _, count, ids_at, translations_at = struct.unpack_from("<5I", content)
    if magic != _MAGIC_NUMBER_OF_MO:
        raise ValueError("not a catalogue of gettext in little-endian order")
    messages = {}
    for number in range(count):
        message = _read_text(content, ids_at + 8 * number)
        messages[message] = _read_text(content, translations_at + 8 * number)
    messages.pop("", None)  # the header
    return messages


def _read_text(content: bytes, entry_at: int) -> str:
    """Returns the text whose length and place stand in an entry of a table."""
    length, begin = struct.unpack_from("<2I", content, entry_at)
    return content[begin : begin + length].decode()


@dataclass(frozen=True)
class Template:
    """A message with fields, and how a text is recognized that was made from it."""

    pattern: str
    longest_literal: str
    """A text without it was not made from this template."""
    num_literal_chars: int
    translation: str

    def values_in(self, text: str) -> list[dict[str, str]]:
        """Returns the values of the fields in a text; an empty list if it is not of this template.

        A value may contain what the template has between two fields: "all ranks {do} for {fraction}
        of the time" is ambiguous where they "wait for each other for 33% of the time". Then there
        are two possibilities: with short first values, and with long ones.
        """
        if self.longest_literal not in text:
            return []
        found: list[dict[str, str]] = []
        for pattern in (self.pattern, self.pattern.replace(".*?", ".*")):
            match = re.fullmatch(pattern, text, re.DOTALL)
            if match is not None and match.groupdict() not in found:
                found.append(match.groupdict())
        return found


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
        # A text may have been made from several templates. The one that says most is right.
        self._templates.sort(key=lambda template: -template.num_literal_chars)

    def translate(self, text: str) -> str:
        """Returns a text in the language of the catalogue, as far as the catalogue has it."""
        stripped = text.strip()
        if QUOTATION.match(stripped):
            return text
        translation = self._translate_whole(stripped)
        if translation is None:
            translation = self._translate_parts(stripped)
        return text.replace(stripped, translation, 1) if stripped else text

    def _translate_whole(self, text: str) -> str | None:
        """Returns the translation of a text that is one message; None if it is none."""
        if text in self._texts:
            return self._texts[text]
        for template in self._templates:
            possible = []
            for values in template.values_in(text):
                translated = {name: self.translate(value) for name, value in values.items()}
                possible.append(fill_in(template.translation, translated))
            if possible:
                # The right values are those that are in the catalogue themselves.
                return min(possible, key=_num_latin_letters)
        return None

    def _translate_parts(self, text: str) -> str:
        """Translates the lines of a text or, in one line, what punctuation separates."""
        for separator, translated_separator in SEPARATORS.items():
            parts = text.split(separator)
            if len(parts) > 1:
                translations = [self._translate_part(part, separator) for part in parts[:-1]]
                translations.append(self.translate(parts[-1]))
                if translations == parts:
                    return text
                return translated_separator.join(translations)
        return text

    def _translate_part(self, part: str, separator: str) -> str:
        """Translates what stands before a separator. A message may end with it: "step {step}:"."""
        mark = separator.strip()
        if mark:
            translation = self._translate_whole(part.strip() + mark)
            if translation is not None:
                return translation.removesuffix(SEPARATORS[separator])
        return self.translate(part)


def _num_latin_letters(text: str) -> int:
    """Returns how many Latin letters a text has."""
    return sum(char.isascii() and char.isalpha() for char in text)


def fields_of(message: str) -> list[str]:
    """Returns the names of a message's fields, in their order."""
    return [name for _, name, _, _ in string.Formatter().parse(message) if name is not None]


def pattern_of_field(name: str) -> str:
    """Returns what a field may be. `number_2` is the second field that is called `number`."""
    return PATTERN_OF_FIELD.get(re.sub(r"_\d+$", "", name), ".*?")


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
    pattern = ""
    literals = []
    for literal, name, _, _ in string.Formatter().parse(message):
        literals.append(literal)
        pattern += re.escape(literal)
        if name is not None:
            pattern += f"(?P<{name}>{pattern_of_field(name)})"
    return Template(
        pattern=pattern,
        longest_literal=max(literals, key=len),
        num_literal_chars=sum(len(literal) for literal in literals),
        translation=translation,
    )

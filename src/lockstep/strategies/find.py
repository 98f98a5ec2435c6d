"""Finds the strategy of a run, given as an object or as a text such as `diloco:every=100`."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Union

from lockstep import strategies
from lockstep.errors import SettingError, unknown_choice_error
from lockstep.familiar_names import STRATEGY_OF_WORD
from lockstep.strategies.base import Strategy
from lockstep.strategies.registry import ENTRY_OF_STRATEGY, entry_of

DESCRIPTION_OF_TYPE = {int: "a whole number", float: "a number", bool: "true or false"}
"""What the value of an option of each type must be, for error messages."""


def find_strategy(choice: str | Strategy | None, world_size: int) -> tuple[Strategy, str]:
    """Returns the strategy that the user chose, or a default, and the reason to print.

    Args:
        choice: a strategy object, or a name with or without options. Examples: `"ddp"`,
            `"diloco:every=100,compress=int8"`, and with a list as the value of an option
            `"dp:device_ids=0:1"`. None if the user chose nothing.
        world_size: the number of processes.

    Raises:
        SettingError: the name or an option is unknown (the message suggests the nearest one), or an
            option has an invalid value.
    """
    if isinstance(choice, Strategy):
        return choice, "set in the script"
    if choice is None and world_size == 1:
        return parse_strategy("single"), "one process"
    if choice is None:
        return parse_strategy("ddp"), f"{world_size} processes"
    return parse_strategy(str(choice)), "as set"


def parse_strategy(text: str) -> Strategy:
    """Returns the strategy that a text such as `diloco:every=100,compress=int8` describes.

    Raises:
        SettingError: the name or an option is unknown, or an option has an invalid value.
    """
    was_set = f"strategy={text!r}"
    name, _, options_text = text.partition(":")
    if name not in ENTRY_OF_STRATEGY:
        raise unknown_choice_error(was_set, name, "strategies", ENTRY_OF_STRATEGY, STRATEGY_OF_WORD)

    options_class = getattr(strategies, entry_of(name).class_name)
    annotations = typing.get_type_hints(options_class)
    known_options = [option.name for option in fields(options_class)]

    values: dict[str, Any] = {}
    for option_text in options_text.split(","):
        if not option_text:
            continue

        option, _, value_text = option_text.partition("=")
        if not known_options:
            raise SettingError(was_set, f"{name} has no options", f"leave {option} out")
        if option not in known_options:
            raise unknown_choice_error(was_set, option, f"options of {name}", known_options)

        try:
            values[option] = parse_option(value_text, annotations[option])
        except ValueError as error:
            raise SettingError(was_set, f"{option} is {error}", "correct it") from None

    strategy: Strategy = options_class(**values)
    return strategy


def parse_option(text: str, annotation: Any) -> Any:
    """Converts the value of an option to the type of its annotation.

    Examples: `("3", int | None) -> 3`, `("true", bool) -> True`, `("2:3", Sequence[int]) -> [2,
    3]`. Of any other type, the text is returned.

    Args:
        text: the value as the user wrote it.
        annotation: the type of the option, such as `int`, `int | None` or `Sequence[str]`.

    Raises:
        ValueError: the text is not a value of that type. Its message says what the value must be.
    """
    # The types of a union such as `int | None`, or the single type.
    alternatives: tuple[Any, ...] = (annotation,)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        alternatives = typing.get_args(annotation)

    for alternative in alternatives:
        # A list, from an annotation such as `Sequence[int] | None`. If a single text is allowed as
        # well (`str | Sequence[str]`), only a text with a colon is a list.
        may_be_list = typing.get_origin(alternative) is Sequence
        may_be_one_text = str in alternatives
        if may_be_list and (":" in text or not may_be_one_text):
            (type_of_part,) = typing.get_args(alternative)
            return [parse_option(part, type_of_part) for part in text.split(":")]

    # A number or a boolean. No annotation allows several of these types, so if the text is not a
    # value of the one that is allowed, there is nothing else to try.
    for kind, description in DESCRIPTION_OF_TYPE.items():
        if kind not in alternatives:
            continue
        try:
            return _parse_bool(text) if kind is bool else kind(text)
        except ValueError:
            raise ValueError(description) from None

    return text


def _parse_bool(text: str) -> bool:
    """Returns True for "true" and False for "false"; raises ValueError for any other text."""
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"

"""Finds the strategy of a run: from an options object, or from a name with options as text."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Union

from lockstep import strategies
from lockstep.errors import SettingError, unknown_choice_error
from lockstep.strategies.base import Strategy

DESCRIPTION_OF_TYPE = {int: "a whole number", float: "a number", bool: "true or false"}
"""What an option of this type must be, for the error of one that is not."""


def find_strategy(choice: str | Strategy | None, world_size: int) -> tuple[Strategy, str]:
    """Returns the strategy that was asked for, or the best for the world size, and the reason.

    Args:
        choice: an options object, or a name with or without options, such as
            `diloco:every=100,compress=int8`; a list is written `A:B`. None: nothing was asked for.
        world_size: number of processes.

    Raises:
        SettingError: an unknown name or option (the message suggests the nearest), or a value that
            it cannot have.
    """
    if isinstance(choice, Strategy):
        return choice, "set in the script"
    if choice is None and world_size == 1:
        return parse_strategy("single"), "one process"
    if choice is None:
        return parse_strategy("ddp"), f"{world_size} processes"
    return parse_strategy(str(choice)), "as set"


def parse_strategy(text: str) -> Strategy:
    """Returns the strategy that a text such as `diloco:every=100,compress=int8` names.

    Raises:
        SettingError: an unknown name or option, or a value that it cannot have.
    """
    was_set = f"strategy={text!r}"
    name, _, options_text = text.partition(":")
    if name not in strategies.CLASS_OF_NAME:
        raise unknown_choice_error(was_set, name, "strategies", strategies.CLASS_OF_NAME)

    options_class = getattr(strategies, strategies.CLASS_OF_NAME[name])
    annotations = typing.get_type_hints(options_class)
    known_options = [option.name for option in fields(options_class)]

    values: dict[str, Any] = {}
    for option_text in options_text.split(","):
        if not option_text:
            continue

        option, _, value_text = option_text.partition("=")
        if option not in known_options:
            what = f"options of {name}"
            # The message says "options of single are ..." and lists them; a strategy may have none.
            shown_options = known_options or ["not there"]
            raise unknown_choice_error(was_set, option, what, shown_options)

        try:
            values[option] = parse_option(value_text, annotations[option])
        except ValueError as error:
            raise SettingError(was_set, f"{option} is {error}", "correct it") from None

    strategy: Strategy = options_class(**values)
    return strategy


def parse_option(text: str, annotation: Any) -> Any:
    """Returns the value of an option, which stays text unless its annotation has another type.

    Args:
        text: the value as written.
        annotation: a type such as `int`, `int | None` or `Sequence[str]`.

    Raises:
        ValueError: the text is not of that type; its message says what the value must be.
    """
    # The types of a union such as `int | None`; else the one type.
    alternatives: tuple[Any, ...] = (annotation,)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        alternatives = typing.get_args(annotation)

    # `Sequence[int]` or `Sequence[int] | None`: a list, which is written "2:3".
    if typing.get_origin(alternatives[0]) is Sequence:
        (type_of_part,) = typing.get_args(alternatives[0])
        return [parse_option(part, type_of_part) for part in text.split(":")]

    # The first of int, float and bool that the annotation allows.
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

"""Errors for misspelt keyword arguments that say which argument was probably meant.

`lockstep.init(seeds=0)` would end with Python's TypeError, which up to Python 3.12 does not say
that there is an argument `seed`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, TypeVar, cast

from lockstep.errors import UnknownArgumentError
from lockstep.wording import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

NO_WORDS: Mapping[str, str] = MappingProxyType({})


def check_keywords(name: str, familiar_words: Mapping[str, str] = NO_WORDS) -> Callable[[F], F]:
    """Decorates a function so that unknown keyword arguments raise an `UnknownArgumentError`.

    Args:
        name: how a script calls the function: "lockstep.init".
        familiar_words: arguments of the function by other words for the same thing.
    """

    def decorate(function: F) -> F:
        """Wraps the function that the script calls as `name` in a check of its keywords."""
        known_names = _keyword_names(function)
        if known_names is None:  # the function has **keywords, so it takes any
            return function

        # This makes each call 0.1 to 0.2 microseconds longer. Methods that a script calls once in
        # a step, such as `World.backward`, take a thousand times as long.
        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            if not keywords.keys() <= known_names:
                unknown = next(each for each in keywords if each not in known_names)
                raise _unknown_argument_error(name, unknown, known_names, familiar_words)
            return function(*args, **keywords)

        return cast(F, checked)

    return decorate


def check_keywords_of_methods(variable: str) -> Callable[[C], C]:
    """Decorates a class so that unknown keyword arguments of its public methods raise an error.

    Args:
        variable: how scripts call an object of the class: "world".
    """

    def decorate(cls: C) -> C:
        for name, attribute in list(vars(cls).items()):
            if inspect.isfunction(attribute) and not name.startswith("_"):
                setattr(cls, name, check_keywords(f"{variable}.{name}")(attribute))
        return cls

    return decorate


def check_keywords_of_constructor(
    name: str, familiar_words: Mapping[str, str] = NO_WORDS
) -> Callable[[C], C]:
    """Decorates a class so that unknown keyword arguments of its constructor raise an error.

    Args:
        name: how a script calls the class: "lockstep.strategies.DDP".
        familiar_words: arguments by other words for the same thing.
    """

    def decorate(cls: C) -> C:
        constructor = check_keywords(name, familiar_words)(cls.__init__)  # type: ignore[misc]
        setattr(cls, "__init__", constructor)  # noqa: B010 - mypy refuses the plain assignment
        return cls

    return decorate


def frame_of_caller() -> FrameType | None:
    """Returns the frame that has called the function that calls this one.

    If that function is decorated, the frame of the decorator lies between the two and is skipped.
    """
    function = sys._getframe(1)
    caller = function.f_back
    if caller is not None and caller.f_code.co_filename == __file__:
        return caller.f_back
    return caller


def _keyword_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names of the arguments that may be passed by keyword; None if any may be."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return None
        if parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            names.append(parameter.name)
    return frozenset(names)


def _unknown_argument_error(
    function_name: str,
    unknown: str,
    known_names: frozenset[str],
    familiar_words: Mapping[str, str],
) -> UnknownArgumentError:
    """Returns the error for an unknown keyword argument.

    Args:
        function_name: how a script calls the function: "lockstep.init".
        unknown: the name of the argument.
        known_names: the names of the function's arguments.
        familiar_words: its arguments by other words for the same thing. For example, with
            {"backend": "strategy"} the advice on `backend` is "did you mean 'strategy'?".
    """
    was_set = f"{function_name}({unknown}=...)"
    meant = familiar_words.get(unknown)
    if meant is not None:
        return UnknownArgumentError(
            was_set, "there is no such argument", f"did you mean {meant!r}?"
        )

    shown_names = sorted(known_names - {"self"})
    if not shown_names:
        return UnknownArgumentError(
            was_set, "it takes no arguments by name", "leave it out, or write it without a name"
        )
    listed = ", ".join(shown_names)
    advice = did_you_mean(unknown, shown_names, f"its arguments are {listed}")
    return UnknownArgumentError(was_set, "there is no such argument", advice)

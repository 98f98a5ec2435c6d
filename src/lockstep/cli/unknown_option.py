"""Says which option was probably meant by one that a command does not have."""

from __future__ import annotations

import difflib
import re

import click

from lockstep.familiar_names import ADVICE_FOR_FLAG

MIN_SIMILARITY = 0.75
"""How similar an unknown option must be to a known one, from 0 to 1, to be a misspelt one.

Options of scripts are less similar: `--epoch` to `--nproc` by 0.6, `--model` to `--module` by 0.73.
"""
MIN_SIMILARITY_AFTER_SCRIPT = 0.8
"""How similar a script's argument must be to an option of the launcher, from 0 to 1, to be taken
for a misspelt one."""


def similar_option(
    command: click.Command, ctx: click.Context, flag: str, min_similarity: float = MIN_SIMILARITY
) -> str | None:
    """Returns the option of a command that is most similar to an unknown one; None if none is.

    Args:
        command: the command.
        ctx: its context.
        flag: the unknown option, such as `--step`.
        min_similarity: how similar they must be, from 0 to 1.
    """
    # The names are compared without dashes: `--x` and `--y` would be similar because of the dashes.
    names = []
    for spelling in _spellings(command, ctx):
        if spelling.startswith("--"):
            names.append(spelling.removeprefix("--"))

    name = flag.lstrip("-").replace("_", "-").lower()
    similar_names = difflib.get_close_matches(name, names, n=1, cutoff=min_similarity)
    return f"--{similar_names[0]}" if similar_names else None


def familiar_option(command: click.Command, ctx: click.Context, flag: str) -> str | None:
    """Returns the option of a command that does what an option of another tool does.

    Args:
        command: the command.
        ctx: its context.
        flag: the unknown option, such as `--nprocs`.

    Returns:
        The option, such as `--nproc`; None if none is known.
    """
    advice = _advice_for_flag(command, ctx, flag)
    return advice if advice.startswith("--") else None


def advice_on_foreign_option(command: click.Command, ctx: click.Context, flag: str) -> str | None:
    """Returns a sentence on what to do instead of an option of another tool; None if none is known.

    Args:
        command: the command.
        ctx: its context.
        flag: the unknown option.
    """
    advice = _advice_for_flag(command, ctx, flag)
    return advice if advice and not advice.startswith("--") else None


def _advice_for_flag(command: click.Command, ctx: click.Context, flag: str) -> str:
    """Returns an option or a sentence that says what to use instead of an option of another tool.

    The result is empty if nothing is known of it, or if the sentence names an option that the
    command does not have.
    """
    advice = ADVICE_FOR_FLAG.get(flag.lstrip("-").replace("_", "-"), "")
    named_options = set(re.findall(r"--[a-z-]+", advice))
    return advice if named_options <= set(_spellings(command, ctx)) else ""


def _spellings(command: click.Command, ctx: click.Context) -> list[str]:
    """Returns all options of a command, also the short ones: `["--steps", "-n", ...]`."""
    spellings: list[str] = []
    for param in command.get_params(ctx):
        spellings += param.opts
    return spellings


def describe_unknown_option(error: click.NoSuchOption) -> str:
    """Returns the message about an unknown option, with the option that may be meant by it."""
    name = error.option_name
    if error.ctx is None:
        return f"No such option {name!r}."

    command = error.ctx.command
    advice = advice_on_foreign_option(command, error.ctx, name)
    if advice is not None:
        return f"No such option {name!r}: {advice}"

    meant = familiar_option(command, error.ctx, name) or similar_option(command, error.ctx, name)
    if meant is not None:
        return f"No such option {name!r}. Did you mean {meant}?"
    return f"No such option {name!r}."

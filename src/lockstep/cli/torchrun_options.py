"""Adds torchrun's flags to the options of `lockstep run`, and collects those that are given."""

from __future__ import annotations

import click

from lockstep.run.start.rank_imports import without_garbage_collection
from lockstep.run.start.torchrun_flags import parse_flags

# Keys of click's context.
TORCHRUN_FLAGS = "lockstep.torchrun_flags"  # the flags of torchrun that were given, as a list
TORCHRUN_OPTIONS = "lockstep.torchrun_options"  # torchrun's flags as click's options

TORCHRUN_NAME_PREFIX = "torchrun_"
"""The prefix of the names of click's options that stand for torchrun's flags."""


def torchrun_options() -> list[click.Option]:
    """Returns a hidden option of click for each of torchrun's flags, read from its parser."""
    with without_garbage_collection():  # it would take longer than the import itself
        from torch.distributed.run import get_args_parser

    options = []
    for action in get_args_parser()._actions:
        is_positional = not action.option_strings  # the script and its arguments
        if is_positional or action.dest == "help":
            continue

        takes_no_value = action.nargs == 0
        is_flag = True if takes_no_value else None  # with False, a value could be left out
        options.append(
            click.Option(
                # The name comes first, followed by the flags, such as --nnodes.
                [f"{TORCHRUN_NAME_PREFIX}{action.dest}", *action.option_strings],
                is_flag=is_flag,
                expose_value=False,  # the callback handles the value
                callback=_collect_torchrun_flag,
                # `--print-completion` needs no script. As an eager option it is handled before
                # click notices that there is none.
                is_eager=action.dest == "print_completion",
                hidden=True,
            )
        )

    return options


def _collect_torchrun_flag(
    ctx: click.Context, option: click.Parameter, value: str | bool | None
) -> None:
    """Adds one of torchrun's flags to `ctx.meta[TORCHRUN_FLAGS]`, if it was given.

    This is the callback of the options that `torchrun_options` returns. With --print-completion,
    the command prints and exits here.

    Args:
        ctx: the context of the command.
        option: click's option that stands for the flag.
        value: None or False if the flag was not given; otherwise its value, or True if it takes
            none.
    """
    if value is None or value is False:
        return

    flag = max(option.opts, key=len)  # the longest spelling: --module rather than -m
    words = [flag] if value is True else [flag, str(value)]
    if flag == "--print-completion":
        parse_flags(words)  # torchrun's parser prints and exits
    ctx.meta[TORCHRUN_FLAGS] += words

"""Says which options of `lockstep run` belong to which place, and checks their combinations.

A *place* is where a run is started: on the machines of --hosts, on a Ray cluster (--ray), as a job
of Slurm (--slurm), or on this machine, if none of these options is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from lockstep.cli.run_options import comes_from_file, is_given
from lockstep.errors import SettingError

WHY_NOT_WITH_ANOTHER_PLACE = {
    "slurm": "a job has machines of its own",
    "ray": "a Ray cluster has machines of its own",
}


class PlaceOption(click.Option):
    """An option that chooses a place, or that has an effect in some places only.

    The launchers that are started there do not get it.

    Args:
        places: the names of the options that choose these places, such as "hosts". An option that
            chooses a place itself has its own name here.
        args, options: the arguments of click's options.
    """

    def __init__(self, *args: Any, places: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.places = places

    @property
    def chooses_place(self) -> bool:
        """True for an option such as --hosts, False for one such as --copy."""
        return self.name in self.places


def place_options(ctx: click.Context) -> list[PlaceOption]:
    """Returns the options that say where the run is started, and how it is there."""
    return [param for param in ctx.command.params if isinstance(param, PlaceOption)]


def chosen_places(ctx: click.Context) -> list[str]:
    """Returns the names of the options that choose a place and are given."""
    names = [str(option.name) for option in place_options(ctx) if option.chooses_place]
    return [name for name in names if ctx.params[name] not in (None, False)]


def missing_main_options(ctx: click.Context) -> dict[str, str]:
    """Returns the options that have no effect, each with the main option without which it has none.

    In a run without --hosts and --slurm, this is `{"copy": "hosts", "nodes": "slurm", ...}`.
    """
    chosen = set(chosen_places(ctx))
    main_option_of = {}
    for option in place_options(ctx):
        if not option.chooses_place and chosen.isdisjoint(option.places):
            main_option_of[str(option.name)] = option.places[0]
    return main_option_of


def drop_overridden_places(ctx: click.Context) -> None:
    """Drops `hosts`, `ray` or `slurm` of the launch file if the command line names another place.

    With `hosts = "a,b"` in the file, `lockstep run --slurm train.py` drops `hosts`.
    """
    chosen = chosen_places(ctx)
    if all(comes_from_file(ctx, place) for place in chosen):
        return
    for place in chosen:
        if comes_from_file(ctx, place):
            ctx.params[place] = None


def check_place_options(ctx: click.Context) -> None:
    """Checks that the options on the place can be combined.

    Raises:
        SettingError: an option has no effect without another one, or contradicts it.
    """
    flag_of = {str(param.name): param.opts[0] for param in ctx.command.params}

    # An option on the command line without its main option is a mistake: `--copy` without
    # `--hosts`. A launch file may contain such an option, for runs that have the main option.
    for option, main_option in missing_main_options(ctx).items():
        is_on_command_line = is_given(ctx, option) and not comes_from_file(ctx, option)
        if is_on_command_line:
            raise SettingError(
                flag_of[option], f"there is no {flag_of[main_option]}", "add it, or leave this out"
            )

    chosen = chosen_places(ctx)
    if len(chosen) > 1:
        flag = flag_of[chosen[0]]
        option = flag_of[chosen[1]]
        found = WHY_NOT_WITH_ANOTHER_PLACE[chosen[1]]
        raise SettingError(f"{flag} with {option}", found, "take one")

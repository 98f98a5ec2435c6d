"""Makes the values of the launch file the defaults of the options of `lockstep run`.

Which options came from a file is kept, for messages: another launcher that this command starts
gets them on its command line, together with --from-file, which says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from lockstep.cli import launch_file
from lockstep.cli.launch_file import LaunchFile
from lockstep.cli.place_options import missing_main_options
from lockstep.cli.run_options import LAUNCH_FILE, comes_from_file
from lockstep.cli.torchrun_options import TORCHRUN_NAME_PREFIX, TORCHRUN_OPTIONS
from lockstep.errors import SettingError
from lockstep.run.machines.hosts import current_folder
from lockstep.run.start.torchrun_flags import variable_of_flag
from lockstep.settings import DECLARATIONS, QUIET_VARIABLE
from lockstep.wording import did_you_mean

OPTIONS_FROM_FILE = "lockstep.options_from_file"
"""Key of click's context: which options of the launcher that has started this one come from a
launch file."""
NOT_IN_A_LAUNCH_FILE = ("launch_file", "from_file", "help")
"""Options that have no key in a launch file."""


class TorchrunOptionsNeeded(Exception):
    """A key of the launch file is unknown, but may be an option of torchrun's, which have not been
    read yet.
    """


def keep_source(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Keeps the value of --from-file, by which another launcher says which options come from a
    file.
    """
    if value is not None:
        ctx.meta[OPTIONS_FROM_FILE] = value


def read_defaults(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Makes the values of the launch file the defaults of the options.

    This is the callback of --launch-file, which click calls before it handles the other options.
    Nothing is read if another launcher has started this command: it has read the file and passes
    the options on.

    Args:
        ctx: the context of the command.
        param: the option --launch-file.
        value: path of the file; None to search for one.

    Raises:
        SettingError: there is no such file, or it has a key or a value that no option has.
        TorchrunOptionsNeeded: a key is unknown, and torchrun's options have not been read yet.
    """
    if options_come_from_other_launcher(ctx):
        return

    if value is None:
        file = launch_file.find_launch_file(Path(current_folder()))
    else:
        file = launch_file.read_launch_file(Path(value))

    if file is not None:
        ctx.meta[LAUNCH_FILE] = file
        ctx.default_map = _defaults_from_file(ctx, file, os.environ)


def options_come_from_other_launcher(ctx: click.Context) -> bool:
    """Returns True if another launcher has read the launch file, and has started this command.

    With --hosts, for example, the user's command starts this one on each machine, with the options
    of the file and with --from-file, whose callback `keep_source` was called before.
    """
    return OPTIONS_FROM_FILE in ctx.meta


def file_and_its_options(ctx: click.Context) -> str:
    """Returns the launch file and the options that come from it: "lockstep.toml: nproc, precision".

    The result is empty if no option comes from a launch file.
    """
    if options_come_from_other_launcher(ctx):
        text: str = ctx.meta[OPTIONS_FROM_FILE]  # the other launcher has passed this text on
        return text

    file: LaunchFile | None = ctx.meta.get(LAUNCH_FILE)
    if file is None:
        return ""

    # `copy = true` in the file has no effect in a run without its main option, --hosts.
    options_without_effect = missing_main_options(ctx).keys()
    option_of_key = _options_by_key(ctx)
    used = []
    for key in file.values:
        name = str(option_of_key[key].name)
        if comes_from_file(ctx, name) and name not in options_without_effect:
            used.append(key)

    if not used:
        return ""
    return f"{file.name}: {', '.join(used)}"


def _defaults_from_file(
    ctx: click.Context, file: LaunchFile, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the values of a launch file, by the names of click's parameters.

    Values that are also set by environment variables (`environ`) are left out, as the variables
    override the file.

    Raises:
        SettingError: a key of the file is an option neither of this command nor of torchrun.
        TorchrunOptionsNeeded: a key is unknown, and torchrun's options have not been read yet.
    """
    option_of_key = _options_by_key(ctx)
    defaults = {}
    for key in file.values:
        if key not in option_of_key:
            raise _no_option_error(ctx, file, key, option_of_key)

        option = option_of_key[key]
        is_set_by_variable = any(environ.get(name) for name in _variables_of_option(option))
        if not is_set_by_variable:
            defaults[str(option.name)] = _default_from_file(option, file, key)

    return defaults


def _no_option_error(
    ctx: click.Context, file: LaunchFile, key: str, known_keys: Iterable[str]
) -> TorchrunOptionsNeeded | SettingError:
    """Returns the error for a key that is none of the options read so far.

    Importing torchrun's options takes long, so at first they are not read. `RunCommand.parse_args`
    catches TorchrunOptionsNeeded, reads them, and parses the command line again. If the key is no
    option even then, the error is one for the user.
    """
    torchrun_options_are_read = TORCHRUN_OPTIONS in ctx.meta
    if not torchrun_options_are_read:
        return TorchrunOptionsNeeded()
    return _unknown_key_error(file, key, known_keys)


def _unknown_key_error(file: LaunchFile, key: str, known_keys: Iterable[str]) -> SettingError:
    """Returns the error for a key of a launch file that is no option."""
    if isinstance(file.values[key], dict):
        return SettingError(
            f"the table [{key}] in {file.name}",
            "options do not stand in tables of their own",
            "write them at the top of lockstep.toml, or under [tool.lockstep] in pyproject.toml",
        )

    return SettingError(
        f"{key} in {file.place_of(key)}",
        "lockstep run has no such option",
        did_you_mean(key, known_keys, "lockstep run --help lists them"),
    )


def _options_by_key(ctx: click.Context) -> dict[str, click.Option]:
    """Returns the options by their keys in a launch file: `nproc` for `--nproc`."""
    option_of_key: dict[str, click.Option] = {}
    for param in ctx.command.get_params(ctx):
        if not isinstance(param, click.Option) or param.name in NOT_IN_A_LAUNCH_FILE:
            continue
        for spelling in param.opts:
            if spelling.startswith("--"):
                option_of_key[spelling.removeprefix("--").replace("_", "-")] = param
    return option_of_key


def _variables_of_option(option: click.Option) -> list[str]:
    """Returns the environment variables that can be set instead of an option.

    Variables of Lockstep begin with LOCKSTEP_, and variables of torchrun with PET_, such as
    PET_NNODES for --nnodes.
    """
    name = str(option.name)
    if name == "quiet":
        return [QUIET_VARIABLE]
    if name == "nproc":
        return [variable_of_flag("--nproc-per-node")]
    if name.startswith(TORCHRUN_NAME_PREFIX):
        return [variable_of_flag(name.removeprefix(TORCHRUN_NAME_PREFIX))]

    for declaration in DECLARATIONS.values():
        if declaration.name == name:
            return [declaration.variable]

    return []


def _default_from_file(option: click.Option, file: LaunchFile, key: str) -> Any:
    """Converts the value of a key into the form that click expects.

    Returns:
        True or False for a flag, a tuple of strings for an option that may be repeated, otherwise a
        string.

    Raises:
        SettingError: the option does not accept a value of this type.
    """
    value = file.values[key]
    if option.is_flag:
        if isinstance(value, bool):
            return value

        raise SettingError(
            file.entry_and_place(key), "it is switched on or off", "write true or false"
        )

    if option.multiple:
        texts = value if isinstance(value, list) else [value]
        if all(isinstance(text, str) for text in texts):
            return tuple(texts)

        raise SettingError(
            file.entry_and_place(key), "it takes texts", f'write {key} = ["first", "second"]'
        )

    is_switch = isinstance(value, bool)  # for Python, True is also an int
    if isinstance(value, str | int | float) and not is_switch:
        return str(value)

    raise SettingError(
        file.entry_and_place(key), "it takes a number or a text", f'write {key} = "..."'
    )

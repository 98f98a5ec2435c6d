"""Adds options to `lockstep run` for the settings of `lockstep.init`, and checks their values.

Everything that can be checked without torch is checked before anything is started: names, numbers,
and whether they fit the number of processes. The ranks check everything again, together with what
the script has set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from lockstep.cli.launch_file import LaunchFile
from lockstep.errors import SettingError, unknown_choice_error
from lockstep.familiar_names import STRATEGY_OF_WORD
from lockstep.run.start.plan import choose_nproc
from lockstep.settings import (
    DECLARATIONS,
    Declaration,
    check_outside,
    check_value,
    is_auto,
    parse_shares,
    read_variables,
    too_few_virtual_ranks_error,
)
from lockstep.strategies.registry import ENTRY_OF_STRATEGY, check_number_of_processes, entry_of

LAUNCH_FILE = "lockstep.launch_file"
"""The key in click's context under which the launch file is kept that was read."""


class SettingType(click.ParamType):  # type: ignore[type-arg]
    """The type of an option for a setting, whose value is read like its environment variable."""

    def __init__(self, declaration: Declaration) -> None:
        assert declaration.reader is not None
        self.name = declaration.reader.__name__.replace("_", " ")
        self._declaration = declaration
        self._read = declaration.reader

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts the text of an option into the value of the setting, or ends with click's error.

        Raises:
            SettingError: the value has the right type, but is not allowed: `--steps 0`, for
                example.
        """
        try:
            read_value = self._read(value)
        except ValueError:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)

        # Click passes None only if a value is converted without a command, which is not done here.
        assert param is not None
        assert ctx is not None
        option_and_value = as_user_wrote_it(ctx, param, value)  # such as "--steps 0", for the error
        check_value(self._declaration, read_value, option_and_value)
        return read_value


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option to a command for each setting whose declaration has a help text.

    It is used as a decorator.
    """
    # As with decorators, the option that is added last comes first.
    for declaration in reversed(list(DECLARATIONS.values())):
        if not declaration.help:
            continue

        add_option = click.option(
            declaration.option,
            type=SettingType(declaration),
            metavar=declaration.metavar,
            help=declaration.help,
        )
        command = add_option(command)

    return command


def is_given(ctx: click.Context, param_name: str) -> bool:
    """Returns True if the user gave an option, on the command line or in the launch file."""
    source = ctx.get_parameter_source(param_name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def comes_from_file(ctx: click.Context, param_name: str) -> bool:
    """Returns True if the value of an option comes from the launch file."""
    return ctx.get_parameter_source(param_name) is ParameterSource.DEFAULT_MAP


def as_user_wrote_it(ctx: click.Context, param: click.Parameter, value: object = "") -> str:
    """Returns the text of an option and its value, for messages.

    This is `--nproc 4`, or `nproc = 4 (lockstep.toml, line 2)`.

    Args:
        ctx: the context of the command.
        param: the option.
        value: its value on the command line; not needed if the option comes from a launch file.
    """
    file: LaunchFile | None = ctx.meta.get(LAUNCH_FILE)
    if file is not None and comes_from_file(ctx, str(param.name)):
        # The file may have any spelling of the option: --nproc is also --nproc-per-node.
        for spelling in param.opts:
            key = spelling.lstrip("-").replace("_", "-")
            if key in file.values:
                return file.entry_and_place(key)
    return f"{param.opts[0]} {value}"


def check_nproc(ctx: click.Context, nproc: str | None) -> None:
    """Checks the value of --nproc: 4, auto, gpu or cpu. Whether there are GPUs does not matter.

    Raises:
        SettingError: it is none of these. The error says where the user wrote it.
    """
    for param in ctx.command.params:
        if param.name == "nproc" and nproc is not None:
            _check_as_written(as_user_wrote_it(ctx, param, nproc), choose_nproc, nproc, 1, 1)


def check_settings(
    ctx: click.Context, environ: Mapping[str, str], num_processes: int | None
) -> None:
    """Checks the settings that the ranks will get from here, as far as possible without torch.

    Args:
        ctx: the context of the command.
        environ: environment variables of this process.
        num_processes: the world size; None if it is not known yet.

    Raises:
        SettingError: no script can run with these settings.
    """
    # Collect the values, and how the user wrote each of them. Options override variables.
    values = read_variables(environ)
    texts = {}
    for declaration in DECLARATIONS.values():
        if declaration.name in values:
            variable = declaration.variable
            texts[declaration.name] = f"{variable}={environ[variable]}"

    for param in ctx.command.params:
        name = str(param.name)
        if name in SETTING_NAMES and ctx.params[name] is not None:
            values[name] = ctx.params[name]
            texts[name] = as_user_wrote_it(ctx, param, ctx.params[name])

    check_outside(values)

    strategy = values.get("strategy")
    strategy_name = None
    if strategy is not None:
        strategy_name = strategy.partition(":")[0]
        if strategy_name not in ENTRY_OF_STRATEGY:
            raise unknown_choice_error(
                texts["strategy"],
                strategy_name,
                "strategies",
                ENTRY_OF_STRATEGY,
                STRATEGY_OF_WORD,
            )

    # The rest depends on the number of processes. A single process may start others itself.
    if num_processes is None or num_processes == 1:
        return

    if strategy_name is not None:
        with_text = f"{texts['strategy']} on {num_processes} processes"
        _check_as_written(with_text, check_number_of_processes, strategy_name, num_processes)

    if values.get("shares") is not None and not is_auto(values["shares"]):
        has_too_many = values["shares"].count(":") + 1 > num_processes

        # In a pipeline, several processes have one share, and the script may ask for a pipeline.
        if has_too_many or entry_of(strategy_name).has_share_for_each_process:
            _check_as_written(texts["shares"], parse_shares, values["shares"], num_processes)
    elif values.get("virtual_ranks", num_processes) < num_processes:
        error = too_few_virtual_ranks_error(values["virtual_ranks"], num_processes)
        raise SettingError(texts["virtual_ranks"], error.found, error.do)


SETTING_NAMES = [each.name for each in DECLARATIONS.values() if each.help]


def _check_as_written(was_set: str, check: Callable[..., object], *arguments: object) -> None:
    """Calls a check, and makes its error say how the user wrote the setting.

    Args:
        was_set: the setting as the user wrote it.
        check: function that raises SettingError.
        *arguments: the arguments of the function.
    """
    try:
        check(*arguments)
    except SettingError as error:
        raise SettingError(was_set, error.found, error.do) from None

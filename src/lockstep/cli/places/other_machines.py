"""Describes a run on other machines, whose launchers are started by ssh or by Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping

import click

from lockstep.cli.places.place import given_options
from lockstep.cli.torchrun_options import TORCHRUN_FLAGS
from lockstep.errors import SettingError
from lockstep.run.machines.hosts import HostsSpec, forwarded_environment
from lockstep.run.start.torchrun_flags import (
    check_flags_usable_with,
    flag_of_variable,
    is_torchrun_variable,
)
from lockstep.run.start.worker import Script
from lockstep.settings import is_quiet


def spec_for_unknown_machines(
    ctx: click.Context, script: str, args: tuple[str, ...], option: str
) -> HostsSpec:
    """Describes a run on other machines, without saying which machines these are.

    The caller fills in the machines (`HostsSpec.on_machines`).

    Args:
        ctx: the context of the command.
        script: the script.
        args: the arguments of the script.
        option: the option that asks for other machines, `--hosts` or `--ray`.

    Raises:
        SettingError: one of torchrun's flags or variables cannot be used with the option, or there
            is no such script.
    """
    from lockstep.run.start.script_check import check_script

    _check_no_torchrun_variables(option, os.environ)
    check_flags_usable_with(option, ctx.meta[TORCHRUN_FLAGS])
    module = ctx.params["module"]
    check_script(Script(path=script, arguments=args, module=module))
    return HostsSpec(
        hosts=(),  # filled in by the caller
        arguments=given_options(ctx),
        script=(script, *args),
        module=module,
        torchrun=ctx.meta[TORCHRUN_FLAGS],
        nproc=ctx.params["nproc"] or "1",
        environment=forwarded_environment(os.environ, ctx.params["forward_env"]),
        option=option,
        quiet=ctx.params["quiet"] or is_quiet(os.environ),
    )


def _check_no_torchrun_variables(option: str, environ: Mapping[str, str]) -> None:
    """Checks that none of torchrun's variables is set for a run on other machines.

    Such a variable would have no effect: the launchers there are started by ssh or Ray, and get
    options from here, but not the variables.

    Raises:
        SettingError: one is set.
    """
    for variable, value in environ.items():
        if is_torchrun_variable(variable) and value:
            flag = flag_of_variable(variable)
            raise SettingError(
                f"{variable}={value} with {option}",
                "the other machines do not get torchrun's variables",
                f"unset it, and write the option {flag}",
            )

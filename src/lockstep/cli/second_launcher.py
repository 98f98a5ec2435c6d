"""Checks that `lockstep run` neither starts another launcher nor was started by one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.machine.topology import LAUNCHER_VARIABLE, scheduler_of_several_tasks_here

MODULES_OF_LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "lockstep",
)
"""Modules that start a script on several processes, as `lockstep run` does."""
PROGRAMS_OF_LAUNCHERS = (
    *("accelerate", "deepspeed", "fabric", "horovodrun", "lockstep", "mpiexec", "mpirun"),
    *("srun", "torchrun"),
)
"""Programs that do the same."""
TORCHELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
"""The variable that the ranks of torchrun have."""


def check_no_second_launcher(
    nproc: str | None, script: str, args: Sequence[str], module: bool
) -> None:
    """Checks that this command neither starts another launcher nor was started by one.

    In `lockstep run --nproc 2 -m torch.distributed.run train.py`, and in `torchrun
    --nproc-per-node 2 -m lockstep run train.py`, each process would start a training of its own.

    Raises:
        SettingError: the script is a launcher, or a launcher has started this command in several
            processes.
    """
    if module:
        _check_module_is_no_launcher(nproc, script)
    else:
        _check_script_is_no_launcher(script, args)
    _check_started_once(os.environ, script, args, module)


def _check_module_is_no_launcher(nproc: str | None, module: str) -> None:
    """Checks that several processes do not run a launcher's module.

    With one process, the launcher starts the training once, as the user wants.
    """
    starts_several = nproc not in (None, "1")
    if module in MODULES_OF_LAUNCHERS and starts_several:
        raise SettingError(
            f"lockstep run --nproc {nproc} -m {module}",
            "it is a launcher too, so each process would start the whole training",
            f"leave out -m {module} and its options: lockstep run --nproc N SCRIPT",
        )


def _check_script_is_no_launcher(script: str, args: Sequence[str]) -> None:
    """Checks that the script is not the program of a launcher, as in `lockstep run torchrun ...`.

    With one process this is wrong too, as Python can only run scripts.
    """
    program = Path(script).name
    if program not in PROGRAMS_OF_LAUNCHERS:
        return

    if program == "torchrun":
        command = shlex.join(["lockstep", "run", *args])
        do = f"leave it out, as lockstep run has the same options: {command}"
    else:
        do = "leave it and its options out: lockstep run --nproc N SCRIPT"
    raise SettingError(f"lockstep run {script}", "it is a launcher too", do)


def _check_started_once(
    environ: Mapping[str, str], script: str, args: Sequence[str], module: bool
) -> None:
    """Checks that no other launcher has started this command in several processes.

    The ranks of a run of Lockstep's own are left out: their script may start another run.

    Raises:
        SettingError: torchrun or a scheduler has started this command in several processes.
    """
    if LAUNCHER_VARIABLE in environ:
        return

    scheduler = scheduler_of_several_tasks_here(environ)
    if TORCHELASTIC_VARIABLE in environ:
        launcher = "torchrun"
        num_processes = environ.get("WORLD_SIZE", "1")
        num_on_this_machine = environ.get("LOCAL_WORLD_SIZE", num_processes)
        variables = ", ".join(("RANK", "WORLD_SIZE", TORCHELASTIC_VARIABLE))
    elif scheduler is not None:
        launcher = scheduler.command
        num_on_this_machine = environ[scheduler.local_size]
        num_processes = num_on_this_machine  # those on other machines are not seen here
        variables = scheduler.local_size
    else:
        return

    if num_processes == "1":
        return

    module_flag = ["-m"] if module else []
    options = ["--nproc", num_on_this_machine, *module_flag]
    command = shlex.join(["lockstep", "run", *options, script, *args])
    raise SettingError(
        f"lockstep run in each of the {num_processes} processes of {launcher}",
        "both are launchers, so each process would start the whole training",
        f"leave {launcher} and its options out: {command}. If a process of a training starts "
        f"another one on purpose, remove {variables} from its environment",
    )

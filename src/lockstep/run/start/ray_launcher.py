"""The launcher of a node for `lockstep.launch(..., ray=...)`: starts and watches the ranks there.

It does on a node what `lockstep.launch` does on one machine. Its arguments are --nproc and
torchrun's flags. An environment variable names the folder with the call, where the outcome is
written too; see `lockstep.run.machines.ray_call`.
"""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.run.machines import ray_call
from lockstep.run.machines.ray_call import CallFacts, CallOutcome
from lockstep.run.start.function_worker import run_sent_call
from lockstep.run.start.machine import read_machine
from lockstep.run.start.plan import LaunchPlan, LaunchSpec, make_plan
from lockstep.run.start.spawn import run_in_fresh_processes
from lockstep.run.start.torchrun_flags import TorchrunFlags
from lockstep.run.start.worker import Script

PICKLER = "ray.cloudpickle"
"""The module with which ranks read the call. It takes a second to import."""


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks of this node, and writes the outcome into the folder of the call.

    Returns:
        The exit code.
    """
    folder = Path(os.environ.pop(ray_call.FOLDER_VARIABLE))
    call_file = (folder / ray_call.CALL_NAME).read_bytes()

    # While the ranks run there is no folder, so nothing stays behind if this process is killed.
    shutil.rmtree(folder)
    outcome = _run(call_file, arguments)
    folder.mkdir(mode=0o700)
    with open(folder / ray_call.OUTCOME_NAME, "wb") as file:
        pickle.dump(outcome, file)
    return outcome.error.exit_code if outcome.error else 0


def _run(call_file: bytes, arguments: Sequence[str]) -> CallOutcome:
    """Runs the ranks, and returns what they have returned, or the error."""
    facts = ray_call.read_facts(call_file)
    facts.apply()
    try:
        return CallOutcome(values=_run_ranks(call_file, facts, arguments))
    except LockstepError as error:
        return CallOutcome(error=error)


def _run_ranks(call_file: bytes, facts: CallFacts, arguments: Sequence[str]) -> list[Any]:
    """Runs the ranks of this node until they end, and returns the pickled value of each.

    Args:
        call_file: the content of the file with the call, as it was sent to this node. The ranks get
            all of it: the facts, and the pickled function of the user with its arguments.
        facts: the facts in this file, which this launcher needs itself.
        arguments: the arguments of this launcher: --nproc and torchrun's flags.
    """
    plan = _make_plan(facts, arguments)

    # What a rank runs: `run_sent_call`, which calls the user's function.
    pickled_call = pickle.dumps(functools.partial(run_sent_call, call_file))
    modules_to_import = {*facts.modules, PICKLER}  # PICKLER unpickles the user's function
    return run_in_fresh_processes(
        pickled_call,
        modules_to_import,
        plan,
        facts.launch_text,  # the call of `lockstep.launch` as the user wrote it, for errors
    )


def _make_plan(facts: CallFacts, arguments: Sequence[str]) -> LaunchPlan:
    """Plans the ranks of this node; the arguments are those of `_run_ranks`."""
    nproc_argument, *torchrun = arguments
    nproc = int(nproc_argument.removeprefix("--nproc="))
    spec = LaunchSpec(script=Script(path=facts.name), torchrun=tuple(torchrun))
    one_node = TorchrunFlags(torchrun).is_given("--standalone")
    plan = make_plan(spec, read_machine(), os.environ, nproc, one_node=one_node)
    return replace(plan, timeout=facts.timeout, keyboard=False, launcher="lockstep.launch")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

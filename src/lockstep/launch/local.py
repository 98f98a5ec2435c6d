"""`lockstep run`: the ranks of this machine, from the request to the exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.diagnose.first_failure import render
from lockstep.errors import SettingError
from lockstep.launch import spec as pure
from lockstep.launch.machine import cores_allowed, read_machine
from lockstep.launch.rank_main import (
    Command,
    Script,
    fresh_interpreter,
    import_for_ranks,
    run_and_exit,
)
from lockstep.launch.reading import Reading, read_script
from lockstep.launch.spec import LaunchSpec, Plan
from lockstep.launch.variables import variables
from lockstep.launch.zygote import Zygote

_ASKED_WORDS = {"auto", "gpu", "cpu"}

Say = Callable[[str], None]


def torchrun_flags() -> dict[str, bool]:
    """Every flag of torchrun, read from its own parser, and whether a value follows it."""
    from torch.distributed.run import get_args_parser

    return {
        name: action.nargs != 0
        for action in get_args_parser()._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


def plan(spec: LaunchSpec, environ: Mapping[str, str] = os.environ) -> Plan:
    """What `run` would start on this machine.

    Raises:
        SettingError: a flag's value that torchrun refuses, or a number of processes that is none.
    """
    return _prepare(spec, environ)[0]


def run(spec: LaunchSpec, say: Say | None = None) -> int:
    """Starts the processes, watches them and ends them all when one fails.

    Args:
        spec: what to start.
        say: called with each line that the user should read (default: standard error).

    Returns:
        The exit code, see `lockstep.errors`: 0; the script's own; 70, 71; 128 + a signal's number.

    Raises:
        SettingError: as `plan`.
        JoinError: the machines of the run did not come together.
    """
    say = say or _to_stderr
    _check_script(spec)
    environ = dict(os.environ)
    reading = read_script(_source_of(spec))
    script = _script(spec, reading)
    cold = _why_cold(spec, reading, environ)
    with variables(_threads_known_early(spec, environ)):
        if cold is None:
            import_for_ranks(reading.optimizes)
        # Forked here: nothing above starts a thread, much below does.
        zygote = Zygote(lambda: run_and_exit(script))
        try:
            made, namespace = _prepare(spec, environ)
            notes = [*made.notes, *([f"fresh interpreters ({cold})"] if cold else [])]
            if reading.own_processes and made.nproc == 1 and made.one_node:
                made = replace(made, own_processes=True)
                notes.append("the script starts its own processes")
            say(f"{made.nproc} x {spec.script}: " + "; ".join(notes))
            from lockstep.launch.running import make_folder, run_to_the_end

            outcome = run_to_the_end(
                plan=made,
                namespace=namespace,
                zygote=zygote,
                command=_command(script, namespace) if cold else None,
                hang=spec.hang,
                folder=make_folder(namespace.log_dir, Path(spec.script).stem),
            )
        finally:
            zygote.close()
    if outcome.failure is not None:
        say(render(outcome.failure))
    return outcome.exit_code


def _check_script(spec: LaunchSpec) -> None:
    program = any(flag.replace("_", "-") == "--no-python" for flag in spec.torchrun)
    if spec.module or program or Path(spec.script).exists():
        return
    folder = Path(spec.script).parent
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(Path(spec.script).name, names, n=1)
    raise SettingError(
        f"lockstep run {spec.script}",
        "there is no such file",
        f"did you mean {folder / near[0]}?" if near else "check the path; -m runs a module",
    )


def _source_of(spec: LaunchSpec) -> str:
    """The file that will run; a module's is looked for where `python -m` looks first."""
    if not spec.module:
        return spec.script
    path = Path(*spec.script.split("."))
    return str(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))


def _script(spec: LaunchSpec, reading: Reading) -> Script:
    asked = spec.local_rank_argument
    found = reading.local_rank_flag if asked is None else f"--{asked}"
    return Script(
        path=spec.script,
        arguments=spec.arguments,
        module=spec.module,
        local_rank_flag=None if asked == "none" else found,
    )


def _why_cold(spec: LaunchSpec, reading: Reading, environ: Mapping[str, str]) -> str | None:
    """Why the ranks cannot be copies of a warm process; None: they can."""
    if not spec.warm:
        return "--no-warm"
    flags = {flag.partition("=")[0].replace("_", "-") for flag in spec.torchrun}
    for flag in ("--no-python", "--numa-binding"):
        if flag in flags:
            return flag
    if environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return "PYTHON_EXEC is set"
    if not hasattr(os, "fork") or sys.platform != "linux":
        return f"a process that uses torch cannot be copied on {sys.platform}"
    if reading.variables_for_import:
        return f"the script sets {reading.variables_for_import[0]} before it imports torch"
    return None


def _threads_known_early(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """OMP_NUM_THREADS before libraries read it at their import, where the plan is that simple."""
    asked = spec.nproc or "1"
    if "OMP_NUM_THREADS" in environ or not asked.isdigit() or int(asked) < 1:
        return {}
    return {"OMP_NUM_THREADS": str(pure.threads_per_process(cores_allowed(), int(asked)))}


def _command(script: Script, namespace: argparse.Namespace) -> Command:
    """What a fresh process is to execute, and the variables it needs for that."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if namespace.no_python:
        return Command((script.path, *script.arguments), {})
    if python != sys.executable:
        # Another interpreter may have neither Lockstep nor our version of Python.
        module = ("-m",) if script.module else ()
        return Command((python, "-u", *module, script.path, *script.arguments), {})
    return fresh_interpreter(script)


def _prepare(spec: LaunchSpec, environ: Mapping[str, str]) -> tuple[Plan, argparse.Namespace]:
    from lockstep.launch.running import parse_flags

    given = [f"--nproc-per-node={spec.nproc}"] if spec.nproc is not None else []
    asked = parse_flags([*spec.torchrun, *given, spec.script])
    if asked.logs_specs is not None:
        raise SettingError(
            f"--logs-specs {asked.logs_specs}",
            "the ranks' streams are read by Lockstep, which keeps a file for each",
            "leave the flag out; --log-dir, --redirects and --tee say where the streams go",
        )
    if spec.module and asked.no_python:
        raise SettingError("-m with --no-python", "a module needs Python", "leave one of them out")
    machine = read_machine()
    if asked.nproc_per_node in _ASKED_WORDS or asked.nproc_per_node.lstrip("-").isdigit():
        nproc = pure.choose_nproc(asked.nproc_per_node, machine.cores, machine.gpus)
    else:
        nproc = _nproc_by_torchrun(asked.nproc_per_node)
    made = pure.plan(spec, machine, environ, nproc, one_node=_max_nodes(asked.nnodes) == 1)
    namespace = parse_flags(made.arguments)
    # argparse swallows a `--` that belongs to the script.
    namespace.training_script_args = list(spec.arguments)
    return made, namespace


def _max_nodes(asked: str) -> int:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        return int(parse_min_max_nnodes(asked)[1])
    except (ValueError, RuntimeError):
        raise SettingError(
            f"--nnodes {asked}", "not a number of machines", "write a number, or MIN:MAX"
        ) from None


def _nproc_by_torchrun(asked: str) -> int:
    """For the names of other devices that torchrun knows, such as `xpu`."""
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(asked))
    except ValueError as error:
        raise SettingError(
            f"--nproc {asked}", str(error), "give 1 or more, auto, gpu or cpu"
        ) from None


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"lockstep: {line}\n")
    sys.stderr.flush()

"""Implements `lockstep run`: starts the ranks of a script on this machine, and returns the exit
code.

Ranks are either *warm*, copies of a process that has imported torch (the fork server), or *cold*,
fresh interpreters. Warm ranks start much faster, but some requests and some scripts need cold ones.
`run_script` prepares the warm process first, while no thread exists yet, and only then imports the
modules that watch the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from lockstep.language import CHINESE, language, translate
from lockstep.machine.network import address_reaching, interface_of
from lockstep.machine.topology import THREADS_VARIABLE
from lockstep.run.run_folder import make_folder
from lockstep.run.start import worker
from lockstep.run.start.fork_server import ForkServer, FreshForkServer
from lockstep.run.start.fork_server_process import serve
from lockstep.run.start.machine import cores_allowed, read_machine
from lockstep.run.start.openblas import limit_openblas
from lockstep.run.start.plan import (
    LaunchPlan,
    LaunchSpec,
    choose_nproc,
    make_plan,
    meeting_host,
    threads_per_process,
)
from lockstep.run.start.rank_imports import import_for_ranks, without_garbage_collection
from lockstep.run.start.script_check import check_program, check_script
from lockstep.run.start.source_hints import SourceHints, modules_hidden_by_loaded, read_script
from lockstep.run.start.step_memory import check_keep_in_memory
from lockstep.run.start.torchrun_flags import (
    TorchrunFlags,
    check_flags,
    node_numbers,
    parse_flags,
)
from lockstep.run.start.worker import LOCAL_RANK_MACRO, Command, Script


def plan_run(spec: LaunchSpec) -> LaunchPlan:
    """Returns the plan that `run_script` would carry out on this machine.

    Raises:
        SettingError: see `run_script`.
    """
    request = _read_request(spec, os.environ)
    plan, _ = _plan_on_this_machine(request.spec, os.environ)
    cold_reason = _why_cold(request, os.environ) or _why_not_copied(request.spec.script)
    return _with_source_hints(plan, request.hints, cold_reason)


def run_script(spec: LaunchSpec, announce: Callable[[str], None]) -> int:
    """Starts the processes, watches them, and ends all of them when one fails.

    Args:
        spec: the request.
        announce: function that shows a line to the user.

    Returns:
        The exit code, see `lockstep.errors`: 0, the script's own, 70, 71, or 128 plus the number of
        a signal.

    Raises:
        SettingError: the request cannot be carried out.
        JoinError: the machines of the run did not come together.
    """
    _open_closed_streams()
    environ = dict(os.environ)
    with without_garbage_collection():
        request = _read_request(spec, environ)

    script = request.spec.script
    cold_reason = _why_cold(request, environ)
    nproc = _nproc_known_early(request.flags)  # 0 if it is not known yet

    variables = {}
    if nproc > 0 and THREADS_VARIABLE not in environ:
        # Libraries read the number of threads when they are imported, which is before the plan with
        # all variables is made. A library that is loaded already is told the number.
        num_threads = threads_per_process(cores_allowed(), nproc, request.spec.settings)
        variables[THREADS_VARIABLE] = str(num_threads)
        limit_openblas(num_threads)  # torch has loaded it if torchrun's flags were parsed

    with _environment_with(variables):
        if cold_reason is None:
            import_for_ranks(request.hints.imports)
            cold_reason = _why_not_copied(script)

        # The fork server is forked here, because many of the steps below start threads. It forks
        # warm ranks at once, while this process still imports its own modules.
        spares = 0 if cold_reason else nproc
        fork_server = ForkServer(lambda: worker.run_and_exit(script), spares)
        try:
            with without_garbage_collection():
                from lockstep.run.start.agent import run_agent
                from lockstep.run.watch.failure_report import render_failure

                plan, flags = _plan_on_this_machine(request.spec, environ)

            plan = _with_source_hints(plan, request.hints, cold_reason)
            if cold_reason:
                plan = replace(plan, command=_fresh_command(script, flags))

            # If ranks cannot be bound to processors, report that before any rank is started.
            if plan.command.numa is not None:
                for local_rank in range(plan.nproc):
                    plan.command.for_rank(local_rank)

            folder = make_folder(flags.log_dir, Path(script.path).name.removesuffix(".py"))
            if not request.spec.quiet:
                announce(_headline(plan))

            imports = [] if cold_reason else request.hints.imports
            start_fork_server = partial(_start_another_fork_server, script, plan, imports)
            agent = run_agent(plan, flags, fork_server, folder, start_fork_server)
        finally:
            fork_server.close()

    if agent.failure is not None:
        announce(render_failure(agent.failure, translate))
    return agent.exit_code


def _headline(plan: LaunchPlan) -> str:
    """Returns the line that says what is started, in the language of the user.

    For example `2 x train.py: 1 thread per process (...); Gloo on lo alone (...)`.
    """
    headline = f"{plan.nproc} x {plan.script.path}"
    if not plan.notes:
        return headline
    separator = "；" if language() == CHINESE else "; "
    notes = separator.join(translate(note) for note in plan.notes)
    return f"{headline}: {notes}"


def _start_another_fork_server(
    script: Script, plan: LaunchPlan, imports: Sequence[str]
) -> ForkServer:
    """Starts a fork server that replaces one that was killed.

    It runs in a new interpreter, since this process has threads by now and cannot be forked.

    Args:
        script: the script that warm ranks run.
        plan: the plan of the run.
        imports: names of the modules that the fork server imports, so that warm ranks need not
            do it.
    """
    program = (
        f"import sys; sys.path.insert(0, {worker.PACKAGES_FOLDER!r}); "
        f"from {__name__} import fork_server_main; fork_server_main(*sys.argv[1:])"
    )
    arguments = [json.dumps(asdict(script)), json.dumps(list(imports))]
    command = [sys.executable, "-u", "-c", program, *arguments]
    return FreshForkServer(command, {**os.environ, **plan.environment})


def fork_server_main(script: str, imports: str, control: str) -> NoReturn:
    """Runs a fork server in a new interpreter, see `_start_another_fork_server`.

    Args:
        script: the fields of a `Script`, as JSON.
        imports: names of modules, as JSON.
        control: descriptor of the fork server's control socket.
    """
    sys.path.remove(worker.PACKAGES_FOLDER)  # it was only needed to import this module
    fields = json.loads(script)
    fields["arguments"] = tuple(fields["arguments"])
    import_for_ranks(json.loads(imports))
    serve(int(control), partial(worker.run_and_exit, Script(**fields)))


# The request


@dataclass(frozen=True)
class _Request:
    """A request, with the parts of torchrun's flags and of the script's source that it needs."""

    spec: LaunchSpec
    """The request. Its script has been completed from the flags and the source."""
    flags: argparse.Namespace
    hints: SourceHints


def _read_request(spec: LaunchSpec, environ: Mapping[str, str]) -> _Request:
    """Completes a request from torchrun's flags and the script's source.

    Parsing torchrun's flags imports torch, which takes time. So if the user gave none, the result
    has only the five flags that are needed before torch is imported, with torchrun's defaults.
    """
    if TorchrunFlags(spec.torchrun, environ).is_any_given:
        flags = _parse_flags(spec)
    else:
        flags = argparse.Namespace(
            nproc_per_node=spec.nproc or "1",
            module=spec.script.module,
            no_python=False,
            run_path=False,
            numa_binding=None,
        )

    script = replace(spec.script, module=flags.module)
    hints = SourceHints()
    if _is_program(flags):
        check_program(script.path)
    else:
        check_script(script)
        hints = read_script(script)

    script = replace(script, local_rank_flag=_local_rank_flag(spec, hints))
    return _Request(replace(spec, script=script), flags, hints)


def _local_rank_flag(spec: LaunchSpec, hints: SourceHints) -> str | None:
    """Returns the argument by which the script takes its local rank, such as `--local-rank`.

    Returns:
        None if it takes none.
    """
    if spec.local_rank_argument is None:  # the user does not say, but the script's source does
        return hints.local_rank_flag
    if spec.local_rank_argument == "none":  # the user says that there is no such argument
        return None
    return f"--{spec.local_rank_argument}"  # the user has named it


def _parse_flags(spec: LaunchSpec) -> argparse.Namespace:
    """Parses torchrun's flags, without the script's own arguments.

    With these, argparse would mistake the script's `--n` for a prefix of a flag, and drop a `--`.
    """
    flags = list(spec.torchrun)
    if spec.nproc is not None:
        flags.append(f"--nproc-per-node={spec.nproc}")
    if spec.script.module:
        flags.append("--module")
    return parse_flags([*flags, spec.script.path])


def _nproc_known_early(flags: argparse.Namespace) -> int:
    """Returns the number of ranks on this machine, or 0 if it depends on the machine's devices.

    Args:
        flags: torchrun's flags, of which PET_NPROC_PER_NODE may have set the number.
    """
    asked = str(flags.nproc_per_node)
    return int(asked) if asked.isdigit() else 0


def _is_program(flags: argparse.Namespace) -> bool:
    """Returns True if the program to start is not a Python script."""
    return bool(flags.no_python and not flags.run_path)


# The plan


def _plan_on_this_machine(
    spec: LaunchSpec, environ: Mapping[str, str]
) -> tuple[LaunchPlan, argparse.Namespace]:
    """Makes the plan for this machine.

    Returns:
        The plan, and torchrun's flags.

    Raises:
        SettingError: a flag has a value that cannot be used.
    """
    flags = _parse_flags(spec)
    machine = read_machine()
    nproc = choose_nproc(flags.nproc_per_node, machine.cores, machine.gpus)
    check_flags(flags, nproc)
    if spec.keep_in_memory:
        check_keep_in_memory(flags)

    _, max_nodes = node_numbers(flags.nnodes)
    plan = make_plan(
        spec,
        machine,
        environ,
        nproc,
        one_node=max_nodes == 1,
        meeting_interface=_meeting_interface(spec.script.arguments),
    )
    return plan, flags


def _meeting_interface(arguments: Sequence[str]) -> str | None:
    """Returns the interface that leads to the host at which the script's processes meet.

    A script that numbers its processes itself takes the address of this host as an argument, such
    as `--dist-url=tcp://10.0.0.1:1234`. The result is None if there is no
    such argument, or no such interface.
    """
    host = meeting_host(arguments)  # "10.0.0.1"
    if host is None:
        return None
    own_address = address_reaching(host)  # this machine's address on a connection to the host
    return None if own_address is None else interface_of(own_address)


def _with_source_hints(plan: LaunchPlan, hints: SourceHints, cold_reason: str | None) -> LaunchPlan:
    """Adds to a plan what follows from the script's source, with a note for each choice.

    Args:
        plan: the plan, which is not changed.
        hints: what the script's source says.
        cold_reason: why the ranks are fresh interpreters; None if they are not.
    """
    notes = list(plan.notes)
    if cold_reason is not None:
        notes.append(f"fresh interpreters ({cold_reason})")

    # `hints.spawns_ranks` only counts if the launcher starts a single process. Several processes
    # are the ranks themselves, whatever the script does.
    is_only_rank = plan.nproc == 1 and plan.one_node
    script_spawns_ranks = hints.spawns_ranks and is_only_rank
    if script_spawns_ranks:
        notes.append("the script starts its own processes")
    elif plan.script.local_rank_flag is not None:  # a script that spawns its ranks gets no flag
        notes.append(f"the script is given {plan.script.local_rank_flag}")

    return replace(plan, notes=tuple(notes), script_spawns_ranks=script_spawns_ranks)


def _why_cold(request: _Request, environ: Mapping[str, str]) -> str | None:
    """Returns why the ranks cannot be copies of a warm process, or None if they can."""
    if not request.spec.warm:
        return "--no-warm"
    if _is_program(request.flags):  # the flag says that the program is no Python script
        return "--no-python"
    if request.flags.numa_binding is not None:
        return "--numa-binding"
    # torchrun replaces `${local_rank}` in the arguments by the local rank.
    if any(LOCAL_RANK_MACRO in argument for argument in request.spec.script.arguments):
        return f"{LOCAL_RANK_MACRO} among the arguments"
    if environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return "PYTHON_EXEC is set"
    if sys.platform != "linux":
        return f"a process that uses torch cannot be copied on {sys.platform}"

    variables = request.hints.variables_for_import
    if variables:
        return f"the script sets {variables[0]} before it imports torch"

    return None


def _why_not_copied(script: Script) -> str | None:
    """Returns why the ranks cannot be copies of this process once it has imported modules.

    They cannot if a module beside the script has the name of one that this process has imported: a
    copy would not import the script's own module.

    Returns:
        A text that names these modules, or None if there are none.
    """
    hidden = modules_hidden_by_loaded(script.folder, sys.modules)
    return f"{', '.join(hidden)} beside the script" if hidden else None


def _fresh_command(script: Script, flags: argparse.Namespace) -> Command:
    """Returns the command that a cold rank executes, with the variables that it needs."""
    numa = flags.numa_binding
    if _is_program(flags):  # --no-python: it is not a script of Python
        return Command((script.path, *script.arguments), environment={}, numa=numa)

    # With torchrun's variable PYTHON_EXEC the user has chosen another interpreter, which may have
    # neither Lockstep nor this version of Python. So it runs the script directly.
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable:
        module_flag = ("-m",) if script.module else ()
        words = (python, "-u", *module_flag, script.path, *script.arguments)
        return Command(words, environment={}, numa=numa)

    # This interpreter runs the script with Lockstep's probe.
    return worker.fresh_interpreter(script)._replace(numa=numa)


# The launcher's own process


def _open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that the launcher was started without (`<&-`).

    Otherwise the next file or socket of the launcher would get the number of that stream (0, 1 or
    2), and the ranks, which inherit it, would read or write it as their standard stream.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # `os.open` returns the lowest free descriptor. That is `descriptor`, as all lower ones
            # are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)

        # Python has set `sys.stdin` to None, for example, if it was closed when Python started.
        was_closed_at_start = getattr(sys, name) is None
        if was_closed_at_start:
            # With closefd=False, the descriptor stays open when the Python object is freed.
            mode = "r" if descriptor == 0 else "w"
            stream = open(descriptor, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextlib.contextmanager
def _environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the block, and restores the environment afterwards."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

"""`lockstep run`: a script's ranks on this machine, from the request to the exit code.

What a script's source says about how it wants to be started, and what lies beside it, decides
whether its ranks are copies of a process that has imported torch, or fresh interpreters.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import shutil
import sys
import tokenize
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from lockstep.errors import SettingError
from lockstep.run.start import plan as pure
from lockstep.run.start import worker
from lockstep.run.start.machine import cores_allowed, make_folder, read_machine
from lockstep.run.start.plan import LaunchPlan, LaunchSpec, variables
from lockstep.run.start.worker import MACRO, Command, Script
from lockstep.run.start.zygote import Zygote

_LOCAL_RANK_FLAGS = ("--local-rank", "--local_rank")
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "TORCH_", "PYTORCH_")

_READ_BY_RANKS = {"RANK", "LOCAL_RANK"}
_LARGE = {
    "torch._dynamo": "optim",  # by the first optimizer, for over a second
    "lockstep.world": "lockstep",
    "lockstep.strategies.ddp": "lockstep",
    "numpy.random": "lockstep",
}
"""Modules, and the word of which scripts speak that import them sooner or later."""


def plan_run(spec: LaunchSpec) -> LaunchPlan:
    """What `run_script` would start on this machine.

    Raises:
        SettingError: as `run_script`.
    """
    environ = os.environ
    spec, flags, hints = _read(spec, environ)
    made, _ = _prepare(spec, environ)
    cold = _why_cold(spec, flags, hints, environ) or _why_not_copied(spec.script)
    return _with_notes(made, hints, cold)


def run_script(spec: LaunchSpec, announce: Callable[[str], None]) -> int:
    """Starts the processes, watches them and ends them all when one fails.

    Args:
        spec: what to start.
        announce: called with each line that the user should read.

    Returns:
        The exit code, see `lockstep.errors`: 0; the script's own; 70, 71; 128 + a signal's number.

    Raises:
        SettingError: a script, flag or variable with which nothing can be started.
        JoinError: the machines of the run did not come together.
    """
    _open_closed_streams()
    environ = dict(os.environ)
    with worker.nothing_collected():
        spec, flags, hints = _read(spec, environ)
    script = spec.script
    cold = _why_cold(spec, flags, hints, environ)
    # So many ranks this machine gets, where it takes no look at the machine to know.
    nproc = int(spec.nproc or 1) if (spec.nproc or "1").isdigit() else 0
    early = {}
    if nproc and "OMP_NUM_THREADS" not in environ:  # libraries read it when they are imported
        early["OMP_NUM_THREADS"] = str(pure.threads_per_process(cores_allowed(), nproc))
    with variables(early):
        if cold is None:
            worker.import_for_ranks(hints.imports)
            cold = _why_not_copied(script)
        # Forked here: nothing above starts a thread, much below does.
        zygote = Zygote(lambda: worker.run_and_exit(script), 0 if cold else nproc)
        try:
            with worker.nothing_collected():
                from lockstep.run.start.agent import launch_agent
                from lockstep.run.watch.failure_report import render_failure

                made, flags = _prepare(spec, environ)
            made = _with_notes(made, hints, cold)
            if cold:
                made = replace(made, command=_fresh_command(script, flags))
            if made.command.numa is not None:
                for rank in range(made.nproc):  # what stands against it is heard before any starts
                    made.command.for_rank(rank)
            folder = make_folder(flags.log_dir, Path(script.path).name.removesuffix(".py"))
            announce(
                f"{made.nproc} x {script.path}" + ": " * bool(made.notes) + "; ".join(made.notes)
            )
            agent = launch_agent(made, flags, zygote, folder)
        finally:
            zygote.close()
    if agent.failure is not None:
        announce(render_failure(agent.failure))
    return agent.exit_code


def _open_closed_streams() -> None:
    """Where the launcher was started without a stream (`<&-`, `>&-`), /dev/null takes its place.

    Else the next file or socket would get its number, and the ranks would take it for theirs.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _read(
    spec: LaunchSpec, environ: Mapping[str, str]
) -> tuple[LaunchSpec, argparse.Namespace, SourceHints]:
    """What torchrun's flags and the script's source say, as far as it is needed before the plan.

    The flags' parser is imported where there is something to parse: else the ranks' process comes
    first.
    """
    flags = argparse.Namespace(
        module=spec.script.module, no_python=False, run_path=False, numa_binding=None
    )
    if spec.torchrun or any(name.startswith("PET_") for name in environ):
        flags = _parse(spec)
    script, hints = replace(spec.script, module=flags.module), SourceHints()
    if _is_program(flags):
        _check_program(script.path)
    else:
        check_script(script)
        hints = read_script(script)
    asked = spec.local_rank_argument
    flag = hints.local_rank_flag if asked is None else f"--{asked}"
    script = replace(script, local_rank_flag=None if asked == "none" else flag)
    return replace(spec, script=script), flags, hints


def _parse(spec: LaunchSpec) -> argparse.Namespace:
    nproc = [] if spec.nproc is None else [f"--nproc-per-node={spec.nproc}"]
    module = ["--module"] if spec.script.module else []
    # Not the script's own: argparse would take `--n` for a prefix of a flag, and swallow a `--`.
    return pure.parse_flags([*spec.torchrun, *nproc, *module, spec.script.path])


def _is_program(flags: argparse.Namespace) -> bool:
    """Whether what is to be started is no Python script."""
    return bool(flags.no_python and not flags.run_path)


def _check_program(name: str) -> None:
    if shutil.which(name) is not None:
        return
    if not Path(name).is_file():
        found, advice = "there is no such program", "check its name, and PATH"
    elif "/" not in name:
        found, advice = "there is no such program in PATH", f"write ./{name}"
    else:
        found, advice = "it is not executable", f"chmod +x {name}"
    raise SettingError(f"lockstep run --no-python {name}", found, advice)


def check_script(script: Script, command: str = "lockstep run") -> None:
    """Checks that a command's script can be there; a module's name is looked up when it is run.

    Raises:
        SettingError: it is not, and the message suggests what was meant; or what lies beside it
            has the name of this package.
    """
    name, path = script.path, Path(script.path)
    if script.module:
        if name.endswith(".py") and path.is_file():
            raise SettingError(
                f"{command} -m {name}",
                "it is a file, not the name of a module",
                f"{command} {name}, or {command} -m {name.removesuffix('.py')}",
            )
    elif path.is_dir() and not (path / "__main__.py").exists():
        raise SettingError(
            f"{command} {name}", "it is a folder without __main__.py", "name a script in it"
        )
    elif not path.exists():
        folder = path.parent
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        near = [n for n in names if n == f"{path.name}.py"]
        near = near or difflib.get_close_matches(path.name, names, n=1)
        advice = f"did you mean {folder / near[0]}?" if near else "check the path; -m runs a module"
        raise SettingError(f"{command} {name}", "there is no such file", advice)
    package = Path(__file__).parents[2]
    for beside in (f"{package.name}.py", f"{package.name}/__init__.py"):
        other = Path(script.folder, beside)
        if other.is_file() and other.resolve() != package / "__init__.py":
            raise SettingError(
                f"{command} {name}",
                f"{other} has the name of this package, which each rank imports",
                "rename it, or start the script with torchrun",
            )


def _with_notes(made: LaunchPlan, hints: SourceHints, cold: str | None) -> LaunchPlan:
    """The plan with what the script's source has decided."""
    notes = list(made.notes)
    if cold is not None:
        notes.append(f"fresh interpreters ({cold})")
    own = hints.own_processes and made.nproc == 1 and made.one_node
    if own:
        notes.append("the script starts its own processes")
    elif made.script.local_rank_flag is not None:
        notes.append(f"the script is given {made.script.local_rank_flag}")
    return replace(made, notes=tuple(notes), own_processes=own)


def _why_cold(
    spec: LaunchSpec, flags: argparse.Namespace, hints: SourceHints, environ: Mapping[str, str]
) -> str | None:
    """Why the ranks cannot be copies of a warm process; None: they can."""
    reasons = {
        "--no-warm": not spec.warm,
        "--no-python": _is_program(flags),
        "--numa-binding": flags.numa_binding is not None,
        f"{MACRO} among the arguments": any(MACRO in text for text in spec.script.arguments),
        "PYTHON_EXEC is set": environ.get("PYTHON_EXEC", sys.executable) != sys.executable,
        f"a process that uses torch cannot be copied on {sys.platform}": sys.platform != "linux",
        **{
            f"the script sets {name} before it imports torch": True
            for name in hints.variables_for_import
        },
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _why_not_copied(script: Script) -> str | None:
    """Why a process that has imported what this one has is none that the script could start in."""
    hidden = hidden_by(script.folder, sys.modules)
    return f"{', '.join(hidden)} beside the script" if hidden else None


def _fresh_command(script: Script, flags: argparse.Namespace) -> Command:
    """What a fresh process is to execute, and the variables it needs for that."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    numa = flags.numa_binding
    if _is_program(flags):
        return Command((script.path, *script.arguments), {}, numa)
    if python != sys.executable:
        # Another interpreter may have neither Lockstep nor our version of Python.
        module = ("-m",) if script.module else ()
        return Command((python, "-u", *module, script.path, *script.arguments), {}, numa)
    return worker.fresh_interpreter(script)._replace(numa=numa)


def _prepare(spec: LaunchSpec, environ: Mapping[str, str]) -> tuple[LaunchPlan, argparse.Namespace]:
    flags = _parse(spec)
    machine = read_machine()
    nproc = pure.choose_nproc(flags.nproc_per_node, machine.cores, machine.gpus)
    pure.check_flags(flags, nproc)
    one_node = pure.node_numbers(flags.nnodes)[1] == 1
    return pure.plan(spec, machine, environ, nproc, one_node=one_node), flags


@dataclass(frozen=True, kw_only=True)
class SourceHints:
    """What a script's source says; the defaults stand for one that could not be read."""

    local_rank_flag: str | None = None
    """The spelling of the argument in which the script wants its local rank."""
    variables_for_import: tuple[str, ...] = ()
    """Variables that it sets itself and that libraries read when they are imported."""
    own_processes: bool = False
    """Whether it surely starts the ranks itself (`mp.spawn`), and never asks whether it is one."""
    imports: tuple[str, ...] = ()
    """Large modules that every rank will probably import while it runs."""


def read_script(script: Script) -> SourceHints:
    """Reads a script's source; a file that is no Python source gives the defaults.

    A module is looked for where `python -m` looks first.
    """
    path = Path(*script.path.split(".")) if script.module else Path(script.path)
    if path.is_dir():
        path = path / "__main__.py"
    elif script.module:
        path = path.with_suffix(".py")
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            return read_source(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):  # running it says what is wrong
        return SourceHints()


def large_modules(loaded: Container[str]) -> list[str]:
    """The large modules that a process which has imported `loaded` has imported."""
    return [name for name in _LARGE if name in loaded]


def read_source(source: str) -> SourceHints:
    """Reads a script's source.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it holds null bytes.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    arguments = [a.value for call in calls for a in call.args if isinstance(a, ast.Constant)]
    given = {id(node): node.value for node in _given(nodes) if isinstance(node, ast.Constant)}
    read = {n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in given}
    called = {
        _last_name(node.func)
        for node in _certain(tree)
        if isinstance(node, ast.Call) and not _is_of_a_generator(node)
    }
    starts_ranks = called & {"spawn", "start_processes"} or (
        "Process" in called and "MASTER_PORT" in given.values()
    )
    variables = sorted({v for v in given.values() if isinstance(v, str)})
    return SourceHints(
        local_rank_flag=next((str(a) for a in arguments if a in _LOCAL_RANK_FLAGS), None),
        variables_for_import=tuple(v for v in variables if v.startswith(_READ_AT_IMPORT)),
        own_processes=bool(starts_ranks) and not read & _READ_BY_RANKS,
        imports=tuple(name for name, word in _LARGE.items() if word in source),
    )


def _certain(tree: ast.AST) -> Iterator[ast.AST]:
    """What surely runs: neither behind a condition nor in a function that nothing here names."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    left = [tree]
    while left:
        node = left.pop()
        yield node
        named = functions.pop(_last_name(node), None)
        left += [] if named is None else named.body
        for below in ast.iter_child_nodes(node):
            unknown = isinstance(below, ast.If | ast.IfExp) and "__name__" not in ast.dump(
                below.test
            )
            if not unknown and not isinstance(below, ast.FunctionDef):
                left.append(below)


def _is_of_a_generator(call: ast.Call) -> bool:
    """Random generators have a `spawn(n)` of their own."""
    return _last_name(call.func) == "spawn" and len(call.args) + len(call.keywords) < 2


def _given(nodes: list[ast.AST]) -> Iterator[ast.AST | None]:
    """Where a name gets a value: `x[NAME] = `, `{NAME: ...}`, `setdefault(NAME, ...)`, `putenv`."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield node.slice
        elif isinstance(node, ast.Dict):
            yield from node.keys
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("setdefault", "putenv"):
            yield from node.args[:1]


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def hidden_by(folder: str, loaded: Mapping[str, ModuleType]) -> list[str]:
    """Modules which have been imported, where a script in `folder` would import its own instead.

    Args:
        folder: the script's, which Python searches first.
        loaded: as `sys.modules`.

    Returns:
        The names of what is in the folder (`random.py`, `numpy`), sorted.
    """
    try:
        paths = list(Path(folder).iterdir())
    except OSError:  # a zip file
        return []
    return sorted(
        path.name
        for path in paths
        if (path.suffix in (".py", ".so") or (path / "__init__.py").is_file())
        and path.name != "__main__.py"  # never imported by its name
        and _is_another(loaded.get(path.name.partition(".")[0]), path.parent.resolve())
    )


def _is_another(module: ModuleType | None, folder: Path) -> bool:
    """Whether a module comes from a file, and from another folder."""
    file = getattr(module, "__file__", None)
    frozen = getattr(getattr(module, "__spec__", None), "origin", None) == "frozen"
    if file is None or frozen:  # Python looks for these elsewhere first
        return False
    path = Path(file).resolve()
    return (path.parents[1] if path.name == "__init__.py" else path.parent) != folder

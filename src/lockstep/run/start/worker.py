"""Runs the user's script in a rank as `__main__`, in the same way as `python script.py`.

A *warm* rank is a copy of the fork server, a process that has imported torch; it runs
`run_and_exit`. A *cold* rank is a fresh interpreter, which executes the `Command` of
`fresh_interpreter`. Both install the *probe*, which makes the rank visible to the launcher, and
then run the script. If an exception ends the script, it is recorded in the rank's *evidence*, files
that the launcher reads.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import runpy
import socket
import sys
import traceback
import types
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from lockstep import errors
from lockstep.run.run_folder import log_path
from lockstep.run.start.exec_hook import watch_executed
from lockstep.run.start.openblas import limit_openblas
from lockstep.run.start.process_exit import exit_process
from lockstep.run.watch.evidence import FOLDER_VARIABLE, Evidence

LOCAL_RANK_MACRO = "${local_rank}"
"""In arguments, this is replaced by the local rank (torch.distributed.elastic.utils.macros)."""
PACKAGES_FOLDER = str(Path(__file__).parents[3])
"""The folder that holds this package."""
_SCRIPT_VARIABLE = "LOCKSTEP_SCRIPT"
"""Environment variable of a fresh interpreter: its script as JSON, without the arguments."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The user's program."""

    path: str
    """The path of a script, or the name of a module."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    """True if `path` is the name of a module, as in `python -m`."""
    local_rank_flag: str | None = None
    """`--local_rank` or `--local-rank` if the script takes its local rank as an argument."""

    def arguments_of_this_rank(self) -> list[str]:
        """Returns the arguments for this process, including its local rank if the script
        takes it.
        """
        local_rank = os.environ.get("LOCAL_RANK")
        if self.local_rank_flag is None or local_rank is None:
            return list(self.arguments)
        return [f"{self.local_rank_flag}={local_rank}", *self.arguments]

    @property
    def is_folder_or_zip(self) -> bool:
        """True if the program is the `__main__.py` in a folder or a zip file."""
        if self.module:
            return False
        if os.path.isdir(self.path):
            return True
        # A pipe is not opened: that may block, and what its writer has written would be lost.
        return os.path.isfile(self.path) and zipfile.is_zipfile(self.path)

    @property
    def folder(self) -> str:
        """The folder in which Python first looks for modules that the program imports:
        `sys.path[0]`.
        """
        if self.module:
            return os.getcwd()
        if self.is_folder_or_zip:
            return os.path.abspath(self.path)
        return os.path.dirname(os.path.realpath(self.path))


class Command(NamedTuple):
    """The command that a fresh process executes."""

    words: tuple[str, ...]
    """The program and its arguments."""
    environment: dict[str, str]
    """Environment variables that it needs."""
    numa: str | None = None
    """The value of --numa-binding: how torch binds the process to processors near its GPU; None if
    it does not."""

    def for_rank(self, local_rank: int) -> Command:
        """Returns the command of one rank: with its local rank in the place of LOCAL_RANK_MACRO,
        and bound to its processors.

        Raises:
            SettingError: the rank cannot be bound.
        """
        number = str(local_rank)
        words = tuple(word.replace(LOCAL_RANK_MACRO, number) for word in self.words)

        environment = {}
        for name, value in self.environment.items():
            environment[name] = value.replace(LOCAL_RANK_MACRO, number)

        if self.numa is not None:
            from lockstep.torch_compat import bound_to_processors  # imports torch

            words = bound_to_processors(words, local_rank, self.numa)

        return Command(words, environment)


# The beginning of a rank


def run_and_exit(script: Script) -> NoReturn:
    """Runs the script in a copy of the fork server, and then ends the process as the interpreter
    would.

    It never returns, as the functions that have called it belong to the launcher.
    """
    open_streams()
    reset_after_fork()
    exit_process(_run(script))


def fresh_interpreter(script: Script) -> Command:
    """Returns the command that runs the script in a new interpreter, as `run_and_exit` does."""
    # This does not use `python -m lockstep...`, which would import a lockstep.py in the working
    # directory. Instead, the folder with this package is searched first.
    program = (
        f"import sys; sys.path.insert(0, {PACKAGES_FOLDER!r}); import {__name__} as m; m.main()"
    )

    # The script is passed as JSON in a variable, but its arguments may be too long for that, so
    # they are arguments of the command.
    script_without_arguments = json.dumps(asdict(replace(script, arguments=())))
    words = (sys.executable, "-u", "-c", program, *script.arguments)
    return Command(words, {_SCRIPT_VARIABLE: script_without_arguments})


def main() -> NoReturn:
    """Runs the script in a fresh interpreter, see `fresh_interpreter`."""
    sys.path.remove(PACKAGES_FOLDER)  # it was only needed to import this module
    fields = json.loads(os.environ.pop(_SCRIPT_VARIABLE))
    fields["arguments"] = tuple(sys.argv[1:])
    script = Script(**fields)

    # As under plain Python, modules beside the script take precedence, so this comes before torch
    # is imported.
    _set_script_folder(script.folder)
    exit_process(_run(script))


def _run(script: Script) -> int:
    """Runs the script with the probe installed, and returns the exit code."""
    errors.leave_to_launcher = _leave_to_launcher  # asked before an error is printed
    return run_recorded(partial(_run_watched, script), _print_error)


def _run_watched(script: Script, folder: Path) -> None:
    """Runs the script, and also watches programs that replace it and ranks that it starts itself.

    Args:
        script: the script.
        folder: the rank's folder.
    """
    from lockstep.run.watch import meeting, script_processes

    # The script may execute another program in its place, by `os.execv`.
    watch_executed(Evidence.of_this_process(os.environ, folder))

    # The script of an only rank may start ranks itself.
    is_only_rank = os.environ.get("WORLD_SIZE", "1") == "1"
    if is_only_rank:
        _set_address_for_script_processes()
        script_processes.watch_script_processes(folder)
    else:
        meeting.check_init_process_group()

    # After a restart, the store may still have keys of the earlier ranks, as not every version of
    # torch lets the launcher delete them. Then the keys of this attempt get a prefix of their own.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts > 0:
        from lockstep.torch_compat import separate_attempts

        separate_attempts(restarts)

    run_as_main(script)


def reset_after_fork() -> None:
    """Resets state that libraries have set up in the fork server, and that this copy must not
    share.
    """
    # If numpy.random was imported in the fork server, it has drawn a random state there, and all
    # ranks would have the same state. Draw another one.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()

    # torch and NumPy have read OMP_NUM_THREADS in the fork server, where its value may have been
    # another one.
    torch = sys.modules.get("torch")
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and setting.isdigit():
        num_threads = int(setting)
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        limit_openblas(num_threads)


def open_streams() -> None:
    """Opens `sys.stdin`, `stdout` and `stderr` for the descriptors that the rank was given.

    They are unbuffered, as under `python -u`, which torchrun uses to start scripts. So everything
    that a rank has written before it is killed is in its log.
    """
    _open_output(1, "stdout")
    _open_output(2, "stderr")

    # The standard input is only read, so it can be opened in the usual way.
    stdin = open(0, encoding=sys.getfilesystemencoding(), errors="strict", closefd=False)  # noqa: SIM115
    sys.stdin = stdin
    sys.__stdin__ = stdin  # type: ignore[misc]


def _open_output(descriptor: int, name: str) -> None:
    """Opens `sys.stdout` or `sys.stderr`, without a buffer and with the encoding that it had.

    Args:
        descriptor: 1 or 2.
        name: `stdout` or `stderr`.
    """
    # Python sets `sys.__stdout__` to None if descriptor 1 was closed when this process started.
    # Then `sys.stdout` is a stream that was set later.
    old_stream = getattr(sys, f"__{name}__") or getattr(sys, name)
    stream = io.TextIOWrapper(
        io.FileIO(descriptor, "w", closefd=False),
        encoding=old_stream.encoding,
        errors="backslashreplace" if name == "stderr" else old_stream.errors,
        line_buffering=os.isatty(descriptor),
        write_through=True,  # keeps nothing in a buffer
    )
    stream.mode = "w"  # type: ignore[misc]  # scripts may read it, as `open` sets it
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


_sockets_that_reserve_ports: list[socket.socket] = []
"""Sockets that are kept open until this process ends, so that no other program gets their ports."""


def _set_address_for_script_processes() -> None:
    """Sets MASTER_PORT to a free port, at which ranks that the script starts itself can meet.

    The MASTER_PORT of a single rank is the port of the launcher's store, say 29500, and processes
    that the rank starts inherit it. They would all connect to that store, or find its port in use.
    So MASTER_PORT becomes a free port, say 40000:

        processes that the rank starts    serve a store of their own at port 40000
        the rank itself                   uses the launcher's store at port 29500, as before
    """
    from lockstep.torch_compat import redirect_store

    # If the launcher has no store at MASTER_PORT, the port is free, and stays as it is.
    uses_launchers_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not uses_launchers_store:
        return

    # Bind a socket to a free port, so that no other program gets the port. torch's store can listen
    # at it all the same, as both sockets set SO_REUSEADDR.
    reserving_socket = socket.socket()
    reserving_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving_socket.bind(("127.0.0.1", 0))
    _sockets_that_reserve_ports.append(reserving_socket)
    _, free_port = reserving_socket.getsockname()

    # Processes that this rank starts inherit these. With "True", none of them would serve a store.
    launchers_port = int(os.environ["MASTER_PORT"])
    os.environ["MASTER_PORT"] = str(free_port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    # This process, too, now reads 40000 from MASTER_PORT. Here torch connects to 29500 instead.
    redirect_store(from_port=free_port, to_port=launchers_port)


# Exceptions of a rank


def run_recorded(
    body: Callable[[Path], object], report: Callable[[BaseException], object] = lambda error: None
) -> int:
    """Runs a rank's program with the probe installed, and records the exception that ends it.

    Args:
        body: the program; it is called with the rank's folder.
        report: function that is called with the exception, and may print it.

    Returns:
        The exit code. It is -2 (-SIGINT) if Ctrl-C ended the program.
    """
    # Only a rank needs these modules, and other processes import this one too.
    from lockstep.run.watch import error_record, probe

    folder = Path(os.environ[FOLDER_VARIABLE])
    evidence = Evidence.of_this_process(os.environ, folder)

    # The rank may run out of memory or of file descriptors. Some of both are held back, and
    # released before an error is recorded.
    reserve = error_record.Reserve()
    try:
        installed_probe = probe.install(evidence)
        body(folder)
        installed_probe.warn_if_ranks_trained_alone()
    except BaseException as error:
        reserve.release()
        return _record_and_report(error, evidence, report)
    return 0


def _record_and_report(
    error: BaseException, evidence: Evidence, report: Callable[[BaseException], object]
) -> int:
    """Records the exception that ends a rank, and reports it; returns the exit code.

    Args:
        error: the exception.
        evidence: the files of this rank.
        report: see `run_recorded`.
    """
    from lockstep.run.watch import error_record

    # Users see the traceback from their own code on, without the frames that have called it.
    error.__traceback__ = _without_launcher(error.__traceback__)

    _set_last_exception(error)
    has_called_exit_without_error = isinstance(error, SystemExit) and error.code in (None, 0)
    if not has_called_exit_without_error:
        error_record.record_error(error, evidence)

    try:
        report(error)
    except SystemExit as end:  # the program's own sys.excepthook chooses another exit code
        return error_record.exit_code(end)
    return error_record.exit_code(error)


def _set_last_exception(error: BaseException) -> None:
    """Sets `sys.last_value` and so on, as the interpreter does, for functions of `atexit`."""
    if not isinstance(error, SystemExit):
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__


def _leave_to_launcher(error: errors.LockstepError) -> bool:
    """Leaves it to the launcher to print an error that ends this rank, if the launcher can.

    The rank then only writes the traceback to its log, which is not shown.

    Returns:
        True if the launcher prints the error, so that the rank must not.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    evidence = Evidence.of_this_process(os.environ, folder)
    launcher_prints_it = _launcher_can_print_all_of(error) and _is_recorded(evidence)
    if launcher_prints_it:
        _log_traceback(error, log_path(folder, "stderr"))
    return launcher_prints_it


def _log_traceback(error: BaseException, log_path: Path) -> None:
    """Appends the traceback of an error to a log."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError), open(log_path, "ab") as log:
        log.write(text.encode(errors="backslashreplace"))


def _launcher_can_print_all_of(error: errors.LockstepError) -> bool:
    """Returns True if an error has neither notes nor an earlier exception that Python shows.

    The launcher prints only the message and the line of the error itself.
    """
    has_shown_context = error.__context__ is not None and not error.__suppress_context__
    has_earlier_exception = error.__cause__ is not None or has_shown_context
    return not has_earlier_exception and not hasattr(error, "__notes__")


def _is_recorded(evidence: Evidence) -> bool:
    """Returns True if the exception that ends this rank is recorded for the launcher."""
    try:
        return evidence.error.stat().st_size > 0
    except OSError:
        return False


def _print_error(error: BaseException) -> None:
    """Prints what the interpreter would print for an exception that ends the program."""
    with contextlib.suppress(ValueError, OSError):  # standard error has been closed
        if not isinstance(error, SystemExit):
            _call_excepthook(error)
        elif not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")


def _call_excepthook(error: BaseException) -> None:
    """Calls `sys.excepthook`. If the hook fails, prints both exceptions, as the interpreter
    does.
    """
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as hook_error:
        hook_error.__traceback__ = _without_launcher(hook_error.__traceback__)

        # The original exception is printed separately below, and not as the context of the hook's
        # error.
        if hook_error.__context__ is error:
            hook_error.__context__ = None

        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(hook_error), hook_error, hook_error.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Removes the launcher's frames from a traceback: the outermost ones, as far as their files are
    in this folder.
    """
    this_folder = os.path.dirname(__file__)
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(file) != this_folder:
            break
        trace = trace.tb_next
    return trace


def install_after_exec() -> None:
    """Makes this process visible to the launcher again after `os.exec*`.

    By `os.exec*`, a rank has replaced its program by the one that runs here now.
    """
    from lockstep.run.watch import error_record, probe

    evidence = Evidence.of_this_process(os.environ, Path(os.environ[FOLDER_VARIABLE]))
    probe.install(evidence)
    watch_executed(evidence)  # this program may execute yet another one

    # `errors` calls this function before it prints an error of Lockstep's that ends the rank, to
    # know whether the launcher prints the error.
    errors.leave_to_launcher = _leave_to_launcher

    original_excepthook = sys.excepthook

    def record_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> object:
        error_record.record_error(error.with_traceback(trace), evidence)
        return original_excepthook(kind, error, trace)

    sys.excepthook = record_and_show


# The script


def run_as_main(script: Script) -> None:
    """Runs the script in this process, which belongs to the script from here on."""
    sys.argv = [script.path, *script.arguments_of_this_rank()]
    module_flag = ["-m"] if script.module else []
    sys.orig_argv = [sys.executable, *module_flag, *sys.argv]

    # multiprocessing and pickle look up the script's module by this name.
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    _set_script_folder(script.folder)

    # Python runs the `__main__.py` of a folder or zip file as a module, too.
    if script.module or script.is_folder_or_zip:
        _run_module(script)
    else:
        _run_file(script.path, main_module)


def _run_module(script: Script) -> None:
    """Runs a module, or the `__main__.py` of a folder or zip file.

    Raises:
        ImportError: the module was not found.
    """
    # `runpy` looks for the `__main__.py` of a folder or zip file in `sys.path`. With `python -P`
    # the script's folder is not there, so it is added for the whole run.
    if sys.flags.safe_path and not script.module:
        sys.path.insert(0, script.folder)

    name = script.path if script.module else "__main__"  # `python -m NAME`, or `python FOLDER`
    try:
        runpy._run_module_as_main(  # type: ignore[attr-defined]
            name,
            alter_argv=script.module,  # with `python -m`, argv[0] becomes the path of the module
        )
    except SystemExit as end:
        why_not_found = _why_module_was_not_found(end)
        if why_not_found is not None:
            raise ImportError(why_not_found) from None
        raise


def _why_module_was_not_found(end: SystemExit) -> str | None:
    """Returns the message of runpy if it did not find the module; None if the module has ended.

    If runpy does not find the module, it raises an error of its own, catches it, and calls
    `sys.exit`, as the module may do. The report on the failure should name the error.
    """
    error_of_runpy = end.__context__
    was_not_found = isinstance(error_of_runpy, runpy._Error)  # type: ignore[attr-defined]
    return str(error_of_runpy) if was_not_found else None


def _run_file(script_path: str, main_module: types.ModuleType) -> None:
    """Runs a script as `__main__`."""
    path = os.path.abspath(script_path)
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __cached__=None, __package__=None, __loader__=loader)
    with io.open_code(path) as file:
        code = loader.source_to_code(file.read(), path)
    exec(code, main_module.__dict__)


def _set_script_folder(folder: str) -> None:
    """Puts the script's folder first in `sys.path`, where it replaces the launcher's own folder."""
    if not sys.flags.safe_path:
        sys.path[0] = folder

"""What runs in a rank: the user's script as `__main__`, as `python script.py` would run it.

Warm, the process is a copy of the zygote and `run_and_exit` ends it; cold, it is a fresh
interpreter, started by `fresh_interpreter`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from lockstep.run.start.exec_hook import watch_executed
from lockstep.run.watch.evidence import FOLDER_VARIABLE, Evidence

_PACKAGES = str(Path(__file__).parents[3])
"""The folder that holds this package."""
MACRO = "${local_rank}"
"""Stands for the local rank among the arguments (torch.distributed.elastic.utils.macros)."""
_SCRIPT = "LOCKSTEP_SCRIPT"
"""Variable: what a fresh interpreter is to run, as JSON, without the script's own arguments."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The user's program."""

    path: str
    """Path of a script, or the name of a module."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    local_rank_flag: str | None = None
    """`--local_rank` or `--local-rank` for a script that takes its rank from there."""

    def own_arguments(self) -> list[str]:
        """The arguments for this process, with the flag that names its rank first."""
        flag, rank = self.local_rank_flag, os.environ.get("LOCAL_RANK")
        given = [] if flag is None or rank is None else [f"{flag}={rank}"]
        return [*given, *self.arguments]

    @property
    def folder(self) -> str:
        """Where Python first looks for what the program imports: its `sys.path[0]`."""
        if self.module:
            return os.getcwd()
        if os.path.isdir(self.path) or zipfile.is_zipfile(self.path):
            return os.path.abspath(self.path)
        return os.path.dirname(os.path.realpath(self.path))


class Command(NamedTuple):
    """What a fresh process executes."""

    line: tuple[str, ...]
    environment: dict[str, str]
    numa: str | None = None
    """The value of --numa-binding: to which processors, near its GPU, the process is bound."""

    def for_rank(self, local_rank: int) -> Command:
        """With the local rank in the place of torchrun's macro, and bound to its processors.

        Raises:
            SettingError: it cannot be bound.
        """
        rank = str(local_rank)
        line = tuple(word.replace(MACRO, rank) for word in self.line)
        if self.numa is not None:
            from lockstep.distributed.torch_compat import bound_to_processors

            line = bound_to_processors(line, local_rank, self.numa)
        return Command(line, {n: v.replace(MACRO, rank) for n, v in self.environment.items()})


def run_and_exit(script: Script) -> NoReturn:
    """Runs the script in a copy of the zygote and ends the process as the interpreter would."""
    open_streams()
    reset_after_fork()
    # Not by unwinding: the stack below is the launcher's.
    exit_process(_run(script))


def fresh_interpreter(script: Script) -> Command:
    """What runs the script as `run_and_exit` does, but in an interpreter of its own."""
    # Not by -m: a lockstep.py in the working folder would then be taken for this package.
    code = f"import sys; sys.path.insert(0, {_PACKAGES!r}); import {__name__} as m; m.main()"
    # A variable has less room than a line of arguments.
    known = json.dumps(asdict(replace(script, arguments=())))
    return Command((sys.executable, "-u", "-c", code, *script.arguments), {_SCRIPT: known})


def main() -> NoReturn:
    """The entry of a fresh interpreter."""
    sys.path.remove(_PACKAGES)
    values = json.loads(os.environ.pop(_SCRIPT))
    script = Script(**{**values, "arguments": tuple(sys.argv[1:])})
    # Before torch is imported: as under plain Python, modules beside the script go first.
    _set_path(script.folder)
    # Not by sys.exit: while the interpreter is taken down, a thread of Gloo's may abort it.
    exit_process(_run(script))


def _run(script: Script) -> int:
    def program(folder: Path) -> None:
        from lockstep.run.watch import script_processes

        watch_executed(Evidence.of_this_process(os.environ, folder))
        if os.environ.get("WORLD_SIZE", "1") == "1":
            _let_own_processes_meet()
            script_processes.watch_script_processes(folder)
        run_as_main(script)

    return run_recorded(program, _report)


def install_after_exec() -> None:
    """Makes this process visible, in which a rank has executed another program in its own place."""
    from lockstep.run.watch import error_record, probe

    evidence = Evidence.of_this_process(os.environ, Path(os.environ[FOLDER_VARIABLE]))
    probe.install(evidence)
    watch_executed(evidence)
    show = sys.excepthook

    def record(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> object:
        error_record.record_error(error.with_traceback(trace), evidence)
        return show(kind, error, trace)

    sys.excepthook = record


_held: list[socket.socket] = []


def _let_own_processes_meet() -> None:
    """Gives the only rank an address at which processes that it starts itself can meet.

    With torchrun's variables they would all look for the launcher's store, also where the program
    gives them an address of their own; or they would find its port taken.
    """
    from lockstep.distributed.torch_compat import store_elsewhere

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))  # who listens there later says so too, as torch's store does
    _held.append(held)
    port, launchers = held.getsockname()[1], int(os.environ["MASTER_PORT"])
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    store_elsewhere(port, launchers)


def run_recorded(
    body: Callable[[Path], object], report: Callable[[BaseException], object] = lambda error: None
) -> int:
    """Runs a rank's program with the probe installed, and writes down what it raises.

    Args:
        body: the program; it is given the rank's folder.
        report: called with what it raised.

    Returns:
        The exit code; -2 where Ctrl-C ended it.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    from lockstep.run.watch import error_record, probe

    evidence = Evidence.of_this_process(os.environ, folder)
    reserve = error_record.Reserve()
    try:
        installed = probe.install(evidence)
        body(folder)
        installed.warn_if_ranks_trained_alone()
    except BaseException as error:
        reserve.release()
        error.__traceback__ = _of_the_program(error.__traceback__)
        if not isinstance(error, SystemExit):
            # As the interpreter does: what runs at exit asks by them whether the program failed.
            sys.last_type, sys.last_value = type(error), error
            sys.last_traceback = error.__traceback__
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            error_record.record_error(error, evidence)
        try:
            report(error)
        except SystemExit as end:  # by the program's own sys.excepthook
            return error_record.exit_code(end)
        return error_record.exit_code(error)
    return 0


def _report(error: BaseException) -> None:
    """Prints what the interpreter would print."""
    with contextlib.suppress(ValueError, OSError):  # standard error has been closed
        if not isinstance(error, SystemExit):
            _show(error)
        elif not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")


def _show(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as second:
        second.__traceback__ = _of_the_program(second.__traceback__)
        second.__context__ = None if second.__context__ is error else second.__context__
        for heading, failed in (
            ("Error in sys.excepthook:", second),
            ("\nOriginal exception was:", error),
        ):
            sys.stderr.write(f"{heading}\n")
            sys.__excepthook__(type(failed), failed, failed.__traceback__)


def exit_process(code: int) -> NoReturn:
    """Ends the process after what the interpreter does at its end.

    Python offers no way to do that short of taking itself down, during which a thread of Gloo's may
    abort the process; `threading._shutdown` and `atexit._run_exitfuncs` are what it calls first
    (Py_FinalizeEx, Python 3.11 to 3.14).
    """
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(KeyboardInterrupt):
        drop_program()
    exit_now(code)


def drop_program() -> None:
    """Lets go of the program's data, so that files which it has left open are complete.

    The interpreter does that when it takes down the modules, where an object's `__del__` may wait
    for threads of torch that wait for the interpreter. Here they still run.
    """
    sys.last_type = sys.last_value = sys.last_traceback = None
    sys.unraisablehook = lambda _: None  # of what misses the data
    threading.excepthook = lambda _: None
    names = vars(sys.modules["__main__"])
    for name, value in list(names.items()):
        if not isinstance(value, types.ModuleType | types.FunctionType | type):
            del names[name]
    # Also the last reference of this function's own, before what is left is looked for.
    value = None
    gc.collect()
    ctypes.CDLL(None).fflush(None)  # of the program's C libraries


def exit_now(code: int) -> NoReturn:
    """Ends the process here and now, with an exit code or by SIGINT (-2)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == -signal.SIGINT:
        # Shells and launchers tell an interrupted program by the signal, not by a code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def run_as_main(script: Script) -> None:
    """Runs the script in this process, which from here on is its own."""
    sys.argv = [script.path, *script.own_arguments()]
    sys.orig_argv = [sys.executable, *(["-m"] if script.module else []), *sys.argv]
    # The module of this process from here on: multiprocessing and pickle look it up by name.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    folder = script.folder
    _set_path(folder)
    if script.module or folder == os.path.abspath(script.path):
        if sys.flags.safe_path and not script.module:
            sys.path.insert(0, folder)
        try:
            name = script.path if script.module else "__main__"
            runpy._run_module_as_main(name, script.module)  # type: ignore[attr-defined]
        except SystemExit as end:
            if isinstance(end.__context__, runpy._Error):  # type: ignore[attr-defined]
                raise ImportError(str(end.__context__)) from None
            raise
    else:
        path = os.path.abspath(script.path)
        main.__dict__.update(__file__=path, __cached__=None, __package__=None)
        loader = main.__loader__ = SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = loader.source_to_code(file.read(), path)
        exec(code, main.__dict__)


def _set_path(first: str) -> None:
    """Puts the script's folder where the launcher has the folder of its own script."""
    if not sys.flags.safe_path:
        sys.path[0] = first


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the launcher's frames at its top."""
    here = os.path.dirname(__file__)
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == here:
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """For imports: looking through all of torch for garbage, again and again, takes longer.

    And Ctrl-C, which a module that is imported may catch with all that it passes over, comes
    through in the end.
    """
    was = gc.isenabled()
    asked = threading.Event()
    caught = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    caught = caught and threading.current_thread() is threading.main_thread()

    def remember(number: int, frame: types.FrameType | None) -> None:
        asked.set()
        raise KeyboardInterrupt

    gc.disable()
    if caught:
        signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        if caught:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if was:
            gc.enable()
    if asked.is_set():
        raise KeyboardInterrupt


@nothing_collected()
def import_for_ranks(modules: Sequence[str]) -> None:
    """Imports what every rank would import; none of it starts a thread or touches CUDA.

    Args:
        modules: names of what these ranks would import besides.
    """
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    # Before a group is opened: its functions keep the group of the moment as a default argument.
    import torch.distributed.nn.functional  # noqa: F401  # isort: skip

    from lockstep.run.watch import error_record, probe, script_processes  # noqa: F401

    for name in modules:
        import_module(name)


def reset_after_fork() -> None:
    """In a copy of the zygote: what the imported libraries have read or drawn there is the rank's.

    numpy.random has drawn its state when it was imported: without this all ranks would share it.
    """
    random = sys.modules.get("numpy.random")  # numpy itself imports it at its first use
    if random is not None:
        random.seed()
    # torch has read the zygote's number of threads.
    torch = sys.modules.get("torch")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and asked.isdigit() and int(asked) != torch.get_num_threads():
        torch.set_num_threads(int(asked))


def open_streams() -> None:
    """Makes `sys.stdin`, `stdout` and `stderr` anew for the descriptors the rank was given.

    Unbuffered as under `python -u`, which is how torchrun starts scripts: what a rank has written
    before it is killed is in its log.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, f"__{name}__") or getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors="backslashreplace" if number == 2 else old.errors,
            line_buffering=os.isatty(number),
            write_through=True,
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    stdin = open(0, encoding=sys.getfilesystemencoding(), errors="strict", closefd=False)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]

"""`lockstep.launch`: a function on several processes, from Python or a notebook.

A rank is a copy of the launching process itself, or it is forked from a fresh interpreter that has
imported torch. It then imports the user's script as a process of multiprocessing does (start method
"spawn"), and reads the call; so no rank is a copy of a process in which the user's code has run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import mmap
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.errors import RankFailedError, UsageError
from lockstep.run.start import worker
from lockstep.run.start.machine import read_machine
from lockstep.run.start.plan import LaunchPlan, LaunchSpec, choose_nproc, make_plan
from lockstep.run.start.process import Attempt
from lockstep.run.start.run_folder import make_folder
from lockstep.run.start.source_hints import large_modules, read_script
from lockstep.run.start.zygote import FreshZygote, Zygote, serve
from lockstep.wording import count_noun, format_ranks

if TYPE_CHECKING:
    from lockstep.run.start.agent import Agent
    from lockstep.run.watch.first_failure import FirstFailure


_GRACE_S = 3.0
"""Between the request to end and the killing."""

# What torchrun's `PET_` variables may say otherwise.
_ONE_START = ("--standalone", "--nnodes=1", "--max-restarts=0")


RESULT = "result.pickle"
"""In a rank's folder: what the function returned."""

_FRESH = """\
import json, sys
sys.path = json.loads(sys.argv[1])
from lockstep.run.start.spawn import zygote_main
zygote_main(*map(json.loads, sys.argv[2:]))
"""


FunctionCall = functools.partial[Any]
"""What a rank is to do."""


class NoMainGuard(SystemExit):
    """The script that a rank imports called `launch` while it was being imported."""


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc: int | str = "auto",
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(*args)` on `nproc` processes of this machine and returns what each returned.

    Each process finds its place as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...), so
    `lockstep.init()` and `torch.distributed.init_process_group()` in `fn` join the run. All
    sockets are on loopback. The processes are watched as under `lockstep run`: one that fails, and
    a run that cannot go on, ends all of them within seconds. What they print is passed on with
    their rank before each line. Ctrl-C, and SIGTERM where the caller has no handler of its own,
    end the processes and then raise here; when this process is killed they are ended as well.

    A function of an importable module runs in fresh processes, which import this process's script
    as those of multiprocessing do (start method "spawn"). What cannot be sent to those, such as a
    function of a notebook, a lambda or a closure, runs in copies of this process ("fork"), with
    one torch thread each: OpenMP's other threads do not survive a fork, and waiting for them would
    hang.

    Args:
        fn: called on every process with the same arguments. What it returns must be picklable,
            and is best on the CPU.
        args: the arguments.
        nproc: a number of processes; `auto`: one a GPU, or one a core where there is no GPU;
            `gpu`, `cpu` likewise.
        timeout: seconds after which the run is ended with an error; None: no limit.
        env: environment variables of the processes, beside those of this one.

    Returns:
        The returned values, by rank.

    Raises:
        RankFailedError: a process failed, all wait for each other, or the time is over. The others
            have been ended. Logs and evidence are kept in a folder, which the message names.
        SettingError: `nproc` is not a number of processes.
        UsageError: called inside a rank; from a script without the `__main__` guard; or CUDA is in
            use in this process and `fn` can only be run by fork.
    """
    _refuse_inside_a_rank()
    machine = read_machine()
    size = choose_nproc(nproc, machine.cores, machine.gpus)
    name = getattr(fn, "__qualname__", repr(fn))
    was_set = f"launch({name}) on {count_noun(size, 'process')}"
    call = _callable_elsewhere(functools.partial(fn, *args), was_set)
    short = name.rpartition(".")[2]
    script = worker.Script(path=short if short.isidentifier() else "launch")
    spec = LaunchSpec(script=script, torchrun=_ONE_START)
    own = env or {}
    made = make_plan(spec, machine, {**os.environ, **own}, size, one_node=True)
    threads = {} if isinstance(call, bytes) else {"OMP_NUM_THREADS": "1"}
    environment = {**made.environment, **own, **threads}
    made = replace(made, environment=environment, timeout=timeout, keyboard=False)
    made = replace(made, launcher="lockstep.launch")
    with contextlib.closing(_start_zygote(call, made, fn)) as zygote:
        # Only now: it imports much, and the zygote has begun already.
        from lockstep.run.start.agent import launch_agent
        from lockstep.run.start.torchrun_flags import parse_flags

        flags = parse_flags(made.arguments)
        flags.shutdown_timeout = _GRACE_S
        keep = flags.log_dir is not None
        folder = make_folder(flags.log_dir, script.path)
        try:
            agent = launch_agent(made, flags, zygote, folder)
            _raise_if_interrupted(agent)
            return _values(agent, was_set, timeout)
        except RankFailedError:
            keep = True
            raise
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


def _refuse_inside_a_rank() -> None:
    # A rank that has not come to its function yet; the process that launched it explains it, once.
    if "RANK" in os.environ and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise NoMainGuard(1)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UsageError(
            "launch() inside a run",
            f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} already",
            "call the function itself, or start the script with plain python",
        )


def _callable_elsewhere(call: FunctionCall, was_set: str) -> FunctionCall | bytes:
    """The call pickled, for a fresh process; as it is where only a copy of this one can run it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # at the prompt: None; from standard input: "<stdin>"
    importable = getattr(main, "__spec__", None) is not None or (file and Path(file).is_file())
    try:
        pickled = pickle.dumps(call)
    except Exception as error:  # pickle, and a user's own reducer, raise what they like
        reason = f"it cannot be sent to a fresh process ({error})"
    else:
        if importable or (file is None and b"__main__" not in pickled):
            return pickled
        reason = "there is no script file that a fresh process could import"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UsageError(
            was_set,
            f"{reason}, so only a copy of this process can run it, but this process uses CUDA "
            "already, which does not work in copies",
            "restart and launch before the first use of CUDA, or move the function to a module",
        )
    return call


def _start_zygote(call: FunctionCall | bytes, made: LaunchPlan, fn: Callable[..., Any]) -> Zygote:
    if not isinstance(call, bytes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            return Zygote(lambda: run_copy(call))
    try:
        source = inspect.getsourcefile(inspect.unwrap(fn)) or os.devnull
    except (TypeError, OSError):  # not a function of Python's
        source = os.devnull
    modules = {*large_modules(sys.modules), *read_script(worker.Script(path=source)).imports}
    preparation = multiprocessing.spawn.get_preparation_data("")
    # Multiprocessing sends its key through pipes alone, and so do we: the file has no name.
    preparation["authkey"] = bytes(preparation["authkey"])
    path = [entry for entry in preparation["sys_path"] if isinstance(entry, str)]
    with tempfile.TemporaryFile() as file:
        pickle.dump(preparation, file)
        file.write(call)
        file.flush()
        python = os.fsdecode(multiprocessing.spawn.get_executable())
        options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        given = (json.dumps(path), json.dumps(sorted(modules)), str(file.fileno()))
        line = [python, *options, "-c", _FRESH, *given]
        return FreshZygote(line, {**os.environ, **made.environment}, [file.fileno()])


def _raise_if_interrupted(agent: Agent) -> None:
    """Goes on with what a signal began; a rank that is alone may have had Ctrl-C for us."""
    number = agent.interrupted.signal if agent.interrupted else 0
    if agent.failure is not None and agent.failure.kind == "interrupted":
        number = agent.failure.exit_code - 128
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        raise SystemExit(128 + number)


def _values(agent: Agent, was_set: str, timeout: float | None) -> list[Any]:
    attempt = agent.attempts[-1]  # there is one: the run was not interrupted
    try:
        if attempt.failure is not None:
            raise _failed(attempt.failure, attempt, was_set)
        if agent.timed_out_ranks:
            raise RankFailedError(
                f"{was_set}, timeout={timeout}",
                f"{format_ranks(agent.timed_out_ranks)} had not ended in time\n"
                f"    logs: {attempt.folder}",
                "allow more time, or see what those ranks wait for",
                agent.timed_out_ranks[0],
            )
        return [_read(process.folder, process.rank, was_set) for process in attempt.processes]
    finally:
        for process in attempt.processes:
            (process.folder / RESULT).unlink(missing_ok=True)


def _failed(first: FirstFailure, attempt: Attempt, was_set: str) -> Exception:
    from lockstep.run.watch.error_record import read_error
    from lockstep.run.watch.evidence import Evidence
    from lockstep.run.watch.failure_report import render_failure

    folders = {process.rank: process.folder for process in attempt.processes}
    ended = first.ranks if first.kind != "deadlock" else ()  # these were ended by the launcher
    records = {rank: read_error(Evidence.in_folder(folders[rank])) for rank in ended}
    if any(record and record.type == NoMainGuard.__name__ for record in records.values()):
        return UsageError(
            was_set,
            "each new process imports the script, and the script launches again when imported",
            'put the call of launch() under `if __name__ == "__main__":`',
        )
    rank = next((rank for rank, record in records.items() if record), min(first.ranks, default=0))
    record = records.get(rank)
    text = render_failure(replace(first, advice=())).removeprefix("FIRST FAILURE: ")
    default = "fix what its traceback shows" if record else "look at what the process printed last"
    return RankFailedError(
        was_set,
        text.replace("\n", "\n    "),
        "; ".join(first.advice) or default,
        rank,
        record.traceback if record else "",
    )


def _read(folder: Path, rank: int, was_set: str) -> Any:
    try:
        with open(folder / RESULT, "rb") as file:
            return pickle.load(file)  # written by our own process, in a folder of this user alone
    except FileNotFoundError:
        found = f"rank {rank} ended with exit code 0, but without returning (os._exit?)"
        raise RankFailedError(was_set, found, "let the function return", rank) from None
    except Exception as error:
        raise RankFailedError(
            was_set,
            f"what rank {rank} returned cannot be read here: {error}",
            "return plain values, tensors, or objects of importable classes",
            rank,
        ) from error


def run_copy(call: FunctionCall) -> NoReturn:
    """The life of a rank that is a copy of the launching process."""
    worker.open_streams()
    torch = sys.modules.get("torch")
    if torch is not None:
        # OpenMP's thread pool was not copied; a parallel region would wait for it for ever.
        torch.set_num_threads(1)
    codes = []
    # It forgets the children, finalizers and locks of the launching process, and ends by itself
    # without what that one runs at its exit.
    process: Any = multiprocessing.Process(
        target=lambda: codes.append(worker.run_recorded(lambda folder: _run_call(call, folder))),
        name=_name(),
        daemon=False,
    )
    process._bootstrap()
    worker.exit_now(codes[0] if codes else 1)


def zygote_main(modules: Sequence[str], file: int, control: int) -> NoReturn:
    """The life of a fresh zygote; see `_start_zygote`."""
    os.set_inheritable(file, False)
    worker.import_for_ranks(modules)
    serve(control, lambda: _run_fresh(file))


def _run_fresh(file: int) -> NoReturn:
    worker.open_streams()
    worker.reset_after_fork()
    worker.exit_process(worker.run_recorded(lambda folder: _run_call(_read_call(file), folder)))


def _read_call(file: int) -> FunctionCall:
    """Imports the user's script and reads what to call."""
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # by it `launch` in the script is known
    try:
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped:
            os.close(file)
            preparation: dict[str, Any] = pickle.load(mapped)
            multiprocessing.spawn.prepare({**preparation, "name": _name()})
            call: FunctionCall = pickle.load(mapped)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    return call


def _name() -> str:
    return f"lockstep-rank-{os.environ['RANK']}"


def _run_call(call: FunctionCall, folder: Path) -> None:
    """Calls the function and writes what it returns."""
    try:
        value = call()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    # In copies nothing runs at exit: what the function left open is closed here.
    world = sys.modules.get("lockstep.world")
    if world is not None:
        world.close_current()
    folder.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary folders may have been here
    with open(folder / RESULT, "wb") as file:  # it is read where we end with exit code 0
        # By value: multiprocessing's own pickler would leave tensors in memory that dies with us.
        pickle.dump(value, file)

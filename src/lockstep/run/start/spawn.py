"""Implements `lockstep.launch`, which runs a function on several processes, from Python or a
notebook.

Each process is a *rank*, forked from a *fork server*. There are two kinds of fork servers:

- A fresh interpreter that has imported torch. Its ranks import the user's script, as processes of
  multiprocessing do (start method "spawn"), and read the pickled call. No code of the user's has
  run in them before.
- A copy of this process, for a call that cannot be pickled (start method "fork").

A rank writes its pickled return value into its folder, from which the launching process reads it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import EXIT_SIGNAL, RankFailedError, SettingError, UsageError
from lockstep.keyword_arguments import check_keywords
from lockstep.language import in_english, translate
from lockstep.machine import process_copy
from lockstep.machine.topology import threads_set_by_user
from lockstep.run.run_folder import make_folder
from lockstep.run.start import worker
from lockstep.run.start.cuda_state import how_cuda_was_initialised
from lockstep.run.start.fork_server import ForkServer, FreshForkServer
from lockstep.run.start.fork_server_messages import unnamed_file
from lockstep.run.start.function_worker import (
    RESULT_NAME,
    FunctionCall,
    NoMainGuard,
    is_importing_main_script,
    run_copy,
)
from lockstep.run.start.machine import read_machine
from lockstep.run.start.plan import LaunchPlan, LaunchSpec, choose_nproc, make_plan
from lockstep.run.start.process import Attempt
from lockstep.run.start.source_hints import large_modules, read_script
from lockstep.wording import count_noun, format_ranks

if TYPE_CHECKING:
    from lockstep.run.start.agent import Agent
    from lockstep.run.watch.error_record import ErrorRecord
    from lockstep.run.watch.first_failure import FirstFailure

_SHUTDOWN_TIMEOUT_S = 3.0
"""A rank that was asked to end is killed after this time."""
_ONE_MACHINE_FLAGS = ("--standalone", "--nnodes=1")
"""torchrun's flags for one machine, which take precedence over its `PET_` variables."""
_FRESH_FORK_SERVER_PROGRAM = """\
import json, sys
sys.path = json.loads(sys.argv[1])
from lockstep.run.start.function_worker import fork_server_main
fork_server_main(*map(json.loads, sys.argv[2:]))
"""


@check_keywords("lockstep.launch", {"num_processes": "nproc", "world_size": "nproc"})
def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc: int | str = "auto",
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    ray: bool | str = False,
) -> list[Any]:
    """Runs `fn(*args)` on `nproc` processes and returns what each returned.

    The processes are on this machine, or with `ray` on the nodes of a Ray cluster.

    Each process finds its place as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...), so
    `lockstep.init()` and `torch.distributed.init_process_group()` in `fn` join the run. On one
    machine all sockets are on loopback. The processes are watched as under `lockstep run`: one that
    fails, and a run that cannot go on, ends all of them within seconds. What they print is passed
    on with their rank before each line. Ctrl-C, and SIGTERM unless the caller has a handler of its
    own, end the processes and then raise here; when this process is killed they are ended as well.

    A function of an importable module runs in fresh processes, which import this process's script
    as those of multiprocessing do (start method "spawn"). What cannot be sent to those, such as a
    function of a notebook, a lambda or a closure, runs in copies of this process ("fork"), with
    one torch thread each: OpenMP's other threads do not survive a fork, and waiting for them would
    hang.

    On a Ray cluster, the function is pickled as Ray pickles its tasks (cloudpickle), in which
    functions of notebooks, lambdas and closures are included, and runs in fresh processes.

    Args:
        fn: called on every process with the same arguments. What it returns must be picklable,
            and is best on the CPU.
        args: the arguments.
        nproc: a number of processes; `gpu`: one a GPU; `cpu`: one a core; `auto`: one a GPU, or
            one a core if there is no GPU. With `ray`, they are counted in the whole cluster.
        timeout: seconds from a start of the processes after which the run is ended with an error;
            None: no limit.
        env: environment variables of the processes, in addition to those of this process.
        max_restarts: how many times all processes are started again when one has failed. Steps that
            they have kept in memory (`World.checkpoint`) are still there then. With `ray`, they are
            also started again when a node is lost, and only checkpoints on disk are there then.
        ray: True runs the processes on the Ray cluster to which this process is connected, or else
            on the one that RAY_ADDRESS names or that runs on this machine. A text is the address
            of a cluster, such as "10.0.0.1:6379".

    Returns:
        The returned values, by rank.

    Raises:
        RankFailedError: a process failed, all wait for each other, or the time is over. The others
            have been ended. Logs and evidence are kept in a folder, which the message names.
        SettingError: `nproc` is not a number of processes, or `max_restarts` not one of starts.
        HostError: there is no such Ray cluster, or the processes cannot be started on it.
        UsageError: called inside a rank; from a script without the `__main__` guard; or CUDA was
            initialised in this process and `fn` can only be run by fork.
    """
    _refuse_inside_a_rank()

    if type(max_restarts) is not int or max_restarts < 0:
        raise SettingError(
            f"launch(max_restarts={max_restarts!r})",
            "it is how many times the processes are started again",
            "give a whole number, such as 3",
        )

    users_variables = env or {}
    name = getattr(fn, "__qualname__", repr(fn))
    short_name = name.rpartition(".")[2]
    script_name = short_name if short_name.isidentifier() else "launch"

    if ray is not False:
        from lockstep.run.machines.ray_launch import RayRequest, launch_on_ray

        request = RayRequest(
            address=ray,
            name=name,
            script_name=script_name,
            nproc=str(nproc),
            timeout=timeout,
            environment=users_variables,
            max_restarts=max_restarts,
            modules=sorted(_probable_imports(fn)),
        )
        return launch_on_ray(fn, args, request)

    machine = read_machine()
    size = choose_nproc(nproc, machine.cores, machine.gpus)
    launch_text = f"launch({name}) on {count_noun(size, 'process')}"
    call = functools.partial(fn, *args)

    pickled_call, why_not_pickled = _pickle_if_possible(call)
    if pickled_call is None:
        _check_copies_can_use_gpus(launch_text, why_not_pickled, machine.gpus, users_variables)

    script = worker.Script(path=script_name)
    spec = LaunchSpec(
        script=script, torchrun=(*_ONE_MACHINE_FLAGS, f"--max-restarts={max_restarts}")
    )
    plan = make_plan(spec, machine, {**os.environ, **users_variables}, size, one_node=True)

    # OpenMP's other threads do not survive a fork.
    environment = {**plan.environment, **users_variables}
    if pickled_call is None:
        environment["OMP_NUM_THREADS"] = str(process_copy.THREADS_OF_COPY)
    plan = replace(
        plan,
        environment=environment,
        timeout=timeout,
        keyboard=False,
        launcher="lockstep.launch",
    )
    if pickled_call is None:
        threads = threads_set_by_user({**os.environ, **users_variables})
        return _run_with_fork_server(_fork_this_process(call, threads), None, plan, launch_text)
    return run_in_fresh_processes(pickled_call, _probable_imports(fn), plan, launch_text)


def run_in_fresh_processes(
    pickled_call: bytes, modules: Iterable[str], plan: LaunchPlan, launch_text: str
) -> list[Any]:
    """Runs a call on the ranks of this machine, in fresh processes.

    Args:
        pickled_call: the pickled call.
        modules: names of modules that the ranks will probably import.
        plan: the plan of the run.
        launch_text: text that names the launch in errors.

    Returns:
        The returned values of this machine's ranks, in the order of the ranks.

    Raises:
        RankFailedError, UsageError, KeyboardInterrupt, SystemExit: see `launch`.
    """
    start_fork_server = functools.partial(_start_fresh_fork_server, modules, pickled_call, plan)
    return _run_with_fork_server(start_fork_server(), start_fork_server, plan, launch_text)


def _run_with_fork_server(
    fork_server: ForkServer,
    start_fork_server: Callable[[], ForkServer] | None,
    plan: LaunchPlan,
    launch_text: str,
) -> list[Any]:
    """Runs the ranks of this machine; see `run_in_fresh_processes`.

    Args:
        fork_server: the process that forks the ranks.
        start_fork_server: function that starts another fork server if this one is killed; None
            if there can be no other one.
        plan: the plan of the run.
        launch_text: text that names the launch in errors.
    """
    with contextlib.closing(fork_server):
        # These imports take long. They come after the fork server is started, which imports torch
        # in the meantime.
        from lockstep.run.start.agent import run_agent
        from lockstep.run.start.torchrun_flags import parse_flags

        flags = parse_flags(plan.arguments)
        flags.shutdown_timeout = _SHUTDOWN_TIMEOUT_S
        keep_folder = flags.log_dir is not None
        folder = make_folder(flags.log_dir, plan.script.path)
        try:
            # This returns when the ranks have ended.
            agent = run_agent(plan, flags, fork_server, folder, start_fork_server)
            _raise_if_interrupted(agent)
            return _returned_values(agent, launch_text, plan.timeout)
        except RankFailedError:
            keep_folder = True
            raise
        finally:
            if not keep_folder:
                shutil.rmtree(folder, ignore_errors=True)


def _refuse_inside_a_rank() -> None:
    """Raises an error if this process is a rank itself.

    Raises:
        NoMainGuard: the rank is importing the user's script, and the script calls `launch` when it
            is imported. The process that launched the rank explains this, once for all ranks.
        UsageError: the function that the rank runs calls `launch`.
    """
    if "RANK" not in os.environ:
        return

    if is_importing_main_script():
        raise NoMainGuard(1)  # the exit code of the rank

    # Without WORLD_SIZE, RANK may be a variable of another program.
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            "launch() inside a run",
            f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} already",
            "call the function itself, or start the script with plain python",
        )


def _pickle_if_possible(call: FunctionCall) -> tuple[bytes | None, str]:
    """Pickles a call, if a fresh process can run it.

    Args:
        call: the function and its arguments.

    Returns:
        The pickled call and an empty string; or None if only a copy of this process can run the
        call, and the reason for that.
    """
    try:
        pickled = pickle.dumps(call)
    except Exception as error:  # pickle, and a reducer of the user's, may raise anything
        return None, f"it cannot be sent to a fresh process ({error})"

    if _fresh_process_can_unpickle(pickled):
        return pickled, ""
    return None, "there is no script file that a fresh process could import"


def _fresh_process_can_unpickle(pickled_call: bytes) -> bool:
    """Returns True if a fresh process can import the user's program, or need not.

    the program is            a fresh process
    run by `python -m`        imports it by its name
    a prompt or a notebook    cannot import it, and need not if the call uses nothing of it
    a script                  imports its file
    read from stdin           cannot import it: its `__file__`, "<stdin>", is no file
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # None at the prompt and in a notebook
    was_started_as_module = getattr(main, "__spec__", None) is not None  # by `python -m`
    if was_started_as_module:
        return True
    if file is None:
        return b"__main__" not in pickled_call
    return Path(file).is_file()


def _check_copies_can_use_gpus(
    launch_text: str, why_copies: str, gpus: int, users_variables: Mapping[str, str]
) -> None:
    """Checks that copies of this process can use the GPUs of this machine, if there are any.

    Args:
        launch_text: the launch, with which the error begins: `launch(train) on 2 processes`.
        why_copies: why the function can only run in copies.
        gpus: number of visible GPUs.
        users_variables: environment variables of the copies, which may hide the GPUs.

    Raises:
        UsageError: they cannot, because CUDA was initialised in this process.
    """
    variables = {**os.environ, **users_variables}
    gpus_are_hidden = variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if gpus == 0 or gpus_are_hidden:
        return

    how = how_cuda_was_initialised()
    is_initialised = how is not None
    if not is_initialised:
        return

    raise UsageError(
        launch_text,
        f"{why_copies}, so only a copy of this process can run it. But CUDA was initialised in "
        f"this process ({how}), and then it does not work in copies",
        "restart the notebook's kernel, import lockstep before anything looks for GPUs, and launch "
        "before the first use of CUDA; or move the function to a module. To train on the CPU, pass "
        "env={'CUDA_VISIBLE_DEVICES': ''}",
    )


# Starting the fork server


def _fork_this_process(call: FunctionCall, threads_asked_for: int | None) -> ForkServer:
    """Starts a fork server that is a copy of this process.

    Args:
        call: what the ranks run.
        threads_asked_for: the user's OMP_NUM_THREADS, if there is one.
    """
    with warnings.catch_warnings():
        # Since Python 3.12 os.fork warns if this process has threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ForkServer(lambda: run_copy(call, threads_asked_for))


def _probable_imports(fn: Callable[..., Any]) -> set[str]:
    """Returns the names of large modules that the ranks will probably import.

    They are those that this process has imported, and those that the function's source mentions.
    """
    imports = set(large_modules(sys.modules))
    try:
        source_path = inspect.getsourcefile(inspect.unwrap(fn))
    except (TypeError, OSError):  # it is not a Python function
        source_path = None

    if source_path is not None:
        imports.update(read_script(worker.Script(path=source_path)).imports)
    return imports


def _start_fresh_fork_server(
    modules: Iterable[str], pickled_call: bytes, plan: LaunchPlan
) -> ForkServer:
    """Starts a fork server in a new interpreter.

    Args:
        modules: names of the modules that the fork server imports for the ranks.
        pickled_call: the pickled call, which the ranks read from a file without a name.
        plan: the plan of the run.
    """
    preparation = _preparation_data()
    # A script may also have put a Path into `sys.path`. The import system ignores it.
    import_path = [entry for entry in preparation["sys_path"] if isinstance(entry, str)]

    with unnamed_file() as file:
        pickle.dump(preparation, file)  # a rank unpickles this first
        file.write(pickled_call)  # and then this
        file.flush()

        python = os.fsdecode(multiprocessing.spawn.get_executable())
        options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        arguments = [json.dumps(import_path), json.dumps(sorted(modules)), str(file.fileno())]
        command = [python, *options, "-c", _FRESH_FORK_SERVER_PROGRAM, *arguments]
        return FreshForkServer(command, {**os.environ, **plan.environment}, [file.fileno()])


def _preparation_data() -> dict[str, Any]:
    """Returns what multiprocessing tells a new process before that imports the script.

    It is `sys.path`, `sys.argv` and so on, and a secret key. The key is of a type that can only be
    pickled while multiprocessing itself starts a process, so it is replaced by plain bytes. It
    stays secret, as the file that it is written to has no name.
    """
    preparation: dict[str, Any] = multiprocessing.spawn.get_preparation_data("")
    preparation["authkey"] = bytes(preparation["authkey"])
    return preparation


# How the run ended


def _raise_if_interrupted(agent: Agent) -> None:
    """If a signal ended the run, raises the exception that it would have caused in this process.

    Raises:
        KeyboardInterrupt: the signal was Ctrl-C.
        SystemExit: it was another signal.
    """
    number = _signal_that_ended(agent)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(EXIT_SIGNAL + number)


def _signal_that_ended(agent: Agent) -> int | None:
    """Returns the number of the signal that ended a run from outside; None if none did."""
    # If the signal has ended the ranks, it was sent to this process or, in case of Ctrl-C, to the
    # only rank.
    failure = agent.failure
    if failure is not None and failure.kind == "interrupted":
        return failure.exit_code - EXIT_SIGNAL  # the exit code is 128 + the number of the signal

    # The signal may also have come before any rank was started, or after another failure had ended
    # the ranks.
    if agent.received_signal is not None:
        return agent.received_signal.signal
    return None


def _returned_values(agent: Agent, launch_text: str, timeout: float | None) -> list[Any]:
    """Reads the return value of each rank, and deletes the files.

    Args:
        agent: the agent that has run the ranks.
        launch_text: the launch, with which errors begin: `launch(train) on 2 processes`.
        timeout: the timeout of the launch, for the error.

    Raises:
        RankFailedError: a rank failed, or had not ended in time.
        UsageError: the script has no `__main__` guard.
    """
    attempt = agent.attempts[-1]  # there is one, since the run was not interrupted
    try:
        if attempt.failure is not None:
            raise _error_of_failure(attempt.failure, attempt, launch_text)

        if agent.timed_out_ranks:
            raise RankFailedError(
                f"{launch_text}, timeout={timeout}",
                f"{format_ranks(agent.timed_out_ranks)} had not ended in time\n"
                f"    logs: {attempt.folder}",
                "allow more time, or see what those ranks wait for",
                agent.timed_out_ranks[0],
            )

        return [
            _returned_value(process.folder, process.rank, launch_text)
            for process in attempt.processes
        ]
    finally:
        for process in attempt.processes:
            (process.folder / RESULT_NAME).unlink(missing_ok=True)


def _error_of_failure(failure: FirstFailure, attempt: Attempt, launch_text: str) -> Exception:
    """Returns the error that `launch` raises for the first failure of a run.

    The error names one of the failed ranks, and has the traceback of the exception that it has
    recorded, if it has recorded one.
    """
    from lockstep.run.watch.failure_report import render_failure

    # In a deadlock, the launcher ended the ranks, so their exceptions are not the cause.
    record_of_rank: dict[int, ErrorRecord] = {}
    if failure.kind != "deadlock":
        record_of_rank = _recorded_errors(failure.ranks, attempt)

    for record in record_of_rank.values():
        if record.type == NoMainGuard.__name__:
            return UsageError(
                launch_text,
                "each new process imports the script, and the script launches again when imported",
                'put the call of launch() under `if __name__ == "__main__":`',
            )

    # The first of the ranks that have recorded an exception, or the lowest one if none has.
    failed_rank = next(iter(record_of_rank), min(failure.ranks, default=0))
    first_record = record_of_rank.get(failed_rank)

    # The message of an error of Lockstep's own says everything, including the user's line.
    is_told = first_record is not None and first_record.from_lockstep
    if first_record is None:
        usual_advice = "look at what the process printed last"
    elif is_told:
        usual_advice = "as its message says"
    else:
        usual_advice = "fix what its traceback shows"

    # The advice is left out of the text, as the error has a field of its own for it.
    failure_without_advice = replace(failure, advice=())
    found = render_failure(failure_without_advice)
    found_for_people = render_failure(failure_without_advice, translate)
    return RankFailedError(
        launch_text,
        _as_found(found, in_english("FIRST FAILURE:")),
        "; ".join(failure.advice) or usual_advice,
        failed_rank,
        "" if first_record is None else first_record.traceback,
        is_told=is_told,
        found_for_people=_as_found(found_for_people, translate("FIRST FAILURE:")),
    )


def _as_found(report: str, heading: str) -> str:
    """Removes the heading from the report of a failure, and indents it for use in an error."""
    return report.removeprefix(heading).strip().replace("\n", "\n    ")


def _recorded_errors(ranks: Iterable[int], attempt: Attempt) -> dict[int, ErrorRecord]:
    """Reads the exceptions that ranks have recorded, by rank and in the order of `ranks`.

    Those of ranks on other machines cannot be read, and are left out.
    """
    from lockstep.run.watch.error_record import read_error
    from lockstep.run.watch.evidence import Evidence

    folders = {process.rank: process.folder for process in attempt.processes}
    record_of_rank = {}
    for rank in ranks:
        if rank not in folders:
            continue
        record = read_error(Evidence.in_folder(folders[rank]))
        if record is not None:
            record_of_rank[rank] = record

    return record_of_rank


def _returned_value(folder: Path, rank: int, launch_text: str) -> Any:
    """Reads the return value of a rank.

    Args:
        folder: the folder of the rank.
        rank: the rank.
        launch_text: the launch, with which errors begin: `launch(train) on 2 processes`.

    Raises:
        RankFailedError: the rank has returned nothing, or its value cannot be unpickled here.
    """
    try:
        with open(folder / RESULT_NAME, "rb") as file:
            return pickle.load(file)  # written by our own process, in a folder of this user only
    except FileNotFoundError:
        found = f"rank {rank} ended with exit code 0, but without returning (os._exit?)"
        raise RankFailedError(launch_text, found, "let the function return", rank) from None
    except Exception as error:
        raise RankFailedError(
            launch_text,
            f"what rank {rank} returned cannot be read here: {error}",
            "return plain values, tensors, or objects of importable classes",
            rank,
        ) from error

"""What runs in the processes of `launch`: a function, where `rank_main` has a script.

A rank is a copy of the launching process itself, or it is forked from a fresh interpreter that has
imported torch. It then imports the user's script as a process of multiprocessing does (start method
"spawn"), and reads the call; so no rank is a copy of a process in which the user's code has run.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lockstep.launch import rank_main
from lockstep.launch.forking import serve
from lockstep.launch.zygote import FreshZygote

RESULT = "result.pickle"
"""In a rank's folder: what the function returned."""

_FRESH = """\
import json, sys
sys.path = json.loads(sys.argv[1])
from lockstep.launch.rank_process import zygote_main
zygote_main(*map(json.loads, sys.argv[2:]))
"""


class Call(NamedTuple):
    """What a rank is to do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


class NoMainGuard(SystemExit):
    """The script that a rank imports called `launch` while it was being imported."""


def importing_the_script() -> bool:
    """Whether this process is a rank that has not come to its function yet."""
    process = multiprocessing.current_process()
    return "RANK" in os.environ and getattr(process, "_inheriting", False)


def run_copy(call: Call) -> NoReturn:
    """The life of a rank that is a copy of the launching process."""
    rank_main.open_streams()
    _forget_handlers()
    torch = sys.modules.get("torch")
    if torch is not None:
        # OpenMP's thread pool was not copied; a parallel region would wait for it for ever.
        torch.set_num_threads(1)
    codes = []
    # It forgets the children, finalizers and locks of the launching process, and ends by itself
    # without what that one runs at its exit.
    process: Any = multiprocessing.Process(
        target=lambda: codes.append(rank_main.run_recorded(lambda folder: _run(call, folder))),
        name=_name(),
        daemon=False,
    )
    process._bootstrap()
    rank_main.end(codes[0] if codes else 1)


def _forget_handlers() -> None:
    """The signals that end a process end this one, whatever the launching process does at them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def start_fresh(call: bytes, environment: Mapping[str, str], modules: Sequence[str]) -> FreshZygote:
    """A zygote whose ranks run the pickled call.

    Args:
        call: a `Call`, pickled.
        environment: variables in addition to ours.
        modules: names of what the ranks would import.

    Raises:
        OSError: no process could be made.
    """
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
        given = (json.dumps(path), json.dumps(modules), str(file.fileno()))
        line = [python, *options, "-c", _FRESH, *given]
        return FreshZygote(line, {**os.environ, **environment}, [file.fileno()])


def zygote_main(modules: Sequence[str], file: int, control: int) -> NoReturn:
    """The life of a fresh zygote; see `start_fresh`."""
    os.set_inheritable(file, False)
    rank_main.import_for_ranks(modules)
    serve(control, lambda: _run_fresh(file))


def _run_fresh(file: int) -> NoReturn:
    rank_main.open_streams()
    rank_main.settle()
    rank_main.leave(rank_main.run_recorded(lambda folder: _run(_read_call(file), folder)))


def _read_call(file: int) -> Call:
    """Imports the user's script and reads what to call."""
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # by it `launch` in the script is known
    try:
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped:
            os.close(file)
            preparation: dict[str, Any] = pickle.load(mapped)
            multiprocessing.spawn.prepare({**preparation, "name": _name()})
            call: Call = pickle.load(mapped)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    return call


def _name() -> str:
    return f"lockstep-rank-{os.environ['RANK']}"


def _run(call: Call, folder: Path) -> None:
    """Calls the function and writes what it returns."""
    try:
        value = call.fn(*call.args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    # In copies nothing runs at exit: what the function left open is closed here.
    world = sys.modules.get("lockstep.world")
    if world is not None:
        world.close_current()
    temporary = folder / f"{RESULT}.new"
    with open(temporary, "wb") as file:
        # By value: multiprocessing's own pickler would leave tensors in memory that dies with us.
        pickle.dump(value, file)
    temporary.replace(folder / RESULT)

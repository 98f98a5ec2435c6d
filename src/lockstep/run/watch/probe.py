"""What makes a rank visible from outside: stacks on a signal, a heartbeat, its collectives.

Everything here works for any script, costs about a microsecond a step, and is read by
`lockstep.run.watch.snapshot` in the launcher, from the files of `lockstep.run.watch.evidence`.
Stacks are the main thread's after each `STACK_SIGNAL`, those of all threads after each
`SLEEPERS_SIGNAL`, written by handlers in C, which need no interpreter's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import json
import mmap
import multiprocessing
import multiprocessing.process
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.distributed import torch_compat
from lockstep.errors import warn
from lockstep.run.watch.evidence import Evidence, write
from lockstep.wording import count_noun

STACK_SIGNAL = int(signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGURG)
"""Asks for the main thread's stack. Users and schedulers have SIGUSR1 and SIGUSR2; where there are
no real-time signals it is SIGURG, which a process without our handler ignores."""

SLEEPERS_SIGNAL = STACK_SIGNAL + 1
"""Asks the thread that answers for the stacks of all: no other thread takes it. For a process whose
threads all sleep: where they run, their stacks change while they are read."""

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Variables of a rank in which Flight Recorder is to run: the latest 2000 collectives, 1 to 1.3
microseconds each, about 1 KB each. Read by torch at the first process group."""

UNLIKE, RETURNED = "unlike", "returned"
"""Files of processes that a script has started: they are not the ranks of one group; one has come
to its end."""
_PACKAGES = str(Path(__file__).parents[3])
"""The folder that holds this package."""

_MAGIC = b"lkheart1"
_HEARTBEAT = struct.Struct("=8sqQQdd")
_STEPS = struct.Struct("=Qdd")
_STEPS_AT = _HEARTBEAT.size - _STEPS.size


class Heartbeat(NamedTuple):
    """What a rank says of itself without being asked."""

    pid: int
    main_thread: int
    """The main thread's identifier, as in `flight.json`."""
    steps: int
    """Optimizer steps so far."""
    last_step: float
    """When the last one ended: `time.monotonic()`, which all processes of a host share; 0: none."""
    took_s: float
    """From the end of the last but one to the end of the last; 0: fewer than two."""


def read_heartbeat(path: Path) -> Heartbeat | None:
    """A rank's heartbeat; None where there is none so far. Costs a few microseconds."""
    try:
        data = path.read_bytes()
        magic, *values = _HEARTBEAT.unpack(data[: _HEARTBEAT.size])
    except (OSError, struct.error):
        return None
    return Heartbeat(*values) if magic == _MAGIC else None


_kept_groups: list[object] = []
"""Process groups that were opened, until this process ends.

A DDP model that dies after `destroy_process_group`, as one does that is a local of `main()`, would
take the group along: its last owner waits for the group's threads, with the interpreter's lock that
they want. A script that imports torch by itself is spared that by chance: modules that DDP imports
after the group was opened keep it in their default arguments. Here they were imported before.
"""


class Probe:
    """What `install` sets up in this process."""

    def __init__(self, evidence: Evidence, own: int | None) -> None:
        evidence.heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self._evidence = evidence
        self._own = own
        self._map: mmap.mmap | None = None
        self._steps, self._last_step = 0, 0.0
        self._ask: int | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._show_stacks()
        self._start_heartbeat()
        if own is None:  # another process imports torch itself, or is a copy of one that has this
            torch_compat.on_default_group(_kept_groups.append)
        self._start_answering()
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.stop_answering)

    def stop_answering(self) -> None:
        """Ends the thread that answers.

        Before the interpreter's own end: a thread that then comes back from torch for the
        interpreter's lock takes the process down ("terminate called without an active exception").
        """
        if self._thread is not None and self._ask is not None:
            # Not by a request: of several that have come the thread answers the last alone.
            self._stopping = True
            os.write(self._ask, b"\n")
            self._thread.join()

    def warn_if_alone(self) -> None:
        """At the end of the program: warns where the ranks have trained without each other."""
        size = os.environ.get("WORLD_SIZE", "1")
        if self._steps and not _kept_groups and size != "1" and os.environ.get("RANK") == "0":
            steps = count_noun(self._steps, "step")
            warn(
                f"{size} processes",
                f"no process group was opened, but the optimizer took {steps}: each process has "
                "trained a model of its own",
                "join them by lockstep.init() and world.prepare(...), or run one process",
            )

    def forget(self) -> None:
        """In a forked child: it is not the rank, and has none of its threads."""
        self._map = None
        self._thread = None
        if self._ask is not None:
            os.close(self._ask)
            self._ask = None

    def _show_stacks(self) -> None:
        faulthandler.enable(_open_to_append(self._evidence.crash))
        # What faulthandler leaves behind at the interpreter's end: a late request kills nobody.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        # Of this thread alone: walking the frames of a thread that runs meanwhile ends in a
        # segmentation fault sooner or later (Python 3.11: once in some hundred times).
        # Without a chain it is SA_RESTART: see `snapshot.harmless_signal`.
        stacks = _open_to_append(self._evidence.stacks)
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=False, chain=False)
        if sys.platform == "linux":  # elsewhere nobody can tell whether they sleep
            signal.signal(SLEEPERS_SIGNAL, signal.SIG_IGN)
            faulthandler.register(SLEEPERS_SIGNAL, stacks, all_threads=True, chain=False)
            # Threads inherit it: not one whose sleep in C it would cut short.
            signal.pthread_sigmask(signal.SIG_BLOCK, [SLEEPERS_SIGNAL])

    def _start_heartbeat(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        main = threading.main_thread().ident or 0
        descriptor = os.open(self._evidence.heartbeat, os.O_RDWR | os.O_CREAT, 0o666)
        os.pwrite(descriptor, _HEARTBEAT.pack(_MAGIC, os.getpid(), main, 0, 0.0, 0.0), 0)
        self._map = mmap.mmap(descriptor, _HEARTBEAT.size)
        os.close(descriptor)
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        if self._map is not None:
            self._steps += 1
            now = time.monotonic()
            took_s = now - self._last_step if self._last_step else 0.0
            _STEPS.pack_into(self._map, _STEPS_AT, self._steps, now, took_s)
            self._last_step = now

    def _start_answering(self) -> None:
        """Starts the thread that waits for requests, before a process group is opened.

        A rank that waits for the others to come is then asked without a signal, which would make
        TCPStore count its timeout from the beginning.
        """
        path = self._evidence.ask
        try:
            if not path.exists():
                os.mkfifo(path, 0o600)
            # Read and write: without a writer of our own, reading would end when the asker closes.
            self._ask = os.open(path, os.O_RDWR)
        except OSError:  # a file system without pipes: a signal still shows the main stack
            return
        self._thread = threading.Thread(
            target=self._answer, args=(self._ask,), name="lockstep-answers", daemon=True
        )
        self._thread.start()

    def _answer(self, ask: int) -> None:
        if sys.platform == "linux":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [SLEEPERS_SIGNAL])
        while True:
            requests = os.read(ask, 4096).decode(errors="replace").split("\n")
            if self._stopping:
                os.close(ask)
                self._ask = None
                return
            number, _, how = (requests[-2:-1] or [""])[0].partition(" ")
            if number.isdigit():
                self._write_answer(number, lines=how == "lines")

    def _write_answer(self, number: str, *, lines: bool) -> None:
        try:
            torch_compat.take_gpu(self._own)
            stacks, groups = json.dumps(_stacks()), torch_compat.process_groups()
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            making = json.dumps(torch_compat.group_being_made(main))
            records = torch_compat.flight_record(lines=lines)
            routing = sys.modules.get("lockstep.communication.routing")
            if routing is not None and (shared := routing.shared_memory()) is not None:
                group, record = shared.flight_record()
                groups.append(group)
                records = f"{records[:-1]}, {json.dumps(record)}]"
            text = (
                f'{{"request": {number}, "stacks": {stacks}, "groups": {json.dumps(groups)}, '
                f'"making": {making}, "records": {records}}}'
            )
        except Exception as error:
            # Whatever torch says here must not end the thread: the next request may be answered.
            text = json.dumps({"request": int(number), "error": repr(error)})
        with contextlib.suppress(OSError):
            write(self._evidence.answer, text)


def _open_to_append(path: Path) -> int:
    """A descriptor to append to a file by, until this process ends."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _stacks() -> dict[int, list[tuple[str, int, str]]]:
    """The stacks of the other threads, innermost frame first."""
    own = threading.get_ident()
    return {
        ident: [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in itertools.islice(traceback.walk_stack(top), 100)
        ]
        for ident, top in sys._current_frames().items()
        if ident != own
    }


_visible: set[int] = set()
"""Processes that have a probe: this one, and those that it is a fork of."""


def install(evidence: Evidence, own: int | None = None) -> Probe:
    """Makes this process visible, until it ends, in some files; torch has been imported.

    Args:
        evidence: the files.
        own: its index among those that a script has started itself; None: the launcher has.

    Raises:
        OSError: they cannot be written.
    """
    _visible.add(os.getpid())
    return Probe(evidence, own)


def install_in_own_processes(folder: Path) -> None:
    """What the script starts by multiprocessing gets folders as ranks have them.

    What `mp.spawn` starts are ranks from the beginning, a `Process` is one when it opens a group.
    """
    calls = itertools.count()
    together, script = folder, os.getpid()

    def started(
        start: Any, fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **named: Any
    ) -> Any:
        if _PACKAGES not in sys.path:  # which a process that is spawned inherits
            sys.path.append(_PACKAGES)
        place = folder / f"own_{next(calls):06}_{nprocs}"
        return start(partial(_run_watched, place, nprocs, fn), args, nprocs, *others, **named)

    def start(process: multiprocessing.process.BaseProcess) -> None:
        nonlocal together
        if os.getpid() != script:
            start_process(process)
            return
        if not multiprocessing.active_children():
            together = folder / f"own_{next(calls):06}"
        run = partial(_run_watched_in_group, together, process.run)
        process.run = run  # type: ignore[method-assign]
        start_process(process)
        del process.run  # it holds the process, which would outlive its use

    on_start_processes(started)
    start_process = multiprocessing.process.BaseProcess.start
    multiprocessing.process.BaseProcess.start = start  # type: ignore


def on_start_processes(instead: Callable[..., Any]) -> None:
    """From now on `mp.spawn` and `mp.start_processes` call this, with the latter as an argument."""
    package: Any = import_module("torch.multiprocessing")
    module: Any = import_module("torch.multiprocessing.spawn")
    made = wraps(module.start_processes)(partial(instead, module.start_processes))
    module.start_processes = package.start_processes = made


def _run_watched(
    folder: Path, size: int, program: Callable[..., object], index: int, *args: Any
) -> None:
    """In a process that `mp.spawn` has started."""

    def check(group: Any) -> None:
        if (group.rank(), group.size()) != (index, size):
            (folder / UNLIKE).touch()

    install(Evidence.in_folder(folder / f"rank_{index}"), own=index)
    torch_compat.on_default_group(check)
    program(index, *args)
    (folder / f"rank_{index}" / RETURNED).touch()


def _run_watched_in_group(together: Path, run: Callable[[], object]) -> None:
    """In a `Process` that the script has started."""
    places: list[Path] = []

    def opened(group: Any) -> None:
        if os.getpid() in _visible or threading.current_thread() is not threading.main_thread():
            return  # signals are set up in the main thread alone
        folder = together.with_name(f"{together.name}_{group.size()}")
        place = folder / f"rank_{group.rank()}"
        if place.exists():  # several groups
            (folder / UNLIKE).touch()
            return
        places.append(place)
        install(Evidence.in_folder(place), own=group.rank())

    torch_compat.on_default_group(opened)
    run()
    for place in places:
        (place / RETURNED).touch()

"""Makes a rank visible to its launcher: its steps, its stacks and its collectives.

The *probe* runs inside the rank, works with any script, and costs about a microsecond per step. A
thread of its own answers the launcher's *requests* with the stacks of all threads and the recorded
collectives. If Python's lock (the GIL) keeps that thread from running, the launcher sends a *stack
signal*: its handler, written in C, writes the stacks without the lock. Everything goes into the
rank's `evidence` files.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import json
import os
import selectors
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep import torch_compat
from lockstep.error_in_flight import error_handled_by, note_step
from lockstep.errors import warn
from lockstep.run.watch.error_record import describe_in_flight, trained_steps
from lockstep.run.watch.evidence import Evidence, write_in_place
from lockstep.run.watch.heartbeat import HeartbeatWriter
from lockstep.run.watch.stack_dump import OTHER_FILE
from lockstep.wording import count_noun

MAIN_THREAD_SIGNAL = int(signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGURG)
"""The signal that asks for the main thread's stack. SIGUSR1 and SIGUSR2 belong to users and
schedulers. On a system without real-time signals it is SIGURG, which a process without our handler
ignores."""

ALL_THREADS_SIGNAL = MAIN_THREAD_SIGNAL + 1
"""The signal that asks for the stacks of all threads. It is handled by the thread that answers
requests, and only sent while all threads sleep: the stack of a running thread changes while it is
read."""

FLIGHT_RECORDER_VARIABLES = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Environment variables of a rank that turn on torch's Flight Recorder, which reads them when the
first process group is created. It then keeps the latest 2000 collectives, about 1 KB each, and
takes 1 to 1.3 microseconds per collective."""

CALL_STACKS_OPTION = "call_stacks"
"""In a request, this word asks for the stack of each recorded call too."""

_MAX_FRAMES = 100
_REQUEST_MAX_BYTES = 4096

_opened_groups: list[object] = []
"""Every process group that was opened. The list keeps them alive until this process ends.

A DDP model that is a local variable of `main()` is freed after `destroy_process_group`, and would
free its group as well. Freeing a group waits for the group's threads while it holds Python's lock,
which these threads need. A script that imports torch itself escapes this deadlock by chance:
modules that DDP imports after the group was opened hold the group in their default arguments. Here
these modules were imported before.
"""


class Probe:
    """The probe of this process. `install` creates it."""

    def __init__(self, evidence: Evidence, spawn_index: int | None) -> None:
        evidence.heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self._evidence = evidence
        self._spawn_index = spawn_index
        self._request_pipe: int | None = None
        self._answering_thread: threading.Thread | None = None
        self._is_stopping = False
        self._register_stack_signals()
        self._heartbeat = self._start_heartbeat()

        # A process that the script has started itself does not need this: it imports torch itself,
        # or is forked from a process that has this hook.
        if spawn_index is None:
            torch_compat.call_on_new_default_group(_opened_groups.append)

        self._start_answering()
        os.register_at_fork(after_in_child=self.forget_in_child)
        atexit.register(self.stop_answering)

    def stop_answering(self) -> None:
        """Ends the thread that answers requests, and waits until it has ended.

        This must happen before the interpreter shuts down. A thread that returns from torch after
        that and asks for Python's lock would abort the process ("terminate called without an active
        exception").
        """
        if self._answering_thread is not None and self._request_pipe is not None:
            self._is_stopping = True
            # The thread sleeps while it reads its pipe. Any text wakes it up, and it then sees the
            # flag.
            os.write(self._request_pipe, b"\n")
            self._answering_thread.join()

    def warn_if_ranks_trained_alone(self) -> None:
        """Warns, at the end of the program, if each rank has trained a model of its own.

        Only rank 0 warns, so that the user reads it once.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1" or os.environ.get("RANK") != "0":
            return

        steps = self._heartbeat.steps
        has_trained = steps > 0
        if not has_trained:
            return

        if not _opened_groups:
            warn(
                f"{size} processes",
                found="no process group was opened, but the optimizer made "
                f"{count_noun(steps, 'step')}: each process trained its own model",
                do="join them by lockstep.init() and world.prepare(...), or run one process",
            )
        elif torch_compat.has_not_communicated(_opened_groups):
            warn(
                f"{size} processes",
                found=f"the optimizer made {count_noun(steps, 'step')} on rank 0, which has called "
                "no collective and sent nothing: its gradients were not averaged with those of "
                "others",
                do="wrap the model in DistributedDataParallel, or use lockstep.init() and "
                "world.prepare(...)",
                code="LS311",
            )

    def forget_in_child(self) -> None:
        """Releases the rank's pipe and heartbeat in a forked child, which is not the rank.

        The child inherits both of them, but none of the rank's threads.
        """
        self._heartbeat.stop()
        self._answering_thread = None
        if self._request_pipe is not None:
            os.close(self._request_pipe)
            self._request_pipe = None

    def _register_stack_signals(self) -> None:
        """Makes faulthandler write this process's stacks into its evidence files.

        It writes them at a fatal signal, such as SIGSEGV, and at the two stack signals, which the
        launcher sends (`process_status.harmless_stack_signal`).

        Rule: the stacks of other threads are only read while these threads sleep. Reading the
        frames of a thread that runs sooner or later ends in a segmentation fault (with Python 3.11,
        about once in some hundred times).
        """
        crash_file = _open_to_append(self._evidence.crash)
        faulthandler.enable(crash_file)
        _keep_track_of_faulthandler(crash_file)

        # This signal shows only the stack of the main thread, which handles it.
        stacks_file = _open_to_append(self._evidence.stacks)
        _write_stacks_at(MAIN_THREAD_SIGNAL, stacks_file, all_threads=False)

        # This one shows all stacks. The launcher sends it when it sees in `/proc`, which only Linux
        # has, that all threads sleep.
        if sys.platform == "linux":
            _write_stacks_at(ALL_THREADS_SIGNAL, stacks_file, all_threads=True)

            # This thread and all threads that it starts block the signal, so that none of their
            # sleeps in C is cut short. Only the thread that answers requests unblocks it.
            signal.pthread_sigmask(signal.SIG_BLOCK, [ALL_THREADS_SIGNAL])

    def _start_heartbeat(self) -> HeartbeatWriter:
        """Starts the heartbeat of this process, which counts the steps of all optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        heartbeat = HeartbeatWriter(self._evidence.heartbeat)
        register_optimizer_step_post_hook(heartbeat.count_step)
        register_optimizer_step_post_hook(note_step)
        return heartbeat

    def _start_answering(self) -> None:
        """Starts the thread that answers requests, and creates the pipe that it reads them from.

        This must happen before a process group is opened, where the rank waits in TCPStore: without
        this thread the launcher uses signals, and each signal restarts the timeout of TCPStore.
        """
        pipe_path = self._evidence.request_pipe
        try:
            if not pipe_path.exists():
                os.mkfifo(pipe_path, 0o600)
            # Open it for reading and writing. When the launcher closes its end, there is then still
            # a writer, so a read waits for the next request instead of returning nothing.
            self._request_pipe = os.open(pipe_path, os.O_RDWR)
        except OSError:  # the file system has no pipes; a signal still shows the main stack
            return

        self._answering_thread = threading.Thread(
            target=self._answer_requests,
            args=(self._request_pipe,),
            name="lockstep-answers",
            daemon=True,
        )
        self._answering_thread.start()

    def _answer_requests(self, pipe: int) -> None:
        """Answers requests until `stop_answering` is called. This is all that the thread does.

        Each request is a line, `NUMBER` or `NUMBER call_stacks`. If several have arrived, such as
        "7" and "8 call_stacks", only the last one is answered.
        """
        _handle_stack_signal_in_this_thread()
        while True:
            # Waits until there is something to read. (As this process can also write to the pipe,
            # the pipe never ends.)
            text = os.read(pipe, _REQUEST_MAX_BYTES).decode(errors="replace")

            if self._is_stopping:
                os.close(pipe)
                self._request_pipe = None
                return

            number, _, option = _last_complete_line(text).partition(" ")
            if number.isdigit():
                self._answer_request(number, with_call_stacks=option == CALL_STACKS_OPTION)

    def _answer_request(self, number: str, *, with_call_stacks: bool) -> None:
        """Writes the answer to one request, or the error that prevented it, into the evidence."""
        try:
            text = self._answer(number, with_call_stacks=with_call_stacks)
        except Exception as error:
            # An error in torch must not end this thread: the next request may succeed.
            text = json.dumps({"request": int(number), "error": repr(error)})

        with contextlib.suppress(OSError):
            write_in_place(self._evidence.answer, text)

    def _answer(self, number: str, *, with_call_stacks: bool) -> str:
        """Returns the answer to a request as JSON, which `probe_answer` reads.

        Args:
            number: the number of the request.
            with_call_stacks: whether to include the stack of each recorded call, which takes
                longer.
        """
        # Select the rank's own GPU in this thread: the recorder asks CUDA whether calls have ended,
        # which would use the first GPU otherwise. A rank that the script has spawned may have no
        # LOCAL_RANK, so its index among the spawned ranks says which GPU is its own.
        torch_compat.take_gpu(self._spawn_index)

        stacks_of_other_threads = _stacks_of_other_threads()
        idle_loops = _idle_event_loops()
        groups = torch_compat.process_groups()
        main_thread = threading.main_thread().ident or 0
        main_frame = sys._current_frames().get(main_thread)
        group_being_made = torch_compat.group_being_made(main_frame)  # by the main thread, or None
        error_in_flight = _error_in_flight(main_thread)

        # The recorder returns a list as JSON text, which is not parsed, as it may be megabytes
        # long: "[{...}, {...}]".
        records_json = torch_compat.flight_record(stacks=with_call_stacks)

        # Lockstep's own collectives, in shared memory, have a record of their own.
        shared_memory = _shared_memory_in_use()
        if shared_memory is not None:
            group, record = shared_memory.flight_record()
            groups.append(group)
            records_json = _append_to_json_list(records_json, json.dumps(record))

        # "request" must come first: of an old answer, the launcher reads only this field.
        answer = {
            "request": int(number),
            "stacks": stacks_of_other_threads,
            "idle_loops": idle_loops,
            "groups": groups,
            "making": group_being_made,
            "in_flight": error_in_flight,
            "trained_steps": trained_steps(),
        }
        return _add_to_json_object(json.dumps(answer), "records", records_json)


def _error_in_flight(thread: int) -> dict[str, Any] | None:
    """Returns the exception that a thread handles, as plain values; None if it handles none."""
    error = error_handled_by(thread)
    if error is None:
        return None
    error_in_flight = describe_in_flight(error)
    return None if error_in_flight is None else asdict(error_in_flight)


def _shared_memory_in_use() -> Any:
    """Returns the shared memory through which this rank exchanges tensors, or None without any."""
    # A rank that has not imported this module uses none. Importing it here would take long.
    routing = sys.modules.get("lockstep.communication.routing")
    return None if routing is None else routing.shared_memory()


def _open_to_append(path: Path) -> int:
    """Opens a file for appending, until this process ends, and returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _handle_stack_signal_in_this_thread() -> None:
    """Makes this thread the one that handles the signal at which all stacks are written.

    All other threads block the signal, as it may interrupt a system call of the thread that handles
    it. Here that does no harm.
    """
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [ALL_THREADS_SIGNAL])


def _last_complete_line(text: str) -> str:
    """Returns the last line that ends with a newline; empty if there is none.

    The last line may be a request that was cut off, as more bytes were waiting than are read at
    once. The launcher asks again later.
    """
    *complete_lines, _ = text.split("\n")
    return complete_lines[-1] if complete_lines else ""


def _write_stacks_at(signal_number: int, file: int, *, all_threads: bool) -> None:
    """Makes faulthandler write the stacks of this process into a file when a signal comes."""
    # When the interpreter shuts down, faulthandler restores the handler that was there before. That
    # must not be the default one, by which a later signal would end the process.
    signal.signal(signal_number, signal.SIG_IGN)

    # With `chain=False`, faulthandler sets the flag SA_RESTART, so that the kernel restarts most of
    # the system calls that the signal interrupts.
    faulthandler.register(signal_number, file, all_threads=all_threads, chain=False)


def _keep_track_of_faulthandler(crash_file: int) -> None:
    """Replaces `faulthandler.enable` and `disable`, so that the stacks of a crash are found.

    Faulthandler writes into one file. If the script names one, faulthandler writes into that, and
    its path is noted in the crash file. If the script disables faulthandler, it writes into the
    crash file as before.

    Args:
        crash_file: the descriptor of the crash file.
    """
    original_enable = faulthandler.enable
    original_disable = faulthandler.disable
    rank_pid = os.getpid()

    def is_rank_itself() -> bool:
        """Returns False in a process that the rank has forked, such as a DataLoader worker."""
        return os.getpid() == rank_pid

    @functools.wraps(original_enable)
    def enable_and_note_file(file: Any = None, *args: Any, **keywords: Any) -> None:
        """Replaces `faulthandler.enable`: notes in the crash file which file gets the dump."""
        if file is None:
            file = sys.stderr
        original_enable(file, *args, **keywords)
        if is_rank_itself():
            _note_file_of_dump(file, crash_file)

    @functools.wraps(original_disable)
    def write_into_crash_file() -> None:
        """Replaces `faulthandler.disable`: a crash of this rank must still leave its stacks."""
        original_disable()
        if is_rank_itself():
            original_enable(crash_file)

    faulthandler.enable = enable_and_note_file
    faulthandler.disable = write_into_crash_file


def _note_file_of_dump(file: Any, crash_file: int) -> None:
    """Notes the path of the file that faulthandler will write a dump into, in the crash file.

    Args:
        file: the file, or its descriptor.
        crash_file: the descriptor of the crash file.
    """
    # The name of a file without a path is a number, or `<stderr>`. Nothing needs to be noted for
    # that, as the launcher searches standard error in any case.
    name = getattr(file, "name", None)
    has_path = isinstance(name, str) and os.path.isfile(name)
    if has_path:
        note = f"{OTHER_FILE}{os.path.abspath(str(name))}\n"
        os.write(crash_file, note.encode(errors="surrogateescape"))


def _add_to_json_object(object_text: str, key: str, value_text: str) -> str:
    """Adds a field to an object, both as JSON text: `{"a": 1}`, "b", `[2]` -> `{"a": 1, "b": [2]}`.

    The object has other fields.
    """
    without_brace = object_text[:-1]
    return f'{without_brace}, "{key}": {value_text}}}'


def _append_to_json_list(list_text: str, item_text: str) -> str:
    """Appends an item to a list, both as JSON text: `[1, 2]` and `3` -> `[1, 2, 3]`.

    The list is not parsed, as that would take too long for megabytes of text.
    """
    if list_text == "[]":
        return f"[{item_text}]"
    without_bracket = list_text[:-1]
    return f"{without_bracket}, {item_text}]"


def _stacks_of_other_threads() -> dict[int, list[tuple[str, int, str]]]:
    """Returns the stacks of all threads except this one, by the identifier of the thread.

    A frame is `(file, line, function)`, and the innermost frame comes first.
    """
    stacks: dict[int, list[tuple[str, int, str]]] = {}
    for thread, innermost_frame in sys._current_frames().items():
        if thread == threading.get_ident():
            continue

        frames = itertools.islice(traceback.walk_stack(innermost_frame), _MAX_FRAMES)
        stack = []
        for frame, line in frames:
            stack.append((frame.f_code.co_filename, line, frame.f_code.co_name))
        stacks[thread] = stack

    return stacks


def _idle_event_loops() -> list[int]:
    """Returns the threads that run an event loop of asyncio which only another thread can wake.

    For example, fsspec and libraries with an asynchronous client keep such a thread from their
    first use on. A loop that waits for a connection, or until a call is due, has the same stack,
    but `_waits_for_threads_alone` tells them apart.
    """
    asyncio_loops = sys.modules.get("asyncio.base_events")
    if asyncio_loops is None:  # the script uses no asyncio
        return []

    threads = []
    for thread, innermost_frame in sys._current_frames().items():
        caller = innermost_frame.f_back
        if caller is None or caller.f_code.co_filename != asyncio_loops.__file__:
            continue  # no event loop has called the innermost function
        if _waits_for_threads_alone(innermost_frame, loop_frame=caller):
            threads.append(thread)
    return threads


def _waits_for_threads_alone(innermost_frame: FrameType, loop_frame: FrameType) -> bool:
    """Returns True if an event loop waits without a timeout, and for no connection or pipe.

    Args:
        innermost_frame: the frame of what the loop has called.
        loop_frame: the frame of the loop.
    """
    selector = innermost_frame.f_locals.get("self")
    is_in_select = innermost_frame.f_code.co_name == "select"
    if not is_in_select or not isinstance(selector, selectors.BaseSelector):
        return False

    # The loop passes None if it has nothing to call, now or later.
    has_timeout = loop_frame.f_locals.get("timeout", 0) is not None

    # Every loop has registered one socket, by which other threads wake it.
    registered = selector.get_map()
    return not has_timeout and registered is not None and len(registered) == 1


_processes_with_probe: set[int] = set()
"""The ids of this process and of those it was forked from, as far as they have a probe."""


def has_probe() -> bool:
    """Returns True if this process has a probe of its own."""
    return os.getpid() in _processes_with_probe


def install(evidence: Evidence, spawn_index: int | None = None) -> Probe:
    """Makes this process visible to the launcher until it ends. torch must have been imported.

    Args:
        evidence: the files to write to.
        spawn_index: the index of this process among the processes that a script has started itself;
            None if the launcher has started it.

    Raises:
        OSError: the files cannot be written.
    """
    _processes_with_probe.add(os.getpid())
    return Probe(evidence, spawn_index)

"""Makes a rank visible to its launcher: its steps, its stacks and its collectives.

The *probe* runs inside the rank, works for any script, and costs about a microsecond a step. A
thread of its own answers the launcher's *requests* with the stacks of all threads and the recorded
collectives. If Python's lock keeps that thread from answering, a *stack signal* makes a handler in
C write stacks, which needs no lock. All of it goes to the rank's `evidence` files.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from lockstep.distributed import torch_compat
from lockstep.errors import warn
from lockstep.run.watch.evidence import Evidence, write_in_place
from lockstep.run.watch.heartbeat import HeartbeatWriter
from lockstep.wording import count_noun

MAIN_THREAD_SIGNAL = int(signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGURG)
"""Asks for the main thread's stack. SIGUSR1 and SIGUSR2 belong to users and schedulers. On a system
without real-time signals it is SIGURG, which a process without our handler ignores."""

ALL_THREADS_SIGNAL = MAIN_THREAD_SIGNAL + 1
"""Asks for the stacks of all threads. Only the thread that answers requests takes it. It is for a
process whose threads all sleep: the stack of a running thread changes while it is read."""

FLIGHT_RECORDER_VARIABLES = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Environment variables of a rank that turn on torch's Flight Recorder, which reads them at the
first process group. It then keeps the latest 2000 collectives, of about 1 KB each, and takes 1 to
1.3 microseconds for each."""

_MAX_FRAMES = 100
_REQUEST_MAX_BYTES = 4096

_groups_kept_alive: list[object] = []
"""The process groups that were opened, until this process ends.

A DDP model that is a local variable of `main()` dies after `destroy_process_group`, and would take
its group along. The group's last owner waits for the group's threads, with Python's lock that they
want. A script that imports torch itself is spared that by chance: modules that DDP imports after
the group was opened keep it in their default arguments. Here they were imported before.
"""


class Probe:
    """The probe of this process, see `install`."""

    def __init__(self, evidence: Evidence, spawn_index: int | None) -> None:
        evidence.heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self._evidence = evidence
        self._spawn_index = spawn_index
        self._request_pipe: int | None = None
        self._answering_thread: threading.Thread | None = None
        self._is_stopping = False
        self._register_stack_signals()
        self._heartbeat = self._start_heartbeat()

        # A process that the script has started imports torch itself, or is forked from one that has
        # this hook.
        if spawn_index is None:
            torch_compat.on_default_group(_groups_kept_alive.append)

        self._start_answering()
        os.register_at_fork(after_in_child=self.forget_in_child)
        atexit.register(self.stop_answering)

    def stop_answering(self) -> None:
        """Ends the thread that answers requests, and waits for its end.

        This must happen before the interpreter's own end. A thread that then returns from torch and
        wants Python's lock takes the process down ("terminate called without an active exception").
        """
        if self._answering_thread is not None and self._request_pipe is not None:
            self._is_stopping = True
            # The thread sleeps in a read of its pipe. This wakes it up, and it sees that it is to
            # stop. (What is written does not matter: of several requests it reads only the last.)
            os.write(self._request_pipe, b"\n")
            self._answering_thread.join()

    def warn_if_ranks_trained_alone(self) -> None:
        """Warns, at the end of the program, if the ranks have trained without each other.

        Only rank 0 of several warns, so that the user reads it once.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1" or os.environ.get("RANK") != "0":
            return

        steps = self._heartbeat.steps
        has_opened_group = bool(_groups_kept_alive)  # every group that was opened is kept there
        if steps and not has_opened_group:
            warn(
                f"{size} processes",
                f"no process group was opened, but the optimizer made {count_noun(steps, 'step')}: "
                "each process trained its own model",
                "join them by lockstep.init() and world.prepare(...), or run one process",
            )

    def forget_in_child(self) -> None:
        """Releases what a forked child must not use, as it is not the rank.

        The child inherits the rank's pipe and heartbeat, but none of its threads.
        """
        self._heartbeat.stop()
        self._answering_thread = None
        if self._request_pipe is not None:
            os.close(self._request_pipe)
            self._request_pipe = None

    def _register_stack_signals(self) -> None:
        """Makes faulthandler write this process's stacks into its evidence files.

        It writes them at a fatal signal (SIGSEGV and others), and at the two stack signals.
        """
        faulthandler.enable(_open_to_append(self._evidence.crash))

        # At the interpreter's end faulthandler restores this handler, so that a late signal is
        # ignored and does not end the process.
        signal.signal(MAIN_THREAD_SIGNAL, signal.SIG_IGN)

        # This signal shows only the stack of the main thread, which handles it. If another thread
        # runs while its frames are read, that ends in a segmentation fault sooner or later
        # (Python 3.11: once in some hundred times).
        # `chain=False` installs the handler with SA_RESTART: an interrupted system call is
        # restarted where the kernel can do that, see `process_status.harmless_stack_signal`.
        stacks = _open_to_append(self._evidence.stacks)
        faulthandler.register(MAIN_THREAD_SIGNAL, stacks, all_threads=False, chain=False)

        if sys.platform == "linux":  # elsewhere nobody can tell whether all threads sleep
            signal.signal(ALL_THREADS_SIGNAL, signal.SIG_IGN)
            faulthandler.register(ALL_THREADS_SIGNAL, stacks, all_threads=True, chain=False)
            # This thread blocks the signal, and so do the threads that it starts, so that none of
            # their sleeps in C is cut short. Only the thread that answers requests unblocks it.
            signal.pthread_sigmask(signal.SIG_BLOCK, [ALL_THREADS_SIGNAL])

    def _start_heartbeat(self) -> HeartbeatWriter:
        """Returns the heartbeat of this process, which counts the steps of all optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        heartbeat = HeartbeatWriter(self._evidence.heartbeat)
        register_optimizer_step_post_hook(heartbeat.count_step)
        return heartbeat

    def _start_answering(self) -> None:
        """Starts the thread that answers requests, and creates the pipe that it reads them from.

        It must run before a process group is opened, where a rank waits for the others to come.
        Without the thread the rank would be asked there by a signal, which makes TCPStore begin to
        count its timeout anew.
        """
        path = self._evidence.ask
        try:
            if not path.exists():
                os.mkfifo(path, 0o600)
            # It is opened for writing too, so that a read does not return an empty text when the
            # launcher closes its end.
            self._request_pipe = os.open(path, os.O_RDWR)
        except OSError:  # the file system knows no pipes; a signal still shows the main stack
            return

        self._answering_thread = threading.Thread(
            target=self._answer_requests,
            args=(self._request_pipe,),
            name="lockstep-answers",
            daemon=True,
        )
        self._answering_thread.start()

    def _answer_requests(self, pipe: int) -> None:
        """Answers requests until `stop_answering`. Of several requests, the last is answered.

        This is all that the answering thread does. At the end it closes the pipe.
        """
        # The kernel gives a signal to a thread that does not block it, and this one is to take it.
        if sys.platform == "linux":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [ALL_THREADS_SIGNAL])

        while True:
            text = os.read(pipe, _REQUEST_MAX_BYTES).decode(errors="replace")

            if self._is_stopping:
                os.close(pipe)
                self._request_pipe = None
                return

            *complete_lines, _ = text.split("\n")  # what stands after the last newline is no line
            if not complete_lines:
                continue

            # A request is `NUMBER` or `NUMBER lines`.
            number, _, option = complete_lines[-1].partition(" ")
            if number.isdigit():
                self._answer_request(number, with_call_stacks=option == "lines")

    def _answer_request(self, number: str, *, with_call_stacks: bool) -> None:
        """Writes the answer to one request, or why there is none, into the rank's evidence."""
        try:
            text = self._answer(number, with_call_stacks=with_call_stacks)
        except Exception as error:
            # Whatever torch says here must not end this thread: the next request may be answered.
            text = json.dumps({"request": int(number), "error": repr(error)})
        with contextlib.suppress(OSError):
            write_in_place(self._evidence.answer, text)

    def _answer(self, number: str, *, with_call_stacks: bool) -> str:
        """Returns the answer to a request as JSON, which `probe_answer` reads.

        Args:
            number: the number of the request.
            with_call_stacks: include the stack of each recorded call, which takes longer.
        """
        # The recorder asks CUDA whether calls have ended. Without this, that would use the first
        # GPU in this thread, whichever is the rank's own.
        torch_compat.take_gpu(self._spawn_index)
        stacks = json.dumps(_stacks_of_other_threads())
        groups = torch_compat.process_groups()
        main_thread = threading.main_thread().ident or 0
        main_frame = sys._current_frames().get(main_thread)

        # The process group that the main thread is about to create, or null.
        making = json.dumps(torch_compat.group_being_made(main_frame))
        records = torch_compat.flight_record(lines=with_call_stacks)  # the JSON of a list

        # Lockstep's own collectives, in shared memory, are not in torch's records but have a record
        # of their own. A rank that has not imported their module makes none.
        routing = sys.modules.get("lockstep.communication.routing")
        if routing is not None:
            shared_memory = routing.shared_memory()
            if shared_memory is not None:
                group, record = shared_memory.flight_record()
                groups.append(group)
                # The record is added to the list as text: to read megabytes of JSON takes long.
                records_without_bracket = records[:-1]
                records = f"{records_without_bracket}, {json.dumps(record)}]"

        # "request" must stand first: the launcher reads no more than that of an old answer.
        return (
            f'{{"request": {number}, "stacks": {stacks}, "groups": {json.dumps(groups)}, '
            f'"making": {making}, "records": {records}}}'
        )


def _open_to_append(path: Path) -> int:
    """Returns a descriptor that appends to a file, and that stays open until this process ends."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _stacks_of_other_threads() -> dict[int, list[tuple[str, int, str]]]:
    """Returns the stack of each thread but this one, by the thread's identifier.

    Each frame is its file, line and function. The innermost comes first.
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


_processes_with_probe: set[int] = set()
"""The processes that have a probe: this one, and those that it was forked from."""


def has_probe() -> bool:
    """Returns True if this process has a probe of its own."""
    return os.getpid() in _processes_with_probe


def install(evidence: Evidence, spawn_index: int | None = None) -> Probe:
    """Makes this process visible until it ends. torch must have been imported.

    Args:
        evidence: the files to write to.
        spawn_index: the index of this process among those that a script has started itself; None
            if the launcher has started it.

    Raises:
        OSError: the files cannot be written.
    """
    _processes_with_probe.add(os.getpid())
    return Probe(evidence, spawn_index)

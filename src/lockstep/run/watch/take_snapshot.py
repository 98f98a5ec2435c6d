"""Takes a snapshot of the ranks of this machine, from outside of their processes.

Each rank is sent a *request* through a pipe, which a thread of the rank answers in a file. A rank
that does not answer in time is asked by a *stack signal*, which needs no Python in the rank. What
has not come when the time is up stays None in the snapshot.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from lockstep.run.start.process import Process
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.probe_answer import with_answer
from lockstep.run.watch.process_status import (
    cpu_of_descendants,
    harmless_stack_signal,
    read_process,
)
from lockstep.run.watch.snapshot import STOPPED_STATES, RankState, Snapshot
from lockstep.run.watch.stacks import parse_stack

ANSWER_TIMEOUT_S = 1.0
ANSWER_WITH_STACKS_TIMEOUT_S = 4.0
_POLL_INTERVAL_S = 0.02
# A rank that has not answered by then is sent a signal.
_SIGNAL_AFTER_S = 0.3

_ZOMBIE_STATE = "Z"
_DEAD_STATES = "ZX"

_request_numbers = itertools.count(1)


def take_snapshot(
    processes: Sequence[Process], *, call_stacks: bool = False, timeout_s: float | None = None
) -> Snapshot:
    """Asks all ranks of this machine at the same time.

    Args:
        processes: the ranks.
        call_stacks: asks also for the stack of each recorded call, for a verdict that is to be
            reported. This stops a rank's Python for some tenths of a second.
        timeout_s: how long to wait for the answers; by default 1 s, and 4 s with `call_stacks`. It
            returns earlier if all have answered.

    Returns:
        The state of each rank, in the order of `processes`. What was not obtained is None.
    """
    if timeout_s is None:
        timeout_s = ANSWER_WITH_STACKS_TIMEOUT_S if call_stacks else ANSWER_TIMEOUT_S

    signal_after_s = min(_SIGNAL_AFTER_S, timeout_s / 2)
    number = next(_request_numbers)  # tells the answers from those to an earlier request

    requests = [_Request(process, number) for process in processes]
    for request in requests:
        request.send(call_stacks)

    start = time.monotonic()
    while True:
        for request in requests:
            request.collect()

        incomplete = [request for request in requests if not request.is_complete]
        waited_s = time.monotonic() - start
        if not incomplete or waited_s > timeout_s:
            break

        if waited_s > signal_after_s:
            for request in incomplete:
                request.send_signal()

        time.sleep(_POLL_INTERVAL_S)

    # The processor time of DataLoader workers and others that a rank has started. It is read for
    # all ranks at once, as it is found in the list of all processes of the machine.
    children_cpu_s = cpu_of_descendants([request.state.pid for request in requests])
    states = []
    for request in requests:
        state = request.state
        states.append(replace(state, children_cpu_s=children_cpu_s.get(state.pid)))

    return Snapshot(time.time(), tuple(states))


class _Request:
    """The request to one rank, and what has come so far."""

    def __init__(self, process: Process, number: int) -> None:
        self._number = number
        self._evidence = process.evidence
        has_ended = process.code is not None
        status = None if has_ended else read_process(process.pid or 0)

        heartbeat = read_heartbeat(self._evidence.heartbeat)
        if heartbeat is not None and heartbeat.pid != process.pid:
            heartbeat = None  # it belongs to an earlier start of the rank, or to another program

        self._main_thread = 0 if heartbeat is None else heartbeat.main_thread
        process_state = None if status is None else status.state
        is_stopped = process_state is not None and process_state in STOPPED_STATES
        self._cannot_react = has_ended or is_stopped or process_state == _ZOMBIE_STATE
        self._shows_stacks = status is not None and status.shows_stacks and not self._cannot_react
        self._main_switches = None if status is None else status.main_switches
        self._stacks_offset: int | None = None
        """Where the stacks that a signal has asked for begin in their file; None: not sent."""
        self._stacks_length = -1
        """The length of what the last look has found there."""
        is_dead = process_state is not None and process_state in _DEAD_STATES
        self.state = RankState(
            rank=process.rank,
            host=socket.gethostname(),
            pid=process.pid or 0,
            alive=not has_ended and not is_dead,
            code=process.code,
            state=process_state,
            cpu_s=None if status is None else status.cpu_s,
            main_cpu_s=None if status is None else status.main_cpu_s,
            steps=None if heartbeat is None else heartbeat.steps,
        )
        """What is known about the rank so far."""

    @property
    def is_complete(self) -> bool:
        """True if everything has come that the rank was asked for."""
        # `answered` is False from the request to the answer, then True. It is None for a rank that
        # could not be asked, or whose answer could not be read.
        if self.state.answered is not None:
            return self.state.answered
        # A stack by signal is all that such a rank can give, if it handles the signal.
        return not self._shows_stacks or self.state.stack is not None

    def send(self, call_stacks: bool) -> None:
        """Sends the request to the thread that answers in the rank, if the rank has one.

        Then `state.answered` becomes False, until `collect` finds the answer.

        Args:
            call_stacks: asks also for the stack of each recorded call.
        """
        has_answering_thread = self.state.steps is not None  # a rank with a heartbeat has a probe
        if self._cannot_react or not has_answering_thread:
            return

        try:
            pipe = os.open(self._evidence.ask, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the pipe is gone, or nobody reads it
            return

        self.state = replace(self.state, answered=False)
        text = f"{self._number} lines\n" if call_stacks else f"{self._number}\n"
        with contextlib.suppress(BlockingIOError):  # it is full, as nobody has read it for long
            os.write(pipe, text.encode())

        os.close(pipe)

    def send_signal(self) -> None:
        """Sends the rank a stack signal, once, at a moment when that does no harm.

        A signal can make a system call of the rank fail, see `harmless_stack_signal`. If that is
        possible now, nothing is sent, and this is to be called again later. Once a signal is sent,
        `_stacks_offset` says where in their file the stacks begin.
        """
        was_sent_already = self._stacks_offset is not None
        if not self._shows_stacks or was_sent_already:
            return

        with contextlib.suppress(OSError):
            offset = self._evidence.stacks.stat().st_size
            has_answering_thread = self.state.answered is not None

            signal_number = harmless_stack_signal(
                self.state.pid, self._main_switches, answers=has_answering_thread
            )
            if signal_number is not None:
                os.kill(self.state.pid, signal_number)
                self._stacks_offset = offset

    def collect(self) -> None:
        """Reads what the rank has written so far into `state`."""
        if self._stacks_offset is not None and self.state.stack is None:
            with contextlib.suppress(OSError):
                self._read_stacks(self._stacks_offset)
        if self.state.answered is False:
            with contextlib.suppress(OSError):
                self._read_answer()

    def _read_stacks(self, offset: int) -> None:
        """Reads the stacks that the signal handler has written. Once they are complete, the main
        thread's is put into `state`.

        Args:
            offset: where they begin in their file.
        """
        with open(self._evidence.stacks, "rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")

        # The signal handler writes piece by piece. It is ready when nothing more has come since the
        # last look, two hundredths of a second ago.
        if len(text) == self._stacks_length:
            stack = parse_stack(text, self._main_thread)
            self.state = replace(self.state, stack=stack)

        self._stacks_length = len(text)

    def _read_answer(self) -> None:
        """Reads the answer into `state`, if that of this request is there already."""
        beginning = f'{{"request": {self._number},'
        with open(self._evidence.answer) as file:
            # An answer may be megabytes long, so an old one is not read to its end.
            if file.read(len(beginning)) == beginning:
                text = beginning + file.read()
                self.state = with_answer(self.state, text, self._main_thread)

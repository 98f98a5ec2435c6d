"""Takes a snapshot of the ranks of this machine, from outside their processes.

Each rank is sent a *request* through a pipe, which a thread of the rank answers by writing a file.
A rank that does not answer in time is sent a *stack signal*, which makes it write its stack even if
its Python code is blocked. Whatever has not arrived when time is up stays None in the snapshot.
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
from lockstep.run.watch.probe import CALL_STACKS_OPTION
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
    """Asks all ranks of this machine for their state, at the same time.

    Args:
        processes: the ranks.
        call_stacks: whether to ask for the stack of each recorded call too, which a report shows.
            This stops a rank's Python code for some tenths of a second.
        timeout_s: how long to wait for the answers, in seconds; by default 1, or 4 with
            `call_stacks`. The function returns earlier if all ranks have answered.

    Returns:
        The state of each rank, in the order of `processes`. What is not known is None.
    """
    if timeout_s is None:
        timeout_s = ANSWER_WITH_STACKS_TIMEOUT_S if call_stacks else ANSWER_TIMEOUT_S

    number = next(_request_numbers)  # distinguishes the answers from those to an earlier request
    requests = [_Request(process, number) for process in processes]
    for request in requests:
        request.send(call_stacks)

    _collect_answers(requests, timeout_s)

    # Add the processor time of the processes that each rank has started, such as DataLoader
    # workers. It is read for all ranks at once, from the list of all processes of the machine.
    children_cpu_s = cpu_of_descendants([request.state.pid for request in requests])
    states = []
    for request in requests:
        state = request.state
        states.append(replace(state, children_cpu_s=children_cpu_s.get(state.pid)))

    return Snapshot(time.time(), tuple(states))


def _collect_answers(requests: Sequence[_Request], timeout_s: float) -> None:
    """Waits until all ranks have answered, or until the time is over.

    A rank that is slow to answer is also sent one signal, at which it shows its stack.

    Args:
        requests: the requests that were sent to the ranks. They keep the answers.
        timeout_s: how long to wait, in seconds.
    """
    signal_after_s = min(_SIGNAL_AFTER_S, timeout_s / 2)
    start = time.monotonic()
    while True:
        for request in requests:
            request.collect()

        incomplete = [request for request in requests if not request.is_complete]
        waited_s = time.monotonic() - start
        if not incomplete or waited_s > timeout_s:
            return

        if waited_s > signal_after_s:
            for request in incomplete:
                request.try_to_send_signal()

        time.sleep(_POLL_INTERVAL_S)


class _Request:
    """The request to one rank, and the part of its state that has arrived so far."""

    def __init__(self, process: Process, number: int) -> None:
        self._number = number
        self._evidence = process.evidence
        has_ended = process.code is not None
        status = None if has_ended else read_process(process.pid or 0)

        heartbeat = read_heartbeat(self._evidence.heartbeat)
        if heartbeat is not None and heartbeat.pid != process.pid:
            heartbeat = None  # it belongs to an earlier start of the rank, or to another program

        process_state = None if status is None else status.state
        is_stopped = process_state is not None and process_state in STOPPED_STATES
        is_dead = process_state is not None and process_state in _DEAD_STATES

        self._main_thread = 0 if heartbeat is None else heartbeat.main_thread
        self._has_ended_or_is_stopped = has_ended or is_stopped or process_state == _ZOMBIE_STATE
        self._handles_stack_signals = (
            status is not None and status.shows_stacks and not self._has_ended_or_is_stopped
        )
        self._earlier_context_switches = None if status is None else status.main_context_switches
        """How often the main thread had given up its processor when the request was sent."""
        self._stacks_offset: int | None = None
        """The offset in the file at which the stacks begin that a signal has asked for; None until
        the signal is sent."""
        self._stacks_length = 0
        """The length of the stacks when they were last read."""

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
    def _has_probe(self) -> bool:
        """True if the rank has a probe, which writes a heartbeat with the steps, and answers."""
        return self.state.steps is not None

    @property
    def is_complete(self) -> bool:
        """True if everything that the rank was asked for has arrived."""
        # `answered` has three values:
        #
        #     False    the rank was asked, and has not answered yet
        #     True     it has answered
        #     None     it could not be asked, or its answer could not be read
        answered = self.state.answered
        if answered is not None:
            return answered

        # All that such a rank can give is a stack, if it handles the stack signals.
        has_stack = self.state.stack is not None
        can_give_stack = self._handles_stack_signals
        return has_stack or not can_give_stack

    def send(self, call_stacks: bool) -> None:
        """Sends the request to the thread that answers in the rank, if the rank has one.

        From then on `state.answered` is False, until `collect` finds the answer.

        Args:
            call_stacks: whether to ask for the stack of each recorded call too.
        """
        if self._has_ended_or_is_stopped or not self._has_probe:
            return

        try:
            pipe = os.open(self._evidence.request_pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the pipe is gone, or nobody reads it
            return

        self.state = replace(self.state, answered=False)
        text = f"{self._number} {CALL_STACKS_OPTION}\n" if call_stacks else f"{self._number}\n"
        with contextlib.suppress(BlockingIOError):  # the pipe is full: nobody has read it for long
            os.write(pipe, text.encode())
        os.close(pipe)

    def try_to_send_signal(self) -> None:
        """Sends the rank a stack signal, unless one was sent already, or would do harm now.

        A signal can make a system call of the rank fail, see `harmless_stack_signal`. While that is
        possible, nothing is sent, and the caller tries again later.
        """
        was_sent_already = self._stacks_offset is not None
        if not self._handles_stack_signals or was_sent_already:
            return

        with contextlib.suppress(OSError):
            end_of_file = self._evidence.stacks.stat().st_size  # the new stacks will begin there
            was_asked = self.state.answered is not None  # it then has a thread that answers
            signal_number = harmless_stack_signal(
                self.state.pid, self._earlier_context_switches, answers=was_asked
            )
            if signal_number is not None:
                os.kill(self.state.pid, signal_number)
                self._stacks_offset = end_of_file

    def collect(self) -> None:
        """Adds to `state` what the rank has written so far."""
        if self._stacks_offset is not None and self.state.stack is None:
            with contextlib.suppress(OSError):
                self._read_stacks(self._stacks_offset)
        if self.state.answered is False:
            with contextlib.suppress(OSError):
                self._read_answer()

    def _read_stacks(self, offset: int) -> None:
        """Reads the stacks that the signal handler writes into a file.

        Once they are complete, the stack of the main thread is added to `state`.

        Args:
            offset: the offset in the file at which the stacks begin.
        """
        with open(self._evidence.stacks, "rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")

        # The signal handler writes piece by piece, and this is called every 0.02 s until `state`
        # has a stack. The stacks are complete if nothing has been added since the last call.
        is_complete = len(text) > 0 and len(text) == self._stacks_length
        if is_complete:
            stack = parse_stack(text, self._main_thread)
            self.state = replace(self.state, stack=stack)

        self._stacks_length = len(text)

    def _read_answer(self) -> None:
        """Adds the rank's answer to `state`, if it has already answered this request."""
        beginning = f'{{"request": {self._number},'
        with open(self._evidence.answer) as file:
            # An answer may be megabytes long, so one to an earlier request is not read to its end.
            if file.read(len(beginning)) == beginning:
                text = beginning + file.read()
                self.state = with_answer(self.state, text, self._main_thread)

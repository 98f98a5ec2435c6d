"""Writes the standard output and error of the ranks to log files, and shows them on the console.

A *sink* is the launcher's own stdout or stderr. It shows whole lines, each with its rank as a
*prefix*. On a terminal there is a *status row* below them: a line that the lowest rank has not
finished yet, such as a progress bar. A rank's *last words* are what it prints while an exception
ends it. They are held back, since other ranks may print the same. If the run has only one rank, it
is given the launcher's terminal itself.

With hundreds of ranks, their tracebacks would bury the verdict under thousands of lines. So last
words that differ only in numbers are shown once, and one line says which ranks printed the same.

One thread of the launcher reads all streams; it is started after the fork server was forked. If a
sink does not accept data, the ranks' streams are read until `_MAX_WAITING_BYTES` have piled up.
Then the ranks wait, as they would for any slow terminal.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from string import Template

from lockstep.language import translate
from lockstep.run.run_folder import log_path
from lockstep.run.start.rank_stream import TRACEBACK_HEADING, RankStream
from lockstep.run.start.sink import FlushDeadline, Sink, open_sinks
from lockstep.run.start.terminal_lines import RecentOutput
from lockstep.run.watch.evidence import Evidence
from lockstep.wording import format_ranks

STREAMS = ("stdout", "stderr")
COLUMNS = "LOCKSTEP_TERMINAL_COLUMNS"
"""Environment variable of the ranks: the columns of the launcher's terminal left for their
lines.
"""

DEFAULT_PREFIX = "[rank ${rank}] "
_MAX_WAITING_BYTES = 4 << 20
_TICK_S = 0.05
_LAST_WORDS_S = 1.0
"""The last words of a rank are complete if it has written nothing more for this time."""
# Numbers in which the last words of two ranks may differ, such as "0x7f3a" and "4711".
_NUMBER = re.compile(rb"0x[0-9a-f]+|\d+")


class Console:
    """Reads the streams of all ranks in a thread, within a `with` block.

    Args:
        shown: the streams of each local rank that are shown; None for all.
        filters: for `stdout` and `stderr`, a list of texts. A shown line that contains one of them
            is also written to `filtered_stdout.log` or `filtered_stderr.log` in the attempt's
            folder.
        prefix: template of the prefix of each line, with `${rank}` and `${local_rank}`.
        always_logged: whether a single rank gets log files instead of the terminal itself.
        environ: environment variables, of which NO_COLOR and TERM are used.
        stdout: descriptor on which the standard output of the ranks is shown.
        stderr: descriptor on which the standard error of the ranks and the launcher's own lines are
            shown.
    """

    def __init__(
        self,
        shown: Mapping[int, Collection[str]] | None = None,
        filters: Mapping[str, Collection[str]] | None = None,
        prefix: str = DEFAULT_PREFIX,
        *,
        always_logged: bool = False,
        environ: Mapping[str, str] = os.environ,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self._shown = shown
        self._filters = filters or {}
        self._prefix = Template(prefix)
        self._always_logged = always_logged
        self._sinks = open_sinks(environ, stdout, stderr)
        self._streams: list[RankStream] = []
        self._announcements: deque[str] = deque()
        self._full_folders: set[Path] = set()
        """The log folders that were announced to be full."""
        self._ranks_by_last_words: dict[bytes, list[int]] = {}
        """The ranks that printed the same last words. The keys are last words without numbers."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._drained = threading.Event()
        """Cleared while another thread waits in `drain`; the console's thread then sets it."""
        self._drained.set()
        self._draw_at = math.inf
        self._drain_until = math.inf
        """When the streams that have not ended are closed, because somebody waits in `drain`."""
        self._flush_deadline: FlushDeadline | None = None
        """Set at the end of the run: until when the sinks may take what is waiting."""
        self.hurry = False
        """True if the user has asked the run to end, so that nobody waits for a slow console."""
        self._thread = threading.Thread(target=self._run, name="lockstep-logs", daemon=True)

    def __enter__(self) -> Console:
        """Starts the thread. From now on, processes may only be forked to execute a program at
        once.
        """
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Reads the rest of the streams, waits until the console has shown it, and ends the
        thread.
        """
        self.drain()

        # Setting the deadline makes the thread end once the deadline is over.
        self._flush_deadline = FlushDeadline(self._sinks.values(), hurry=self.hurry)
        self._wake_up()
        self._thread.join()

        # If standard error accepts nothing, no message can be shown.
        message = self._sinks["stdout"].message_on_lost_output
        if message:
            self._announcements.append(f"lockstep: {translate(message)}")
            self._write_announcements()

        os.close(self._wake_reader)
        os.close(self._wake_writer)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for ranks, which see pipes even if the launcher has a terminal."""
        sink = self._sinks["stdout"]
        if not sink.can_draw:
            return {}
        prefix = self._prefix.safe_substitute(rank=0, local_rank=0)
        return {COLUMNS: str(sink.columns - len(prefix))}

    def open(
        self,
        rank: int,
        local_rank: int,
        folder: Path,
        *,
        is_only_rank: bool = False,
        error_file: Path | None = None,
        recent: RecentOutput | None = None,
    ) -> tuple[int, int, int]:
        """Creates the standard streams of a rank, and starts to read what the rank writes.

        Args:
            rank: number of the rank in the whole run.
            local_rank: number of the rank on this machine.
            folder: the rank's folder, which must exist.
            is_only_rank: True if this is the only rank of the run. Streams of it that are shown on
                a terminal are the terminal itself. The others are passed on unchanged, without a
                prefix.
            error_file: file in which the rank records the exception that ends it; by default the
                one in its folder.
            recent: keeps the end of the rank's standard error.

        Returns:
            Descriptors for the rank: input, output, error. The input is a copy of the launcher's.
            The caller closes them once the rank has them.
        """
        shown: Collection[str] = STREAMS
        if self._shown is not None:  # the user has chosen what is shown
            shown = self._shown.get(local_rank, ())

        prefix = self._prefix.safe_substitute(rank=rank, local_rank=local_rank)
        rank_descriptors = []
        for name, sink in self._sinks.items():
            is_shown_on_terminal = name in shown and sink.is_terminal
            gets_terminal_itself = is_only_rank and is_shown_on_terminal and not self._always_logged
            if gets_terminal_itself:
                sink.is_shared_with_rank = True
                rank_descriptors.append(os.dup(sink.descriptor))
                continue

            reading_end, writing_end = os.pipe()
            os.set_blocking(reading_end, False)
            rank_descriptors.append(writing_end)

            stream = RankStream(
                rank=rank,
                prefix="" if is_only_rank else prefix,
                descriptor=reading_end,
                sink=sink if name in shown else None,
                log=log_path(folder, name),
                filters=[text.encode() for text in self._filters.get(name, ())],
                error_file=error_file or Evidence.in_folder(folder).error,
                recent_output=recent if name == "stderr" else None,
            )
            try:
                stream.open_log()
            except OSError as os_error:
                self._note_full_disk(stream, os_error)
            self._streams.append(stream)

        self._wake_up()
        output, error = rank_descriptors
        return _copy_standard_input(), output, error

    def _note_full_disk(self, stream: RankStream, error: OSError) -> None:
        """Announces that a log cannot be written, once for all logs of an attempt."""
        folder = stream.log.parent.parent  # the attempt's folder, which holds those of its ranks
        if folder not in self._full_folders:
            self._full_folders.add(folder)
            consequence = translate(
                "the logs there end where nothing more can be written, the first of them is "
                f"{stream.log.name} of rank {stream.rank}; the training goes on. --log-dir names "
                "another folder"
            )
            self._announcements.append(f"lockstep: {folder}: {error.strerror}: {consequence}")

    def announce(self, text: str) -> None:
        """Shows lines of the launcher itself, above the status row. Any thread may call this."""
        self._announcements.append(f"lockstep: {text}")
        if self._thread.is_alive():
            self._wake_up()
        else:
            self._write_announcements()

    def drain(self, timeout: float = 2.0) -> None:
        """Waits until all streams have ended, which they do when their ranks end.

        Args:
            timeout: how long to wait, in seconds. A process that a rank has left behind may keep a
                stream open for longer. Then the stream is read one last time and closed.
        """
        if self._thread.is_alive():
            self._drained.clear()
            self._drain_until = time.monotonic() + timeout
            self._wake_up()
            self._drained.wait()  # `_end_drain` sets it, in the console's thread

    def _wake_up(self) -> None:
        """Makes the thread handle what has changed."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it is about to wake up
            os.write(self._wake_writer, b".")

    # In the thread

    def _run(self) -> None:
        """Runs the thread: reads the streams as data arrives, and writes to sinks that accept data.

        It ends when `__exit__` has set `_flush_deadline` and this deadline is over.
        """
        sinks = set(self._sinks.values())
        while self._flush_deadline is None or not self._flush_deadline.wait_is_over():
            self._read_what_arrives(sinks)  # waits for data
            self._run_due_timers(sinks)

            for sink in sinks:
                sink.flush()  # writes what the sink accepts
            self._write_announcements()
            self._end_drain_if_due()  # the main thread may wait in `drain`

    def _read_what_arrives(self, sinks: Collection[Sink]) -> None:
        """Waits until a stream has data, a sink accepts data, or it is time to wake up, and reads
        the streams that have data.
        """
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)

        # If too much is waiting to be shown, let the ranks wait until the console has caught up.
        is_full = any(len(sink.waiting) > _MAX_WAITING_BYTES for sink in sinks)
        polled_streams = {}  # by descriptor
        for stream in self._streams:
            is_shown = stream.sink is not None  # otherwise it is only written to a log
            if is_full and is_shown:
                continue
            polled_streams[stream.descriptor] = stream
            poll.register(stream.descriptor, select.POLLIN)

        for sink in sinks:
            if sink.waiting:
                poll.register(sink.descriptor, select.POLLOUT)

        # While a timer runs, wake up again and again; otherwise when a descriptor is ready.
        timeout_ms = _TICK_S * 1000 if self._is_timer_running() else None
        for descriptor, _ in poll.poll(timeout_ms):
            if descriptor == self._wake_reader:
                os.read(self._wake_reader, 4096)  # empties the pipe
            elif descriptor in polled_streams:
                self._read(polled_streams[descriptor])

    def _is_timer_running(self) -> bool:
        """Returns True if something must be done after some time, even if no data arrives.

        That is to draw the status row, to end a wait in `drain` or that for the sinks at the end of
        the run, or to show last words.
        """
        return (
            self._draw_at < math.inf
            or self._drain_until < math.inf
            or self._flush_deadline is not None
            or any(stream.last_words for stream in self._streams)
        )

    def _run_due_timers(self, sinks: Collection[Sink]) -> None:
        """Draws the status rows and shows last words, if it is time to."""
        now = time.monotonic()
        if now >= self._draw_at:
            self._draw_at = math.inf
            for sink in sinks:
                sink.draw(self._status_row(sink))

        for stream in self._streams:
            last_words_are_complete = now >= stream.last_read + _LAST_WORDS_S
            if last_words_are_complete:
                self._show_last_words(stream)  # of most streams there are none

    def _end_drain_if_due(self) -> None:
        """Ends the wait of the main thread in `drain` if all streams have ended.

        Streams that are still open when the thread has waited for too long are closed here.
        """
        has_waited_too_long = time.monotonic() >= self._drain_until
        if has_waited_too_long:
            self._close_streams_left_open()

        if not self._streams:
            self._end_drain()  # does nothing if the main thread is not waiting in `drain`

    def _close_streams_left_open(self) -> None:
        """Reads all streams one last time, and closes them.

        Processes that ended ranks have left behind may keep them open.
        """
        for stream in list(self._streams):
            self._read(stream)  # this ends the stream if it is at its end by now
            if stream in self._streams:
                self._end(stream)

    def _end_drain(self) -> None:
        """Ends the wait in `drain`, if the main thread waits there, once all streams have ended."""
        self._drain_until = math.inf
        is_waited_for = not self._drained.is_set()
        if is_waited_for:
            # The last words of all ranks are known now, and their failure is reported next.
            self._announce_same_last_words()
            self._drained.set()

    def _write_announcements(self) -> None:
        """Shows the launcher's own lines that are waiting, each on a line of its own."""
        sink = self._sinks["stderr"]
        while self._announcements:
            text = self._announcements.popleft().encode(errors="replace") + b"\n"

            # The last line on the terminal may be unfinished. A rank that writes to the terminal
            # itself may be anywhere in a line.
            wrote_unfinished_line = sink.ends_mid_line
            if wrote_unfinished_line or sink.is_shared_with_rank:
                text = b"\n" + text

            sink.write(text, self._status_row(sink))
            sink.ends_mid_line = False

    def _read(self, stream: RankStream) -> None:
        """Reads what has arrived on a stream, writes it to the log, and shows it on the console.

        A stream without a sink is only written to the log. Last words are held back in the stream.
        At the end of the stream, the stream is closed.
        """
        data = stream.read()
        if data is None:
            self._end(stream)
            return

        # The lines that are complete with this data. The beginning of a line stays in the stream.
        lines = stream.finish_lines(data)
        if stream.recent_output is not None:  # kept in memory, for the report on a failure
            stream.recent_output.add(data)

        try:
            stream.write_files(data, lines)  # the data to the log, and lines to a filtered file
        except OSError as error:
            stream.close_files()
            self._note_full_disk(stream, error)

        if stream.sink is None:
            return

        if stream.prefix:
            lines_to_show = stream.split_off_last_words(lines)
            self._show(stream, stream.sink, lines_to_show)
        else:  # a single rank's stream is passed on unchanged
            stream.sink.write(data)
            # A line of the launcher's own must not be appended to an unfinished line of the rank.
            stream.sink.ends_mid_line = not data.endswith(b"\n")

        if stream.sink.can_draw:
            self._draw_soon()

    def _draw_soon(self) -> None:
        """Plans to draw the status rows, once for all data that arrives within a moment."""
        is_drawing_planned = self._draw_at < math.inf
        if not is_drawing_planned:
            self._draw_at = time.monotonic() + _TICK_S

    def _show(self, stream: RankStream, sink: Sink, lines: list[bytes]) -> None:
        """Shows lines, each with the prefix of its rank."""
        if not lines:
            return

        prefix = sink.colour_prefix(stream.prefix, stream.rank)
        shown = []
        for line in lines:
            if sink.can_draw and b"\x1b" in line:
                line += b"\x1b[0m"  # its colours end with it
            shown.append(prefix + line + b"\n")

        sink.write(b"".join(shown), self._status_row(sink))

    def _show_last_words(self, stream: RankStream) -> None:
        """Shows the last words that were held back, unless another rank has printed the same.

        They are the same if they differ only in numbers. The rank is added to
        `_ranks_by_last_words`, from which `_announce_same_last_words` names the other ranks later.
        """
        lines = stream.last_words
        stream.last_words = []
        if not lines or stream.sink is None:
            return

        # For an error of Lockstep's, a rank prints no traceback, as the launcher shows the error.
        # Then these are other lines, such as one that is printed at exit.
        has_traceback = any(TRACEBACK_HEADING in line for line in lines)
        if not has_traceback:
            self._show(stream, stream.sink, lines)
            return

        without_numbers = _NUMBER.sub(b"", b"\n".join(lines))
        is_first_to_print_them = without_numbers not in self._ranks_by_last_words
        if is_first_to_print_them:
            self._ranks_by_last_words[without_numbers] = []
            self._show(stream, stream.sink, lines)
        self._ranks_by_last_words[without_numbers].append(stream.rank)

    def _announce_same_last_words(self) -> None:
        """Says which ranks have printed the same last words as a rank whose last words were
        shown.
        """
        for shown_rank, *other_ranks in self._ranks_by_last_words.values():
            if other_ranks:
                logs = "its log" if len(other_ranks) == 1 else "their logs"
                line = translate(
                    f"{format_ranks(other_ranks)} printed the same traceback as rank {shown_rank} "
                    f"(numbers may differ); see {logs}"
                )
                self._announcements.append(f"lockstep: {line}")

        self._ranks_by_last_words.clear()
        self._write_announcements()

    def _status_row(self, sink: Sink) -> bytes:
        """Returns the unfinished line of the lowest rank that has one, as one row of the
        terminal.
        """
        if not sink.can_draw:
            return b""

        streams = [stream for stream in self._streams if stream.sink is sink]
        streams_with_line = [stream for stream in streams if stream.has_unfinished_line_to_show]
        if not streams_with_line:
            return b""

        lowest = min(streams_with_line, key=lambda stream: stream.rank)
        prefix = sink.colour_prefix(lowest.prefix, lowest.rank)
        return sink.crop(prefix + lowest.unfinished_line)

    def _end(self, stream: RankStream) -> None:
        """Shows the rest of a stream, and closes it.

        The rest is a last line without a newline, and the last words that were held back: the
        traceback of a rank that fails.
        """
        self._streams.remove(stream)

        if stream.sink is not None:
            # The last line has no newline if the rank was killed while it wrote the line.
            rest = [stream.unfinished_line] if stream.has_unfinished_line_to_show else []
            rest_before_last_words = stream.split_off_last_words(rest)
            self._show(stream, stream.sink, rest_before_last_words)
            self._show_last_words(stream)
            stream.sink.draw(self._status_row(stream.sink))

        stream.close_files()
        os.close(stream.descriptor)


def _copy_standard_input() -> int:
    """Returns a new descriptor of the launcher's standard input, or of /dev/null if it has none."""
    try:
        return os.dup(0)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)

"""The ranks' standard output and error: every byte to a log file, chosen streams to the console.

A *sink* is the launcher's own stdout or stderr. It gets whole lines, each with its rank as a
*prefix*. On a terminal a *status row* stands under them: a line that the lowest rank has not
finished yet, such as a progress bar. A rank's *last words* are what it prints as an exception ends
it: they are held back, since other ranks may print the same. The only rank of a run has the
launcher's terminal itself.

With hundreds of ranks the verdict would stand under thousands of lines. So last words that differ
in numbers alone are shown once, and a line says which ranks have printed the same.

One thread of the launcher reads all streams; it is started after the zygote was forked. While a
sink takes nothing, the ranks' streams are still read, up to `_MAX_WAITING_BYTES`. Then the ranks
wait, as they would for any slow terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import IO

from lockstep.errors import SettingError
from lockstep.run.start.sink import FlushDeadline, Sink, open_sinks
from lockstep.run.start.terminal_lines import RecentOutput, finished_lines, last_state
from lockstep.run.watch.evidence import Evidence
from lockstep.wording import format_ranks

STREAMS = ("stdout", "stderr")
COLUMNS = "LOCKSTEP_TERMINAL_COLUMNS"
"""Variable of the ranks: how many columns of the launcher's terminal their lines have."""

_DEFAULT_PREFIX = "[rank ${rank}] "
_MAX_WAITING_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_TICK_S = 0.05
_LAST_WORDS_S = 1.0
"""A rank that has written nothing more for this time has said what ended it."""
_TRACEBACK_HEADING = b"Traceback (most recent call last)"
# Numbers in which the last words of two ranks may differ, such as "0x7f3a" and "4711".
_NUMBER = re.compile(rb"0x[0-9a-f]+|\d+")


def console_for(flags: argparse.Namespace, nproc: int) -> Console:
    """Returns the console that torchrun's flags ask for.

    Args:
        flags: torchrun's flags.
        nproc: ranks on this machine.

    Raises:
        SettingError: torchrun refuses a flag's value.
    """
    shown = choose_streams(nproc, flags.redirects, flags.tee, flags.local_ranks_filter)
    filters = {}
    for stream in STREAMS:
        # Older versions of torch have no such flag. It is None if it is not given.
        filters[stream] = getattr(flags, f"duplicate_{stream}_filters", None) or ()

    template = (
        getattr(flags, "log_line_prefix_template", "")  # since torch 2.14
        or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        or _DEFAULT_PREFIX
    )
    prefix = Template(template).safe_substitute(role_name=flags.role, hostname=socket.gethostname())

    # With --tee the user has asked for log files, so an only rank gets them, too.
    return Console(shown, filters, prefix, always_logged=flags.tee != "0")


def choose_streams(
    nproc: int, redirects: str = "0", tee: str = "0", local_ranks_filter: str = ""
) -> dict[int, frozenset[str]]:
    """Returns which streams of which local rank reach the console, by torchrun's flags.

    Without flags all do. See `torch.distributed.elastic.multiprocessing` for the flags' values.

    Args:
        nproc: ranks on this machine.
        redirects: streams that are kept off the console.
        tee: streams that reach the console in spite of `redirects`.
        local_ranks_filter: the ranks that reach the console at all; empty: all.

    Raises:
        SettingError: torchrun refuses a value.
    """
    from torch.distributed.elastic.multiprocessing import Std

    redirected = _streams_of_ranks("--redirects", redirects, nproc)
    teed = _streams_of_ranks("--tee", tee, nproc)

    shown_ranks = set(range(nproc))
    if local_ranks_filter:
        try:
            shown_ranks = {int(part) for part in local_ranks_filter.split(",")}
        except ValueError:
            raise SettingError(
                f"--local-ranks-filter {local_ranks_filter}",
                "not a list of ranks",
                "write such as 0,2",
            ) from None

    shown: dict[int, frozenset[str]] = {}
    for rank in range(nproc):
        streams = set()
        if rank in shown_ranks:
            for name, flag in (("stdout", Std.OUT), ("stderr", Std.ERR)):
                is_redirected = bool(flag & redirected[rank])
                is_teed = bool(flag & teed[rank])
                if is_teed or not is_redirected:
                    streams.add(name)

        shown[rank] = frozenset(streams)

    return shown


def _streams_of_ranks(flag: str, text: str, nproc: int) -> Mapping[int, int]:
    """Reads a value of `--redirects` or `--tee`: for each local rank a bit set of streams."""
    from torch.distributed.elastic.multiprocessing import Std, to_map

    try:
        streams: Mapping[int, int] = to_map(Std.from_str(text), nproc)
    except ValueError:
        raise SettingError(
            f"{flag} {text}",
            "neither one of 0 to 3 nor a list such as 0:1,1:3",
            "0: none, 1: stdout, 2: stderr, 3: both; RANK:NUMBER for single ranks",
        ) from None

    return streams


class Console:
    """Reads the streams of all ranks, in a thread, within a `with` block.

    Args:
        shown: for each local rank the streams that reach the console; None: all do.
        filters: for `stdout` and `stderr` a list of texts. A line that reaches the console and
            holds one of them is also written to `filtered_stdout.log` (or `filtered_stderr.log`)
            in the attempt's folder.
        prefix: the template of each line's prefix, with `${rank}` and `${local_rank}`.
        always_logged: True if an only rank has log files too, instead of the terminal itself.
        environ: the environment variables, of which NO_COLOR and TERM are read.
        stdout: descriptor that gets the ranks' standard output.
        stderr: descriptor that gets the ranks' standard error and the launcher's own lines.
    """

    def __init__(
        self,
        shown: Mapping[int, Collection[str]] | None = None,
        filters: Mapping[str, Collection[str]] | None = None,
        prefix: str = _DEFAULT_PREFIX,
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
        self._streams: list[_Stream] = []
        self._announcements: deque[str] = deque()
        self._full_folders: set[Path] = set()
        """The log folders that are full, which was announced once for each."""
        self._ranks_by_last_words: dict[bytes, list[int]] = {}
        """The keys are last words without their numbers."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._drained = threading.Event()
        self._drained.set()
        self._draw_at = math.inf
        self._drain_until = math.inf
        self._flush_deadline: FlushDeadline | None = None
        self.hurry = False
        """True if the run was asked to end: a slow console is then not waited for."""
        self._thread = threading.Thread(target=self._run, name="lockstep-logs", daemon=True)

    def __enter__(self) -> Console:
        """Starts the thread. From now on no process may be forked without exec."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drains the streams, waits while the console takes the rest, and ends the thread."""
        self.drain()

        # The thread ends when this deadline is over.
        self._flush_deadline = FlushDeadline(self._sinks.values(), hurry=self.hurry)
        self._wake_up()
        self._thread.join()

        lost = self._sinks["stdout"].lost
        if lost:
            self._announcements.append(f"lockstep: {lost}")
            self._write_announcements()

        os.close(self._wake_reader)
        os.close(self._wake_writer)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of several ranks, which see pipes even if the launcher has a terminal."""
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
        """Makes a rank's standard output and error, and a copy of our standard input.

        From now on the thread reads what the rank writes there.

        Args:
            rank: the rank's number in the whole run.
            local_rank: its number on this machine.
            folder: the rank's folder, which must exist.
            is_only_rank: True for the only rank of the run. It has the terminal itself, if there is
                one and the stream is shown. Otherwise what it writes is passed on unchanged,
                without a prefix.
            error_file: the file in which the rank notes the exception that ends it; None: the one
                in its folder.
            recent: gets the end of its standard error.

        Returns:
            Descriptors for the rank: input, output, error. The caller closes them once the rank
            has them.
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

            stream = _Stream(
                rank=rank,
                prefix="" if is_only_rank else prefix,
                descriptor=reading_end,
                sink=sink if name in shown else None,
                log=folder / f"{name}.log",
                filters=[text.encode() for text in self._filters.get(name, ())],
                error_file=error_file or Evidence.in_folder(folder).error,
                recent=recent if name == "stderr" else None,
            )
            try:
                stream.open_log()
            except OSError as os_error:
                self._note_full_disk(stream, os_error)

            self._streams.append(stream)

        self._wake_up()
        output, error = rank_descriptors
        return _copy_standard_input(), output, error

    def _note_full_disk(self, stream: _Stream, error: OSError) -> None:
        """Announces that a log cannot be written; once for the logs of an attempt."""
        folder = stream.log.parent.parent
        if folder not in self._full_folders:
            self._full_folders.add(folder)
            self._announcements.append(
                f"lockstep: {folder}: {error.strerror}: the logs there end where nothing more can "
                f"be written, the first of them is {stream.log.name} of rank {stream.rank}; the "
                "training goes on. --log-dir names another folder"
            )

    def announce(self, text: str) -> None:
        """Writes lines of the launcher itself, above the status row; from any thread."""
        self._announcements.append(f"lockstep: {text}")
        if self._thread.is_alive():
            self._wake_up()
        else:
            self._write_announcements()

    def drain(self, timeout: float = 2.0) -> None:
        """Waits until all streams have ended, as they do when their ranks have.

        Args:
            timeout: in seconds. A process that a rank has left behind may hold a stream open for
                longer; then the stream is read one last time and closed.
        """
        if self._thread.is_alive():
            self._drained.clear()
            self._drain_until = time.monotonic() + timeout
            self._wake_up()
            self._drained.wait()

    def _wake_up(self) -> None:
        """Lets the thread look at what has changed."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it is about to wake up
            os.write(self._wake_writer, b".")

    # In the thread

    def _run(self) -> None:
        """Reads streams as they bring something, and writes to the sinks what these can take.

        It ends when `__exit__` has set `_flush_deadline` and that deadline is over.
        """
        sinks = set(self._sinks.values())
        while self._flush_deadline is None or not self._flush_deadline.over():
            poll = select.poll()
            poll.register(self._wake_reader, select.POLLIN)

            is_full = any(len(sink.waiting) > _MAX_WAITING_BYTES for sink in sinks)
            polled_streams = {}
            for stream in self._streams:
                if is_full and stream.sink is not None:
                    continue  # its rank waits until the console has taken what there is
                polled_streams[stream.descriptor] = stream
                poll.register(stream.descriptor, select.POLLIN)

            for sink in sinks:
                if sink.waiting:
                    poll.register(sink.descriptor, select.POLLOUT)

            # None: it waits until a descriptor is ready.
            timeout_ms = _TICK_S * 1000 if self._is_something_due() else None
            for descriptor, _ in poll.poll(timeout_ms):
                if descriptor == self._wake_reader:
                    os.read(self._wake_reader, 4096)  # empties the pipe
                elif descriptor in polled_streams:
                    self._read(polled_streams[descriptor])

                # Otherwise it is a sink that can take more. It is written to below.
            self._do_what_is_due(sinks)

    def _is_something_due(self) -> bool:
        """Returns True if the clock alone will require something to be done."""
        return (
            self._draw_at < math.inf
            or self._drain_until < math.inf
            or self._flush_deadline is not None
            or any(stream.last_words for stream in self._streams)
        )

    def _do_what_is_due(self, sinks: Collection[Sink]) -> None:
        """Draws the status rows, shows last words, flushes the sinks, and ends what is drained."""
        now = time.monotonic()
        if now >= self._draw_at:
            self._draw_at = math.inf
            for sink in sinks:
                sink.draw(self._status_row(sink))

        for stream in self._streams:
            has_nothing_more_to_say = now >= stream.last_read + _LAST_WORDS_S
            if has_nothing_more_to_say:
                self._show_last_words(stream)

        for sink in sinks:
            sink.flush()

        self._write_announcements()
        is_drain_over = now >= self._drain_until
        if is_drain_over:
            # The ranks have ended, but processes that they have left behind hold streams open.
            for stream in list(self._streams):
                self._read(stream)
                if stream in self._streams:
                    self._end(stream)

        if not self._streams:
            self._drain_until = math.inf
            is_drain_waiting = not self._drained.is_set()  # in another thread
            if is_drain_waiting:
                self._announce_same_last_words()
            self._drained.set()  # `drain` goes on

    def _write_announcements(self) -> None:
        """Writes the launcher's own lines that wait, each on a line of its own."""
        sink = self._sinks["stderr"]
        while self._announcements:
            text = self._announcements.popleft().encode(errors="replace") + b"\n"
            # What a rank writes there directly is not seen here, so it may end in mid-line as well.
            may_be_mid_line = sink.ends_mid_line or sink.is_shared_with_rank
            if may_be_mid_line:
                text = b"\n" + text
            sink.write(text, self._status_row(sink))
            sink.ends_mid_line = False

    def _read(self, stream: _Stream) -> None:
        """Reads what a stream brings: into its log, and onto the console if it is shown.

        At its end the stream is closed. Last words are held back in the stream.
        """
        data = stream.read()
        if data is None:
            self._end(stream)
            return

        lines = stream.finish_lines(data)

        if stream.recent is not None:
            stream.recent.add(data)

        try:
            stream.write_files(data, lines)
        except OSError as error:
            stream.close_files()
            self._note_full_disk(stream, error)

        if stream.sink is None:
            return

        if stream.prefix:
            lines_to_show = stream.hold_back_last_words(lines)
            self._show(stream, stream.sink, lines_to_show)
        else:  # it is the only rank's, and passed on unchanged
            stream.sink.write(data)
            stream.sink.ends_mid_line = not data.endswith(b"\n")

        if stream.sink.can_draw:
            # The status row is drawn a moment later, once for all that comes until then.
            self._draw_at = min(self._draw_at, time.monotonic() + _TICK_S)

    def _show(self, stream: _Stream, sink: Sink, lines: list[bytes]) -> None:
        """Writes lines with their rank's prefix."""
        if not lines:
            return

        prefix = sink.colour_prefix(stream.prefix, stream.rank)
        shown = []
        for line in lines:
            if sink.can_draw and b"\x1b" in line:
                line += b"\x1b[0m"  # its colours end with it
            shown.append(prefix + line + b"\n")

        sink.write(b"".join(shown), self._status_row(sink))

    def _show_last_words(self, stream: _Stream) -> None:
        """Shows the last words that were held back, unless another rank has printed the same.

        They count as the same if they differ in numbers alone. Empties the stream's `last_words`,
        and adds the rank to `_ranks_by_last_words`.
        """
        lines = stream.last_words
        stream.last_words = []
        if not lines or stream.sink is None:
            return

        without_numbers = _NUMBER.sub(b"", b"\n".join(lines))
        is_first_to_print_them = without_numbers not in self._ranks_by_last_words
        if is_first_to_print_them:
            self._ranks_by_last_words[without_numbers] = []
            self._show(stream, stream.sink, lines)

        self._ranks_by_last_words[without_numbers].append(stream.rank)

    def _announce_same_last_words(self) -> None:
        """Says which ranks have printed the same last words as another one.

        Those of the first rank were shown, and those of the other ranks were not.
        """
        for shown_rank, *other_ranks in self._ranks_by_last_words.values():
            if other_ranks:
                logs = "its log" if len(other_ranks) == 1 else "their logs"
                self._announcements.append(
                    f"lockstep: {format_ranks(other_ranks)} failed with the same traceback as rank "
                    f"{shown_rank} (only numbers differ); see {logs}"
                )

        self._ranks_by_last_words.clear()
        self._write_announcements()

    def _status_row(self, sink: Sink) -> bytes:
        """Returns what the lowest rank has not finished yet, as one row of the terminal."""
        if not sink.can_draw:
            return b""

        unfinished = []
        for stream in self._streams:
            if stream.sink is not sink:
                continue
            if not stream.prefix:  # it is passed on unchanged, its unfinished line included
                continue
            if stream.visible_unfinished.strip():
                unfinished.append(stream)

        if not unfinished:
            return b""

        lowest = min(unfinished, key=lambda stream: stream.rank)
        return sink.crop(sink.colour_prefix(lowest.prefix, lowest.rank) + lowest.visible_unfinished)

    def _end(self, stream: _Stream) -> None:
        """Shows what has not been shown of a stream yet, and closes it.

        That is a last line without a newline, and the last words that were held back. A stream
        without a prefix is passed on unchanged, so its last line has been shown already.
        """
        self._streams.remove(stream)

        if stream.sink is not None:
            lines = []
            if stream.prefix and stream.visible_unfinished.strip():
                lines = [stream.visible_unfinished]
            lines_to_show = stream.hold_back_last_words(lines)
            self._show(stream, stream.sink, lines_to_show)
            self._show_last_words(stream)
            stream.sink.draw(self._status_row(stream.sink))

        stream.close_files()
        os.close(stream.descriptor)


def _copy_standard_input() -> int:
    try:
        return os.dup(0)
    except OSError:  # the launcher was started without one
        return os.open(os.devnull, os.O_RDONLY)


@dataclass(eq=False, kw_only=True)
class _Stream:
    """One stream of one rank."""

    rank: int
    prefix: str
    """The prefix of each of its lines; empty if the stream is passed on unchanged."""
    descriptor: int
    """The end of the pipe from which it is read."""
    sink: Sink | None
    """The stream on which it is shown; None: it is not shown."""
    log: Path
    """The file that gets all of it."""
    filters: list[bytes]
    """A shown line that holds one of these also goes to a file beside the rank's folder."""
    error_file: Path
    """The file in which the rank notes the exception that ends it."""
    recent: RecentOutput | None
    """Keeps the end of the stream for messages; None: it is not kept."""
    unfinished: bytes = b""
    """The line that is not finished yet."""
    last_words: list[bytes] = field(default_factory=list)
    """Lines that are not shown yet: what the rank prints as an exception ends it."""
    last_read: float = 0.0
    """When something came last (monotonic): last words are shown when no more come."""

    def __post_init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._filtered_log = self.log.parent.with_name(f"filtered_{self.log.name}")

    def open_log(self) -> None:
        """Opens the files that it is written to.

        Raises:
            OSError: the disk is full.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.log, "ab", buffering=0)  # noqa: SIM115
        if self.filters:
            self._filtered_log.touch()

    @property
    def visible_unfinished(self) -> bytes:
        """What a terminal would show of the unfinished line."""
        return last_state(self.unfinished)

    def read(self) -> bytes | None:
        """Reads what there is; returns None at the end of the stream."""
        try:
            return os.read(self.descriptor, _READ_BYTES) or None
        except BlockingIOError:
            return b""

    def finish_lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` has finished, without newlines."""
        lines, self.unfinished = finished_lines(self.unfinished + data)
        # torch's hook for exceptions begins its lines with the rank, as the console does.
        prefix_of_torch = f"[rank{self.rank}]: ".encode()
        return [line.removeprefix(prefix_of_torch) for line in lines]

    def hold_back_last_words(self, lines: list[bytes]) -> list[bytes]:
        """Moves the last words among some lines into `last_words`, and returns the other lines.

        A rank prints last words on its standard error, after it has noted the exception that ends
        it. They begin with the heading of its traceback; if there is none, all lines are last
        words. Also sets `last_read` to the present time.
        """
        self.last_read = time.monotonic()
        if not lines or self.log.stem != "stderr" or not self._has_raised():
            return lines

        begin = 0
        have_begun_before = bool(self.last_words)
        if not have_begun_before:
            for index, line in enumerate(lines):
                if _TRACEBACK_HEADING in line:
                    begin = index
                    break

        self.last_words += lines[begin:]
        return lines[:begin]

    def _has_raised(self) -> bool:
        """Returns True if the rank has noted an exception that ends it."""
        try:
            return self.error_file.stat().st_size > 0
        except OSError:
            return False

    def write_files(self, data: bytes, lines: list[bytes]) -> None:
        """Writes data into the log, and lines that hold a text of `filters` into another file.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return

        self._file.write(data)
        if self.sink is None:  # the filters are for lines that are shown
            return

        prefix = self.prefix.encode()
        filtered = []
        for line in lines:
            if any(text in line for text in self.filters):
                filtered.append(prefix + line + b"\n")

        if filtered:
            with open(self._filtered_log, "ab") as file:
                file.write(b"".join(filtered))

    def close_files(self) -> None:
        """Closes the log; nothing is written to files from now on."""
        if self._file is not None:
            self._file.close()
            self._file = None

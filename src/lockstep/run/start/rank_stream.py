"""Reads one stream of a rank, its standard output or error, and writes it to its log.

What is shown of it is up to the `console`. A rank's *last words* are what it prints while an
exception ends it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lockstep.run.start.sink import Sink
from lockstep.run.start.terminal_lines import RecentOutput, finished_lines, last_state

TRACEBACK_HEADING = b"Traceback (most recent call last)"
_READ_BYTES = 1 << 16


@dataclass(eq=False, kw_only=True)
class RankStream:
    """One stream of one rank."""

    rank: int
    prefix: str
    """The prefix of each of its lines; empty if the stream is passed on unchanged."""
    descriptor: int
    """The reading end of its pipe."""
    sink: Sink | None
    """The sink on which it is shown; None if it is not shown."""
    log: Path
    """The file to which all of it is written."""
    filters: list[bytes]
    """A shown line that contains one of these is also written to a file beside the rank's
    folder.
    """
    error_file: Path
    """The file in which the rank records the exception that ends it."""
    recent_output: RecentOutput | None
    """Keeps the end of the stream for messages; None if it is not needed."""
    unfinished: bytes = b""
    """The line that is not finished yet."""
    last_words: list[bytes] = field(default_factory=list)
    """Lines that the rank printed while an exception ended it, and that are not shown yet."""
    last_read: float = 0.0
    """When data last arrived (monotonic). Last words are shown once no more data arrives."""

    def __post_init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._filtered_log = self.log.parent.with_name(f"filtered_{self.log.name}")

    def open_log(self) -> None:
        """Opens the files that the stream is written to.

        Raises:
            OSError: the disk is full.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.log, "ab", buffering=0)  # noqa: SIM115
        if self.filters:
            self._filtered_log.touch()

    @property
    def unfinished_line(self) -> bytes:
        """What a terminal would show of the unfinished line."""
        return last_state(self.unfinished)

    @property
    def has_unfinished_line_to_show(self) -> bool:
        """True if an unfinished line is not blank, and not on the console yet.

        A stream that is passed on unchanged, without a prefix, is shown as it arrives.
        """
        is_passed_on_unchanged = not self.prefix
        return not is_passed_on_unchanged and self.unfinished_line.strip() != b""

    def read(self) -> bytes | None:
        """Reads the data that has arrived, which may be empty; returns None at the end of the
        stream.
        """
        try:
            return os.read(self.descriptor, _READ_BYTES) or None
        except BlockingIOError:
            return b""

    def finish_lines(self, data: bytes) -> list[bytes]:
        """Adds data to the unfinished line, and returns the lines that are now finished."""
        lines, self.unfinished = finished_lines(self.unfinished + data)
        # torch's hook for exceptions puts the rank before each line, as the console does.
        prefix_of_torch = f"[rank{self.rank}]: ".encode()
        return [line.removeprefix(prefix_of_torch) for line in lines]

    def split_off_last_words(self, lines: list[bytes]) -> list[bytes]:
        """Moves last words from the given lines into `last_words`, and returns the other lines.

        Last words are printed on standard error after the rank has recorded the exception that ends
        it. They begin with the heading of the traceback, or with the first line if there is no
        heading.
        """
        self.last_read = time.monotonic()
        is_standard_error = self.log.stem == "stderr"  # the log is `stdout.log` or `stderr.log`
        if not lines or not is_standard_error or not self._has_raised():
            return lines

        # Once the last words have begun, all lines belong to them.
        have_begun_before = bool(self.last_words)
        begin = 0 if have_begun_before else _index_of_heading(lines)
        self.last_words += lines[begin:]
        return lines[:begin]

    def _has_raised(self) -> bool:
        """Returns True if the rank has recorded an exception that ends it."""
        try:
            return self.error_file.stat().st_size > 0
        except OSError:
            return False

    def write_files(self, data: bytes, lines: list[bytes]) -> None:
        """Writes data to the log, and lines that match the filters to a second file.

        Args:
            data: the data that has arrived.
            lines: the lines that are finished since this data has arrived, without newlines.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return
        self._file.write(data)

        # The filters only apply to streams that are shown on the console.
        is_shown = self.sink is not None
        if not is_shown:
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
        """Closes the log. Nothing is written to files from now on."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _index_of_heading(lines: list[bytes]) -> int:
    """Returns the index of the first line with the heading of a traceback; 0 if there is none."""
    for index, line in enumerate(lines):
        if TRACEBACK_HEADING in line:
            return index
    return 0

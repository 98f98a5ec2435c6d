"""The ranks' streams: one file each, whole lines on the console, and one bar under them."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from ranks import HANG_S

from lockstep.errors import SettingError
from lockstep.run.start.console import COLUMNS, Console
from lockstep.run.start.console_flags import choose_streams, console_for
from lockstep.run.start.sink import FlushDeadline, open_sinks
from lockstep.run.start.terminal_lines import last_state, read_last_lines
from lockstep.wording import format_ranks

pytestmark = pytest.mark.launcher

# --- what a terminal then shows ---------------------------------------------------------------


def screen(written: str) -> list[str]:
    """Carries out what the console writes; what it should not need fails."""
    rows: list[str] = [""]
    y = x = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", written):
        if token == "\r":
            x = 0
        elif token == "\n":
            y, x = y + 1, 0  # as a terminal's ONLCR does
            rows += [""] * (y == len(rows))
        elif token == "\x1b[K":
            rows[y] = rows[y][:x]
        elif token[0] == "\x1b":
            assert token.endswith("m"), repr(token)
        else:
            rows[y] = rows[y][:x].ljust(x) + token + rows[y][x + 1 :]
            x += 1
    return [row.rstrip() for row in rows]


class Terminal:
    """A pseudo-terminal that stands for the user's; `written` once the block is over."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        attributes = termios.tcgetattr(self.slave)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(self.slave, termios.TCSANOW, attributes)
        self.resize(100, 24)
        self._buffer = io.BytesIO()
        self._seen = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self.master, 65536):
                with self._seen:
                    self._buffer.write(chunk)
                    self._seen.notify_all()

    @property
    def written(self) -> str:
        return self._buffer.getvalue().decode()

    def wait_for(self, text: str) -> None:
        with self._seen:
            assert self._seen.wait_for(lambda: text in self.written, timeout=30), self.written

    def wait_until(self, shows: Callable[[list[str]], bool]) -> list[str]:
        with self._seen:
            assert self._seen.wait_for(lambda: shows(screen(self.written)), timeout=30)
            return screen(self.written)

    def end(self) -> str:
        """All that was written; nothing can be written any more."""
        if self.slave >= 0:
            os.close(self.slave)
            self._thread.join()
            os.close(self.master)
            self.slave = -1
        return self.written


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.end()


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


def start(
    console: Console, tmp_path: Path, rank: int, code: str, *, alone: bool = False
) -> subprocess.Popen[bytes]:
    folder = tmp_path / "attempt_0" / f"rank_{rank}"
    folder.mkdir(parents=True)
    streams = console.open(rank, rank, folder, is_only_rank=alone)
    process = subprocess.Popen(
        [sys.executable, "-S", "-u", "-c", textwrap.dedent(code)],
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        start_new_session=True,
    )
    for stream in streams:
        os.close(stream)
    return process


def logged(tmp_path: Path, rank: int, name: str = "stdout") -> bytes:
    return (tmp_path / "attempt_0" / f"rank_{rank}" / f"{name}.log").read_bytes()


@contextlib.contextmanager
def piped() -> Iterator[tuple[int, int, list[bytes]]]:
    """Two pipes in the place of the console's streams, and what came out of each."""
    pairs = [os.pipe(), os.pipe()]
    found = [b"", b""]

    def read(number: int) -> None:
        with os.fdopen(pairs[number][0], "rb") as file:
            found[number] = file.read()

    threads = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield pairs[0][1], pairs[1][1], found
    finally:
        for _, theirs in pairs:
            os.close(theirs)
        for thread in threads:
            thread.join()


# --- one line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"a", b"a"),
        (b"", b""),
        (b"a\r", b"a"),
        (b"\r 10%|#   |\r 20%|##  |", b" 20%|##  |"),
        (b"10%\r20%\r", b"20%"),
        (b"100%|####|\r          \rhello", b"hello"),  # tqdm.write
        (b"100%|####|\r          \r", b"          "),  # tqdm(leave=False)
        (b"\r\x1b[2Kone\r\x1b[2K", b" "),
        (b"\r\x1b[?25l\x1b[Kone\x1b[K", b"one"),
        (b"\x1b[31mred\x1b[0m\x1b[3C", b"\x1b[31mred\x1b[0m"),
        (b"\x1b]0;title\x07text", b"text"),
        (b"\xff\xe6\x97", b"\xff\xe6\x97"),
    ],
)
def test_the_last_state_of_a_line_counts(line: bytes, state: bytes) -> None:
    assert last_state(line) == state


PIECES = [b"x", b"yy\n", b"\n", b"\r\n", b"w", b"\x1b[31m", b"\xe6\x97", b"\xa5"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(PIECES)), max_size=30))
def test_lines_are_whole_and_none_is_lost(pieces: list[tuple[int, bytes]]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        piped() as (out, err, found),
        Console(stdout=out, stderr=err) as console,
    ):
        streams = [console.open(rank, rank, made(folder, rank)) for rank in range(3)]
        for rank, piece in pieces:
            os.write(streams[rank][1], piece)
        for descriptor in (d for opened in streams for d in opened):
            os.close(descriptor)
    assert found[0] == b"" or found[0].endswith(b"\n")
    for rank in range(3):
        sent = b"".join(piece for number, piece in pieces if number == rank).replace(b"\r", b"")
        mark = f"[rank {rank}] ".encode()
        # Each line of the console is of one rank alone, so nothing was cut by another.
        own = [line for line in found[0].split(b"\n") if line.startswith(mark)]
        expected = sent.removesuffix(b"\n").split(b"\n") if sent else []
        assert [line.removeprefix(mark) for line in own] == expected


def made(folder: str, rank: int) -> Path:
    own = Path(folder, f"rank_{rank}")
    own.mkdir()
    return own


# --- several ranks, a pipe ----------------------------------------------------------------------


def test_lines_of_ranks_are_not_mixed(tmp_path: Path) -> None:
    code = """
        import sys
        for i in range(300):
            for part in ("line", " %d" % i, " of 300", "\\n"):
                sys.stdout.write(part)
        sys.stderr.write("the end, without a newline")
    """
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        processes = [start(console, tmp_path, rank, code) for rank in range(3)]
        assert [process.wait() for process in processes] == [0, 0, 0]
    lines = found[0].decode().splitlines()
    for rank in range(3):
        assert [line for line in lines if f"[rank {rank}]" in line] == [
            f"[rank {rank}] line {i} of 300" for i in range(300)
        ]
        assert logged(tmp_path, rank, "stderr") == b"the end, without a newline"
    assert len(lines) == 900
    assert sorted(found[1].decode().splitlines()) == [
        f"[rank {rank}] the end, without a newline" for rank in range(3)
    ]


def test_every_byte_is_in_the_file(tmp_path: Path) -> None:
    code = """
        import os
        for i in range(64):
            os.write(1, bytes(range(256)) * 256)
        os.write(2, b"\\x1b[31mred\\r\\n")
    """
    with piped() as (out, err, _), Console(stdout=out, stderr=err) as console:
        assert start(console, tmp_path, 0, code).wait() == 0
        assert start(console, tmp_path, 1, code).wait() == 0
    for rank in (0, 1):
        assert logged(tmp_path, rank) == bytes(range(256)) * 256 * 64
        assert logged(tmp_path, rank, "stderr") == b"\x1b[31mred\r\n"


def test_a_console_that_takes_nothing_stops_neither_ranks_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.run.start.sink._PATIENCE_S", 0.5)
    reading, writing = os.pipe()
    code = "import os; [os.write(1, b'x' * 99 + b'\\n') for i in range(20000)]"
    with piped() as (_, err, found), Console(stdout=writing, stderr=err) as console:
        assert start(console, tmp_path, 0, code).wait(timeout=HANG_S) == 0
    assert re.fullmatch(rb"lockstep: the last \d+ bytes of output were not taken here\n", found[1])
    assert len(logged(tmp_path, 0)) == 2_000_000
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        shown = file.read()
    assert shown.endswith(b"\n")
    assert set(shown.splitlines()) == {b"[rank 0] " + b"x" * 99}


def test_a_slow_console_is_waited_for_until_it_has_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, ended = 100.0, []
    monkeypatch.setattr("lockstep.run.start.sink.time.monotonic", lambda: now)
    sink = open_sinks({})["stdout"]
    sink.waiting += bytes(5)
    deadline = FlushDeadline([sink])
    for _ in range(5):
        ended.append(deadline.wait_is_over())
        now += 50
        del sink.waiting[:1]
    assert ended == [False] * 5
    assert deadline.wait_is_over()
    sink.waiting += b"x"
    assert not FlushDeadline([sink], hurry=True).wait_is_over()


def test_a_console_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("lockstep.run.start.sink.time.monotonic", lambda: now)
    sink = open_sinks({})["stdout"]
    sink.waiting += bytes(5)
    patient, hurried = FlushDeadline([sink]), FlushDeadline([sink], hurry=True)
    assert not patient.wait_is_over()
    assert not hurried.wait_is_over()
    now += 3
    del sink.waiting[:1]
    assert not patient.wait_is_over()
    assert hurried.wait_is_over()
    now += 61
    assert patient.wait_is_over()


def test_output_that_a_full_disk_has_lost_is_announced(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with piped() as (_, err, found), Console(stdout=full, stderr=err) as console:
        assert start(console, tmp_path, 0, "print('a')").wait() == 0
    os.close(full)
    assert found[1] == b"lockstep: the output ends early: No space left on device\n"
    assert logged(tmp_path, 0) == b"a\n"


def test_ranks_outlive_the_reader_of_the_console(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Console(stdout=writing, stderr=writing) as console:
        assert start(console, tmp_path, 0, "print('a'); print('b')").wait() == 0
        console.announce("this cannot be shown")
    assert logged(tmp_path, 0) == b"a\nb\n"
    os.close(writing)


def test_a_stream_that_someone_keeps_open_is_closed_in_time(tmp_path: Path) -> None:
    code = """
        import os, time
        print("parent")
        if os.fork() == 0:
            print("child")
            time.sleep(60)
    """
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        process = start(console, tmp_path, 0, code)
        assert process.wait() == 0
        console.drain(timeout=0.5)
        os.killpg(process.pid, 9)
    assert b"[rank 0] parent\n" in found[0]
    assert b"[rank 0] child\n" in found[0]


def test_a_full_disk_ends_the_log_and_is_announced(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        stdin, *streams = console.open(0, 0, tmp_path)
        subprocess.run(["echo", "shown"], stdout=streams[0], stderr=streams[1], check=True)
        for stream in (stdin, *streams):
            os.close(stream)
        console.drain()
    assert found[0] == b"[rank 0] shown\n"
    full = f"lockstep: {tmp_path.parent}: No space left on device: the logs there end"
    assert found[1].decode().startswith(full)
    assert b"the first of them is stdout.log of rank 0; the training goes on" in found[1]


def test_streams_of_a_second_attempt_are_read_like_those_of_the_first(tmp_path: Path) -> None:
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        for attempt in ("first", "second"):
            assert start(console, tmp_path / attempt, 0, f"print('{attempt}')").wait() == 0
            console.drain()
            assert logged(tmp_path / attempt, 0) == f"{attempt}\n".encode()
    assert found[0] == b"[rank 0] first\n[rank 0] second\n"


def written_by(tmp_path: Path, *pieces: bytes) -> bytes:
    """What a pipe gets when rank 1 of several writes this."""
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        stdin, stdout, stderr = console.open(1, 1, tmp_path)
        for piece in pieces:
            os.write(stdout, piece)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        console.drain()
    return found[0]


def test_a_pipe_gets_a_bar_once_with_its_last_state(tmp_path: Path) -> None:
    bar = b"".join(b"\r%3d%%" % i for i in range(101)) + b"\n"
    sent = (b"begin\n", bar, bar[:-1], b"\r    \rafter it\n", b"\r 99%")
    assert written_by(tmp_path, *sent) == (
        b"[rank 1] begin\n[rank 1] 100%\n[rank 1] after it\n[rank 1]  99%\n"
    )
    assert (tmp_path / "stdout.log").read_bytes() == b"".join(sent)


def test_several_progress_bars_of_one_rank_are_shown_by_their_last_states(tmp_path: Path) -> None:
    """As tqdm draws a bar within a bar: a newline, the lower one, and up again."""
    inner = b"".join(b"\n\rinner %d\x1b[A" % i for i in range(9))
    assert written_by(tmp_path, b"\router 0", inner, b"\router 1", inner, b"\n\n") == (
        b"[rank 1] outer 0\n[rank 1] outer 1\n[rank 1] \n"
    )


def test_the_prefix_of_torchs_exception_hook_is_removed(tmp_path: Path) -> None:
    """torch's hook for uncaught exceptions puts the rank before each line as well."""
    trace = b"[rank1]: Traceback\n[rank1]:   File\n[rank2]: other\n"
    out = b"[rank 1] Traceback\n[rank 1]   File\n[rank 1] [rank2]: other\n"
    assert written_by(tmp_path, b"\r", trace) == out


def test_what_ends_many_ranks_is_shown_once(tmp_path: Path) -> None:
    def trace(rank: int, text: str) -> bytes:
        heading = f"Traceback (most recent call last):\n  File 'a.py', line 3, at 0x{rank}f\n"
        return f"{heading}{text}\n".encode()

    lost = "RuntimeError: lost 10.0.0.{}:{}"
    ends = [lost.format(rank, 4000 + rank) for rank in range(4)] + ["KeyError: 1"]
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        for rank, text in enumerate(ends):
            folder = tmp_path / str(rank)
            folder.mkdir()
            stdin, stdout, stderr = console.open(rank, rank, folder)
            (folder / "error.json").write_text("{}")
            os.write(stderr, trace(rank, text))
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
        console.drain()
    shown = found[1].decode()
    (first,) = re.findall(r"rank (\d)\] RuntimeError", shown)
    assert shown.count("Traceback") == 2
    assert f"[rank {first}] {ends[int(first)]}\n" in shown
    assert "[rank 4] KeyError: 1\n" in shown
    others = format_ranks({*range(4)} - {int(first)})
    assert shown.endswith(
        f"lockstep: {others} printed the same traceback as rank {first} (numbers may differ); "
        "see their logs\n"
    )
    for rank, text in enumerate(ends):
        assert (tmp_path / str(rank) / "stderr.log").read_bytes() == trace(rank, text)


def test_what_follows_an_error_of_lockstep_is_shown_for_each(tmp_path: Path) -> None:
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        for rank in range(2):
            folder = tmp_path / str(rank)
            folder.mkdir()
            stdin, stdout, stderr = console.open(rank, rank, folder)
            (folder / "error.json").write_text("{}")
            os.write(stderr, b"cleanup done\n")  # at exit
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
        console.drain()
    shown = found[1].decode().splitlines()
    assert sorted(shown) == ["[rank 0] cleanup done", "[rank 1] cleanup done"]


def test_what_does_not_end_a_rank_is_shown_for_each(tmp_path: Path) -> None:
    trace = b"Traceback (most recent call last):\nKeyError: 1\n"
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        for rank in range(2):
            stdin, stdout, stderr = console.open(rank, rank, tmp_path)
            os.write(stderr, trace)
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
        console.drain()
    assert found[1].count(b"KeyError: 1") == 2


def test_filtered_lines_go_to_a_file_and_only_chosen_streams_to_the_console(tmp_path: Path) -> None:
    flags = argparse.Namespace(
        role="default",
        redirects="1:1",
        tee="0",
        local_ranks_filter="0,1",
        duplicate_stdout_filters=["loss", "step 3"],
        duplicate_stderr_filters=None,
    )
    console = console_for(flags, 3)
    shown, filters = console._shown, console._filters
    with console:
        pass
    code = "print('loss 1'); print('other'); print('step 3'); import os; os.write(2, b'err\\n')"
    with piped() as (out, err, found), Console(shown, filters, stdout=out, stderr=err) as console:
        for rank in range(3):
            assert start(console, tmp_path, rank, code).wait() == 0
    assert found[0] == b"[rank 0] loss 1\n[rank 0] other\n[rank 0] step 3\n"
    assert sorted(found[1].splitlines()) == [b"[rank 0] err", b"[rank 1] err"]
    filtered = tmp_path / "attempt_0" / "filtered_stdout.log"
    assert filtered.read_text() == "[rank 0] loss 1\n[rank 0] step 3\n"
    assert not filtered.with_name("filtered_stderr.log").exists()
    assert logged(tmp_path, 2, "stderr") == b"err\n"


def test_the_prefix_follows_torchruns_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name} ${rank} ${local_rank} ${other}>"
    )
    flags = argparse.Namespace(role="tr", redirects="0", tee="0", local_ranks_filter="")
    with console_for(flags, 1) as console:
        for descriptor in console.open(3, 0, tmp_path):
            os.close(descriptor)
        assert console._prefix.safe_substitute(rank=3, local_rank=0) == "<tr 3 0 ${other}>"
    flags.log_line_prefix_template = "${hostname}:${rank}: "  # since torch 2.14; it goes first
    with console_for(flags, 1) as console:
        assert console._prefix.safe_substitute(rank=3) == f"{socket.gethostname()}:3: "


ALL, NONE = {"stdout", "stderr"}, set[str]()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [ALL, ALL]),
        ({"redirects": "3"}, [NONE, NONE]),
        ({"redirects": "1"}, [{"stderr"}, {"stderr"}]),
        ({"redirects": "0:2,1:0"}, [{"stdout"}, ALL]),
        ({"redirects": "3", "tee": "2"}, [{"stderr"}, {"stderr"}]),
        ({"redirects": "3", "tee": "0:3"}, [ALL, NONE]),
        ({"local_ranks_filter": "0"}, [ALL, NONE]),
        ({"tee": "3", "local_ranks_filter": "1"}, [NONE, ALL]),
    ],
)
def test_torchruns_flags_choose_the_streams_that_are_shown(
    flags: dict[str, str], expected: list[set[str]]
) -> None:
    assert list(choose_streams(2, **flags).values()) == expected


@pytest.mark.parametrize("flags", [{"redirects": "4"}, {"tee": "a"}, {"local_ranks_filter": "0;1"}])
def test_flags_that_torchrun_refuses_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="|".join(flags).replace("_", "-")):
        choose_streams(2, **flags)


# --- a terminal ---------------------------------------------------------------------------------

BAR = """
    import sys
    for i in range(1, 6):
        sys.stderr.write("\\r%3d%%|%s|" % (20 * i, "#" * i))
        {between}
    sys.stderr.write("\\n")
"""


def test_the_bar_of_the_lowest_rank_stands_below_all_lines(
    tmp_path: Path, terminal: Terminal
) -> None:
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={}) as console:
        bar = BAR.format(between="input() if i == 3 else None")
        processes = [start_with_input(console, tmp_path, rank, bar) for rank in (0, 1)]
        terminal.wait_for("[rank 0]\x1b[0m  60%")
        third = start(console, tmp_path, 2, "for i in range(3): print('line', i)")
        assert third.wait() == 0
        terminal.wait_for("line 2")
        console.announce("still running")
        terminal.wait_for("running")
        now = screen(terminal.written)
        for process, pipe in processes:
            os.write(pipe, b"\n")
            assert process.wait() == 0
            os.close(pipe)
    lines = [*[f"[rank 2] line {i}" for i in range(3)], "lockstep: still running"]
    assert now == [*lines, "[rank 0]  60%|###|"]
    after = screen(terminal.end())
    assert after[:4] == lines
    assert sorted(after[4:6]) == [f"[rank {rank}] 100%|#####|" for rank in (0, 1)]
    assert after[6:] == [""]
    assert "\x1b[36m[rank 0]\x1b[0m" in terminal.written
    assert "\x1b[33m[rank 1]\x1b[0m" in terminal.written
    assert logged(tmp_path, 0, "stderr").count(b"\r") == 5


def start_with_input(
    console: Console, tmp_path: Path, rank: int, code: str, *, alone: bool = False
) -> tuple[subprocess.Popen[bytes], int]:
    """A rank that waits at `input()` until something is written to the descriptor."""
    reading, writing = os.pipe()
    kept = os.dup(0)
    os.dup2(reading, 0)
    try:
        return start(console, tmp_path, rank, code, alone=alone), writing
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reading)


ALONE = """
    import os, sys
    sys.stderr.write("\\r 50%|")
    print("\\r\\x1b[Kfrom stdout", sys.stdout.isatty(), sys.stderr.isatty())
    sys.stderr.write("\\x1b[31m\\r100%|")
    print(input("name? "), end="")
"""


def test_the_only_rank_has_the_terminal_itself(tmp_path: Path, terminal: Terminal) -> None:
    with Console(stdout=terminal.slave, stderr=terminal.slave) as console:
        process, pipe = start_with_input(console, tmp_path, 0, ALONE, alone=True)
        os.write(pipe, b"you\n")
        assert process.wait() == 0
        console.announce("the end")
    os.close(pipe)
    sent = "\r 50%|\r\x1b[Kfrom stdout True True\n\x1b[31m\r100%|name? you"
    assert terminal.end() == sent + "\nlockstep: the end\n"
    assert list((tmp_path / "attempt_0" / "rank_0").iterdir()) == []


def test_the_only_rank_has_log_files_with_tee(tmp_path: Path, terminal: Terminal) -> None:
    code = "import sys; print('\\rone'); print(sys.stdout.isatty(), end='')"
    slave = terminal.slave
    with Console(stdout=slave, stderr=slave, always_logged=True) as console:
        assert start(console, tmp_path, 0, code, alone=True).wait() == 0
        console.drain()
        console.announce("the end")
    assert terminal.end() == "\rone\nFalse\nlockstep: the end\n"
    assert logged(tmp_path, 0) == b"\rone\nFalse"


def test_output_of_the_only_rank_is_passed_on_unchanged_without_a_terminal(tmp_path: Path) -> None:
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        code = "import sys; print('a\\rb', end=''); sys.stderr.write('c')"
        assert start(console, tmp_path, 0, code, alone=True).wait() == 0
    assert found == [b"a\rb", b"c"]
    assert (logged(tmp_path, 0), logged(tmp_path, 0, "stderr")) == (b"a\rb", b"c")


def test_ranks_are_told_how_wide_the_terminal_is(terminal: Terminal) -> None:
    with piped() as (out, err, _), Console(stdout=out, stderr=err) as console:
        assert console.environment == {}
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={}) as console:
        assert console.environment == {COLUMNS: str(99 - len("[rank 0] "))}


def test_a_dumb_terminal_gets_lines_without_a_status_row(
    tmp_path: Path, terminal: Terminal
) -> None:
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={"TERM": "dumb"}) as c:
        assert start(c, tmp_path, 0, "import sys; print(sys.stdout.isatty())").wait() == 0
    assert terminal.end() == "[rank 0] False\n"


def test_the_status_row_is_cropped_to_the_terminals_width(
    tmp_path: Path, terminal: Terminal
) -> None:
    terminal.resize(30, 10)
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={"NO_COLOR": "1"}) as c:
        row = "\\r日本" + "#" * 90
        process, pipe = start_with_input(c, tmp_path, 0, f"print('{row}', end=''); input()")
        terminal.wait_for("#")
        assert screen(terminal.written) == ["[rank 0] 日本" + "#" * 16]  # two columns each
        os.write(pipe, b"\n")
        assert process.wait() == 0
    os.close(pipe)
    assert screen(terminal.end()) == ["[rank 0] 日本" + "#" * 90, ""]
    assert "\x1b" not in terminal.written.replace("\x1b[K", "")


def test_the_status_row_disappears_when_its_rank_ends(tmp_path: Path, terminal: Terminal) -> None:
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={}) as console:
        code = "import sys; sys.stdout.write('bar\\r'); input(); sys.stdout.write(' \\r')"
        process, pipe = start_with_input(console, tmp_path, 0, code)
        terminal.wait_for("bar")
        os.write(pipe, b"\n")
        assert process.wait() == 0
        console.drain()
        assert terminal.wait_until(lambda rows: rows == [""])
    os.close(pipe)


# --- the last lines -----------------------------------------------------------------------------


def test_the_last_lines_of_a_log_are_those_that_a_terminal_would_show(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % i for i in range(20000))
    (tmp_path / "stderr.log").write_bytes(text + b"\r10%\r20%\n\x1b[31mlast\x1b[0m\n\n")
    assert read_last_lines(tmp_path, 3) == ["line 19999", "20%", "last"]
    assert len(read_last_lines(tmp_path, 100)) == 100
    assert read_last_lines(tmp_path, 3, "stdout") == []

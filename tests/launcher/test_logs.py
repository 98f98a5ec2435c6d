"""The ranks' streams: one file each, whole lines on the console, bars that survive."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import HANG_S

from lockstep.errors import SettingError
from lockstep.launcher.output import Console, choose_streams, console_for, tail
from lockstep.launcher.screen import Lines, Screen, Sheet, Source, render

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
        elif token == "\x1b[J":
            rows[y] = rows[y][:x]
            del rows[y + 1 :]
        elif up := re.fullmatch(r"\x1b\[(\d+)A", token):
            assert int(up[1]) <= y
            y -= int(up[1])
        elif right := re.fullmatch(r"\x1b\[(\d+)C", token):
            x += int(right[1])
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
    streams = console.open(rank, rank, folder, alone=alone)
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


# --- one stream --------------------------------------------------------------------------------

TQDM = b"\r 10%|#   |\r 20%|##  |"


@pytest.mark.parametrize(
    ("pieces", "lines", "rows"),
    [
        ([b"a\nb\n"], ["a", "b"], []),
        ([b"a", b"b\n"], ["ab"], []),
        ([b"prompt> "], [], ["prompt>"]),
        ([b"a\r\nb\r\n"], ["a", "b"], []),
        ([b"\n\n"], ["", ""], []),
        ([TQDM], [], [" 20%|##  |"]),
        ([TQDM, b"\r 30%\x1b[K"], [], [" 30%"]),
        # tqdm.write: the line comes out with the next drawing
        ([TQDM, b"\r          \rhello\n\r 20%|##  |"], [], ["hello", " 20%|##  |"]),
        ([TQDM, b"\r          \rhello\n\r 20%|##  |", b"\r 30%|##  |"], ["hello"], [" 30%|##  |"]),
        # nested tqdm: two rows, ended above
        ([b"\router", b"\n\rinner\x1b[A"], [], ["outer", "inner"]),
        ([b"\router", b"\n\rinner\x1b[A", b"\rOUTER", b"\n\rINNER\x1b[A"], [], ["OUTER", "INNER"]),
        # rich's Live: one row that becomes two, then a line above
        ([b"\x1b[?25l\r\x1b[2Kone", b"\r\x1b[2Kone\ntwo"], [], ["one", "two"]),
        (
            [
                b"\x1b[?25l\r\x1b[2Kone\ntwo",
                b"\r\x1b[2K\x1b[1A\x1b[2Kline\none\ntwo",
                b"\r\x1b[2K\x1b[1A\x1b[2KONE\nTWO",
            ],
            ["line"],
            ["ONE", "TWO"],
        ),
        # ... and its end, where it leaves nothing
        ([b"\x1b[?25l\rone\ntwo", b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25h", b"end\n"], ["end"], []),
        ([TQDM, b"\r100%|####|\n"], ["100%|####|"], []),
        # going up beyond what was taken for lines
        ([b"\rbar\n", b"\r\x1b[1Anew\nbar"], ["bar"], ["new", "bar"]),
        # readline
        ([b"(Pdb) ab\bc\x1b[Kd"], [], ["(Pdb) acd"]),
        ([b"(Pdb) abc\x1b[3D\x1b[1P\x1b[1@x"], [], ["(Pdb) xbc"]),
        ([b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\\n"], ["text"], []),
        ([b"caf\xc3", b"\xa9\n"], ["caf\xe9"], []),
        ([b"\xff\n"], ["\xff"], []),
        ([b"\x1b[3", b"1mred\x1b[0m\n"], ["\x1b[31mred\x1b[0m"], []),
        ([b"a\tb"], [], ["a       b"]),
    ],
)
def test_sheet(pieces: list[bytes], lines: list[str], rows: list[str]) -> None:
    sheet = Sheet()
    found = []
    for piece in pieces:
        found += sheet.feed(piece)
        found += sheet.settle() if sheet.drawn else []
    assert [line.decode("latin1" if b"\xff" in line else "utf-8") for line in found] == lines
    assert [render(row) for row in sheet.rows if row] == rows


def test_wide_signs_are_cut_whole() -> None:
    sheet = Sheet()
    sheet.feed("ab日本".encode())
    assert [render(sheet.rows[0], columns) for columns in (3, 4, 5, 6)] == [
        "ab",
        "ab日",
        "ab日",
        "ab日本",
    ]


PIECES = [b"abc", b"\xe6\x97", b"\xa5", b"\b", b"\t", b"\r", b"\n", b"\x1b", b"[", b"]"]
PIECES += [b"2K", b"1A", b"3B", b"9C", b"H", b"J", b"31m", b"?25l"]


def seen(line: bytes) -> str:
    """Plain lines pass as they are, also with tabs and bytes that are no UTF-8."""
    return line.decode(errors="replace").expandtabs().rstrip()


@settings(deadline=None, max_examples=300)
@example([b"abc", b"\x1b", b"\n", b"\x1b", b"[", b"H", b"abc"])
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_no_sequence_breaks_a_sheet(pieces: list[bytes]) -> None:
    together, apart = Sheet(), Sheet()
    whole = [*together.feed(b"".join(pieces)), *together.close()]
    parts = [line for piece in pieces for line in apart.feed(piece)] + apart.close()
    assert list(filter(None, map(seen, whole))) == list(filter(None, map(seen, parts)))
    settled = Screen(20, 5)
    source = Source(0, "[rank 0] ")
    for number, piece in enumerate(pieces):
        settled.feed(source, piece, float(number))
        settled.tick(number + 0.5)
    settled.close(source)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from([b"x", b"yy\n", b"\n", b"z\r", b"\r\n", b"w"])
        ),
        max_size=30,
    )
)
def test_lines_are_whole_and_none_is_lost(pieces: list[tuple[int, bytes]]) -> None:
    sources = [Source(rank, f"[rank {rank}] ") for rank in range(3)]
    lines = Lines()
    out = b"".join(lines.feed(sources[rank], piece, 0.0) for rank, piece in pieces)
    out += b"".join(lines.close(source) for source in sources)
    assert out == b"" or out.endswith(b"\n")
    for rank in range(3):
        sent = b"".join(piece for number, piece in pieces if number == rank)
        mark = f"[rank {rank}] ".encode()
        # Each line of the console is of one rank alone, so nothing was cut by another.
        own = [line for line in out.split(b"\n") if mark in line]
        assert all(line.count(b"[rank") == line.count(mark) for line in own)
        got = b"".join(own).replace(mark, b"").replace(b"\r", b"")
        assert got == sent.replace(b"\r", b"").replace(b"\n", b"")


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


def test_a_console_that_takes_nothing_stops_neither_ranks_nor_the_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    code = "import os; [os.write(1, b'x' * 99 + b'\\n') for i in range(20000)]"
    with Console(stdout=writing, stderr=writing) as console:
        assert start(console, tmp_path, 0, code).wait(timeout=HANG_S) == 0
    assert len(logged(tmp_path, 0)) == 2_000_000
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        shown = file.read()
    assert shown.endswith(b"\n")
    assert set(shown.splitlines()) == {b"[rank 0] " + b"x" * 99}


def test_ranks_outlive_the_reader_of_the_console(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Console(stdout=writing, stderr=writing) as console:
        assert start(console, tmp_path, 0, "print('a'); print('b')").wait() == 0
        console.say("this cannot be shown")
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


def test_a_full_disk_is_told_in_the_launchers_own_line(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        stdin, *streams = console.open(0, 0, tmp_path)
        subprocess.run(["echo", "shown"], stdout=streams[0], stderr=streams[1], check=True)
        for stream in (stdin, *streams):
            os.close(stream)
        console.drain()
    assert found[0] == b"[rank 0] shown\n"
    assert found[1] == b"lockstep: rank 0: stdout.log ends here: No space left on device\n"


def test_streams_of_a_second_attempt(tmp_path: Path) -> None:
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        for attempt in ("first", "second"):
            assert start(console, tmp_path / attempt, 0, f"print('{attempt}')").wait() == 0
            console.drain()
            assert logged(tmp_path / attempt, 0) == f"{attempt}\n".encode()
    assert found[0] == b"[rank 0] first\n[rank 0] second\n"


def test_own_lines_end_what_stands_unfinished(tmp_path: Path) -> None:
    lines = Lines()
    one, two = Source(0, "[rank 0] "), Source(1, "[rank 1] ")
    out = lines.feed(one, b"\r10%\r20%\r", 0.0)
    out += lines.feed(two, b"hello\n", 0.0)
    out += lines.feed(one, b"30%\r40%", 0.0)
    out += lines.say("lockstep: x")
    out += lines.close(one)
    assert out == (
        b"[rank 0] 10%\r\n[rank 1] hello\n[rank 0] 20%\r[rank 0] 30%\r\nlockstep: x\n[rank 0] 40%\n"
    )


def test_the_rank_is_named_once() -> None:
    """torch's hook for uncaught exceptions puts the rank before each line as well."""
    source = Source(1, "[rank 1] ")
    trace = b"[rank1]: Traceback\n[rank1]:   File\n[rank2]: other\n"
    out = b"[rank 1] Traceback\n[rank 1]   File\n[rank 1] [rank2]: other\n"
    assert Lines().feed(source, trace, 0.0) == out
    assert Lines().feed(source, b"\r" + trace, 0.0) == out
    assert Screen(80, 24, colour=False).feed(source, trace, 0.0) == out


def test_filters_and_choice(tmp_path: Path) -> None:
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


def test_torchruns_template_for_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name} ${rank} ${local_rank} ${other}>"
    )
    flags = argparse.Namespace(role="tr", redirects="0", tee="0", local_ranks_filter="")
    with console_for(flags, 1) as console:
        for descriptor in console.open(3, 0, tmp_path):
            os.close(descriptor)
        assert console._prefix.safe_substitute(rank=3, local_rank=0) == "<tr 3 0 ${other}>"


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
def test_flags_of_torchrun(flags: dict[str, str], expected: list[set[str]]) -> None:
    assert list(choose_streams(2, **flags).values()) == expected


@pytest.mark.parametrize("flags", [{"redirects": "4"}, {"tee": "a"}, {"local_ranks_filter": "0;1"}])
def test_malformed_flags(flags: dict[str, str]) -> None:
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


def test_bars_of_two_ranks_stand_below_the_lines_of_a_third(
    tmp_path: Path, terminal: Terminal
) -> None:
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={}) as console:
        bar = BAR.format(between="input() if i == 3 else None")
        processes = [start_with_input(console, tmp_path, rank, bar) for rank in (0, 1)]
        terminal.wait_for("[rank 0]\x1b[0m  60%")
        terminal.wait_for("[rank 1]\x1b[0m  60%")
        third = start(console, tmp_path, 2, "for i in range(3): print('line', i)")
        assert third.wait() == 0
        terminal.wait_for("line 2")
        console.say("still running")
        terminal.wait_for("running")
        now = screen(terminal.written)
        for process, pipe in processes:
            os.write(pipe, b"\n")
            assert process.wait() == 0
            os.close(pipe)
    lines = [*[f"[rank 2] line {i}" for i in range(3)], "lockstep: still running"]
    assert now[:4] == lines
    assert sorted(now[4:]) == [f"[rank {rank}]  60%|###|" for rank in (0, 1)]
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


def test_a_rank_that_is_alone_has_the_terminal_to_itself(
    tmp_path: Path, terminal: Terminal
) -> None:
    code = """
        import os, sys
        sys.stderr.write("\\r 50%|")
        print("\\r\\x1b[Kfrom stdout", sys.stdout.isatty(), os.get_terminal_size(1).columns)
        sys.stderr.write("\\x1b[31m\\r100%|")
        print(input("name? "), end="")
    """
    with Console(stdout=terminal.slave, stderr=terminal.slave) as console:
        process, pipe = start_with_input(console, tmp_path, 0, code, alone=True)
        os.write(pipe, b"you\n")
        assert process.wait() == 0
        console.say("the end")
    os.close(pipe)
    sent = "\r 50%|\r\x1b[Kfrom stdout True 100\n\x1b[31m\r100%|name? you"
    assert terminal.end() == sent + "\nlockstep: the end\n"
    assert logged(tmp_path, 0, "stdout").decode() == sent
    assert logged(tmp_path, 0, "stderr").decode() == sent


def test_a_rank_alone_and_no_terminal(tmp_path: Path) -> None:
    with piped() as (out, err, found), Console(stdout=out, stderr=err) as console:
        code = "import sys; print('a\\rb', end=''); sys.stderr.write('c')"
        assert start(console, tmp_path, 0, code, alone=True).wait() == 0
    assert found == [b"a\rb", b"c"]
    assert (logged(tmp_path, 0), logged(tmp_path, 0, "stderr")) == (b"a\rb", b"c")


def test_ranks_see_a_terminal_of_the_room_they_have(tmp_path: Path, terminal: Terminal) -> None:
    code = """
        import os, sys
        print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns)
        input()
        print(os.get_terminal_size(1).columns)
    """
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={"NO_COLOR": "1"}) as c:
        process, pipe = start_with_input(c, tmp_path, 7, code)
        terminal.wait_for("[rank 7] True True 90\n")
        terminal.resize(60, 24)
        c._next_size = 0.0
        c._wake_up()
        while c._sinks["stdout"].size[0] != 60:
            c._thread.join(0.01)
        os.write(pipe, b"\n")
        assert process.wait() == 0
    os.close(pipe)
    assert screen(terminal.end())[:2] == ["[rank 7] True True 90", "[rank 7] 50"]
    assert "\x1b" not in terminal.written


def test_a_dumb_terminal_gets_lines(tmp_path: Path, terminal: Terminal) -> None:
    with Console(stdout=terminal.slave, stderr=terminal.slave, environ={"TERM": "dumb"}) as c:
        assert start(c, tmp_path, 0, "import sys; print(sys.stdout.isatty())").wait() == 0
    assert terminal.end() == "[rank 0] False\n"


def test_a_row_for_the_whole_width_goes_without_its_prefix() -> None:
    drawn = Screen(30, 10, colour=False)
    out = drawn.feed(Source(0, "[rank 0] "), b"\r" + b"#" * 29, 1.0)
    out += drawn.tick(2.0)
    assert screen(out.decode()) == ["#" * 29]


def test_more_rows_than_the_terminal_has() -> None:
    drawn = Screen(40, 5, colour=False)
    out = b""
    for rank in range(8):
        out += drawn.feed(Source(rank, f"[rank {rank}] "), b"\rbar", float(rank))
    out += drawn.tick(9.0)
    assert screen(out.decode()) == [f"[rank {rank}] bar" for rank in range(4, 8)]


def test_the_cursor_waits_behind_a_prompt() -> None:
    drawn = Screen(40, 5, colour=False)
    out = drawn.feed(Source(1, "[rank 1] "), b"\r50%", 1.0)
    out += drawn.feed(Source(0, "[rank 0] "), b"(Pdb) ", 2.0) + drawn.tick(3.0)
    assert screen(out.decode() + "n") == ["[rank 1] 50%", "[rank 0] (Pdb) n"]


# --- the last lines -----------------------------------------------------------------------------


def test_tail(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % i for i in range(20000))
    (tmp_path / "stderr.log").write_bytes(text + b"\r10%\r20%\n\x1b[31mlast\x1b[0m\n\n")
    assert tail(tmp_path, 3) == ["line 19999", "20%", "last"]
    assert len(tail(tmp_path, 100)) == 100
    assert tail(tmp_path, 3, "stdout") == []

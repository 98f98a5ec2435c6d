"""A terminal in memory: what a run writes to one, and what then stands on the screen."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator


class Terminal:
    """`written` is everything that was sent to it, once the `with` block is over."""

    written = ""

    def rows(self) -> list[str]:
        """The screen, without colours and trailing blanks."""
        return screen(self.written)


@contextlib.contextmanager
def stdout_is_a_terminal() -> Iterator[Terminal]:
    """Puts a pseudo-terminal in the place of `sys.stdout` and `sys.stderr`."""
    master, slave = pty.openpty()
    terminal, chunks = Terminal(), []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux's end of file on a pseudo-terminal
            while chunk := os.read(master, 4096):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    outer = sys.stdout, sys.stderr
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as file:
            sys.stdout = sys.stderr = file
            try:
                yield terminal
            finally:
                sys.stdout, sys.stderr = outer
    finally:
        reader.join()
        os.close(master)
        terminal.written = b"".join(chunks).decode()


def screen(written: str) -> list[str]:
    """Carries out the few control sequences that a bar needs; any other fails."""
    rows, y, x = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", written):
        if token == "\r":
            x = 0
        elif token == "\n":
            y += 1
            rows += [""] * (y == len(rows))
        elif token == "\x1b[2K":
            rows[y] = ""
        elif match := re.fullmatch(r"\x1b\[(\d+)A", token):
            y -= int(match[1])
        elif token[0] == "\x1b":
            assert token.endswith("m") or token in {"\x1b[?25l", "\x1b[?25h"}, repr(token)
        else:
            rows[y] = rows[y][:x].ljust(x) + token + rows[y][x + 1 :]
            x += 1
    return [row.rstrip() for row in rows]

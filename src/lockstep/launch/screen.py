"""What the console gets: the streams of all ranks as whole lines, and rows that still change.

Pure: bytes of a stream go in, bytes for the console come out. On a terminal the rows that still
change (progress bars, prompts) stand below all lines, one or more a rank, and are drawn anew when
something comes above them. Elsewhere there are lines alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from lockstep.launch.sheet import QUIET_S, Row, Sheet, render

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_DRAW_AFTER_S = 0.04
"""Rows that change are drawn so much later: most of them are finished by then."""
_MAX_PARTIAL = 1 << 20
_PIECE = re.compile(rb"([^\r\n]*)(\r*\n|\r+(?=[^\r\n]))")


@dataclass(frozen=True, eq=False)
class Source:
    """One stream of one rank."""

    rank: int
    prefix: str
    """Before each of its lines."""
    alone: bool = False
    """The only rank of the run: all it writes is passed on as it is."""

    @property
    def torchs_prefix(self) -> bytes:
        """Before each line of a traceback, from torch's `_distributed_excepthook`: ours says it."""
        return f"[rank{self.rank}]: ".encode()


class Composer(Protocol):
    """Arranges what several sources write to one console."""

    def feed(self, source: Source, data: bytes, now: float) -> bytes:
        """What the console gets when a source has written `data`; `now` in seconds."""
        ...

    def close(self, source: Source) -> bytes:
        """What it gets when the source has ended."""
        ...

    def say(self, text: str) -> bytes:
        """What it gets for lines of the launcher's own."""
        ...

    def tick(self, now: float) -> bytes:
        """What it gets when time has passed."""
        ...

    @property
    def restless(self) -> bool:
        """Whether `tick` is to be called soon."""
        ...


class Lines:
    """For pipes and files: whole lines, each with its prefix.

    What ends with a carriage return alone, as progress bars do, is passed on as well, but a newline
    ends it before another source writes.
    """

    restless = False

    def __init__(self) -> None:
        self._partial: dict[Source, bytes] = {}
        self._unended: Source | None = None
        """The source whose text stands on the console's last line, without a newline."""

    def feed(self, source: Source, data: bytes, now: float) -> bytes:
        """See `Composer`."""
        if source.alone:
            self._unended = None if data.endswith(b"\n") else source
            return data
        data = self._partial.pop(source, b"") + data
        prefix, out, end = source.prefix.encode(), [], 0
        if b"\r" not in data:
            end = data.rfind(b"\n") + 1
            if end:
                body = prefix + data[: end - 1].replace(b"\n", b"\n" + prefix)
                body = body.replace(prefix + source.torchs_prefix, prefix)
                out = [self._begin(source), body, b"\n"]
                self._unended = None
        else:
            for piece in _PIECE.finditer(data):
                out.append(self._piece(source, prefix, piece[1], piece[2].endswith(b"\n")))
                end = piece.end()
        rest = data[end:]
        if len(rest) > _MAX_PARTIAL:
            out.append(self._piece(source, prefix, rest, newline=True))
            rest = b""
        if rest:
            self._partial[source] = rest
        return b"".join(out)

    def _begin(self, source: Source) -> bytes:
        return b"" if self._unended in (None, source) else b"\n"

    def _piece(self, source: Source, prefix: bytes, body: bytes, newline: bool) -> bytes:
        if not body and not newline:
            return b""
        begin = self._begin(source)
        body = body.removeprefix(source.torchs_prefix)
        if not body and self._unended is source:
            prefix = b""  # the newline that ends the text before it
        self._unended = None if newline else source
        return begin + prefix + body + (b"\n" if newline else b"\r")

    def close(self, source: Source) -> bytes:
        """See `Composer`."""
        rest = self._partial.pop(source, b"").rstrip(b"\r")
        if not source.alone and (rest or self._unended is source):
            return self._piece(source, source.prefix.encode(), rest, newline=True)
        return b""

    def say(self, text: str) -> bytes:
        """See `Composer`."""
        begin = b"" if self._unended is None else b"\n"
        self._unended = None
        return begin + text.encode(errors="replace") + b"\n"

    def tick(self, now: float) -> bytes:
        """See `Composer`."""
        return b""


class Screen:
    """For a terminal.

    Args:
        columns: of the terminal.
        height: its rows.
        colour: whether each rank has one.
    """

    def __init__(self, columns: int, height: int, *, colour: bool = True) -> None:
        self.columns, self.height = columns, height
        self._colour = colour
        self._sheets: dict[Source, Sheet] = {}
        self._fed: dict[Source, float] = {}
        self._shown: list[str] = []
        """The rows that stand below the lines now."""
        self._column: int | None = None
        """Where the cursor stands, if not at their end."""
        self._stale_since: float | None = None
        """Since when the rows differ from those shown, if they may."""
        self._plain = Lines()

    @property
    def restless(self) -> bool:
        """See `Composer`."""
        return self._stale_since is not None or any(source in self._fed for source in self._sheets)

    def feed(self, source: Source, data: bytes, now: float) -> bytes:
        """See `Composer`."""
        if source.alone:
            return self._plain.feed(source, data, now)
        sheet = self._sheets.setdefault(source, Sheet())
        before = sheet.blank
        lines = sheet.feed(data)
        if sheet.drawn:
            self._fed[source] = now
        if self._stale_since is None and not (before and sheet.blank):
            self._stale_since = now
        if not lines:
            return self._draw_when_due(now)
        return self._draw(self._marked(source, lines))

    def close(self, source: Source) -> bytes:
        """See `Composer`."""
        sheet = self._sheets.pop(source, None)
        self._fed.pop(source, None)
        return self._draw(self._marked(source, sheet.close() if sheet else []))

    def say(self, text: str) -> bytes:
        """See `Composer`."""
        if not self._shown:
            return self._plain.say(text)
        lines = text.encode(errors="replace").split(b"\n")
        return self._draw(lines)

    def tick(self, now: float) -> bytes:
        """See `Composer`."""
        lines: list[bytes] = []
        for source, fed in list(self._fed.items()):
            if now - fed >= QUIET_S:
                del self._fed[source]
                lines += self._marked(source, self._sheets[source].settle())
        return self._draw(lines) if lines else self._draw_when_due(now)

    def resize(self, columns: int, height: int) -> None:
        """Takes the terminal's new size."""
        self.columns, self.height = columns, height
        self._stale_since = 0.0

    def _marked(self, source: Source, lines: list[bytes]) -> list[bytes]:
        mark, unwanted = self._mark(source), source.torchs_prefix
        return [mark + line.removeprefix(unwanted) for line in lines]

    def _mark(self, source: Source) -> bytes:
        name = source.prefix.rstrip()
        if not self._colour or not name:
            return source.prefix.encode()
        colour = _COLOURS[source.rank % len(_COLOURS)]
        return f"\x1b[{colour}m{name}\x1b[0m{source.prefix[len(name) :]}".encode()

    def _draw_when_due(self, now: float) -> bytes:
        if self._stale_since is not None and now - self._stale_since >= _DRAW_AFTER_S:
            return self._draw([])
        return b""

    def _draw(self, lines: list[bytes]) -> bytes:
        """Puts the lines above the rows that still change; in one piece, without flicker."""
        rows, column = self._rows()
        self._stale_since = None
        if not lines and rows == self._shown and column == self._column:
            return b""
        out = []
        if self._shown:
            up = f"\x1b[{len(self._shown) - 1}A" if len(self._shown) > 1 else ""
            out.append(f"\r{up}\x1b[J".encode())
        out += [line + b"\n" for line in lines]
        out.append("\n".join(rows).encode())
        if column is not None:
            out.append(f"\r\x1b[{column}C".encode())
        self._shown, self._column = rows, column
        return b"".join(out)

    def _rows(self) -> tuple[list[str], int | None]:
        """The rows that still change, prompts last, and the column for the cursor if one waits."""
        open_ = [(source, sheet) for source, sheet in self._sheets.items() if any(sheet.rows)]
        open_.sort(key=lambda pair: (not pair[1].drawn, pair[0].rank))
        rows: list[str] = []
        column = None
        for source, sheet in open_:
            width = self.columns - len(source.prefix) - 1
            rows += [self._row(source, row, width) for row in _without_blank_end(sheet.rows)]
            at_end = not sheet.drawn and sheet.y == len(sheet.rows) - 1
            column = len(source.prefix) + min(sheet.x, width) if at_end else None
        return rows[-max(1, self.height - 1) :], column

    def _row(self, source: Source, row: Row, width: int) -> str:
        if len(row) > width:  # drawn for the whole width: rich asks the standard input for it
            return render(row, self.columns - 1)
        return self._mark(source).decode() + render(row)


def _without_blank_end(rows: list[Row]) -> list[Row]:
    end = len(rows)
    while end and not any(cell.sign.strip() for cell in rows[end - 1]):
        end -= 1
    return rows[:end]

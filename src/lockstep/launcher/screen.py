"""What the console gets: the streams of all ranks as whole lines, and rows that still change.

Pure: bytes of a stream go in, bytes for the console come out. On a terminal the rows that still
change (progress bars, prompts) stand below all lines, one or more a rank, and are drawn anew when
something comes above them. Elsewhere there are lines alone.

The unfinished rows of one stream, as a terminal would show them.

A rank's progress bar moves the cursor about: to the line's begin (tqdm), up (rich's Live). Passed
on as it is, it would overwrite what other ranks have written meanwhile. So its control sequences
are carried out here, in memory; what comes out are whole lines, and the rows that still change.
Sequences: ECMA-48, and "Xterm Control Sequences" for those that begin with `?`.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


QUIET_S = 0.05
"""A drawing is taken as complete when nothing more has come for so long."""
_MAX_ROWS = 40
_MAX_COLUMNS = 1 << 16
_MAX_RAW = 4096

# What lines may not hold to be passed on as they are: control characters, sequences that are no
# colours, and a colour that goes on in the next line.
_ODD = re.compile(
    rb"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[0-9;]*m)"
    rb"|\x1b\[[0-9;]*[1-9][0-9;]*m[^\x1b\n]*(?:\n|\Z)"
)
_TOKEN = re.compile(
    r"\x1b\[([0-9;:]*)([A-Za-z@`])"  # a control sequence
    r"|\x1b\[[<-?][0-9;]*[ -/]*([@-~])"  # a private one: modes, the cursor's visibility
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # a string: titles, links
    r"|\x1b\[[0-9;:]*[ -/]*[@-~]|\x1b[ -/]*[0-Z\\`-~]|[\x00-\x1f\x7f]"
    r"|[^\x00-\x1f\x7f\x1b]+"
)
_NEWLINE = re.compile(r"\r+\n")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]{0,500}\x1b?|[ -/]*)?\Z")


class Cell(NamedTuple):
    """One column: empty after a sign that is two columns wide."""

    style: str
    sign: str


_BLANK = Cell("", " ")
Row = list[Cell]


class Sheet:
    """Takes a stream and gives its finished lines; `rows` are those that may still change.

    Args:
        colour: whether colours are kept.
    """

    def __init__(self, *, colour: bool = True) -> None:
        self._colour = colour
        self.rows: list[Row] = [[]]
        self.x = self.y = 0
        self.drawn = False
        """Whether the cursor has been moved other than by writing: a bar, not a plain line."""
        self._top: int | None = None
        """The topmost row that the cursor was moved to since it was last quiet: where a drawing
        that consists of several rows begins. None: it was not moved."""
        self._style = ""
        self._rest = ""
        self._start: str = ""
        """The style at the begin of the unfinished row."""
        self._raw = b""
        """What the unfinished row was made from, if it began without a style and nothing is drawn:
        with it whole lines can be passed on as they are."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def blank(self) -> bool:
        """Nothing is unfinished."""
        return not self._rest and not self.drawn and self.rows == [[]]

    def feed(self, data: bytes) -> list[bytes]:
        """Takes what the stream brings; the lines that are finished by it, without newlines."""
        lines: list[bytes] = []
        if self._raw:
            data = self._raw + data
            self.rows, self.x, self._style, self._rest = [[]], 0, "", ""
            self._decoder.reset()
        if self.blank and not self._style and not self._decoder.getstate()[0]:
            cut = data.rfind(b"\n") + 1
            if cut and self._is_plain(data[:cut]):
                lines = data[: cut - 1].split(b"\n")
                data = data[cut:]
        lines += self._carry_out(_NEWLINE.sub("\n", self._rest + self._decoder.decode(data)))
        if not self.drawn:
            self._raw = data[data.rfind(b"\n") + 1 :]
        elif len(self.rows) > _MAX_ROWS:
            lines += self._finish(min(self.y, max(self._top or 0, len(self.rows) - _MAX_ROWS)))
        if self.drawn or self._start or len(self._raw) > _MAX_RAW:
            self._raw = b""
        return lines

    def _is_plain(self, data: bytes) -> bool:
        return not _ODD.search(data) and (self._colour or b"\x1b" not in data)

    def settle(self) -> list[bytes]:
        """To be called when the stream is quiet: gives the lines above the drawing, if any."""
        if self.x == 0 and not any(map(_text, self.rows[self.y :])):
            # On a fresh row: the drawing has ended, or was erased.
            lines = self._finish(self.y)
            self.rows, self.drawn = [[]], False
        else:
            lines = self._finish(self._top or 0)
        self._top = None
        return lines

    def close(self) -> list[bytes]:
        """All that is left, at the end of the stream."""
        while len(self.rows) > 1 and not _text(self.rows[-1]):
            self.rows.pop()
        lines = self._finish(len(self.rows))
        self.rows, self.x, self.y, self.drawn = [[]], 0, 0, False
        self._rest, self._raw, self._top = "", b"", None
        return lines if any(lines) else []

    def _finish(self, count: int) -> list[bytes]:
        done, self.rows = self.rows[:count], self.rows[count:] or [[]]
        self.y = max(0, self.y - count)
        if self._top is not None:
            self._top = max(0, self._top - count)
        return [render(row).encode() for row in done]

    def _carry_out(self, text: str) -> list[bytes]:
        """Lines that end before anything is drawn, as they do where the text comes in pieces."""
        lines: list[bytes] = []
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished else ""
        for token in _TOKEN.finditer(text, 0, unfinished.start() if unfinished else len(text)):
            if token[2]:
                self._command(token[2], token[1])
            elif token[3]:
                self.drawn = True  # rich hides the cursor before it draws
            elif token[0][0] >= " " and token[0] != "\x7f":
                self._write(token[0])
            elif len(token[0]) == 1:
                self._control(token[0])
                if token[0] == "\n" and not self.drawn:
                    lines += self._finish(self.y)
        return lines

    def _control(self, sign: str) -> None:
        if sign == "\n":
            self.y, self.x = self.y + 1, 0
            self._start = self._style
            if self.y == len(self.rows):
                self.rows.append([])
        elif sign == "\r":
            self._move(self.y, 0)
        elif sign == "\b":
            self._move(self.y, self.x - 1)
        elif sign == "\t":
            self._write(" " * (8 - self.x % 8))

    def _command(self, name: str, parameters: str) -> None:
        if name == "m":
            if not self._colour:
                return
            plain = parameters.strip("0;") == ""
            fresh = plain or parameters.startswith("0;") or len(self._style) > 100
            self._style = ("" if fresh else self._style) + ("" if plain else f"\x1b[{parameters}m")
            return
        first = parameters.partition(";")[0]
        number = min(int(first), _MAX_COLUMNS) if first.isdigit() else 0
        count = max(1, number)
        moves = {
            "A": (self.y - count, self.x),
            "B": (self.y + count, self.x),
            "C": (self.y, self.x + count),
            "D": (self.y, self.x - count),
            "E": (self.y + count, 0),
            "F": (self.y - count, 0),
            "G": (self.y, count - 1),
            "H": (0, 0),
        }
        self._move(*moves.get(name, (self.y, self.x)))
        self._edit(name, number, count)

    def _move(self, y: int, x: int) -> None:
        if y < 0:  # to rows that were taken for lines
            self.rows[:0] = [[] for _ in range(min(-y, _MAX_ROWS))]
        self.y = min(max(0, y), len(self.rows) - 1)
        self.x = min(max(0, x), _MAX_COLUMNS)
        self.drawn = True
        self._top = self.y if self._top is None else min(self._top, self.y)

    def _edit(self, name: str, number: int, count: int) -> None:
        row = self.rows[self.y]
        if name == "K":
            if number == 0:
                del row[self.x :]
            else:
                row[: self.x if number == 1 else len(row)] = [_BLANK] * min(self.x, len(row))
        elif name == "J":
            if number == 0:
                del row[self.x :]
                del self.rows[self.y + 1 :]
            else:
                self.rows = [[] for _ in self.rows]
        elif name == "P":
            del row[self.x : self.x + count]
        elif name == "@":
            row[self.x : self.x] = [_BLANK] * count
        elif name == "X":
            row[self.x : self.x + count] = [_BLANK] * len(row[self.x : self.x + count])

    def _write(self, text: str) -> None:
        row = self.rows[self.y]
        if len(row) < self.x:
            row += [_BLANK] * (self.x - len(row))
        for sign in text:
            if not sign.isascii() and unicodedata.combining(sign) and 0 < self.x <= len(row):
                row[self.x - 1] = row[self.x - 1]._replace(sign=row[self.x - 1].sign + sign)
                continue
            cells = [Cell(self._style, sign)]
            if not sign.isascii() and unicodedata.east_asian_width(sign) in "WF":
                cells.append(Cell(self._style, ""))
            row[self.x : self.x + len(cells)] = cells
            self.x += len(cells)


def _text(row: Row) -> str:
    return "".join(cell.sign for cell in row).strip()


def render(row: Row, columns: int | None = None) -> str:
    """A row with its colours, cut to so many columns; unstyled blanks at its end are left out."""
    cells = row if columns is None else row[: max(0, columns)]
    if columns is not None and len(row) > len(cells) and row[len(cells)].sign == "":
        cells = cells[:-1]  # half of a wide sign
    end = len(cells)
    while end and cells[end - 1] == _BLANK:
        end -= 1
    parts, style = [], ""
    for cell in cells[:end]:
        if cell.style != style:
            parts.append("\x1b[0m" + cell.style if style else cell.style)
            style = cell.style
        parts.append(cell.sign)
    return "".join(parts) + ("\x1b[0m" if style else "")

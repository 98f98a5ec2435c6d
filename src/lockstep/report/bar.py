"""The bar on a terminal: one row for each pass that runs, the inner ones below the outer.

Drawn by whoever calls `draw`: no thread, so nothing can be left behind or fall between two
collectives. While it is shown, rich passes what the script prints through the same console, so
that the lines appear above the bar.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

from lockstep.report.console import encodable, occupy, open_console
from lockstep.report.text import Snapshot, bar_parts

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

_rows: list[Bar] = []
_live: Live | None = None


class Bar:
    """One row of the display; the first one drawn opens it and the last one closed ends it."""

    interval = 0.1
    """Seconds between two drawings, at least."""

    def __init__(self) -> None:
        self.at = Snapshot()

    def draw(self, at: Snapshot) -> None:
        """Shows the state."""
        self.at = at
        if self not in _rows:
            _rows.append(self)
        live = _live or _open()
        live.refresh()

    def close(self) -> None:
        """Takes the row away; a second call does nothing."""
        if self in _rows:
            _rows.remove(self)
            if not _rows:
                _close()
            elif _live is not None:
                _live.refresh()


def _open() -> Live:
    global _live
    from rich.live import Live

    console = open_console()
    _live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        # Where stderr goes to a file it must stay there: rich would move it to the terminal.
        redirect_stderr=sys.stderr.isatty(),
        get_renderable=_render,
    )
    _live.start()
    console.show_cursor(True)  # a run that is killed must not leave the terminal without one
    occupy(console)
    # A script that keeps the pass in a variable keeps it alive to the end, also when it raises.
    atexit.register(_close)
    return _live


def _close() -> None:
    global _live
    if _live is not None:
        live, _live = _live, None
        _rows.clear()
        atexit.unregister(_close)
        occupy(None)
        live.stop()


def _render() -> Group:
    from rich.console import Group

    console = open_console()
    return Group(*(_row(bar.at, console) for bar in _rows))


def _row(at: Snapshot, console: Console) -> Text:
    from rich.text import Text

    # One column is left free: some terminals wrap when the last one is written.
    description, part, width, after = bar_parts(at, console.width - 1)
    # Two signs, not one in two colours, so that it can be read without colour.
    full, rest = "━─" if console.encoding.startswith("utf") else "#-"
    row = Text(no_wrap=True, overflow="crop", end="")
    if description:
        row.append(encodable(f"{description}  ", console.encoding), "bold")
    if part is not None and width:
        done = int(part * width)
        row.append(full * done, "cyan").append(rest * (width - done), "dim").append("  ")
    return row.append(encodable(after, console.encoding))

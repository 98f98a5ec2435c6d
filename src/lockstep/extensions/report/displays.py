"""What rank 0 shows of the passes that are running: bars on a terminal, lines elsewhere.

There are three *displays*: `Bar` on a terminal, `LauncherBar` if `lockstep run` prints this
process's output on its terminal, and `Display`, which prints a line now and then, anywhere else.

A terminal has one bar for each running pass, inner passes below outer ones. They are drawn by the
training loop's own thread, so no thread is left behind, and nothing is printed between two
collectives. While bars are shown, `rich` passes what the script prints through the same console,
so that it appears above them.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.extensions.report.console import (
    encodable,
    launcher_columns,
    on_terminal,
    open_console,
    print_line,
    set_bar_console,
)
from lockstep.extensions.report.metrics import RunningMeans
from lockstep.extensions.report.pass_text import PassState, bar_layout, plain_line, summary_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text


class Display:
    """Prints a plain line about the pass now and then; for a log.

    Args:
        state: the state of the pass, which this object keeps up to date.
    """

    interval = 10.0
    """Seconds from one drawing to the next, at least."""

    def __init__(self, state: PassState) -> None:
        self.state = state
        self._begin_s = time.perf_counter()
        self._next_draw_s = self._begin_s + self.interval

    def draw(self) -> None:
        """Shows the state."""
        print_line(plain_line(self.state))

    def clear(self) -> None:
        """Removes what was drawn, if it can be removed."""

    def step(self, num_samples: int, means: Mapping[str, float]) -> None:
        """Counts a global batch that is done, and draws if it is time.

        Args:
            num_samples: the samples of the global batch, on all ranks together.
            means: the present means of what the script logged.
        """
        self.state.done += 1
        self.state.samples += num_samples
        self.state.means = means
        now = time.perf_counter()
        if now >= self._next_draw_s:
            self.state.seconds = now - self._begin_s
            self.draw()
            self._next_draw_s = time.perf_counter() + self.interval

    def close(self, final_means: RunningMeans | None) -> None:
        """Replaces what was drawn by one line that stays.

        Args:
            final_means: the means of the whole pass; None if the pass was left early, perhaps by an
                error of the GPU that has them. Then the line shows those of the last call of
                `step`.
        """
        state = self.state
        state.seconds = time.perf_counter() - self._begin_s
        if final_means is not None:
            state.samples = final_means.total_samples
            state.means = final_means.values
        self.clear()

        # If the script keeps the pass in a variable, Python closes it while it exits, after it has
        # printed the traceback of an error. Nothing should stand below that.
        if not sys.is_finalizing():
            print_line(summary_line(state, is_complete=final_means is not None))


class LauncherBar(Display):
    """A bar on the terminal of the launcher, which leaves it as an unfinished last line.

    The line ends with a carriage return, so that whatever the script prints next overwrites it.
    """

    interval = 0.1

    def draw(self) -> None:
        """Shows the state."""
        console = open_console()
        console.print(_bar_row(self.state, console), end="\r", soft_wrap=True)

    def clear(self) -> None:
        """Replaces the bar by a blank: the launcher overwrites the unfinished line with it."""
        sys.stdout.write(" \r")
        sys.stdout.flush()


class Bar(Display):
    """A bar on the terminal of this process. All bars are rows of one live display of `rich`."""

    interval = 0.1

    def draw(self) -> None:
        """Shows the state."""
        if self not in _shown_bars:
            _shown_bars.append(self)
        live = _live_display
        if live is None:
            live = _open_live_display()
        live.refresh()  # draws all bars

    def clear(self) -> None:
        """Removes the bar. Does nothing if it is not shown."""
        if self not in _shown_bars:
            return
        _shown_bars.remove(self)
        if not _shown_bars:
            _close_live_display()
        elif _live_display is not None:
            _live_display.refresh()  # draws the bars that remain


# The first bar that is drawn opens the live display, and the last one that is cleared closes it.
_shown_bars: list[Bar] = []
_live_display: Live | None = None


def open_display(state: PassState) -> Display:
    """Returns a display for a new pass, of the kind that fits this process's stdout."""
    if launcher_columns() is not None:
        return LauncherBar(state)
    if on_terminal():
        return Bar(state)
    return Display(state)


def _open_live_display() -> Live:
    """Opens the display of `rich` that draws all bars, and sets `_live_display` to it.

    From now on, `print_line` prints above the bars.
    """
    global _live_display
    from rich.console import Group
    from rich.live import Live

    console = open_console()

    def draw_bars() -> Group:
        return Group(*[_bar_row(bar.state, console) for bar in _shown_bars])

    _live_display = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        # If stderr goes to a file it must stay there: rich would move it to the terminal.
        redirect_stderr=sys.stderr.isatty(),
        get_renderable=draw_bars,
    )
    _live_display.start()
    console.show_cursor(True)  # rich hides it, and a run that is killed would leave it hidden
    set_bar_console(console)
    atexit.register(_close_live_display)  # for bars of passes that the script never finishes
    return _live_display


def _close_live_display() -> None:
    """Removes all bars from the terminal. Does nothing if no live display is open."""
    global _live_display
    if _live_display is None:
        return
    live = _live_display
    _live_display = None
    _shown_bars.clear()
    atexit.unregister(_close_live_display)
    set_bar_console(None)
    live.stop()


def _bar_row(state: PassState, console: Console) -> Text:
    """Returns the line of a pass with its bar, as wide as the console allows."""
    from rich.text import Text

    # The last column stays free: some terminals begin a new line when it is written.
    layout = bar_layout(state, console.width - 1)
    row = Text(no_wrap=True, overflow="crop", end="")
    if layout.description:
        row.append(encodable(f"{layout.description}  ", console.encoding), "bold")
    if layout.fraction is not None and layout.bar_width > 0:
        # Two characters rather than two colours, so that the bar can be read without colour.
        if console.encoding.startswith("utf"):
            done_character, rest_character = "━─"
        else:
            done_character, rest_character = "#-"
        done_width = int(layout.fraction * layout.bar_width)
        row.append(done_character * done_width, "cyan")
        row.append(rest_character * (layout.bar_width - done_width), "dim")
        row.append("  ")
    row.append(encodable(layout.text, console.encoding))
    return row

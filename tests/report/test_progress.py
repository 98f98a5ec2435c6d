from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pseudo_terminal import screen, stdout_is_a_terminal
from ranks import run_ranks

from lockstep.distributed.collectives import Collectives
from lockstep.extensions.report import displays
from lockstep.extensions.report.console import Choice, print_choices, print_line
from lockstep.extensions.report.metrics import WeightedSums
from lockstep.extensions.report.progress import progress, reduce_every
from lockstep.machine.topology import Topology
from lockstep.session.delivery import TrainingPass
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step

pytestmark = pytest.mark.launcher


class PlainLoader:
    """`steps` global batches of `count` samples, of which `local` are this rank's."""

    def __init__(self, steps: int, count: int, local: int, micro_batches: int = 1) -> None:
        self.steps = steps
        self.batch_size = count
        self.number = 0
        self.current = MicroBatch()
        self.step_of_run = Step()
        self._local = local
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[int]:
        training_pass = TrainingPass() if torch.is_grad_enabled() else None
        passes = self.step_of_run.logged_passes
        with passes.opened(self, training_pass, num_trained=self.step_of_run.number):
            for step in range(self.steps):
                for j in range(self._micro_batches):
                    self.current = MicroBatch(
                        global_samples=self.batch_size,
                        local_rows=self._local,
                        first=j == 0,
                        last=j == self._micro_batches - 1,
                    )
                    yield step


class PlainWorld:
    def __init__(self, topology: Topology | None = None) -> None:
        self.collectives = Collectives(topology or Topology(), torch.device("cpu"))
        self.step = Step()

    @property
    def sums(self) -> list[WeightedSums]:
        """What was logged in the passes that go on."""
        return [open_pass.sums for open_pass in self.step.logged_passes.open]

    def progress(
        self, loader: PlainLoader, description: str = "", *, done: int = 0
    ) -> Generator[Any, None, None]:
        loader.step_of_run = self.step
        return progress(loader, self.collectives, self.step, description, done=done)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    yield
    assert displays._live_display is None, "a bar was left open"


@pytest.fixture
def draw_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays.Bar, "interval", 0.0)
    monkeypatch.setattr(displays.Display, "interval", 0.0)


def untimed(text: str) -> str:
    text = re.sub(r"\d[\d.]*( \d{3})* samples/s", "R samples/s", text)
    text = re.sub(r"\d+\.\d s$", "T s", text, flags=re.MULTILINE)
    return re.sub(r"\d+:\d\d left", "T left", text)


def test_pipe_gets_one_line_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    world = PlainWorld()
    for epoch in range(2):
        items = []
        for item in world.progress(PlainLoader(3, 8, 8), f"epoch {epoch}"):
            world.sums[-1].add(8, loss=torch.tensor(float(item)), acc=0.5)
            items.append(item)
        assert items == [0, 1, 2]
    assert untimed(capsys.readouterr().out) == (
        "epoch 0  loss 1.000  acc 0.5000  R samples/s  T s\n"
        "epoch 1  loss 1.000  acc 0.5000  R samples/s  T s\n"
    )


@pytest.mark.usefixtures("draw_always")
def test_pipe_gets_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    world = PlainWorld()
    for item in world.progress(PlainLoader(2, 8, 4, micro_batches=2), "epoch 0", done=0):
        world.sums[-1].add(4, loss=item)
    assert untimed(capsys.readouterr().out).splitlines() == [
        "epoch 0  1/2  loss 0.000  R samples/s  T left",
        "epoch 0  2/2  loss 0.5000  R samples/s",
        "epoch 0  loss 0.5000  R samples/s  T s",
    ]


@pytest.mark.usefixtures("draw_always")
def test_resumed_epoch_counts_from_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    class Rest(PlainLoader):
        def __iter__(self) -> Iterator[int]:
            return iter([item for item in super().__iter__() if item >= 2])

    list(PlainWorld().progress(Rest(3, 8, 8), "epoch 0", done=2))
    assert capsys.readouterr().out.startswith("epoch 0  3/3  ")


@pytest.mark.usefixtures("draw_always")
def test_bar_on_a_terminal_and_what_is_left_of_it() -> None:
    world = PlainWorld()
    threads = threading.active_count()
    with stdout_is_a_terminal() as terminal:
        plain = sys.stdout
        for item in world.progress(PlainLoader(4, 8, 8), "epoch 3"):
            world.sums[-1].add(8, loss=float(item))
            if item == 1:
                assert threading.active_count() == threads + 1  # the terminal's own reader
                sys.stdout.write("from the script [red]\n")
                print_line("from lockstep · [red]")
                print_choices("chosen", [Choice("batch", "8", "in the middle of a bar")])
        assert sys.stdout is plain
    # Shown again at once: a run that is killed leaves a terminal with a cursor.
    assert "\x1b[?25l\x1b[?25h" in terminal.written
    bars = re.findall("[━─]{8,} ", re.sub(r"\x1b\[\d+m", "", terminal.written))
    assert [set(b.strip()) for b in (bars[0], bars[-1])] == [{"━", "─"}, {"━"}]
    assert "2/4  loss 0.5000" in terminal.written
    assert [untimed(row) for row in terminal.rows()] == [
        "from the script [red]",
        "from lockstep · [red]",
        "chosen",
        "  batch       8  in the middle of a bar",
        "epoch 3  loss 1.500  R samples/s  T s",
        "",
    ]
    assert terminal.written.rfind("\x1b[?25h") > terminal.written.rfind("\x1b[?25l")


@pytest.mark.usefixtures("draw_always")
def test_bar_is_readable_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with stdout_is_a_terminal() as terminal:
        list(PlainWorld().progress(PlainLoader(4, 8, 8), "epoch 3"))
    assert "\x1b[3" not in terminal.written
    assert re.search("━+─+", re.sub(r"\x1b\[\d+m", "", terminal.written))


@pytest.mark.usefixtures("draw_always")
def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with stdout_is_a_terminal() as terminal:
        list(PlainWorld().progress(PlainLoader(1, 8, 8), "epoch 3"))
    assert "\x1b" not in terminal.written
    assert terminal.rows()[0].startswith("epoch 3  1/1  ")


@pytest.mark.usefixtures("draw_always")
def test_rows_stay_on_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    world = PlainWorld()
    with stdout_is_a_terminal() as terminal:
        for _ in world.progress(PlainLoader(4, 8, 8), "epoch 3"):
            world.sums[-1].add(8, loss=1.0, accuracy=0.5)
    rows = re.sub(r"\x1b\[[\d?]*[a-zA-Z]", "", terminal.written).replace("\n", "\r").split("\r")
    drawn = [row for row in rows if "/4" in row]
    assert drawn
    assert all(len(row) < 30 for row in drawn)


def test_a_launcher_with_a_terminal_gets_a_line_that_is_drawn_again() -> None:
    script = """
import sys
sys.path[:0] = sys.argv[1:]
from test_progress import PlainLoader, PlainWorld, displays
displays.LauncherBar.interval = 0.0
for item in PlainWorld().progress(PlainLoader(2, 8, 8), "epoch 3"):
    print("item", item)
"""
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(here), str(here.parent)]
    environ = {**os.environ, "LOCKSTEP_TERMINAL_COLUMNS": "70", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, check=True)
    first, second, summary, end = re.sub(r"\x1b\[\d+m", "", done.stdout.decode()).split("\n")
    assert (first, end) == ("item 0", "")
    bar, text = second.split("\r")
    assert re.fullmatch("epoch 3  ━+─+  1/2  .* left", bar)
    assert len(bar) <= 70
    assert text == "item 1"
    bar, blank, summary = summary.split("\r")
    assert re.fullmatch("epoch 3  ━+  2/2  .*", bar)
    assert blank == " "
    assert untimed(summary) == "epoch 3  R samples/s  T s"


@pytest.mark.usefixtures("draw_always")
def test_pass_inside_a_pass_has_its_own_row_and_means() -> None:
    world = PlainWorld()
    with stdout_is_a_terminal() as terminal:
        for _ in world.progress(PlainLoader(2, 8, 8), "epoch 3"):
            outer = world.sums[-1]
            with torch.no_grad():
                for _ in world.progress(PlainLoader(3, 4, 4), "test"):
                    world.sums[-1].add(4, correct=1.0)
            assert world.sums[-1] is outer
            world.sums[-1].add(8, loss=2.0)
    assert world.sums == []
    summary = "test  correct 1.000  R samples/s  T s"
    assert [untimed(row) for row in terminal.rows()] == [
        summary,
        summary,
        "epoch 3  loss 2.000  R samples/s  T s",
        "",
    ]


def stop_by(how: str, passing: Any) -> None:
    for item in passing:
        if item == 2:
            if how == "break":
                break
            if how == "raise":
                raise KeyError(how)
            passing.close()


@pytest.mark.usefixtures("draw_always")
@pytest.mark.parametrize("how", ["break", "raise", "close"])
def test_broken_off_pass_closes_the_bar_and_says_where(how: str) -> None:
    world = PlainWorld()
    with stdout_is_a_terminal() as terminal:
        plain = sys.stdout
        with contextlib.suppress(KeyError):  # which, unlike pytest.raises, lets the frames go
            stop_by(how, world.progress(PlainLoader(5, 8, 8), "epoch 3"))
        assert sys.stdout is plain
        assert world.sums == []
    assert [untimed(row) for row in terminal.rows()] == [
        "epoch 3  stopped after 2 of 5 global batches  R samples/s  T s",
        "",
    ]


class Breaks(PlainLoader):
    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        raise OSError("the disk is gone")


def test_error_of_the_loader_passes_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        list(PlainWorld().progress(Breaks(2, 8, 8), "epoch 3"))
    assert "stopped after 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "held",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["in the for", "in a variable"],
)
def test_uncaught_exception_has_the_last_word_and_no_bar_is_left(held: bool) -> None:
    script = """
import builtins, sys
sys.path[:0] = sys.argv[1:]
from pseudo_terminal import stdout_is_a_terminal
from test_progress import PlainLoader, PlainWorld, displays
displays.Bar.interval = 0.0
def main():
    HOW PlainWorld().progress(PlainLoader(5, 8, 8), "epoch 3")):
        if item == 3:
            raise ValueError("the user's own")
main()
"""
    how = "for item in vars(builtins).setdefault('held', " if held else "for item in ("
    here = Path(__file__).parent
    master, slave = pty.openpty()
    command = [sys.executable, "-c", script.replace("HOW", how), str(here), str(here.parent)]
    with subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave) as process:
        os.close(slave)
        written = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(master, 4096):
                written += chunk
    os.close(master)
    assert process.returncode == 1
    text = written.decode()
    assert "━" in text
    rows = [row for row in screen(text) if row]
    if not held:  # unwinding closes the pass before the traceback is printed
        assert rows.pop(0).startswith("epoch 3  stopped after 3 of 5 global batches")
    assert rows[0].startswith("Traceback")
    assert rows[-1] == "ValueError: the user's own"
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


@pytest.mark.usefixtures("draw_always")
def test_empty_loader(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(PlainWorld().progress(PlainLoader(0, 8, 8), "epoch 0")) == []
    assert untimed(capsys.readouterr().out) == "epoch 0\n"


def test_how_often_means_are_reduced() -> None:
    assert [reduce_every(n) for n in (None, 0, 1, 22, 100, 1000, 10**6)] == [10, 1, 1, 1, 2, 20, 50]


def train_and_evaluate(shares: list[int]) -> str:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = PlainWorld(Topology(rank=rank, size=size, local_rank=rank, local_size=size))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for item in world.progress(PlainLoader(6, sum(shares), shares[rank]), "train"):
            share = shares[rank]
            world.sums[-1].add(share, loss=torch.tensor(item + rank if share else float("nan")))
        with torch.no_grad():  # ranks see different numbers of batches, one none
            for _ in world.progress(PlainLoader(rank, 10, 5), "test"):
                world.sums[-1].add(5, correct=torch.tensor(float(rank)))
    dist.destroy_process_group()
    return out.getvalue()


@pytest.mark.parametrize("shares", [[1, 3], [2, 0, 5]])
def test_over_ranks_the_mean_is_exact_and_rank_0_alone_prints(shares: list[int]) -> None:
    results = run_ranks(train_and_evaluate, len(shares), shares)
    mean = 2.5 + sum(rank * share for rank, share in enumerate(shares)) / sum(shares)
    assert results[1:] == [""] * (len(shares) - 1)
    rows = untimed(results[0]).splitlines()
    assert rows == [
        f"train  loss {mean:.3f}  R samples/s  T s",
        "test  R samples/s  T s",
    ]

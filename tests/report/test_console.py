from __future__ import annotations

import io
import subprocess
import sys

import pytest
from pseudo_terminal import stdout_is_a_terminal

from lockstep.extensions.report.console import Choice, choice_rows, print_choices, print_line

pytestmark = pytest.mark.launcher

TITLE = "lockstep 0.1.0 · 2 processes on 1 host"
CHOICES = [
    Choice("strategy", "ddp", "2 processes"),
    Choice("batch", "64", "global batch; 32 + 32 samples on ranks 0 and 1"),
    Choice("batchnorm", "converted to lockstep.SyncBatchNorm", "exact over the [global] batch"),
    Choice("precision", "fp32", ""),
]
BLOCK = """\
lockstep 0.1.0 · 2 processes on 1 host
  strategy    ddp   2 processes
  batch       64    global batch; 32 + 32 samples on ranks 0 and 1
  batchnorm   converted to lockstep.SyncBatchNorm  exact over the [global] batch
  precision   fp32
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_block_on_a_pipe_is_plain_and_one_line_a_choice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_choices(TITLE, CHOICES)
    assert capsys.readouterr().out == BLOCK


def test_a_pipe_needs_no_rich() -> None:
    code = (
        "import sys\n"
        "from lockstep.extensions.report.console import Choice, print_choices\n"
        "print_choices('title', [Choice('strategy', 'ddp', 'as set')])\n"
        "assert not any(name.split('.')[0] == 'rich' for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "title\n  strategy    ddp  as set\n"


def test_forced_colours_do_not_make_a_pipe_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    print_choices(TITLE, CHOICES)
    written = capsys.readouterr().out
    assert "\x1b[1mddp" in written
    assert len(written.splitlines()) == len(BLOCK.splitlines())


def test_block_on_a_terminal_wraps_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    with stdout_is_a_terminal() as terminal:
        print_choices(TITLE, CHOICES)
    assert "\x1b[1mddp" in terminal.written
    assert terminal.rows() == [
        "lockstep 0.1.0 · 2 processes on 1 host",
        "  strategy    ddp   2 processes",
        "  batch       64    global batch; 32 + 32 samples",
        "                    on ranks 0 and 1",
        "  batchnorm   converted to lockstep.SyncBatchNorm",
        "                exact over the [global] batch",
        "  precision   fp32",
        "",
    ]


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with stdout_is_a_terminal() as terminal:
        print_choices(TITLE, CHOICES)
    assert "\x1b[3" not in terminal.written
    assert "\n".join(terminal.rows()) == BLOCK


@pytest.mark.parametrize("width", [20, 30, 40, 60, 79])
def test_no_word_is_broken_at_any_width(width: int) -> None:
    rows = choice_rows(TITLE, CHOICES, width)
    words = [word for row in rows for word in "".join(row).split()]
    expected = TITLE.split()
    for choice in CHOICES:
        expected += f"{choice.name} {choice.value} {choice.reason}".split()
    assert words == expected
    longest = max(len(word) for word in words)
    assert all(len("".join(row).rstrip()) <= max(width, 16 + longest) for row in rows)


def test_block_without_choices(capsys: pytest.CaptureFixture[str]) -> None:
    print_choices("nothing chosen", [])
    assert capsys.readouterr().out == "nothing chosen\n"


def test_stream_that_cannot_print_a_dot_gets_a_question_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_choices(TITLE, CHOICES)
    print_line("97 % · done")
    assert raw.getvalue().decode() == BLOCK.replace("·", "?") + "97 % ? done\n"


def test_say_leaves_markup_tabs_and_blanks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\t[red]b[/red]  :smile: ")
    print_line()
    assert capsys.readouterr().out == "a\t[red]b[/red]  :smile: \n\n"

"""The last traceback of a log, with and without what other programs put before its lines."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from lockstep.run.watch.printed_error import printed_error

pytestmark = pytest.mark.unit

TRACEBACK = """\
Traceback (most recent call last):
  File "{script}", line 3, in <module>
    load(7)
    ~~~~^^^
  File "{script}", line 2, in load
    raise ValueError("bad sample\\nin shard 2")
ValueError: bad sample
in shard 2
"""


@pytest.fixture
def printed(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    code = 'def load(n):\n    raise ValueError("bad sample\\nin shard 2")\nload(7)\n'
    script.write_text(code)
    return TRACEBACK.format(script=script).splitlines()


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank1]: ",  # torch's hook for exceptions
        "[1,0]<stderr>:",  # mpirun --tag-output
        "1: ",  # srun --label
        "2026-11-28 05:30:1{digit} ERROR train: ",
    ],
)
def test_the_last_traceback_gives_exception_and_line(printed: list[str], prefix: str) -> None:
    lines = [prefix.format(digit=n % 10) + line for n, line in enumerate(printed)]
    found = printed_error(["step 1", *lines, "a warning at exit"])
    assert found is not None
    assert found.headline == "ValueError: bad sample"
    assert found.line == 'train.py:2: raise ValueError("bad sample\\nin shard 2")'
    assert found.message_lines[:2] == ("ValueError: bad sample", "in shard 2")


def test_the_last_of_several_tracebacks_is_read(printed: list[str]) -> None:
    again = "During handling of the above exception, another exception occurred:"
    second = ["[rank0]: " + line.replace("bad sample", "worse") for line in printed]
    found = printed_error([*printed, again, *second])
    assert found is not None
    assert found.headline == "ValueError: worse"


def test_a_syntax_error_shows_the_line_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("x = 1\n(\n")
    text = f"""\
Traceback (most recent call last):
  File "{tmp_path}/train.py", line 1, in <module>
    import config
  File "{tmp_path}/config.py", line 2
    (
    ^
SyntaxError: '(' was never closed
"""
    found = printed_error(text.splitlines())
    assert found is not None
    assert (found.headline, found.line) == ("SyntaxError: '(' was never closed", "config.py:2: (")


def fail(name: str) -> None:
    raise OSError(f"no {name}")


def group_of(*names: str) -> ExceptionGroup:
    raised = []
    for name in names:
        try:
            fail(name)
        except OSError as error:
            raised.append(error)
    return ExceptionGroup("reading", raised)


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_an_exception_group_shows_its_first_exception(prefix: str) -> None:
    try:
        raise ExceptionGroup("an epoch", [group_of("a", "b"), ValueError("late")])
    except ExceptionGroup as group:
        lines = "".join(traceback.format_exception(group)).splitlines()
    before = ["Traceback (most recent call last):", "KeyError: 1", "that was caught"]
    found = printed_error([prefix + line for line in (*before, *lines)])
    assert found is not None
    assert found.headline == "OSError: no a"
    assert found.line == "test_printed_error.py:" + str(fail.__code__.co_firstlineno + 1) + (
        ': raise OSError(f"no {name}")'
    )
    after = ["Traceback (most recent call last):", "KeyError: 2"]
    last = printed_error([prefix + line for line in (*lines, *after)])
    assert last is not None
    assert last.headline == "KeyError: 2"


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_a_group_that_was_raised_within_a_group_does_not_end_the_outer_one(prefix: str) -> None:
    try:
        try:
            raise group_of("a", "b")
        except ExceptionGroup as inner:
            try:
                fail("late")
            except OSError as late:
                raise ExceptionGroup("an epoch", [inner, late]) from None
    except ExceptionGroup as outer:
        text = "".join(traceback.format_exception(outer))
    assert "| Exception Group Traceback" in text  # the inner group has a heading of its own
    found = printed_error([prefix + line for line in text.splitlines()])
    assert found is not None
    assert found.headline == "OSError: no a"


@pytest.mark.parametrize(
    "lines", [[], ["no traceback"], ["Traceback (most recent call last):", '  File "a.py", li']]
)
def test_no_traceback_or_an_incomplete_one_reads_as_none(lines: list[str]) -> None:
    assert printed_error(lines) is None

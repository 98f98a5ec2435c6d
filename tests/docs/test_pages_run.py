"""The Python of the pages runs, and the commands on the page of checkpoints say what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from click.testing import CliRunner
from ranks import HANG_S

from lockstep.cli.main import main

pytestmark = pytest.mark.launcher

CHECKPOINTS = pages.ROOT / "docs" / "checkpoints.md"
MAY_NOT_RUN = {
    "from_tutorials.md": 22,
    "running_it.md": 1,
    "several_machines.md": 1,
    "streaming_libraries.md": 4,
    "with_other_tools.md": 4,
}
"""Blocks by page that need several machines, libraries which only `make real` or an extra installs,
or the rest of a listing (`tests/tutorials` and `tests/launcher/test_other_tools.py` run those)."""
PROGRAMS = pages.ROOT / "tests" / "real" / "programs" / "streams"


def count(page: Path, info: str) -> int:
    return sum(block.info == info for block in pages.blocks(page))


WITH_PYTHON = [page for page in pages.ENGLISH if count(page, "python")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all pages have run."""
    folder = tmp_path_factory.mktemp("pages")
    command = [sys.executable, pages.__file__, folder, *WITH_PYTHON]
    subprocess.run(command, timeout=HANG_S, check=True)
    return folder


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda p: str(p.relative_to(pages.ROOT)))
def test_its_python_runs(page: Path, ran: Path) -> None:
    said = (ran / f"{page.name}.log").read_text()
    assert said.endswith(f"{count(page, 'python')} blocks run\n"), said


def test_few_blocks_do_not_run() -> None:
    skipped = {page.name: count(page, "python no-run") for page in pages.ENGLISH}
    assert {name: number for name, number in skipped.items() if number} == MAY_NOT_RUN


def test_the_listings_with_other_libraries_are_the_programs_that_make_real_runs() -> None:
    page = pages.ROOT / "docs" / "streaming_libraries.md"
    shown = [block.text for block in pages.blocks(page) if block.info == "python no-run"]
    for name in ("webdataset", "litdata", "mosaic"):
        assert (PROGRAMS / f"{name}_data.py").read_text() in shown


def test_a_failure_in_a_page_is_a_failure_here(tmp_path: Path) -> None:
    for text in ("assert 1 == 2\n", ">>> 1 + 1\n3\n"):
        page = tmp_path / "page.md"
        page.write_text(f"# Page\n\n```python\none = 1\n```\n\n```python\n{text}```\n")
        with pytest.raises((AssertionError, SystemExit)):
            pages.run(page)


def test_the_commands_on_checkpoints_say_what_is_shown(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ran / CHECKPOINTS.name)
    shown = 0
    for block in pages.blocks(CHECKPOINTS):
        if block.info != "text" or "$ lockstep" not in block.text:
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            line, _, output = part.partition("\n")
            result = CliRunner().invoke(main, shlex.split(line)[1:])
            assert result.exception is None or isinstance(result.exception, SystemExit)
            assert alike(result.output) == alike(output), line
            shown += 1
    assert shown == 6


def alike(text: str) -> str:
    """Without what differs between machines: versions, times, sizes of files, last digits."""
    text = re.sub(r"^(  (?:torch|lockstep|time) +).*$", r"\1<x>", text, flags=re.M)
    text = re.sub(r"\d[\d.]* (?:B|kB)\b|\d+\.\d+", "<n>", text)
    text = re.sub(r"\b\d+ bytes|says \d+|\bhave \d+", "<n>", text)
    return re.sub(r" +", " ", text).strip()

"""Hangs in docs/troubleshooting.md: its scripts, marked `python fault`, say what it shows."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pages
import pytest
from launched import launch

pytestmark = pytest.mark.launcher

PAGE = pages.ROOT / "docs" / "troubleshooting.md"
WATCHDOG = pages.ROOT / "src" / "lockstep" / "run" / "watch"
COMMAND = "$ lockstep run --nproc 2 "


@pytest.mark.thorough
def test_what_is_said_is_what_the_page_shows(tmp_path: Path) -> None:
    shown = outputs()
    assert len(shown) == 5
    for name, text in scripts().items():
        (tmp_path / name).write_text(text)
    with ThreadPoolExecutor(len(shown)) as pool:  # they wait for most of the time
        said = dict(zip(shown, pool.map(lambda name: run(tmp_path, name), shown), strict=True))
    for name, text in shown.items():
        assert alike(said[name]) == alike(text), name
    [folder] = (tmp_path / "logs").glob("differ-*/attempt_0")
    made = {re.sub(r"\d+", "<r>", str(path.relative_to(folder))) for path in folder.rglob("*")}
    table = PAGE.read_text().partition("## Log files")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \|", table, re.M)
    kept = {file for row in rows for file in files(row)}
    assert made - {"rank_<r>"} <= kept
    # Where the first rank that is ended closes its connections, the other one may raise; it was
    # asked for its stacks in vain, or it crashed, in other runs; it no longer runs.
    assert kept - made <= {
        "rank_<r>/error.json",
        "rank_<r>/elastic_error.json",
        "rank_<r>/stacks.txt",
        "rank_<r>/crash.txt",
        "rank_<r>/heartbeat",
        "rank_<r>/ask",
    }


def test_the_verdicts_are_texts_of_ours() -> None:
    source = " ".join(path.read_text() for path in sorted(WATCHDOG.glob("*.py")))
    table = PAGE.read_text().partition("## The verdicts")[2].partition("\n## ")[0]
    verdicts = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(verdicts) == 14
    assert [text for text in verdicts if text not in source] == []


def scripts() -> dict[str, str]:
    """The scripts by their names, which stand in their first lines."""
    texts = [block.text for block in pages.blocks(PAGE) if block.info == "python fault"]
    return {text.splitlines()[0].removeprefix("# "): text for text in texts}


def outputs() -> dict[str, str]:
    """What the page shows below a command, by the name of the script."""
    texts = [b.text for b in pages.blocks(PAGE) if b.info == "text" and b.text.startswith(COMMAND)]
    parts = [text.removeprefix(COMMAND).partition("\n") for text in texts]
    return {name: output for name, _, output in parts}


def run(folder: Path, name: str) -> str:
    """What Lockstep says, without its first line, which the machine decides."""
    done = launch(["run", "--nproc", "2", "--log-dir", str(folder / "logs"), name], folder)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[rank ")]
    return "\n".join(lines[1:])


def alike(text: str) -> str:
    """Without what differs from run to run.

    That is host, times, shares of time, folder, the call to which a straggler came latest, and
    where lines are broken because of these.
    """
    text = re.sub(rf"\b(node1|{re.escape(socket.gethostname())})(?=[\s:])", "HOST", text)
    text = re.sub(r"\b\d+ s\b", "N s", text)
    text = re.sub(r"\b\d+%", "N%", text)
    text = re.sub(r"(comes (?:last|earlier) to) \w+ of \d+ \w+", r"\1 CALL", text)
    text = re.sub(r"(?<=traceback and logs: )\S+", "FOLDER", text)
    return " ".join(text.split())


def files(row: str) -> list[str]:
    """The paths that a cell names; the later ones are in the folder of the first."""
    first, *others = re.findall(r"`([^`]+)`", row)
    folder = first.rpartition("/")[0]
    return [first, *(f"{folder}/{name}" for name in others)]

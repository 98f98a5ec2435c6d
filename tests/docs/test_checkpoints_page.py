"""The page on checkpoints: its commands say what it shows."""

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

PAGE = pages.ROOT / "docs" / "checkpoints.md"


def test_its_commands_say_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, pages.__file__, PAGE], timeout=HANG_S, check=True)
    shown = 0
    for block in pages.blocks(PAGE):
        if block.info != "text" or "$ lockstep" not in block.text:
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            line, _, output = part.partition("\n")
            result = CliRunner().invoke(main, shlex.split(line)[1:])
            assert result.exception is None or isinstance(result.exception, SystemExit)
            assert alike(result.output) == alike(output), line
            shown += 1
    assert shown == 7


def alike(text: str) -> str:
    """Without what differs between machines: versions, times, sizes of files, last digits."""
    text = re.sub(r"^(  (?:torch|lockstep|time) +).*$", r"\1<x>", text, flags=re.M)
    text = re.sub(r"\d[\d.]* (?:B|kB)\b|\d+\.\d+", "<n>", text)
    text = re.sub(r"\b\d+ bytes|says \d+|\bhave \d+", "<n>", text)
    return re.sub(r" +", " ", text).strip()

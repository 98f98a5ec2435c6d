"""Programs under torchrun, `lockstep run` and `lockstep verify`, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launched import launch
from ranks import HANG_S

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it said."""

    code: int
    printed: str
    """By the ranks, without the mark of the rank."""
    said: str
    """To standard error; under `lockstep run` its verdict is in it."""


def torchrun(*arguments: str, cwd: Path, nproc: int = 2) -> Ended:
    """The reference."""
    flags = ["--standalone", f"--nproc-per-node={nproc}"]  # else several meet at port 29500
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, *arguments],
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(cwd)},  # it leaves a folder there
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run(*arguments: str, cwd: Path) -> Ended:
    """`lockstep run ARGUMENTS`; what it leaves behind is counted after each test."""
    done = launch(["run", *arguments], cwd=cwd)
    printed = re.sub(r"^\[rank \d+\] ", "", done.stdout, flags=re.MULTILINE)
    return Ended(done.returncode, printed, done.stderr)


def verify(*arguments: str, cwd: Path) -> dict[str, Any]:
    """What `lockstep verify ARGUMENTS` writes with `--json`."""
    done = launch(["verify", "--json", "verdict.json", *arguments], cwd=cwd)
    assert (cwd / "verdict.json").is_file(), done.stdout + done.stderr
    return dict(json.loads((cwd / "verdict.json").read_text()), code=done.returncode)


def lines(text: str, *starts: str) -> list[str]:
    """Those that begin with one of these words."""
    return [line for line in text.splitlines() if line.startswith(starts)]


def told(verdict: dict[str, Any]) -> list[str]:
    """The codes of the causes in the verdict on a script that differs, the first one first."""
    assert (verdict["verdict"], verdict["code"]) == ("DIFFERENT", 1), verdict
    return [finding["code"] for finding in verdict["findings"]]

"""A script keeps the types of what it prepares and sums, as a type checker sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import HANG_S

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]


def test_types_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", Path(__file__).with_name("typed_script.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Honest programs that look like hangs, by someone who did not know the rules of the verdicts.

Each checks that its own calls, signals and threads do what they do without a supervisor.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from launched import launch

pytestmark = pytest.mark.launcher

PROGRAMS = sorted(Path(__file__).with_name("honest").glob("*.py"))


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_an_honest_run_is_neither_ended_nor_harmed(program: Path, tmp_path: Path) -> None:
    # They leave files, and put sockets there, whose names may not be long.
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TMPDIR": folder}
        done = launch(["run", "--nproc", "2", str(program)], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert "HONEST OK" in done.stdout
    assert "deadlock" not in done.stderr
    assert "FIRST FAILURE" not in done.stderr

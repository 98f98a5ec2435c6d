"""The last line of `make train` says in the user's language what to try next."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pages
import pytest

pytestmark = pytest.mark.launcher


@pytest.mark.parametrize(("language", "beginning"), [("zh", "接着可以试："), ("en", "try next: ")])
def test_the_last_line_of_make_train(language: str, beginning: str, tmp_path: Path) -> None:
    launcher = tmp_path / "lockstep"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)

    installed = tmp_path / ".installed"
    installed.touch()
    command = ["make", "-s", "-o", str(installed), "train", f"VENV={tmp_path}", f"BIN={tmp_path}"]
    environ = {**os.environ, "LOCKSTEP_LANG": language}
    done = subprocess.run(
        command, cwd=pages.ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].startswith(beginning)

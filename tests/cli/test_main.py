from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from lockstep import __version__
from lockstep.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["runn"], "Did you mean run?"),
        (["train.py"], "Did you mean lockstep run train.py?"),
        (["zzz"], "There are: run"),
    ],
)
def test_unknown_command(arguments: list[str], advice: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert advice in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--help"], "run"), (["--version"], __version__), (["run", "--help"], "--nproc")],
)
def test_help_and_version_do_not_import_torch(arguments: list[str], expected: str) -> None:
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout

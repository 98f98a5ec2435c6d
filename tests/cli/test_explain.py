from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner
from ranks import HANG_S

from lockstep.cli.main import main
from lockstep.verify.catalogue import ENTRIES

pytestmark = pytest.mark.launcher


def explain(*arguments: str, columns: int = 90) -> str:
    result = CliRunner().invoke(main, ["explain", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= max(columns, 100)
    return result.output


@pytest.mark.parametrize("columns", [60, 90, 300])
def test_an_entry_is_printed_in_full(columns):
    output = explain("LS303", columns=columns)
    assert "\n      model.head = nn.Linear(512, 10)\n" in output
    words = output.split()
    entry = ENTRIES["LS303"]
    told = f"{entry.code}: {entry.title} Why {entry.cause} What to do {entry.cure}"
    assert words == told.split()
    prose = [line for line in output.splitlines() if not line.startswith("      ")]
    assert max(map(len, prose)) <= min(columns, 100)


def test_several_are_listed_and_one_is_told():
    assert explain().count("\n  LS") == len(ENTRIES)
    listed = explain("batchnorm")
    assert "LS306" in listed
    assert "LS307" in listed
    assert listed.endswith("\nTo read one of them: lockstep explain LS306\n")
    assert explain("BatchNorm", "micro-batch").startswith("LS307:")
    assert explain("LS399").startswith("There is no LS399; the nearest is:\nLS309:")


def test_nothing_is_found():
    result = CliRunner().invoke(main, ["explain", "xyzzy"])
    assert result.exit_code == 2
    assert "Nothing in the catalogue is about 'xyzzy'" in result.output


def test_it_does_not_import_torch():
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main(['explain', 'LS101'])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("LS101: ")

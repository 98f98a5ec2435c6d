from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.run.start.unread_arguments import misplaced_launcher_options, never_reads_arguments
from lockstep.run.start.worker import Script

pytestmark = [pytest.mark.launcher, pytest.mark.unit]


@pytest.mark.parametrize(
    ("source", "certain"),
    [
        ("import torch, sys, os\nfrom torch import nn\nmodel.eval()\nsys.exit(0)", True),
        ("from beside import f\nimport pack.part\nfrom pack import other", True),
        ("import argparse", False),
        ("import sys\nprint(sys.argv)", False),
        ("from sys import argv", False),
        ("import sys\ngetattr(sys, 'argv')", False),
        ("open('/proc/self/cmdline')", False),
        ("import hydra", False),
        ("from absl import app", False),
        ("import importlib", False),
        ("exec(text)", False),
        ("from torch.distributed.run import main", False),
        ("from reading import options", False),
        ("import pack.deep", False),
        ("def", False),
    ],
)
def test_scripts_that_certainly_read_no_arguments_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, certain: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "train.py": source,
        "beside.py": "import numpy as np\ndef f(): ...",
        "reading.py": "import beside\nimport argparse",
        "pack/__init__.py": "",
        "pack/part.py": "from . import other\nfrom .other import x",
        "pack/other.py": "import torch",
        "pack/deep.py": "from .. import anything",
    }
    (tmp_path / "pack").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert never_reads_arguments(Script(path="train.py")) is certain
    assert never_reads_arguments(Script(path="train", module=True)) is certain


def test_a_script_that_is_not_there_may_read_them(tmp_path: Path) -> None:
    assert not never_reads_arguments(Script(path=str(tmp_path / "nowhere.py")))


def test_options_among_the_arguments_of_a_script() -> None:
    takes_value = {"--nproc": True, "-q": False, "--seed": True}
    words = ["--lr", "1", "--nproc", "2", "-q", "3", "--seed=4", "5", "--nproc"]
    assert misplaced_launcher_options(words, takes_value) == [
        "--nproc",
        "2",
        "-q",
        "--seed=4",
        "--nproc",
    ]

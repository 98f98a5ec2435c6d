"""What is printed of an error that nobody catches: the user's frames, and the message once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from launched import launch
from ranks import HANG_S, run_ranks

import lockstep
from lockstep.errors import RankFailedError, UsageError, format_for_user
from lockstep.wording import describe_type, with_article

pytestmark = pytest.mark.launcher

SCRIPT = """
import sys
from lockstep.settings import check_seed, resolve_settings

def configure():
    if sys.argv[1:] == ["mine"]:
        resolve_settings({"LOCKSTEP_SEED": [1]})  # a TypeError of Python's
    if sys.argv[1:] == ["hook"]:
        sys.excepthook = lambda kind, error, trace: print("my hook:", kind.__name__)
    if sys.argv[1:] == ["cause"]:
        1 / 0
    resolve_settings({"LOCKSTEP_SEED": "x"})

try:
    configure()
except ZeroDivisionError:
    check_seed(-1)
"""
MESSAGE = "SettingError: LOCKSTEP_SEED=x\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.py").write_text(SCRIPT)
    return tmp_path


def run_python(folder: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 1
    return done.stderr


def files_of_frames(text: str) -> list[str]:
    return [Path(file).name for file in re.findall(r'File "(.*?)", line', text)]


def test_python_shows_the_users_frames(folder: Path) -> None:
    shown = run_python(folder, "t.py")
    assert files_of_frames(shown) == ["t.py", "t.py"]
    assert shown.count("SettingError") == 1
    assert "  do:    correct or unset it\n" in shown
    # With LOCKSTEP_DEBUG all frames, and of other exceptions always.
    for whole in (
        run_python(folder, "t.py", LOCKSTEP_DEBUG="1"),
        run_python(folder, "t.py", "mine"),
    ):
        assert files_of_frames(whole)[:3] == ["t.py", "t.py", "settings.py"]
    # There are no frames of the user's with a file.
    code = "from lockstep.settings import check_seed; check_seed(-1)"
    assert files_of_frames(run_python(folder, "-c", code)) == ["<string>"]


def test_the_launcher_tells_an_error_once(folder: Path) -> None:
    done = launch(["run", "--nproc", "2", "--log-dir", "logs", "t.py"], folder)
    assert done.returncode == 2
    assert done.stderr.count("SettingError") == 1
    assert f"FIRST FAILURE: ranks 0-1 on host {os.uname().nodename}\n  {MESSAGE}" in done.stderr
    assert "\n    do:    correct or unset it\n  t.py:" in done.stderr
    assert "Traceback" not in done.stderr
    logs = [*folder.glob("logs/*/attempt_0/*/stderr.log")]
    assert len(logs) == 2
    for log in logs:  # for whoever looks for a fault of Lockstep's
        assert files_of_frames(log.read_text())[:3] == ["t.py", "t.py", "settings.py"]
        assert log.read_text().count(MESSAGE) == 1


@pytest.mark.thorough
def test_a_single_process_and_the_scripts_own_hook(folder: Path) -> None:
    done = launch(["run", "t.py"], folder)
    assert done.stderr.count("SettingError") == 1
    assert "Traceback" not in done.stderr
    done = launch(["run", "t.py"], folder, env={**os.environ, "LOCKSTEP_DEBUG": "1"})
    assert done.stderr.count(MESSAGE) == 2
    assert "settings.py" in done.stderr
    done = launch(["run", "t.py", "hook"], folder)
    assert done.stdout == "my hook: SettingError\n"
    assert done.stderr.count(MESSAGE) == 1
    # The exception of the user's that has led to it is in no message, so its traceback is shown.
    done = launch(["run", "t.py", "cause"], folder)
    assert "ZeroDivisionError: division by zero\n" in done.stderr
    assert files_of_frames(done.stderr) == ["t.py", "t.py", "t.py"]


def fails_in_lockstep() -> None:
    lockstep.init(device="cpu").prepare(3)


@pytest.mark.thorough
def test_launch_tells_an_error_once() -> None:
    with pytest.raises(RankFailedError) as caught:
        lockstep.launch(fails_in_lockstep, nproc=2)
    text = str(caught.value)
    assert text.count("UsageError: world.prepare of an int") == 1
    assert "do:    give a dataset to world.loader" in text
    assert "Traceback" not in text
    assert files_of_frames(caught.value.remote_traceback) == ["test_shown_errors.py"]


def test_notebooks_ask_the_error_itself() -> None:
    with lockstep.init(device="cpu") as world, pytest.raises(UsageError) as caught:
        world.prepare(3)
    shown = "\n".join(caught.value._render_traceback_())
    assert shown == format_for_user(caught.value).rstrip("\n")
    assert files_of_frames(shown) == ["test_shown_errors.py"]
    assert "world.py" in files_of_frames("".join(traceback.format_exception(caught.value)))


def names_of_the_wrapper() -> list[str]:
    with lockstep.init("ddp", device="cpu") as world:
        model = world.prepare(torch.nn.Linear(1, 1))
        texts = [repr(model).partition("(")[0]]
        for use in (lambda: model[0], lambda: len(model), lambda: model.missing):
            with pytest.raises((TypeError, AttributeError)) as caught:
                use()
            texts.append("".join(traceback.format_exception(caught.value)))
        with pytest.raises(UsageError) as prepared:
            world.prepare(model)
        texts.append(str(prepared.value))
    return texts


def test_users_read_the_name_that_torch_gives_the_wrapper() -> None:
    for name, index, length, attribute, prepared in run_ranks(names_of_the_wrapper, 2):
        assert name == "DistributedDataParallel"
        assert "'DistributedDataParallel' object is not subscriptable" in index
        assert "object of type 'DistributedDataParallel' has no len()" in length
        # As on one process, and without the error of the wrapper before it.
        assert "'Linear' object has no attribute 'missing'" in attribute
        assert "another exception" not in attribute
        assert prepared.startswith("world.prepare of a DistributedDataParallel that is prepared")


def test_articles() -> None:
    nouns = ["Linear", "Adam", "SGD", "LSTM", "UNet", "int", "UniformSampler", "DDP", "Embedding"]
    assert [with_article(noun) for noun in nouns] == [
        "a Linear",
        "an Adam",
        "an SGD",
        "an LSTM",
        "a UNet",
        "an int",
        "a UniformSampler",
        "a DDP",
        "an Embedding",
    ]
    assert (describe_type(None), describe_type(3.0)) == ("None", "a float")

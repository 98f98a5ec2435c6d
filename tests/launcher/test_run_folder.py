"""What is arranged around a run on this machine."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from lockstep.errors import SettingError
from lockstep.run import run_folder
from lockstep.run.run_folder import make_folder
from lockstep.run.watch import evidence

pytestmark = pytest.mark.launcher


def test_a_full_disk_is_noticed_when_the_folder_is_made(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # Python ignores the signal
    try:
        with pytest.raises(SettingError, match="name a folder in which you may write"):
            make_folder(str(tmp_path), "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_script_with_a_very_long_name_gets_a_folder(tmp_path: Path) -> None:
    folder = make_folder(str(tmp_path), "x" * 250)
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_every_file_of_a_rank_is_explained_there() -> None:
    names = [*evidence.FILE_NAMES, run_folder.ELASTIC_ERROR_NAME, run_folder.HANG_TEXT_NAME]
    names += [run_folder.log_path(Path(), stream).name for stream in ("stdout", "stderr")]
    explained = {line.split()[0] for line in run_folder.__doc__.splitlines() if line.strip()}
    assert set(names) <= explained


def test_the_largest_of_the_last_groups_of_a_script_is_found(tmp_path: Path) -> None:
    """Processes that were started together may open process groups of several sizes."""
    assert run_folder.latest_group_folder(tmp_path) is None
    for number, size in ((0, 16), (1, 10), (1, 2)):
        run_folder.group_folder(tmp_path, number, size).mkdir()
    assert run_folder.latest_group_folder(tmp_path) == (tmp_path / "own_000001_10", 10)

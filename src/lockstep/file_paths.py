"""Refuses paths of Windows on other systems, where they would be names of new files and folders."""

from __future__ import annotations

import os
import re

from lockstep.errors import SettingError

WINDOWS_PATH_PATTERN = re.compile(r"[A-Za-z]:[\\/].*|\\\\.*|[^/]*\\[^/]*", re.DOTALL)
r"""A path with a drive (`D:\runs`, `D:/runs`), on a server (`\\server\runs`), or with backslashes
alone (`runs\first`)."""


def check_path_of_this_system(was_set: str, path: str | os.PathLike[str]) -> None:
    r"""Checks that a path for something new is not one of Windows.

    On Linux and macOS, `D:\runs` would become a folder of this name in the current folder.

    Args:
        was_set: what the user has set, for the message: "report='D:\\runs'".
        path: the path.

    Raises:
        SettingError: it is a path of Windows, this system is another one, and there is no such file
            or folder.
    """
    text = os.fspath(path)
    is_windows = os.name == "nt"
    if is_windows or not WINDOWS_PATH_PATTERN.fullmatch(text) or os.path.exists(text):
        return
    raise SettingError(
        was_set,
        f"{text} is a path of Windows; on this system it would be the name of one folder or file",
        "write a path of this system, with / between folders, such as /data/runs or runs/first",
    )

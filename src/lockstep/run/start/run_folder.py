"""Creates the folder of a run, in which the launcher keeps the logs and evidence of the ranks."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from lockstep.errors import SettingError

_MAX_NAME_CHARACTERS = 60
_PROBE_BYTES = 1 << 18
"""About the size of the first files of a run."""


def make_folder(log_dir: str | None, name: str) -> Path:
    """Creates a new folder for a run, in `--log-dir` or in the system's temporary folder.

    Args:
        log_dir: the value of the flag; None if it is not given.
        name: the name of the script, with which the name of the folder begins.

    Raises:
        SettingError: nothing can be written there.
    """
    try:
        if log_dir:
            parent = Path(log_dir)
            mode = 0o777
        else:
            parent = Path(tempfile.gettempdir(), f"lockstep-logs-{os.getuid()}")
            mode = 0o700

        parent = parent.absolute()  # the ranks may change their working directory
        parent.mkdir(parents=True, exist_ok=True, mode=mode)

        # Another user may have made the folder of this name, and could read the logs there or
        # replace them. Then the temporary folder itself is used.
        belongs_to_another_user = parent.stat().st_uid != os.getuid()
        if not log_dir and belongs_to_another_user:
            parent = parent.parent

        stamp = time.strftime("%Y%m%d-%H%M%S")
        prefix = f"{name[:_MAX_NAME_CHARACTERS]}-{stamp}-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))

        # A full disk is noticed here, before anything is started.
        probe = folder / "room"
        probe.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink()
        return folder
    except OSError as error:
        raise SettingError(
            f"--log-dir {log_dir}" if log_dir else "the temporary folder, as there is no --log-dir",
            str(error),
            "name a folder in which you may write: --log-dir FOLDER",
        ) from None

"""Creates the folder of a run, and says which files are in it, who writes them and who reads them.

    <script>-<time>-<random>/       created by `make_folder`, in --log-dir
        attempt_<n>/                one for each start of the ranks (`start.agent`)
            rank_<r>/               one for each rank of this machine

Files of an attempt, which the launcher writes:

    hang.txt                        `watch.supervisor`; for people
    hang.json                       `watch.supervisor`; for programs
    filtered_stdout.log, ..._stderr.log
                                    `start.rank_stream`, if torchrun's flags ask for it; for people

Files of a rank. All but the logs and torch's file are its *evidence* (`watch.evidence`):

    file                  written by                            read by
    stdout.log            launcher: `start.rank_stream`         people
    stderr.log            launcher: `start.rank_stream`;        launcher: `start.process`
                          rank: `start.worker` (traceback)
    heartbeat             rank: `watch.heartbeat`               launcher: `watch.supervisor`,
                                                                `watch.take_snapshot`,
                                                                `start.process`
    ask                   launcher: `watch.take_snapshot`       rank: `watch.probe`
    flight.json           rank: `watch.probe`, when asked       launcher: `watch.take_snapshot`
    stacks.txt            rank: faulthandler, at a signal       launcher: `watch.take_snapshot`
    crash.txt             rank: faulthandler, as it dies        launcher: `watch.stack_dump`
    error.json            rank: `watch.error_record`            launcher: `start.process`,
                                                                `start.rank_watch`,
                                                                `start.spawn`
    elastic_error.json    rank: `watch.error_record`            torch elastic, for its callers
    own_<group>_<n>/rank_<i>/
                          the same for <n> processes that the script has started itself
                          (`group_folder`)

What the ranks record about the training (--report, --journal, --ledger) is in folders of its own:
see `distributed.rank_files`.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from lockstep.errors import SettingError

HANG_TEXT_NAME = "hang.txt"
HANG_JSON_NAME = "hang.json"
CRASH_NAME = "crash.txt"
ELASTIC_ERROR_NAME = "elastic_error.json"
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
        parent = _make_parent_folder(log_dir)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        prefix = f"{name[:_MAX_NAME_CHARACTERS]}-{stamp}-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))

        # A full disk is noticed here, before anything is started.
        space_probe = folder / "room"
        space_probe.write_bytes(bytes(_PROBE_BYTES))
        space_probe.unlink()
        return folder
    except OSError as error:
        raise SettingError(
            f"--log-dir {log_dir}" if log_dir else "the temporary folder, as there is no --log-dir",
            str(error),
            "name a folder in which you may write: --log-dir FOLDER",
        ) from None


def log_path(rank_folder: Path, stream: str) -> Path:
    """Returns the path of a rank's log for "stdout" or "stderr"."""
    return rank_folder / f"{stream}.log"


def group_folder(rank_folder: Path, number: int, size: int) -> Path:
    """Returns the folder for a group of processes that a script has started itself.

    For the first group, which has four processes, that is `own_000000_4`.

    Args:
        rank_folder: the folder of the rank that runs the script.
        number: how many groups the script has started before.
        size: the number of processes in the group.
    """
    return rank_folder / f"own_{number:06}_{size}"


def latest_group_folder(rank_folder: Path) -> tuple[Path, int] | None:
    """Returns the folder of the group that a script has started last, and the group's size.

    For `own_000000_4` and `own_000001_2`, that is the second folder, and 2. Processes that were
    started together may open several process groups: then it is the largest one of these.

    Returns:
        The folder and the size; None if the script has started no group.
    """
    folder_of_group: dict[tuple[int, int], Path] = {}  # by number and size
    for folder in rank_folder.glob("own_*"):
        _, number, size = folder.name.split("_")
        folder_of_group[int(number), int(size)] = folder
    if not folder_of_group:
        return None

    latest = max(folder_of_group)
    _, size_of_latest = latest
    return folder_of_group[latest], size_of_latest


def _make_parent_folder(log_dir: str | None) -> Path:
    """Makes the folder in which the folders of all runs are, if it does not exist yet."""
    # The paths are absolute, as the ranks may change their working directory.
    if log_dir:
        parent = Path(log_dir).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        return parent

    parent = Path(tempfile.gettempdir(), f"lockstep-logs-{os.getuid()}").absolute()
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    # Another user may have made a folder of this name, and could read the logs there or replace
    # them. Then the temporary folder itself is used.
    belongs_to_another_user = parent.stat().st_uid != os.getuid()
    return parent.parent if belongs_to_another_user else parent

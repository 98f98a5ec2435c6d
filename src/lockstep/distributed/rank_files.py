"""Opens a file for each rank in a folder that all ranks share, and finds the files in a folder.

The sample ledger, the journal and the record of a run (`--report`) have such files. Every *start*
of a run (the first one, and each restart) writes new ones, with names like

    01764321000000000000-3f2a81c0.rank1.journal
    START (time in ns, random)   RANK  SUFFIX

The ranks agree on the name of the start. Names sort in the order of the starts, even if the clocks
of two machines differ or a clock was set back: each time is larger than those that the folder
already has.
"""

from __future__ import annotations

import io
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import SettingError, warn

if TYPE_CHECKING:
    from lockstep.distributed.collectives import Collectives

RANK_INFIX = ".rank"


def open_rank_file(
    folder: str | Path, collectives: Collectives, rank: int | None, suffix: str, setting: str
) -> io.FileIO | None:
    """Opens a new file of this rank for the present start of the run. All ranks call this.

    Args:
        folder: the folder of the files, which is created if necessary.
        collectives: the collectives of the run, with which the ranks agree on a name of the start.
        rank: the rank in the file's name; None to open no file on this rank.
        suffix: the end of the file's name, such as ".journal".
        setting: the argument of `lockstep.init` that asked for the files, for the error.

    Returns:
        The open file, or None if `rank` is None.

    Raises:
        SettingError: some rank cannot write there; raised on all ranks.
    """
    start_name = _agree_on_start_name(Path(folder), collectives)
    file = None
    problem = ""
    if rank is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = io.FileIO(Path(folder, f"{start_name}{RANK_INFIX}{rank}{suffix}"), "x")
        except OSError as error:
            problem = f"rank {collectives.topology.rank}: {error}"

    # If one rank has failed, all ranks raise the error.
    problems = [text for text in collectives.exchange(problem) if text]
    if problems:
        if file is not None:
            file.close()
        raise cannot_write_error(setting, folder, problems[0])
    return file


def start_and_rank(file_name: str, suffix: str) -> tuple[str, int] | None:
    """Returns the name of the start and the rank of a rank's file; None for any other file.

    For `01764321000000000000-3f2a81c0.rank3.record` these are `01764321000000000000-3f2a81c0` and
    3. Other files are those of launchers, which have no ".rank", and copies: "... (copy).record".
    """
    start_name, _, rank = file_name.removesuffix(suffix).rpartition(RANK_INFIX)
    nanoseconds, _, _ = start_name.partition("-")
    is_rank_file = rank.isdecimal() and nanoseconds.isdecimal()
    return (start_name, int(rank)) if is_rank_file else None


def find_rank_files(folder: Path, suffix: str) -> dict[str, dict[int, Path]]:
    """Finds the files of all ranks in a folder.

    Returns:
        The paths, by the name of their start, and within a start by rank. The starts are in the
        order in which they took place.
    """
    paths_of_start: dict[str, dict[int, Path]] = {}

    # The name of a start begins with its time, so sorted names are in the order of the starts.
    for path in sorted(folder.glob(f"*{RANK_INFIX}*{suffix}")):
        found = start_and_rank(path.name, suffix)
        if found is not None:
            start_name, rank = found
            paths_of_start.setdefault(start_name, {})[rank] = path
    return paths_of_start


def append_or_end(
    file: io.FileIO | None, data: bytes, *, setting: str, folder: str | Path, content: str
) -> None:
    """Appends data to the file of a rank. If that fails, warns and closes the file.

    Training continues, and later calls do nothing.

    Args:
        file: the result of `open_rank_file`; it may have been closed.
        data: the data.
        setting: the argument of `lockstep.init` that asked for the files.
        folder: the value of that argument.
        content: what the file holds, for the warning: "record".
    """
    if file is None or file.closed:
        return

    problem = _try_to_write(file, data)
    if problem is None:
        return

    close_rank_file(file)
    warn(
        f"{setting}={folder!r}",
        found=f"it cannot be written any more: {problem}",
        do=f"make room; the training goes on, and its {content} ends here",
    )


def _try_to_write(file: io.FileIO, data: bytes) -> str | None:
    """Writes data to a file; returns why that is not possible, or None if all was written."""
    # Usually one system call writes all. If there is room for a part of the data only, it writes
    # that part, and the next call says what is wrong: the disk is full, for example.
    unwritten = memoryview(data)
    try:
        while unwritten:
            num_written = file.write(unwritten)
            unwritten = unwritten[num_written:]
    except OSError as error:
        return str(error)
    return None


def close_rank_file(file: io.FileIO | None) -> None:
    """Closes what `open_rank_file` returned."""
    if file is not None:
        with suppress(OSError):  # a network file system may report a full disk only now
            file.close()


def _agree_on_start_name(folder: Path, collectives: Collectives) -> str:
    """Returns a name for this start of the run, the same on all ranks: "<time in ns>-<random hex>".

    Usually the name has the time and the random text of rank 0. If some rank sees a file in the
    folder with the same or a later time, the next later time is taken, so that the names sort in
    the order of the starts.
    """
    latest_time_ns = 0
    for path in folder.glob("*-*"):
        time_in_name = path.name.partition("-")[0]
        if time_in_name.isdecimal():
            latest_time_ns = max(latest_time_ns, int(time_in_name))

    proposals = collectives.exchange((time.time_ns(), secrets.token_hex(4), latest_time_ns))
    start_time_ns, random_hex, _ = proposals[0]
    for _, _, latest_time_on_rank_ns in proposals:
        start_time_ns = max(start_time_ns, latest_time_on_rank_ns + 1)

    # With leading zeros, names that are sorted as texts are in the order of the times.
    return f"{start_time_ns:020d}-{random_hex}"


def cannot_write_error(setting: str, folder: str | Path, found: str) -> SettingError:
    """Returns the error of a folder that cannot be written to.

    Args:
        setting: the argument of `lockstep.init` that names the folder.
        folder: the folder.
        found: what the operating system says.
    """
    return SettingError(
        f"{setting}={str(folder)!r}",
        f"it cannot be written: {found}",
        f"make room or choose another folder; or leave the {setting} out",
        may_be_temporary=True,
    )

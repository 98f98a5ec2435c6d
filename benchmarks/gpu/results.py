"""The lines that a run on a GPU leaves behind: one JSON object a result, on disk as soon as known.

A line is appended with one write and flushed to disk at once, by the process that found the result.
So nothing is lost when a later stage hangs, dies or fills the disk. Every line has:

    run      when the run began, which also tells the lines of two runs apart
    stage    the part of the run, such as `nccl`
    check    what was looked at; `(stage)` for how the stage as a whole ended
    result   passed, missed (a figure is beyond its aim), failed, not run, timed out, or crashed
    seconds  how long it took
    values   what was measured, by name
    reason   why it did not pass; the end of the traceback or of the output
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.aims import missed_aims

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_FOLDER = ROOT / "benchmarks" / "results" / "gpu"
FILE_NAME = "results.jsonl"
LOG_NAME = "output.log"
RESERVE_NAME = "reserve.bin"
RESERVE_BYTES = 256 * 1024
"""Kept free for lines that are still to come when something has filled the disk."""
MAX_REASON_CHARACTERS = 6000
MAX_FILE_BYTES = 15 * 2**20
"""A machine that is lent may give back only files of up to 16 MiB."""

# What the runner tells its stages.
FOLDER_VARIABLE = "GPU_RUN_FOLDER"
RUN_VARIABLE = "GPU_RUN_ID"
DEVICE_VARIABLE = "GPU_RUN_DEVICE"
END_VARIABLE = "GPU_RUN_STAGE_ENDS_AT"

SECONDS_WITHOUT_A_RUNNER = 600.0

BEGIN_MARK = "begin: "
END_MARK = "end: "
"""Printed in front of each check's name, so that the runner knows where a stage stood."""

RESULTS = ("passed", "missed", "failed", "not run", "timed out", "crashed")


MIN_SECONDS_FOR_A_PROGRAM = 5.0
"""A program that imports torch does not get further in less time."""


class NotRun(Exception):
    """Raised by a check that cannot be made here; its text says why."""


def prepare_folder(folder: Path) -> None:
    """Makes the folder of the results, with some space kept back for the last lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESERVE_NAME).write_bytes(b"\0" * RESERVE_BYTES)


def release_reserve(folder: Path) -> None:
    """Gives back the space that was kept for the last lines."""
    (folder / RESERVE_NAME).unlink(missing_ok=True)


def write_line(folder: Path, **fields: Any) -> None:
    """Appends one result to the file of results, and flushes it to disk.

    Where the disk is full, the space that was kept back is used; where that does not help either,
    the line is printed, so that it is at least in the output.
    """
    line = without_paths(json.dumps(fields, default=str))
    data = (line + "\n").encode()
    try:
        _append(folder / FILE_NAME, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        release_reserve(folder)
        try:
            _append(folder / FILE_NAME, data)
        except OSError as second:
            print(f"could not be written ({second}): {line}", flush=True)


def write_result(
    folder: Path,
    run: str,
    stage: str,
    check: str,
    result: str,
    seconds: float,
    values: dict[str, Any],
    reason: str = "",
) -> None:
    """Writes one result, with the fields that every line has."""
    write_line(
        folder,
        run=run,
        stage=stage,
        check=check,
        result=result,
        seconds=round(seconds, 3),
        values=values,
        reason=shortened(reason),
    )


def without_paths(text: str) -> str:
    """The text without the folders of this machine, which say nothing to others."""
    for folder, name in (
        (os.environ.get("TMPDIR"), "TMPDIR"),
        (sys.prefix, "PREFIX"),  # it may lie in the repository
        (sys.base_prefix, "PREFIX"),
        (str(ROOT), "."),
    ):
        if folder and len(folder) > 1:
            text = text.replace(folder, name)
    return text


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size + len(data) > MAX_FILE_BYTES:
            raise OSError(errno.ENOSPC, f"{path.name} has {size} bytes, and may have no more")
        written = os.write(descriptor, data)
        if written < len(data):
            os.ftruncate(descriptor, size)  # half a line would spoil the file
            raise OSError(errno.ENOSPC, "only a part of the line could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All results of a file; a line that is not whole is left out."""
    found = []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


class Stage:
    """What a stage's own process uses to report its checks.

    Attributes:
        name: of the stage.
        device: `cuda` or `cpu`; on the CPU the run is only rehearsed, with Gloo in NCCL's place.
        folder: where the results are.
        scratch: a folder for what the stage writes itself; the runner deletes it afterwards.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = os.environ.get(DEVICE_VARIABLE, "cuda")
        self.folder = Path(os.environ.get(FOLDER_VARIABLE, str(DEFAULT_FOLDER)))
        self.run = os.environ.get(RUN_VARIABLE, "")
        self.scratch = Path(os.environ.get("TMPDIR", "/tmp"))
        self.on_gpu = self.device == "cuda"

    @property
    def seconds_left(self) -> float:
        """Until the runner ends this stage; without a runner there is no such limit."""
        ends_at = os.environ.get(END_VARIABLE)
        if ends_at is None:
            return SECONDS_WITHOUT_A_RUNNER
        return float(ends_at) - time.time()

    def time_limit(self, reserve: float) -> float:
        """Returns how many seconds a program may run that a check starts.

        Args:
            reserve: seconds that are left of the stage when the limit is reached.

        Raises:
            NotRun: the checks before have used up the time of the stage.
        """
        limit = self.seconds_left - reserve
        if limit < MIN_SECONDS_FOR_A_PROGRAM:
            raise NotRun("no time was left of the stage")
        return limit

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Runs one check and writes its line; an error in it ends the check, not the stage.

        On a GPU, a check whose figures miss their aims (see `aims`) is told as `missed`.

        Yields:
            A dictionary for what was measured; what it holds at the end is written.
        """
        print_lines(f"{BEGIN_MARK}{name}")
        values: dict[str, Any] = {}
        result = "passed"
        reason = ""
        began = time.monotonic()
        try:
            yield values
        except NotRun as error:
            result = "not run"
            reason = str(error)
        except Exception:
            result = "failed"
            reason = traceback.format_exc()
        else:
            missed = missed_aims(self.name, name, values) if self.on_gpu else []
            if missed:
                result = "missed"
                reason = "; ".join(missed)
        self.write(name, result, time.monotonic() - began, values, reason)

    def write(
        self, check: str, result: str, seconds: float, values: dict[str, Any], reason: str
    ) -> None:
        """Writes the line of a check."""
        write_result(self.folder, self.run, self.name, check, result, seconds, values, reason)
        print_lines(f"{END_MARK}{check}", f"    {result} {json.dumps(values, default=str)[:500]}")


def print_lines(*lines: str) -> None:
    """Prints lines in one write: checks that run side by side would mix theirs otherwise."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def shortened(text: str, limit: int = MAX_REASON_CHARACTERS) -> str:
    """The end of a text, which is where a traceback says what happened."""
    text = text.strip()
    if len(text) <= limit:
        return text
    return f"[{len(text) - limit} characters left out] {text[-limit:]}"


def source_digest() -> str:
    """A digest of all files in `src/lockstep`: it tells which source a result belongs to.

    The machine with the GPU may have the files without their git history.
    """
    digest = hashlib.sha256()
    source = ROOT / "src" / "lockstep"
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(source)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit of the checkout, `+` where files differ from it; empty where there is no git."""
    given = os.environ.get("COMMIT", "")
    if given:
        return given
    try:
        head = _git("rev-parse", "--short=10", "HEAD").strip()
        changed = _git("status", "--porcelain", "--", "src", "benchmarks/gpu", "tests").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout

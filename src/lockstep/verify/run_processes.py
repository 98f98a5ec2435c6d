"""Starts the processes of one run, with `lockstep run`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.verify.rank_files import count_steps
from lockstep.verify.run_config import RunConfig

PROGRESS_INTERVAL_S = 0.2


def _ignore_progress(num_steps: int) -> None:
    pass


def run_by_command(
    folder: Path,
    config: RunConfig,
    show_progress: Callable[[int], None] = _ignore_progress,
) -> str:
    """Runs the script with `lockstep run`, and returns its output.

    Args:
        folder: folder of the run, which contains its configuration. The ranks write their records
            into it.
        config: configuration of the run.
        show_progress: function that is called several times a second with the number of steps so
            far.
    """
    launcher = [sys.executable, "-m", "lockstep.cli.main", "run", "--nproc", str(config.nproc)]
    command = [*launcher, "-m", "lockstep.verify.rank", str(folder)]
    with subprocess.Popen(
        command,
        env=config.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output = None  # not known while the process runs
            while output is None:
                show_progress(count_steps(folder))
                with suppress(subprocess.TimeoutExpired):  # raised if the process runs on
                    output, _ = process.communicate(timeout=PROGRESS_INTERVAL_S)
        except BaseException:  # such as KeyboardInterrupt
            process.kill()
            raise

    # The first line is the launcher's own: how it starts the processes.
    _first_line, _, output_of_script = output.partition("\n")
    return output_of_script

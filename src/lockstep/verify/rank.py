"""The program that `lockstep verify` runs on every rank: it runs the script and records it.

`lockstep verify` starts it through `lockstep run`, in place of the script. Its argument is the
folder of the run, which holds the configuration (`RunConfig`) and receives the records of this
rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.distributed.seeding import seed_everything
from lockstep.run.start.worker import run_as_main
from lockstep.verify.feed import BatchReader, BatchWriter
from lockstep.verify.rank_files import UpdateWriter
from lockstep.verify.recording.bit_recorder import BitRecorder
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.patches.install import install, install_for_bits
from lockstep.verify.recording.recorder import Recorder
from lockstep.verify.run_config import RunConfig, read_run_config


def main(folder: Path, program: Callable[[], object] | None = None) -> None:
    """Runs the script and records it, until the script ends or has made enough steps.

    Args:
        folder: folder of the run.
        program: function to run in place of the script; None to run the script itself.

    Raises:
        BaseException: The error that the script raises.
    """
    config = read_run_config(folder)
    rank = int(os.environ.get("RANK", "0"))
    writer = UpdateWriter(folder, rank)

    # A script that sets no seed gets other random numbers on each rank, but the same ones in every
    # run.
    seed_everything(rank)

    determinism = Determinism(double=config.precision == "fp64")
    kept_batches = _kept_batches(config, rank)  # None without --same-samples
    recorder: Recorder | BitRecorder
    if config.compares_bits:
        recorder = BitRecorder(writer, config)
        install_for_bits(recorder, determinism, config, folder / "saved")
    else:
        mode = FunctionMode(determinism)
        recorder = Recorder(writer, config, mode)
        install(recorder, mode, config, folder / "saved", kept_batches)

    error: BaseException | None = None
    try:
        if program is None:
            run_as_main(config.script)
        else:
            program()
    except BaseException as caught:
        # The recorder itself ends the script with `SystemExit` after enough steps.
        exited_well = isinstance(caught, SystemExit) and caught.code in (None, 0)
        if not exited_well:
            error = caught
        raise
    finally:
        recorded = recorder.end(script_failed=error is not None)
        if isinstance(kept_batches, BatchWriter):
            kept_batches.write_lengths()
        writer.end(error, replace(recorded, switched_off=determinism.notes()))


def _kept_batches(config: RunConfig, rank: int) -> BatchWriter | BatchReader | None:
    """Returns the writer for the batches of this rank, or the reader for those of another run.

    They are used for `--same-samples`: the run on several processes writes its batches, and the run
    on one process reads them. Without that option, or if bits are compared, the result is None.
    """
    if config.batches_folder is None or config.compares_bits:
        return None
    if config.nproc == 1:
        return BatchReader(config.batches_folder)
    return BatchWriter(config.batches_folder, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

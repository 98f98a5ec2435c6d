"""The program that `lockstep verify` starts on every rank: it runs the script and records it.

The command starts it with `lockstep run` in the place of the script. The folder that it is given
says how to run the script (the `Way`), and gets the records of this rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.distributed.seeding import seed_everything
from lockstep.run.start.worker import run_as_main
from lockstep.verify.feed import BatchReader, BatchWriter
from lockstep.verify.record import UpdateWriter, Way, read_way
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.patches import install
from lockstep.verify.recording.recorder import Recorder


def main(folder: Path, program: Callable[[], object] | None = None) -> None:
    """Runs the script and records it, until it ends or has made the steps to be compared.

    Args:
        folder: of the run.
        program: what runs in the place of the script.

    Raises:
        BaseException: what the script raises.
    """
    way = read_way(folder)
    rank = int(os.environ.get("RANK", "0"))
    writer = UpdateWriter(folder, rank)
    # A script that seeds nothing draws other numbers in every process, but the same in every run.
    seed_everything(rank)
    determinism = Determinism(double=way.precision == "fp64")
    mode = FunctionMode(determinism)
    recorder = Recorder(writer, way, mode)
    kept_batches = _kept_batches(way, rank)
    install(recorder, mode, way, folder / "saved", kept_batches)
    error: BaseException | None = None
    try:
        if program is None:
            run_as_main(way.script)
        else:
            program()
    except BaseException as caught:
        exited_well = isinstance(caught, SystemExit) and caught.code in (None, 0)
        if not exited_well:
            error = caught
        raise
    finally:
        end = _describe_end(recorder)
        if isinstance(kept_batches, BatchWriter):
            kept_batches.write_lengths()
        writer.end(error, determinism.notes(), **end)


def _kept_batches(way: Way, rank: int) -> BatchWriter | BatchReader | None:
    """Returns what writes batches, or reads those of the run on several processes, if asked to."""
    if way.batches is None:
        return None
    if way.nproc == 1:
        return BatchReader(way.batches)
    return BatchWriter(way.batches, rank)


def _describe_end(recorder: Recorder) -> dict[str, Any]:
    """Returns what is known when the script has ended, for `UpdateWriter.end`."""
    final_parameters = recorder.final_parameters()
    state = recorder.state
    return {
        "of_lockstep": bool(state.models.prepared_ids),
        "until": state.stopped_at,
        "by_choice": recorder.by_choice,
        "started": recorder.own_process_line,
        "internal": state.internal_error,
        "kept_batches": recorder.line_of_loader_not_enlarged,
        "loaders": recorder.inputs.number_of_torch_loaders,
        "passes": recorder.backward_passes,
        "passes_without_step": recorder.backward_passes_without_step,
        "ways": list(state.branches.pop_outcomes().items()),
        "final": {name: array.tolist() for name, array in final_parameters.items()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

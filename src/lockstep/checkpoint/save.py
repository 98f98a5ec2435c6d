"""Writes one checkpoint so that it appears completely or not at all.

Each rank writes the tensors that it stores (its *part*) into a hidden folder, in a thread while
training continues, and sends rank 0 a *report* of the files that it has written. When rank 0 has
all reports, it writes the *manifest*, a JSON file that lists what belongs to the checkpoint, and
renames the folder to its final name. Older checkpoints are removed only after that.

A rank that fails, or is ended by Ctrl-C or SIGTERM, removes the hidden folder, unless its part has
been written and reported. A process that is killed by SIGKILL cannot do so: the next save removes
the folder. The last complete checkpoint can be read at any time.

Communication: each rank that writes sends one message to rank 0, through the run's store.

Torch's distributed checkpoint is not used: its `HuggingFaceStorageWriter` holds a whole file as
bytes besides the tensors, its thread needs collectives, and if a rank dies, half a folder remains
that looks like a checkpoint (read in torch 2.11 and 2.13).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.checksums import seal_manifest
from lockstep.checkpoint.file_errors import plain_errors
from lockstep.checkpoint.formats.safetensors import do_nothing, write_tensors
from lockstep.checkpoint.lock import Lock
from lockstep.checkpoint.merging import merge_entries
from lockstep.checkpoint.shards import Box
from lockstep.distributed.rendezvous import Joined
from lockstep.errors import CheckpointError

POLL_INTERVAL_S = 0.05
"""How often rank 0 looks whether the other ranks have written their parts."""
MAX_WAIT_AFTER_FAILURE_S = 5.0
"""How long rank 0 waits for the other ranks once the run has failed. It must be less than launchers
wait between asking a rank to end and killing it, which is 10 s or more."""

Report = dict[str, Any]
"""A rank's message to rank 0 about the part that it has written, as JSON. `files`: the size and
checksum of each file, by file name. `boxes` and `entries`: as in `RankPart`."""


def no_reports() -> Mapping[int, Report | None]:
    """Returns the reports of other ranks if only rank 0 writes: there are none."""
    return {}


@dataclass(frozen=True)
class RankPart:
    """The tensors that one rank stores of a checkpoint, and where they belong."""

    tensors_of_file: Mapping[str, Mapping[str, Tensor]]
    """The tensors of each safetensors file, by the file's name. `encode` returns them."""
    boxes: Mapping[str, Mapping[str, Box]] = field(default_factory=dict)
    """For each tensor that is a shard, the region of the whole tensor that it fills. By the name of
    the module (or `training`), then by the name of the tensor."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """For states that are divided over the ranks, as under a pipeline: the entries that this rank
    has and rank 0 has not, as a JSON tree (see `encoding`), by the name of the state."""

    def write(self, folder: Path, check: Callable[[], object] = do_nothing) -> Report:
        """Writes the files to an existing folder, flushes them to disk, and returns the report.

        Args:
            folder: the hidden folder of the checkpoint.
            check: called often during writing; it may raise an error to interrupt it.
        """
        written_files = {}
        for name, tensors in self.tensors_of_file.items():
            written_files[name] = write_tensors(folder / name, tensors, check)
        return {"files": written_files, "boxes": self.boxes, "entries": self.entries}


class RankReports:
    """Sends the reports of the other ranks to rank 0, through the run's store.

    Collectives cannot be used, because training continues and calls collectives of its own.

    Args:
        joined: the process group, which has the store; None if there is only one process.
        folder_name: name of the hidden folder, which no other checkpoint uses.
        ranks: the ranks that write, other than rank 0.
    """

    def __init__(self, joined: Joined | None, folder_name: str, ranks: Sequence[int]) -> None:
        self._joined = joined
        self._folder_name = folder_name
        self._ranks = ranks

    def send(self, rank: int, report: Report | None) -> None:
        """Sends a rank's report to rank 0, or None if the rank could not write its part."""
        if self._joined is not None:
            self._joined.store.set(self._key(rank), json.dumps(report))

    def wait(
        self, run_has_failed: Callable[[], bool], check: Callable[[], object] = do_nothing
    ) -> dict[int, Report | None]:
        """Waits for the reports of the other ranks, and returns them by rank.

        The report of a rank is None if the rank could not write its part. The reports are removed
        from the store.

        Args:
            run_has_failed: returns True once the run has failed, so that ranks may be missing.
            check: called often while waiting; it may raise an error to stop the wait.

        Raises:
            CheckpointError: the run has failed, and a report is still missing after a while.
        """
        has_others_to_wait_for = len(self._ranks) > 0
        if self._joined is None or not has_others_to_wait_for:
            return {}

        # As disks may be slow, the wait has no limit before the run has failed.
        store = self._joined.store
        keys = [self._key(rank) for rank in self._ranks]
        waited_after_failure_s = 0.0
        while not store.check(keys):
            check()
            time.sleep(POLL_INTERVAL_S)
            if run_has_failed():
                waited_after_failure_s += POLL_INTERVAL_S
            if waited_after_failure_s >= MAX_WAIT_AFTER_FAILURE_S:
                raise CheckpointError(
                    f"saving the checkpoint {self._folder_name}",
                    "the run has failed, and not all ranks have written their shards",
                    "resume from the checkpoint before it",
                )

        reports = {rank: json.loads(store.get(self._key(rank))) for rank in self._ranks}
        for key in keys:
            store.delete_key(key)  # otherwise they would accumulate in a long run
        return reports

    def _key(self, rank: int) -> str:
        """Returns the key of a rank's report in the store."""
        return f"lockstep/checkpoint/{self._folder_name}/{rank}"


def begin_checkpoint(
    temporary: Path,
    damaged_names: Collection[str] = (),
    lock: Lock | None = None,
    *,
    may_replace_step: bool = True,
) -> None:
    """Creates the hidden folder into which the checkpoint of one step is written. For rank 0 only.

    It also takes the lock on the run's folder, and removes what interrupted saves have left there.

    Args:
        temporary: the path of the hidden folder, from `layout.temporary_folder`. The run's folder
            around it is created if necessary.
        damaged_names: names of checkpoints that are known to be damaged. They are ignored, even if
            they are of a later step.
        lock: the lock on the run's folder; None to use no lock.
        may_replace_step: False if a checkpoint of the same step is of another training.

    Raises:
        CheckpointError: the folder is a file, is not writable, or belongs to another run. Or it has
            a checkpoint of a later step, or one of this step that must not be replaced: this run
            has not resumed from it.
    """
    folder = temporary.parent
    step = layout.step_of(temporary)
    with plain_errors("saving the checkpoint", layout.step_folder(folder, step)):
        _make_folders(folder)
        if lock is not None:
            lock.acquire()  # raises CheckpointError if the folder belongs to another run

        for existing in reversed(_undamaged(folder, damaged_names)):  # the latest first
            step_of_existing = layout.step_of(existing)
            is_of_another_training = step_of_existing == step and not may_replace_step
            if step_of_existing > step or is_of_another_training:
                raise CheckpointError(
                    f"saving the checkpoint of step {step} in {folder}",
                    f"{existing.name} is there already, from a run that this one does not continue",
                    "call checkpoint.resume() before the loop, or choose another folder",
                )

        for path in layout.leftovers(folder):
            _remove_if_possible(path)
        storage.make_folder(temporary)


def write_checkpoint(
    temporary: Path,
    part: RankPart,
    manifest: Mapping[str, Any],
    *,
    keep: int,
    best: Literal["min", "max"] | None = None,
    damaged_names: Collection[str] = (),
    wait_for_others: Callable[[], Mapping[int, Report | None]] = no_reports,
    check: Callable[[], object] = do_nothing,
) -> Path | None:
    """Writes the part of rank 0, waits for the other ranks' parts, and completes the checkpoint.

    Args:
        temporary: the hidden folder that `begin_checkpoint` has created.
        part: what rank 0 stores.
        manifest: the content of `manifest.json` except the list of files; JSON with a `step`.
        keep: number of the newest checkpoints that are kept, including this one.
        best: whether the checkpoint with the smallest or largest `metric` is kept too.
        damaged_names: names of checkpoints that are known to be damaged. They are neither counted
            nor removed.
        wait_for_others: waits for the reports of the other ranks that write, and returns them. By
            default no other rank writes.
        check: called often during writing; it may raise an error to interrupt it.

    Returns:
        The folder of the new checkpoint, which replaces an earlier one of the same step. None if
        another rank could not write its part; then that rank raises the error.

    Raises:
        CheckpointError: no space is left, or rank 0 does not see the file of another rank.
    """
    folder = temporary.parent
    final = layout.step_folder(folder, int(manifest["step"]))
    with plain_errors("saving the checkpoint", final):
        try:
            reports: dict[int, Report] = {0: part.write(temporary, check)}
            for rank, report in wait_for_others().items():
                if report is None:  # that rank could not write its part, and raises the error
                    remove_unfinished(temporary)
                    return None
                reports[rank] = report

            full_manifest = _complete_manifest(manifest, reports)
            _check_files_visible(temporary, full_manifest["files"])
            with storage.new_file(temporary / layout.MANIFEST) as file:
                storage.write(file, seal_manifest(full_manifest))
            storage.sync_path(temporary)

            check()  # a last chance to interrupt the save
            _put_in_place(temporary, final)
        except BaseException:  # also Ctrl-C, and the errors that `check` raises
            remove_unfinished(temporary)
            raise

        # The new checkpoint may have replaced a damaged one of its name.
        still_damaged = set(damaged_names) - {final.name}
        _remove_old(folder, keep, best, still_damaged)
    return final


def _complete_manifest(
    manifest: Mapping[str, Any], reports: Mapping[int, Report]
) -> dict[str, Any]:
    """Returns the manifest with the files, shards and entries of all ranks.

    Args:
        manifest: the manifest as rank 0 knew it before the parts were written. It is changed: if a
            state is divided over the ranks, the entries of the other ranks are added to it.
        reports: what each rank has written.
    """
    files: dict[str, int] = {}  # sizes by file name
    checksums: dict[str, str] = {}
    for report in reports.values():
        for file, (size, checksum) in report["files"].items():
            files[file] = size
            checksums[file] = checksum

    # Under a pipeline, for example, each rank has reported the entries of its own layers.
    for report in reports.values():
        for state_name, entries in report["entries"].items():
            _add_entries(manifest, state_name, entries)

    complete = {"format": layout.FORMAT, **manifest}
    shards = _list_shards(reports)
    if shards:
        complete["shards"] = shards
    complete["files"] = files
    complete["checksums"] = checksums
    return complete


def _list_shards(reports: Mapping[int, Report]) -> dict[str, dict[str, list[Any]]]:
    """Lists the shards of all ranks: {state: {tensor: [[rank, offsets, sizes], ...]}}.

    Offsets and sizes say which region of the whole tensor a shard fills. For a tensor of 4 rows
    over 2 ranks: `{"model": {"fc.weight": [[0, [0, 0], [2, 3]], [1, [2, 0], [2, 3]]]}}`.

    Args:
        reports: what each rank has written.
    """
    shards: dict[str, dict[str, list[Any]]] = {}
    for rank, report in reports.items():
        for state_name, boxes in report["boxes"].items():
            if not boxes:
                continue
            shards_of_tensor = shards.setdefault(state_name, {})
            for tensor_name, (offsets, sizes) in boxes.items():
                shards_of_tensor.setdefault(tensor_name, []).append([rank, offsets, sizes])
    return shards


def _add_entries(manifest: Mapping[str, Any], state_name: str, entries: Any) -> None:
    """Adds another rank's entries of a state to those of rank 0, in the manifest.

    Under a pipeline, for example, each rank has the entries of its own layers.

    Args:
        manifest: the manifest with the entries of rank 0, as trees (see `encoding`). It is changed.
        state_name: the name of a module, an optimizer or another object.
        entries: the tree of the other rank's entries. For a module it has all tensor names, with
            None for those that other ranks store: `{"0.weight": {"$tensor": ...}, "1.weight":
            None}`. For an optimizer it has the entries by the number of the parameter: `{"$dict":
            [[0, {...}]]}`. `{}` if the rank has none.
    """
    is_module = state_name in manifest["modules"]
    if is_module:
        trees = manifest["modules"]
        trees[state_name] = merge_entries(trees[state_name], entries)
    else:
        object_tree = manifest["training"][state_name]
        object_tree["state"] = merge_entries(object_tree["state"], entries)


def _check_files_visible(temporary: Path, files: Mapping[str, int]) -> None:
    """Raises CheckpointError if rank 0 does not see a file that another rank has written."""
    # For example ["model-rank-00001.safetensors is missing"].
    problems = layout.wrong_sizes(temporary, files)
    if problems:
        raise CheckpointError(
            f"saving a checkpoint in {temporary.parent}",
            f"{problems[0]}: what another rank has written there is not to be seen from rank 0",
            "use a folder that all machines share: each rank writes its part of a sharded state",
        )


def _make_folders(folder: Path) -> None:
    """Creates a folder with its missing parents, and flushes their names to disk."""
    if folder.is_dir():
        return

    _make_folders(folder.parent)
    with suppress(FileExistsError):
        storage.make_folder(folder)
    folder.stat()  # raises an error if the path is a broken symbolic link
    storage.sync_path(folder.parent)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Renames the hidden folder to its final name, and removes an older checkpoint of that name.

    A complete checkpoint of the same step is first renamed to its `.replaced` name, under which it
    can still be read, and is removed last. So a complete checkpoint exists at every moment.
    """
    replaced = final.with_name(f".{final.name}.replaced")
    if layout.is_complete(final):
        if replaced.exists():  # left by an interrupted save
            storage.remove_tree(replaced)
        storage.rename(final, replaced)
    elif final.exists():  # an incomplete checkpoint
        storage.remove_tree(final)

    try:
        storage.rename(temporary, final)
    except OSError:
        # Restore the older checkpoint: the one that was renamed above, or one that an interrupted
        # save has left under the `.replaced` name.
        if replaced.exists():
            storage.rename(replaced, final)
        raise

    storage.sync_path(final.parent)
    if replaced.exists():
        _remove_if_possible(replaced)


def _remove_old(
    folder: Path, keep: int, best: Literal["min", "max"] | None, damaged_names: Collection[str]
) -> None:
    """Removes all checkpoints except the newest ones and the one with the best metric.

    Args:
        folder: the folder of the run.
        keep: number of the newest checkpoints that are kept.
        best: whether the smallest or the largest metric is the best. None: no checkpoint is kept
            for its metric.
        damaged_names: names of checkpoints that are neither counted nor removed.
    """
    checkpoints = _undamaged(folder, damaged_names)
    to_keep = checkpoints[-keep:]
    if best is not None:
        best_checkpoint = layout.best(checkpoints, best)
        if best_checkpoint is not None:
            to_keep.append(best_checkpoint)

    for path in checkpoints:
        if path not in to_keep:
            # It is renamed first, so that it vanishes at once for all who look for checkpoints.
            hidden = layout.hide(path)
            _remove_if_possible(hidden)


def _undamaged(folder: Path, damaged_names: Collection[str]) -> list[Path]:
    """Lists the complete checkpoints of a folder, lowest step first, without the damaged ones."""
    return [path for path in layout.list_checkpoints(folder) if path.name not in damaged_names]


def remove_unfinished(temporary: Path) -> None:
    """Removes a hidden folder into which other threads or ranks may still write.

    The folder is renamed first. Of two renames of one folder only one can succeed, so this decides
    whether the checkpoint is completed or removed. It also keeps others from creating files in it.
    """
    with suppress(OSError):
        storage.remove_tree(layout.hide(temporary))


def _remove_if_possible(path: Path) -> None:
    """Removes a hidden folder. If that fails, no error is raised: the next save tries again."""
    with suppress(OSError):
        storage.remove_tree(path)

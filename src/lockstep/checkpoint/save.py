"""Writes one checkpoint so that it is there in full or not at all.

Each rank writes its own part, in a thread while the training goes on, into a hidden folder, and
flushes it to disk. When all have done so, rank 0 writes the manifest, and one rename puts the
checkpoint in place. Older checkpoints go only after that.

A rank that fails, or is ended by Ctrl-C or SIGTERM, removes the hidden folder, unless its part has
been written and reported. A process that is killed by SIGKILL cannot: the next save removes it. The
last complete checkpoint stays readable at any point.

Communication: one message of each rank that writes to rank 0, through the run's store; at the end
of the run all tell each other how it went.

Not torch's distributed checkpoint: its `HuggingFaceStorageWriter` holds a whole file as bytes
beside the tensors, its thread needs collectives, and where a rank dies half a folder stays that
looks like a checkpoint (read in torch 2.11 and 2.13).
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.checkpoint import layout, storage, termination
from lockstep.checkpoint.encoding import Box, on_cpu
from lockstep.checkpoint.formats.safetensors import write_tensors
from lockstep.checkpoint.lock import Lock
from lockstep.checkpoint.sharding import memory_of
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.distributed.rendezvous import Joined
from lockstep.errors import CheckpointError, LockstepError

_PAUSE_S = 0.05
"""Between two looks whether the other ranks are done."""
_PATIENCE_S = 5.0
"""Seconds for which the other ranks are waited for once the run has failed. It must be less than
launchers wait between asking a rank to end and killing it, which is 10 s or more."""
_STOPPING_S = 2.0
"""Seconds that the writing thread has to stop by itself; it looks after each part of a file."""


@dataclass(frozen=True)
class Part:
    """What one rank stores of a checkpoint."""

    files: Mapping[str, Mapping[str, Tensor]]
    """The safetensors files by name, as `encode` gives their tensors."""
    boxes: Mapping[str, Mapping[str, Box]] = field(default_factory=dict)
    """Which of the tensors are shards, by the name of the module (or `training`)."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """Trees of what rank 0 lacks of a state, by the state's name."""

    def write(self, folder: Path, check: Callable[[], object] = lambda: None) -> Report:
        """Writes the files and flushes them to disk.

        Args:
            folder: is there already.
            check: called again and again meanwhile; may raise what ends the writing.
        """
        written = {}
        for name, tensors in self.files.items():
            written[name] = write_tensors(folder / name, tensors, check)
        return {"files": written, "boxes": self.boxes, "entries": self.entries}


Report = dict[str, Any]
"""What rank 0 is to know of a part that is written; JSON."""


class Others:
    """Tells rank 0, through the run's store, that the other ranks have written their parts.

    Not by a collective: the training goes on, with collectives of its own.

    Args:
        joined: the ranks that have met; None on one process.
        name: of the checkpoint, as no other is called.
        ranks: those that write besides rank 0.
    """

    def __init__(self, joined: Joined | None, name: str, ranks: Sequence[int]) -> None:
        self._joined, self._name, self._ranks = joined, name, ranks

    def tell(self, rank: int, report: Report | None) -> None:
        """Says that this rank is done; None: it could not do its part."""
        if self._joined is not None:
            self._joined.store.set(self._key(rank), json.dumps(report))

    def reports(
        self, run_failed: Callable[[], bool], check: Callable[[], object] = lambda: None
    ) -> dict[int, Report | None]:
        """What the other ranks have said, once all have.

        Args:
            run_failed: whether the run has failed, so that not all ranks may be there any more.
            check: called again and again meanwhile; may raise what ends the waiting.

        Raises:
            CheckpointError: after that one of them has not said anything for a while.
        """
        if self._joined is None or not self._ranks:
            return {}
        store, keys = self._joined.store, list(map(self._key, self._ranks))
        patience = _PATIENCE_S
        while not store.check(keys):
            check()
            time.sleep(_PAUSE_S)
            if run_failed():
                patience -= _PAUSE_S
            if patience <= 0:
                raise CheckpointError(
                    f"saving the checkpoint {self._name}",
                    "the run has failed, and not all ranks have written their shards",
                    "resume from the checkpoint before it",
                )
        found = {rank: json.loads(store.get(self._key(rank))) for rank in self._ranks}
        for key in keys:
            store.delete_key(key)  # a long run saves often
        return found

    def _key(self, rank: int) -> str:
        return f"lockstep/checkpoint/{self._name}/{rank}"


def begin_checkpoint(
    temporary: Path, passed_over: Collection[str] = (), lock: Lock | None = None
) -> None:
    """Makes the hidden folder that the checkpoint of one step is written to; rank 0 calls it.

    Args:
        temporary: its path, as `layout.temporary_folder` gives it. The folder around it, which
            holds the run's checkpoints, is made where it is missing.
        passed_over: names of checkpoints that are known to be damaged: they do not count.
        lock: on the folder, which is to be held from now on.

    Raises:
        CheckpointError: the folder is a file, is not writable, or is another run's; or it holds a
            checkpoint of a later step, which a run that had resumed could not have left behind.
    """
    folder = temporary.parent
    step = layout.step_of(temporary)
    with layout.plain_errors("saving the checkpoint", layout.step_folder(folder, step)):
        _make_folders(folder)
        if lock is not None:
            lock.hold()
        later = [p for p in _counting(folder, passed_over) if layout.step_of(p) > step]
        if later:
            raise CheckpointError(
                f"saving the checkpoint of step {step} in {folder}",
                f"{later[-1].name} is there already, from a run that this one does not continue",
                "call checkpoint.resume() before the loop, or choose another folder",
            )
        for path in layout.leftovers(folder):
            _remove_if_possible(path)
        storage.make_folder(temporary)


def write_checkpoint(
    temporary: Path,
    part: Part,
    manifest: Mapping[str, Any],
    *,
    keep: int,
    best: Literal["min", "max"] | None = None,
    passed_over: Collection[str] = (),
    others: Callable[[], Mapping[int, Report | None]] = dict,
    check: Callable[[], object] = lambda: None,
) -> Path | None:
    """Writes the part of rank 0, waits for those of the others, and puts all in place.

    Args:
        temporary: what `begin_checkpoint` gave.
        part: of rank 0.
        manifest: what else `manifest.json` is to say, `step` among it; JSON.
        keep: how many of the newest checkpoints remain, this one included.
        best: which `metric` of their manifests lets one remain beside those.
        passed_over: names of checkpoints that are known to be damaged: they do not count.
        others: waits for the reports of the other ranks that write.
        check: called again and again meanwhile; may raise what ends the writing.

    Returns:
        The folder of the new checkpoint; a former one of the same step is replaced. None where
        another rank could not write its part, which that rank tells.

    Raises:
        CheckpointError: no space is left, or a file of another rank is not to be seen.
    """
    folder = temporary.parent
    final = layout.step_folder(folder, int(manifest["step"]))
    with layout.plain_errors("saving the checkpoint", final):
        try:
            reports = {0: part.write(temporary, check), **others()}
            if None in reports.values():
                remove_unfinished(temporary)
                return None
            full = _full_manifest(manifest, reports)
            _check_there(temporary, full["files"])
            with storage.new_file(temporary / layout.MANIFEST) as file:
                storage.write(file, storage.sealed(full))
            storage.sync_folder(temporary)
            check()
            _put_in_place(temporary, final)
        except BaseException:
            remove_unfinished(temporary)
            raise
        _remove_old(folder, keep, best, {*passed_over} - {final.name})
    return final


def _full_manifest(manifest: Mapping[str, Any], reports: Mapping[int, Any]) -> dict[str, Any]:
    files: dict[str, int] = {}
    checksums: dict[str, str] = {}
    shards: dict[str, dict[str, list[Any]]] = {}
    for rank, report in reports.items():
        for file, (size, checksum) in report["files"].items():
            files[file], checksums[file] = size, checksum
        for module, boxes in report["boxes"].items():
            for name, (offsets, sizes) in boxes.items():
                shards.setdefault(module, {}).setdefault(name, []).append([rank, offsets, sizes])
        for state, entries in report["entries"].items():
            _add_entries(manifest, state, entries)
    more = {"shards": shards} if shards else {}
    return {"format": layout.FORMAT, **manifest, **more, "files": files, "checksums": checksums}


def _add_entries(manifest: Mapping[str, Any], state: str, entries: Any) -> None:
    """Puts what another rank has of a module or an optimizer into the tree of rank 0."""
    if state in manifest["modules"]:
        found = {key: tree for key, tree in entries["$ordered"] if tree is not None}
        pairs = manifest["modules"][state]["$ordered"]
        pairs[:] = [[key, found.get(key, tree)] for key, tree in pairs]
    else:
        tree = manifest["training"][state]
        pairs = [*tree["state"].get("$dict", ()), *entries.get("$dict", ())]
        tree["state"] = {"$dict": sorted(pairs)}


def _check_there(temporary: Path, files: Mapping[str, int]) -> None:
    missing = layout.wrong_sizes(temporary, files)
    if missing:
        raise CheckpointError(
            f"saving a checkpoint in {temporary.parent}",
            f"{missing[0]}: what another rank has written there is not to be seen from rank 0",
            "use a folder that all machines share: each rank writes its part of a sharded state",
        )


def _make_folders(folder: Path) -> None:
    """Makes a folder, and those above it, where they are missing."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with suppress(FileExistsError):
        storage.make_folder(folder)
    folder.stat()  # what is there instead may be a link to nowhere
    storage.sync_folder(folder.parent)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Renames; a complete checkpoint of the same step steps aside and can be read until then."""
    aside = final.with_name(f".{final.name}.replaced")
    if layout.is_complete(final):
        if aside.exists():
            storage.remove_tree(aside)
        storage.rename(final, aside)
    elif final.exists():
        storage.remove_tree(final)
    try:
        storage.rename(temporary, final)
    except OSError:
        if aside.exists():
            storage.rename(aside, final)
        raise
    storage.sync_folder(final.parent)
    if aside.exists():
        _remove_if_possible(aside)


def _remove_old(
    folder: Path, keep: int, best: Literal["min", "max"] | None, passed_over: Collection[str]
) -> None:
    counting = _counting(folder, passed_over)
    kept = counting[-keep:]
    if best is not None:
        kept.append(layout.best(counting, best) or kept[-1])
    for path in counting:
        if path not in kept:
            _remove_if_possible(layout.hide(path))


def _counting(folder: Path, passed_over: Collection[str]) -> list[Path]:
    return [path for path in layout.list_checkpoints(folder) if path.name not in passed_over]


def remove_unfinished(temporary: Path) -> None:
    """Removes a hidden folder to which other threads or ranks may still write.

    Renaming it first decides in one operation whether the checkpoint is complete or goes: two
    renames of one folder cannot both succeed. And nobody makes files in it any more.
    """
    with suppress(OSError):
        storage.remove_tree(layout.hide(temporary))


def _remove_if_possible(path: Path) -> None:
    # What stays is hidden, and the next save tries again.
    with suppress(OSError):
        storage.remove_tree(path)


class GivenUp(Exception):
    """Ends the thread that writes a checkpoint which is not wanted any more."""


class Writer:
    """Runs one task after the other, each in a thread that ends with it.

    Python waits for such a thread at its exit, so that what was handed over is finished.

    Args:
        folder: what is written to.
        collectives: of the run.
    """

    def __init__(self, folder: Path, collectives: Collectives) -> None:
        self.lock = Lock(folder)
        self._doing = f"saving a checkpoint in {folder}"
        self._collectives = collectives
        self._thread: threading.Thread | None = None
        self._thread_ended = threading.Event()
        self._error: Exception | None = None
        self._unfinished: Path | None = None
        """The hidden folder that this rank has begun to write to, until its part is in it."""
        self._given_up = threading.Event()
        self._failed = False
        """Whether the run has."""
        self.open = False
        """Whether all ranks have heard that something was begun, and not yet how it ended."""

    @property
    def busy(self) -> bool:
        """Something is being written."""
        return self._thread is not None and not self._thread_ended.is_set()

    def begin(self, temporary: Path, passed_over: Collection[str]) -> None:
        """Makes the hidden folder of a checkpoint; see `begin_checkpoint`."""
        self.remember(temporary)
        begin_checkpoint(temporary, passed_over, self.lock)

    def remember(self, temporary: Path) -> None:
        """Says which hidden folder `start` will write to, and `give_up` is to remove."""
        self._given_up.clear()
        self._unfinished = temporary
        termination.protect(self._end_at_signal)

    def start(self, work: Callable[[], object]) -> None:
        """Begins with the work; what was begun before must be over."""

        def run() -> None:
            try:
                work()
                self._unfinished = None
            except GivenUp:
                pass  # who has given it up says so
            except Exception as error:
                self._error = error
            finally:
                self._thread_ended.set()

        self._thread_ended.clear()
        self._thread = threading.Thread(target=run, name="lockstep-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads are allowed
            self._thread = None
            raise

    def drop(self) -> None:
        """Takes `begin`, `remember` and `start` back, where the save has failed since."""
        self.give_up()
        if not self.busy:
            termination.unprotect(self._end_at_signal)

    def check(self) -> None:
        """Called by the thread while it writes; raises GivenUp where it is to stop."""
        if self._given_up.is_set():
            raise GivenUp("the run was ended before it was written")

    def run_failed(self) -> bool:
        """Whether the run has failed, so that other ranks may not write their parts."""
        # Python waits for our thread after the main thread has ended, and before `close` is called.
        ended_by_error = hasattr(sys, "last_type") and not threading.main_thread().is_alive()
        return self._failed or ended_by_error

    def give_up(self) -> None:
        """Removes what is half written. Does nothing where this rank has written its part.

        The thread stops if it can; where it waits for a disk, the folder goes without it.
        """
        temporary = self._unfinished
        if temporary is None:
            return
        self._given_up.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread_ended.wait(_STOPPING_S)
        self._unfinished = None
        remove_unfinished(temporary)

    def _end_at_signal(self) -> None:
        self.give_up()
        self.lock.release()

    def finish(self, timeout: float | None = None) -> None:
        """Returns when all is written. Its result must be told to all ranks.

        Args:
            timeout: seconds, after which what is not complete is given up; None: no limit.

        Raises:
            Exception: what went wrong since the last call, once.
        """
        if self._thread is not None:
            # Not Thread.join: in Python 3.11 and 3.12 one that Ctrl-C interrupts takes the thread
            # for one that has ended.
            if not self._thread_ended.wait(timeout):
                self.give_up()
                raise GivenUp("there was no time left for it")
            self._thread.join()
            self._thread = None
        termination.unprotect(self._end_at_signal)
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self, failed: bool, timeout: float | None = None) -> None:
        """Finishes at the end of the run; on all ranks, but for those that have failed.

        What is half written then, because a signal has ended the waiting, is removed.

        Args:
            failed: this process ends with an error.
            timeout: as in `finish`, where it has failed.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """

        def work() -> None:
            try:
                self.finish(timeout)
            finally:
                self.give_up()
                termination.unprotect(self._end_at_signal)
                self.lock.release()

        self._failed = self._failed or failed
        if self.busy:
            # Again: at SIGTERM, which a loop with `checkpoint.step()` takes for a request, the
            # process ends from now on.
            termination.protect(self._end_at_signal)
            if failed and not threading.main_thread().is_alive():
                # Python has waited for the thread already, and Ctrl-C has ended that.
                timeout = 0.0
        if failed or not self.open:
            try:
                work()
            except Exception as error:
                warnings.warn(f"the last checkpoint is not there: {error}", stacklevel=2)
            return
        self._collectives.blocked = None  # the loop is left
        try:
            run_on_all_ranks(self._collectives, self._doing, work)
        except RuntimeError as error:
            # The group may be gone with a rank that has failed, which is told elsewhere.
            if isinstance(error, LockstepError) or self._collectives.topology.is_main:
                raise


class HostCopies:
    """The memory for the copies of one state, used again for every save.

    Fresh memory costs more than the copying itself: each page is handed out by the kernel when it
    is first written to. (1 GB on a machine of two cores: 4.5 GB a second into fresh memory, 32 into
    memory that was used before.) For tensors on a GPU it is page-locked.
    """

    def __init__(self) -> None:
        self._gpus: set[torch.device] = set()
        """Those that copy now: one process may have spread its model over several."""
        self._buffers: dict[int, Tensor] = {}
        """By their places in the order of the copies."""
        self._next = 0
        self._own: set[int] = set()

    def begin(self, states: Iterable[Any]) -> None:
        """Starts a new set of copies; the former ones are given up.

        Args:
            states: pytrees that hold the training's own tensors. What comes later and is none of
                these was made for the checkpoint alone, and is not copied again.
        """
        self._own = set().union(*map(memory_of, states))
        self._next = 0

    def take(self, value: Tensor) -> Tensor:
        """A tensor's values in contiguous CPU memory; complete when `finish` has returned."""
        if value.device.type == "cpu" and value.untyped_storage().data_ptr() not in self._own:
            return on_cpu(value)
        buffer = self._buffers.pop(self._next, None)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = None  # gone before there is another one
            pinned = value.is_cuda and value.numel() > 0
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        self._buffers[self._next] = buffer
        self._next += 1
        if value.is_cuda:
            self._gpus.add(value.device)
        return buffer.copy_(value.detach(), non_blocking=value.is_cuda)

    def finish(self) -> None:
        """Returns when the copies are complete; memory that was not used again goes."""
        while self._gpus:
            torch.cuda.current_stream(self._gpus.pop()).synchronize()
        self._buffers = {place: self._buffers[place] for place in range(self._next)}

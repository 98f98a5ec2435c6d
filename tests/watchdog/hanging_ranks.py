"""Real ranks that hang in known ways, with a probe in them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import HANG_S, context, rank_environment

from lockstep.run.start.process import Process
from lockstep.run.watch import probe
from lockstep.run.watch.evidence import Evidence
from lockstep.run.watch.hang import find
from lockstep.run.watch.heartbeat import Heartbeat, read_heartbeat
from lockstep.run.watch.snapshot import Snapshot
from lockstep.run.watch.take_snapshot import take_snapshot
from lockstep.run.watch.verdict import Verdict


class Ranks:
    """Running ranks; a launcher would take snapshots of `launcher_processes`."""

    def __init__(self, folder: Path, processes: list[Any]) -> None:
        self.folder = folder
        self.processes = processes

    @property
    def launcher_processes(self) -> list[Process]:
        return [
            Process(rank, rank, self.folder / f"rank_{rank}", process.pid, process.exitcode)
            for rank, process in enumerate(self.processes)
        ]

    def take_snapshot(self, timeout_s: float = 5.0, *, call_stacks: bool = False) -> Snapshot:
        return take_snapshot(self.launcher_processes, call_stacks=call_stacks, timeout_s=timeout_s)

    def wait_until(self, condition: Callable[[Snapshot], bool]) -> None:
        limit = time.monotonic() + HANG_S
        while not condition(self.take_snapshot()):
            assert time.monotonic() < limit, (
                f"the condition did not become true: {self.take_snapshot()}"
            )
            time.sleep(0.2)

    def wait_for_verdict(self) -> Verdict:
        """Takes pairs of snapshots, as a supervisor does, until there is a verdict."""
        limit = time.monotonic() + HANG_S
        while time.monotonic() < limit:
            earlier = self.take_snapshot()
            time.sleep(1.0)
            verdict = find(earlier, self.take_snapshot(), 1.0)
            if verdict is not None:
                return verdict
        raise AssertionError(f"no verdict: {self.take_snapshot()}")

    def wait_for_verdict_of_kind(self, kind: str) -> Verdict:
        """Waits for a verdict of this kind. Before, a rank may be waited for as it starts later."""
        limit = time.monotonic() + HANG_S
        while time.monotonic() < limit:
            verdict = self.wait_for_verdict()
            if verdict.kind == kind:
                return verdict
            assert not verdict.fatal, verdict
        raise AssertionError(f"not {kind}: {verdict}")


@contextlib.contextmanager
def running_ranks(fn: Callable[[int, int], None], size: int, folder: Path) -> Iterator[Ranks]:
    """Runs `fn(rank, size)` on `size` ranks in an open Gloo group, and ends them at the end."""
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(size):
        environment = {
            **rank_environment(rank, size, store.port),
            **probe.FLIGHT_RECORDER_VARIABLES,
        }
        process = context.Process(
            target=_rank, args=(fn, rank, size, folder / f"rank_{rank}", environment)
        )
        process.start()
        processes.append(process)
    ranks = Ranks(folder, processes)
    try:
        yield ranks
    finally:
        for process in processes:
            process.kill()  # which does nothing to one that has ended
            process.join()
        del store


def _rank(
    fn: Callable[[int, int], None], rank: int, size: int, folder: Path, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    # What the others say when they are ended one after the other.
    folder.mkdir(parents=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    probe.install(Evidence.in_folder(folder))
    fn(rank, size)
    sys.stderr.flush()
    os._exit(0)


def heartbeat_of(ranks: Ranks, rank: int) -> Heartbeat | None:
    return read_heartbeat(Evidence.in_folder(ranks.folder / f"rank_{rank}").heartbeat)

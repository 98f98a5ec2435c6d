from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.run.start.machine import Machine
from lockstep.run.start.plan import LaunchSpec, make_plan
from lockstep.run.start.process import Attempt, Process
from lockstep.run.start.usable_gpus import UsableGpus
from lockstep.run.start.worker import Script

pytestmark = pytest.mark.unit


def gpus_of(nproc_asked: str, num_gpus: int, nproc: int) -> UsableGpus:
    spec = LaunchSpec(script=Script(path="train.py"))
    machine = Machine(cores=8, gpus=num_gpus, loopback="lo")
    return UsableGpus(make_plan(spec, machine, {}, nproc, one_node=True), nproc_asked)


def attempt(nproc: int, held: int | None = None) -> Attempt:
    """An attempt, after which the process of one rank has not ended."""
    processes = [Process(number, number, Path(), pid=number + 1) for number in range(nproc)]
    if held is not None:
        processes[held].given_up = "process 2 has not ended"
    return Attempt(processes, nproc, node=0, num_nodes=1, nproc=nproc, folder=Path())


@pytest.mark.parametrize(
    ("visible", "left"), [(None, ["0,2,3", "0,3"]), ("GPU-a,GPU-b,5,7", ["GPU-a,5,7", "GPU-a,7"])]
)
def test_gpus_that_are_held_are_left_out_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, left: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = gpus_of("gpu", num_gpus=4, nproc=4)
    assert gpus.leave_out_held(attempt(4)) is None
    assert gpus.variables == {}
    assert gpus.leave_out_held(attempt(4, held=1)) == 3
    assert gpus.variables == {"CUDA_VISIBLE_DEVICES": left[0]}
    assert gpus.leave_out_held(attempt(3, held=1)) == 2
    assert gpus.variables == {"CUDA_VISIBLE_DEVICES": left[1]}


@pytest.mark.parametrize(("num_gpus", "device"), [(0, None), (1, None), (2, "cpu")])
def test_ranks_without_gpus_of_their_own_hold_none(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: Any
) -> None:
    monkeypatch.delenv("LOCKSTEP_DEVICE", raising=False)
    if device is not None:
        monkeypatch.setenv("LOCKSTEP_DEVICE", device)
    assert gpus_of("2", num_gpus, nproc=2).leave_out_held(attempt(2, held=1)) is None


@pytest.mark.parametrize(("asked", "nproc", "held"), [("2", 2, 1), ("gpu", 1, 0)])
def test_a_run_that_may_not_go_on_with_fewer_ranks_ends(asked: str, nproc: int, held: int) -> None:
    with pytest.raises(LockstepError, match=f"the process of rank {held} has not ended"):
        gpus_of(asked, nproc, nproc).leave_out_held(attempt(nproc, held))

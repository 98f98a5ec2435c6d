"""Which failures count as the same in two attempts: those for which no restart helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_first_failure import CLOSED, NCCL, TIMED_OUT, rank_raised

from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.exit_status import ExitStatus
from lockstep.run.watch.first_failure import FirstFailure, first_failure
from lockstep.run.watch.repeated_failure import failure_key, step_of_key

pytestmark = pytest.mark.unit


def raised(
    text: str = "loss is NaN", type: str = "ValueError", *, trained: int | None = 812, **rest: Any
) -> ExitStatus:
    """A rank that raised after it had made steps."""
    end = rank_raised(0, text, 100.0, type, **{"step": 12, "ran_s": 30.0, **rest})
    assert end.error is not None
    return replace(end, error=replace(end.error, trained_steps=trained))


def without_step(trained: int | None = None, **rest: Any) -> ExitStatus:
    return raised(trained=trained, **{"step": None, "made_no_step": True, **rest})


def test_the_same_failure_has_the_same_key_from_wherever_each_start_has_gone_on() -> None:
    key = failure_key(raised())
    assert step_of_key(key) == 812
    assert failure_key(raised(step=2)) == key
    assert failure_key(without_step(812)) == key
    others = [
        raised(trained=813),
        raised(line="train.py:13: step()"),
        raised("loss is inf"),
        raised(type="TypeError"),
    ]
    assert key not in {failure_key(other) for other in others}
    assert failure_key(without_step()) == failure_key(without_step(0)) != ""
    assert failure_key(raised("<A at 0x7f01>")) == failure_key(raised("<A at 0x7f02>")) != ""


def in_worker(number: int) -> ExitStatus:
    headline = f"ValueError: sample 17 is broken (in DataLoader worker process {number})"
    end = raised(f"Caught ValueError in DataLoader worker process {number}.\nTraceback ...")
    assert end.error is not None
    return replace(end, error=replace(end.error, headline=headline))


def test_a_broken_sample_counts_in_whatever_worker_it_is_read() -> None:
    assert failure_key(in_worker(0)) == failure_key(in_worker(1)) != ""


def test_an_error_of_a_pool_counts_unless_its_message_is_about_something_outside() -> None:
    def in_pool(message: str) -> ExitStatus:
        end = raised(message)
        assert end.error is not None
        first_line = message.partition("\n")[0]
        headline = f"ValueError: {first_line} (in a worker process)"
        return replace(end, error=replace(end.error, headline=headline))

    assert failure_key(in_pool("bad image")) != ""
    assert failure_key(in_pool("bad image\nthe server did not answer")) == ""


@pytest.mark.parametrize(
    "end",
    [
        raised(CLOSED, "RuntimeError"),
        raised(NCCL, "torch.distributed.DistBackendError"),
        raised(TIMED_OUT, "RuntimeError"),
        raised("CUDA error: uncorrectable ECC error encountered", "RuntimeError"),
        raised("NCCL watchdog thread terminated", "RuntimeError"),
        raised("DataLoader worker (pid 71) is killed by signal: Killed.", "RuntimeError"),
        raised("DataLoader timed out after 30 seconds", "RuntimeError"),
        raised("[enforce fail] DefaultCPUAllocator: can't allocate memory", "RuntimeError"),
        raised("CUDA out of memory", "torch.OutOfMemoryError"),
        raised("", "MemoryError"),
        raised("[Errno 5] Input/output error", "OSError"),
        raised("data/part-7", "FileNotFoundError"),
        raised("[Errno 104] Connection reset by peer", "ConnectionResetError"),
        raised("503 for url", "requests.exceptions.HTTPError"),
        raised("the run has come apart", "MissingRankError"),
        raised("no file", "CheckpointError"),
        raised("of its own", "MyError"),
        raised("", "SystemExit"),
        raised("", "KeyboardInterrupt"),
        raised("no data", chain=("ConnectionError: no route",)),
        raised("no data", chain=("RuntimeError: CUDA error: launch failure",)),
        raised(line=None),
        raised(code=-9),
        raised(trained=None),
        raised(trained=0),
        without_step(ran_s=301.0),
        without_step(ran_s=None),
        raised(step=None),
    ],
    ids=lambda end: end.error.headline[:40] if isinstance(end, ExitStatus) else None,
)
def test_what_may_pass_or_is_not_known_does_not_count(end: ExitStatus) -> None:
    assert isinstance(end.error, ErrorRecord)
    assert failure_key(end) == ""


def test_a_failure_is_repeated_if_it_came_alone() -> None:
    end = raised(host="a")
    earlier = failure_key(end)
    other = rank_raised(1, "too short", 100.1, "ValueError", host="a")

    def find(*exits: ExitStatus, known: tuple[str, ...]) -> FirstFailure:
        failure = first_failure(exits, earlier_failures=known)
        assert failure is not None
        return failure

    assert find(end, known=(earlier,)).is_repeated
    assert find(end, replace(end, rank=1), known=(earlier,)).is_repeated
    assert not find(end, known=()).is_repeated
    assert not find(end, known=(failure_key(raised(trained=811)),)).is_repeated
    assert not find(end, other, known=(earlier,)).is_repeated
    assert find(end, other, known=()).key == ""
    assert find(end, known=()).key == earlier

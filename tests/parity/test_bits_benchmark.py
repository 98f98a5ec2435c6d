"""Programs of `make bits` have the same bits when they are resized and killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bits.__main__ import SCHEDULES, hashes_in, run_schedule

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

PROGRAMS = ["batchnorm"]


def test_programs_have_the_same_bits_resized_and_killed(tmp_path: Path) -> None:
    hashes = {}
    for schedule in (SCHEDULES[0], SCHEDULES[15], SCHEDULES[19]):
        folder = tmp_path / str(SCHEDULES.index(schedule))
        folder.mkdir()
        assert run_schedule(schedule, folder, PROGRAMS, seed=1) == ""
        hashes[schedule.title] = list(hashes_in(folder, PROGRAMS))
        assert len(list(folder.glob("*.killed"))) == (len(PROGRAMS) if schedule.killed else 0)
    undisturbed = hashes.pop(SCHEDULES[0].title)
    assert all(len(text) == 64 for text in undisturbed)
    assert list(hashes) == [
        "resized 4, 2, 1, 8: hsdp, ddp, single, fsdp",
        "killed: hsdp:shard_size=2 on 4 then fsdp on 3",
    ]
    assert all(found == undisturbed for found in hashes.values())

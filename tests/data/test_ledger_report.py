"""Made-up ledgers, each with one defect; those of real runs are in tests/data/test_ledger.py."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.batch.fingerprint import Fingerprint
from lockstep.errors import CheckpointError
from lockstep.extensions.framed_records import Damage
from lockstep.extensions.ledger.file_format import (
    FORMAT_VERSION,
    STEP_FIELDS,
    TrainedBatch,
    read_file,
)
from lockstep.extensions.ledger.judge import judge, repeats_and_gaps
from lockstep.extensions.ledger.report import LedgerReport

pytestmark = pytest.mark.unit

LENGTH, BATCH, STEPS = 10, 4, 3
LOADER = {
    "loader": 0, "dataset": "Digits", "stream": None, "length": LENGTH, "steps": STEPS,
    "batch_size": BATCH, "drop_last": False, "own_order": False,
}  # fmt: skip
NUMBERS = struct.Struct("<QHIQI")
Change = Callable[[list[Any]], None]


def framed(record: bytes) -> bytes:
    length = struct.pack("<I", len(record))
    checksum = zlib.crc32(length + record)
    return b"\xa9rec" + length + struct.pack("<I", checksum) + record


class Book:
    """One rank's file of one start of the run; global batches are those of an unshuffled epoch."""

    def __init__(self, start: int, rank: int = 0, ranks: int = 1, **loader: Any) -> None:
        self.name = f"{start:020d}-cafe.rank{rank}.ledger"
        self.rank, self.ranks = rank, ranks
        header = {"ledger": FORMAT_VERSION, "started_ns": start, "rank": rank, "ranks": ranks,
                  "step": NUMBERS.format, "no_loader": 0xFFFF}  # fmt: skip
        self.records = [self.json(header), self.json(LOADER | loader)]

    def json(self, values: dict[str, Any]) -> bytes:
        return framed(b"J" + json.dumps(values).encode())

    def steps(self, first: int, end: int, skip: tuple[int, ...] = (), epoch: int | None = None,
              **changes: Any) -> Book:  # fmt: skip
        """The steps from `first` on, three an epoch."""
        for step in range(first, end):
            if step in skip:
                continue
            position = changes.get("position", step % STEPS)
            samples = changes.get("samples", list(range(LENGTH)[position * BATCH :][:BATCH]))
            count = changes.get("count", len(samples))
            own = np.array_split(np.array(samples, dtype="<i8"), self.ranks)[self.rank]
            number = step // STEPS if epoch is None else epoch
            head = NUMBERS.pack(step, changes.get("loader", 0), number, position, count)
            self.records.append(framed(b"S" + head + own.tobytes()))
        return self

    def write(self, folder: Path, cut: int = 0) -> Book:
        data = b"".join(self.records)
        (folder / self.name).write_bytes(data[: len(data) - cut])
        return self


def check(folder: Path, *codes: str) -> LedgerReport:
    report = judge(folder)
    assert [finding.code for finding in report.findings] == list(codes), report.lines()
    json.dumps(report.as_json())
    assert report.lines()[-1].startswith("every ") == (not codes)
    assert (report.as_json()["verdict"] == "REPEATS OR GAPS") == bool(codes)
    return report


def test_a_sound_run(tmp_path):
    for rank in range(2):
        Book(1, rank, 2).steps(0, 9).write(tmp_path)
    report = check(tmp_path)
    assert report.as_json()["verdict"] == "EVERY SAMPLE ONCE"
    assert report.lines()[2:] == [
        "  loader 0 (Digits), epoch 0: 10 samples in 3 of 3 global batches",
        "  loader 0 (Digits), epoch 1: 10 samples in 3 of 3 global batches",
        "  loader 0 (Digits), epoch 2: 10 samples in 3 of 3 global batches",
        "every sample once: nothing was trained twice, nothing was left out",
    ]


def test_of_a_stream_only_positions_are_known(tmp_path):
    Book(1, stream="whole").steps(0, 9).write(tmp_path)
    report = check(tmp_path)
    assert report.as_json()["verdict"] == "EVERY POSITION ONCE"
    assert "the ledger records positions" in report.lines()[-1]


def test_of_a_sampler_of_the_scripts_own_only_global_batches_are_known(tmp_path):
    Book(1, own_order=True).steps(0, 9, samples=[3, 3, 3]).write(tmp_path)
    report = check(tmp_path)
    assert report.as_json()["verdict"] == "EVERY GLOBAL BATCH ONCE"
    assert "how often, is up to the sampler" in report.lines()[-1]


def data_of(*labels: int, subsets: tuple[int, ...] = (), image: float = 0.0) -> str:
    samples = {n: {"image": image + n, "label": label} for n, label in enumerate(labels)}
    return Fingerprint(subsets, None, samples).to_text()


@pytest.mark.parametrize(
    ("now", "codes"),
    [
        (data_of(3, 1), []),
        (None, []),  # of an older Lockstep
        (data_of(2, 4), ["LS104"]),
        (data_of(3, 1, subsets=(7,)), []),
        (data_of(3, 1, image=0.5), []),
    ],
)
def test_a_start_with_other_data_of_the_same_length(now, codes, tmp_path):
    before = data_of(3, 1, image=9.0 if codes else 0.0)
    Book(1, data=before).steps(0, 4).write(tmp_path)
    Book(2, data=now).steps(4, 9).write(tmp_path)
    report = check(tmp_path, *codes)
    assert ("read the samples in another way" in "".join(report.notes)) == (
        now == data_of(3, 1, image=0.5)
    )


def test_a_start_with_another_subset(tmp_path):
    Book(1, data=data_of(3, subsets=(5,))).steps(0, 4).write(tmp_path)
    Book(2, data=data_of(3, subsets=(6,))).steps(4, 9).write(tmp_path)
    finding = check(tmp_path, "LS104").findings[0]
    assert "start 2 are not those of the first start: the indices of its Subset" in finding.what


@pytest.mark.parametrize(("second_start", "codes"), [(4, ["LS104"]), (3, [])])
def test_a_stream_that_began_otherwise_in_the_same_epoch(second_start, codes, tmp_path):
    """Unless the later start has trained all of this epoch."""
    for start, first in ((1, 0), (2, second_start)):
        book = Book(start, stream="whole")
        book.records.append(book.json({"stream": 0, "epoch": 1, "beginning": [start, 5, 6]}))
        book.steps(first, 6).write(tmp_path)
    report = judge(tmp_path)
    assert [finding.code for finding in report.findings] == codes
    if codes:
        assert "from sample 0 on" in report.findings[0].what


def test_the_last_start_has_the_last_word(tmp_path):
    Book(1).steps(0, 8).write(tmp_path)
    Book(2).write(tmp_path)  # ended before its first step
    for rank in range(3):
        Book(3, rank, 3).steps(2, 7).write(tmp_path)
    Book(4).steps(4, 9).write(tmp_path)
    report = check(tmp_path)
    assert [attempt["again"] for attempt in report.attempts] == [0, 0, 6, 3]
    assert (report.steps, report.again) == (9, 9)


def test_a_script_that_goes_back_in_mid_run(tmp_path):
    Book(1).steps(0, 5).steps(2, 9).write(tmp_path)
    report = check(tmp_path)
    assert (report.steps, report.again) == (9, 3)


def test_a_sample_that_was_trained_twice(tmp_path):
    book = Book(1).steps(0, 3).steps(3, 4).steps(4, 5, samples=[3, 5, 6, 7]).steps(5, 6)
    book.write(tmp_path)
    repeated, absent = check(tmp_path, "LS101", "LS102").findings
    assert repeated.samples == (3,)
    assert repeated.epoch == 1
    assert "1 sample trained more than once: 3 (steps 3, 4)" in repeated.what
    assert absent.samples == (4,)


def test_a_position_that_was_not_taken_up(tmp_path):
    Book(1).steps(0, 4).write(tmp_path)
    Book(2).steps(4, 7, epoch=1, position=0).write(tmp_path)
    finding = check(tmp_path, "LS101").findings[0]
    assert "0 (steps 3, 4, 5, 6)" in finding.what


@pytest.mark.parametrize("restart", [False, True])
def test_an_epoch_that_was_left(restart, tmp_path):
    """By the script that is its own wish; by a restart it is a fault."""
    book = Book(1).steps(0, 2)
    if restart:
        book.write(tmp_path)
        book = Book(2)
    for position in range(3):
        book.steps(2 + position, 3 + position, epoch=1, position=position)
    book.write(tmp_path)
    report = check(tmp_path, *(["LS102"] if restart else []))
    if restart:
        assert "global batches were left out: 2" in report.findings[0].what
    else:
        assert "the script left epoch 0 after global batch 1 of 3" in report.notes[0]


def test_global_batches_that_are_missing(tmp_path):
    Book(1).steps(0, 9, skip=(4,)).write(tmp_path)
    steps, batches = check(tmp_path, "LS405", "LS102").findings
    assert steps.what == "1 step not written down: 4"
    assert "global batches were left out: 1" in batches.what


def test_a_rank_without_a_file(tmp_path):
    Book(1, 0, 2).steps(0, 3).write(tmp_path)
    report = check(tmp_path, "LS102")
    assert "the file of rank 1 is missing" in report.findings[0].what


def test_a_run_that_was_killed_in_a_step(tmp_path):
    Book(1, 0, 2).steps(0, 5).write(tmp_path)
    Book(1, 1, 2).steps(0, 5).write(tmp_path, cut=3)
    report = check(tmp_path)
    assert "the last record is cut off" in report.notes[0]
    assert "before rank 1 had written it down" in report.notes[1]
    Book(2).steps(5, 9).write(tmp_path)  # as if that step had been done
    report = check(tmp_path, "LS102")
    assert "rank 1 did not record" in report.findings[0].what


def test_ranks_that_disagree_about_a_step(tmp_path):
    Book(1, 0, 2).steps(0, 3).write(tmp_path)
    Book(1, 1, 2).steps(0, 2).steps(2, 3, position=1).write(tmp_path)
    what = check(tmp_path, "LS109").findings[0].what
    assert "rank 0 trained global batch 2 of epoch 0 (2 samples), rank 1 global batch 1" in what


def test_parts_that_do_not_make_the_global_batch(tmp_path):
    Book(1).steps(0, 2).steps(2, 3, samples=[8], count=2).write(tmp_path)
    check(tmp_path, "LS102")


def test_a_fault_of_many_steps_is_said_once(tmp_path):
    Book(1, 0, 2).steps(0, 9).write(tmp_path)
    Book(1, 1, 2).steps(0, 9, skip=(2, 3, 4)).write(tmp_path)
    what = check(tmp_path, "LS102").findings[0].what
    assert what.startswith("step 2: rank 1 did not")
    assert what.endswith("; so in 3 steps, the last 4")


def test_a_record_that_is_damaged(tmp_path):
    path = tmp_path / Book(1).steps(0, 3).write(tmp_path).name
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    report = check(tmp_path, "LS405", "LS405", "LS102")
    assert "1 place in" in report.findings[0].what


def test_a_damaged_description_of_a_loader(tmp_path):
    book = Book(1).steps(0, 3)
    book.records[1] = book.records[1][:-1] + b"?"
    book.write(tmp_path)
    report = check(tmp_path, "LS405")
    assert report.notes == ["epoch 0 of loader 0 cannot be judged"]


@pytest.mark.parametrize("bit", range(32))
def test_a_record_whose_length_is_damaged_does_not_hide_those_after_it(bit, tmp_path):
    book = Book(1).steps(0, 6)
    path = tmp_path / book.write(tmp_path).name
    whole = read_file(path)
    data = bytearray(path.read_bytes())
    data[sum(map(len, book.records[:4])) + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    file = read_file(path)
    (expected,), (rows,) = whole.batches_by_attempt, file.batches_by_attempt
    assert [row.step for row in rows] == [row.step for row in expected if row.step != 2]
    assert (len(file.damage.damaged_at), file.damage.is_cut_off) == (1, False)


@pytest.mark.parametrize("cut", [0, 5])
def test_damaged_records_at_the_end_are_told(cut, tmp_path):
    book = Book(1).steps(0, 6)
    path = tmp_path / book.write(tmp_path, cut).name
    data = bytearray(path.read_bytes())
    for number in (5, 6, 7):
        data[sum(map(len, book.records[:number])) + 20] ^= 1
    path.write_bytes(data)
    file = read_file(path)
    assert [row.step for row in file.batches_by_attempt[0]] == [0, 1, 2]
    assert file.damage == Damage(damaged_at=[sum(map(len, book.records[:5]))])


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_file_that_was_cut_off_anywhere_is_read_as_far_as_it_goes(cut, tmp_path):
    whole = read_file(tmp_path / Book(1).steps(0, 3).write(tmp_path).name)
    file = read_file(tmp_path / Book(1).steps(0, 3).write(tmp_path, cut).name)
    (expected,), (rows,) = whole.batches_by_attempt, file.batches_by_attempt
    assert [row[:5] for row in rows] == [row[:5] for row in expected][: len(rows)]
    assert file.damage.is_cut_off
    assert not file.damage.damaged_at


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"length": 11}, "LS104", "length is 11 on rank 0 of start 2, and was 10"),
        ({"batch_size": 5}, "LS109", "batch_size is 5"),
    ],
)
def test_a_loader_that_came_to_be_another(change, code, text, tmp_path):
    Book(1).steps(0, 3).write(tmp_path)
    Book(2, **change).steps(3, 6).write(tmp_path)
    assert text in check(tmp_path, code).findings[0].what


def test_what_is_not_a_fault(tmp_path):
    """A sampler that repeats, drop_last, a stream, a ledger begun late, steps without a loader."""
    for name, loader, book in (
        ("own", {"own_order": True}, lambda b: b.steps(0, 3, samples=[1, 1, 2, 2])),
        ("drop", {"drop_last": True, "steps": 2}, lambda b: b.steps(0, 2)),
        ("stream", {"stream": "whole", "length": None, "steps": None}, lambda b: b.steps(0, 8)),
        ("late", {}, lambda b: b.steps(4, 9)),
        ("none", {}, lambda b: b.steps(0, 1).steps(1, 2, loader=0xFFFF, samples=[])),
    ):
        folder = tmp_path / name
        folder.mkdir()
        positions = {"own": 0}
        made = Book(1, **loader)
        if name == "own":
            for position in range(3):
                made.steps(position, position + 1, samples=[1, 1, 2, 2][: 2 + positions["own"]])
        else:
            book(made)
        made.write(folder)
        check(folder)


def test_a_gap_in_a_stream(tmp_path):
    loader = {"stream": "whole", "length": None, "steps": None}
    Book(1, **loader).steps(0, 1).steps(1, 2, samples=[5, 6, 7]).steps(2, 3).write(tmp_path)
    assert check(tmp_path, "LS102").findings[0].samples == (4,)


def test_a_folder_without_a_ledger(tmp_path):
    with pytest.raises(CheckpointError, match="holds none"):
        judge(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        judge(tmp_path / "elsewhere")


def test_a_ledger_of_a_later_version(tmp_path):
    book = Book(1)
    book.records = [book.json({"ledger": FORMAT_VERSION + 1})]
    book.write(tmp_path)
    with pytest.raises(CheckpointError, match=f"version {FORMAT_VERSION + 1}"):
        judge(tmp_path)


def test_the_format_is_that_which_is_written():
    assert STEP_FIELDS.format == NUMBERS.format
    assert FORMAT_VERSION == 2


@pytest.mark.parametrize("at_once", [1, 3, 7, 1000])
def test_repeats_and_gaps_are_the_same_however_few_are_compared_at_a_time(at_once):
    draw = np.random.default_rng(at_once)
    for _ in range(20):
        samples = draw.integers(5, 60, 50)
        halves = [
            TrainedBatch(0, 0, 0, 0, 25, tuple(np.split(half, [7])))
            for half in np.split(samples, 2)
        ]
        twice, absent = repeats_and_gaps(halves, range(3, 64), at_once)
        counts = np.bincount(samples, minlength=64)
        assert twice.first_samples.tolist() == np.flatnonzero(counts > 1).tolist()
        assert absent.first_samples.tolist() == [n for n in range(3, 64) if not counts[n]]
        assert (twice.count, absent.count) == (len(twice.first_samples), len(absent.first_samples))


def test_a_long_ledger_is_judged_in_bounded_memory():
    order = np.arange(1_000_000)[::-1].copy()  # 8 MB
    rows = [TrainedBatch(t, 0, 0, t, 10_000, (order[t * 10_000 :][:10_000],)) for t in range(100)]
    rows[17] = rows[17]._replace(samples=rows[18].samples)
    tracemalloc.start()
    try:
        twice, absent = repeats_and_gaps(rows, range(1_000_000), 2**15)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()
    assert twice.first_samples.tolist() == sorted(rows[18].samples[0].tolist())
    assert absent.first_samples.tolist() == sorted(order[170_000:180_000].tolist())

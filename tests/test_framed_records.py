"""Files of the ledger and the journal: cut off, damaged, on a full disk, and written by two."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.distributed import rank_files
from lockstep.errors import SettingError
from lockstep.extensions.framed_records import FRAME, MARK, Damage, find_contents, framed
from lockstep.extensions.journal import file_format as journal_format
from lockstep.extensions.ledger import file_format as ledger_format

pytestmark = pytest.mark.unit


def contents_of(data: bytes) -> tuple[list[bytes], Damage]:
    damage = Damage()
    return [data[begin:end] for begin, end in find_contents(data, damage)], damage


def ends_of(contents: list[bytes]) -> list[int]:
    """Returns where each record ends in a file, after a 0."""
    ends = [0]
    for content in contents:
        ends.append(ends[-1] + FRAME.size + len(content))
    return ends


CONTENTS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=12),
        # Contents that look like the beginning of a record.
        st.binary(max_size=9).map(lambda tail: MARK + tail),
        st.integers(1, 20).map(lambda length: b"S" + bytes(length)),
    ),
    min_size=1,
    max_size=5,
)


@given(contents=CONTENTS)
def test_a_file_that_is_cut_anywhere_has_the_records_before_the_cut(contents: list[bytes]) -> None:
    data = b"".join(map(framed, contents))
    ends = ends_of(contents)
    assert ends[-1] == len(data)
    for cut in range(len(data) + 1):
        num_whole = sum(end <= cut for end in ends) - 1
        found, damage = contents_of(data[:cut])
        assert found == contents[:num_whole], cut
        assert damage == Damage(is_cut_off=cut not in ends), cut


@given(contents=CONTENTS, flipped=st.integers(1, 255))
def test_a_damaged_byte_takes_the_record_that_has_it(contents: list[bytes], flipped: int) -> None:
    data = b"".join(map(framed, contents))
    ends = ends_of(contents)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= flipped
        number = sum(end <= place for end in ends) - 1
        found, damage = contents_of(bytes(damaged))
        assert found == contents[:number] + contents[number + 1 :], place
        is_damaged = Damage(damaged_at=[ends[number]])
        if number < len(contents) - 1:
            assert damage == is_damaged, place
        else:  # a last record with a wrong checksum may also be one that was not written to its end
            assert damage in (is_damaged, Damage(is_cut_off=True)), place


@given(contents=CONTENTS, flips=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255))))
def test_nothing_is_read_that_was_not_written(
    contents: list[bytes], flips: list[tuple[int, int]]
) -> None:
    data = bytearray(b"".join(map(framed, contents)))
    for place, flipped in flips:
        data[place % len(data)] ^= flipped
    remaining = list(contents)
    for content in contents_of(bytes(data))[0]:
        while remaining[0] != content:  # in the order in which they were written
            del remaining[0]
        del remaining[0]


def test_a_block_that_was_never_written_is_no_damage() -> None:
    """After a power failure the disk may have the length of a file, and not what is in it."""
    data = framed(b"S1") + framed(b"S2")
    for num_lost in (1, 5, FRAME.size + 2):
        found, damage = contents_of(data[:-num_lost] + bytes(num_lost))
        assert found == [b"S1"]
        assert damage == Damage(is_cut_off=True), num_lost


def test_bytes_of_something_else_are_damage() -> None:
    for data in (b"x", b"x" * 50, framed(b"S1")[1:], MARK + b"\1\0\0\0" + b"x" * 50):
        found, damage = contents_of(data)
        assert found == []
        assert damage == Damage(damaged_at=[0]), data


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Lets this process write no larger files, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def train(num_steps: int, **settings: str) -> None:
    with lockstep.init(seed=1, device="cpu", **settings) as world:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(TensorDataset(torch.ones(4 * num_steps, 4)), 4)
        for (x,) in loader:
            world.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert world.step == num_steps


@pytest.mark.parametrize("setting", ["ledger", "journal"])
def test_a_full_disk_ends_the_file_and_not_the_training(setting: str, tmp_path: Path) -> None:
    train(40, **{setting: str(tmp_path / "whole")})
    (whole,) = (tmp_path / "whole").iterdir()
    limit = whole.stat().st_size - 300
    with (
        pytest.warns(lockstep.errors.LockstepWarning, match="cannot be written any more") as warned,
        files_of_at_most(limit),
    ):
        train(40, **{setting: str(tmp_path / "full")})
    assert len(warned) == 1
    assert "File too large" in str(warned[0].message)
    (path,) = (tmp_path / "full").iterdir()
    assert path.stat().st_size == limit
    if setting == "ledger":
        file = ledger_format.read_file(path)
        (batches,) = file.batches_by_attempt
        steps = [batch.step for batch in batches]
    else:
        file = journal_format.read_file(path)
        steps = list(file.steps_by_attempt[0])
    assert file.damage == Damage(is_cut_off=True)
    assert 20 < len(steps) < 40
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("setting", ["ledger", "journal"])
def test_a_second_writer_of_a_file_is_refused(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "_agree_on_start_name", lambda *_: "1-a")
    train(2, **{setting: str(tmp_path)})
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with pytest.raises(SettingError, match=r"it cannot be written: .*File exists"):
        train(2, **{setting: str(tmp_path)})
    assert path.read_bytes() == before

"""webdataset, litdata and MosaicML streaming, as docs/streaming_libraries.md says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import PROGRAMS, Ended, lines, run
from ranks import HANG_S

pytestmark = pytest.mark.real

TRAIN = str(PROGRAMS / "streams" / "train.py")
LIBRARIES = ("webdataset", "litdata", "mosaic")
SAMPLES = [*range(26)]

Trains = Callable[..., Ended]


@pytest.fixture(scope="module", params=LIBRARIES)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The library, and the folder with its data."""
    folder = str(tmp_path_factory.mktemp(request.param) / "data")
    command = [sys.executable, TRAIN, request.param, folder, "--write"]
    subprocess.run(command, check=True, timeout=HANG_S, cwd=Path(folder).parent)
    return [request.param, folder]


def batches(ended: Ended) -> list[list[int]]:
    """The global batches that were trained, both epochs in a row."""
    assert ended.code == 0, ended.said
    return [eval(line.split(maxsplit=2)[2]) for line in lines(ended.printed, "batch")]


def trained(data: list[str], cwd: Path, nproc: int, *words: str) -> Ended:
    return run("--nproc", str(nproc), TRAIN, *data, *words, cwd=cwd)


def test_the_global_batches_are_the_same_on_any_number_of_ranks_and_workers(data, tmp_path):
    expected = batches(trained(data, tmp_path, 1))
    assert sorted(sum(expected[:7], [])) == SAMPLES == sorted(sum(expected[7:], []))
    assert expected[:7] != expected[7:]
    for nproc, workers in ((1, "2"), (2, "2"), (3, "0"), (3, "2")):
        assert batches(trained(data, tmp_path, nproc, "--workers", workers)) == expected


def test_a_run_goes_on_in_mid_epoch_on_another_number_of_ranks(data, tmp_path):
    expected = batches(trained(data, tmp_path, 1))
    first = batches(trained(data, tmp_path, 2, "--workers", "2", "--stop", "10"))
    then = batches(trained(data, tmp_path, 3))
    assert first + then == expected


def test_a_stream_that_the_library_splits_over_the_ranks(data, tmp_path):
    if data[0] == "webdataset":
        pytest.skip("its pipeline on the page is read whole")
    found = batches(trained(data, tmp_path, 2, "--as", "own", "--workers", "1"))
    assert sorted(sum(found[: len(found) // 2], [])) == SAMPLES
    whole = trained(data, tmp_path, 2, "--as", "whole")
    assert "LS109" in whole.said
    assert "pass shard=False" in whole.said


def test_what_several_workers_cannot_read_as_a_stream(data, tmp_path):
    ended = trained(data, tmp_path, 1, "--as", "whole", "--workers", "2")
    if data[0] == "litdata":
        assert sorted(sum(batches(ended)[:7], [])) == SAMPLES
        return
    expected = "read different samples" if data[0] == "webdataset" else "read it by index"
    assert expected in ended.said

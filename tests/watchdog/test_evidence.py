"""The files of a rank in memory of its launcher's: they do not depend on any folder."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.run.watch import evidence
from lockstep.run.watch.error_record import read_error, record_error
from lockstep.run.watch.evidence import (
    EVIDENCE_VARIABLE,
    Evidence,
    EvidenceMemory,
    create_evidence_memory,
    write_in_place,
)

pytestmark = pytest.mark.unit


def make_memory(folder: Path) -> EvidenceMemory:
    memory = create_evidence_memory(folder)
    assert memory is not None
    return memory


def test_what_a_rank_writes_outlives_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rank_0"
    folder.mkdir()
    memory = make_memory(folder)
    theirs = Evidence.of_this_process(memory.variables, folder)
    assert theirs == memory.evidence
    assert {path.name for path in folder.iterdir()} == {
        "heartbeat", "stacks.txt", "crash.txt", "flight.json", "error.json", "ask",
    }  # fmt: skip
    shutil.rmtree(folder)
    record_error(ValueError("loss is NaN"), theirs)
    found = read_error(memory.evidence)
    assert found is not None
    assert found.headline == "ValueError: loss is NaN"
    memory.copy_to_folder()
    memory.close()
    assert [path.name for path in folder.iterdir()] == ["error.json"]
    assert read_error(Evidence.in_folder(folder)) == found


def test_the_links_of_a_folder_become_files_where_there_is_something_in_them(
    tmp_path: Path,
) -> None:
    memory = make_memory(tmp_path)
    write_in_place(memory.evidence.answer, '{"request": 1}')
    assert json.loads((tmp_path / "flight.json").read_text()) == {"request": 1}
    memory.copy_to_folder()
    memory.close()
    [kept] = tmp_path.iterdir()
    assert not kept.is_symlink()
    assert kept.read_text() == '{"request": 1}'


def test_a_rank_whose_folder_cannot_be_written_still_has_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = make_memory(tmp_path / "file" / "rank_0")
    write_in_place(memory.evidence.error, "{}")
    with pytest.raises(OSError, match="file"):
        memory.copy_to_folder()
    memory.close()


def test_a_system_without_memory_files_uses_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> int:
        raise OSError("Too many open files")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "memfd_create", fail)
    assert create_evidence_memory(tmp_path) is None
    assert len(os.listdir("/proc/self/fd")) == len(before)
    monkeypatch.setattr(evidence.sys, "platform", "darwin")
    assert create_evidence_memory(tmp_path) is None
    for variables in (
        {},
        {EVIDENCE_VARIABLE: "/proc/0/fd/1 " * len(fields(Evidence))},
        {EVIDENCE_VARIABLE: "/a"},
    ):
        found = Evidence.of_this_process(variables, tmp_path)
        assert found == Evidence.in_folder(tmp_path)


def test_a_text_is_never_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    written = os.pwrite
    seen = []

    def slowly(descriptor: int, data: bytes, offset: int) -> int:
        count = written(descriptor, data[:7], offset)
        seen.append(path.read_text())
        return count

    monkeypatch.setattr(os, "pwrite", slowly)
    write_in_place(path, "x" * 100)  # a longer one, of which nothing may be left
    write_in_place(path, json.dumps({"text": "\udcff of a file's name"}))
    *parts, whole = seen[16:]
    assert parts
    for part in parts:
        with pytest.raises(ValueError, match="Expecting value"):
            json.loads(part)
    assert json.loads(whole) == {"text": "\udcff of a file's name"}


def test_a_pipe_that_nobody_reads_takes_requests_until_it_is_full(tmp_path: Path) -> None:
    memory = make_memory(tmp_path)
    pipe = os.open(memory.evidence.request_pipe, os.O_WRONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, b"1\n" * 2048)
    os.close(pipe)
    memory.close()

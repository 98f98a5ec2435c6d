"""The prepared run on a GPU machine: nothing that a stage does may cost more than itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankFailed

from benchmarks.gpu import results, synchronizations, table
from benchmarks.gpu.__main__ import REQUIRED_PACKAGES, missing_packages
from benchmarks.gpu.aims import AIMS, ALL_CHECKS
from benchmarks.gpu.one_gpu import SEPARATE_HOSTS, init_options, on_ranks
from benchmarks.gpu.page_texts import CHINESE, ENGLISH
from benchmarks.gpu.results import read_lines, write_line
from benchmarks.gpu.stages import STAGES, TOTAL_SECONDS, UnknownStage, choose, is_as_expected
from lockstep.checkpoint import background_copy
from lockstep.distributed.device import choose_device
from lockstep.machine.topology import Topology

pytestmark = pytest.mark.launcher

HIDDEN_CHILD = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
"""Of the child that the stage that hangs leaves behind."""


def run_of_stages(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(folder)]
    return subprocess.run(
        [*command, *arguments], cwd=results.ROOT, capture_output=True, text=True, check=False
    )


def by_check(folder: Path, stage: str) -> dict[str, dict[str, Any]]:
    lines = read_lines(folder / results.FILE_NAME)
    return {line["check"]: line for line in lines if line["stage"] == stage}


def test_a_stage_that_hangs_or_is_killed_costs_itself_alone(tmp_path: Path) -> None:
    stages = "rehearse-hang,rehearse-kill,rehearse-disk"
    done = run_of_stages(tmp_path, "--stages", stages, "--factor", "2")
    assert done.returncode == 0, done.stdout + done.stderr

    hung = by_check(tmp_path, "rehearse-hang")
    assert hung["a check before the stage hangs"]["result"] == "passed"
    assert hung["(stage)"]["result"] == "timed out"
    assert "at: waiting for ever" in hung["(stage)"]["reason"]
    assert "in hang" in hung["(stage)"]["reason"], "the stack of the stage is missing"

    killed = by_check(tmp_path, "rehearse-kill")
    assert killed["a check before the stage is killed"]["result"] == "passed"
    assert killed["(stage)"]["result"] == "crashed"
    reason = "ended by SIGKILL, at: the check in which it is killed"
    assert killed["(stage)"]["reason"].startswith(reason)

    full = by_check(tmp_path, "rehearse-disk")
    assert full["fills the disk"]["result"] in ("passed", "not run")  # it takes root
    assert full["reports a result afterwards"]["result"] == "passed"
    assert full["(stage)"]["result"] == "passed"

    assert {path.name for path in tmp_path.iterdir()} == {results.FILE_NAME, results.LOG_NAME}
    assert HIDDEN_CHILD not in subprocess.run(["ps", "ax"], capture_output=True, text=True).stdout


def test_a_run_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    done = run_of_stages(tmp_path, "--stages", "rehearse-kill", "--limit", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    line = by_check(tmp_path, "rehearse-kill")["(stage)"]
    assert (line["result"], line["reason"]) == ("not run", "the run's 1 s were over")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_device_that_torch_can_use_no_stage_is_run(tmp_path: Path) -> None:
    """Each stage would fail by itself, and take its time."""
    done = run_of_stages(tmp_path, "--device", "cuda")
    assert done.returncode == 1
    assert "no stage is run, since torch cannot use the device" in done.stdout
    lines = read_lines(tmp_path / results.FILE_NAME)
    assert [line["check"] for line in lines] == ["(begin)", "(first look)"]
    assert lines[1]["result"] == "failed"
    assert "CUDA" in lines[1]["reason"]


def test_packages_that_are_missing_are_named() -> None:
    assert missing_packages(("torch", "no_such_package", "neither_this")) == [
        "no_such_package",
        "neither_this",
    ]
    assert missing_packages(REQUIRED_PACKAGES) == []


def test_a_check_that_this_torch_cannot_make_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_in_rank(*_: Any, **__: Any) -> None:
        raise RankFailed({0: "SettingError: strategy='fsdp': torch 2.11.0 cannot do that; use"})

    monkeypatch.setitem(sys.modules, "on_devices", SimpleNamespace(run_on=raise_in_rank))
    with pytest.raises(results.NotRun, match=r"^torch 2\.11\.0 cannot do that$"):
        on_ranks(raise_in_rank, 1)


def test_only_waits_for_the_device_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching the mode on warns by itself, which counted as a wait in every case."""

    def set_mode(mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    class Event:
        def __init__(self, is_reached: bool) -> None:
            self.query = lambda: is_reached

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    with warnings.catch_warnings(), synchronizations.counted(on_gpu=True) as found:
        assert not found
        wait()
        Event(is_reached=True).synchronize()
        assert found.total() == 1
        Event(is_reached=False).synchronize()
        torch.cuda.synchronize(device="cuda")
        assert found.total() == 3
        thread = threading.Thread(target=wait, name=background_copy.THREAD_NAME)
        thread.start()
        thread.join()
    beside = [name.startswith(synchronizations.BESIDE_THE_TRAINING) for name in found]
    assert sorted(beside) == [False] * (len(beside) - 1) + [True]


def test_the_last_lines_are_written_where_a_stage_has_filled_the_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system takes root: {made.stderr.strip()}")
    try:
        results.prepare_folder(tmp_path)
        filler = tmp_path / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"x" * 4096)
        for number in range(20):
            write_line(tmp_path, stage="nccl", check=f"check {number}", reason="x" * 1000)
        lines = read_lines(tmp_path / results.FILE_NAME)
        assert [line["check"] for line in lines] == [f"check {number}" for number in range(20)]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    write_line(tmp_path, stage="nccl", check="one")
    path = tmp_path / results.FILE_NAME
    path.write_text(path.read_text() + '{"stage": "nccl", "check": "tw')
    assert [line["check"] for line in read_lines(path)] == ["one"]


def test_a_check_that_fails_does_not_end_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(results.FOLDER_VARIABLE, str(tmp_path))
    stage = results.Stage("nccl")
    with stage.check("fails") as values:
        values["seen"] = 3
        raise ValueError("so")
    with stage.check("cannot be made"):
        raise results.NotRun("no GPU")
    found = by_check(tmp_path, "nccl")
    assert found["fails"]["result"] == "failed"
    assert found["fails"]["values"] == {"seen": 3}
    assert found["fails"]["reason"].endswith("ValueError: so")
    assert found["cannot be made"]["result"] == "not run"


@pytest.mark.parametrize(("device", "result"), [("cuda", "missed"), ("cpu", "passed")])
def test_a_figure_beyond_its_aim_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, result: str
) -> None:
    monkeypatch.setenv(results.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(results.DEVICE_VARIABLE, device)
    stage = results.Stage("speed")
    with stage.check("a step of a small MLP") as values:
        values["overhead_of_a_step_us"] = 30.5
    with stage.check("a step of a GPT in bf16") as values:
        values["ratio"] = 1.01
    found = by_check(tmp_path, "speed")
    line = found["a step of a small MLP"]
    assert (line["result"], line["values"]) == (result, {"overhead_of_a_step_us": 30.5})
    if device == "cuda":
        assert line["reason"] == "the aim is overhead_of_a_step_us 30 at most, found 30.5"
        assert not is_as_expected(line)
    row = f"| a step of a small MLP | {result} | overhead_of_a_step_us ≤ 30 |"
    assert table.row(line).startswith(row)
    assert found["a step of a GPT in bf16"]["result"] == "passed"


def test_aims_are_of_checks_that_are_made() -> None:
    made = {("syncs", name) for name in synchronizations.CASES}
    for path in results.DEFAULT_FOLDER.glob("*.jsonl"):
        made |= {(line["stage"], line["check"]) for line in read_lines(path)}
    for stage, checks in AIMS.items():
        for check in checks.keys() - {ALL_CHECKS}:
            assert (stage, check) in made


def test_a_check_without_time_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs were started with a limit below zero, and the check counted as failed."""
    monkeypatch.setenv(results.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(results.END_VARIABLE, "0")  # long ago
    stage = results.Stage("product")
    with stage.check("a program"):
        subprocess.run(["true"], check=True, timeout=stage.time_limit(reserve=2))
    line = by_check(tmp_path, "product")["a program"]
    assert line["result"] == "not run"
    assert line["reason"] == "no time was left of the stage"


def test_results_name_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch/of/this/stage")
    reason = f"{results.ROOT}/src/a.py, {sys.prefix}/lib, /scratch/of/this/stage/logs"
    write_line(tmp_path, stage="nccl", check="one", reason=reason)
    [line] = read_lines(tmp_path / results.FILE_NAME)
    assert line["reason"] == "./src/a.py, PREFIX/lib, TMPDIR/logs"


def test_what_needs_the_probe_gets_it() -> None:
    assert [stage.name for stage in choose("hangs", on_gpu=True)] == ["probe", "hangs"]
    assert [stage.name for stage in choose("tests", on_gpu=True)] == ["tests"]
    with pytest.raises(UnknownStage, match="no stage ncll; the stages are machine, probe"):
        choose("ncll", on_gpu=True)


def test_all_stages_but_the_last_fit_into_the_time_of_a_run() -> None:
    stages = choose("", on_gpu=True)
    assert stages[-1].name == "tests"
    assert sum(stage.seconds for stage in stages[:-1]) < TOTAL_SECONDS
    rehearsed = {stage.name for stage in STAGES if stage.in_rehearsal_only}
    assert rehearsed.isdisjoint(stage.name for stage in stages)


def lines_of_a_run(device: str, name: str, *checks: tuple[str, str, str]) -> list[dict[str, Any]]:
    begin = {
        "run": name, "stage": "run", "check": "(begin)", "result": "passed", "seconds": 0.0,
        "values": {"device": device, "commit": "abc", "source": "s"}, "reason": "",
    }  # fmt: skip
    more = [
        {
            "run": name, "stage": stage, "check": check, "result": result, "seconds": 1.0,
            "values": {"gpu": "H100"} if check == "versions" else {"a": 1.5},
            "reason": "" if result == "passed" else "first line\nlast line",
        }
        for stage, check, result in checks
    ]  # fmt: skip
    return [begin, *more]


def test_the_page_has_the_newest_line_of_each_check() -> None:
    first = lines_of_a_run(
        "cuda", "2026-01-01T", ("machine", "versions", "passed"), ("nccl", "ddp", "failed"),
        ("nccl", "(stage)", "timed out"),
    )  # fmt: skip
    second = lines_of_a_run("cuda", "2026-01-02T", ("nccl", "ddp", "passed"))
    text = table.page([*second, *first])
    assert "| ddp | passed |  | 1.0 | a 1.5 |" in text
    assert "| the whole stage | timed out |  | 1.0 | a 1.5. first line |" in text
    assert "| gpu | H100 |" in text
    assert "at commit abc. Later changes have not been run." in text
    sentence = table.readme_sentence([*first, *second])
    assert "run on one H100 (2026-01-02): 2 checks passed. Over NCCL" in sentence
    chinese = table.page([*second, *first], texts=CHINESE)
    assert "| ddp | 通过 |  | 1.0 | a 1.5 |" in chinese
    assert "| 整个阶段 | 超时 |  | 1.0 | a 1.5. first line |" in chinese
    assert (
        "2 项通过。\n\n开始于 2026-01-01T, 2026-01-02T，提交 abc。之后的改动尚未运行过。" in chinese
    )
    assert "在一张 H100 上运行过（2026-01-02）" in table.readme_sentence([*first, *second], CHINESE)


def test_both_languages_have_all_stages_and_results() -> None:
    assert CHINESE.about.keys() == ENGLISH.about.keys()
    assert CHINESE.results.keys() == {*results.RESULTS}


def test_without_a_gpu_the_page_says_so() -> None:
    rehearsal = lines_of_a_run("cpu", "2026-01-01T", ("nccl", "ddp", "failed"))
    text = table.page(rehearsal)
    assert "## On a GPU\n\nNot run yet." in text
    assert "| ddp | failed |  | 1.0 | a 1.5. last line |" in text


def test_the_readme_and_the_page_say_what_the_results_say() -> None:
    lines: list[dict[str, Any]] = []
    for path in sorted(results.DEFAULT_FOLDER.glob("*.jsonl")):
        lines += read_lines(path)
    for name, texts in (("README.md", ENGLISH), ("README.zh-CN.md", CHINESE)):
        readme = " ".join((results.ROOT / name).read_text(encoding="utf-8").split())
        assert table.readme_sentence(lines, texts) in readme
        page = texts.page.read_text(encoding="utf-8")
        for _, line in table.newest_lines(table.runs_of(lines)):
            if line["check"] != "versions":
                assert table.row(line, texts) in page, json.dumps(line)


def test_nccl_is_not_refused_where_ranks_share_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SEPARATE_HOSTS, "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    gpu = SimpleNamespace(name="H100", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    topology = Topology(rank=1, size=2, local_rank=1, local_size=2)

    def texts_of_machine(text: str) -> list[str]:
        return ["the same GPU", "the same GPU"]

    try:
        init_options("cuda", "nccl")
        device, _ = choose_device(
            None, topology, {}, may_share=False, exchange_on_machine=texts_of_machine
        )
    finally:
        mock.patch.stopall()
    assert device == torch.device("cuda:0")

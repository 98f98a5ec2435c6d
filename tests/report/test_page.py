"""The page of a record, what it says of the run, and where else its curves go."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import math
import os
import re
import socket
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
from click.testing import CliRunner

from lockstep import language
from lockstep.cli.main import main
from lockstep.extensions.ledger import judge as ledger_judge
from lockstep.extensions.report import charts, comparison, page
from lockstep.extensions.report.analysis import (
    Finding,
    find,
    scaling,
    speed,
    work_by_rank,
    working_fraction,
)
from lockstep.extensions.report.facts import run_facts
from lockstep.extensions.report.page import WEB_FOLDER, ledger_text
from lockstep.extensions.report.reading import Record
from lockstep.extensions.report.record_format import COLUMNS, FORMAT_VERSION
from lockstep.extensions.report.trackers import scalars

pytestmark = pytest.mark.unit

BAD = "<script>alert(1)</script>"


def texts(record: Record) -> list[str]:
    return [f"{finding.level}: {finding.text}" for finding in find(record)]


def test_a_straggler_is_named_with_its_host_and_phase(tmp_path: Path) -> None:
    made.write(tmp_path, 16, work=made.noisy({11: ("data", 0.05)}))
    (text,) = texts(Record(tmp_path))
    assert text.startswith("warning: rank 11 on node2 is a straggler: it works 14")
    assert text.endswith("most of the difference is in data")


def test_of_two_ranks_the_slower_is_named(tmp_path: Path) -> None:
    made.write(tmp_path, 2, work=made.noisy({0: ("backward", 0.03)}))
    (text,) = texts(Record(tmp_path))
    assert "rank 0 on node1 is a straggler" in text
    assert text.endswith("in backward")


def test_ranks_that_differ_by_chance_are_no_stragglers(tmp_path: Path) -> None:
    made.write(tmp_path, 64, work=made.noisy({}))
    assert texts(Record(tmp_path)) == []


@pytest.mark.parametrize(
    ("phase", "words", "advice"),
    [
        ("data", "wait for data for 2", "Give the DataLoader more num_workers"),
        ("checkpoint", "wait for checkpoints for ", "Save less often"),
    ],
)
def test_what_all_ranks_wait_for_is_said(
    phase: str, words: str, advice: str, tmp_path: Path
) -> None:
    made.write(tmp_path, 4, work=lambda rank, step: {**made.USUAL, phase: 0.035})
    (finding,) = find(Record(tmp_path))
    assert words in finding.text
    assert finding.advice.startswith(advice)


def test_ranks_of_one_host_do_not_wait_for_a_network(tmp_path: Path) -> None:
    quick = {"forward": 0.01}
    for ranks, words in ((8, "all ranks wait for each other for 57%"), (9, "and for the network")):
        folder = tmp_path / str(ranks)
        made.write(folder, ranks, work=lambda *_: quick)
        (finding,) = find(Record(folder))
        assert words in finding.text
        assert ("network" in finding.text + finding.advice) == (ranks == 9)


def test_commands_in_advice_are_shown_as_code(tmp_path: Path) -> None:
    made.write(tmp_path, 2, work=made.noisy({0: ("backward", 0.03)}))
    page = pages(tmp_path)
    assert "Run <code>lockstep doctor</code> on its host" in page
    assert "with <code>lockstep run --nproc 1 --report ONE</code>, and" in page


def test_the_last_step_is_the_last_that_anything_was_written_about(tmp_path: Path) -> None:
    """A rank that was killed lacks the rows of its last second, but not its last warning."""
    line = {"warning": "odd", "step": 100, "time": 1e9}
    made.write(tmp_path, rows=98, end=None, lines=(line,))
    page = pages(tmp_path)
    assert "<dt>Last step</dt><dd>100</dd>" in page
    assert "<td>1–100</td>" in page


def test_a_rank_that_saves_is_no_straggler(tmp_path: Path) -> None:
    made.write(tmp_path, 4, work=lambda r, _: {**made.USUAL, "checkpoint": 0.05 * (r == 0)})
    assert [text for text in texts(Record(tmp_path)) if "straggler" in text] == []


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    made.write(tmp_path, loss=lambda step: math.inf if step >= 70 else 1.0)
    assert texts(Record(tmp_path)) == ["error: the loss is not finite from step 71 on"]


def test_a_loss_that_is_finite_again_and_one_that_was_not_given(tmp_path: Path) -> None:
    made.write(tmp_path / "a", loss=lambda step: math.nan if step in (70, 80) else 1.0)
    (finding,) = find(Record(tmp_path / "a"))
    assert finding[:2] == ("warning", "the loss is not finite at step 71, and finite again later")
    assert finding.evidence == (
        "step 69: 1", "step 70: 1", "step 71: nan",
        "rows of the record with such a loss: 2 of 100, the last at step 81",
    )  # fmt: skip
    made.write(tmp_path / "b", loss=lambda step: math.nan if step in (70, 98, 99) else 1.0)
    assert texts(Record(tmp_path / "b")) == ["error: the loss is not finite from step 99 on"]
    made.write(tmp_path / "c", loss=lambda step: math.nan)
    assert texts(Record(tmp_path / "c")) == ["error: the loss is not finite from step 1 on"]

    def forget_loss(row: list[Any]) -> None:
        if row[0] > 50:  # from step 51 on the script called `loss.backward()` itself
            row[COLUMNS.index("loss")] = None

    made.write(tmp_path / "d")
    change_rows(tmp_path / "d", forget_loss)
    record = Record(tmp_path / "d")
    assert texts(record) == []
    assert record.starts[0].loss()[0].tolist() == list(range(1, 51))


def test_a_restart_and_the_steps_that_were_trained_again(tmp_path: Path) -> None:
    made.write(tmp_path, rows=50, end=None)
    made.write(tmp_path, rows=50, began=1e9 + 8.25, first=30)
    (restart,) = find(Record(tmp_path))
    assert restart == Finding(
        "warning",
        "start 1, of 2 ranks, ended without a word: it was killed; the next one trained steps 31 "
        "to 50 again",
        ("time spent on steps that were trained again: 2.5 s",
         "its last step: 50, the next one's first: 31",
         "from its last sign to the next start: 2.0 s"),
    )  # fmt: skip


def told(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    """Writes what a launcher has."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"host": name, "text": "", **line}) + "\n" for line in lines)
    (folder / f"1-{name}.launcher.record").write_text(text)


def test_what_launchers_have_found_is_told_once_with_what_they_said(tmp_path: Path) -> None:
    made.write(tmp_path, rows=50)
    made.write(tmp_path, rows=50, number=2, first=50)
    words = "FIRST FAILURE: rank 1\n  killed by SIGKILL\n  train.py:3: step()\n"
    failure = {"kind": "failure", "exit_code": 71}
    slow = {"kind": "finding", "text": "rank 0 works, the others wait\n  rank 0: at a line"}
    for name in ("a", "b"):
        folder = f"traceback and logs: /tmp/{name}"
        told(
            tmp_path,
            name,
            {"time": 1.1e9, **slow},
            {"time": 1.2e9, **slow},
            {"time": 2.2e9, "text": words + folder, **failure},
        )
    error, warning = find(Record(tmp_path))
    assert (error.level, error.text) == ("error", "FIRST FAILURE: rank 1")
    assert error.evidence[:4] == (
        "  killed by SIGKILL",
        "  train.py:3: step()",
        "traceback and logs: /tmp/b",
        "exit code 71",
    )
    assert error.evidence[4].startswith("said by the launcher on a, 20")
    assert error.evidence[4].endswith(", in start 2")
    assert (warning.level, warning.text) == ("warning", "rank 0 works, the others wait")
    assert warning.evidence[0] == "  rank 0: at a line"
    assert ", in start 1; 2 times, the last " in warning.evidence[1]
    assert [start.end for start in Record(tmp_path).starts] == ["ok", "failed"]


def test_a_run_that_failed_before_it_had_joined(tmp_path: Path) -> None:
    start = {"kind": "start", "ranks": 8, "command": ["train.py", "--width", "2"]}
    words = "FIRST FAILURE: rank 1 on host a\n  ValueError: odd\n  train.py:3: f()"
    failure = {"kind": "failure", "exit_code": 1, "text": words}
    made.write(tmp_path, rows=10)
    told(
        tmp_path,
        "a",
        {"time": 0.9e9, **start},
        {"time": 1.1e9, "kind": "end"},
        {"time": 1.5e9, **start},
        {"time": 1.6e9, **failure},
        {"time": 1.7e9, **start},
    )
    record = Record(tmp_path)
    assert [(s.reached_init, s.num_ranks, s.end) for s in record.starts] == [
        (True, 2, "ok"),
        (False, 8, "failed"),
        (False, 8, None),
    ]
    findings = find(record)
    assert findings[0].evidence[:3] == ("  ValueError: odd", "  train.py:3: f()", "exit code 1")
    assert findings[1].text == "start 2, of 8 ranks, ended by a failure"
    assert findings[1].evidence[0] == "none of its ranks came to lockstep.init"
    assert len(findings) == 2
    page = pages(tmp_path)
    assert "FIRST FAILURE: rank 1 on host a: ValueError: odd" in page
    assert "train.py · Not at lockstep.init" in page


def pages(folder: Path) -> str:
    """What `lockstep report` makes of it."""
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    return (folder / "report.html").read_text()


def test_the_page_goes_where_it_is_wanted_or_is_not_begun(tmp_path: Path) -> None:
    made.write(tmp_path / "run", 1, rows=2)

    def out(path: Path) -> str:
        result = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--out", str(path)])
        assert result.exit_code == (2 if "found" in result.stderr else 0)
        return result.stderr

    assert "it cannot be written: No such file or directory" in out(tmp_path / "no" / "a.html")
    (tmp_path / "link").symlink_to("linked.html")
    out(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "linked.html").read_text().endswith("</html>")
    (tmp_path / "loop").symlink_to("loop")
    assert out(tmp_path / "loop") == ""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    thread = threading.Thread(target=out, args=[tmp_path / "pipe"])
    thread.start()
    text = b""
    while not text.endswith(b"</html>"):
        with contextlib.suppress(BlockingIOError):
            text += os.read(reader, 1 << 16)
    thread.join()
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.html").write_text("before")
    (tmp_path / "full" / "a.html.new").symlink_to("/dev/full")
    assert "No space left on device" in out(tmp_path / "full" / "a.html")
    assert [(p.name, p.read_text()) for p in (tmp_path / "full").iterdir()] == [
        ("a.html", "before")
    ]


def test_stdout_is_written_to_also_where_it_is_a_file(tmp_path: Path, capfd: Any) -> None:
    made.write(tmp_path, 1, rows=2)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--out", "/dev/stdout"])
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.endswith("</html>")


def test_the_page_is_not_the_record(tmp_path: Path) -> None:
    made.write(tmp_path, 1, rows=2)
    (tmp_path / "report.html").touch()
    result = CliRunner().invoke(main, ["report", str(tmp_path / "report.html")])
    assert result.exit_code == 1
    assert f"it is a file\n  do:    give its folder: {tmp_path}\n" in result.stderr


def test_a_run_is_over_where_its_launcher_starts_it_no_more(tmp_path: Path) -> None:
    made.write(tmp_path, rows=2, end="failed")
    assert Record(tmp_path).is_over
    start = {"kind": "start", "time": 0.9e9, "ranks": 2, "command": ["train.py"]}
    failure = {"kind": "failure", "time": 1.1e9, "exit_code": 1}
    told(tmp_path, "a", start)
    assert not Record(tmp_path).is_over
    told(tmp_path, "a", start, failure)
    assert Record(tmp_path).is_over
    told(tmp_path, "a", start, failure, {"kind": "restart", "time": 1.2e9})
    assert not Record(tmp_path).is_over
    made.write(tmp_path, rows=2, number=2)
    assert Record(tmp_path).is_over


def test_two_runs_that_write_into_one_folder_at_a_time(tmp_path: Path) -> None:
    made.write(tmp_path, rows=10)
    made.write(tmp_path, rows=10, began=1e9 + 0.5)
    (finding,) = find(Record(tmp_path))
    assert finding.text == (
        "starts 1 and 2 ran at the same time: give each run a folder of its own"
    )


def test_what_is_not_known_of_a_gpu_is_said(tmp_path: Path) -> None:
    made.write(tmp_path, device="cuda:0")
    (finding,) = find(Record(tmp_path))
    assert finding == Finding("note", finding.text)
    assert "runs ahead of the GPU" in finding.text


def test_scaling_is_against_one_rank(tmp_path: Path) -> None:
    made.write(tmp_path / "one", 1)
    made.write(tmp_path / "four", 4, work=lambda r, s: {p: v / 3 for p, v in made.USUAL.items()})
    one, four = Record(tmp_path / "one"), Record(tmp_path / "four")
    assert scaling(four.starts) == []
    rows = scaling([*one.starts, *four.starts])
    assert [(row.ranks, round(times, 6)) for row, times in rows] == [
        (1, 1.0),
        (4, round((0.112 + 0.013) / (0.112 / 3 + 0.013), 6)),
    ]
    assert working_fraction(four.starts[0]) == pytest.approx(0.112 / 3 / (0.112 / 3 + 0.013))
    assert working_fraction(one.starts[0]) is None
    made.write(tmp_path / "sharded", 2, strategy="fsdp")
    assert working_fraction(Record(tmp_path / "sharded").starts[0]) is None
    found = speed(one.starts[0])
    assert found is not None
    assert (found.steps, found.samples_per_step) == (97, 256.0)
    assert found.samples_per_second == pytest.approx(256 / made.STEP_S)
    assert work_by_rank(one.starts[0])[0] == pytest.approx(0.112)


def test_a_rank_that_has_written_nothing_yet(tmp_path: Path) -> None:
    made.write(tmp_path, 3, rows=0, end=None)
    record = Record(tmp_path)
    assert find(record) == []
    assert (work_by_rank(record.starts[0]), speed(record.starts[0])) == ({}, None)


def full(folder: Path, ranks: int) -> None:
    """A record in which each text is one that a browser must not take for a tag."""
    logged = made.logged(3, {BAD: 1.0}, BAD)
    lines = ({"choices": [[BAD, BAD, BAD]]}, logged, {"warning": BAD, "step": 1, "time": 1.0})
    made.write(folder, ranks, rows=20, end="failed")
    made.write(folder, ranks, number=2, rows=30, lines=lines, host=BAD, command=[BAD, BAD])
    words = "\n".join([BAD] * 20)
    told(folder, "b", {"kind": "finding", "text": words, "host": BAD, "time": 2.0})


def scripts(page: str) -> list[str]:
    return re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)


def chart_data(page: str) -> dict[str, Any]:
    """What the page gives the browser to draw."""
    found: dict[str, Any] = json.loads(scripts(page)[0])
    return found


@pytest.mark.parametrize("ranks", [1, 40])
def test_the_page_holds_all_it_needs_and_no_tag_of_the_runs(ranks: int, tmp_path: Path) -> None:
    full(tmp_path, ranks)
    page = pages(tmp_path)
    assert BAD not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 8
    # The numbers, uPlot and the script of the page; a browser runs the two that have these hashes.
    data, *code = scripts(page)
    assert len(code) == 2
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[0]
    hashes = [hashlib.sha256(script.encode()).digest() for script in code]
    texts_of_hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes]
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src {' '.join(texts_of_hashes)}"
    )
    assert "<" not in data
    assert f"{BAD} ({BAD})" in [curve["title"] for curve in chart_data(page)["curves"]]
    # Nothing is loaded from these; the first is where uPlot comes from.
    addresses = set(re.findall(r"https?://[\w.]+", page))
    assert addresses <= {"https://github.com", "http://www.w3.org"}
    assert "data-refresh-s" not in page.split("<script")[0]
    ids = re.findall(r'\bid="([^"]+)"', page.split("<script")[0])
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    assert used <= set(re.findall(r"--([\w-]+):", page))
    assert {"data", "communication", "line", "text"} <= used
    assert ("No run on one rank to compare with" in page) == (ranks > 1)
    assert page.count("<details><summary>8 more lines") == 1
    assert len(page.encode()) < 3e6


def test_the_numbers_that_are_drawn(tmp_path: Path) -> None:
    lines = []
    for number, (step, value) in enumerate(((2, 0.5), (2, 0.75), (4, math.nan)), 1):
        lines.append(made.logged(step, {"acc": value}, "test", number=number))
    made.write(tmp_path, 2, rows=3, lines=tuple(lines))
    made.write(tmp_path, 2, rows=3, first=2, began=1e9 + 10, work=made.noisy({}))
    data = chart_data(pages(tmp_path))
    curves = {curve["title"]: curve for curve in data["curves"]}
    assert [*curves] == [
        "loss", "acc (test)", "Throughput in samples/s", "Learning rate", "Peak memory of rank 0",
    ]  # fmt: skip
    first, second = curves["loss"]["lines"]
    assert (first["steps"], first["values"][0]) == ([1, 2, 3], 2)
    assert second["steps"] == [3, 4, 5]
    assert first["seconds"] == pytest.approx([0.125, 0.25, 0.375])
    assert second["seconds"][0] == pytest.approx(10.125, abs=0.01)
    # Of two values of one step the later one counts; a value that is no number is a gap.
    (line,) = curves["acc (test)"]["lines"]
    assert (line["steps"], line["values"]) == ([2, 4], [0.75, None])
    assert line["seconds"] == pytest.approx([0.25, 0.375])
    assert data["restarts"] == [2]
    assert data["slow_ranks"]["ranks"] == [0, 1]
    assert data["over_time"]["phases"].keys() == {*made.USUAL, "communication"}


def test_of_many_ranks_those_are_drawn_that_say_most(tmp_path: Path) -> None:
    made.write(tmp_path, 300, rows=4, work=lambda rank, _: {"forward": 0.01 + 0.0001 * rank})
    (start,) = Record(tmp_path).starts
    assert [bar["rank"] for bar in charts.bars_by_rank(start)] == [*range(236, 300)]
    shown = charts.slow_ranks(start)
    assert shown is not None
    left_out = set(range(300)) - set(shown["ranks"])
    assert len(shown["ranks"]) == 256
    assert left_out <= set(range(120, 180))  # those near the median
    assert "the table has all" in pages(tmp_path)


def test_uplot_is_the_file_of_its_makers() -> None:
    """`web/uplot/README.md` says which package of npm's its files are from."""
    folder = WEB_FOLDER / "uplot"
    said = (folder / "README.md").read_text()
    for path in folder.iterdir():
        if path.name != "README.md":
            assert f"`{path.name}` {hashlib.sha256(path.read_bytes()).hexdigest()}" in said
    assert "MIT" in (folder / "LICENSE").read_text()
    version = re.findall(r"uplot@([\d.]+)", said)[0]
    assert f"uPlot (v{version})" in (folder / "uPlot.iife.min.js").read_text()[:80]


def test_what_was_run_is_told(tmp_path: Path) -> None:
    git = {"commit": "7ab7c185" * 5, "branch": "main", "changed": ["a.py"], "num_changed": 1}
    command = ["/home/me/train.py", "--lr", "-0.1", "--deep", "--size=8", "model.width=9", "data"]
    about = {"seed": 7, "precision": "bf16", "git": git, "command": command}
    about |= {"device": "cuda:0", "device_name": "H100"}
    choices = {"choices": [["bucket", "25 MiB", "x"]]}
    made.write(tmp_path, 9, rows=9, lines=(choices,), **about)
    facts = run_facts(Record(tmp_path).starts[0])
    assert facts == [
        ("script", "/home/me/train.py", ""),
        ("--lr", "-0.1", ""),
        ("--deep", "", ""),
        ("--size", "8", ""),
        ("model.width", "9", ""),
        ("argument", "data", ""),
        ("seed", "7", ""),
        ("precision", "bf16", ""),
        ("git commit", "7ab7c1857ab7 (main), with 1 changed file", "a.py"),
        ("host", "node1: ranks 0-7", "8 × H100"),
        ("host", "node2: rank 8", "H100"),
        ("bucket", "25 MiB", "x"),
        ("torch", "2.13.0", ""),
    ]
    assert "7ab7c1857ab7 (main), with 1 changed file" in pages(tmp_path)
    made.write(tmp_path / "cpu", 2, rows=2, device_name="EPYC")
    assert ("host", "node1: ranks 0-1", "EPYC") in run_facts(Record(tmp_path / "cpu").starts[0])

    # Rank 0 is on the CPU, and the others are on GPUs.
    about = {"device": "cuda:0", "device_name": "H100"}
    made.write(tmp_path / "both", 3, rows=2, **about)
    [first] = (tmp_path / "both").glob("*.rank0.record")
    text = first.read_text().replace('"cuda:0"', '"cpu"').replace("H100", "EPYC")
    first.write_text(text)
    host = ("host", "node1: ranks 0-2", "EPYC, 2 × H100")
    assert host in run_facts(Record(tmp_path / "both").starts[0])


def test_two_runs_are_compared(tmp_path: Path) -> None:
    made.write(tmp_path / "a", 2, command=["/x/train.py", "--lr", "0.1"])
    slow = {**made.USUAL, "data": 0.06}
    made.write(tmp_path / "b", 2, rows=50, work=lambda *_: slow, command=["/y/train.py"])
    made.write(tmp_path / "c" / "a", 2, rows=0, end="failed")
    records = [Record(tmp_path / "a"), Record(tmp_path / "b")]
    found = comparison.compare(records)
    assert found.names == ["a", "b"]
    assert found.sentences == [
        "a trains 1.4 times as fast as b: 2 048 against 1 463 samples/s. Most of the difference "
        "is in data, where a needs 50 ms less a step.",
        "At step 50 the loss of a is 0.2828, that of b 0.2828.",
    ]
    rows = dict(found.rows)
    assert rows["Last step"] == ["100", "50"]
    assert rows["What to look at"] == [
        "nothing stands out",
        "all ranks wait for data for 34% of the time",
    ]
    assert found.differing == [("--lr", ["0.1", "–"])]
    same = comparison.compare([records[0], records[0]])
    assert same.sentences[0].endswith("train as fast as each other.")
    assert len(set(same.names)) == 2
    assert same.differing == []
    # A run without a step has nothing to compare but its end.
    found = comparison.compare([records[0], Record(tmp_path / "c" / "a")])
    assert (found.sentences, len(set(found.names))) == ([], 2)
    assert dict(found.rows)["Last step"] == ["100", "–"]


def change_rows(folder: Path, change: Any) -> None:
    """Changes all rows of a record."""
    for path in folder.glob("*.record"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if isinstance(line, list):
                change(line)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_without_samples_and_rows_of_several_steps_are_compared(tmp_path: Path) -> None:
    def no_samples(row: list[Any]) -> None:
        row[COLUMNS.index("samples")] = 0

    def two_steps(row: list[Any]) -> None:
        row[:2] = [2 * row[0], 2]

    for name in ("a", "b"):
        made.write(tmp_path / name, 2, rows=50)
        change_rows(tmp_path / name, no_samples)
    found = comparison.compare([Record(tmp_path / "a"), Record(tmp_path / "b")])
    assert found.sentences == [
        "A step of a takes 125 ms, one of b 125 ms. How many samples they have is not known without"
        " a prepared loader.",
        "At step 50 the loss of a is 0.2828, that of b 0.2828.",
    ]
    assert "Samples/s" not in dict(found.rows)
    page = pages(tmp_path / "a")
    assert "samples/s" not in page
    change_rows(tmp_path / "b", two_steps)
    assert len(comparison.compare([Record(tmp_path / "a"), Record(tmp_path / "b")]).sentences) == 1
    change_rows(tmp_path / "a", two_steps)
    found = comparison.compare([Record(tmp_path / "a"), Record(tmp_path / "b")])
    assert found.sentences[1] == (
        "In steps 99 to 100 the mean loss of a is 0.2828, that of b 0.2828."
    )


def test_one_page_of_several_runs(tmp_path: Path) -> None:
    made.write(tmp_path / "one", 1, rows=40)
    made.write(tmp_path / "two", 2, rows=50)
    folders = [str(tmp_path / "two"), str(tmp_path / "one")]
    result = CliRunner().invoke(main, ["report", *folders])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "two" / "report.html").read_text()
    assert "Compared runs" in page
    assert "Times one rank" in page
    data = chart_data(page)
    assert data["run_names"] == ["two", "one"]
    (loss,) = [curve for curve in data["curves"] if curve["title"] == "loss"]
    assert [(line["name"], len(line["steps"])) for line in loss["lines"]] == [
        ("two", 50),
        ("one", 40),
    ]
    result = CliRunner().invoke(main, ["report", *folders, "--to", "tensorboard"])
    assert result.exit_code == 2
    assert "it writes the curves of one run" in result.stderr


def test_the_page_in_chinese(tmp_path: Path, monkeypatch: Any) -> None:
    """What is found, what to do and the page's own words; names of the user's stay."""
    logged = made.logged(3, {"Memory": 1.0}, "Failed")
    work = made.noisy({1: ("data", 0.05)})
    choices = {"choices": [["network", "CPU tensors", "through shared memory"],
                           ["BatchNorm", "1 synchronised", ""]]}  # fmt: skip
    made.write(tmp_path / "a", 2, rows=100, work=work, loss=lambda s: math.inf if s > 80 else 1.0,
               lines=(logged, choices), end="failed", command=["a.py", "gradients=device", "data"],
               )  # fmt: skip
    made.write(tmp_path / "b", 2, rows=50)
    for module in (language, page):
        monkeypatch.setattr(module, "language", lambda: "zh")
    text = page.render(Record(tmp_path / "a"), [Record(tmp_path / "b")])
    assert '<html lang="zh">' in text
    assert "loss 从第 82 步起变成 NaN 或 inf" in text
    assert "第 82 步：inf" in text
    assert "node1 上的 rank 1 是慢 rank：" in text
    assert "增大 num_workers 也许能掩盖差别。" in text
    assert "差别主要在 communication 阶段" in text or "差别主要在 data 阶段" in text
    visible = re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)
    visible = visible.replace(str(tmp_path), "")
    words = set(re.findall(r"\b(?:the|of|and|with|is|are|was|on)\b", visible))
    assert words == set(), "a text of the page is not translated"
    titles = [curve["title"] for curve in chart_data(text)["curves"]]
    assert titles[:3] == ["loss", "Memory (Failed)", "吞吐量（样本/秒）"]

    # What was run: an argument of the script keeps its words, which are words of ours too.
    rows = re.findall(
        r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td class="soft">(.*?)</td>', text
    )
    assert rows[:3] == [("脚本", "a.py", ""), ("gradients", "device", ""), ("参数", "data", "")]
    assert ("网络", "CPU 张量", "经由共享内存") in rows
    assert ("BatchNorm", "1 层，已同步", "") in rows


def test_a_file_of_the_user_keeps_its_name_on_the_chinese_page(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Files may be called by words that are messages of Lockstep, such as `data` and `host`."""
    git = {"commit": "7ab7c185" * 5, "changed": ["data"], "num_changed": 1}
    made.write(tmp_path, 2, rows=2, command=["data", "host"], git=git)
    monkeypatch.setattr(language, "language", lambda: "zh")
    assert language.translate("data") == "数据"
    assert language.translate("host") != "host"
    rows = re.findall(
        r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td class="soft">(.*?)</td>', pages(tmp_path)
    )
    assert ("脚本", "data", "") in rows
    assert ("参数", "host", "") in rows
    [reason_of_commit] = [reason for _, value, reason in rows if value.startswith("7ab7c185")]
    assert reason_of_commit == "data"


def test_how_busy_the_gpus_were(tmp_path: Path) -> None:
    made.write(tmp_path, 2, rows=10, device="cuda:0")
    for rank, uses in ((0, (90, 80)), (1, (50, 40))):
        (file,) = tmp_path.glob(f"*.rank{rank}.record")
        with open(file, "a") as more:
            for index, use in enumerate(uses):
                line = {"gpu": use, "gpu_memory": 2**30, "step": 4 + 4 * index + rank, "at": 0.5}
                more.write(json.dumps(line) + "\n")
    page = pages(tmp_path)
    assert "<dt>GPU use</dt><dd>65 %, rank 1 45 %</dd>" in page
    curves = {curve["title"]: curve for curve in chart_data(page)["curves"]}
    (line,) = curves["GPU use, mean over ranks"]["lines"]
    assert (line["steps"], line["values"]) == ([4, 8], [70, 61.25])
    assert curves["GPU memory in use, mean over ranks"]["unit"] == "bytes"


def test_names_that_are_no_formulas_and_no_text(tmp_path: Path) -> None:
    line = made.logged(2, {"$^$x": 0.5})
    later = made.logged(5, {"$^$x": 0.25, "a\udcff": 1.0, "\U0001f600": math.nan})
    folder = tmp_path / os.fsdecode(b"\xff")
    made.write(folder, 1, rows=9, lines=(line, later), command=["train.py", "b\udcff"])
    text = pages(folder)
    for name in ("$^$x", "a?", "b?", "\\udcff"):
        assert name in text
    assert {"a? (evaluation)", "$^$x (evaluation)"} <= {
        curve["title"] for curve in chart_data(text)["curves"]
    }
    names = {scalar.name for scalar in scalars(Record(folder).starts[0])}
    assert names >= {"evaluation/$^$x", "evaluation/a?", "evaluation/\U0001f600"}


def test_bytes_that_torch_sends_are_not_told_as_none(tmp_path: Path) -> None:
    for strategy, ranks, known in (("ddp", 2, True), ("fsdp", 2, False), ("fsdp", 1, True)):
        folder = tmp_path / f"{strategy}{ranks}"
        made.write(folder, ranks, rows=9, strategy=strategy)
        assert ("not known, as torch sends it" in pages(folder)) != known


def test_lines_that_are_not_understood_hide_nothing_else(tmp_path: Path) -> None:
    row = [1.0] * len(COLUMNS)
    logged = made.logged(1, {"acc": 0.5})
    found = {"kind": "finding", "text": "slow", "time": 1e9, "host": "node1"}
    stray = (
        [1, 2], ["a"] * len(row), [None, *row[1:]], [1.0, 0, *row[2:]], [10**400, *row[1:]], 7,
        {}, "the end", {"record": FORMAT_VERSION}, {"record": "x"}, {"choices": [["a", "b"]]},
        {"choices": 1},
        {"logged": {}}, logged | {"logged": {"acc": None}}, logged | {"logged": ["acc"]},
        logged | {"pass": None}, logged | {"weights": {"acc": 0}}, {"warning": "w"},
        {"warning": {}, "step": 1}, {"end": []},
    )  # fmt: skip
    made.write(tmp_path, 2, rows=9, lines=stray)
    of_launcher = ({"kind": "finding"}, [1], found | {"kind": []}, found | {"time": math.inf},
                   found | {"text": 1}, found | {"kind": "start"})  # fmt: skip
    launcher = tmp_path / f"{10**18:020d}-aaaa.launcher-node1.record"
    launcher.write_text("".join(json.dumps(line) + "\n" for line in of_launcher) + "no json\n")
    (tmp_path / "copy.rank0.record").write_text("[1]\n" + "[" * 10**5 + "\n")
    record = Record(tmp_path)
    unread = len(stray) + len(of_launcher) + 3
    assert record.num_unread_lines == unread
    assert [len(r.rows) for r in record.starts[0].records.values()] == [9, 9]
    assert f"not understood: {unread} lines of the files" in pages(tmp_path)
    told(tmp_path, "a", {"kind": "finding", "time": 1e9})  # without a word
    assert ("warning", "") in [finding[:2] for finding in find(Record(tmp_path))]


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_no_loss_is_told_of_fewer_ranks_than_count(kept: int | None, tmp_path: Path) -> None:
    made.write(tmp_path, 2, rows=9)
    file = next(tmp_path.glob("*.rank1.record"))
    lines = file.read_text().splitlines(keepends=True)[:kept]
    file.unlink() if kept is None else file.write_text("".join(lines))
    record = Record(tmp_path)
    steps, losses = record.starts[0].loss()
    assert len(steps) == len(losses) == 0
    unknown = "the loss is not known"
    if kept != 1:  # the first line is missing too
        unknown = "neither the loss nor what world.log was given is known"
    words = f"note: no steps of rank 1 are in the folder; without them {unknown}"
    assert words in texts(record)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    made.write(tmp_path, rows=2)
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--to", "wandb"])
    assert result.exit_code == 2
    assert "wandb is not installed" in result.stderr


def test_the_live_page_grows_with_the_run_and_is_for_this_machine_alone(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from lockstep.extensions.report import live

    now = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        live,
        "render",
        lambda record, others, refresh_s: (
            f"{[len(each.starts[0].main.rows) for each in (record, *others)]} every {refresh_s} s"
        ),
    )
    made.write(tmp_path, 1, rows=10, end=None)
    made.write(tmp_path / "other", 1, rows=5, end=None)
    server = live.make_server(live.LivePage(Record(tmp_path), [Record(tmp_path / "other")]))
    server.daemon_threads = False  # closing it waits for what they have to say
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    tags: list[str] = []

    def get(path: str = "/", host: str = "localhost:80", tag: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=600)
        connection.request("GET", path, headers={"Host": host, "If-None-Match": tag})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        tags.append(answer.getheader("ETag", ""))
        return answer.status, text

    try:
        assert server.server_address[0] == "127.0.0.1"
        assert get() == (200, "[10, 5] every 5.0 s")
        made.write(tmp_path, 1, rows=20, end=None)
        assert get() == (200, "[10, 5] every 5.0 s")  # drawn a moment ago
        assert get(tag=tags[-1]) == (304, "")
        now[0] = 60.0
        made.write(tmp_path / "other", 1, rows=7, end=None)
        assert get(tag=tags[-1]) == (200, "[20, 7] every 5.0 s")
        monkeypatch.setattr(live, "render", lambda *_, **__: "nothing new")
        now[0] = 100.0
        assert get() == (200, "[20, 7] every 5.0 s")
        now[0] = 120.0
        assert get() == (200, "nothing new")
        assert get("/etc/passwd")[0] == 404
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]", "[::1]:80"):
            assert get(host=host)[0] == 200
        with socket.create_connection(server.server_address[:2]) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(b"GET / HTTP/1.0\r\n")
        assert get() == (200, "nothing new")
        for host in ("evil.example:80", "localhost.evil.example", "a@localhost", "[::1", ""):
            assert get(host=host)[0] == 403
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "Traceback" not in capsys.readouterr().err
    with live.make_server(live.LivePage(Record(tmp_path))) as taken:
        port = str(taken.server_port)
        result = CliRunner().invoke(main, ["report", str(tmp_path), "--live", "--port", port])
    assert result.exit_code == 2
    assert f"--port {port}" in result.stderr


def test_a_ledger_is_judged_again_where_it_has_grown(tmp_path: Path, monkeypatch: Any) -> None:
    judged: list[Path] = []
    report = SimpleNamespace(lines=lambda _: ["all is well", "a note"])
    monkeypatch.setattr(ledger_judge, "judge", lambda folder: judged.append(folder) or report)
    made.write(tmp_path, 1, rows=2, ledger="/on/another/machine")
    rows = tmp_path / "1-a.rank0.ledger"
    rows.write_bytes(b"1")
    record = Record(tmp_path)
    assert [ledger_text(record) for _ in range(2)] == ["all is well\na note"] * 2
    assert judged == [tmp_path]
    (tmp_path / "1-a.rank0.record").write_bytes(b"")  # another file may grow
    ledger_text(record)
    assert len(judged) == 1
    rows.write_bytes(b"12")
    ledger_text(record)
    assert len(judged) == 2


def test_a_finding_of_the_ledger_is_clean_in_both_of_its_lines(
    tmp_path: Path, monkeypatch: Any
) -> None:
    report = SimpleNamespace(lines=lambda _: ["all \x1b[2J", "sample \x1b[2J\n  more:  \x1b[2J"])
    monkeypatch.setattr(ledger_judge, "judge", lambda _: report)
    made.write(tmp_path, 1, rows=2, ledger="/on/another/machine")
    assert ledger_text(Record(tmp_path)) == "all ?[2J\nsample ?[2J\n  more:  ?[2J"


def test_the_same_values_go_to_a_tracker(tmp_path: Path, monkeypatch: Any) -> None:
    lines = (
        made.logged(2, {"acc": 0.5}),
        made.logged(2, {"acc": 0.25}, "epoch 1", number=2),
        made.logged(2, {"acc": 0.5}, "test", loader=1),
    )
    made.write(tmp_path, 2, rows=2, lines=lines)
    record = Record(tmp_path)
    values = [(s.step, s.name, s.value) for s in scalars(record.starts[0])]
    assert (1, "loss", pytest.approx(2.0)) in values
    assert (2, "learning_rate", pytest.approx(0.099)) in values
    assert (2, "samples_per_second", pytest.approx(256 / made.STEP_S)) in values
    assert [value for _, name, value in values if name == "evaluation/acc"] == [0.5, 0.25]
    assert (2, "test/acc", 0.5) in values
    sent: list[dict[str, Any]] = []
    run = SimpleNamespace(
        log=sent.append, define_metric=lambda *_, **__: None, finish=lambda: sent.append({})
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--to", "wandb", "--live"])
    assert result.output == f"{len(values)} values written through wandb\n"
    assert sent == [*({name: value, "step": step} for step, name, value in values), {}]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made.write(tmp_path, 2, rows=5)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--to", "tensorboard"])
    assert result.exit_code == 0, result.output
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]

"""What the ranks write down of their steps, and how it is read."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import signal
import subprocess
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import mlp, tensors
from ranks import RankFailed, run_ranks
from torch.utils.data import Dataset

import lockstep
from lockstep.communication import traffic
from lockstep.distributed import rank_files
from lockstep.errors import CheckpointError, LockstepWarning, SettingError
from lockstep.extensions.report import phase_times, record as writing
from lockstep.extensions.report.reading import Record
from lockstep.extensions.report.record_format import COLUMN_INDEX, COLUMNS
from lockstep.extensions.report.source_code import describe_commit
from lockstep.session.extension import PHASES

pytestmark = pytest.mark.ranks

SAMPLES, BATCH = 20, 4


def train(folder: Path, epochs: int, kill_after: int = 0) -> list[float]:
    """The losses of the global batches."""
    losses = []
    writing.WRITE_INTERVAL_S = 0.0 if kill_after else 1.0
    with lockstep.init(seed=1, report=folder) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(SAMPLES), BATCH, shuffle=True, micro_batch_size=1)
        for epoch in world.epochs(epochs):
            for x, y in world.progress(loader, f"epoch {epoch}"):
                loss = F.cross_entropy(model(x), y)
                world.backward(loss)
                world.log(loss=loss)
                found = world.loss()
                optimizer.step()
                optimizer.zero_grad()
                losses += [] if found is None else [found]
                if kill_after and world.step == kill_after and world.rank == world.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    return losses


@pytest.mark.parametrize("size", [2, 3])
def test_the_record_of_several_ranks(size: int, tmp_path: Path) -> None:
    losses, *_ = run_ranks(train, size, tmp_path, 2)
    record = Record(tmp_path)
    (start,) = record.starts
    assert (start.num_ranks, sorted(start.records), start.end) == (size, list(range(size)), "ok")
    steps, recorded = start.loss()
    assert steps.tolist() == list(range(1, 11))
    np.testing.assert_allclose(recorded, losses, rtol=1e-5)
    for rank, of_rank in start.records.items():
        assert of_rank.header["rank"] == rank
        assert of_rank.column("samples").tolist() == [BATCH] * 10
        assert set(of_rank.column("learning_rate")) == {0.5}
        assert of_rank.column("memory").min() > 0
        assert (of_rank.seconds() > 0).all()
        assert sum(of_rank.column("communication")) > 0
        # What lies between two rows was spent on one phase or another.
        np.testing.assert_allclose(of_rank.seconds()[1:], np.diff(of_rank.column("at")), atol=1e-4)
    main = start.main
    assert ["strategy", "ddp"] in [choice[:2] for choice in main.choices]
    for of_rank in start.records.values():
        complete = [told for told in of_rank.logged if told["complete"]]
        places = [(told["pass"], told["step"]) for told in complete]
        assert places == [("epoch 0", 5), ("epoch 1", 10)]
    means = [(mean.step, mean.title, mean.weight) for mean in start.logged]
    # After the last step of an epoch there is the mean of the whole pass.
    assert means == [(step, "loss (training)", BATCH * (step - 5 * (step > 5))) for step in steps]
    assert start.logged[9].mean == pytest.approx(np.mean(losses[5:]), rel=1e-6)


def test_a_rank_that_is_killed_leaves_what_it_had_written(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_ranks(train, 2, tmp_path, 2, 7)
    train(tmp_path, 1)
    killed, whole = Record(tmp_path).starts
    assert (killed.num_ranks, killed.end, killed.records[1].end) == (2, "failed", None)
    assert killed.records[1].column("step").tolist() == list(range(1, 8))
    assert (whole.num_ranks, whole.end) == (1, "ok")
    assert whole.time > killed.time


def test_it_is_read_while_it_grows_and_where_it_was_cut_off(tmp_path: Path) -> None:
    train(tmp_path, 1)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    at = data.index(b"\n[4,") + 10
    file.write_bytes(data[:at])
    record = Record(tmp_path)
    assert record.starts[0].main.column("step").tolist() == [1, 2, 3]
    assert not record.refresh()
    with open(file, "ab") as more:
        more.write(data[at:])
    assert record.refresh()
    assert record.starts[0].main.column("step").tolist() == [1, 2, 3, 4, 5]
    assert record.starts[0].end == "ok"


@pytest.mark.parametrize("stacked", [False, True])
def test_rows_of_a_long_run_are_of_ever_more_steps(
    stacked: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The losses of a row are read one by one, or summed up by torch, some at a time."""
    monkeypatch.setattr(writing, "ROWS_BEFORE_DOUBLING", 4)
    if stacked:
        monkeypatch.setattr(writing, "MIN_STACKED_LOSSES", 2)
        monkeypatch.setattr(writing, "MAX_KEPT_LOSSES", 3)
    losses = train(tmp_path, 8)
    main = Record(tmp_path).starts[0].main
    steps = main.column("steps").tolist()
    assert steps == [1] * 4 + [2] * 4 + [4] * 4 + [8] + [4]
    assert main.column("step").tolist() == np.cumsum(steps).tolist()
    assert main.column("samples").sum() == 8 * SAMPLES
    means = [
        np.mean(part) for part in np.split(np.array(losses), np.cumsum(steps)[:-1].astype(int))
    ]
    np.testing.assert_allclose(main.column("loss"), means, rtol=1e-5)


class Clock:
    """Stands still unless it is put forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Slow(Dataset[Any]):
    def __init__(self, clock: Clock) -> None:
        self._clock, self._data = clock, tensors(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self._clock.now += 1.0
        return self._data[index]


def test_where_the_time_of_a_step_goes(tmp_path: Path, monkeypatch: Any) -> None:
    clock = Clock()
    for module in (writing, phase_times, traffic):
        monkeypatch.setattr(module, "time", clock)

    def take(seconds: float) -> Any:
        clock.now += seconds

    with lockstep.init(seed=1, report=tmp_path) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.register_step_pre_hook(lambda *_: take(64.0))
        take(1000.0)  # before the first batch: of no step
        (
            model,
            optimizer,
        ) = world.prepare(model, optimizer)
        train_set = world.loader(Slow(clock), BATCH)
        test_set = world.loader(Slow(clock), BATCH)
        state_dict = type(world).state_dict
        checkpoint = world.checkpoint(tmp_path / "saved", model=model, asynchronous=False)
        monkeypatch.setattr(
            type(world),
            "state_dict",
            lambda _: take(512.0) or state_dict(world),
        )
        for number, (x, y) in enumerate(train_set):
            take(8.0)
            output = model(x)
            output.register_hook(lambda _: take(16.0))
            world.backward(F.cross_entropy(output, y))
            if number == 1:
                traffic.traffic.block(lambda: take(32.0))
            optimizer.step()
            take(128.0)
            if number == 2:
                with torch.no_grad():
                    for _ in test_set:
                        take(256.0)
            if number == 3:
                checkpoint.save()
    main = Record(tmp_path).starts[0].main
    found = {phase: main.column(phase).tolist() for phase in PHASES}
    # The last step is followed by nothing; what follows another is in the row of the next.
    assert found == {
        "data": [4.0] * 5,
        "forward": [8.0] * 5,
        "backward": [16.0] * 5,
        "communication": [0.0, 32.0, 0.0, 0.0, 0.0],
        "optimizer": [64.0] * 5,
        "checkpoint": [0.0, 0.0, 0.0, 0.0, 512.0],
        "evaluation": [0.0, 0.0, 0.0, 5 * 256.0 + SAMPLES, 0.0],
        "other": [0.0, 128.0, 128.0, 128.0, 128.0],
    }
    assert main.column("longest_s").tolist()[3] == sum(found[phase][3] for phase in PHASES)


def git(folder: Path, *arguments: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True)


def test_which_commit_was_run(tmp_path: Path) -> None:
    assert describe_commit(str(tmp_path / "none.py")) != {}  # of the present folder, if any
    script = tmp_path / "code" / "train a.py"
    script.parent.mkdir()
    script.touch()
    assert describe_commit(str(script)) is None
    git(tmp_path, "init", "-b", "main")
    assert describe_commit(str(script)) is None  # there is no commit yet
    for number in range(12):
        (script.parent / f"{number}.py").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    found = describe_commit(str(script))
    assert found is not None
    assert len(found["commit"]) == 40
    assert (found["branch"], found["num_changed"], found["changed"]) == ("main", 0, [])
    script.write_text("x")
    git(tmp_path, "mv", "code/0.py", "code/moved.py")
    (tmp_path / "new.py").touch()
    git(tmp_path, "checkout", "--detach")
    found = describe_commit(str(script))
    assert found is not None
    assert found["branch"] == ""
    assert found["changed"] == ["code/moved.py", "code/train a.py"]
    for number in range(1, 12):
        (script.parent / f"{number}.py").write_text("x")
    found = describe_commit(str(script))
    assert found is not None
    assert (found["num_changed"], len(found["changed"])) == (13, 8)


def test_a_run_needs_no_git(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert describe_commit(__file__) is None


def test_the_first_line_says_what_was_run_and_nothing_secret(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1", "--token", "abc"])
    with lockstep.init(report=tmp_path, seed=3, precision="bf16"):
        pass
    (file,) = tmp_path.iterdir()
    header = Record(tmp_path).starts[0].main.header
    assert header["command"] == ["train.py", "--lr", "0.1", "--token", "***"]
    assert (header["seed"], header["precision"]) == (3, "bf16")
    assert header["device_name"]
    assert "abc" not in file.read_text()


def test_the_use_of_a_gpu_is_asked_for_ever_less_often(tmp_path: Path, monkeypatch: Any) -> None:
    """With a GPU that is made up: its answers come from here, and its errors too."""
    monkeypatch.setattr(writing, "GPU_INTERVAL_S", 0.0)
    answers = iter([90, 80, 70])
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: next(answers))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: 2**30)
    with lockstep.init(report=tmp_path) as world:
        recorder = world._run.step.extensions.of_type(writing.Recorder)
        recorder._measures_gpu = True
        monkeypatch.setattr(writing, "MEASUREMENTS_BEFORE_DOUBLING", 2)
        recorder._gpu_interval_s = 1.0
        for now_s in (1.0, 2.0, 3.0, 4.0):  # the fourth answer is an error
            recorder._note_gpu_use(int(now_s), now_s)
        assert (recorder._gpu_interval_s, recorder._measures_gpu) == (2.0, False)
    uses = Record(tmp_path).starts[0].main.gpu_uses
    assert [(use["gpu"], use["gpu_memory"], use["step"]) for use in uses] == [
        (90, 2**30, 2), (80, 2**30, 3), (70, 2**30, 4),
    ]  # fmt: skip


def names_in(trace: Path) -> set[str]:
    """The names of what was traced."""
    with gzip.open(trace, "rt") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def train_and_trace(folder: Path, traced_step: int) -> None:
    with lockstep.init(seed=1, report=folder, trace_step=traced_step) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(SAMPLES), BATCH)
        number = 0
        for _ in world.epochs(2):
            for x, y in loader:
                number += 1
                with torch.profiler.record_function(f"user's step {number}"):
                    world.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad(), torch.profiler.record_function("user's evaluation"):
                for x, _y in loader:
                    model(x)


def test_one_step_is_traced_on_every_rank(tmp_path: Path) -> None:
    run_ranks(train_and_trace, 2, tmp_path, 2)
    records = Record(tmp_path).starts[0].records
    for rank in (0, 1):
        (line,) = records[rank].traces
        assert line["trace"].endswith(f".rank{rank}.step2.trace.json.gz")
        names = names_in(tmp_path / line["trace"])
        assert "user's step 2" in names
        assert not {"user's step 1", "user's step 3"} & names
        assert {"data", "forward", "backward", "optimizer", "aten::addmm"} <= names


def test_the_first_step_the_last_and_one_that_never_comes(tmp_path: Path) -> None:
    """A loader ends after step 5, and an evaluation follows that belongs to no step."""
    for step in (1, 5, 6, 10):
        folder = tmp_path / str(step)
        train_and_trace(folder, step)
        (line,) = Record(folder).starts[0].main.traces
        names = names_in(folder / line["trace"])
        found = {name for name in names if str(name).startswith("user's")}
        assert found == {f"user's step {step}"}
    with pytest.warns(LockstepWarning, match="(?s)trace_step=11.*ended after step 10"):
        train_and_trace(tmp_path / "11", 11)
    assert Record(tmp_path / "11").starts[0].main.traces == []
    with pytest.raises(SettingError, match="trace_step=6 without report"):
        lockstep.init(trace_step=6)


def train_to_the_traced_step(folder: Path, loop: str) -> list[str]:
    """Traces the last step of a script, and returns the warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with lockstep.init(seed=1, report=folder / loop, trace_step=2) as world:
            model: Any = mlp()
            model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            (x, y) = next(iter(torch.utils.data.DataLoader(tensors(SAMPLES), BATCH)))
            batches: Any = [(x, y), (x, y)]
            if loop == "break":
                batches = world.loader(tensors(SAMPLES), BATCH)
            profiled: Any = torch.profiler.profile() if loop == "profiled" else nullcontext()
            with profiled:
                for x, y in batches:
                    world.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    if world.step == 2:
                        break
    return [str(warning.message) for warning in warned if warning.category is LockstepWarning]


def test_a_traced_step_may_be_the_last_and_is_left_to_the_scripts_own_profiler(
    tmp_path: Path,
) -> None:
    for loop in ("break", "no loader", "profiled"):
        warned = train_to_the_traced_step(tmp_path, loop)
        traces = Record(tmp_path / loop).starts[0].main.traces
        if loop == "profiled":
            assert traces == []
            assert ["a profiler of the script's own" in text for text in warned] == [True]
            continue
        assert warned == []
        assert "backward" in names_in(tmp_path / loop / traces[0]["trace"])


def test_warnings_are_in_it(tmp_path: Path) -> None:
    from lockstep import errors

    with lockstep.init(report=tmp_path), pytest.warns(LockstepWarning):
        errors.warn("x=1", found="it is <b>odd</b>", do="choose another")
    assert errors.on_warning == []
    (warning,) = Record(tmp_path).starts[0].main.warnings
    assert "it is <b>odd</b>" in warning["warning"]


def test_rows_are_json_of_seven_digits() -> None:
    """Whole numbers have all digits."""
    row: list[Any] = [0] * len(COLUMNS)
    row[COLUMN_INDEX["memory"]] = 2**40 + 1
    row[COLUMN_INDEX["sent"]] = 10**18 + 1
    loss = COLUMN_INDEX["loss"]
    for value, told in ((1 / 3, 0.3333333), (1.5e-9, 1.5e-9), (1e300, 1e300)):
        row[loss] = value
        assert json.loads(writing.line_as_json(row)) == [*row[:loss], told, *row[loss + 1 :]]
    for value in (None, math.nan, math.inf, -math.inf):
        row[loss] = value
        read = json.loads(writing.line_as_json(row))[loss]
        assert read is value or str(read) == str(value)


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: Any) -> None:
    class FullDisk(io.FileIO):
        """A file on a disk that has no space for the third row."""

        def write(self, data: Any) -> int:
            if any(line.startswith(b"[3,") for line in bytes(data).splitlines()):
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(rank_files.io, "FileIO", FullDisk)
    with pytest.warns(LockstepWarning, match="(?s)No space left on device.*its record ends here"):
        assert len(train(tmp_path, 1, kill_after=99)) == 5
    assert Record(tmp_path).starts[0].main.column("step").tolist() == [1, 2]


def refused(folder: str) -> str:
    with pytest.raises(SettingError) as caught:
        lockstep.init(report=folder)
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_said_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in run_ranks(refused, 2, str(tmp_path / "file")):
        assert "it cannot be written: rank 0" in said
        assert "leave the report out" in said


def test_there_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder holds none"):
        Record(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        Record(tmp_path / "no")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1-a.rank0.record").touch()
    with pytest.raises(CheckpointError, match=r"give one of the folders in it .*: a, b"):
        Record(tmp_path)
    (start,) = Record(tmp_path / "a").starts
    assert (start.num_ranks, start.end, start.main.rows) == (1, None, [])
    header = {"ranks": 1, "time": 1.0, "host": "node", "command": []}
    for version in (1, 3):
        line = json.dumps({"record": version, **header})
        (tmp_path / "1-a.rank0.record").write_text(f"{line}\n")
        with pytest.raises(CheckpointError, match=f"is of version {version}, and 2 is read"):
            Record(tmp_path)

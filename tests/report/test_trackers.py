"""What a run has logged is read back from the trackers: TensorBoard, Weights & Biases, MLflow.

They are in the extra `trackers`; a test is skipped where its library is not installed.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import mean_loss, mlp, tensors
from ranks import run_ranks

import lockstep
from lockstep.extensions.report import trackers
from lockstep.extensions.report.reading import Record
from lockstep.extensions.report.trackers import write

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]


def train(folder: Path) -> list[dict[str, float]]:
    """Returns the means of each epoch, in training and in validation."""
    told = []
    with lockstep.init(seed=1, report=folder) as world:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        loader = world.loader(tensors(20), 4)
        validation = world.loader(tensors(7), 4)
        for _ in world.epochs(2):
            for batch in loader:
                loss = mean_loss(model, batch)
                world.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                world.log(loss=loss)
            of_training = world.means()["loss"]
            with torch.no_grad():
                for x, y in validation:
                    world.log(accuracy=(model(x).argmax(1) == y).double().mean())
            accuracy = world.means()["accuracy"]
            world.log(score=accuracy)
            told.append({"training/loss": of_training, "evaluation/accuracy": accuracy})
            told[-1]["score"] = accuracy
    return told


@pytest.fixture
def record(tmp_path: Path) -> tuple[Record, list[dict[str, float]]]:
    told, _ = run_ranks(train, 2, tmp_path / "run")
    return Record(tmp_path / "run"), told


def check(found: dict[str, dict[int, float]], told: list[dict[str, float]]) -> None:
    """Compares curves, as value by step, with what the script was told after 5 and 10 steps."""
    for epoch, values in enumerate(told):
        for name, value in values.items():
            assert found[name][5 * (epoch + 1)] == pytest.approx(value), (name, epoch)
    assert sorted(found["loss"]) == list(range(1, 11))


def test_tensorboard(record: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    of_run, told = record
    write(of_run, "tensorboard")
    events = EventAccumulator(str(of_run.folder / "tensorboard"))
    events.Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        found[name] = {event.step: event.value for event in events.Scalars(name)}
    check(found, told)


def test_mlflow(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    of_run, told = record
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (of_run.folder / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "lockstep")
    write(of_run, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("lockstep")
    [run] = client.search_runs([experiment.experiment_id])
    found = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        found[name] = {metric.step: metric.value for metric in history}
    check(found, told)
    assert run.info.status == "FINISHED"
    assert run.data.params["strategy"] == "ddp"


def test_mlflow_takes_the_id_of_an_experiment_before_its_name(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []

    class Client:
        def create_run(self, number: str, run_name: str) -> Any:
            created.append(number)
            return SimpleNamespace(info=SimpleNamespace(run_id="1"))

        def log_param(self, *arguments: object) -> None:
            pass

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "lockstep")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "17")
    trackers._MlflowWriter(record[0])
    assert created == ["17"]


def read_offline_run(path: Path) -> Iterator[bytes]:
    """Yields the records of an offline run of Weights & Biases, which has no reader in Python.

    The file is a log of LevelDB: after seven bytes of its own, blocks of 32 KiB with pieces of
    records. Each piece has a checksum (4 bytes), its length (2) and a kind (1): a whole record, or
    the first, a middle or the last piece of one.
    """
    data = path.read_bytes()
    position = 7
    record = b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:  # filled up with zeros
            position += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_wandb(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the import creates folders there
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    of_run, told = record
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment["TMPDIR"] = str(of_run.folder)  # it leaves folders there
    command = [sys.executable, "-m", "lockstep", "report", str(of_run.folder), "--to", "wandb"]
    subprocess.run(command, env=environment, check=True)
    [path] = of_run.folder.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, dict[int, float]] = {}
    for data in read_offline_run(path):
        line = wandb_internal_pb2.Record()
        line.ParseFromString(data)
        values = {}
        for item in line.history.item:
            values[item.key or item.nested_key[0]] = json.loads(item.value_json)
        for name, value in values.items():
            if name != "step" and not name.startswith("_"):
                found.setdefault(name, {})[values["step"]] = value
    check(found, told)

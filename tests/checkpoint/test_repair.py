from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import checkpoint
from torch import nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.checksums import seal_manifest
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.repair import MIN_AGE_S, Repair, carry_out, plan_repairs
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.unit


def save(folder: Path, step: int) -> Path:
    return checkpoint(folder, step, model=nn.Linear(3, 2), training={"step": torch.tensor(step)})


def later() -> float:
    """After everything that the tests do."""
    return time.time() + 2 * MIN_AGE_S


def plan(folder: Path) -> list[Repair]:
    return plan_repairs(folder, now_s=later())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def flip(path: Path, byte: int = 20) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x80
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_bytes(seal_manifest({**manifest, **changes}))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_nothing_is_planned_for_sound_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    assert plan(tmp_path) == []
    assert plan(tmp_path / "step-000000001") == []
    for wrong in (tmp_path / "absent", tmp_path / "step-000000001" / "manifest.json"):
        with pytest.raises(CheckpointError, match="it is no checkpoint"):
            plan(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no folder that holds any"):
        plan(tmp_path / "empty")


BREAK = {
    "a file cut short": (lambda p: cut(p / "model.safetensors"), "it was cut short"),
    "a file lost": (lambda p: (p / "training.safetensors").unlink(), "is missing"),
    "the manifest lost": (lambda p: (p / "manifest.json").unlink(), "is missing, which is written"),
    "the manifest cut short": (lambda p: cut(p / "manifest.json"), "manifest.json is damaged"),
    "the manifest empty": (lambda p: (p / "manifest.json").write_text(""), "is damaged"),
    "no object": (lambda p: (p / "manifest.json").write_text("[1]"), "it is no JSON object"),
    "nested without end": (lambda p: (p / "manifest.json").write_text("[" * 10**5), "is damaged"),
    "a header's bit flipped": (lambda p: flip(p / "model.safetensors"), "header is damaged"),
    "a module elsewhere": (lambda p: edit(p, modules={"../x": {}}), "outside of its folder"),
    "a value's bit flipped": (
        lambda p: flip(p / "model.safetensors", -1),
        "model.safetensors is damaged: its checksum differs",
    ),
    "a number in the manifest": (
        lambda p: replace(p / "manifest.json", '"epoch": 2', '"epoch": 3'),
        "manifest.json is damaged: its checksum differs",
    ),
    "the manifest's checksum lost": (
        lambda p: replace(p / "manifest.json", ', "checksum": ', ', "other": '),
        "manifest.json is damaged: its checksum differs",
    ),
    "no checksums": (lambda p: edit(p, checksums=None), "lacks the checksums of its files"),
    "no state": (lambda p: edit(p, modules=None), "it lacks the state"),
    "another state": (
        lambda p: edit(p, training={"a": {"$tensor": "absent"}}),
        "training.safetensors lacks 1 tensors of the state (absent)",
    ),
}


@pytest.mark.parametrize("case", BREAK)
def test_broken_checkpoints_are_removed_and_sound_ones_stay(tmp_path: Path, case: str) -> None:
    run = tmp_path / "run"
    change, found = BREAK[case]
    save(run, 1)
    change(save(run, 2))
    sound = contents(run / "step-000000001")
    before = contents(run)
    [repair] = plan(run)
    assert (repair.action, repair.path.name) == ("remove", "step-000000002")
    assert found in repair.why
    assert contents(run) == before
    assert plan(run / "step-000000002") == [repair]
    carry_out([repair])
    assert os.listdir(run) == ["step-000000001"]
    assert contents(run) == sound
    assert plan(run) == []


def test_recently_changed_checkpoints_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    cut(save(tmp_path, 2) / "model.safetensors")
    [repair] = plan_repairs(tmp_path)
    assert repair.action == "leave"
    assert "a run may be saving" in repair.why
    carry_out([repair])
    assert len(os.listdir(tmp_path)) == 2


def test_the_last_readable_weights_are_not_removed(tmp_path: Path) -> None:
    """Weights without a manifest are still weights, where there is nothing better."""
    step = save(tmp_path, 1)
    (step / "manifest.json").unlink()
    [repair] = plan(tmp_path)
    assert repair.action == "leave"
    assert f"load_weights(model, '{step / 'model.safetensors'}')" in repair.why
    carry_out([repair])
    load_weights(nn.Linear(3, 2), step / "model.safetensors")
    for name in ("model", "training"):
        cut(step / f"{name}.safetensors")
    [repair] = plan(tmp_path)
    assert repair.action == "remove"


def test_a_wrong_list_of_files_is_rebuilt(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step, files in ((2, {"model.safetensors": 1, "training.safetensors": 2}), (3, None)):
        path = save(tmp_path, step)
        good = json.loads((path / "manifest.json").read_text())
        edit(path, files=files)
        assert not layout.is_complete(path)
        [repair] = plan(tmp_path)
        assert (repair.action, repair.path) == ("rebuild", path)
        assert "the files are whole and hold the state" in repair.why
        carry_out([repair])
        assert json.loads((path / "manifest.json").read_text()) == good
        assert plan(tmp_path) == []
        assert layout.latest(tmp_path) == path


def test_stopped_saves_are_finished_or_removed(tmp_path: Path) -> None:
    _, two, three = (save(tmp_path, step) for step in (1, 2, 3))
    whole = two.rename(layout.temporary_folder(tmp_path, 2))
    twice = layout.temporary_folder(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000000001", twice)
    half = three.rename(layout.temporary_folder(tmp_path, 3))
    (half / "manifest.json").unlink()
    found = {repair.path: repair.action for repair in plan(tmp_path)}
    assert found == {whole: "finish", twice: "remove", half: "remove"}
    assert {repair.action for repair in plan_repairs(tmp_path)} == {"leave"}
    carry_out(plan(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000002"]
    assert layout.latest(tmp_path) == tmp_path / "step-000000002"


def test_checkpoints_of_another_version_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    edit(save(tmp_path, 2), format=9, modules="of another kind")
    [repair] = plan(tmp_path)
    assert (repair.action, repair.why) == ("leave", "its format is 9, this Lockstep reads 1")


def test_a_replaced_checkpoint_counts_while_it_is_sound(tmp_path: Path) -> None:
    save(tmp_path, 1)
    aside = save(tmp_path, 2).rename(tmp_path / ".step-000000002.replaced")
    assert plan(tmp_path) == []
    cut(aside / "model.safetensors")
    assert [(r.action, r.path) for r in plan(tmp_path)] == [("remove", aside)]


def test_examine_reads_values_only_if_asked(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / "model.safetensors", -1)
    assert examine(path).problems == ()
    assert examine(path, values=True).problems == (
        "model.safetensors is damaged: its checksum differs",
    )

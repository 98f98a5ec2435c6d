"""The gallery: small scripts as people write them, each stored right, with a patch for its defect.

`lockstep verify` is to find each defect by the numbers and calls alone, and to call every repaired
script, and every one of `gallery/right`, EQUAL. Scripts are run under one and the same name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemas
import warm
from patch import apply_patch

pytestmark = pytest.mark.launcher

GALLERY = Path(__file__).with_name("gallery")
THOROUGH = pytest.mark.thorough


@dataclass(frozen=True)
class Planted:
    """What is wrong with a script."""

    name: str
    defect: str
    codes: str
    """Of the catalogue; where several are right, the most telling one first."""
    nproc: int = 2
    step: int | None = 1
    """The first step in which it shows; None: the run with several ends early."""
    command: bool = False
    """Needs interpreters of its own: forks of one have one order of sets."""


PLANTED = [
    # Which samples
    Planted("vision_shuffle", "no sampler: every process draws the same batches", "LS101"),
    Planted("regression_tail", "the sampler pads the last batch with repeats", "LS101", step=3),
    Planted("regression_drop", "the sampler leaves out what cannot be divided", "LS102", step=3),
    Planted("vision_folder", "files are shuffled by an unseeded generator", "LS105"),
    Planted("vision_classes", "classes in the order of a set of strings", "LS105", command=True),
    Planted("vision_moved", "augmentation from the same stream on every process", "LS106"),
    Planted("regression_noise", "augmentation from a generator of the dataset", "LS107 LS106"),
    Planted("vision_moved_seed", "augmentation from a stream seeded by the rank", "LS107"),
    Planted("language_masked", "the collate function draws", "LS107"),
    Planted("language_stream", "an IterableDataset that is not divided", "LS108"),
    Planted("metric_shards", "contiguous shards: other global batches", "LS109"),
    Planted("vision_batch", "the batch size is that of one process", "LS110"),
    Planted("regression_batch", "the batch size is that of one device", "LS110"),
    # Gradients
    Planted("vision_all_reduce", "all-reduce without a division", "LS201"),
    Planted("contrastive_scale", "a loss scaled up for a mean that is none", "LS201"),
    Planted("regression_sum", "a summed loss under DDP", "LS202"),
    Planted("regression_total", "a summed loss under Lockstep", "LS202"),
    Planted("vision_flat_reduce", "divided by the processes twice", "LS202"),
    Planted("language_accumulate", "accumulated gradients are not divided", "LS203"),
    Planted("language_pieces", "accumulated gradients are divided twice", "LS204"),
    Planted("language_tokens", "the mean of each process's mean over tokens", "LS205", step=2),
    Planted("language_weight", "means over tokens weighed by sentences", "LS205"),
    Planted("recurrent_parts", "the mean of means over uneven parts", "LS206"),
    Planted("contrastive_gather", "an all-gather without gradient", "LS207"),
    Planted("contrastive_layer", "a gather that keeps its own gradient only", "LS207 LS202"),
    Planted("contrastive_own", "each process contrasts its own pairs only", "LS208"),
    Planted("metric_hardest", "each process mines its own samples only", "LS208"),
    Planted("regression_scaled", "the loss is scaled by the root of the world size", "LS209"),
    Planted("regression_penalty", "a penalty is summed over the batch", "LS211"),
    # Models
    Planted("language_no_sync", "no_sync in the batch that should be sent", "LS301"),
    Planted("vision_module", "the loss comes from model.module", "LS302"),
    Planted("finetune_adapter", "an adapter is added after the wrap", "LS303"),
    Planted("finetune_unfreeze", "a layer is unfrozen after the wrap", "LS303", step=3),
    Planted("finetune_frozen", "a layer is frozen by the batch size of a process", "LS312"),
    Planted("gan_clamp", "weights are clamped on rank 0 only", "LS304"),
    Planted("metric_start", "other initial parameters on every process", "LS305"),
    Planted("metric_head", "a second model is trained and not wrapped", "LS311"),
    Planted("vision_batchnorm", "BatchNorm per process under DDP", "LS306"),
    Planted("vision_residual", "BatchNorm per process under Lockstep", "LS306"),
    Planted("vision_memory", "the number of micro-batches changes under BatchNorm", "LS307"),
    Planted("gan_noise", "noise is drawn in the step, under Lockstep", "LS308"),
    Planted("gan_seed", "noise is drawn in the step from a generator of the rank", "LS308"),
    Planted("metric_centre", "a buffer follows rank 0's part of the batch", "LS309"),
    # Updates
    Planted("language_schedule", "the scheduler steps once a micro-batch", "LS401"),
    Planted("vision_rate", "the learning rate grows with the processes", "LS402"),
    Planted(
        "vision_residual_rate", "the learning rate follows a batch that does not grow", "LS402"
    ),
    Planted("vision_decay", "weight decay grows with the processes", "LS403"),
    Planted("recurrent_clip", "clipped before the gradients are averaged", "LS404"),
    Planted("recurrent_epochs", "samples are counted once a process", "LS405", step=3),
    Planted(
        "recurrent_skip", "a process skips a step on a condition of its own", "LS405", step=None
    ),
    Planted("regression_overlap", "the step is taken before the gradients are averaged", "LS406"),
]
RIGHT = sorted(path.stem for path in (GALLERY / "right").glob("*.py"))
THREE = (
    "batchnorm_tail", "shares", "short_batch", "short_slices", "stream", "sums", "tied_weights",
    "upcast_logits",
)  # fmt: skip
"""Judged on three processes, which do not divide the batches."""
FEW_RIGHT = {*THREE, "accumulation", "two_optimizers"}
"""Tried each time: those on three processes, and two kinds that these do not have."""


def verify(source: str, folder: Path, *, nproc: int = 2, command: bool = False) -> dict[str, Any]:
    """The verdict on a script, whose name says nothing."""
    script = folder / "train.py"
    script.write_text(source)
    if not command:
        return warm.verify(script, nproc=nproc).as_json()
    found = folder / "verdict.json"
    line = [sys.executable, "-m", "lockstep.cli.main", "verify", "--nproc", str(nproc)]
    ended = subprocess.run(
        [*line, "--json", str(found), script.name],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.exists(), ended.stderr
    verdict = json.loads(found.read_text())
    schemas.check("verify", verdict)
    assert ended.returncode == {"EQUAL": 0, "DIFFERENT": 1}[verdict["verdict"]]
    return verdict


FIRST = {planted.codes.split()[0]: planted for planted in reversed(PLANTED)}
"""Of each cause."""
FEW_REPAIRED = {"vision_shuffle", "recurrent_clip"}
"""Whose repaired form is tried each time; the right scripts below are of the same kinds."""
EACH = [
    pytest.param(each, id=each.name, marks=() if each in FIRST.values() else THOROUGH)
    for each in PLANTED
]


@pytest.mark.parametrize("planted", EACH)
def test_a_planted_defect_is_found_and_named(planted: Planted, tmp_path: Path) -> None:
    patch = GALLERY / f"{planted.name}.patch"
    source = apply_patch(patch.with_suffix(".py").read_text(), patch.read_text())
    verdict = verify(source, tmp_path, nproc=planted.nproc, command=planted.command)
    assert verdict["verdict"] == "DIFFERENT"
    finding = verdict["findings"][0]
    assert finding["code"] in planted.codes.split(), finding
    assert finding["step"] == planted.step
    # What Lockstep itself exchanges is no evidence against the script.
    assert not any("world.prepare" in text for text in finding["seen"])


REPAIRED = [
    pytest.param(each, id=each.name, marks=() if each.name in FEW_REPAIRED else THOROUGH)
    for each in PLANTED
]


@pytest.mark.parametrize("planted", REPAIRED)
def test_the_repaired_script_is_equal(planted: Planted, tmp_path: Path) -> None:
    script = GALLERY / f"{planted.name}.py"
    verdict = verify(script.read_text(), tmp_path, nproc=planted.nproc)
    assert verdict["verdict"] == "EQUAL", verdict["findings"]


EACH_RIGHT = [pytest.param(name, marks=() if name in FEW_RIGHT else THOROUGH) for name in RIGHT]


@pytest.mark.parametrize("name", EACH_RIGHT)
def test_a_right_script_is_equal(name: str, tmp_path: Path) -> None:
    script = GALLERY / "right" / f"{name}.py"
    verdict = verify(script.read_text(), tmp_path, nproc=3 if name in THREE else 2)
    assert verdict["verdict"] == "EQUAL", verdict["findings"]


def test_every_script_of_the_gallery_is_run() -> None:
    cases = {planted.name for planted in PLANTED}
    assert cases == {path.stem for path in GALLERY.glob("*.patch")}
    assert cases == {path.stem for path in GALLERY.glob("*.py")}
    assert len({planted.codes.split()[0] for planted in PLANTED}) >= 18

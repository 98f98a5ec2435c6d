"""Checkpoints for the tests, as `world.checkpoint` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.save import RankPart, begin_checkpoint, write_checkpoint


def checkpoint(
    folder: Path, step: int = 5, *, training: Any = None, keep: int = 9, **modules: nn.Module
) -> Path:
    """Writes one; returns its folder."""
    trees, files = {}, {}
    for name, module in modules.items():
        trees[name], files[f"{name}.safetensors"], _ = encode(plain_state_dict(module))
    tree, files["training.safetensors"], _ = encode(training or {})
    manifest = {
        "id": f"{step:016x}",
        "lockstep": "0.1.0",
        "torch": "2.13.0",
        "time": "2026-01-01T00:00:00+00:00",
        "epoch": 2,
        "world_size": 3,
        "modules": trees,
        "training": tree,
    }
    return write(folder, step, files, manifest, keep)


def write(
    folder: Path, step: int, files: dict[str, Any], manifest: dict[str, Any], keep: int
) -> Path:
    """Writes these files as the checkpoint of a run on one process."""
    temporary = layout.temporary_folder(folder, step)
    begin_checkpoint(temporary)
    whole_manifest = {layout.OPTIMIZERS: {}, **manifest, "step": step}
    path = write_checkpoint(temporary, RankPart(files), whole_manifest, keep=keep)
    assert path is not None
    return path


def full_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with every DTensor in full; all ranks call it."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }

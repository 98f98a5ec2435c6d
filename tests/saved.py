"""Checkpoints for the tests, as `world.checkpoint` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.save import write_checkpoint


def checkpoint(
    folder: Path, step: int = 5, *, training: Any = None, keep: int = 9, **modules: nn.Module
) -> Path:
    """Writes one; returns its folder."""
    trees, files = {}, {}
    for name, module in modules.items():
        trees[name], files[f"{name}.safetensors"] = encode(plain_state_dict(module))
    tree, files["training.safetensors"] = encode(training or {})
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
    return write_checkpoint(folder, step, files, manifest, keep=keep)

"""Variables of the shell that a run would take for a launcher's, or that change what it does."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, verdict

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_BEGIN = ("CUDA_", "GLOO_", "LOCKSTEP_", "NCCL_", "OMP_", "TORCH_", "PYTORCH_", "PET_", "MASTER_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_DEBUG = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked twice"),
}


def gather(folder: Path) -> Facts:
    """Those that torch, Lockstep and their libraries read; of secrets the names alone."""
    return {
        name: "***" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name in _OF_RANKS or name.startswith(_BEGIN)
    }


def judge(facts: Facts) -> Finding:
    """Left over from a launcher, or set for debugging."""
    problems = []
    if left := [name for name in _OF_RANKS if name in facts]:
        found = ", ".join(f"{name}={facts[name]}" for name in left)
        found += ": a script that is started plainly takes itself for a rank"
        problems.append(Finding(WARNING, found, f"in this shell: unset {' '.join(left)}"))
    for name, (value, what) in _DEBUG.items():
        if facts.get(name) == value:
            problems.append(Finding(WARNING, f"{name}={value}: {what}", "unset it to train"))
    if facts.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        found = "CUDA_VISIBLE_DEVICES hides all GPUs"
        problems.append(Finding(WARNING, found, "unset it to use them"))
    return verdict(f"{len(facts)} that torch and its libraries read", problems)

"""Versions of Python, torch, CUDA and NCCL, and whether they fit together."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from lockstep import __version__
from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, verdict

_PYTHON, _TORCH = (3, 11), (2, 11)


def gather(folder: Path) -> Facts:
    """Versions; `driver` is NVIDIA's, as its kernel module says."""
    facts = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "lockstep": __version__,
        "driver": _driver(),
        "packages": {
            name: found.version
            for found in metadata.distributions()
            if (name := found.metadata["Name"])
        },
    }
    try:
        import torch

        from lockstep.distributed.manifest import nccl_version

        nccl = nccl_version()
    except Exception as error:  # a broken installation raises all kinds of errors
        return {**facts, "torch": None, "problem": f"{type(error).__name__}: {error}"}
    return {
        **facts,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl == "none" else nccl,
        "available": torch.cuda.is_available(),
    }


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[:1].isdigit()), "unknown")


def judge(facts: Facts) -> Finding:
    """Too old, not importable, or a GPU that this torch cannot use."""
    words = [f"Python {facts['python']}", f"Lockstep {facts['lockstep']}"]
    problems = []
    if _version(facts["python"]) < _PYTHON:
        problems.append(Finding(ERROR, "Python is older than 3.11", "use a newer Python"))
    if facts["torch"] is None:
        found = f"torch cannot be imported: {facts['problem']}"
        problems.append(Finding(ERROR, found, "install torch anew in this environment"))
        return verdict(", ".join(words), problems)
    words.append(f"torch {facts['torch']}")
    words += [f"CUDA {facts['cuda']}"] if facts["cuda"] else []
    words += [f"NCCL {facts['nccl']}"] if facts["nccl"] else []
    words += [f"driver {facts['driver']}"] if facts["driver"] else []
    if _version(facts["torch"]) < _TORCH:
        problems.append(Finding(ERROR, "torch is older than 2.11", "install a newer torch"))
    if facts["driver"] and not facts["cuda"]:
        found = "there is an NVIDIA driver, and this torch is built without CUDA"
        problems.append(Finding(WARNING, found, "install a build of torch for CUDA"))
    elif facts["cuda"] and facts["driver"] and not facts["available"]:
        found = "torch cannot use CUDA"
        do = "see whether nvidia-smi works, and whether the driver is new enough for this CUDA"
        problems.append(Finding(ERROR, found, do))
    return verdict(", ".join(words), problems)


def _version(text: str) -> tuple[int, ...]:
    numbers = text.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in numbers)

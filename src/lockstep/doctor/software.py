"""Checks the versions of Python, torch, CUDA and NCCL, and whether they fit together.

`gather` reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, join_findings

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 6)


def gather(folder: Path) -> Facts:
    """Reads the versions.

    If torch cannot be imported, `torch` is None, `problem` says why, and the facts of torch's
    libraries are missing. `cuda`, `rocm`, `nccl` and `driver` are None if they do not exist. With
    ROCm, `nccl` is the version of RCCL. `driver` is NVIDIA's. `available` is True if torch can
    compute on a GPU.
    """
    packages = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a broken installation may have none
            packages[name] = distribution.version

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "lockstep": __version__,
        "driver": _nvidia_driver(),
        "packages": packages,
        "torch": None,
    }
    try:
        import torch

        from lockstep.distributed.device import why_cuda_fails
        from lockstep.distributed.manifest import nccl_version

        nccl = nccl_version()
    except Exception as error:  # a broken installation may raise any error
        facts["problem"] = f"{type(error).__name__}: {error}"
        return facts

    facts["torch"] = torch.__version__
    facts["cuda"] = torch.version.cuda
    facts["rocm"] = torch.version.hip
    facts["nccl"] = None if nccl == "none" else nccl  # "none": torch is built without NCCL
    facts["available"] = torch.cuda.is_available() and why_cuda_fails() is None
    return facts


def _nvidia_driver() -> str | None:
    """Returns the version of NVIDIA's kernel module.

    Returns:
        The version, "unknown" if it cannot be read from the text, or None if there is no such
        module.
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None

    lines = text.splitlines()
    if not lines:
        return None

    # The first line is: NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar ...
    for word in lines[0].split():
        if word[0].isdigit():
            return word
    return "unknown"


def judge(facts: Facts) -> Finding:
    """Finds versions that are too old, and a torch that cannot be imported or cannot use the
    GPU.
    """
    versions = [f"Python {facts['python']}", f"Lockstep {facts['lockstep']}"]
    problems = []
    if _major_and_minor(facts["python"]) < MIN_PYTHON:
        problems.append(Finding(ERROR, "Python is older than 3.11", "use a newer Python"))

    if facts["torch"] is None:  # `problem` is the error of the import
        found = f"torch cannot be imported: {facts['problem']}"
        problems.append(Finding(ERROR, found, "reinstall torch in this environment"))
        return join_findings(", ".join(versions), problems)

    versions.append(f"torch {facts['torch']}")
    nccl_name = "RCCL" if facts["rocm"] else "NCCL"

    shown_names = {"cuda": "CUDA", "rocm": "ROCm", "nccl": nccl_name, "driver": "driver"}
    for library, shown_name in shown_names.items():
        if facts[library]:
            versions.append(f"{shown_name} {facts[library]}")

    if _major_and_minor(facts["torch"]) < MIN_TORCH:
        found = f"torch is older than {'.'.join(map(str, MIN_TORCH))}"
        problems.append(Finding(ERROR, found, "install a newer torch"))

    can_compute_on_gpu = facts["available"]
    if facts["driver"] and not facts["cuda"]:
        found = "an NVIDIA driver is installed, but this torch is built without CUDA"
        problems.append(Finding(WARNING, found, "install a build of torch for CUDA"))
    elif facts["driver"] and not can_compute_on_gpu:
        found = "torch cannot use CUDA"
        do = "check that nvidia-smi works and that the driver is new enough for this CUDA"
        problems.append(Finding(ERROR, found, do))

    return join_findings(", ".join(versions), problems)


def _major_and_minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version: `"2.11.0+cu128"` -> `(2, 11)`."""
    numbers = []
    public_version, _, _ = version.partition("+")
    for part in public_version.split(".")[:2]:
        digits = re.sub(r"\D", "", part)  # a part may be "12rc1"
        numbers.append(int(digits or 0))
    return tuple(numbers)

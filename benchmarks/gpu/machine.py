"""Stage `machine`: versions, what `lockstep doctor` finds, and what an idle rank holds."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from typing import Any

from benchmarks.gpu.one_gpu import on_ranks
from benchmarks.gpu.results import Stage


def versions(on_gpu: bool) -> dict[str, Any]:
    """What the results depend on."""
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        found["gpus"] = torch.cuda.device_count()
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = str(torch.version.cuda)
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = driver_version()
    return found


def driver_version() -> str:
    """Of NVIDIA's driver, as nvidia-smi gives it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({error})"
    return done.stdout.strip()


def doctor(limit: float) -> dict[str, Any]:
    """What `lockstep doctor --json` says of this machine within `limit` seconds."""
    command = [sys.executable, "-m", "lockstep", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise AssertionError(f"no JSON: {done.stdout[-500:]} {done.stderr[-500:]}") from None
    found: dict[str, Any] = {"exit_code": done.returncode}
    for name, finding in report.items():
        found[name] = f"{finding['level']}: {finding['found']}"
    return found


def idle_rank(device: str) -> dict[str, float]:
    """MiB that a rank holds when it has joined a run of one and computed one product."""
    import psutil
    import torch

    import lockstep

    before = free_gpu_memory() if device == "cuda" else 0.0
    with lockstep.init(device=device) as world:
        x = torch.ones(8, 8, device=world.device)
        float((x @ x).sum())
        after = free_gpu_memory() if device == "cuda" else 0.0
        process = psutil.Process()
        found = {"host_rss_mib": process.memory_info().rss / 2**20}
        with contextlib.suppress(psutil.Error, OSError):  # some sandboxes do not have it
            found["host_own_mib"] = process.memory_full_info().uss / 2**20
    if device == "cuda":
        found["gpu_mib"] = before - after
    return {name: round(value, 1) for name, value in found.items()}


def free_gpu_memory() -> float:
    """MiB on the first GPU, asked in a way that needs no CUDA context in this process."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return float(done.stdout.split()[0])


def main() -> None:
    stage = Stage("machine")
    with stage.check("versions") as values:
        [found] = on_ranks(versions, 1, stage.on_gpu)
        values.update(found)
    with stage.check("memory of an idle rank") as values:
        [found] = on_ranks(idle_rank, 1, stage.device)
        values.update(found)
    with stage.check("lockstep doctor --json") as values:
        values.update(doctor(limit=stage.time_limit(reserve=5)))

"""The GPUs: do they compute what the CPU does; memory, other processes, ECC errors, throttling.

Beyond the first, that is what NVML tells (`nvidia-ml-py`); without it, it is not known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, gib, verdict
from lockstep.wording import count_noun

_SIZE = 512
_TOLERANCE = 1e-3
"""Of the largest value; float32 on the GPU against float64 on the CPU."""
_FREE = 0.9
_THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clocks event reasons that tell of trouble."""


def gather(folder: Path) -> Facts:
    """One entry a visible GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"gpus": [], "nvml": None}
    nvml, missing = _nvml()
    gpus = []
    for index in range(torch.cuda.device_count()):
        known: dict[str, Any] = {
            "name": torch.cuda.get_device_name(index),
            "error": None,
            "difference": None,
        }
        if nvml is not None:  # first: what is computed here would be seen as another's
            known |= _told(nvml, str(torch.cuda.get_device_properties(index).uuid))
        try:
            known["difference"] = _difference(torch, index)
        except RuntimeError as error:
            known["error"] = str(error).partition("\n")[0]
        gpus.append(known)
    return {"gpus": gpus, "nvml": missing}


def _difference(torch: Any, index: int) -> float:
    """Between a product on the GPU and the CPU, over the largest value."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    found = (a.to(f"cuda:{index}") @ b.to(f"cuda:{index}")).cpu().double()
    return float((found - exact).abs().max() / exact.abs().max())


def _nvml() -> tuple[Any, str | None]:
    """The library, or why there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    except Exception as error:  # its errors are made when it is imported
        return None, str(error)
    return pynvml, None


def _told(nvml: Any, uuid: str) -> dict[str, Any]:
    """What NVML says of a GPU; what it does not know of this kind of GPU is None."""

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except nvml.NVMLError:
            return None

    device = ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    if device is None:
        return {}
    memory = ask("nvmlDeviceGetMemoryInfo", device)
    others = ask("nvmlDeviceGetComputeRunningProcesses", device)
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return {
        "total": memory and memory.total,
        "free": memory and memory.free,
        "processes": others and [other.pid for other in others if other.pid != os.getpid()],
        "ecc": ask("nvmlDeviceGetTotalEccErrors", device, kind, nvml.NVML_VOLATILE_ECC),
        "throttled": ask("nvmlDeviceGetCurrentClocksThrottleReasons", device),
    }


def judge(facts: Facts) -> Finding:
    """A GPU that does not compute, or computes something else, or that others use, or is ill."""
    gpus = facts["gpus"]
    if not gpus:
        return Finding("ok", "none that torch can use; training runs on the CPU")
    problems = []
    for index, gpu in enumerate(gpus):
        problems += [found._replace(found=f"GPU {index} {found.found}") for found in _problems(gpu)]
    names = sorted({gpu["name"] for gpu in gpus})
    if len(names) > 1:
        do = "shares='auto' gives each as much as it can compute"
        problems.append(Finding(WARNING, "they are not alike", do))
    summary = f"{len(gpus)} x {', '.join(names)}"
    if facts["nvml"]:
        summary += f" (memory, other processes, ECC and throttling not known: {facts['nvml']})"
    return verdict(summary, problems)


def _problems(gpu: Facts) -> list[Finding]:
    found = []
    if gpu["error"] is not None:
        do = "see nvidia-smi and the kernel's log; leave it out by CUDA_VISIBLE_DEVICES"
        found.append(Finding(ERROR, f"does not compute: {gpu['error']}", do))
    elif not gpu["difference"] <= _TOLERANCE:
        do = "it is broken: leave it out by CUDA_VISIBLE_DEVICES"
        found.append(Finding(ERROR, f"computes wrongly (by {gpu['difference']:.2g})", do))
    if gpu.get("processes"):
        others = gpu["processes"]
        text = f"is used by {count_noun(len(others), 'process')}: {', '.join(map(str, others))}"
        found.append(Finding(WARNING, text, "see ps for what is left over"))
    elif gpu.get("total") and gpu["free"] < _FREE * gpu["total"]:
        text = f"has {gib(gpu['free'])} of {gib(gpu['total'])} free"
        found.append(Finding(WARNING, text, "see nvidia-smi for who has the rest"))
    if gpu.get("ecc"):
        text = f"has had {count_noun(gpu['ecc'], 'memory error')} that could not be corrected"
        found.append(Finding(ERROR, text, "reset it or have it exchanged"))
    reasons = [words for bit, words in _THROTTLED.items() if (gpu.get("throttled") or 0) & bit]
    if reasons:
        text = f"is slowed down: {', '.join(reasons)}"
        found.append(Finding(WARNING, text, "see to its cooling and power"))
    return found

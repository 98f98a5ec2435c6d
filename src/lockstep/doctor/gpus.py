"""Checks the GPUs: whether they compute the same as the CPU, and whether other processes use them.

`gather` reads facts from this machine, and `judge` says what is wrong with them. Memory, other
processes, memory errors and throttling are read from NVIDIA's management library NVML (the package
`nvidia-ml-py`), and are not known without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding, gib, join_findings
from lockstep.wording import count_noun

MATRIX_SIZE = 512
MAX_DIFFERENCE = 1e-3  # relative to the largest value: float32 on the GPU, float64 on the CPU
MIN_FREE_SHARE = 0.9  # the share of a GPU's memory that should be free
THROTTLE_REASONS = {
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""The bits of NVML's reasons for a lower clock that indicate a problem."""


def gather(folder: Path) -> Facts:
    """Reads facts about each visible GPU, and multiplies two matrices on each.

    Returns:
        `gpus`, a dictionary for each GPU, and `nvml`, why NVML cannot be used or None. For a GPU,
        `difference` says how much its product of two matrices differs from that of the CPU. It is
        None if computing failed; then `error` says why.
    """
    import torch

    from lockstep.distributed.device import why_cuda_fails

    has_working_gpus = torch.cuda.is_available() and why_cuda_fails() is None
    if not has_working_gpus:  # the check of the software reports why
        return {"gpus": [], "nvml": None}

    nvml, why_no_nvml = _load_nvml()
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts: dict[str, Any] = {
            "name": torch.cuda.get_device_name(index),
            "error": None,
            "difference": None,
        }

        # Read how much memory is used, before the computation below uses some.
        if nvml is not None:
            facts.update(_ask_nvml(nvml, str(torch.cuda.get_device_properties(index).uuid)))

        try:
            facts["difference"] = _difference_from_cpu(index)
        except RuntimeError as error:
            facts["error"] = str(error).partition("\n")[0]
        gpus.append(facts)

    return {"gpus": gpus, "nvml": why_no_nvml}


def _difference_from_cpu(index: int) -> float:
    """Multiplies two matrices on a GPU and on the CPU, and compares the products.

    Returns:
        The largest difference, divided by the largest value.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    left = torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator)
    right = torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator)
    on_cpu = left.double() @ right.double()
    device = f"cuda:{index}"
    on_gpu = (left.to(device) @ right.to(device)).cpu().double()
    return float((on_gpu - on_cpu).abs().max() / on_cpu.abs().max())


def _load_nvml() -> tuple[Any, str | None]:
    """Imports the Python module of NVML.

    Returns:
        The module and None, or None and the reason why it cannot be used.
    """
    import torch

    if torch.version.hip is not None:
        return None, "NVML knows NVIDIA's GPUs alone"

    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    except Exception as error:  # its error classes only exist once it is imported
        return None, str(error)

    return pynvml, None


def _ask_nvml(nvml: Any, uuid: str) -> dict[str, Any]:
    """Returns what NVML knows about a GPU; empty if NVML does not know the GPU.

    Args:
        nvml: the module of NVML.
        uuid: identifier of the GPU. Its index is not used, as torch only counts visible GPUs.

    Returns:
        `total` and `free` memory in bytes, `processes` (the ids of other processes that use it),
        `ecc` (uncorrected memory errors since the last start), and `throttled` (the bits of the
        reasons for a lower clock). Each is None if NVML does not provide it for this model.
    """

    def ask(function: str, *args: Any) -> Any:
        """Calls a function of NVML; returns None if this GPU does not support it."""
        try:
            return getattr(nvml, function)(*args)
        except nvml.NVMLError:
            return None

    device = ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    if device is None:
        return {}

    memory = ask("nvmlDeviceGetMemoryInfo", device)
    processes = ask("nvmlDeviceGetComputeRunningProcesses", device)
    other_pids = None
    if processes is not None:
        other_pids = [process.pid for process in processes if process.pid != os.getpid()]

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    since_last_start = nvml.NVML_VOLATILE_ECC
    return {
        "total": None if memory is None else memory.total,
        "free": None if memory is None else memory.free,
        "processes": other_pids,
        "ecc": ask("nvmlDeviceGetTotalEccErrors", device, uncorrected, since_last_start),
        "throttled": ask("nvmlDeviceGetCurrentClocksThrottleReasons", device),
    }


def judge(facts: Facts) -> Finding:
    """Finds GPUs that fail, compute wrong results, are used by other processes, or are slowed."""
    gpus = facts["gpus"]
    if not gpus:
        return Finding(OK, "none that torch can use; training runs on the CPU")

    # The texts of the problems follow the summary: `2 x T4; GPU 1 does not compute`.
    problems = []
    for index, gpu in enumerate(gpus):
        for problem in _problems(gpu):
            problems.append(problem._replace(found=f"GPU {index} {problem.found}"))

    names = sorted({gpu["name"] for gpu in gpus})
    if len(names) > 1:
        advice = "shares='auto' gives each as much as it can compute"
        problems.append(Finding(WARNING, "they are of different kinds", advice))

    summary = f"{len(gpus)} x {', '.join(names)}"
    why_no_nvml = facts["nvml"]  # None if NVML could be asked
    if why_no_nvml is not None:
        summary += f" (memory, other processes, ECC and throttling not known: {why_no_nvml})"
    return join_findings(summary, problems)


def _problems(gpu: Facts) -> list[Finding]:
    """Returns the problems of one GPU.

    Their texts begin with a verb, such as `is slowed down`, as the caller puts `GPU 0` before it.
    Facts that NVML does not provide are missing or None.
    """
    problems = []
    if gpu["error"] is not None:
        advice = "see nvidia-smi and the kernel's log; leave it out by CUDA_VISIBLE_DEVICES"
        problems.append(Finding(ERROR, f"does not compute: {gpu['error']}", advice))
    else:
        computes_right = gpu["difference"] <= MAX_DIFFERENCE  # False for NaN
        if not computes_right:
            advice = "it is broken: leave it out by CUDA_VISIBLE_DEVICES"
            found = f"computes wrongly (by {gpu['difference']:.2g})"
            problems.append(Finding(ERROR, found, advice))

    processes = gpu.get("processes")
    if processes:
        pids = ", ".join(str(pid) for pid in processes)
        found = f"is used by {count_noun(len(processes), 'process')}: {pids}"
        problems.append(Finding(WARNING, found, "use ps to find leftover processes"))
    elif gpu.get("total") and gpu["free"] < MIN_FREE_SHARE * gpu["total"]:
        # NVML does not see all processes, for example those of another container.
        found = f"has {gib(gpu['free'])} of {gib(gpu['total'])} free"
        problems.append(Finding(WARNING, found, "use nvidia-smi to see what uses the rest"))

    if gpu.get("ecc"):
        found = f"has had {count_noun(gpu['ecc'], 'memory error')} that could not be corrected"
        problems.append(Finding(ERROR, found, "reset it or have it replaced"))

    throttle_bits = gpu.get("throttled") or 0
    reasons = [reason for bit, reason in THROTTLE_REASONS.items() if throttle_bits & bit]
    if reasons:
        found = f"is slowed down: {', '.join(reasons)}"
        problems.append(Finding(WARNING, found, "check its cooling and its power supply"))

    return problems

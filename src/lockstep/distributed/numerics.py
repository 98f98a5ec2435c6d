"""What decides the last bits of a result besides the program: processor, libraries and threads.

The same program may give other bits on another CPU or GPU, with another version of torch or of a
library under it, with another number of threads, or with TF32. These *numerics* are read as texts
by name, such as `{"CPU": "AVX512", "torch": "2.13.0"}`, and compared between the ranks of a run, or
between a run and the checkpoint that it resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import torch

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.manifest import cuda_version
from lockstep.wording import format_ranks, group_by_key

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that choose kernels."""

LIBRARY_PATTERNS = {
    # - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) ...
    "MKL": re.compile(r"Math Kernel Library Version (\S+ Build \d+)"),
    # - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049cd69a3df32adcccb623b12cd7baa22)
    "oneDNN": re.compile(r"MKL-DNN (v\S+)"),
    # ... BLAS_INFO=mkl, BUILD_TYPE=Release, ...
    "BLAS": re.compile(r"BLAS_INFO=(\w+)"),
}
"""Finds versions of libraries in the text of `torch.__config__.show()`."""

FP32_PRECISIONS = {
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
}
"""For each type of device, the parts of `torch.backends` that may compute in TF32 or bfloat16 with
tensors in float32."""

CPU_FIELDS = ("model name", "cpu family", "model", "stepping")
"""The fields of /proc/cpuinfo that name the model of a CPU, which has a stepping of its own."""


def read_numerics(device: torch.device) -> dict[str, str]:
    """Returns the numerics of this process by name, except the number of threads.

    Args:
        device: that this process computes on.
    """
    numerics = {
        "CPU": torch.backends.cpu.get_cpu_capability(),
        "CPU model": _cpu_model(),
        "torch": torch.__version__,
    }
    build = torch.__config__.show()
    for library, pattern in LIBRARY_PATTERNS.items():
        match = pattern.search(build)
        numerics[library] = match.group(1) if match else "none"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        numerics["GPU"] = (
            f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        )
        numerics["CUDA"] = cuda_version()
        numerics["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    numerics["float32 matmul precision"] = torch.get_float32_matmul_precision()
    for part in FP32_PRECISIONS.get(device.type, ()):
        setting = f"{part}.fp32_precision"
        try:
            value = str(attrgetter(setting)(torch.backends))
        except AttributeError:  # torch 2.6 has no such setting
            value = "none"
        numerics[f"setting of {setting}"] = value
    for variable in VARIABLES:
        numerics[f"value of {variable}"] = os.environ.get(variable, "none")
    return numerics


def _cpu_model() -> str:
    """Returns the name of the CPU's model, such as "AMD EPYC, cpu family 26, model 2"."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # there is no such file on this system
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() and fields:  # the fields of the next core follow
            break
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    parts = []
    for name in CPU_FIELDS:
        if name in fields:
            parts.append(fields[name] if name == "model name" else f"{name} {fields[name]}")
    return ", ".join(parts) or platform.machine()


def compare_ranks(collectives: Collectives, numerics: Mapping[str, str]) -> str:
    """Compares the numerics of all ranks, which call it together.

    Args:
        collectives: of the run.
        numerics: of this rank.

    Returns:
        "" if they are equal. Otherwise a text such as "rank 3 has another CPU (AVX2, others
        AVX512)".
    """
    text = json.dumps(numerics, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # The numerics themselves are longer, and equal on most machines.
    if len(set(collectives.exchange(digest))) == 1:
        return ""
    return describe_rank_differences(collectives.exchange(dict(numerics)))


def describe_rank_differences(numerics_of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Says which ranks have other numerics than most; "" if all have the same."""
    differences = []
    names: dict[str, None] = {}  # in the order of the ranks
    for numerics in numerics_of_ranks:
        names.update(dict.fromkeys(numerics))
    for name in names:
        values = [numerics.get(name, "none") for numerics in numerics_of_ranks]
        # The value that most ranks have. If several are equally frequent, the first rank decides.
        usual_value, _ = Counter(values).most_common(1)[0]
        ranks_of_value = group_by_key((value, rank) for rank, value in enumerate(values))
        for value, ranks in ranks_of_value.items():
            if value == usual_value:
                continue
            verb = "has" if len(ranks) == 1 else "have"
            differences.append(
                f"{format_ranks(ranks)} {verb} another {name} ({value}, others {usual_value})"
            )
    return "; ".join(differences)


def describe_differences(present: Mapping[str, str], saved: Mapping[str, str]) -> str:
    """Says what of a run's numerics is not as in its checkpoint; "" if all is.

    Args:
        present: of this run.
        saved: of the run that has saved the checkpoint.
    """
    differences = []
    for name in dict.fromkeys([*present, *saved]):
        value = present.get(name, "none")
        saved_value = saved.get(name, "none")
        if value != saved_value:
            differences.append(f"another {name} ({value}, in the checkpoint {saved_value})")
    return ", ".join(differences)

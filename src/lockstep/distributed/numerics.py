"""Reads and compares everything besides the program that affects the last bits of a result.

The same program may compute slightly different values on another CPU or GPU, with another version
of torch or its libraries, with another number of threads, or with TF32. These facts are called
*numerics* here, and kept in a dict: `{"CPU": "AVX512", "torch": "2.13.0"}`. They are compared
between the ranks of a run, and between a run and the checkpoint from which it resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path

import torch

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.manifest import cuda_version
from lockstep.wording import conjugate, format_ranks, group_by_key

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
"""Environment variables that influence which kernels are used."""

LIBRARY_PATTERNS = {
    # - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) ...
    "MKL": re.compile(r"Math Kernel Library Version (\S+ Build \d+)"),
    # - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049cd69a3df32adcccb623b12cd7baa22)
    "oneDNN": re.compile(r"MKL-DNN (v\S+)"),
    # ... BLAS_INFO=mkl, BUILD_TYPE=Release, ...
    "BLAS": re.compile(r"BLAS_INFO=(\w+)"),
}
"""The patterns that find versions of libraries in the text of `torch.__config__.show()`."""

FP32_PRECISIONS = {
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
}
"""For each type of device, the parts of `torch.backends` that may compute with float32 tensors in
TF32 or bfloat16."""

CPU_FIELDS = ("model name", "cpu family", "model", "stepping")
"""The fields of /proc/cpuinfo that identify the model of a CPU."""


def read_numerics(device: torch.device) -> dict[str, str]:
    """Reads the numerics of this process, except the number of threads.

    Args:
        device: the device that this process computes on.
    """
    numerics = {
        "CPU": torch.backends.cpu.get_cpu_capability(),
        "CPU model": _cpu_model(),
        "torch": torch.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
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
    for setting, value in _fp32_precisions(device).items():
        numerics[f"setting of {setting}"] = value
    for variable in VARIABLES:
        numerics[f"value of {variable}"] = os.environ.get(variable, "none")
    return numerics


def _fp32_precisions(device: torch.device) -> dict[str, str]:
    """Returns the settings of `torch.backends` that may lower the precision of float32 tensors.

    An example is `torch.backends.cuda.matmul.fp32_precision`, with the name
    "cuda.matmul.fp32_precision". Torch 2.6 does not have these settings; their values are "none".
    """
    value_of_setting = {}
    for part in FP32_PRECISIONS.get(device.type, ()):  # such as "cuda.matmul"
        setting = f"{part}.fp32_precision"
        read_setting = attrgetter(setting)
        try:
            value_of_setting[setting] = str(read_setting(torch.backends))
        except AttributeError:
            value_of_setting[setting] = "none"
    return value_of_setting


@cache
def _cpu_model() -> str:
    """Returns the name of the CPU's model, such as "AMD EPYC, cpu family 26, model 2"."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # there is no such file on this system
        return platform.processor() or platform.machine()

    # The file has a block of lines "model name : AMD EPYC" for each core. The first block is read.
    fields: dict[str, str] = {}
    for line in text.splitlines():
        is_end_of_block = not line.strip() and fields
        if is_end_of_block:
            break
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()

    parts = []
    for name in CPU_FIELDS:
        if name in fields:
            parts.append(fields[name] if name == "model name" else f"{name} {fields[name]}")
    return ", ".join(parts) or platform.machine()


def compare_ranks(collectives: Collectives, numerics: Mapping[str, str]) -> str:
    """Compares the numerics of all ranks. All ranks must call this.

    Args:
        collectives: the collectives of the run.
        numerics: the numerics of this rank.

    Returns:
        A description of the differences, such as "rank 3 has another CPU (AVX2, others AVX512)"; ""
        if there are none.
    """
    # Short hashes are exchanged first, as the numerics are long and mostly equal.
    text = json.dumps(numerics, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(collectives.exchange(digest))) == 1:
        return ""

    return describe_rank_differences(collectives.exchange(dict(numerics)))


def describe_rank_differences(numerics_of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Describes which ranks have different numerics than most ranks; "" if all have the same.

    Args:
        numerics_of_ranks: the numerics of each rank, in the order of the ranks.
    """
    # A dict serves as an ordered set of all names.
    names: dict[str, None] = {}
    for numerics in numerics_of_ranks:
        names.update(dict.fromkeys(numerics))

    differences = []
    for label in names:
        values = [numerics.get(label, "none") for numerics in numerics_of_ranks]

        # The most frequent value. If two are equally frequent, `most_common` returns the one that
        # comes first, which is that of the lower rank.
        usual_value, _ = Counter(values).most_common(1)[0]

        ranks_of_value = group_by_key((value, rank) for rank, value in enumerate(values))
        for value, ranks in ranks_of_value.items():
            if value == usual_value:
                continue

            who = format_ranks(ranks)
            verb = conjugate("has", len(ranks))
            differences.append(f"{who} {verb} another {label} ({value}, others {usual_value})")
    return "; ".join(differences)


def describe_differences(present: Mapping[str, str], saved: Mapping[str, str]) -> str:
    """Describes how the numerics of a run differ from those of its checkpoint; "" if they do not.

    Args:
        present: the numerics of this run.
        saved: the numerics of the run that has saved the checkpoint.
    """
    differences = []
    for label in dict.fromkeys([*present, *saved]):
        value = present.get(label, "none")
        saved_value = saved.get(label, "none")
        if value != saved_value:
            differences.append(f"another {label} ({value}, in the checkpoint {saved_value})")
    return ", ".join(differences)

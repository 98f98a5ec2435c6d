from __future__ import annotations

import platform

import pytest
import torch

from lockstep.distributed.numerics import (
    describe_differences,
    describe_rank_differences,
    read_numerics,
)

pytestmark = pytest.mark.unit

AVX2 = {"CPU": "AVX2", "torch": "2.13.0"}
AVX512 = {"CPU": "AVX512", "torch": "2.13.0"}


def test_the_numerics_of_this_machine_are_read() -> None:
    numerics = read_numerics(torch.device("cpu"))
    assert numerics["CPU"] == torch.backends.cpu.get_cpu_capability()
    assert numerics["torch"] == torch.__version__
    assert platform.python_version().startswith(f"{numerics['Python']}.")
    build = torch.__config__.show()
    assert (numerics["MKL"] == "none") == ("Math Kernel Library" not in build)
    assert numerics["MKL"].split()[0] in (*build.split(), *build.split("-"), "none")
    assert f"MKL-DNN {numerics['oneDNN']}" in build
    assert all(isinstance(value, str) and value for value in numerics.values())


def test_a_float32_precision_is_one_of_the_numerics() -> None:
    before = read_numerics(torch.device("cpu"))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert read_numerics(torch.device("cpu")) != before
    finally:
        torch.set_float32_matmul_precision(precision)


def test_ranks_that_differ_are_named() -> None:
    assert describe_rank_differences([AVX512] * 4) == ""
    text = "rank 3 has another CPU (AVX2, others AVX512)"
    assert describe_rank_differences([AVX512, AVX512, AVX512, AVX2]) == text
    text = "ranks 0, 2 have another CPU (AVX2, others AVX512)"
    assert describe_rank_differences([AVX2, AVX512, AVX2, AVX512, AVX512]) == text
    other_torch = {**AVX512, "torch": "2.12.0"}
    text = (
        "rank 1 has another CPU (AVX2, others AVX512); "
        "rank 2 has another torch (2.12.0, others 2.13.0)"
    )
    assert describe_rank_differences([AVX512, AVX2, other_torch]) == text
    without = {"torch": "2.13.0"}
    assert "(none, others AVX512)" in describe_rank_differences([AVX512, AVX512, without])


def test_a_run_and_its_checkpoint_are_compared() -> None:
    assert describe_differences(AVX2, AVX2) == ""
    assert describe_differences(AVX2, AVX512) == "another CPU (AVX2, in the checkpoint AVX512)"
    with_gpu = {**AVX2, "GPU": "NVIDIA H100"}
    text = "another GPU (none, in the checkpoint NVIDIA H100)"
    assert describe_differences(AVX2, with_gpu) == text
    text = "another GPU (NVIDIA H100, in the checkpoint none)"
    assert describe_differences(with_gpu, AVX2) == text

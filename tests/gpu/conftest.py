"""Tests marked `gpu` are skipped where torch sees no GPU, and say so.

The others here run the same bodies on the CPU, which shows that the tests themselves are right.
That is for those who change them: `make gpu` on a machine without a GPU runs them.
"""

from __future__ import annotations

import os

import pytest
import torch

ASKED = bool(os.environ.get("GPU_TESTS_ON_CPU"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip(f"needs a CUDA device, and torch {torch.__version__} sees none")
    elif not ASKED:
        pytest.skip("checks a test of a GPU on the CPU: make gpu, or GPU_TESTS_ON_CPU=1")

"""Tests marked `gpu` are skipped where torch sees no GPU, and say so.

The others here run the same bodies on the CPU, which shows that the tests themselves still fit the
code: nobody notices otherwise before a GPU is at hand.
"""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device, and torch {torch.__version__} sees none")

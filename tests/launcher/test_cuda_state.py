"""What is found out about GPUs without initialising CUDA; torch and the driver are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.run.start import cuda_state
from lockstep.run.start.cuda_state import count_gpus, how_cuda_was_initialised

pytestmark = pytest.mark.launcher

THIS_PROCESS = os.getpid()


@pytest.fixture
def counted_by_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets torch have CUDA and two GPUs; grows with each count in this process."""
    counted: list[int] = []

    def device_count() -> int:
        counted.append(2)
        return 2

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    return counted


def test_nvml_counts_gpus_where_it_can(
    monkeypatch: pytest.MonkeyPatch, counted_by_cuda: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 3)
    assert count_gpus() == 3
    assert counted_by_cuda == []


def test_else_a_copy_of_this_process_counts_them(
    monkeypatch: pytest.MonkeyPatch, counted_by_cuda: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    assert count_gpus() == 2
    assert counted_by_cuda == []
    # A copy of a process that has initialised CUDA could not.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != THIS_PROCESS)
    assert count_gpus() == 2
    assert counted_by_cuda == [2]


def test_a_count_that_fails_in_the_copy_finds_no_gpus(
    monkeypatch: pytest.MonkeyPatch, counted_by_cuda: list[int]
) -> None:
    def fail() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert count_gpus() == 0


def test_other_accelerators_are_counted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert count_gpus() == 4


def test_it_is_seen_who_has_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_cuda_was_initialised() is None
    driver: Any = SimpleNamespace(cuDeviceGetCount=lambda count: 3)  # CUDA_ERROR_NOT_INITIALIZED
    monkeypatch.setattr(cuda_state.ctypes, "CDLL", lambda name, mode: driver)
    assert how_cuda_was_initialised() is None
    driver.cuDeviceGetCount = lambda count: 0
    assert how_cuda_was_initialised() == "a library has initialised CUDA's driver"
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != THIS_PROCESS)
    assert how_cuda_was_initialised() == "torch has asked CUDA for its devices"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert how_cuda_was_initialised() == "torch has used a GPU"


@pytest.mark.parametrize("users_value", [None, "0"])
def test_importing_lockstep_lets_torch_look_for_gpus_by_nvml(users_value: str | None) -> None:
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if users_value is not None:
        environment[name] = users_value
    program = f"import lockstep, os; print(os.environ[{name!r}])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [users_value or "1"], done.stderr

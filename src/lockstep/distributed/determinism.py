"""Switches torch to what gives the same bits in every process: threads and kernels.

How a matrix product is divided over threads decides the order of its additions, so the number of
threads must not depend on the number of processes. Kernels that add in no fixed order (atomic
additions on GPUs) are refused by torch's deterministic mode.
"""

from __future__ import annotations

import os

import torch

from lockstep.distributed.collectives import Collectives
from lockstep.settings import Choice


def compute_deterministically(collectives: Collectives, num_virtual_ranks: int) -> list[Choice]:
    """Pins the number of threads, and turns torch's deterministic mode on.

    All ranks call it together.

    Args:
        collectives: of the run.
        num_virtual_ranks: of the run. The number of threads is that which each process would have
            if every virtual rank had a process on this machine.

    Returns:
        What is to be printed about it.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    num_threads_here = max(1, num_cores // num_virtual_ranks)
    # Machines may have other numbers of cores: all processes take the smallest number of threads.
    num_threads = min(int(number) for number in collectives.exchange(str(num_threads_here)))
    torch.set_num_threads(num_threads)
    # In torch's deterministic mode cuBLAS refuses to compute without a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Tensors that are not initialised would be filled, which takes time; nobody may read them.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    reason = "per process; pinned, because it decides the order of sums"
    return [Choice("threads", str(num_threads), reason)]

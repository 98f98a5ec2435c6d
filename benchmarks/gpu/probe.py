"""Stage `probe`: whether NCCL connects two ranks on one GPU that appear as separate hosts.

It uses torch.distributed alone. Later stages run several ranks over NCCL where this passed, and
else over Gloo with tensors on the GPU.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from benchmarks.gpu.one_gpu import PROBE_CHECK, appear_as_separate_host, on_ranks
from benchmarks.gpu.results import Stage

SIZE = 2
BIG = 64 * 2**20 // 4
"""Elements of float32 in 64 MB."""


def collectives(device_type: str) -> dict[str, Any]:
    """Seconds of each kind of call, the first of each and a second one; and what went wrong."""
    import os

    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        appear_as_separate_host(rank)
        torch.cuda.set_device(device)
    began = time.perf_counter()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        timeout=timedelta(seconds=20),
        device_id=device if device_type == "cuda" else None,
    )
    found: dict[str, Any] = {"init_s": time.perf_counter() - began}

    def wait() -> None:
        if device_type == "cuda":
            torch.cuda.synchronize()

    def all_reduce(elements: int) -> None:
        x = torch.full((elements,), float(rank + 1), device=device)
        dist.all_reduce(x)
        assert float(x[0]) == float(x[-1]) == 3.0

    def point_to_point() -> None:
        x = torch.full((1000,), float(rank), device=device)
        y = torch.empty_like(x)
        other = 1 - rank
        if rank == 0:
            calls = [dist.isend(x, other), dist.irecv(y, other)]
        else:
            calls = [dist.irecv(y, other), dist.isend(x, other)]
        for call in calls:
            call.wait()
        wait()
        assert float(y[0]) == float(other)

    def new_group() -> None:
        group = dist.new_group([0, 1])
        x = torch.ones(8, device=device)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == 2.0

    def split_group() -> None:
        group = dist.split_group(None, [[0, 1]])
        x = torch.ones(8, device=device)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == 2.0

    try:
        for name, call in (
            ("all_reduce_8_bytes", lambda: all_reduce(2)),
            ("all_reduce_64_mb", lambda: all_reduce(BIG)),
            ("isend_irecv", point_to_point),
            ("new_group", new_group),
        ):
            for turn in ("first", "second"):
                began = time.perf_counter()
                call()
                wait()
                found[f"{name}_{turn}_s"] = time.perf_counter() - began
        try:
            split_group()
            found["split_group"] = "works"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found["split_group"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        dist.destroy_process_group()
    return found


def main() -> None:
    stage = Stage("probe")
    with stage.check(PROBE_CHECK) as values:
        found = on_ranks(collectives, SIZE, stage.device, timeout=stage.time_limit(reserve=2))
        for name, value in found[0].items():
            values[name] = round(value, 4) if isinstance(value, float) else value
        if not stage.on_gpu:
            values["rehearsed_over"] = "gloo, on the CPU"

"""How several ranks use one GPU over NCCL, and how ranks are started for the stages.

NCCL refuses two ranks on one GPU if both the hash of their host and the bus id of their GPU are
equal. With another NCCL_HOSTID in each rank they count as separate hosts, and talk over NCCL's
socket transport on loopback. Kernels, streams, communicator splits, point-to-point transfers, the
watchdog and Flight Recorder are real then; speeds mean nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.gpu.results import DEVICE_VARIABLE, FILE_NAME, NotRun, Stage, read_lines

PROBE_CHECK = "several ranks on one GPU over NCCL"
REFUSING_FUNCTION = "_processes_see_different_gpus"
"""The function of `lockstep.distributed.device` by whose answer NCCL is refused."""
LACKING_IN_TORCH = r"torch \S+ cannot do that"
"""What Lockstep's errors say of an older torch."""
SECONDS_ON_GPU = 45.0
"""A rank opens the GPU, connects over NCCL and computes for a few seconds. Calls of several ranks
that share a GPU take some 10 ms each, as the GPU turns from one process to the other."""
SECONDS_ON_CPU = 120.0
SEPARATE_HOSTS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_DEBUG": "WARN",
}


def appear_as_separate_host(rank: int) -> None:
    """Has NCCL take this process for one on a host of its own; called before it is initialized."""
    os.environ.update(SEPARATE_HOSTS)
    os.environ["NCCL_HOSTID"] = f"rank{rank}"


def init_options(device: str, backend: str) -> dict[str, Any]:
    """Arguments of `lockstep.init` with which several ranks share one GPU.

    Lockstep refuses NCCL where ranks of a machine share a GPU, as NCCL itself does by default; with
    `backend` "nccl" this refusal is switched off in this process.
    """
    if device == "cuda" and backend == "nccl":
        import lockstep.distributed.device as device_choice

        appear_as_separate_host(int(os.environ.get("RANK", "0")))
        # Not a plain assignment: this raises an error if the function gets another name.
        mock.patch.object(device_choice, REFUSING_FUNCTION, return_value=True).start()
    return {"device": device, "backend": backend}


def probe_has_passed(stage: Stage) -> bool:
    """Whether this run's probe has shown that NCCL connects several ranks on one GPU."""
    lines = read_lines(stage.folder / FILE_NAME)
    found = [
        line["result"] == "passed"
        for line in lines
        if line.get("run") == stage.run and line.get("check") == PROBE_CHECK
    ]
    return bool(found) and found[-1]


def backend_for_several_ranks(stage: Stage) -> str:
    """`nccl` where several ranks can share the GPU over it, else `gloo`."""
    if stage.on_gpu and probe_has_passed(stage):
        return "nccl"
    return "gloo"


def on_ranks(
    fn: Callable[..., Any], size: int, *arguments: Any, timeout: float | None = None
) -> Any:
    """The results of `fn(*arguments)` on `size` ranks, forked from a process that imported torch.

    Args:
        fn: a function of a module.
        size: how many ranks.
        *arguments: of the function.
        timeout: in seconds. Left out, it is short on a GPU, as there a hang costs the other checks
            their time.

    Raises:
        RankFailed: a rank raised, died or did not end in time.
        NotRun: the version of torch lacks what Lockstep needs for this.
    """
    # Of the tests, as the ranks of the tests are started.
    from on_devices import run_on
    from ranks import RankFailed

    if timeout is None:
        timeout = SECONDS_ON_CPU if os.environ.get(DEVICE_VARIABLE) == "cpu" else SECONDS_ON_GPU
    try:
        return run_on(fn, size, *arguments, timeout=timeout)
    except RankFailed as error:
        lacking = re.search(LACKING_IN_TORCH, str(error))
        if lacking is None:
            raise
        raise NotRun(lacking[0]) from None

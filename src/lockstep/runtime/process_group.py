"""The process group: which backend, over which interface, opened and closed."""

from __future__ import annotations

import difflib
import os
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lockstep.errors import SettingError
from lockstep.runtime.interface import find_interface, gloo_interface
from lockstep.runtime.store import Store
from lockstep.topology import Topology

CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
_NAMES = ("nccl", "gloo", "mpi")


def choose_backend(backend: str | None, device: torch.device) -> tuple[str, str]:
    """The backend in torch's notation, and the reason.

    Args:
        backend: `nccl`, `gloo`, `mpi`, or None to choose by the device.
        device: the one this rank computes on.

    Raises:
        SettingError: the backend is unknown, not built into this torch, or cannot serve the device.
    """
    cuda = device.type == "cuda"
    if backend is None:
        if not cuda:
            return "gloo", f"the device is {device}"
        if dist.is_nccl_available():
            return CUDA_BACKENDS, "nccl for what is on the GPU, gloo for what is on the CPU"
        return "gloo", "this torch was built without nccl"
    if backend not in (*_NAMES, CUDA_BACKENDS):
        near = difflib.get_close_matches(backend.lower(), _NAMES, n=1)
        raise SettingError(
            f"backend={backend!r}",
            f"the backends are {', '.join(_NAMES)}",
            f"did you mean {near[0]!r}?" if near else "leave it out to have one chosen",
        )
    if backend in ("nccl", CUDA_BACKENDS):
        return _nccl(cuda, device)
    if backend == "mpi" and not dist.is_mpi_available():
        raise SettingError(
            "backend='mpi'",
            f"torch {torch.__version__} was built without MPI",
            f"use {'nccl' if cuda else 'gloo'} (mpirun can still start the run), or a torch built "
            "from source against MPI",
        )
    return backend, "it was asked for"


def open_group(
    topology: Topology,
    backend: str,
    device: torch.device,
    store: Store,
    *,
    timeout: timedelta | None,
) -> tuple[str, str]:
    """Opens torch's default process group.

    Args:
        topology: who this process is.
        backend: from `choose_backend`.
        device: the one this rank computes on.
        store: where the ranks have met.
        timeout: how long a collective may take; None: torch's default for the backend.

    Returns:
        The network interface of the CPU side and the reason for it.

    Raises:
        SettingError: an interface that was named does not exist, or none can be chosen, or MPI
            numbers the ranks differently.
    """
    # Its functions take the default group as the default of an argument. Imported after the group
    # was opened (DDP does that), they would keep it, with its threads, alive until the process
    # ends; see `ExactDDP.release` for what such a thread can do then.
    import_module("torch.distributed.nn.functional")
    if backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)
        if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.size):
            found = f"MPI says rank {dist.get_rank()} of {dist.get_world_size()}"
            dist.destroy_process_group()
            raise SettingError(
                f"rank {topology.rank} of {topology.size} (from {topology.source})",
                found,
                "start the run with the mpirun that this torch was built against",
            )
        return "MPI's own", "the backend is mpi"
    store.set_timeout(timeout or default_pg_timeout)  # the join's is too short for what follows
    interface, reason = find_interface(os.environ, topology)
    with gloo_interface(interface):
        dist.init_process_group(
            backend,
            store=store,
            rank=topology.rank,
            world_size=topology.size,
            timeout=timeout,
            # NCCL then connects now, not in the first collective, and knows the device.
            device_id=device if "nccl" in backend else None,
        )
    return interface or "by host name", reason


def carrier_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Where what is sent must lie: NCCL takes CUDA tensors, every other backend the CPU's."""
    if device.type == "cpu":
        return device
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return device if backends.get(device.type) == "nccl" else torch.device("cpu")


def close_group() -> None:
    """Closes the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _nccl(cuda: bool, device: torch.device) -> tuple[str, str]:
    if not cuda:
        raise SettingError(
            "backend='nccl'", f"the device is {device}; NCCL moves data of GPUs only", "use 'gloo'"
        )
    if not dist.is_nccl_available():
        raise SettingError(
            "backend='nccl'",
            f"torch {torch.__version__} was built without NCCL",
            "use 'gloo', which also serves GPUs, slower; or a torch built with NCCL",
        )
    return CUDA_BACKENDS, "nccl was asked for; gloo serves what is on the CPU"

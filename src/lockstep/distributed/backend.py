"""Chooses the communication backend and opens torch's default process group with it.

A *backend* is the library that moves data between ranks: NCCL between GPUs, Gloo between CPUs, MPI
if torch was built with it. On GPUs a run uses two at once, NCCL for CUDA tensors and Gloo for CPU
tensors (`CUDA_BACKENDS`). The *carrier device* is where a tensor must be so that the backend can
send it.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.constants import default_pg_timeout

from lockstep.communication import routing
from lockstep.errors import SettingError
from lockstep.machine import interface, network
from lockstep.machine.topology import Topology
from lockstep.settings import CUDA_BACKENDS, Choice, check_backend


def choose_backend(backend: str | None, device: torch.device) -> tuple[str, str]:
    """Chooses the communication backend, and gives the reason for the choice.

    Args:
        backend: the user's setting: `nccl`, `gloo`, `mpi`, or None to choose by the device.
        device: the device that this rank computes on.

    Returns:
        The backend in torch's notation, and the reason, for the log.

    Raises:
        SettingError: the backend is unknown, not built into this torch, or does not support the
            device.
    """
    on_gpu = device.type == "cuda"
    if backend is None:
        if not on_gpu:
            return "gloo", f"the device is {device}"
        if dist.is_nccl_available():
            return CUDA_BACKENDS, "nccl for what is on the GPU, gloo for what is on the CPU"
        return "gloo", "this torch was built without nccl"

    check_backend(backend)
    if backend in ("nccl", CUDA_BACKENDS):  # CUDA_BACKENDS is "cpu:gloo,cuda:nccl"
        if on_gpu and dist.is_nccl_available():
            return CUDA_BACKENDS, "nccl was asked for; gloo serves what is on the CPU"

        if on_gpu:
            found = f"torch {torch.__version__} was built without NCCL"
        else:
            found = f"the device is {device}; NCCL moves data of GPUs only"
        raise SettingError("backend='nccl'", found, "use 'gloo', which serves GPUs too, slower")

    if backend == "mpi" and not dist.is_mpi_available():
        alternative = "nccl" if on_gpu else "gloo"
        raise SettingError(
            "backend='mpi'",
            f"torch {torch.__version__} was built without MPI",
            f"use {alternative} (mpirun still starts it), or a torch built with MPI",
        )

    # Gloo, or MPI if torch has it. Both support any device.
    return backend, "it was asked for"


def open_group(
    topology: Topology,
    backend: str,
    device: torch.device,
    store: Store,
    *,
    timeout: timedelta | None,
) -> list[Choice]:
    """Opens torch's default process group.

    Args:
        topology: this process's rank and machine.
        backend: the backend that `choose_backend` returned.
        device: the device that this rank computes on.
        store: the store at which the ranks have met.
        timeout: how long a collective may take; None for torch's default.

    Returns:
        The network interface that Gloo uses, and those of NCCL if Lockstep had to choose them.

    Raises:
        SettingError: the user named an interface that does not exist, or no interface can be
            chosen, or MPI numbers the ranks differently.
    """
    _import_what_would_keep_group_open()

    if backend == "mpi":
        _open_mpi_group(topology, timeout)
        return [Choice("network", "MPI's own", "the backend is mpi")]

    # The store still has the timeout of the join, which may be too short for collectives.
    timeout_or_default = timeout or default_pg_timeout
    store.set_timeout(timeout_or_default)

    # Gloo and NCCL read their network interfaces from environment variables, so these are set
    # before the group is opened.
    choices = _set_interfaces(topology, backend)

    dist.init_process_group(
        backend,
        store=store,
        rank=topology.rank,
        world_size=topology.size,
        timeout=timeout,
        # If NCCL is given its device, it connects here and not in the first collective.
        device_id=device if "nccl" in backend else None,
    )
    _wait_until_all_are_connected(store, topology.size, timeout_or_default)
    return choices


def _import_what_would_keep_group_open() -> None:
    """Imports a module that would keep the group open if it were imported later.

    It is `torch.distributed.nn.functional`, which DDP imports. Its functions have an argument whose
    default value is the default group at the time of the import. If a group were open by then, it
    would stay open, with its threads, until the process ends (see `ExactDDP.release` for what such
    a thread can do).
    """
    import_module("torch.distributed.nn.functional")


def _set_interfaces(topology: Topology, backend: str) -> list[Choice]:
    """Chooses and sets the network interfaces of Gloo, and those of NCCL if the run uses it.

    Returns:
        What was chosen, for the log.

    Raises:
        SettingError: the user named an interface that does not exist, or none can be chosen.
    """
    # If the script has set the rank, a launcher may have thought that this process was alone, and
    # may have chosen loopback for it. That does not lead to other machines.
    addresses = network.local_addresses()
    if topology.is_set_by_hand and not topology.one_node:
        interface.forget_loopback_of_launcher(addresses)

    name, reason = interface.choose_interface(
        os.environ,
        addresses,
        one_node=topology.one_node,
        address_reaching_master=network.address_reaching(topology.master_addr),
        hostname_address=network.hostname_address(),
    )
    interface.use_gloo_interface(name, topology.size)
    choices = [Choice("network", name or "by host name", reason)]
    if "nccl" in backend:
        choices += _set_nccl_interfaces(topology, addresses)
    return choices


def _set_nccl_interfaces(topology: Topology, addresses: network.Addresses) -> list[Choice]:
    """Sets NCCL's network interfaces if NCCL by itself would choose unusable ones.

    `lockstep run` does this for the ranks that it starts. Other launchers do not.

    Args:
        topology: this process's rank and machine.
        addresses: the IP addresses of each interface, by its name.

    Returns:
        What was chosen, for the log; empty if the choice is left to NCCL.
    """
    if topology.one_node:
        return []

    # Find the interface through which packets to the master leave this machine. On the master's own
    # machine this is loopback, which does not lead to the other machines, so it is not used.
    own_address = network.address_reaching(topology.master_addr)
    name_to_master = None  # "eth0", for example
    if own_address is not None and not network.is_loopback_address(own_address):
        name_to_master = network.find_interface(addresses, lambda address: address == own_address)

    chosen = interface.choose_nccl_interfaces(
        os.environ, network.running_interfaces(), name_to_master
    )
    if chosen is None:
        return []

    value, reason = chosen
    interface.use_nccl_interfaces(value)

    # NCCL is told "=eth0", as "eth0" would match the interface eth01, too. The log shows the name.
    names = value.removeprefix("=")
    return [Choice("network of nccl", names, reason)]


def _open_mpi_group(topology: Topology, timeout: timedelta | None) -> None:
    """Opens the default group with MPI, which numbers the ranks itself.

    Raises:
        SettingError: MPI has another rank or number of ranks than the topology.
    """
    dist.init_process_group("mpi", timeout=timeout)
    mpi_rank = dist.get_rank()
    mpi_size = dist.get_world_size()
    if mpi_rank != topology.rank or mpi_size != topology.size:
        dist.destroy_process_group()
        raise SettingError(
            f"rank {topology.rank} of {topology.size} (from {topology.source})",
            f"MPI says rank {mpi_rank} of {mpi_size}",
            "start the run with the mpirun that this torch was built against",
        )


def _wait_until_all_are_connected(store: Store, size: int, timeout: timedelta) -> None:
    """Waits until all ranks have opened the group, but not longer than the timeout.

    Without this, a rank that fails right after opening the group (because its strategy is refused,
    for example) would close connections that other ranks have not accepted yet. They would then
    report a lost connection instead of the real error.

    Args:
        store: the store that the ranks share. Each rank adds 1 to its key "connected".
        size: the number of ranks.
        timeout: how long to wait.
    """
    store.add("connected", 1)
    deadline = time.monotonic() + timeout.total_seconds()

    def all_are_connected() -> bool:
        """Returns True if each rank has added its 1."""
        return store.add("connected", 0) == size  # adding 0 reads the counter

    network.wait_until(all_are_connected, deadline, ranks=size)


def close_group() -> None:
    """Closes everything that `open_group` has opened, even if it failed halfway."""
    interface.use_gloo_interface(None)
    routing.use_shared_memory(None)
    if dist.is_initialized():
        dist.destroy_process_group()

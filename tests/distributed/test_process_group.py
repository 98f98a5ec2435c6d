from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HANG_S

from lockstep.distributed.backend import CUDA_BACKENDS, choose_backend, close_group, open_group
from lockstep.distributed.process_group import store_at_end
from lockstep.errors import SettingError
from lockstep.machine.network import wait_until
from lockstep.machine.topology import Topology

pytestmark = pytest.mark.launcher

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backend", "device", "built", "chosen", "reason"),
    [
        (None, CPU, ("nccl",), "gloo", "the device is cpu"),
        (None, CUDA, ("nccl",), CUDA_BACKENDS, "nccl for what is on the GPU"),
        (None, CUDA, (), "gloo", "built without nccl"),
        ("nccl", CUDA, ("nccl",), CUDA_BACKENDS, "asked for"),
        (CUDA_BACKENDS, CUDA, ("nccl",), CUDA_BACKENDS, "asked for"),
        ("gloo", CUDA, ("nccl",), "gloo", "asked for"),
        ("gloo", CPU, (), "gloo", "asked for"),
        ("mpi", CPU, ("mpi",), "mpi", "asked for"),
    ],
)
def test_the_choice(
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    device: torch.device,
    built: tuple[str, ...],
    chosen: str,
    reason: str,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: "nccl" in built)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: "mpi" in built)
    name, why = choose_backend(backend, device)
    assert name == chosen
    assert reason in why


@pytest.mark.parametrize(
    ("backend", "device", "words"),
    [
        ("nccl", CPU, ["backend='nccl'", "the device is cpu", "use 'gloo'"]),
        ("nccl", CUDA, ["built without NCCL", "use 'gloo'"]),
        ("mpi", CPU, ["built without MPI", "use gloo"]),
        ("mpi", CUDA, ["built without MPI", "use nccl"]),
        ("glooo", CPU, ["backend='glooo'", "nccl, gloo, mpi", "did you mean 'gloo'?"]),
        ("NCCL", CPU, ["did you mean 'nccl'?"]),
        ("horovod", CPU, ["leave it out"]),
    ],
)
def test_what_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device, words: list[str]
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(SettingError) as caught:
        choose_backend(backend, device)
    for word in words:
        assert word in str(caught.value)


def test_closing_without_a_group_does_nothing() -> None:
    assert not dist.is_initialized()
    close_group()
    assert not dist.is_initialized()


def test_no_rank_goes_on_before_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that left at once, its strategy refused, say, would break the others' connecting."""
    store, connected = dist.HashStore(), threading.Barrier(2)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: connected.wait(HANG_S))
    first = threading.Thread(target=open_rank, args=(0, store))
    first.start()
    connected.wait(HANG_S)  # rank 0 is connected, and rank 1 has yet to be
    assert wait_until(lambda: store.add("connected", 0) == 1, time.monotonic() + HANG_S)
    assert first.is_alive()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    open_rank(1, store)
    first.join(HANG_S)
    assert not first.is_alive()
    close_group()


def open_rank(rank: int, store: dist.Store) -> None:
    topology = Topology(rank=rank, size=2, local_rank=rank, local_size=2)
    open_group(topology, "gloo", CPU, store, timeout=None)


NODES = ("lockstep-a", "lockstep-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
WORKER = """
import json, os, socket, torch, torch.distributed as dist
from lockstep.machine.topology import detect
from lockstep.distributed.manifest import collect
from lockstep.distributed.backend import close_group, open_group
from lockstep.distributed.rendezvous import join
import psutil

topology = detect(os.environ)
joined = join(topology, None, manifest=collect({}), timeout=600)
listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
[(_, *network)] = open_group(topology, "gloo", torch.device("cpu"), joined.store, timeout=None)
total = torch.tensor(float(topology.rank + 1))
dist.all_reduce(total)
close_group()
joined.close()
print(json.dumps([socket.gethostbyname(socket.gethostname()), listening, *network, total.item(),
                  os.environ.get("GLOO_SOCKET_IFNAME")]))
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_nodes() -> Iterator[None]:
    """Two network namespaces joined by a cable, as two machines would be."""
    try:
        ip("netns", "add", NODES[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    try:
        ip("netns", "add", NODES[1])
        cable = ["link", "add", "cable", "netns", NODES[0], "type", "veth"]
        ip(*cable, "peer", "name", "cable", "netns", NODES[1])
        for node, address in zip(NODES, ADDRESSES, strict=True):
            ip("-n", node, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", node, "link", "set", "cable", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True, check=False)


@pytest.mark.parametrize("master", [pytest.param(ADDRESSES[0], marks=pytest.mark.thorough), "name"])
def test_a_host_name_that_means_loopback(two_nodes: None, tmp_path: Path, master: str) -> None:
    """With `name`, the master's own name means 127.0.1.1 on rank 0's machine alone."""
    processes = []
    for rank, node in enumerate(NODES):
        hosts = tmp_path / f"hosts-{rank}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {node}\n")
        if rank == 1:
            hosts.write_text(f"{hosts.read_text()}{ADDRESSES[0]} {NODES[0]}\n")
        as_this_machine = f"hostname {node} && mount --bind {hosts} /etc/hosts && exec "
        environ = {k: v for k, v in os.environ.items() if not k.endswith("SOCKET_IFNAME")} | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": NODES[0] if master == "name" else master,
            "MASTER_PORT": "29555",  # nobody else is in these network namespaces
        }
        command = ["unshare", "--mount", "--uts", "sh", "-c", as_this_machine + '"$0" "$@"']
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", node, *command, sys.executable, "-c", WORKER],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank, (output, _) in enumerate(outputs):
        answer = output.splitlines()[-1]  # before it, Gloo of torch 2.9 prints its connections
        own, listening, interface, reason, total, variable = json.loads(answer)
        assert own == "127.0.1.1"
        assert listening == ([ADDRESSES[0]] if rank == 0 else [])
        assert interface == "cable"
        assert "resolves to 127.0.1.1, which only this machine can reach" in reason
        assert total == 3.0
        assert variable is None


def test_the_store_has_its_own_timeout_again_after_what_is_told_at_the_end():
    store: Any = dist.PrefixStore("run", dist.HashStore())
    joined: Any = SimpleNamespace(store=store)
    store.set_timeout(timedelta(seconds=77))
    with store_at_end(joined) as closing:
        assert closing.timeout < timedelta(seconds=77)
        raise dist.DistNetworkError("the store has gone")
    assert store.timeout == timedelta(seconds=77)

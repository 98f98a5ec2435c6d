"""Launchers on machines of their own: network namespaces joined by a cable, or this machine.

Each launcher is a real process that takes one order after another; what it waits for does not keep
the test from giving orders to the other ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HANG_S, context

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


@dataclass(frozen=True)
class Machine:
    """A network namespace; without a name it is this machine, with loopback alone."""

    name: str | None
    address: str

    def processes(self) -> list[int]:
        """Those that run there."""
        done = subprocess.run(["ip", "netns", "pids", str(self.name)], capture_output=True)
        return [int(pid) for pid in done.stdout.split()]

    @contextlib.contextmanager
    def unplugged(self, interface: str = "lan") -> Iterator[None]:
        """Within it the cable is pulled, or another interface is down."""
        _ip("-n", str(self.name), "link", "set", interface, "down")
        try:
            yield
        finally:
            _ip("-n", str(self.name), "link", "set", interface, "up")

    def slow_down(self, megabits: int) -> None:
        """From now on it sends no more than so many megabits a second (tc-tbf(8))."""
        limit = f"rate {megabits}mbit burst 32kb latency 200ms"
        shape = ["tc", "-n", str(self.name), *f"qdisc add dev lan root tbf {limit}".split()]
        try:
            done = subprocess.run(shape, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("a slow network takes the tc command")
        if done.returncode:
            pytest.skip(f"a network cannot be made slow here: {done.stderr.strip()}")

    @contextlib.contextmanager
    def with_container(self) -> Iterator[None]:
        """Within it the machine has a pair of interfaces such as those to containers."""
        on = ("-n", str(self.name))
        _ip(*on, *["link", "add", "veth1", "type", "veth", "peer", "name", "veth2"])
        try:
            _ip(*on, *["addr", "add", "172.30.0.1/24", "dev", "veth1"])
            for interface in ("veth1", "veth2"):
                _ip(*on, "link", "set", interface, "up")
            # The kernel may report a second late that an interface is up.
            reported = ["ip", *on, "-o", "link", "show", "veth1"]
            deadline = time.monotonic() + HANG_S
            while "state UP" not in subprocess.check_output(reported, text=True):
                assert time.monotonic() < deadline, "veth1 does not come up"
                time.sleep(0.01)
            yield
        finally:
            _ip(*on, "link", "del", "veth1")

    @contextlib.contextmanager
    def losing_packets(self, other: Machine) -> Iterator[None]:
        """Within it nothing arrives of what it sends to another machine, or that one to it."""
        pairs = (self, other), (other, self)
        for sender, receiver in pairs:
            nobody = ("lladdr", "02:00:00:00:00:00", "nud", "permanent")
            there = ("neigh", "replace", receiver.address, "dev", "lan", *nobody)
            _ip("-n", str(sender.name), *there)
        try:
            yield
        finally:
            for sender, receiver in pairs:
                _ip("-n", str(sender.name), "neigh", "del", receiver.address, "dev", "lan")


THIS_MACHINE = Machine(None, "127.0.0.1")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two network namespaces with an interface `lan` each; skips where they cannot be made."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and the ip command")
    machines = [Machine(f"lockstep-{os.getpid()}-{i}", f"10.99.0.{i + 1}") for i in range(2)]
    made = []
    try:
        for machine in machines:
            _ip("netns", "add", str(machine.name), may_be_refused=not made)
            made.append(machine)
        first, second = (str(machine.name) for machine in machines)
        cable = f"-n {first} link add lan type veth peer name lan netns {second}"
        _ip(*cable.split(), may_be_refused=True)
        for machine in machines:
            on = ("-n", str(machine.name))
            _ip(*on, "addr", "add", f"{machine.address}/24", "dev", "lan")
            _ip(*on, "link", "set", "lan", "up")
            _ip(*on, "link", "set", "lo", "up")
        yield machines[0], machines[1]
    finally:
        for machine in made:
            _ip("netns", "del", str(machine.name))


@contextlib.contextmanager
def three_machines() -> Iterator[list[Machine]]:
    """Three network namespaces whose interfaces `lan` are joined by a switch."""
    with two_machines() as (first, second):
        # The cable between the two is replaced by three to a bridge in a namespace of its own.
        third = Machine(f"lockstep-{os.getpid()}-2", "10.99.0.3")
        switch = f"lockstep-{os.getpid()}-switch"
        machines = [first, second, third]
        _ip("-n", str(first.name), "link", "del", "lan")
        made = []
        try:
            for name in (str(third.name), switch):
                _ip("netns", "add", name)
                made.append(name)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for number, machine in enumerate(machines):
                name = str(machine.name)
                cable = f"-n {switch} link add port{number} type veth peer name lan netns {name}"
                _ip(*cable.split())
                _ip(*f"-n {switch} link set port{number} master bridge up".split())
                _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", "lan")
                _ip("-n", name, "link", "set", "lan", "up")
                _ip("-n", name, "link", "set", "lo", "up")
            yield machines
        finally:
            for name in made:
                _ip("netns", "del", name)


def _ip(*arguments: str, may_be_refused: bool = False) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode and may_be_refused:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


class Launcher:
    """A process on a machine that has a `Rendezvous`; orders are the methods of `_Orders`."""

    def __init__(self, machine: Machine = THIS_MACHINE) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_obey, args=(theirs, machine.name))
        self.process.start()
        theirs.close()

    def start(self, order: str, *args: Any, **options: Any) -> None:
        """Gives an order; `result` waits for it."""
        self._pipe.send((order, args, options))

    def result(self) -> Any:
        """What the order returned; raises what it raised."""
        assert self._pipe.poll(HANG_S), "no answer from the launcher"
        fine, value = self._pipe.recv()
        if not fine:
            raise value
        return value

    def do(self, order: str, *args: Any, **options: Any) -> Any:
        """Gives an order and waits for it."""
        self.start(order, *args, **options)
        return self.result()

    def kill(self) -> None:
        """Ends the process with SIGKILL."""
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        """Ends the process, and frees what belongs to it here."""
        self._pipe.close()
        self.process.join(HANG_S)
        if self.process.is_alive():
            self.kill()
        self.process.close()


@contextlib.contextmanager
def launchers(*machines: Machine) -> Iterator[list[Launcher]]:
    """One launcher on each machine."""
    made = [Launcher(machine) for machine in machines]
    try:
        yield made
    finally:
        for launcher in made:
            launcher.end()


def config(backend: str = "c10d", endpoint: str = "localhost:0", nodes: int = 1, **fields: Any):
    """What torchrun makes of its flags; `rank` and the like are what --rdzv-conf may say."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    values = {"backend": backend, "endpoint": endpoint, "min_nodes": nodes, "max_nodes": nodes}
    return RendezvousParameters(**{**values, "run_id": "r", **fields})


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    return listening_in(Path("/proc/thread-self/net"), inodes)


def listening_in(tables: Path, inodes: set[str] | None = None) -> set[tuple[str, int]]:
    """The same from a folder like `/proc/PID/net`; of all sockets, or of some."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (tables / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and (inodes is None or f"socket:[{fields[9]}]" in inodes):
                found.add(_place(fields[1]))
    return found


def _place(text: str) -> tuple[str, int]:
    digits, port = text.split(":")
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _obey(pipe: Connection, namespace: str | None) -> None:
    torch.set_num_threads(1)
    enter(namespace)
    orders = _Orders()
    with contextlib.suppress(EOFError):
        while True:
            order, args, options = pipe.recv()
            try:
                answer = (True, getattr(orders, order)(*args, **options))
            except Exception as error:
                answer = (False, Refusal(error))
            pipe.send(answer)


def enter(namespace: str | None, host: str | None = None) -> None:
    """Moves this process to a machine, there under a host name of its own."""
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0
    if namespace and host:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0
        socket.sethostname(host)


class Refusal(AssertionError):
    """An error of a launcher: its class's name, its texts and its lines."""

    def __init__(self, error: Exception | tuple[str, str]) -> None:
        self.kind, self.text = (
            error if isinstance(error, tuple) else (type(error).__name__, str(error))
        )
        super().__init__(f"{self.kind}: {self.text}")

    def __reduce__(self) -> Any:
        return Refusal, ((self.kind, self.text),)


class _Orders:
    def __init__(self) -> None:
        self._said: list[str] = []
        self._rendezvous: Any = None
        self._info: Any = None

    def open(self, environ: dict[str, str], **fields: Any) -> str | None:
        """Opens a rendezvous; returns the interface."""
        from lockstep.run.machines.open_rendezvous import open_rendezvous

        self._rendezvous = open_rendezvous(config(**fields), self._said.append, environ)
        return self._rendezvous.interface

    def rendezvous(self) -> tuple[int, int, int]:
        """Waits for all nodes; returns node rank, number of nodes and attempt."""
        self._info = self._rendezvous.next_rendezvous()
        return self._info.rank, self._info.world_size, self._rendezvous.attempt

    def gloo(self) -> tuple[float, set[tuple[str, int]]]:
        """As a rank of torch's `env://`: a sum over all nodes; returns it, and what listens."""
        from lockstep.machine.interface import gloo_variables

        place = self._info.bootstrap_store_info
        os.environ.update(
            {
                "MASTER_ADDR": place.master_addr,
                "MASTER_PORT": str(place.master_port),
                "RANK": str(self._info.rank),
                "WORLD_SIZE": str(self._info.world_size),
                "TORCHELASTIC_USE_AGENT_STORE": str(self._rendezvous.use_agent_store),
                "TORCHELASTIC_RESTART_COUNT": str(self._rendezvous.attempt),
                **gloo_variables({}, self._rendezvous.interface),
            }
        )
        dist.init_process_group("gloo")
        total = torch.tensor([self._info.rank + 1.0])
        dist.all_reduce(total)
        seen = listening()
        dist.barrier()
        dist.destroy_process_group()
        return total.item(), seen

    def nccl_interfaces(self) -> str | None:
        """What ranks would be told to take for NCCL; None: NCCL chooses."""
        from lockstep.machine.interface import choose_nccl_interfaces
        from lockstep.machine.network import running_interfaces

        chosen = choose_nccl_interfaces({}, running_interfaces(), self._rendezvous.interface)
        return chosen[0] if chosen else None

    def listening(self) -> set[tuple[str, int]]:
        return listening()

    def connect(self, address: str, port: int, greeting: bytes) -> bytes:
        """Connects as a stranger; returns what comes after the greeting, until the end."""
        with socket.create_connection((address, port), timeout=600) as link:
            link.sendall(greeting)
            link.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: link.recv(4096), b""))

    def wait_for_a_key(self) -> None:
        """Asks the store for what nobody will write."""
        self._info.store.get("no such key")

    def said(self) -> list[str]:
        return list(self._said)

    def publish(self, key: str, value: Any) -> bool:
        return self._rendezvous.publish(key, value)

    def published(self, key: str, size: int) -> dict[int, Any]:
        """What was heard, when `size` nodes have told it."""
        return until(lambda: len(found := self._rendezvous.published(key)) == size and found)

    def lost(self) -> list[str]:
        """The first nodes that are lost, in words."""
        from lockstep.run.machines.nodes import describe_departure

        return until(
            lambda: [describe_departure(node) for node in self._rendezvous.departed_nodes()]
        )

    def lost_now(self) -> int:
        return len(self._rendezvous.departed_nodes())

    def waiting(self) -> int:
        """How many nodes wait for a new start, once one does."""
        return until(self._rendezvous.num_nodes_waiting)

    def shutdown(self) -> bool:
        return self._rendezvous.shutdown()

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def close(self, why: str = "") -> None:
        self._rendezvous.close(why)


def until(look: Any, seconds: float = 600.0) -> Any:
    """The first true result; a launcher polls in the same way."""
    over = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if found := look():
            return found
        over.wait(0.02)
    raise TimeoutError(f"nothing within {seconds} s")

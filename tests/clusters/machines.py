"""Machines of their own, as network namespaces: each with a name, an address and an ssh server.

They share this machine's disks. What a machine sees of them can be changed for it alone, since its
server has a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
import pytest
from namespaces import until
from ranks import HANG_S

NETWORK = "10.98.0"
_SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {authorized}
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication {password}
KbdInteractiveAuthentication no
SetEnv TMPDIR={folder}
"""
_CLIENT = """
Host *
  User root
  IdentityFile {keys}/key
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  StrictHostKeyChecking yes
"""


@dataclass
class Node:
    """A machine; `node1` to the others."""

    name: str
    namespace: str
    address: str
    folder: Path
    """Of its server, and its temporary files."""
    server: subprocess.Popen[bytes]
    daemons: set[int] = field(default_factory=set)
    """What else belongs to the machine, such as a scheduler's."""

    def processes(self) -> list[psutil.Process]:
        """Those that run there, but for its server and daemons."""
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True)
        found = []
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if (
                    pid not in {self.server.pid, *self.daemons}
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def running(self) -> list[str]:
        """What runs there, by its command lines."""
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return lines

    def die(self) -> None:
        """All its processes end at once, and it answers nobody any more."""
        _ip("-n", self.namespace, "link", "set", "lan", "down")
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def revive(self) -> None:
        """It answers again."""
        _ip("-n", self.namespace, "link", "set", "lan", "up")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Within it its cable is pulled."""
        _ip("-n", self.namespace, "link", "set", "lan", "down")
        try:
            yield
        finally:
            self.revive()

    @contextlib.contextmanager
    def sees(self, what: Path, at: Path) -> Iterator[None]:
        """Within it a file or folder is seen there in the place of another one."""
        inside = ["nsenter", "-t", str(self.server.pid), "-m"]
        _run([*inside, "mount", "--bind", str(what), str(at)])
        try:
            yield
        finally:
            _run([*inside, "umount", "-l", str(at)])

    @contextlib.contextmanager
    def python_runs(self, line: str, folder: Path) -> Iterator[None]:
        """Within it each Python there runs a line before anything else."""
        found = next(Path(sysconfig.get_paths()["purelib"]).glob("*.pth"))
        (folder / "changed.pth").write_text(f"{found.read_text().rstrip()}\nimport {line}\n")
        with self.sees(folder / "changed.pth", found):
            yield

    @contextlib.contextmanager
    def full(self, folder: Path) -> Iterator[None]:
        """Within it a folder is on a disk there that is full."""
        inside = ["nsenter", "-t", str(self.server.pid), "-m"]
        _run([*inside, "mount", "-t", "tmpfs", "-o", "size=16k", "full", str(folder)])
        try:
            fill = f"while echo full; do :; done 2>/dev/null > {folder}/full; test -s {folder}/full"
            _run([*inside, "sh", "-c", fill])
            yield
        finally:
            _run([*inside, "umount", "-l", str(folder)])

    def cut_connections(self) -> None:
        """The connections of its ssh server end; what they had started goes on."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("sshd"):
                    process.kill()


@dataclass
class Command:
    """A command that runs on a machine; what it prints goes to a file."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    path: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def said(self) -> str:
        """All that it has printed so far."""
        return self.path.read_text(errors="replace")

    def until(self, text: str) -> None:
        """Waits until it has printed a text."""
        until(lambda: text in self.said or self.process.poll() is not None)
        assert text in self.said, self.said

    def wait(self) -> int:
        """Waits for its end; its exit code."""
        return self.process.wait(HANG_S)


@dataclass
class Cluster:
    """Machines that reach each other, and the ssh client's configuration."""

    nodes: list[Node]
    keys: Path
    hub: str
    """The network namespace of the switch between them."""
    commands: list[Command] = field(default_factory=list)

    @property
    def ssh(self) -> str:
        """The ssh command by which they can be logged in to."""
        return f"ssh -F {self.keys}/config"

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        on: Node | None = None,
        env: dict[str, str] | None = None,
    ) -> Command:
        """Starts `lockstep ARGUMENTS` on a machine, the first if left out."""
        lockstep = [sys.executable, "-m", "lockstep", *arguments]
        return self.start(lockstep, folder, on=on, env=env)

    def start(
        self,
        line: Sequence[str],
        folder: Path,
        *,
        on: Node | None = None,
        env: dict[str, str] | None = None,
    ) -> Command:
        """Starts a command on a machine, the first if left out."""
        node = on or self.nodes[0]
        path = node.folder / f"said-{len(self.commands)}"
        log = path.open("wb")
        process = subprocess.Popen(
            on_machine(node.namespace, node.name, line),
            cwd=folder,
            env={**os.environ, "TMPDIR": str(node.folder), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        command = Command(process, log, path)
        self.commands.append(command)
        return command

    def nothing_runs(self) -> None:
        """Waits until nothing runs on any machine but the servers."""
        left = {}

        def over() -> bool:
            left.update({node.name: node.running() for node in self.nodes})
            return not any(left.values())

        try:
            until(over, 60.0)
        except TimeoutError:
            raise AssertionError(f"left behind: {left}") from None


@contextlib.contextmanager
def firewall(namespace: str, family: str, hook: str, rule: str) -> Iterator[None]:
    """Within it a rule of nftables holds, see nft(8); skips where there is no nft.

    Args:
        namespace: where.
        family: `inet`, or `bridge` for what passes through a switch.
        hook: `input`, `forward`.
        rule: such as `tcp dport 80 drop`.
    """
    if not shutil.which("nft"):
        pytest.skip("needs nft, of nftables")
    table = f"{family} planted"
    nft = ["ip", "netns", "exec", namespace, "nft"]
    chain = f"add chain {table} here {{ type filter hook {hook} priority 0; }}"
    _run([*nft, f"add table {table}; {chain}; add rule {table} here {rule}"])
    try:
        yield
    finally:
        _run([*nft, f"delete table {table}"])


@contextlib.contextmanager
def cluster(count: int, folder: Path, *, password: bool = False) -> Iterator[Cluster]:
    """Machines `node1`, `node2`, ..., each with an ssh server; skips where they cannot be made.

    With `password` a user may log in by it, and the keys are in the user's home folder.
    """
    needed = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")
    missing = [name for name in needed if not shutil.which(name)]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        pytest.skip(f"needs Linux, root and {', '.join(missing or needed)}")
    hub = f"ls-{os.getpid()}-hub"
    names = [f"node{number + 1}" for number in range(count)]
    addresses = {name: f"{NETWORK}.{number + 1}" for number, name in enumerate(names)}
    keys = folder / "keys"
    keys.mkdir(parents=True)
    _key(keys / "key")
    shutil.copy(keys / "key.pub", keys / "authorized_keys")
    (keys / "config").write_text(_CLIENT.format(keys=keys))
    Path("/run/sshd").mkdir(exist_ok=True)  # the server wants it
    made = Cluster([], keys, hub)
    with contextlib.ExitStack() as stack:
        _namespace(stack, hub, may_be_refused=True)
        _ip("-n", hub, "link", "add", "lan", "type", "bridge", may_be_refused=True)
        _ip("-n", hub, "link", "set", "lan", "up")
        for name, address in addresses.items():
            namespace = f"ls-{os.getpid()}-{name}"
            hosts = Path("/etc/netns", namespace, "hosts")
            hosts.parent.mkdir(parents=True)
            stack.callback(shutil.rmtree, hosts.parent)
            lines = [f"{a} {n}" for n, a in addresses.items()]
            hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            _namespace(stack, namespace)
            cable = f"-n {namespace} link add lan type veth peer name {name} netns {hub}"
            _ip(*cable.split())
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "lan")
            _ip("-n", hub, "link", "set", name, "master", "lan")
            _ip("-n", hub, "link", "set", name, "up")
            _ip("-n", namespace, "link", "set", "lan", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            authorized = ".ssh/authorized_keys" if password else f"{keys}/authorized_keys"
            server = _SERVER.format(
                folder=folder / name, authorized=authorized, password="yes" if password else "no"
            )
            made.nodes.append(_node(stack, folder / name, name, namespace, address, server))
        known = [f"{n.name},{n.address} {_public(n.folder / 'host_key')}" for n in made.nodes]
        (keys / "known_hosts").write_text("\n".join([*known, ""]))
        try:
            yield made
        finally:
            for command in made.commands:
                if command.process.poll() is None:
                    command.process.kill()
                command.process.wait()
                command.log.close()
            for node in made.nodes:
                for process in node.processes():
                    with contextlib.suppress(psutil.Error):
                        process.kill()


def _node(
    stack: contextlib.ExitStack,
    folder: Path,
    name: str,
    namespace: str,
    address: str,
    configuration: str,
) -> Node:
    folder.mkdir()
    _key(folder / "host_key")
    (folder / "sshd_config").write_text(configuration)
    log = folder / "sshd.log"
    line = ["/usr/sbin/sshd", "-D", "-E", str(log), "-f", str(folder / "sshd_config")]
    server = subprocess.Popen(on_machine(namespace, name, line), stdin=subprocess.DEVNULL)

    def end() -> None:
        server.kill()
        server.wait()

    stack.callback(end)
    until(lambda: (log.exists() and "listening" in log.read_text()) or server.poll() is not None)
    assert server.poll() is None, log.read_text()
    return Node(name, namespace, address, folder, server)


def on_machine(namespace: str, name: str, line: Sequence[str]) -> list[str]:
    """The command on a machine, under its host name; it keeps its process id."""
    become = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return ["ip", "netns", "exec", namespace, *become, *line]


def _namespace(stack: contextlib.ExitStack, name: str, may_be_refused: bool = False) -> None:
    _ip("netns", "add", name, may_be_refused=may_be_refused)
    stack.callback(_ip, "netns", "del", name)


def _key(path: Path) -> None:
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])


def _public(path: Path) -> str:
    return path.with_name(f"{path.name}.pub").read_text().strip()


def _ip(*arguments: str, may_be_refused: bool = False) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode and may_be_refused:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def _run(line: Sequence[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

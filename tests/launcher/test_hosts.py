"""`lockstep run --hosts`, without ssh: what the command line says, and two machines that are this
one by two of its addresses. tests/clusters has real servers."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from launched import launch

from lockstep.errors import SettingError
from lockstep.run.machines import helper, hosts
from lockstep.run.machines.hostfile import parse_hosts
from lockstep.run.machines.hosts import Host, HostsSpec, forwarded_environment
from lockstep.run.machines.machine_connection import Problem
from lockstep.run.machines.ssh_command import SSH_OPTIONS, SshCommand
from lockstep.run.machines.ssh_connection import SshConnection
from lockstep.run.machines.ssh_errors import ssh_failure
from lockstep.run.start.torchrun_flags import check_flags_usable_with, shutdown_timeout

pytestmark = pytest.mark.launcher

PYTHON = sys.executable
UNKNOWN = (
    "kex_exchange_identification: Connection closed by remote host\n"
    "Connection closed by UNKNOWN port 65535"
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", [Host("node1")]),
        ("node1,node2:4", [Host("node1"), Host("node2", "4")]),
        ("me@node1:auto, node2", [Host("me@node1", "auto"), Host("node2")]),
        ("[fe80::1]:2,10.0.0.1:gpu", [Host("[fe80::1]", "2"), Host("10.0.0.1", "gpu")]),
    ],
)
def test_a_list_of_hosts_is_parsed(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


def test_a_list_of_hosts_may_be_longer_than_a_file_name() -> None:
    names = [f"node-{number:03}.cluster.example.com" for number in range(40)]
    assert [host.name for host in parse_hosts(",".join(names))] == names


def test_a_hostfile_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# ours\nnode1 slots=4\n\n  node2   # as --nproc says\nme@node3 slots = 2 max-slots=8\n"
    )
    assert parse_hosts(str(file)) == [Host("node1", "4"), Host("node2"), Host("me@node3", "2")]


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("", "a host's name is missing", "give hosts (node1,node2:4"),
        ("a,,b", "a host's name is missing", "give hosts (node1,node2:4"),
        ("a,", "a host's name is missing", "give hosts (node1,node2:4"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host name", "give hosts (node1,node2:4"),
        ("a:0", "'0' is not a number of processes", "node1:4"),
        ("a:-1", "'-1' is not a number of processes", "node1:gpu"),
        ("a:", "'' is not a number of processes", "node1:4"),
        ("a b", "'a b' is not a host name", "there is no file 'a b'"),
        ("a;b", "'a;b' is not a host name", "name of a hostfile"),
        ("my/hosts", "'my/hosts' is not a host name", "there is no file 'my/hosts'"),
        ("a:4:4", "'a:4' is not a host name", "give hosts (node1,node2:4"),
        ("fe80::1", "'fe80::1' is not a host name", "in brackets: [fe80::1]"),
        ("2001:db8:0:1", "'2001:db8:0:1' is not a host name", "in brackets: [2001:db8:0:1]"),
        ("2001:db8::a:abcd", "'2001:db8::a:abcd' is not a host name", "in brackets"),
        ("::1,b", "'::1' is not a host name", "in brackets: [::1]"),
        ("me@::1", "'me@::1' is not a host name", "in brackets: me@[::1]"),
        ("a,a:2", "a and a are one machine", "once"),
        ("a,me@a", "a and me@a are one machine", "once"),
    ],
)
def test_a_text_that_names_no_host_is_refused(text: str, found: str, do: str) -> None:
    with pytest.raises(SettingError) as told:
        parse_hosts(text)
    assert (told.value.was_set, told.value.found) == (f"--hosts {text}", found)
    assert do in told.value.do


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"node1 slots=x", "'slots=x' is not understood"),
        (b"node1 slots=", "'slots=' is not understood"),
        (b"node1 cores=4", "'cores=4' is not understood"),
        (b"node1:4", "'node1:4' is not a host name"),
        (b"node1 slots=0", "slots=0: there is no room for so many processes"),
        (b"node1 slots=4 max_slots=2", "slots=4 max_slots=2: there is no room"),
        (b"-a", "'-a' is not a host name"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfnode0 slots=4\n# ours\n" + line + b"\n")
    with pytest.raises(SettingError) as told:
        parse_hosts(str(path))
    assert told.value.was_set == f"--hosts {path}, line 3"
    assert told.value.found.startswith(found)
    assert "slots" in told.value.do


@pytest.mark.parametrize(
    ("text", "found"),
    [(b"", "lists no hosts"), (b"node\xff\n", "can't decode byte"), (b"a\na\n", "a and a are one")],
)
def test_a_file_that_is_no_hostfile_is_refused(tmp_path: Path, text: bytes, found: str) -> None:
    (tmp_path / "hosts").write_bytes(text)
    with pytest.raises(SettingError, match=found):
        parse_hosts(str(tmp_path / "hosts"))


def test_a_host_knows_its_address_and_whether_it_is_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    assert [Host(n).address for n in ("a", "me@a", "me@[fe80::1]")] == ["a", "a", "fe80::1"]
    assert Host("localhost").here
    assert Host("me@localhost").here
    assert not Host("another@localhost").here
    asked: list[str] = []
    monkeypatch.setattr(hosts, "resolve", lambda name: asked.append(name) or ["203.0.113.7"])
    far = Host("far")
    assert [far.here, far.here] == [False, False]
    assert asked == ["far"]
    assert not Host("203.0.113.7").here


@pytest.mark.parametrize(
    "flag", ["--nnodes", "--node-rank", "--node_rank", "--rdzv-endpoint", "--standalone"]
)
def test_torchruns_flags_about_one_node_are_refused_with_hosts(flag: str) -> None:
    with pytest.raises(SettingError, match="with --hosts"):
        check_flags_usable_with("--hosts", ["--max-restarts", "1", flag, "2"])
    check_flags_usable_with("--hosts", ["--max-restarts", "1", "--master-port", "2"])
    for port in ("abc", "0", "65536"):
        with pytest.raises(SettingError, match="master-port"):
            check_flags_usable_with("--hosts", ["--master-port", port])


def test_variables_of_lockstep_and_nccl_are_forwarded_and_those_named() -> None:
    environ = {
        "LOCKSTEP_SEED": "1",
        "LOCKSTEP_TOKEN": "t",
        "HOME": "/x",
        "A": "b",
        # each machine has its own
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_HOSTID": "h",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    for_nccl = {
        "NCCL_DEBUG": "INFO",
        "LD_LIBRARY_PATH": "/opt/aws-ofi-nccl/lib",
        "FI_PROVIDER": "efa",
        "OFI_NCCL_PROTOCOL": "RDMA",
        "UCX_TLS": "rc",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    assert forwarded_environment({**environ, **for_nccl}, ()) == {"LOCKSTEP_SEED": "1", **for_nccl}
    assert forwarded_environment(environ, ("A",))["A"] == "b"
    with pytest.raises(SettingError, match="it is not set"):
        forwarded_environment(environ, ("B",))


def test_each_machine_gets_its_node_rank_and_the_first_machines_address() -> None:
    spec = HostsSpec(
        hosts=parse_hosts("a:2,b"),
        arguments=("--on-hang", "report"),
        script=("train.py", "--lr", "1"),
        torchrun=("--master-port", "77", "--max-restarts", "3"),
        nproc="auto",
        environment={},
    )
    assert spec.launcher_arguments(1, "10.0.0.1", 77) == [
        "run",
        "--nproc=auto",
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=77",
        "--on-hang",
        "report",
        "--max-restarts",
        "3",
        "train.py",
        "--lr",
        "1",
    ]
    said = spec.describe()
    assert "ssh -T -o BatchMode=yes" in said
    assert "--master-addr=ADDRESS --master-port=77" in said
    assert "ADDRESS: of the first machine" in said


@pytest.mark.parametrize(
    ("flags", "environment", "grace"),
    [
        ((), {}, 10.0),
        (("--shutdown-timeout", "60"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 60.0),
        ((), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, 300.0),
    ],
)
def test_the_shutdown_timeout_comes_from_the_flag_or_the_variable(
    flags, environment, grace
) -> None:
    hosts = parse_hosts("a,b")
    given = {"arguments": (), "script": ("train.py",), "torchrun": flags}
    assert HostsSpec(hosts=hosts, environment=environment, **given).shutdown_timeout_s == grace
    with pytest.raises(SettingError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon"):
        shutdown_timeout(None, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    ("said", "found", "do"),
    [
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "not the one that this machine knows",
            "ssh-keygen -R node1",
        ),
        ("Host key verification failed.", "not known here", "ssh me@node1"),
        ("me@node1: Permission denied (publickey).", "requires a password", "ssh-copy-id me@node1"),
        ("ssh: Could not resolve hostname node1: Name", "cannot be resolved", "spelling"),
        (
            "ssh: connect to host node1 port 22: Connection refused",
            "no ssh server is listening",
            "sshd",
        ),
        ("ssh: connect to host node1 port 22: Connection timed out", "not answer", "ping node1"),
        (
            "channel 0: open failed: connect failed: Connection refused\n" + UNKNOWN,
            "no ssh server is listening",
            "sshd",
        ),
        (
            "channel 0: open failed: administratively prohibited: open failed\n" + UNKNOWN,
            "forwards nothing",
            "AllowTcpForwarding",
        ),
        (
            "/bin/sh: 1: exec: nc: not found\n" + UNKNOWN,
            "ProxyCommand",
            "~/.ssh/config",
        ),
        ("/bin/bash: line 1: /opt/nc: No such file or directory\n" + UNKNOWN, "Proxy", "config"),
        ("/bin/sh: 1: exec: /opt/nc: Permission denied\n" + UNKNOWN, "Proxy", "config"),
        (
            "/bin/sh: 1: gcloud: not found\n"
            "kex_exchange_identification: Connection closed by remote host\n"
            "Connection closed by 10.0.0.1 port 22",
            "drops",
            "MaxStartups",
        ),
        (
            "Connection timed out during banner exchange\n"
            "Connection to UNKNOWN port 65535 timed out",
            "it does not answer, or the jump host",
            "reachable from the jump host",
        ),
        (
            "Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out",
            "no ssh server answers",
            "its sshd works",
        ),
        (
            "banner exchange: Connection to 10.0.0.1 port 22: Connection timed out",
            "no ssh server answers",
            "its sshd works",
        ),
        (
            "ssh_dispatch_run_fatal: Connection to 10.0.0.1 port 22: Connection timed out",
            "MTU",
            "ping -M do",
        ),
        (
            "Idle sessions are timed out\nhostname: Name or service not known\n"
            f"{PYTHON}: No module named 'lockstep'",
            "has no Lockstep",
            "same environment",
        ),
        (
            "Idle sessions are timed out after 15 minutes.\n" + UNKNOWN,
            "drops",
            "MaxStartups",
        ),
        (
            "Warning: Identity file /key not accessible: No such file or directory.\n" + UNKNOWN,
            "drops",
            "MaxStartups",
        ),
        (
            "nc: connect to 10.0.0.1 port 22: Connection refused\n" + UNKNOWN,
            "no ssh server",
            "sshd",
        ),
        ("zsh:1: command not found: nc\n" + UNKNOWN, "ProxyCommand", "~/.ssh/config"),
        (
            "2026/11/28 01:00:00 socat[1] E connect(5, AF=2 10.0.0.1:22, 16): Connection refused\n"
            + UNKNOWN,
            "no ssh server is listening",
            "sshd",
        ),
        (
            "localhost [127.0.0.1] 2899 (?) : Connection refused\n" + UNKNOWN,
            "no ssh server is listening",
            "sshd",
        ),
        (
            "bash: connect: Connection refused\n"
            "bash: line 1: /dev/tcp/10.0.0.1/22: Connection refused\n"
            "bash: line 1: 3: Bad file descriptor\n" + UNKNOWN,
            "no ssh server is listening",
            "sshd",
        ),
        (
            "Unable to negotiate with 10.0.0.1 port 22: no matching host key type found.\n"
            + UNKNOWN,
            "drops the connection, as where many begin at once or this machine is barred; before "
            "that it said: Unable to negotiate with 10.0.0.1 port 22: no matching host key type",
            "MaxStartups",
        ),
        ("Connection to this system is watched, and timed out.\n" + UNKNOWN, "drops", "Max"),
        (
            "Control socket connect(/tmp/x): Connection refused\nConnectionRefusedError: [Errno 1]",
            "exit code 255: ConnectionRefusedError",
            f"ssh me@node1 {PYTHON}",
        ),
        ("kex_exchange_identification: read: Connection reset by peer", "drops", "MaxStartups"),
        ("ssh: connect to host node1 port 22: No route to host", "not answer", "ping node1"),
        (f"bash: line 1: {PYTHON}: No such file or directory", f"{PYTHON} cannot", "same path"),
        (f"zsh:1: no such file or directory: {PYTHON}", f"{PYTHON} cannot", "same path"),
        (f"exec: {PYTHON}: Permission denied", f"{PYTHON} cannot", "same path"),
        (f"fish: Unknown command: {PYTHON}", f"{PYTHON} cannot", "same path"),
        (f"{PYTHON}: No module named 'lockstep'", "has no Lockstep", "same environment"),
        (
            f"{PYTHON}: No module named lockstep.run.machines.helper",
            "is not this version",
            "same version",
        ),
        (
            f"{PYTHON}: Error while finding module specification for "
            "'lockstep.run.machines.helper' (ModuleNotFoundError: No module named 'lockstep.run')",
            "is not this version",
            "same version",
        ),
        ("Unknown option: -P", "has no Lockstep", "same environment"),
        ("bash: rsync: command not found", "no rsync", "install rsync"),
        ("first\nsomething else\n\n", "exit code 255: something else", f"ssh me@node1 {PYTHON}"),
        ("", "exit code 255: no output", f"ssh me@node1 {PYTHON}"),
    ],
)
def test_what_ssh_says_is_explained(said: str, found: str, do: str) -> None:
    explained = ssh_failure(Host("me@node1"), 255, said)
    assert found in explained.args[0]
    assert do in explained.args[1]


def test_a_failure_of_rsync_is_explained_by_its_first_error() -> None:
    said = (
        "mkdir: cannot create directory '/srv': Read-only file system\n"
        "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\n"
        "rsync error: error in rsync protocol data stream (code 12) at io.c(231) [sender=3.2.7]\n"
    )
    found, do = ssh_failure(Host("node1"), 12, said, advice="make room").args
    assert found == "exit code 12: mkdir: cannot create directory '/srv': Read-only file system"
    assert do == "make room"


def test_advice_about_ssh_uses_the_users_ssh_command() -> None:
    ssh = SshCommand(("ssh", "-F", "a b"))
    for said in ("what?", "Host key verification failed."):
        assert "`ssh -F 'a b' me@node1" in ssh_failure(Host("me@node1"), 255, said, ssh).args[1]


def test_an_ssh_without_an_answer_gets_advice_about_packet_sizes() -> None:
    found, do = ssh_failure(Host("node1"), None, "").args
    assert found == "no answer in time: no output"
    assert "`ping -M do -s 1472 node1`" in do


def test_a_host_is_reached_by_ssh_and_this_machine_directly(tmp_path: Path) -> None:
    (tmp_path / "ssh").touch(mode=0o755)
    ssh = (str(tmp_path / "ssh"), "-v")
    python = f"{sys.executable} -P -u -m module nonce"
    other = SshConnection(Host("root@[fe80::1]"), SshCommand(ssh), module="module")
    assert other._command("nonce") == [
        *ssh,
        *SSH_OPTIONS,
        "root@fe80::1",
        f"exec {python}",
    ]
    this = SshConnection(Host("localhost"), SshCommand(("none",)), module="module")
    assert this._command("nonce") == python.split()


def test_names_are_resolved_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=600)

    def resolve(address: str) -> list[str]:
        together.wait()
        return []

    monkeypatch.setattr(hosts, "resolve", resolve)
    three = [Host(name) for name in "abc"]
    hosts.resolve_all(three)
    assert [vars(host)["here"] for host in three] == [False] * 3


@pytest.mark.parametrize("ssh", ["./none", "./ssh", "."])
def test_an_ssh_command_that_cannot_be_started_is_named(
    ssh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ssh").write_text("exec ssh")  # no line with #!
    Path("ssh").chmod(0o755)

    async def connect() -> None:
        one = SshConnection(Host("203.0.113.7"), SshCommand((ssh,)))
        try:
            await one.connect()
        finally:
            await one.close()

    with pytest.raises(Problem, match=f"{ssh} cannot be started here") as told:
        asyncio.run(connect())
    assert "--ssh" in told.value.args[1]
    with pytest.raises(SettingError, match="names no program"):
        SshCommand.parse(" ")


def test_the_first_machine_does_not_take_the_users_login_for_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.7 50000 198.51.100.8 22")
    request = {"folder": str(tmp_path), "script": None}
    there = helper.describe_machine({**request, "here": False})
    assert (there["own_address"], there["address_ssh_came_from"]) == (
        "198.51.100.8",
        "198.51.100.7",
    )
    here = helper.describe_machine({**request, "here": True})
    assert here["own_address"] != "198.51.100.8"
    assert here["address_ssh_came_from"] == ""
    monkeypatch.setenv("SSH_CONNECTION", "UNKNOWN 65535 UNKNOWN 65535")  # over a pipe
    piped = helper.describe_machine({**request, "here": False})
    assert (piped["own_address"], piped["address_ssh_came_from"]) == (here["own_address"], "")


def test_a_copy_is_ended_when_its_task_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGTERM, which cancels what goes on."""
    os.mkfifo(tmp_path / "began")
    (tmp_path / "rsync").write_text("#!/bin/sh\necho $$ > began\nexec sleep 1000\n")
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def cancelled() -> int:
        copying = asyncio.create_task(
            SshConnection(Host("203.0.113.7"), SshCommand(("ssh",))).copy_folder(None)
        )
        pid = int(await asyncio.to_thread((tmp_path / "began").read_text))
        copying.cancel()
        await asyncio.wait([copying])
        return pid

    with pytest.raises(ProcessLookupError):
        os.kill(asyncio.run(cancelled()), 0)


def test_options_of_hosts_are_refused_without_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = launch(["run", "--copy", "train.py"], tmp_path)
    assert done.returncode == 2
    assert "--copy\n  found: there is no --hosts" in done.stderr


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
node, seed = os.environ["GROUP_RANK"], os.environ["LOCKSTEP_SEED"]
print("SUM", total.item(), "NODE", node, seed, flush=True)
dist.barrier()
if dist.get_rank() == 2:
    raise ValueError("planted")
dist.barrier()
"""


def test_a_run_over_two_launchers_numbers_ranks_and_reports_one_failure(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts = ["--hosts", "127.0.0.1:2,127.0.0.2", "--seed", "5"]
    done = launch(["run", *hosts, "train.py"], tmp_path, env={**os.environ, "NCCL_DEBUG": "WARN"})
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[127.0.0.1] [rank 0] SUM 3.0 NODE 0 5",
        "[127.0.0.1] [rank 1] SUM 3.0 NODE 0 5",
        "[127.0.0.2] [rank 2] SUM 3.0 NODE 1 5",
    ]
    assert "127.0.0.1 and 127.0.0.2 are one machine: each uses its devices" in done.stderr
    assert len(re.findall("FIRST FAILURE: rank 2", done.stderr)) == 1


def test_a_machine_that_is_late_is_told_and_ended(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)

    async def asked() -> None:
        late = SshConnection(Host("203.0.113.7"), SshCommand((str(tmp_path / "ssh"),)))
        late.answer_timeout_s = 0.1
        with pytest.raises(Problem, match="no answer in time"):
            await late.connect(ask="time")
        await late.close()

    asyncio.run(asked())

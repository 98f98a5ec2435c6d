"""`lockstep run --hosts` on one machine, by an `ssh` that executes here: what can go wrong.

tests/clusters has real servers."""

from __future__ import annotations

import asyncio
import errno
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from launched import Launched, launch
from namespaces import until

from lockstep.run.machines import helper, hosts_run, machine_connection, ssh_connection
from lockstep.run.machines.helper_output import HelperOutput
from lockstep.run.machines.hosts import Host
from lockstep.run.machines.machine_connection import Problem
from lockstep.run.machines.ssh_command import DEFAULT_SSH_COMMAND, SshCommand
from lockstep.run.machines.ssh_connection import SshConnection
from lockstep.run.machines.ssh_errors import ConnectionDropped

pytestmark = pytest.mark.netns

HOST = "203.0.113.7"
DROPS = "kex_exchange_identification: Connection closed by remote host"
EXECUTES = '#!/bin/sh\nfor last; do :; done\n{first}\nexec sh -c "$last"\n'
ANSWERS = """
import json, sys, time
for line in sys.stdin:
    print("\\x1elockstep", sys.argv[1], json.dumps({"here": "I am"}), flush=True)
"""


def fake_ssh(folder: Path, first: str = "") -> str:
    """A program that executes here what is to be executed there, after something else."""
    path = folder / "ssh"
    path.write_text(EXECUTES.format(first=first))
    path.chmod(0o755)
    return str(path)


def fake_command(folder: Path, first: str = "") -> SshCommand:
    return SshCommand((fake_ssh(folder, first),))


def line(folder: Path, script: str, *options: str, first: str = "") -> Sequence[str]:
    (folder / "train.py").write_text(script)
    return ["run", "--hosts", HOST, "--ssh", fake_ssh(folder, first), *options, "train.py"]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


SAYS = r"""
import sys
print('\x1elockstep {"exit": 7}')
print("\x1elockstep")
print("x" * 3_000_000)
for percent in range(0, 101, 5):
    sys.stderr.write(f"\r{percent}%")
print(b"\xff".decode("latin-1"), end="")
"""


def test_whatever_is_printed_there_is_shown_and_understood_as_nothing_else(tmp_path: Path) -> None:
    done = launch(line(tmp_path, SAYS), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [text.removeprefix(f"[{HOST}] ") for text in done.stdout.split("\n")]
    assert lines[0].endswith('lockstep {"exit": 7}')
    assert lines[1].endswith("lockstep")
    assert "".join(lines[2:-2]) == "x" * 3_000_000
    assert lines[-2:] == ["ÿ", ""]
    assert done.stderr.endswith(f"[{HOST}] 100%\n")


DRAWS = """
import os, sys
sys.stderr.write("\\r10%")
sys.stderr.write("\\r50%")
sys.stderr.flush()
open("seen").read()
sys.stderr.write("\\r100%\\n")
"""


def test_a_progress_bar_is_seen_while_it_is_drawn(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "seen")
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "lockstep", *line(tmp_path, DRAWS)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while b"50%" not in shown:
            shown += os.read(ours, 4096)
        (tmp_path / "seen").write_text("")
        while b"100%\r\n" not in shown:
            shown += os.read(ours, 4096)
        assert process.wait() == 0
    os.close(ours)
    assert re.search(rb"\[203\.0\.113\.7\] 50%\r", shown)


def test_a_process_that_ssh_leaves_behind_keeps_nobody_waiting(tmp_path: Path) -> None:
    """As a ProxyCommand that does not end with it."""
    done = launch(line(tmp_path, "print(1)", first="sleep 1000 & echo $! > left"), tmp_path)
    pid = int((tmp_path / "left").read_text())
    try:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"[{HOST}] 1\n"
        assert "Traceback" not in done.stderr
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_twice_ends_a_connection_that_is_being_made(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "began")
    waits = "sleep 1000 & echo $$ $! > began; wait"
    with Launched(line(tmp_path, "", first=waits), cwd=tmp_path) as command:
        pids = [int(word) for word in (tmp_path / "began").read_text().split()]
        command.send_signal(signal.SIGINT)
        command.send_signal(signal.SIGINT)
        done = command.finish()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    until(lambda: not any(map(alive, pids)))


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = ANSWERS) -> dict[str, Any]:
    """How a connection starts a module of the test's own."""
    (folder / "there.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return {"module": "there"}


@pytest.mark.parametrize("before", [b"x" * (1 << 20), b"50%\r"], ids=["long", "bar"])
@pytest.mark.parametrize("cut", [1, 5, 20, 40])
def test_an_answer_that_arrives_in_two_parts_is_understood(before: bytes, cut: int) -> None:
    """Behind a line that is not finished."""
    shown: list[bytes] = []

    async def show(host: Host, stream: str, line: bytes) -> None:
        shown.append(line)

    async def both() -> SshConnection:
        one = SshConnection(Host(HOST), DEFAULT_SSH_COMMAND, show)
        mark = b"\x1elockstep 0123456789abcdef "
        one._outputs, one._answers = {"stdout": HelperOutput(mark)}, asyncio.Queue()
        one._launcher_started = True
        answer = mark + b'{"exit": 7}\n'
        await one._process_output("stdout", before + answer[:cut])
        await one._process_output("stdout", answer[cut:])
        await one._process_output("stdout", b"\n")
        return one

    assert asyncio.run(both()).exit_code == 7
    assert b"".join(shown).rstrip(b"\r") in (before, b"50%")


def test_a_process_that_rsync_leaves_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ssh of a ControlPersist does, which holds rsync's standard error open."""
    rsync = tmp_path / "rsync"
    rsync.write_text("#!/bin/sh\nsleep 1000 & echo $! > left\ncat > names\n")
    rsync.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asyncio.run(SshConnection(Host(HOST), DEFAULT_SSH_COMMAND).copy_folder(b"a\0b\0"))
    os.kill(int(Path("left").read_text()), signal.SIGKILL)
    assert Path("names").read_bytes() == b"a\0b\0"


def test_rsync_is_tried_again_where_the_server_drops_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_connection, "RETRY_PAUSES_S", (0.01, 0.01))
    rsync = tmp_path / "rsync"
    rsync.write_text(
        "#!/bin/sh\necho . >> tries; cat > names\n"
        f'[ $(wc -l < tries) -gt 1 ] || {{ echo "{DROPS}" >&2; exit 255; }}\n'
    )
    rsync.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asyncio.run(SshConnection(Host(HOST), DEFAULT_SSH_COMMAND).copy_folder(b"a\0b\0"))
    assert Path("names").read_bytes() == b"a\0b\0"


def test_an_rsync_that_does_not_end_when_it_is_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rsync = tmp_path / "rsync"
    rsync.write_text("#!/bin/sh\ntrap '' TERM INT\necho $$ > pid; mv pid begun\ncat told\n")
    rsync.chmod(0o755)
    os.mkfifo(tmp_path / "told")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ssh_connection, "FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def asked_to_end() -> None:
        copying = asyncio.create_task(
            SshConnection(Host(HOST), DEFAULT_SSH_COMMAND).copy_folder(b"")
        )
        while not Path("begun").exists():
            await asyncio.sleep(0.01)
        copying.cancel()
        await asyncio.wait([copying])

    asyncio.run(asked_to_end())
    assert not alive(int(Path("begun").read_text()))


def test_what_is_left_behind_and_goes_on_writing_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_connection, "FINISH_TIMEOUT_S", 0.3)
    first = "(while :; do echo . >&2; sleep 0.1; done) & echo $! > left"
    monkeypatch.chdir(tmp_path)

    async def ended() -> None:
        one = SshConnection(
            Host(HOST), fake_command(tmp_path, first), **module(tmp_path, monkeypatch)
        )
        await one.connect()
        one._input.close()  # type: ignore[union-attr]
        await asyncio.wait_for(one.wait_for_end(), 600)
        await one.close()

    try:
        asyncio.run(ended())
    finally:
        os.kill(int(Path("left").read_text()), signal.SIGKILL)


def test_a_try_that_is_cut_short_does_not_hide_why_those_before_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh_connection, "RETRY_PAUSES_S", (0.01, 0.01))
    until, tries = time.monotonic() + 0.5, iter([ConnectionDropped("drops", "")])

    async def attempt() -> None:
        for error in tries:
            raise error
        await asyncio.sleep(max(until - time.monotonic(), 0.0))
        raise Problem("no answer in time", "")

    with pytest.raises(ConnectionDropped):
        asyncio.run(
            SshConnection(Host(HOST), DEFAULT_SSH_COMMAND)._retry_if_dropped(attempt, until)
        )


def test_a_copy_without_a_temporary_folder_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(Problem, match="No such file or directory") as told:
        asyncio.run(SshConnection(Host(HOST), DEFAULT_SSH_COMMAND).copy_folder(b"a\0"))
    assert "TMPDIR" in told.value.args[1]


def test_a_machine_that_gives_no_sign_of_life_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one behind an open ControlMaster, for whose connection ssh does not look."""
    monkeypatch.setattr(machine_connection, "FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(machine_connection, "SILENCE_TIMEOUT_S", 0.3)

    async def lost() -> SshConnection:
        silent = SshConnection(Host(HOST), fake_command(tmp_path), **module(tmp_path, monkeypatch))
        assert await silent.connect() == {"here": "I am"}
        silent.send = lambda **_: None  # type: ignore[method-assign]
        silent.start_launcher([], {}, keep=False, shutdown_timeout_s=1.0)
        await silent.wait_for_end()
        await silent.close()
        return silent

    found = asyncio.run(lost())
    assert found.exit_code is None
    assert found._process
    assert not alive(found._process.pid)


@pytest.mark.parametrize("drops", [1, 9])
def test_a_server_that_drops_connections_is_tried_again(
    drops: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_connection, "RETRY_PAUSES_S", (0.01, 0.01))
    first = (
        f'echo . >> tries; [ $(wc -l < tries) -le {drops} ] && {{ echo "{DROPS}" >&2; exit 255; }}'
    )
    monkeypatch.chdir(tmp_path)

    async def asked() -> dict[str, Any]:
        one = SshConnection(
            Host(HOST), fake_command(tmp_path, first), **module(tmp_path, monkeypatch)
        )
        try:
            return await one.connect()
        finally:
            await one.close()

    if drops == 1:
        assert asyncio.run(asked()) == {"here": "I am"}
    else:
        with pytest.raises(Problem, match="drops the connection") as told:
            asyncio.run(asked())
        assert "MaxStartups" in told.value.args[1]
    assert len((tmp_path / "tries").read_text().split()) == min(drops + 1, 3)


def test_all_attempts_to_connect_share_one_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_connection, "RETRY_PAUSES_S", (1000.0,))
    first = f'echo "{DROPS}" >&2; exit 255'

    async def asked() -> None:
        one = SshConnection(
            Host(HOST), fake_command(tmp_path, first), **module(tmp_path, monkeypatch)
        )
        one.answer_timeout_s = 60.0
        try:
            await asyncio.wait_for(one.connect(), 400)  # less than a pause
        finally:
            await one.close()

    with pytest.raises(Problem, match="drops the connection"):
        asyncio.run(asked())


def test_output_that_nobody_reads_does_not_keep_the_launcher_waiting() -> None:
    """With --on-lost keep, when the way to the first machine is gone."""
    (from_launcher, launcher), (reads, target) = os.pipe(), os.pipe()
    gone = threading.Event()
    with os.fdopen(from_launcher, "rb", buffering=0) as source:
        copying = threading.Thread(target=helper.forward_output, args=(source, target, gone))
        copying.start()
        try:
            os.write(launcher, b"seen")
            assert os.read(reads, 100) == b"seen"
            writing = threading.Thread(target=os.write, args=(launcher, bytes(1 << 20)))
            writing.start()
            os.read(reads, 1)
            gone.set()
            writing.join(600)
            assert not writing.is_alive()
        finally:
            gone.set()
            os.close(launcher)
            copying.join()
            os.close(reads)
            os.close(target)


class EndedInput(helper.RequestReader):
    """The requests of a first machine that is lost."""

    def receive(self, timeout: float) -> None:
        return None


@pytest.mark.parametrize(
    ("script", "keep", "exit_code"),
    [
        ("trap '' TERM; echo ready; while :; do sleep 0.01; done", False, 128 + signal.SIGKILL),
        ("trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done", False, 5),
        ("trap 'exit 5' TERM; echo ready; exit 3", True, 3),
    ],
)
def test_a_launcher_without_its_first_machine_is_ended_unless_it_is_kept(
    script: str, keep: bool, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_be_killed = exit_code == 128 + signal.SIGKILL
    monkeypatch.setattr(helper, "KILL_LAUNCHER_AFTER_S", 0.1 if must_be_killed else 600.0)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", script], **pipes) as launcher:  # type: ignore[call-overload]
        launcher.stdout.readline()
        ended = helper.watch_launcher(
            launcher, EndedInput(), [], keep_running=keep, shutdown_timeout_s=0.0
        )
    assert ended == exit_code


def test_many_machines_reach_the_first_at_once() -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    listener, found = helper.listen(0, False)
    connections: list[socket.socket] = []
    try:
        for _ in range(min(300, most)):
            connections.append(socket.create_connection(("127.0.0.1", found["port"]), timeout=600))
    finally:
        for each in (listener, *connections):
            each.close()


def test_another_port_is_only_taken_where_the_wanted_one_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, found = helper.listen(0, False)
    assert first is not None
    with first:
        refused, answer = helper.listen(found["port"], False)
        assert refused is None
        assert answer["error"].startswith(os.strerror(errno.EADDRINUSE))
        other, found_instead = helper.listen(found["port"], True)
        assert other is not None
        other.close()
        assert found_instead["port"] != found["port"]

    tried = []

    def forbidden(address: tuple[str, int], **_: object) -> NoReturn:
        tried.append(address[1])
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "create_server", forbidden)
    assert helper.listen(80, True) == (None, {"error": os.strerror(errno.EACCES)})
    assert tried == [80]


@pytest.mark.parametrize("folder", ["/", "~"])
def test_the_root_and_the_home_folder_are_not_copied(folder: str, tmp_path: Path) -> None:
    home = tmp_path if folder == "~" else tmp_path / "home"
    (tmp_path / "train.py").touch()
    options = ["run", "--hosts", HOST, "--copy", str(tmp_path / "train.py")]
    cwd = Path(folder).expanduser() if folder == "/" else home
    done = launch(options, cwd, env={**os.environ, "HOME": str(home)})
    assert done.returncode == 2
    assert f"--copy\n  found: all of {cwd} would be sent" in done.stderr


def test_files_that_git_ignores_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the list of git, which understands `!`; and without it by .gitignore alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("data/large", "data/small", "train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("data/*\n!data/small\n")
    assert hosts_run.list_git_files() is None
    subprocess.run(["git", "init", "-q"], check=True)
    files = hosts_run.list_git_files() or b""
    assert sorted(files.split(b"\0")) == [b"", b".gitignore", b"data/small", b"train.py"]
    (tmp_path / ".gitignore").write_text("*\n")
    assert hosts_run.list_git_files() is None
    monkeypatch.setenv("PATH", "")
    assert hosts_run.list_git_files() is None

"""The listings of docs/with_other_tools.md do what the page says, with the real tools."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import HANG_S

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

PAGE = Path(__file__).parents[2] / "docs" / "with_other_tools.md"
REASON = "the extra `tools` is not installed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page: the first line of a listing is the name of its file."""
    text = PAGE.read_text(encoding="utf-8")
    for name, listing in re.findall(r"^```(?:python no-run|yaml)\n# (\S+)\n(.*?)^```$", text,
                                    re.M | re.S):  # fmt: skip
        (tmp_path / name).write_text(listing)
    return tmp_path


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(folder: Path, *words: str) -> str:
    with start(folder, *words) as process:
        said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said
    return said


def test_a_sweep_of_hydra(folder: Path) -> None:
    pytest.importorskip("hydra", reason=REASON)
    said = output(folder, "sweep.py", "--multirun", "lr=0.1,0.01")
    losses = dict(re.findall(r"^lr (\S+): loss (\S+)$", said, re.M))
    assert losses.keys() == {"0.1", "0.01"}
    assert float(losses["0.1"]) < float(losses["0.01"])
    [sweep] = folder.glob("multirun/*/*")  # written once, and not by every rank
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}


def test_a_study_of_optuna(folder: Path) -> None:
    pytest.importorskip("optuna", reason=REASON)
    said = output(folder, "study.py")
    assert len(re.findall(r"Trial \d finished", said)) == 3
    assert re.search(r"^best \{'lr': \S+\}: loss \d", said, re.M)


class Debugger:
    """As much of the Debug Adapter Protocol as an IDE needs to stop at a breakpoint."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
        self._file = self._socket.makefile("rb")
        self._number = 0

    def send(self, command: str, **arguments: Any) -> None:
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command}
        body = json.dumps({**request, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def wait_for(self, name: str) -> Any:
        """Returns the body of the next event or response of that name."""
        while True:
            length = int(self._file.readline().split(b":")[1])
            while self._file.readline() != b"\r\n":
                pass
            message = json.loads(self._file.read(length))
            if message.get("event", message.get("command")) == name:
                return message.get("body")

    def ask(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.wait_for(command)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def test_one_rank_of_two_stops_at_a_breakpoint(folder: Path) -> None:
    pytest.importorskip("debugpy", reason=REASON)
    script = folder / "debugged.py"
    [line] = [
        number
        for number, text in enumerate(script.read_text().splitlines(), 1)
        if "world.sum" in text
    ]
    words = ["-m", "lockstep.cli.main", "run", "--nproc", "2", "--on-hang", "report"]
    with (
        start(folder, *words, script.name, DEBUG_RANK="1", DEBUG_PORT="0") as run,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(run.terminate)  # a rank that is held by a debugger does not end by itself
        assert run.stdout is not None
        port = None
        while port is None:
            said = run.stdout.readline()
            assert said, "the run has ended"
            port = re.search(r"^\[rank 1\] waiting for a debugger on port (\d+)$", said)
        debugger = Debugger(int(port[1]))
        debugger.ask("initialize", adapterID="test", pathFormat="path")
        debugger.send("attach", justMyCode=True)
        debugger.wait_for("initialized")
        source = {"path": str(script)}
        debugger.ask("setBreakpoints", source=source, breakpoints=[{"line": line}])
        debugger.send("configurationDone")
        thread = debugger.wait_for("stopped")["threadId"]
        frame = debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]
        assert frame["line"] == line
        seen = debugger.ask("evaluate", expression="world.rank, mine.item()", frameId=frame["id"])
        assert seen["result"] == "(1, 2.0)"
        debugger.send("continue", threadId=thread)
        said, _ = run.communicate(timeout=HANG_S)
        debugger.close()
    assert run.returncode == 0, said
    assert "[rank 0] the sum is 3.0" in said

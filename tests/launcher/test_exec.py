"""A rank that executes another interpreter in its own place, and what that finds there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import launch

from lockstep.run.start.exec_hook import (
    EXECUTED_VARIABLE,
    option_that_disables_hook,
    variables_with_hook,
)

pytestmark = pytest.mark.launcher

AGAIN = """
import os, sys
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""

TELL = """
import json, os, sys
hidden = getattr(sys.modules.get("sitecustomize"), "HIDDEN", False)
variables = {n: os.environ.get(n) for n in ("PYTHONPATH", "LOCKSTEP_EXECUTED")}
finders = [type(finder).__name__ for finder in sys.meta_path]
print(json.dumps([hidden, variables, sys.path, "AfterTorch" in finders]))
"""


def tell(environ: dict[str, str]) -> list[object]:
    line = [sys.executable, "-c", TELL]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found: list[object] = json.loads(done.stdout)
    return found


def test_an_interpreter_is_as_it_would_be_without_the_hook(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("HIDDEN = True\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for environ in (clean, {**clean, "PYTHONPATH": str(tmp_path)}):
        before = tell(environ)
        after = tell(variables_with_hook(environ, rank_pid=os.getpid()))
        assert before[:3] == after[:3]
        assert before[0] == ("PYTHONPATH" in environ)
        assert after[3] is False  # it is not the rank, but a child of its


def test_variables_that_the_caller_gives_are_kept() -> None:
    given = variables_with_hook({b"NAME": b"\xff", "OTHER": "x", "PYTHONPATH": "/a:/b"}, rank_pid=7)
    assert given["NAME"] == os.fsdecode(b"\xff")
    assert given["OTHER"] == "x"
    assert given["PYTHONPATH"].endswith("/start/executed:/a:/b")
    assert json.loads(given[EXECUTED_VARIABLE])["pid"] == 7


def test_what_the_new_program_raises_is_recorded(tmp_path: Path) -> None:
    raises = "sys.stderr = open(os.devnull, 'w')\nos.dup2(sys.stderr.fileno(), 2)\n{}['key']\n"
    (tmp_path / "script.py").write_text(AGAIN + raises)
    done = launch(["run", "--nproc", "1", "script.py"], tmp_path)
    assert done.returncode == 1
    assert "FIRST FAILURE: rank 0" in done.stderr
    assert "  KeyError: 'key'\n  script.py:11: {}['key']\n" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "execute",
    [
        "os.execv(sys.executable, [sys.executable, *sys.argv])",
        "os.execve(sys.executable, [sys.executable, '-u', *sys.argv], os.environ)",
        "os.execlp(sys.executable, sys.executable, *sys.argv)",
        "__import__('posix').execv(sys.executable, [sys.executable, *sys.argv])",
        "os.execv('/bin/sh', ['sh', '-c', 'exec \"$0\" \"$@\"', sys.executable, *sys.argv])",
    ],
)
def test_a_hang_of_the_new_program_is_reported(tmp_path: Path, execute: str) -> None:
    again = AGAIN.replace("os.execv(sys.executable, [sys.executable, *sys.argv])", execute)
    hangs = "dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(2))\n"
    (tmp_path / "script.py").write_text(again + hangs)
    done = launch(["run", "--nproc", "2", "script.py"], tmp_path)
    assert done.returncode == 70, done.stderr
    assert "deadlock: ranks 0-1 wait in collectives that do not match" in done.stderr
    assert "script.py:9: dist.barrier() if rank == 1" in done.stderr


@pytest.mark.parametrize(
    ("line", "option"),
    [
        (["/usr/bin/python3.11", "-I", "train.py"], "-I"),
        (["python", "-u", "-sE", "train.py", "-x"], "-sE"),
        (["python", "-W", "E", "-X", "utf8", "-S"], "-S"),
        (["python", "-WE", "-Xint_max_str_digits=0", "-u", "train.py", "-I"], ""),
        (["python", "-m", "pkg", "-I"], ""),
        (["python", "-umIPython", "-I"], ""),
        (["python", "-uc", "E", "-I"], ""),
        (["python", "-bWignore::ImportWarning", "-u", "train.py"], ""),
        (["python", "-bW", "Ignore", "train.py", "-I"], ""),
        (["python", "-bW", "E", "-uS", "train.py"], "-uS"),
        (["python", "--check-hash-based-pycs", "never", "-bI", "train.py"], "-bI"),
        (["python", "--", "-I"], ""),
        (["python", "-c", "pass", "-I"], ""),
        (["grep", "-E", "x"], ""),
        ([], ""),
    ],
    ids=str,
)
def test_options_with_which_an_interpreter_would_not_be_watched(
    line: list[str], option: str
) -> None:
    assert option_that_disables_hook(line) == option


@pytest.mark.thorough
def test_an_interpreter_that_cannot_be_watched_is_told_and_what_it_raises_is_read(
    tmp_path: Path,
) -> None:
    again = AGAIN.replace("[sys.executable, *sys.argv]", "[sys.executable, '-I', *sys.argv]")
    (tmp_path / "script.py").write_text(again + "{}['key'] if rank == 1 else dist.barrier()\n")
    done = launch(["run", "--nproc", "2", "script.py"], tmp_path)
    assert done.returncode == 1
    assert "os.exec*: python -I" in done.stderr
    assert "neither notices when it hangs" in done.stderr
    assert "FIRST FAILURE: rank 1" in done.stderr
    assert "The last traceback in its standard error: KeyError: 'key'" in done.stderr


def test_a_program_that_cannot_be_executed_leaves_the_rank_as_it_was(tmp_path: Path) -> None:
    script = """
import os
from pathlib import Path
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.evidence import Evidence
heartbeat = Evidence.of_this_process(os.environ, Path("none")).heartbeat
before = read_heartbeat(heartbeat)
assert before is not None
try:
    os.execvp("no-such-program", ["no-such-program"])
except FileNotFoundError:
    assert read_heartbeat(heartbeat) == before
    print("goes on")
if os.fork() == 0:  # a child becomes a program of its own
    os.execvp("sh", ["sh", "-c", "echo child ${LOCKSTEP_EXECUTED-without}"])
os.wait()
"""
    (tmp_path / "script.py").write_text(script)
    done = launch(["run", "--nproc", "1", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on\nchild without\n"

"""A script runs as under plain Python: the same facts, seen by a script in each way to start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import launch
from ranks import HANG_S

from lockstep.errors import SettingError
from lockstep.run.start import worker
from lockstep.run.start.rank_imports import without_garbage_collection
from lockstep.run.start.worker import Command, Script, fresh_interpreter

pytestmark = pytest.mark.launcher

FACTS = '''
"""The module's docstring."""
import atexit, json, multiprocessing, os, sys, threading

class Thing: ...

def double(x):
    return 2 * x

def main():
    import pickle
    doubled = None
    if __file__.endswith("facts.py"):  # Python itself cannot do it from a __main__.py
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.map(double, [1, 2])
    sys.stdout.reconfigure(line_buffering=True)
    return {
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "spec": __spec__ and __spec__.name, "package": __package__, "doc": __doc__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "cached": __cached__ and "x", "loader": type(__loader__).__name__,
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
        "doubled": doubled, "cwd": os.getcwd(), "thread": threading.current_thread().name,
        "process": multiprocessing.current_process().name, "stdin": sys.stdin.read(),
        "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.encoding],
        "errors": [sys.stdout.errors, sys.stderr.errors], "builtins": type(__builtins__).__name__,
    }

if __name__ == "__main__":
    facts = main()
    atexit.register(lambda: open("exit.txt", "a").write("left\\n"))
    waiting = threading.Thread(target=lambda: open("exit.txt", "a").write("thread\\n"))
    waiting.start()
    with open("facts.json", "w") as file:
        json.dump(facts, file)
'''


def test_a_pipe_is_not_opened_to_find_the_scripts_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open it may block, and its writer loses what it has written when it is closed again."""
    os.mkfifo(tmp_path / "pipe")
    opened: list[str] = []
    monkeypatch.setattr(worker.zipfile, "is_zipfile", lambda path: opened.append(path) or False)
    (tmp_path / "file").touch()
    for name in ("pipe", "file"):
        assert Script(path=str(tmp_path / name)).folder == str(tmp_path.resolve())
    assert opened == [str(tmp_path / "file")]


AT_EXIT = "import atexit, sys; atexit.register(print, 'left')"


def facts(folder: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert (folder / "exit.txt").read_text() == "thread\nleft\n"
    (folder / "exit.txt").unlink()
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found


@pytest.mark.parametrize("warm", ["--warm", pytest.param("--no-warm", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", ["script", "folder", "module", "package"])
def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, how: str, warm: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "facts.py").write_text(FACTS)
    (tmp_path / "sub" / "__main__.py").write_text(FACTS)
    words = {
        "script": ["sub/facts.py"],
        "folder": ["sub"],
        "module": ["-m", "sub.facts"],
        "package": ["-m", "sub"],
    }[how]
    words += ["--lr", "0.1", "-m"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        input="typed",
        timeout=HANG_S,
    )
    plain = facts(tmp_path, done)
    ours = facts(tmp_path, launch(["run", warm, *words], tmp_path, typed="typed"))
    assert ours == plain


@pytest.mark.parametrize("warm", ["--warm", pytest.param("--no-warm", marks=pytest.mark.thorough)])
def test_what_ends_a_script_ends_it_as_under_python(tmp_path: Path, warm: str) -> None:
    script = tmp_path / "script.py"
    cases = [
        ("import sys; sys.exit('in words')", 1),
        ("import os; os._exit(9)", 9),
        (f"{AT_EXIT}\nsys.excepthook = lambda *_: sys.exit(2**70)\n1 / 0", 255),
    ]
    if warm == "--warm":  # a fresh interpreter ends a script by the same function, seconds later
        cases += [
            ("import sys; sys.exit(3)", 3),
            ("raise SystemExit", 0),
            ("1 / 0", 1),
            ("def", 1),
            (f"{AT_EXIT}\nsys.excepthook = lambda: None\n1 / 0", 1),  # it fails itself
        ]
    for text, code in cases:
        script.write_text(text)
        plain = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S
        )
        ours = launch(["run", warm, str(script)], tmp_path)
        assert (plain.returncode, ours.returncode) == (code, code), text
        assert plain.stderr in ours.stderr
        assert ours.stdout == plain.stdout


def test_a_module_that_does_not_exist_is_reported_as_an_import_error(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text("import nowhere")
    for name, said in {
        "nosuch": "ImportError: No module named nosuch",
        "package": "ImportError: No module named package.__main__",
        "nosuch.program": "ImportError: Error while finding module specification for 'nosuch.prog",
        "package.program": "ModuleNotFoundError: No module named 'nowhere'\n  program.py:1: import",
    }.items():
        done = launch(["run", "--nproc", "1", "-m", name], tmp_path)
        assert done.returncode == 1
        _, _, failure = done.stderr.partition("FIRST FAILURE: rank 0 on host ")
        assert failure.partition("\n")[2].startswith(f"  {said}"), done.stderr
        assert "runpy._Error" not in done.stderr
        assert "its last lines" not in failure
        assert f"/{name}-" in failure  # the folder of the logs


def test_ctrl_c_is_raised_although_an_import_catches_all_exceptions() -> None:
    after = False
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        with without_garbage_collection():
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:  # as some modules do around their optional imports
                after = True
        raise AssertionError("Ctrl-C is lost")
    assert after
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_ranks_do_not_share_their_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, random, numpy\n"
        "drawn = (random.random(), numpy.random.rand())\n"
        "open(os.environ['RANK'], 'w').write(repr(drawn))\n"
    )
    done = launch(["run", "--nproc", "3", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = [eval((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert len({pair[0] for pair in drawn}) == len({pair[1] for pair in drawn}) == 3


TRAINING = """
import torch, torch.distributed as dist
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight])
weight.backward()
optimizer.step()
"""


SENT_AROUND = """
if dist.get_rank():
    dist.send(torch.ones(1), 0)
else:
    dist.recv(torch.ones(1), 1)
"""


@pytest.mark.parametrize("joined", [True, False])
def test_ranks_that_train_without_each_other_are_warned(tmp_path: Path, joined: bool) -> None:
    join = "dist.init_process_group('gloo'); dist.destroy_process_group()\n"
    (tmp_path / "script.py").write_text(TRAINING + join * joined)
    done = launch(["run", "--nproc", "2", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    text = "no process group was opened, but the optimizer made 1 step: each"
    assert done.stderr.count(text) == (not joined)
    text = "the optimizer made 1 step on rank 0, which has called no collective and sent nothing"
    assert done.stderr.count(text) == joined


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["dist.barrier()", SENT_AROUND])
def test_ranks_that_call_each_other_are_not_warned(tmp_path: Path, call: str) -> None:
    text = "dist.init_process_group('gloo')\n" + call
    (tmp_path / "script.py").write_text(TRAINING + text + "\ndist.destroy_process_group()\n")
    done = launch(["run", "--nproc", "2", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "LockstepWarning" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "warm"), [("--local_rank", "--warm"), ("--local-rank", "--no-warm")]
)
def test_a_script_is_given_its_local_rank_as_an_argument(
    tmp_path: Path, flag: str, warm: str
) -> None:
    (tmp_path / "script.py").write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        f"parser.add_argument('{flag}', type=int)\n"
        "parser.add_argument('--lr')\n"
        "given = parser.parse_args()\n"
        "open(f'rank{given.local_rank}', 'w').write(given.lr)\n"
    )
    done = launch(["run", warm, "--nproc", "2", "script.py", "--lr", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_the_command_of_a_fresh_interpreter_carries_the_script() -> None:
    script = Script(path="a b.py", arguments=("--x", "ü"), module=True, local_rank_flag="--r")
    command = fresh_interpreter(script)
    assert command.words[0] == sys.executable
    assert command.words[-2:] == ("--x", "ü")
    assert Script(**json.loads(command.environment["LOCKSTEP_SCRIPT"])) == Script(
        path="a b.py",
        arguments=[],  # type: ignore[arg-type]
        module=True,
        local_rank_flag="--r",
    )


def test_the_macro_in_a_command_is_replaced_by_the_local_rank() -> None:
    script = Script(path="s.py", arguments=("--k=${local_rank}", "$x", "$$"))
    command = fresh_interpreter(script).for_rank(3)
    assert command.words[-3:] == ("--k=3", "$x", "$$")
    assert Command(("./a.sh", "x${local_rank}"), {}).for_rank(0) == Command(("./a.sh", "x0"), {})


def test_a_process_is_bound_to_processors_by_torchs_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a new torch has changed what `torch_compat` uses."""
    from torch.numa import binding

    (tmp_path / "numactl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    bound = Command(("python", "s.py"), {}, "node")
    with pytest.raises(SettingError, match="--numa-binding node"):  # there is no GPU here
        bound.for_rank(99)
    cpus = {0: {0, 1, 2}, 1: {3}}
    monkeypatch.setattr(
        binding,
        "_get_logical_cpus_to_bind_to",
        lambda numa_options, **index: cpus[sum(index.values())],
    )
    assert bound.for_rank(0).words == ("numactl", "--physcpubind=0-2", "python", "s.py")
    assert bound.for_rank(1).words == ("numactl", "--physcpubind=3", "python", "s.py")
    (tmp_path / "numactl").unlink()
    with pytest.raises(SettingError, match="numactl"):
        bound.for_rank(0)

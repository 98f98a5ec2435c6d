from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.run.start.source_hints import (
    SourceHints,
    large_modules,
    modules_hidden_by_loaded,
    read_script,
    read_source,
)
from lockstep.run.start.worker import Script

pytestmark = pytest.mark.launcher


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("parser.add_argument('--local_rank', type=int)", "--local_rank"),
        ("parser.add_argument('--local-rank', '--local_rank', type=int)", "--local-rank"),
        ("@click.option('--local_rank')\ndef main(local_rank): ...", "--local_rank"),
        ("# parser.add_argument('--local_rank')", None),
        ("print('give --local_rank')", None),
    ],
)
def test_the_argument_for_the_local_rank_is_found_in_the_source(
    source: str, expected: str | None
) -> None:
    assert read_source(source).local_rank_flag == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'\nimport torch", ("OMP_NUM_THREADS",)),
        ("os.environ.setdefault('MKL_NUM_THREADS', '1')", ("MKL_NUM_THREADS",)),
        ("environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'", ("PYTORCH_CUDA_ALLOC_CONF",)),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'", ()),  # read at the first use of CUDA
        ("x = os.environ['OMP_NUM_THREADS']", ()),
        ("os.environ.update({'OMP_NUM_THREADS': '4'})", ("OMP_NUM_THREADS",)),
    ],
)
def test_variables_that_libraries_read_at_import_are_found_in_the_source(
    source: str, expected: tuple[str, ...]
) -> None:
    assert read_source(source).variables_for_import == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("mp.spawn(main, nprocs=4)", True),
        ("torch.multiprocessing.start_processes(f)", True),
        ("Process(target=f)\nos.environ['MASTER_PORT'] = '1'", True),
        ("Process(target=log_in_background)", False),
        ("streams = numpy.random.SeedSequence(0).spawn(4)", False),
        ("if 'RANK' in os.environ: main()\nelse: mp.spawn(main)", False),
        ("def f(r): os.environ['RANK'] = str(r)\nmp.spawn(f, nprocs=2)", True),
        (
            "env = {'RANK': '0'}\nos.environ.setdefault('LOCAL_RANK', '0')\nmp.spawn(f, (env,))",
            True,
        ),
        ("def f(r): print(os.environ['RANK'])\nmp.spawn(f, nprocs=2)", False),
        ("if __name__ == '__main__':\n    try: mp.spawn(f, nprocs=2)\n    finally: end()", True),
        ("def main(): mp.spawn(f, nprocs=2)\nif __name__ == '__main__': main()", True),
        ("def main(): mp.spawn(f, nprocs=2)\ntrain()", False),  # nothing says that it is called
        ("if args.many: mp.spawn(f, nprocs=2)\nelse: f(0)", False),
        ("mp.spawn(f, nprocs=2) if args.many else f(0)", False),
    ],
)
def test_scripts_that_certainly_spawn_their_ranks_are_recognised(
    source: str, expected: bool
) -> None:
    assert read_source(source).spawns_ranks is expected


def test_large_modules_that_a_script_will_import_are_guessed() -> None:
    assert read_source("opt = torch.optim.SGD(p)").imports == ("torch._dynamo",)
    assert read_source("import torch").imports == ()
    assert "lockstep.checkpoint.checkpointer" not in read_source("import lockstep").imports
    imports = read_source("import lockstep\nworld.checkpoint('runs')").imports
    assert {"lockstep.world", "lockstep.checkpoint.checkpointer"} <= set(imports)
    for name in imports:
        importlib.import_module(name)
    assert large_modules({"torch", *imports}) == list(imports)


@pytest.mark.parametrize("text", [b"def", b"\xff\xfe", b"\0"])
def test_a_file_that_is_no_python_gives_no_hints(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "script").write_bytes(text)
    assert read_script(Script(path=str(tmp_path / "script"))) == SourceHints()
    assert read_script(Script(path=str(tmp_path / "missing.py"))) == SourceHints()


def test_the_source_of_a_folder_and_of_a_module_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    for name, flag in (("pack/__main__.py", "--local_rank"), ("pack/train.py", "--local-rank")):
        (tmp_path / name).write_text(f"add_argument('{flag}')")
    for script, flag in (
        (Script(path="pack"), "--local_rank"),
        (Script(path="pack", module=True), "--local_rank"),
        (Script(path="pack.train", module=True), "--local-rank"),
    ):
        assert read_script(script).local_rank_flag == flag


def test_a_script_in_another_encoding_is_read(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    text = "# coding: latin-1\nadd_argument('--local_rank', help='Ger\xe4t')\n'\\d'\n"
    (tmp_path / "script.py").write_bytes(text.encode("latin-1"))
    assert read_script(Script(path=str(tmp_path / "script.py"))).local_rank_flag == "--local_rank"
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbfadd_argument('--local-rank')")
    assert read_script(Script(path=str(tmp_path / "marked.py"))).local_rank_flag == "--local-rank"
    assert not recwarn.list  # of the escape: the ranks warn of it


def test_modules_beside_the_script_that_hide_imported_ones_are_found(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for path in (there / "a.py", there / "b" / "__init__.py", here / "own.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    loaded = {
        "a": module(there / "a.py"),
        "b": module(there / "b" / "__init__.py"),
        "own": module(here / "own.py"),
        "built_in": ModuleType("built_in"),
        "os": os,
        "c": module(there / "c.so"),
        "d": module(there / "d.py"),
        "__main__": module(there / "command.py"),
    }
    assert modules_hidden_by_loaded(str(here), loaded) == []
    for name in ("a.py", "built_in.py", "os.py", "c.cpython-311-x.so", "e.py", "d.txt"):
        (here / name).touch()
    (here / "__main__.py").touch()  # which nobody imports by its name
    (here / "b").mkdir()
    (here / "d").mkdir()  # without __init__.py it is found last
    (here / "b" / "__init__.py").touch()
    assert modules_hidden_by_loaded(str(here), loaded) == ["a.py", "b", "c.cpython-311-x.so"]
    assert modules_hidden_by_loaded(str(here / "nowhere.zip"), loaded) == []


def module(file: Path) -> ModuleType:
    made = ModuleType(file.stem)
    made.__file__ = str(file)
    return made

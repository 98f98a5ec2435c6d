"""The zygote imports a script's libraries before a restart, and the script sees no difference."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launched import launch
from ranks import run_ranks

from lockstep.run.start import script_libraries
from lockstep.run.start.script_libraries import (
    CannotPrepareError,
    PreparedModules,
    prepare_modules,
)

pytestmark = pytest.mark.launcher

# What `bulky` does outside of itself, all of which real libraries do.
BULKY = """
import logging, os, warnings
from random import randint
import helper
NUMBERS = [randint(0, 2**30 + 1) for _ in range(5)]  # each draws again with probability 1/2
os.environ.setdefault("BULKY_IS_HERE", "1")
warnings.filterwarnings("ignore", message="the matrix subclass", category=ImportWarning)
handler = logging.StreamHandler()
"""
FILES = {
    "bulky/__init__.py": BULKY,
    "bulky/parts.py": "import bulky\nclass Part: pass\n",
    "helper.py": "import colorsys\n",
}


def install(folder: Path, **more: str) -> None:
    """Makes a folder with libraries, from which this process imports, as if pip had made it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + more.get(path.parent.name, ""))
    sys.path.append(str(folder))
    script_libraries.LIBRARIES = frozenset({"bulky"})
    script_libraries._folders_of_packages = lambda: [str(folder)]


def in_copy(function: Callable[[], Any]) -> Any:
    """Calls a function in a copy of this process, and returns its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def what_a_script_sees() -> dict[str, Any]:
    """Imports the library as a script does; what it could tell, step by step."""
    names_before = list(sys.modules)
    random.seed(3)
    filters_before = list(warnings.filters)
    seen: dict[str, Any] = {"before": "BULKY_IS_HERE" in os.environ, "modules before": names_before}
    import bulky

    seen["without parts"] = [list(sys.modules), hasattr(bulky, "parts"), random.random()]
    from bulky import parts

    seen["all"] = [list(sys.modules), vars(bulky)["parts"] is parts, parts.Part.__module__]
    seen["draws"] = [random.random(), bulky.randint is random.randint]
    seen["variable"] = os.environ["BULKY_IS_HERE"]
    new_filters = warnings.filters[: len(warnings.filters) - len(filters_before)]
    seen["filters"] = [str(new_filters), warnings.filters[len(new_filters) :] == filters_before]
    seen["stream"] = bulky.handler.stream is sys.stderr
    for module in (bulky, parts):
        spec = module.__spec__
        assert spec is not None
        seen[module.__name__] = [spec.origin, spec.name, type(spec.loader).__name__, spec.cached]
    old_part = parts.Part
    seen["reloaded"] = importlib.reload(parts).Part is not old_part
    return seen


def report_of_rank() -> dict[str, Any]:
    names_before = frozenset(sys.modules)
    what_a_script_sees()
    return script_libraries._report(names_before)


def see_twice(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    install(folder)
    import psutil  # noqa: F401  # the zygote needs it

    report = in_copy(report_of_rank)
    fresh = in_copy(what_a_script_sees)
    names_before = list(sys.modules)
    prepare_modules(report, {})
    assert list(sys.modules) == names_before
    assert isinstance(sys.meta_path[0], PreparedModules)
    (folder / "bulky" / "__init__.py").write_text("raise ValueError('it is not imported again')")
    return fresh, in_copy(what_a_script_sees), list(report["origins"])


def test_a_script_sees_the_same_as_if_it_had_imported_the_library(tmp_path: Path) -> None:
    ((fresh, prepared, imported),) = run_ranks(see_twice, 1, tmp_path / "packages")
    assert {"bulky", "bulky.parts", "helper"} <= set(imported)
    assert prepared == fresh
    assert fresh["before"] is False
    assert fresh["without parts"][1] is False


class Odd(types.ModuleType):
    def __getattribute__(self, name: str) -> object:
        raise ValueError(name)


def test_a_report_runs_no_code_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "odd", Odd("odd"))
    monkeypatch.setitem(sys.modules, ("no", "name"), Odd("odd"))  # type: ignore[misc]
    monkeypatch.setattr(sys, "path", [Path("ignored by Python"), "folder"])
    report = script_libraries._report(frozenset(sys.modules) - {"odd", ("no", "name")})
    assert json.loads(json.dumps(report)) == report
    assert report["origins"] == {"odd": None}
    assert report["path"] == ["folder"]


DOES_MORE = {
    "threads": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "the number of threads",
    ),
    "open files": ("import tempfile\nfile = tempfile.TemporaryFile()", "the open files"),
    "prints": ("print('welcome')", "prints 'welcome"),
    "warns": ("import warnings\nwarnings.warn('old', UserWarning)", "UserWarning: old"),
    "keeps": ("import sys\ndef show(text, file=sys.stdout): pass", "keeps sys.stdout"),
    "numpy": ("import numpy.random\nnumpy.random.rand()", "numpy's random state"),
    "torch": ("import torch\ntorch.rand(1)", "torch's random state"),
    "signal": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "the signal handlers"),
    "random": ("from random import _inst\n_inst.random()", "the state of random"),
    "filters": ("import warnings\nwarnings.resetwarnings()", "filters of warnings"),
    "other modules": ("import os\nif 'ZYGOTE' in os.environ: import other", "other is not what"),
    "fails": ("import os\nif 'ZYGOTE' in os.environ: raise OSError('full')", "OSError: full"),
}


def try_to_prepare(report: dict[str, Any], variables: dict[str, str]) -> str:
    """Why the library cannot be prepared, or whether it was."""
    try:
        prepare_modules(report, variables)
    except CannotPrepareError as error:
        return str(error)
    return "prepared" if isinstance(sys.meta_path[0], PreparedModules) else "nothing was done"


def prepare_in_copy(folder: Path, more: str) -> str:
    install(folder, bulky=more)
    (folder / "other.py").touch()
    report = in_copy(report_of_rank)
    found: str = in_copy(partial(try_to_prepare, report, {"ZYGOTE": "1"}))
    return found


@pytest.mark.parametrize("what", DOES_MORE)
def test_a_library_that_does_more_is_not_prepared(tmp_path: Path, what: str) -> None:
    code, expected = DOES_MORE[what]
    (why,) = run_ranks(prepare_in_copy, 1, tmp_path / "packages", code)
    assert expected in why


def prepare_elsewhere(folder: Path) -> dict[str, str]:
    install(folder)
    script_libraries._THREAD_STARTERS["bulky"] = {"starter"}
    report = in_copy(report_of_rank)
    own = folder.parent / "own"
    own.mkdir()
    (own / "bulky.py").write_text("raise SystemExit('a module of the user')")
    others = {
        "the same": {},
        "threads": {"variables": {"OMP_NUM_THREADS": "7"}},
        "folder": {"folder": "/"},
        "a module of the user": {"path": [str(own), *sys.path]},
        "nothing to import": {"origins": {}},
        "a library that starts threads": {"origins": {**report["origins"], "starter": None}},
    }
    return {
        name: in_copy(partial(try_to_prepare, {**report, **other}, {}))
        for name, other in others.items()
    }


def test_nothing_is_imported_in_other_surroundings(tmp_path: Path) -> None:
    (found,) = run_ranks(prepare_elsewhere, 1, tmp_path / "packages")
    assert found.pop("the same") == "prepared"
    assert set(found.values()) == {"nothing was done"}


REPEATED = """
import hashlib, os, random, signal, sys, warnings
import numpy, torch
import lockstep
prepared = [type(finder).__name__ for finder in sys.meta_path].count("PreparedModules")
early = "sklearn" in sys.modules
random.seed(5)
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
import threadpoolctl
with lockstep.init("ddp", device="cpu", seed=0) as world:
    images, labels = load_digits(return_X_y=True)
    found = hashlib.sha256()
    found.update((images.T @ images).tobytes())
    found.update(Ridge().fit(images, labels).coef_.tobytes())
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.tensor(images).float(), torch.tensor(labels))
    loader = torch.utils.data.DataLoader(data, batch_size=256, shuffle=True)
    model, optimizer, loader = world.prepare(model, optimizer, loader)
    for x, y in loader:
        world.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found.update(next(model.parameters()).detach().numpy().tobytes())
    threads = [(each["filepath"], each["num_threads"]) for each in threadpoolctl.threadpool_info()]
    threads.sort()
    facts = [found.hexdigest(), random.random(), threads, torch.get_num_threads()]
    facts += [early, len(warnings.filters), os.environ["KMP_INIT_AT_FORK"]]
    world.print("FOUND", prepared, facts)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    world.barrier()
    if world.is_main and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.is_main and attempt == "1" and sys.argv[1] == "zygote":
        os.kill(os.getppid(), signal.SIGKILL)
    world.barrier()
"""


@pytest.mark.parametrize(
    ("size", "killed"),
    [(2, "rank"), pytest.param(1, "zygote", marks=pytest.mark.thorough)],
)
def test_every_attempt_computes_the_same_bits(tmp_path: Path, size: int, killed: str) -> None:
    (tmp_path / "script.py").write_text(REPEATED)
    flags = [f"--nproc={size}", "--virtual-ranks=2", "--max-restarts=2"]
    done = launch(["run", *flags, "script.py", killed], tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"FOUND (\d) (.*)", done.stdout)
    prepared = [number for number, _ in found]
    assert prepared == (["0", "1", "1"] if killed == "zygote" else ["0", "1"])
    assert len({facts for _, facts in found}) == 1

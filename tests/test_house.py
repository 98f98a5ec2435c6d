"""The rules of the house, which ARCHITECTURE.md explains: order of the rooms, circles,
private names of torch's, and what may be done only in one place.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import house
import private_torch_names

pytestmark = pytest.mark.launcher

MODULES = house.read_house()

ORDER = (
    {"columns"},
    {"language", "wording", "user_code", "masking"},
    {"errors", "error_in_flight"},
    {"torch_compat", "machine"},
    {"units", "familiar_names", "file_paths", "keyword_arguments"},
    {"settings", "session"},
    {"communication"},
    {"distributed"},
    {"batch"},
    {"optim"},
    {"checkpoint"},
    {"strategies"},
    {"training"},
    {"extensions"},
    {"world"},
    {"verify", "doctor"},
    {"testing", "cli"},
)
"""A room imports itself and the rooms before it; those of one line do not know each other."""
BESIDE = {"run"}
"""It must start fast and survive what it watches, so it sees itself and what is listed."""
SEEN_FROM_BESIDE = {
    "columns",
    "error_in_flight",
    "errors",
    "file_paths",
    "keyword_arguments",
    "language",
    "machine",
    "masking",
    "torch_compat",
    "user_code",
    "wording",
}
MAY_USE_BESIDE = {"verify", "doctor", "testing", "cli", ""}
# Gloo takes its interface from the environment alone; set while a run goes on, then restored.
# The interface for Gloo, what cuBLAS reads before its first call, and how torch looks for GPUs.
MAY_WRITE_ENVIRONMENT = {"machine.interface", "distributed.determinism", ""}
MAY_PRINT = ("cli.", "extensions.report.")
# A group that is opened elsewhere would not have the run's timeout.
OPENS_GROUPS = {
    "new_group": "communication.groups",
    "new_subgroups": "communication.groups",
    "new_subgroups_by_enumeration": "communication.groups",
    "split_group": "communication.groups",
    "init_device_mesh": "communication.groups",
    "init_process_group": "distributed.backend",
}
# Modules that still use private names of torch, with the reason. The list must shrink to nothing.
PRIVATE_NAMES_ELSEWHERE = {
    "checkpoint.formats.dcp": "a class that the files of torch.distributed.checkpoint name",
    "checkpoint.formats.dcp_metadata": "a function that these files name",
    "run.start.source_hints": "a module of torch's that a script's source may import",
    "run.watch.activity": "functions of torch's that are looked for in stacks",
    "run.watch.stacks": "functions of torch's that are looked for in stacks",
}


def rank_of(room: str) -> int:
    return next(number for number, rooms in enumerate(ORDER) if room in rooms)


def may_import(module: house.Module, name: str) -> bool:
    room = name.partition(".")[0]
    if module.room in ("", "__main__") or room in ("", module.room):
        return True  # the public names are imported when they are asked for
    if module.room in BESIDE:
        return room in BESIDE or room in SEEN_FROM_BESIDE
    if room in BESIDE:
        return module.room in MAY_USE_BESIDE
    return rank_of(room) < rank_of(module.room)


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_order_of_the_rooms(name: str) -> None:
    module = MODULES[name]
    assert not {other for other in module.imports if not may_import(module, other)}


def test_every_room_has_its_place() -> None:
    placed = set().union(*ORDER) | BESIDE | {"", "__main__"}
    assert {module.room for module in MODULES.values()} == placed


def test_there_are_no_import_circles() -> None:
    assert house.circles(MODULES) == []


def test_private_names_of_torch_are_in_one_room() -> None:
    places = private_torch_names.find_places(MODULES)
    elsewhere = {name for name in places if MODULES[name].room != "torch_compat"}
    assert elsewhere == set(PRIVATE_NAMES_ELSEWHERE)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._C._get_tracing_state()", "torch._C._get_tracing_state"),
        ("from torch.utils import _pytree as trees\ntrees._node()", "torch.utils._pytree"),
        ("def f(module):\n    return module._buffers", "module._buffers"),
        ("_version = 1\ndef f(x):\n    return x._version", "x._version"),
        ("def f(x):\n    vars(x).update(_modules={})", "_modules="),
        ("def f(x):\n    return getattr(x, '_version')", "'_version'"),
        ("def f(frame):\n    return frame.name == '_sync_buffers'", "'_sync_buffers'"),
        ("import sys\nloaded = 'torch._dynamo' in sys.modules", "'torch._dynamo'"),
        (
            "from torch import nn\nclass M(nn.Module):\n    def _call_impl(self): ...",
            "def _call_impl",
        ),
        (
            "from torch import nn\nclass M(nn.Module):\n    def f(self): self._buffers",
            "self._buffers",
        ),
    ],
)
def test_a_private_name_of_torch_is_found(source: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(source)
    places = private_torch_names.find_places(house.read_house(tmp_path))
    assert found in {place.text for place in places["file"]}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self): self._step = 1\ndef f(a):\n    return a._step",
        "def f(pair):\n    return pair._replace(a=1)._asdict()",
        "import sys\nframe = sys._getframe()",
        "def f(x):\n    return x.__dict__",
        "from torch.distributed.elastic.agent.server import SimpleElasticAgent\n"
        "class A(SimpleElasticAgent):\n    def _stop_workers(self): ...",
    ],
)
def test_other_private_names_are_not_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(source)
    assert private_torch_names.find_places(house.read_house(tmp_path)) == {}


@pytest.mark.parametrize("name", MODULES)
def test_what_is_done_in_one_place_alone(name: str) -> None:
    module = MODULES[name]
    for node in ast.walk(module.tree):
        if module.room != "run" and name not in MAY_WRITE_ENVIRONMENT:
            assert not writes_environment(node), f"line {node.lineno} writes a variable"
        if not name.startswith(MAY_PRINT) and isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            assert called != "print", f"line {node.lineno} prints"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            assert OPENS_GROUPS.get(called, name) == name, f"line {node.lineno} opens a group"


def writes_environment(node: ast.AST) -> bool:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"update", "setdefault", "pop", "putenv"}:
            return "environ" in ast.unparse(node.func.value) and "os" in ast.unparse(
                node.func.value
            )
    return any(
        isinstance(t, ast.Subscript) and ast.unparse(t.value) == "os.environ" for t in targets
    )


def test_joining_a_run_does_not_load_the_compiler():
    """`torch._dynamo` takes a second and 70 MiB; under dp alone torch's own classes need it."""
    code = (
        "import sys, lockstep\n"
        "with lockstep.init('ddp', device='cpu'):\n"
        "    assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_names_of_strategies_are_known_without_torch():
    """`lockstep run --help` names them, and importing torch takes a second."""
    code = (
        "import sys, lockstep.strategies.registry as registry\n"
        "assert 'ddp' in registry.ENTRY_OF_STRATEGY\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

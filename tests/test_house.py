"""The house's rules as tests: sizes, layers, and what may be done only in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Gloo takes its interface from the environment alone; set around one call, then restored.
MAY_WRITE_ENVIRONMENT = {SOURCE / "runtime" / "interface.py"}

# Each part may import itself and what is listed.
BASE = {"errors", "topology", "sockets"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "topology": {"errors"},
    "sockets": set(),
    "runtime": BASE,
    "data": BASE | {"runtime"},
    "communication": BASE | {"runtime"},
    "optim": BASE | {"runtime"},
    "checkpoint": BASE | {"runtime"},
    "strategies": BASE | {"runtime", "data", "communication", "optim", "checkpoint"},
    "diagnose": {"errors"},  # pure: values in, findings out; the exit codes are of errors
    "launch": BASE | {"diagnose"},
}
LAYERS["report"] = LAYERS["strategies"] | {"strategies"}
LAYERS["world"] = LAYERS["report"] | {"report"}
LAYERS["start"] = LAYERS["world"] | {"world"}
LAYERS["verify"] = LAYERS["start"] | {"start", "diagnose", "launch"}
LAYERS["cli"] = LAYERS["verify"] | {"verify"}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> set[str]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "lockstep":
                modules += [f"lockstep.{alias.name}" for alias in node.names]
            modules.append(node.module)
    return {name.split(".")[1] for name in modules if name.startswith("lockstep.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_file_follows_the_rules(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    part = part_of(path)
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
        if part != "launch" and path not in MAY_WRITE_ENVIRONMENT:
            assert not writes_environment(node), (
                f"line {node.lineno} writes an environment variable"
            )
        if part not in {"cli", "report"} and isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert name != "print", f"line {node.lineno} prints"
    if part in LAYERS:
        allowed = LAYERS[part] | {part, "__version__"}
        assert imported_parts(tree) <= allowed, "imports against the order of the layers"


def writes_environment(node: ast.AST) -> bool:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # noqa: SIM102
        if node.func.attr in {"update", "setdefault", "pop", "putenv"}:
            return "environ" in ast.unparse(node.func.value) and "os" in ast.unparse(
                node.func.value
            )
    return any(
        isinstance(t, ast.Subscript) and ast.unparse(t.value) == "os.environ" for t in targets
    )


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {part_of(p) for p in FILES} - {"__init__", "strategies"}
    assert parts <= set(LAYERS) | {"__main__"}


def test_joining_a_run_does_not_load_the_compiler():
    """`torch._dynamo` takes a second and 70 MiB; under dp alone torch's own classes need it."""
    code = (
        "import sys, lockstep\n"
        "with lockstep.init('ddp', device='cpu'):\n"
        "    assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

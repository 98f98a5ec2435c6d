"""What a script's source says about how it wants to be started, and what lies beside it."""

from __future__ import annotations

import ast
import tokenize
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_LOCAL_RANK_FLAGS = ("--local-rank", "--local_rank")
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "TORCH_", "PYTORCH_")

_READ_BY_RANKS = {"RANK", "LOCAL_RANK"}
_LARGE = {
    "torch._dynamo": "optim",  # by the first optimizer, for over a second
    "lockstep.world": "lockstep",
    "lockstep.strategies.ddp": "lockstep",
    "numpy.random": "lockstep",
}
"""Modules, and the word of which scripts speak that import them sooner or later."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was found; the defaults stand for a script that could not be read."""

    local_rank_flag: str | None = None
    """The spelling of the argument in which the script wants its local rank."""
    variables_for_import: tuple[str, ...] = ()
    """Variables that it sets itself and that libraries read when they are imported."""
    own_processes: bool = False
    """Whether it starts the ranks itself (`mp.spawn`), and does not look whether it is one."""
    imports: tuple[str, ...] = ()
    """Large modules that every rank will probably import while it runs."""


def read_script(name: str, *, module: bool = False) -> Reading:
    """Reads a script's source; a file that is no Python source gives the defaults.

    Args:
        name: path of a script, or name of a module, which is looked for where `python -m` first
            looks.
        module: which of them it is.
    """
    path = Path(*name.split(".")) if module else Path(name)
    if module:
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            return read_source(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):  # running it says what is wrong
        return Reading()


def large(loaded: Container[str]) -> list[str]:
    """The large modules that a process which has imported `loaded` has imported."""
    return [name for name in _LARGE if name in loaded]


def read_source(source: str) -> Reading:
    """Reads a script's source.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it holds null bytes.
    """
    nodes = list(ast.walk(ast.parse(source)))
    variables = sorted(set(_variables_set(nodes)))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    calls = {
        name
        for node in nodes
        if isinstance(node, ast.Call)
        # Random generators have a `spawn(n)` of their own.
        if (name := _last_name(node.func)) != "spawn" or len(node.args) + len(node.keywords) > 1
    }
    return Reading(
        local_rank_flag=_local_rank_flag(nodes),
        variables_for_import=tuple(v for v in variables if v.startswith(_READ_AT_IMPORT)),
        own_processes=_starts_ranks(calls, source) and not constants & _READ_BY_RANKS,
        imports=tuple(name for name, word in _LARGE.items() if word in source),
    )


def _starts_ranks(calls: set[str], source: str) -> bool:
    return bool(calls & {"spawn", "start_processes"}) or (
        "Process" in calls and "MASTER_PORT" in source
    )


def _local_rank_flag(nodes: list[ast.AST]) -> str | None:
    """The flag's first spelling among the arguments of any call, such as `add_argument`."""
    found = [
        argument.value
        for node in nodes
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK_FLAGS
    ]
    return str(found[0]) if found else None


def _variables_set(nodes: list[ast.AST]) -> Iterator[str]:
    """Names given to `os.environ[...] = `, `os.environ.setdefault` and `os.putenv`."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if _last_name(node.value) == "environ" and isinstance(node.slice, ast.Constant):
                yield str(node.slice.value)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("setdefault", "putenv"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant):
                yield str(first.value)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def hidden_by(folder: str, loaded: Mapping[str, ModuleType]) -> list[str]:
    """Modules which have been imported, where a script in `folder` would import its own instead.

    Args:
        folder: the script's, which Python searches first.
        loaded: as `sys.modules`.

    Returns:
        The names of what is in the folder (`random.py`, `numpy`), sorted.
    """
    try:
        paths = list(Path(folder).iterdir())
    except OSError:  # a zip file
        return []
    return sorted(
        path.name
        for path in paths
        if (path.suffix in (".py", ".so") or (path / "__init__.py").is_file())
        and _is_another(loaded.get(path.name.partition(".")[0]), path.parent.resolve())
    )


def _is_another(module: ModuleType | None, folder: Path) -> bool:
    """Whether a module comes from a file, and from another folder."""
    file = getattr(module, "__file__", None)
    frozen = getattr(getattr(module, "__spec__", None), "origin", None) == "frozen"
    if file is None or frozen:  # Python looks for these elsewhere first
        return False
    path = Path(file).resolve()
    return (path.parents[1] if path.name == "__init__.py" else path.parent) != folder

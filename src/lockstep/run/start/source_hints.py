"""What a script's source says about how it wants to be started, without running it.

The source is read as a syntax tree (`ast`). A script that cannot be read gets the defaults.

A *warm* process has imported torch, and a rank that is a copy of it starts fast. It must not be one
if the script would then get other modules, or other settings of libraries, than it asks for.
"""

from __future__ import annotations

import ast
import tokenize
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lockstep.run.start.worker import Script

_LOCAL_RANK_FLAGS = ("--local-rank", "--local_rank")
_IMPORT_TIME_VARIABLE_PREFIXES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "NUMEXPR_",
    "TORCH_",
    "PYTORCH_",
)
"""Libraries read variables with these prefixes when they are imported."""
_RANK_VARIABLES = {"RANK", "LOCAL_RANK"}
_WORD_OF_LARGE_MODULE = {
    "torch._dynamo": "optim",  # imported by the first optimizer, which takes over a second
    "lockstep.world": "lockstep",
    "lockstep.strategies.ddp": "lockstep",
    "numpy.random": "lockstep",
}
"""Large modules. A script whose source holds the word imports the module sooner or later."""


@dataclass(frozen=True, kw_only=True)
class SourceHints:
    """What a script's source says; the defaults stand for one that could not be read."""

    local_rank_flag: str | None = None
    """`--local-rank` or `--local_rank`, if the script defines that argument."""
    variables_for_import: tuple[str, ...] = ()
    """Variables that the script sets and that libraries read when they are imported."""
    spawns_ranks: bool = False
    """True if it certainly starts the ranks itself (`mp.spawn`), and never reads its own rank."""
    imports: tuple[str, ...] = ()
    """Large modules that every rank will probably import while it runs."""
    imports_lockstep: bool = False
    """True if it has a line such as `import lockstep` itself."""


def read_script(script: Script) -> SourceHints:
    """Reads a script's source; a file that is no Python source gives the defaults.

    A module is looked for in the working directory, where `python -m` looks first.
    """
    if script.module:
        names = script.path.split(".")
        path = Path(*names)
        is_package = path.is_dir()
        path = path / "__main__.py" if is_package else path.with_suffix(".py")
    else:
        path = Path(script.path)
        if path.is_dir():  # Python runs the `__main__.py` of a folder
            path = path / "__main__.py"

    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            return read_source(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):  # running it says what is wrong
        return SourceHints()


def read_source(source: str) -> SourceHints:
    """Reads a script's source.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it holds null bytes.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))

    variables = _assigned_names(nodes)  # the environment variables that the script sets
    import_time_variables = []  # those that libraries read when they are imported
    for name in sorted(variables):
        if name.startswith(_IMPORT_TIME_VARIABLE_PREFIXES):
            import_time_variables.append(name)

    imports = []  # large modules that the script mentions, and so will probably import
    for module, word in _WORD_OF_LARGE_MODULE.items():
        if word in source:
            imports.append(module)

    return SourceHints(
        local_rank_flag=_local_rank_flag(nodes),
        variables_for_import=tuple(import_time_variables),
        spawns_ranks=_starts_processes(tree, variables) and not _reads_rank(nodes),
        imports=tuple(imports),
        imports_lockstep=_imports_lockstep(nodes),
    )


def large_modules(loaded: Container[str]) -> list[str]:
    """Returns the large modules that have been imported.

    Args:
        loaded: the imported modules by name, such as `sys.modules`.
    """
    return [name for name in _WORD_OF_LARGE_MODULE if name in loaded]


def _imports_lockstep(nodes: list[ast.AST]) -> bool:
    """Returns True if a line imports Lockstep, or something of it."""
    modules: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            modules.append(node.module)
    return any(module.partition(".")[0] == "lockstep" for module in modules)


def _local_rank_flag(nodes: list[ast.AST]) -> str | None:
    """Returns the flag that a call names, such as `add_argument("--local_rank")`; None: no call."""
    for node in nodes:
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK_FLAGS:
                    return str(argument.value)
    return None


def _assigned_names(nodes: list[ast.AST]) -> set[str]:
    """Returns the strings under which a script stores a value, as it does to set a variable."""
    names = set()
    for constant in _assignment_keys(nodes):
        if isinstance(constant.value, str):
            names.add(constant.value)
    return names


def _assignment_keys(nodes: list[ast.AST]) -> list[ast.Constant]:
    """Finds NAME in `x[NAME] = y`, `{NAME: y}`, `setdefault(NAME, y)` and `putenv(NAME, y)`."""
    keys: list[ast.AST | None] = []
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
        elif isinstance(node, ast.Dict):
            keys.extend(node.keys)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("setdefault", "putenv"):
            keys.extend(node.args[:1])

    return [key for key in keys if isinstance(key, ast.Constant)]


def _reads_rank(nodes: list[ast.AST]) -> bool:
    """Returns True if the source mentions RANK or LOCAL_RANK other than to set it."""
    # Nodes are compared by identity: the same text may be read in one place and set in another.
    assigned = {id(constant) for constant in _assignment_keys(nodes)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in assigned:
            if node.value in _RANK_VARIABLES:
                return True
    return False


def _starts_processes(tree: ast.AST, variables: set[str]) -> bool:
    """Returns True if a script certainly starts processes that are to be ranks.

    Args:
        tree: the script's syntax tree.
        variables: the names that it sets.
    """
    called = set()
    for node in _nodes_that_certainly_run(tree):
        if isinstance(node, ast.Call) and not _is_spawn_of_generator(node):
            called.add(_last_name(node.func))
    if "spawn" in called or "start_processes" in called:
        return True
    # Processes may be for anything else, unless the script also says where they meet.
    return "Process" in called and "MASTER_PORT" in variables


def _nodes_that_certainly_run(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes that are neither behind a condition nor in a function that is never called.

    `if __name__ == "__main__":` does not count as a condition. A function counts as called if its
    name is mentioned by what certainly runs.
    """
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    nodes: list[ast.AST] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        nodes.append(node)

        # If this node is the name of a function, the function's body certainly runs as well. The
        # function is taken out of the table, so that its body is added once.
        function = functions.pop(_last_name(node), None)
        if function is not None:
            pending.extend(function.body)

        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                continue
            if isinstance(child, ast.If | ast.IfExp) and "__name__" not in ast.dump(child.test):
                continue
            pending.append(child)

    return nodes


def _is_spawn_of_generator(call: ast.Call) -> bool:
    """True for `generator.spawn(n)` of a random generator, which starts no process.

    `mp.spawn` is given a function and more.
    """
    num_arguments = len(call.args) + len(call.keywords)
    return _last_name(call.func) == "spawn" and num_arguments < 2


def _last_name(node: ast.AST) -> str:
    """Returns `c` for the expressions `a.b.c` and `c`; empty for any other."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


# Modules beside the script


def hidden_by(folder: str, loaded: Mapping[str, ModuleType]) -> list[str]:
    """Finds modules beside a script that have the name of a module which has been imported.

    A fresh interpreter would import the module beside the script. A copy of a warm process would
    use the one that it has imported already.

    Args:
        folder: the script's folder, which Python searches first.
        loaded: the imported modules by name, such as `sys.modules`.

    Returns:
        The names of what is in the folder (`random.py`, `numpy`), sorted.
    """
    try:
        paths = list(Path(folder).iterdir())
    except OSError:  # a zip file
        return []

    names = []
    for path in paths:
        is_module = path.suffix in (".py", ".so") or (path / "__init__.py").is_file()
        if not is_module or path.name == "__main__.py":  # nobody imports that by its name
            continue
        name = path.name.partition(".")[0]  # "a" for "a.cpython-312-x86_64-linux-gnu.so"
        module = loaded.get(name)
        if _is_from_elsewhere(module, path.parent.resolve()):
            names.append(path.name)

    return sorted(names)


def _is_from_elsewhere(module: ModuleType | None, folder: Path) -> bool:
    """Returns True if a module was imported from a file in another folder.

    Built-in and frozen modules have no such file: Python looks for them before it looks in folders.
    """
    file = getattr(module, "__file__", None)
    is_frozen = getattr(getattr(module, "__spec__", None), "origin", None) == "frozen"
    if file is None or is_frozen:
        return False

    path = Path(file).resolve()
    is_package = path.name == "__init__.py"

    # A package `numpy` is in `folder` if its file is `folder/numpy/__init__.py`.
    module_folder = path.parent.parent if is_package else path.parent
    return module_folder != folder

"""Reads a script's source, without running it, to find out how the script must be started.

The source is parsed into a syntax tree (`ast`). A script that cannot be parsed gets the defaults.

A *warm* process has imported torch, and a rank that is a copy of it starts fast. But a rank must
not be such a copy if the script would then get other modules, or other settings of libraries, than
it asks for.
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
    "lockstep.extensions.autotune": "lockstep",
    "lockstep.extensions.checks": "lockstep",
    "lockstep.distributed.rendezvous": "lockstep",
    "lockstep.checkpoint.checkpointer": ".checkpoint(",
    "numpy.random": "lockstep",
}
"""Large modules, each with a word: if a script's source contains the word, the script will import
the module sooner or later."""


@dataclass(frozen=True, kw_only=True)
class SourceHints:
    """What a script's source says about how to start it."""

    local_rank_flag: str | None = None
    """`--local-rank` or `--local_rank`, if the script defines that argument."""
    variables_for_import: tuple[str, ...] = ()
    """Variables that the script sets and that libraries read when they are imported."""
    spawns_ranks: bool = False
    """True if the script certainly starts the ranks itself (`mp.spawn`) and never reads its own
    rank."""
    imports: tuple[str, ...] = ()
    """Large modules that every rank will probably import."""
    imports_lockstep: bool = False
    """True if the script itself contains a line such as `import lockstep`."""


def path_of_source(script: Script) -> Path:
    """Returns the path of the source file of a script or module. It may not exist.

    A module is searched for in the working directory, where `python -m` looks first.
    """
    if script.module:
        names = script.path.split(".")
        path = Path(*names)
        is_package = path.is_dir()
        return path / "__main__.py" if is_package else path.with_suffix(".py")

    path = Path(script.path)
    if path.is_dir():  # Python runs the `__main__.py` of a folder
        return path / "__main__.py"
    return path


def parse_file(path: Path) -> ast.Module | None:
    """Parses a source file; returns None if it is not Python code or cannot be read."""
    try:
        source = _read_text(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show these warnings
            return ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):  # running the script will say why
        return None


def read_script(script: Script) -> SourceHints:
    """Reads the source of a script or module. A file that is not Python code gives the defaults."""
    try:
        source = _read_text(path_of_source(script))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show these warnings
            return read_source(source)
    except (OSError, SyntaxError, ValueError, RecursionError):  # running the script will say why
        return SourceHints()


def _read_text(path: Path) -> str:
    """Returns the text of a source file, in the encoding that it declares.

    Raises:
        OSError: the file cannot be read, or is a pipe: the ranks could not read it again.
        SyntaxError: the encoding is unknown.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a regular file")
    with tokenize.open(path) as file:
        return file.read()


def read_source(source: str) -> SourceHints:
    """Reads the source code of a script.

    Raises:
        SyntaxError: it is not Python code.
        ValueError: it contains null bytes.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))

    # Environment variables that the script sets, and that libraries read when they are imported.
    variables = _assigned_names(nodes)
    import_time_variables = []
    for name in sorted(variables):
        if name.startswith(_IMPORT_TIME_VARIABLE_PREFIXES):
            import_time_variables.append(name)

    # Large modules that the script will probably import, perhaps through other modules. A word in
    # the text suffices: a warm process imports them in advance, and a wrong guess costs only time.
    imports = []
    for module, word in _WORD_OF_LARGE_MODULE.items():
        if word in source:
            imports.append(module)

    # A script may start the ranks itself. But if it reads RANK, it is a rank, and the processes
    # that it starts are helpers.
    spawns_ranks = _starts_processes(tree, variables) and not _reads_rank(nodes)

    return SourceHints(
        local_rank_flag=_local_rank_flag(nodes),
        variables_for_import=tuple(import_time_variables),
        spawns_ranks=spawns_ranks,
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
    """Returns True if a line imports Lockstep or a part of it."""
    modules: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            modules.append(node.module)
    return any(module.partition(".")[0] == "lockstep" for module in modules)


def _local_rank_flag(nodes: list[ast.AST]) -> str | None:
    """Finds the flag for the local rank that a script defines, as in
    `add_argument("--local_rank")`.

    Returns:
        The flag, or None if there is none.
    """
    for node in nodes:
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK_FLAGS:
                    return str(argument.value)
    return None


def _assigned_names(nodes: list[ast.AST]) -> set[str]:
    """Returns the string keys to which a script assigns values, among them the variables that it
    sets.
    """
    names = set()
    for constant in _constants_assigned_to(nodes):
        if isinstance(constant.value, str):
            names.add(constant.value)
    return names


def _constants_assigned_to(nodes: list[ast.AST]) -> list[ast.Constant]:
    """Finds the constants that serve as keys or names in assignments.

    Each is a NAME in `x[NAME] = y`, `{NAME: y}`, `setdefault(NAME, y)` or `putenv(NAME, y)`.
    """
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
    # In `os.environ["RANK"] = "0"; rank = os.environ["RANK"]`, the same text is set and then read.
    # These are two nodes, so they are told apart by their identity.
    ids_of_assigned_constants = {id(constant) for constant in _constants_assigned_to(nodes)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in ids_of_assigned_constants:
            if node.value in _RANK_VARIABLES:
                return True
    return False


def _starts_processes(tree: ast.AST, variables: set[str]) -> bool:
    """Returns True if a script certainly starts processes that are meant to be ranks.

    Args:
        tree: the syntax tree of the script.
        variables: the names of the variables that the script sets.
    """
    # `mp.spawn(...)` starts processes. The method `spawn` of a random generator, as in
    # `numpy.random.default_rng().spawn(4)`, does not: it returns more generators.
    called = set()
    for node in _nodes_that_certainly_run(tree):
        if isinstance(node, ast.Call) and not _is_spawn_of_generator(node):
            called.add(_last_name(node.func))

    if "spawn" in called or "start_processes" in called:
        return True

    # A `Process` may be for anything. It is a rank if the script also sets the variable that tells
    # its processes where to meet.
    return "Process" in called and "MASTER_PORT" in variables


def _nodes_that_certainly_run(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes that are executed without any condition.

    Nodes inside an `if` are left out, except for `if __name__ == "__main__":`. So are the bodies of
    functions whose names are not mentioned by code that certainly runs. The bodies of loops and of
    `try` are assumed to run.
    """
    body_of_unmentioned: dict[str, list[ast.stmt]] = {}  # by the name of the function
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body_of_unmentioned[node.name] = node.body

    nodes: list[ast.AST] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        nodes.append(node)

        # A function whose name is mentioned is called, or passed on as in `mp.spawn(train)`. Its
        # body is added at the first mention only, as it may call itself.
        name = _last_name(node)  # empty if the node is no name
        if name in body_of_unmentioned:
            pending += body_of_unmentioned.pop(name)

        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef) and not _is_conditional(child):
                pending.append(child)

    return nodes


def _is_conditional(node: ast.AST) -> bool:
    """Returns True for an `if`, and for `x if y else z`, but not for `if __name__ == "__main__"`.

    Any condition that mentions `__name__` is taken for the latter.
    """
    return isinstance(node, ast.If | ast.IfExp) and "__name__" not in ast.dump(node.test)


def _is_spawn_of_generator(call: ast.Call) -> bool:
    """Returns True for `generator.spawn(n)` of a random generator, which starts no process.

    `mp.spawn` has at least two arguments, as it is given a function first.
    """
    num_arguments = len(call.args) + len(call.keywords)
    return _last_name(call.func) == "spawn" and num_arguments < 2


def _last_name(node: ast.AST) -> str:
    """Returns `c` for the expressions `a.b.c` and `c`, and an empty string for any other."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


# Modules beside the script


def modules_hidden_by_loaded(folder: str, loaded: Mapping[str, ModuleType]) -> list[str]:
    """Finds modules beside a script whose names are taken by modules that are already imported.

    A fresh interpreter would import the module beside the script. A copy of a warm process would
    use the one that is already imported.

    Args:
        folder: the script's folder, which Python searches first.
        loaded: the imported modules by name, such as `sys.modules`.

    Returns:
        The names of the files and folders, such as `random.py` or `numpy`, sorted.
    """
    try:
        paths = list(Path(folder).iterdir())
    except OSError:  # the script is in a zip file, say
        return []

    names = []
    for path in paths:
        is_module = path.suffix in (".py", ".so") or (path / "__init__.py").is_file()
        is_program = path.name == "__main__.py"  # which is never imported by its name
        if not is_module or is_program:
            continue

        name = path.name.partition(".")[0]  # "a" for "a.cpython-312-x86_64-linux-gnu.so"
        module = loaded.get(name)
        if module is not None and _is_from_elsewhere(module, path.parent.resolve()):
            names.append(path.name)

    return sorted(names)


def _is_from_elsewhere(module: ModuleType, folder: Path) -> bool:
    """Returns True if a module was imported from another folder than the given one.

    Args:
        module: the imported module.
        folder: the script's folder.
    """
    # Python finds modules that are built in or frozen before it searches any folder. So a fresh
    # interpreter would use them too, and not a file of the name in the folder.
    file = getattr(module, "__file__", None)
    spec = getattr(module, "__spec__", None)
    is_frozen = getattr(spec, "origin", None) == "frozen"
    if file is None or is_frozen:  # without a file, it is built in
        return False

    # The file of a package `numpy` in the folder is `folder/numpy/__init__.py`.
    path = Path(file).resolve()
    is_package = path.name == "__init__.py"
    module_folder = path.parent.parent if is_package else path.parent
    return module_folder != folder

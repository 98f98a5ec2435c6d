"""Imports a script's libraries in the zygote before a restart, so that ranks need not do it again.

Importing scikit-learn takes 0.6 s of processor time, so eight ranks on two cores take 2.4 s for it
after each restart. Instead, the zygote imports it once, and the ranks that are forked from it get
the finished modules:

1. After its first optimizer step, a rank writes a *report*: the modules that its script has
   imported (`watch_imports`).
2. Before the next attempt, the zygote imports those of them that belong to `LIBRARIES`, takes them
   out of `sys.modules` again, and puts a `PreparedModules` in front of `sys.meta_path`
   (`prepare_modules`).
3. When the script of a rank imports one of these modules, `PreparedModules` puts it into
   `sys.modules`, together with all modules before it, in the order of the original imports.

So a script sees a module only once it has imported it. What a library changes outside of itself
while it is imported is recorded, and done when the script imports it: it may set environment
variables, draw random numbers, and add warning filters and finders of modules. If it does anything
else, such as starting a thread or printing a warning, the zygote cannot be used any more, and the
launcher replaces it by one that imports no libraries.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import json
import logging
import os
import random
import signal
import site
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.run.start.cuda_state import how_cuda_was_initialised
from lockstep.run.start.rank_imports import without_garbage_collection
from lockstep.run.watch.evidence import write_atomically

# Libraries that take long to import and then only define functions and classes. They open no
# devices, and what they define does not depend on the arguments or the data of the script.
# Some keep random numbers that they have drawn meanwhile, but none for which it matters that all
# ranks have the same: rich, which scikit-learn imports, numbers its styles from there.
LIBRARIES = frozenset({"PIL", "joblib", "numpy", "pandas", "scipy", "sklearn", "threadpoolctl"})
_THREAD_STARTERS = {
    "pandas": {"numexpr", "pyarrow"},
    "sklearn": {"numexpr", "pyarrow"},  # it imports pandas where that is installed
}
"""Libraries that start threads when one of `LIBRARIES` imports them. If a script has imported them,
the ranks import that one themselves."""
REPORT_NAME = "imported.json"
"""The name of the report, in the folder of the rank."""
_VARIABLE_PREFIXES = (
    "BLIS_",
    "GOMP_",
    "GOTO_",
    "JOBLIB_",
    "KMP_",
    "LOKY_",
    "MKL_",
    "NPY_",
    "NUMEXPR_",
    "NUMPY_",
    "OMP_",
    "OPENBLAS_",
    "PANDAS_",
    "PYTHON",
    "SCIPY_",
    "SKLEARN_",
)
"""Libraries read environment variables with these prefixes when they are imported or loaded."""
_VARIABLES_OF_LIBRARIES = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""The variables among them that scikit-learn sets itself."""


class CannotPrepareError(Exception):
    """Says why a zygote cannot be used any more after it has imported libraries."""


# In a rank


def watch_imports(folder: Path) -> None:
    """Makes this rank write its report after its first optimizer step.

    One rank of each machine does that, if ranks may be restarted.

    Args:
        folder: the folder of the rank.
    """
    may_be_restarted = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not may_be_restarted or os.environ.get("LOCAL_RANK") != "0":
        return

    from torch.optim.optimizer import register_optimizer_step_post_hook

    names_before = frozenset(sys.modules)
    is_written = False

    def write_once(*_: object) -> None:
        nonlocal is_written
        if not is_written:
            is_written = True
            try:
                write_atomically(folder / REPORT_NAME, json.dumps(_report(names_before)))
            except (OSError, ValueError):  # the next attempt imports everything itself
                return

    register_optimizer_step_post_hook(write_once)


def _report(names_before: frozenset[str]) -> dict[str, Any]:
    """Describes what the script has imported, and in which surroundings.

    Args:
        names_before: the modules that this process had imported when the script began.
    """
    origins = {}
    for name, module in list(sys.modules.items()):
        if isinstance(name, str) and name not in names_before:
            origins[name] = _origin(module)
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return {"origins": origins, "path": path, **_surroundings()}


def _surroundings() -> dict[str, Any]:
    """Returns what decides how a library is found and initialised."""
    return {
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_VARIABLE_PREFIXES) and name not in _VARIABLES_OF_LIBRARIES
        },
        # Only Linux can say which cores a process may use.
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "folder": os.getcwd(),
    }


def _origin(module: object) -> str | None:
    """Returns the path of a module's file; None if it has none.

    Only plain modules are looked at: asking another object for an attribute may run code of its.
    """
    if type(module) is not types.ModuleType:
        return None
    spec = vars(module).get("__spec__")
    return spec.origin if isinstance(spec, ModuleSpec) else None


class Draw(NamedTuple):
    """A call of a function of the module `random`."""

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def repeat(self) -> None:
        """Makes the same call, whose result is not used."""
        getattr(random, self.name)(*self.arguments, **self.keywords)


@dataclass
class Batch:
    """Modules that were imported together, and what they have changed outside of themselves."""

    modules: dict[str, types.ModuleType]
    """The modules by name, in the order of `sys.modules`."""
    variables: dict[str, str] = field(default_factory=dict)
    """The environment variables that were set."""
    filters: list[Any] = field(default_factory=list)
    """The filters that were put in front of `warnings.filters`, the first one first."""
    finders: list[Any] = field(default_factory=list)
    """The finders that were appended to `sys.meta_path`."""
    draws: list[Draw] = field(default_factory=list)
    """The calls of functions of the module `random`."""
    handlers: list[tuple[logging.StreamHandler[Any], str]] = field(default_factory=list)
    """Handlers of logging that were made, each with its stream: `stdout` or `stderr`."""
    submodules: list[tuple[types.ModuleType, str, types.ModuleType]] = field(default_factory=list)
    """Packages of earlier batches, with the name and the module that become an attribute of it."""

    def take_effect(self) -> None:
        """Puts the modules into `sys.modules`, and does what their import has done."""
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)
        for package, name, module in self.submodules:
            setattr(package, name, module)
        os.environ.update(self.variables)
        self._add_filters()
        sys.meta_path += self.finders
        for draw in self.draws:
            draw.repeat()
        for handler, stream in self.handlers:
            handler.stream = getattr(sys, stream)

    def _add_filters(self) -> None:
        """Puts the filters in front of `warnings.filters`: the last one first, as each call of
        `filterwarnings` puts its filter in front of all others.
        """
        for action, message, category, module, line in reversed(self.filters):
            # A filter contains compiled patterns, and None for one that matches everything.
            message_pattern = message.pattern if message else ""
            module_pattern = module.pattern if module else ""
            warnings.filterwarnings(action, message_pattern, category, module_pattern, line)


class PreparedModules(MetaPathFinder):
    """Finds the modules that the zygote has imported for the ranks.

    Args:
        batches: the modules, in the order in which they were imported.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._waiting = list(batches)
        self._lock = threading.RLock()
        self._batch_of_name: dict[str, Batch] = {}
        for batch in batches:
            for name in batch.modules:
                self._batch_of_name[name] = batch

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Returns the specification of a prepared module, whose loader returns that module."""
        batch = self._batch_of_name.get(fullname)
        # A script that imports a module once more, as by `importlib.reload`, gets it from its file.
        if batch is None or batch not in self._waiting:
            return None
        module = batch.modules[fullname]
        spec = copy.copy(module.__spec__)
        assert spec is not None
        spec.loader = _PreparedLoader(self, module, batch)
        return spec

    def take_effect_until(self, last: Batch) -> None:
        """Puts the modules of all batches up to this one into `sys.modules`."""
        with self._lock:
            while last in self._waiting:
                self._waiting.pop(0).take_effect()


class _PreparedLoader(Loader):
    """Loads one prepared module."""

    def __init__(self, finder: PreparedModules, module: types.ModuleType, batch: Batch) -> None:
        self._finder = finder
        self._module = module
        self._batch = batch
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Returns the module, which is complete."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Makes the module and those before it visible."""
        module.__spec__ = self._spec  # the import system has replaced it
        self._finder.take_effect_until(self._batch)

    def __getattr__(self, name: str) -> Any:
        # A script that only looks for a module may ask its loader for the source.
        return getattr(self.__dict__["_spec"].loader, name)


# In the zygote


def prepare_modules(report: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Imports the libraries that a rank has reported, and keeps them for the ranks to come.

    Nothing happens if the script has used none of `LIBRARIES`, or has imported them in other
    surroundings than this process has.

    Args:
        report: the report of a rank.
        variables: environment variables of all ranks.

    Raises:
        CannotPrepareError: importing them did something that ranks would notice.
    """
    # The zygote itself needs this module. As libraries import it too, it would otherwise be taken
    # out of `sys.modules` below.
    import psutil  # noqa: F401

    origins: dict[str, str | None] = report["origins"]
    names = _names_to_import(origins)
    if not names:
        return

    environment_before = dict(os.environ)
    path_before = list(sys.path)
    names_before = set(sys.modules)
    try:
        os.environ.update(variables)
        surroundings_differ = any(report[key] != now for key, now in _surroundings().items())
        if surroundings_differ:
            return
        sys.path[:] = report["path"]
        importlib.invalidate_caches()
        if not all(_is_found_again(name, origins) for name in names):
            return
        finders_before = list(sys.meta_path)
        with without_garbage_collection(), warnings.catch_warnings():
            batches = _import_all(names, origins)
        sys.meta_path[:] = finders_before
    finally:
        os.environ.clear()
        os.environ.update(environment_before)
        sys.path[:] = path_before

    # Only `PreparedModules` holds the modules now, until the script of a rank imports them.
    for name in set(sys.modules) - names_before:
        del sys.modules[name]
    _detach_submodules(batches)
    sys.meta_path.insert(0, PreparedModules(batches))
    gc.freeze()  # the collector leaves these objects alone, so all ranks share them


def _names_to_import(imported: Iterable[str]) -> list[str]:
    """Returns the modules that the zygote imports, of those that the rank has imported."""
    imported_packages = {name.partition(".")[0] for name in imported}
    names = []
    for name in imported:
        package = name.partition(".")[0]
        may_be_imported = package in LIBRARIES and not _starts_threads(package, imported_packages)
        if may_be_imported and name not in sys.modules:
            names.append(name)
    return names


def _starts_threads(package: str, imported_packages: set[str]) -> bool:
    """Returns True if a package imports another one that starts threads.

    For example, pandas imports pyarrow, if that is installed.

    Args:
        package: the package.
        imported_packages: all that the rank has imported. If pandas has imported pyarrow, it is
            among them.
    """
    thread_starters = _THREAD_STARTERS.get(package, set())
    return not thread_starters.isdisjoint(imported_packages)


def _is_found_again(name: str, origins: Mapping[str, str | None]) -> bool:
    """Returns True if a library is installed, and lies where the rank has imported it from.

    Args:
        name: the name of a module. Only packages and modules that lie in no package are looked for.
        origins: the files of the modules that the rank has imported.
    """
    if "." in name:
        return True
    spec = PathFinder.find_spec(name)
    return spec is not None and spec.origin == origins[name] and _is_installed(spec)


def _is_installed(spec: ModuleSpec) -> bool:
    """Returns True if a module belongs to Python or to an installed package, not to the user."""
    return _is_below(spec, [*_folders_of_packages(), *_FOLDERS_OF_PYTHON])


_FOLDERS_OF_PYTHON = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]


def _is_of_python(spec: ModuleSpec) -> bool:
    """Returns True if a module belongs to Python itself."""
    is_below_packages = _is_below(spec, _folders_of_packages())  # which lie in Python's folder
    return _is_below(spec, _FOLDERS_OF_PYTHON) and not is_below_packages


def _folders_of_packages() -> list[str]:
    """Returns the folders that pip installs into."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return folders


def _is_below(spec: ModuleSpec, folders: Sequence[str]) -> bool:
    """Returns True if the file of a module, or one of its folders, lies in one of these folders."""
    paths = list(spec.submodule_search_locations or ())
    if spec.origin is not None:
        paths.append(spec.origin)
    for path in paths:
        if any(Path(path).is_relative_to(folder) for folder in folders):
            return True
    return False


class _RefusedImport(BaseException):
    """Is raised for a module that must not be imported in the zygote.

    It is no `Exception`, so that no library catches it.
    """


class _Guard(MetaPathFinder):
    """Refuses to import modules of the user, and libraries that the rank has not imported.

    Args:
        origins: the files of the modules that the rank has imported.
    """

    def __init__(self, origins: Mapping[str, str | None]) -> None:
        self._origins = origins

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> None:
        """Does nothing for a module that may be imported: the usual finders find it then.

        Raises:
            _RefusedImport: it must not be imported.
        """
        spec = PathFinder.find_spec(fullname, path)
        if spec is None:  # it is built in, or there is none
            return
        if not self._may_be_imported(fullname, spec):
            raise _RefusedImport(f"{fullname} is not what the rank has imported")

    def _may_be_imported(self, fullname: str, spec: ModuleSpec) -> bool:
        """Returns True if the rank has imported this module, or has surely tried to."""
        if fullname in self._origins:
            return self._origins[fullname] == spec.origin and _is_installed(spec)

        # The rank may have tried to import this module of a library, and have failed as well.
        package = fullname.partition(".")[0]
        if package in self._origins:
            return _is_installed(spec)

        # The report lacks modules of Python that the rank had imported before its script began.
        return _is_of_python(spec)


class _RecordedDraws:
    """Records the calls of the functions of `random`, which all draw from one random state."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        """The calls since the list was last emptied."""
        self._originals: dict[str, Callable[..., Any]] = {}
        self._recorders: dict[str, Callable[..., Any]] = {}
        state_owner = random.random.__self__  # type: ignore[attr-defined]
        for name in random.__all__:
            function = getattr(random, name)
            if getattr(function, "__self__", None) is state_owner:
                self._originals[name] = function
                self._recorders[name] = self._recorder(name, function)

    def _recorder(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.draws.append(Draw(name, arguments, keywords))
            return function(*arguments, **keywords)

        return call

    def __enter__(self) -> _RecordedDraws:
        for name, recorder in self._recorders.items():
            setattr(random, name, recorder)
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(random, name, original)

    def remove_recorders(self, modules: Iterable[types.ModuleType]) -> list[weakref.ref[Any]]:
        """Puts the original functions back into modules with `from random import ...`.

        Returns:
            Weak references to the recorders. One that is still alive is held by something else than
            a variable of a module.
        """
        original_of_recorder = {}
        for name, recorder in self._recorders.items():
            original_of_recorder[id(recorder)] = self._originals[name]
        for module in modules:
            variables = vars(module)
            for name, value in list(variables.items()):
                if id(value) in original_of_recorder:
                    variables[name] = original_of_recorder[id(value)]
        references = [weakref.ref(recorder) for recorder in self._recorders.values()]
        self._recorders.clear()
        return references


def _import_all(names: Sequence[str], origins: Mapping[str, str | None]) -> list[Batch]:
    """Imports modules, and records what importing each of them has changed.

    Raises:
        CannotPrepareError: see `prepare_modules`.
    """
    state_before = _state_of_process()
    random_state_before = random.getstate()  # libraries may change it, see `_check_draws`
    streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    recorded = _RecordedDraws()
    batches = []
    try:
        with recorded, _replaced_streams(streams), _guarded_imports(_Guard(origins)):
            for name in names:
                if name not in sys.modules:
                    batches.append(_import_batch(name, recorded))
    except (Exception, _RefusedImport) as error:
        raise CannotPrepareError(f"{type(error).__name__}: {error}") from None

    _check_state_of_process(state_before)
    _check_modules(batches, origins)
    _check_streams(batches, streams, recorded)
    _check_draws(batches, random_state_before)  # last, as it restores the state of random
    return batches


def _check_state_of_process(state_before: Mapping[str, Any]) -> None:
    """Checks that the process has the same state as before the imports.

    Raises:
        CannotPrepareError: it has another one.
    """
    state = _state_of_process()
    for key, value in state_before.items():
        if state[key] != value:
            raise CannotPrepareError(f"it changes {key}: {value} becomes {state[key]}")


@contextlib.contextmanager
def _replaced_streams(streams: Mapping[str, io.StringIO]) -> Iterator[None]:
    """Replaces `sys.stdout` and `sys.stderr` in the block, so that nothing is printed."""
    streams_before = {name: getattr(sys, name) for name in streams}
    for name in streams:
        setattr(sys, name, streams[name])
    try:
        yield
    finally:
        for name in streams:
            setattr(sys, name, streams_before[name])


@contextlib.contextmanager
def _guarded_imports(guard: _Guard) -> Iterator[None]:
    """Asks the guard about every module that is imported in the block."""
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)


def _check_modules(batches: Sequence[Batch], origins: Mapping[str, str | None]) -> None:
    """Checks that only modules were imported that ranks have imported, too.

    Raises:
        CannotPrepareError: there are others.
    """
    for batch in batches:
        for name, module in batch.modules.items():
            spec = module.__spec__
            if spec is None or not spec.has_location:  # it was not read from a file
                continue
            if name not in origins and not _is_of_python(spec):
                raise CannotPrepareError(f"it imports {name}, which the rank has not imported")


def _check_streams(
    batches: Sequence[Batch], streams: dict[str, io.StringIO], recorded: _RecordedDraws
) -> None:
    """Checks that nothing was printed, and that no library has kept what stood in for the streams
    and for the functions of `random`.

    Args:
        batches: what was imported. Handlers of logging get the streams of the rank later.
        streams: what stood in for the streams; it is emptied.
        recorded: what stood in for the functions.

    Raises:
        CannotPrepareError: something was printed or kept.
    """
    printed = "".join(stream.getvalue() for stream in streams.values())
    if printed:
        raise CannotPrepareError(f"it prints {printed!r}")

    modules: list[types.ModuleType] = []
    for batch in batches:
        batch.handlers = _take_streams_from_handlers(batch.modules.values(), streams)
        modules += batch.modules.values()

    # Drop all references to the stand-ins but weak ones. If one of them is alive after that, a
    # library has kept it, for example as a default argument of a function.
    weak_references: list[weakref.ref[Any]] = [weakref.ref(stream) for stream in streams.values()]
    streams.clear()
    weak_references += recorded.remove_recorders(modules)
    if any(reference() is not None for reference in weak_references):
        raise CannotPrepareError("it keeps sys.stdout, sys.stderr or a function of random")


def _check_draws(batches: Iterable[Batch], state_before: tuple[Any, ...]) -> None:
    """Checks that the recorded calls lead to the present state of `random`, and restores the
    previous one.

    Raises:
        CannotPrepareError: they lead to another one.
    """
    state = random.getstate()
    random.setstate(state_before)
    for batch in batches:
        for draw in batch.draws:
            draw.repeat()
    is_same = random.getstate() == state
    random.setstate(state_before)
    if not is_same:
        raise CannotPrepareError("it changes the state of random in another way")


def _import_batch(name: str, recorded: _RecordedDraws) -> Batch:
    """Imports a module with all that it needs.

    Raises:
        CannotPrepareError: it changes the order of filters of warnings or of finders.
    """
    names_before = set(sys.modules)
    environment_before = dict(os.environ)
    filters_before = list(warnings.filters)
    finders_before = list(sys.meta_path)
    recorded.draws.clear()

    importlib.import_module(name)

    batch = Batch({})
    for new_name, module in sys.modules.items():
        if new_name not in names_before:
            batch.modules[new_name] = module
    for variable, value in os.environ.items():
        if environment_before.get(variable) != value:
            batch.variables[variable] = value
    batch.draws = list(recorded.draws)

    # New filters are put in front of the others.
    num_new_filters = len(warnings.filters) - len(filters_before)
    batch.filters = list(warnings.filters[:num_new_filters])
    if [*batch.filters, *filters_before] != list(warnings.filters):
        raise CannotPrepareError("it changes other filters of warnings")

    # New finders are appended.
    batch.finders = sys.meta_path[len(finders_before) :]
    if [*finders_before, *batch.finders] != sys.meta_path:
        raise CannotPrepareError("it changes the finders of modules")
    return batch


def _take_streams_from_handlers(
    modules: Iterable[types.ModuleType], streams: Mapping[str, io.StringIO]
) -> list[tuple[logging.StreamHandler[Any], str]]:
    """Takes some streams from the handlers of logging that are variables of modules.

    Returns:
        These handlers, each with the name of the stream that it had.
    """
    handlers = []
    for module in modules:
        for value in vars(module).values():
            if issubclass(type(value), logging.StreamHandler):
                for name, stream in streams.items():
                    if value.stream is stream:
                        value.stream = None
                        handlers.append((value, name))
    return handlers


def _state_of_process() -> dict[str, Any]:
    """Returns what importing a library must leave as it is."""
    # This comes before the threads are counted: the call forks, and before a fork OpenBLAS ends its
    # threads. So they are not counted, whether or not they were running before.
    cuda = how_cuda_was_initialised()

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    descriptors = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder is listed
            descriptors.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    state = {
        "CUDA": cuda,
        "the number of threads": len(os.listdir("/proc/self/task")),
        "the open files": sorted(descriptors),
        "the signal handlers": handlers,
        "the working directory": os.getcwd(),
        "sys.excepthook": sys.excepthook,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch's random state"] = torch.get_rng_state().tolist()
        state["torch's threads"] = torch.get_num_threads()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        state["numpy's random state"] = repr(numpy_random.get_state(legacy=False))
    return state


def _detach_submodules(batches: Iterable[Batch]) -> None:
    """Removes submodules from packages of earlier batches.

    For example, a script imports `scipy` and later `scipy.sparse`, which are a batch each. The
    second import in the zygote has set the attribute `sparse` of `scipy`, but in a rank it must not
    be there after the first one. `Batch.take_effect` sets it again.
    """
    for batch in batches:
        for name, module in batch.modules.items():
            package_name, _, attribute = name.rpartition(".")
            comes_with_package = package_name in batch.modules
            if not package_name or comes_with_package:
                continue
            package = _package_of(package_name, batches)
            if package is not None and vars(package).get(attribute) is module:
                delattr(package, attribute)
                batch.submodules.append((package, attribute, module))


def _package_of(name: str, batches: Iterable[Batch]) -> types.ModuleType | None:
    """Returns a package that was imported by the zygote, before or in these batches."""
    for batch in batches:
        if name in batch.modules:
            return batch.modules[name]
    return sys.modules.get(name)

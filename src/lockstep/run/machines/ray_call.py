"""The call of `lockstep.launch(..., ray=...)` as it is sent to the nodes of a Ray cluster, and what
comes back.

The function and its arguments are pickled by Ray's own pickler (cloudpickle), as Ray does for its
tasks: functions and classes of `__main__`, of a notebook's cells, lambdas and closures are sent
with their code; those of modules are sent by name, and every node imports them. The file that a
node receives has two pickles: first a `CallFacts`, which the launcher there reads, then the call,
which only the ranks read.

Everything that is unpickled here comes from the processes of the same run, over Ray's connections.
"""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import LockstepError, UsageError

FOLDER_VARIABLE = "LOCKSTEP_RAY_CALL"
"""Environment variable of a node's launcher: the folder with the call, where the outcome goes."""
CALL_NAME = "call.pickle"
OUTCOME_NAME = "outcome.pickle"


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """What the launcher of a node must know of the call, without reading the call itself."""

    name: str
    """The name of the function."""
    launch_text: str
    """Text that names the launch in errors."""
    timeout: float | None
    """The seconds after which the ranks are ended; None for no limit."""
    modules: Sequence[str]
    """Names of the modules that the ranks will probably import."""
    argv: Sequence[str]
    """The launching process's `sys.argv`."""
    path: Sequence[str]
    """The launching process's `sys.path`."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """The lines of source files that a node may not have, such as cells, by the file's name."""

    def apply(self) -> None:
        """Makes this process find the modules and the source lines of the launching process."""
        sys.argv = list(self.argv)
        sys.path += [entry for entry in self.path if entry not in sys.path]
        for file, lines in self.sources.items():
            if not os.path.exists(file):
                # Entries without a time are kept, although there is no such file.
                linecache.cache[file] = (sum(map(len, lines)), None, lines, file)


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """How the call has ended on one node."""

    values: Sequence[bytes] = ()
    """The returned values of the node's ranks, pickled, in the order of the ranks."""
    error: LockstepError | None = None
    """Why there are none."""


def pack_call(fn: Callable[..., Any], args: Sequence[Any], facts: CallFacts) -> bytes:
    """Returns the content of the file that is sent to the nodes.

    Raises:
        UsageError: the function or an argument cannot be pickled.
    """
    from ray import cloudpickle

    try:
        pickled_call = cloudpickle.dumps(functools.partial(fn, *args))
    except Exception as error:  # a reducer of the user's may raise anything
        raise UsageError(
            facts.launch_text,
            f"the function and its arguments cannot be sent to other nodes: {error}",
            "create in the function what cannot be sent, such as open files, locks and connections",
        ) from error
    content: bytes = pickle.dumps(facts) + pickled_call
    return content


def read_facts(content: bytes) -> CallFacts:
    """Reads the first part of a call's file."""
    facts: CallFacts = pickle.loads(content)
    return facts


def read_call(content: bytes) -> Callable[[], Any]:
    """Reads the whole file in a rank, and returns the call.

    Raises:
        Exception: of any kind, for instance if a module is missing here.
    """
    file = io.BytesIO(content)
    facts: CallFacts = pickle.load(file)
    facts.apply()
    call: Callable[[], Any] = pickle.load(file)
    return call


def pickle_value(value: Any) -> bytes:
    """Pickles a value that a rank has returned, so that the launching process can read it."""
    from ray import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def sources_to_send(fn: Callable[..., Any]) -> dict[str, list[str]]:
    """Returns the sources that the nodes may not have, for tracebacks: the lines of each file.

    They are the file of the function, and all files that exist in memory only, such as cells of a
    notebook and lines of the prompt.
    """
    sources = {}
    for file in list(linecache.cache):
        is_in_memory_only = not os.path.exists(file)
        if is_in_memory_only:
            sources[file] = linecache.getlines(file)

    try:
        own_file = inspect.getsourcefile(inspect.unwrap(fn))
    except TypeError:  # it is not a Python function
        own_file = None
    if own_file:
        sources[own_file] = linecache.getlines(own_file)
    return sources


def values_of(outcomes: Sequence[CallOutcome]) -> list[Any]:
    """Returns the values that the ranks have returned, by rank, from the outcomes of all nodes."""
    values = []
    for outcome in outcomes:
        for pickled in outcome.values:
            values.append(pickle.loads(pickled))
    return values

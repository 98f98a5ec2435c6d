"""A rank that executes another interpreter in its own place is still watched.

Scripts do so (`os.execv`) to set variables that are read when a process starts, such as
LD_LIBRARY_PATH. The new program has the rank's process id, its streams, and nothing of its probe.
So `os.execv` and `os.execve`, which all functions `os.exec*` call, add the folder `executed` to
PYTHONPATH. A Python interpreter imports `sitecustomize` from there (see the module site), which
takes the folder away again and installs the probe once torch has been imported.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from lockstep.run.watch.evidence import EVIDENCE_VARIABLE, FOLDER_VARIABLE, Evidence

EXECUTED = "LOCKSTEP_EXECUTED"
"""Variable of a program that a rank has executed in its place: the rank's process id and the folder
of this package, as JSON."""
_HOOK_FOLDER = str(Path(__file__).with_name("executed"))
_PACKAGES = str(Path(__file__).parents[3])


def watch_executed(evidence: Evidence) -> None:
    """From now on this rank is watched also after `os.exec*`.

    Args:
        evidence: the files of this rank.
    """
    rank = os.getpid()
    original_execv = os.execv
    original_execve = os.execve

    @wraps(original_execve)
    def execve(path: Any, argv: Any, env: Mapping[Any, Any]) -> None:
        if os.getpid() != rank:  # a child of the rank becomes a program of its own
            original_execve(path, argv, env)
        with _without_heartbeat(evidence.heartbeat):
            original_execve(path, argv, with_hook(env, rank))

    @wraps(original_execv)
    def execv(path: Any, argv: Any) -> None:
        if os.getpid() != rank:
            original_execv(path, argv)
        execve(path, argv, os.environ)

    os.execv = execv  # type: ignore[assignment]
    os.execve = execve  # type: ignore[assignment]


def with_hook(env: Mapping[Any, Any], rank: int) -> dict[str, str]:
    """Variables with which a Python interpreter installs the probe.

    Args:
        env: all variables of the program that is to be executed.
        rank: process id of the rank.
    """
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    for name in (FOLDER_VARIABLE, EVIDENCE_VARIABLE):
        if name in os.environ:
            variables[name] = os.environ[name]
    paths = [_HOOK_FOLDER, variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    variables[EXECUTED] = json.dumps({"pid": rank, "packages": _PACKAGES})
    return variables


@contextlib.contextmanager
def _without_heartbeat(path: Path) -> Iterator[None]:
    """Within it there is no heartbeat: until the new program has its own, it is not asked."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        yield
        return
    try:
        beginning = os.pread(descriptor, 8, 0)
        os.pwrite(descriptor, bytes(len(beginning)), 0)
        try:
            yield
        finally:  # there is no such program
            os.pwrite(descriptor, beginning, 0)
    finally:
        os.close(descriptor)

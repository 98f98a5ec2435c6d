"""What all ranks must agree on before the first step, and how a difference is worded."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.errors import name_ranks
from lockstep.topology import Topology

NEVER_COMPARED = frozenset({"host", "pid", "rank"})
# They number the process or its machine, so they differ by their nature.
_PLACE_FLAGS = frozenset(
    f"--{noun}{joint}rank" for noun in ("local", "node", "machine") for joint in "_-"
) | {"--rank"}
_GROUPS_SHOWN = 4


def collect(topology: Topology, settings: Mapping[str, object]) -> dict[str, str]:
    """This rank's record: the command, the code, the versions and the settings of the run.

    Args:
        topology: who this process is.
        settings: what else must be equal on all ranks, such as the seed.

    Returns:
        Text by field. `host`, `pid` and `rank` say whose record it is and are never compared.
    """
    record = {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "rank": str(topology.rank),
        "arguments": shlex.join(shared_arguments(sys.argv)),
        "script": _script_hash(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": platform.machine(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": _nccl_version(),
        "numpy": _version("numpy"),
        "lockstep": _version("torch-lockstep"),
    }
    return record | {name: str(value) for name, value in settings.items()}


def differences(records: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each field that is not equal on all ranks.

    Args:
        records: one per rank, in the order of ranks.

    Returns:
        Lines such as "arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'", ranks that agree
        grouped together.
    """
    fields = dict.fromkeys(name for record in records for name in record)
    lines = []
    for name in fields:
        if name in NEVER_COMPARED:
            continue
        holders: dict[str | None, list[int]] = {}
        for rank, record in enumerate(records):
            holders.setdefault(record.get(name), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: {_groups(holders)}")
    return lines


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """The script's name and its arguments without those that say which rank or node this is."""
    kept: list[str] = []
    skip = False
    for position, argument in enumerate(argv):
        flag, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif position == 0:
            kept.append(Path(argument).name)  # machines may keep the script in other folders
        elif flag in _PLACE_FLAGS:
            skip = not equals
        else:
            kept.append(argument)
    return kept


def _groups(holders: Mapping[str | None, Sequence[int]]) -> str:
    shown = [
        f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} "
        + ("none" if value is None else repr(value))
        for value, ranks in list(holders.items())[:_GROUPS_SHOWN]
    ]
    hidden = len(holders) - len(shown)
    return ", ".join([*shown, f"and {hidden} more values"] if hidden else shown)


def _script_hash() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "none"
    return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def _nccl_version() -> str:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"

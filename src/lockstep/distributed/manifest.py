"""What all ranks must have in common before the first step: command, code, versions, settings.

A rank's *manifest* is a dict of texts, such as `{"arguments": "train.py --lr 0.1", "python":
"3.12", ...}`. The ranks compare their manifests when they join the run (see `join`), and the
differences become lines such as "arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'".
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import masking
from lockstep.distributed.arguments import (
    Launch,
    Place,
    blank_out_harmless_differences,
    command_of_script,
)
from lockstep.distributed.topology import SET_BY_SCRIPT, Topology
from lockstep.wording import format_ranks, group_by_key

MAX_VALUES_SHOWN = 4


def collect(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns this rank's manifest: the command, the code, the versions and the settings.

    Args:
        settings: what else must be equal on all ranks, such as the seed.
    """
    manifest = {
        "arguments": shlex.join(masking.mask_secrets(command_of_script(sys.argv))),
        "script": _script_hash(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": platform.machine(),
        "torch": torch.__version__,
        "CUDA": cuda_version(),
        "NCCL": nccl_version(),
        "numpy": _package_version("numpy"),
        "lockstep": _package_version("torch-lockstep"),
    }
    for name, value in settings.items():
        manifest[name] = str(value)
    return manifest


def without_harmless_differences(
    manifests: Sequence[Mapping[str, str]], topologies: Sequence[Topology]
) -> list[dict[str, str]]:
    """Returns the manifests without the differences of arguments that may be, see `arguments`.

    Args:
        manifests: one for each rank, in the order of the ranks.
        topologies: the place of each rank.
    """
    compared = [dict(manifest) for manifest in manifests]
    texts = [manifest.get("arguments", "") for manifest in manifests]
    if len(set(texts)) == 1:
        return compared
    places = []
    for topology in topologies:
        places.append(
            Place(
                rank=topology.rank,
                local_rank=topology.local_rank,
                machine=topology.node_rank,
                processes_of_machine=topology.local_size,
            )
        )
    commands = [shlex.split(text) for text in texts]
    launch = Launch(
        places,
        set_by_script=topologies[0].source == SET_BY_SCRIPT,
        set_by_hand=topologies[0].is_set_by_hand,
        has_macro=topologies[0].launcher_has_macro,
    )
    blanked = blank_out_harmless_differences(commands, launch)
    for manifest, arguments in zip(compared, blanked, strict=True):
        manifest["arguments"] = shlex.join(arguments)
    return compared


def mismatches(manifests: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns one line for each field that is not equal on all ranks.

    Args:
        manifests: one for each rank, in the order of the ranks.

    Returns:
        Lines such as "arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'". Ranks with the
        same value are grouped.
    """
    # The fields that any rank has, in the order in which they come; a set would lose the order.
    field_names: dict[str, None] = {}
    for manifest in manifests:
        field_names.update(dict.fromkeys(manifest))
    lines = []
    for name in field_names:
        ranks_of_value = group_by_key(
            (manifest.get(name), rank) for rank, manifest in enumerate(manifests)
        )
        if len(ranks_of_value) == 1:
            continue
        texts = []
        for value, ranks in list(ranks_of_value.items())[:MAX_VALUES_SHOWN]:
            verb = "has" if len(ranks) == 1 else "have"
            shown_value = "none" if value is None else repr(value)
            texts.append(f"{format_ranks(ranks)} {verb} {shown_value}")
        if len(ranks_of_value) > MAX_VALUES_SHOWN:
            texts.append(f"and {len(ranks_of_value) - MAX_VALUES_SHOWN} more values")
        lines.append(f"{name}: {', '.join(texts)}")
    return lines


def cuda_version() -> str:
    """Returns the version of CUDA or ROCm that torch was built for, such as `12.8` or `ROCm 6.4`.

    `none` if torch was built for neither.
    """
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return torch.version.cuda or "none"


def nccl_version() -> str:
    """Returns the version of NCCL, or of RCCL under ROCm, such as `2.27.5`; `none` without it."""
    is_built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    if not is_built_for_gpus or not dist.is_nccl_available():
        return "none"
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(number) for number in numbers)


def _script_hash() -> str:
    """Returns a hash of the source of the script that runs."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "none"
    return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def _package_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"

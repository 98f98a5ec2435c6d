"""Checks that all ranks run the same command and code, with the same versions and settings.

Each rank collects these facts in a *manifest*, a dict of strings such as `{"arguments": "train.py
--lr 0.1", "python": "3.12", ...}`. When the ranks join the run (see `join`), their manifests are
compared, and each difference is reported in one line: "arguments: rank 0 has '--lr 0.1', rank 1 has
'--lr 0.2'".
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
from lockstep.machine.topology import SET_BY_SCRIPT, Topology
from lockstep.wording import conjugate, format_ranks, group_by_key

MAX_VALUES_SHOWN = 4


def collect(settings: Mapping[str, object]) -> dict[str, str]:
    """Collects this rank's manifest: its command, code, versions and settings.

    Args:
        settings: further values that must be equal on all ranks, such as the seed, by name.
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
    """Returns the manifests with all allowed differences of their arguments blanked out.

    An argument may differ if it is the rank of the process, for example in `--local-rank=1`. The
    module `arguments` has the rules.

    Args:
        manifests: the manifest of each rank, in the order of the ranks.
        topologies: the topology of each rank.
    """
    compared = [dict(manifest) for manifest in manifests]
    argument_texts = [manifest.get("arguments", "") for manifest in manifests]
    if len(set(argument_texts)) == 1:
        return compared

    commands = [shlex.split(text) for text in argument_texts]
    blanked = blank_out_harmless_differences(commands, _launch_of(topologies))
    for manifest, arguments in zip(compared, blanked, strict=True):
        manifest["arguments"] = shlex.join(arguments)
    return compared


def _launch_of(topologies: Sequence[Topology]) -> Launch:
    """Returns how the processes were started, as the rules of `arguments` need it.

    For example, a launcher that replaces the macro `${local_rank}` may have put the local rank into
    any argument.

    Args:
        topologies: the topology of each rank.
    """
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
    return Launch(
        places,
        rank_set_by_script=topologies[0].source == SET_BY_SCRIPT,
        ranks_set_by_hand=topologies[0].is_set_by_hand,
        has_macro=topologies[0].launcher_has_macro,
    )


def describe_mismatches(manifests: Sequence[Mapping[str, str]]) -> list[str]:
    """Describes each field that is not equal on all ranks, in one line per field.

    Args:
        manifests: the manifest of each rank, in the order of the ranks.

    Returns:
        Lines such as "arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'". Ranks with the
        same value are grouped.
    """
    # A dict serves as an ordered set of the names of all fields that any rank has.
    field_names: dict[str, None] = {}
    for manifest in manifests:
        field_names.update(dict.fromkeys(manifest))

    lines = []
    for name in field_names:
        value_and_rank = [(manifest.get(name), rank) for rank, manifest in enumerate(manifests)]
        ranks_of_value = group_by_key(value_and_rank)
        if len(ranks_of_value) > 1:
            lines.append(f"{name}: {_describe_values(ranks_of_value)}")
    return lines


def _describe_values(ranks_of_value: Mapping[str | None, Sequence[int]]) -> str:
    """Says which ranks have which value: "rank 0 has '--lr 0.1', ranks 1-3 have '--lr 0.2'".

    Args:
        ranks_of_value: the ranks that have each value. None stands for no value.
    """
    shown_values = list(ranks_of_value)[:MAX_VALUES_SHOWN]
    texts = []
    for value in shown_values:
        ranks = ranks_of_value[value]
        verb = conjugate("has", len(ranks))
        value_text = "none" if value is None else repr(value)
        texts.append(f"{format_ranks(ranks)} {verb} {value_text}")

    num_hidden = len(ranks_of_value) - len(shown_values)
    if num_hidden > 0:
        texts.append(f"and {num_hidden} more values")
    return ", ".join(texts)


def cuda_version() -> str:
    """Returns the version of CUDA or ROCm that torch was built for: `12.8` or `ROCm 6.4`.

    Returns `none` if torch was built for neither.
    """
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return torch.version.cuda or "none"


def nccl_version() -> str:
    """Returns the version of NCCL (RCCL under ROCm), such as `2.27.5`; `none` if torch has none."""
    is_built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    if not is_built_for_gpus or not dist.is_nccl_available():
        return "none"
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(number) for number in numbers)


def _script_hash() -> str:
    """Returns a hash of the script that was started; `none` if there is no file (at a prompt)."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "none"
    return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def _package_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"

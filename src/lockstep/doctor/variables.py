"""Checks for environment variables that make a script believe it is a rank, or that change a run.

`gather` reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, join_findings

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
PREFIXES = (
    "CUDA_",
    "GLOO_",
    "LOCKSTEP_",
    "NCCL_",
    "OMP_",
    "TORCH_",
    "PYTORCH_",
    "PET_",
    "MASTER_",
)
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
DEBUG_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel runs synchronously"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked twice"),
}
"""The value of a variable that is for debugging, and why it slows down a run."""


def gather(folder: Path) -> Facts:
    """Reads the variables of torch, Lockstep and their libraries, with secrets masked."""
    facts = {}
    for name, value in sorted(os.environ.items()):
        if name in RANK_VARIABLES or name.startswith(PREFIXES):
            is_secret = any(word in name for word in SECRET_WORDS)
            facts[name] = "***" if is_secret else value
    return facts


def judge(facts: Facts) -> Finding:
    """Finds variables that a launcher left in this shell, that were set for debugging, or that hide
    all GPUs.

    Args:
        facts: the values of the variables, by name.
    """
    problems = []
    rank_variables = [name for name in RANK_VARIABLES if name in facts]
    if rank_variables:
        assignments = ", ".join(f"{name}={facts[name]}" for name in rank_variables)
        found = f"{assignments}: a script started without a launcher believes it is a rank"
        do = f"in this shell: unset {' '.join(rank_variables)}"
        problems.append(Finding(WARNING, found, do))

    for name, (debugging_value, effect) in DEBUG_VARIABLES.items():
        if facts.get(name) == debugging_value:  # other values do not slow down a run
            found = f"{name}={debugging_value}: {effect}"
            problems.append(Finding(WARNING, found, "unset it to train"))

    if facts.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        found = "CUDA_VISIBLE_DEVICES hides all GPUs"
        problems.append(Finding(WARNING, found, "unset it to use them"))

    # Printed behind the name of the check: "variables  3 that torch and its libraries read".
    return join_findings(f"{len(facts)} that torch and its libraries read", problems)

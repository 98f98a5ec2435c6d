"""What the figures of a run on a GPU should be, by stage and check.

A check that misses its aim is told as `missed`, with the figure that was found. In a rehearsal on
the CPU no aim is asserted: times mean nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_CHECKS = "*"
"""In place of a check's name: every check of the stage that has no aims of its own."""
RATIO_TO_TORCH = {"ratio": 1.02, "ratio_of_memory": 1.02}
COUNTED_STEPS = 5
"""In the stage `syncs`, the steps in which synchronizations are counted."""
ONE_A_STEP = {"synchronizations": float(COUNTED_STEPS)}
AIMS: dict[str, dict[str, dict[str, float]]] = {
    "syncs": {
        ALL_CHECKS: {"synchronizations": 0.0},
        # The step of a scaled gradient is left out where it overflowed, which the host has to know.
        "single, fp16": ONE_A_STEP,
        "ddp, fp16": ONE_A_STEP,
        "fsdp, fp16": ONE_A_STEP,
        # Torch's DDP reads which of its unused parameters another rank has used.
        "ddp, unused parameters": ONE_A_STEP,
    },
    "nccl": {"peak memory in bf16 of 8 layers, lockstep": {"ratio": 1.02}},
    "hangs": {ALL_CHECKS: {"seconds_to_the_first_word": 10.0}},
    "speed": {
        "a step of a small MLP": {"overhead_of_a_step_us": 30.0},
        # A step of 10 ms and more.
        "a step of a GPT in bf16": {"ratio": 1.01},
        # Not slower than torch's; two medians of the same thing differ by a percent or two.
        "prefetch of large batches": {"ratio": 1.02},
        "a step of fsdp in bf16, two ranks on one device": RATIO_TO_TORCH,
    },
}
"""The most that a value may be, by stage, check and name of the value."""


def aims_of(stage: str, check: str) -> dict[str, float]:
    """Returns the most that each value of a check may be, by its name; empty without an aim."""
    of_stage = AIMS.get(stage, {})
    return of_stage.get(check, of_stage.get(ALL_CHECKS, {}))


def missed_aims(stage: str, check: str, values: Mapping[str, Any]) -> list[str]:
    """Returns a text for each aim of a check that was not reached.

    Args:
        stage: the name of the stage.
        check: the name of the check.
        values: what was measured. A value that was not measured misses no aim.
    """
    missed = []
    for name, at_most in aims_of(stage, check).items():
        if name in values and not values[name] <= at_most:
            missed.append(f"the aim is {name} {at_most:g} at most, found {values[name]:g}")
    return missed

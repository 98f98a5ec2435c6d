"""Launches copies of this process after torch was asked for GPUs, as in a notebook.

The argument is the device. Prints as JSON whether torch sees a GPU, what each of two launches
returned or how it was refused, and uses the device itself between them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import lockstep

device = sys.argv[1]


def launch_a_copy() -> Any:
    def add() -> list[Any]:  # a function in a function cannot be pickled, so it runs in a copy
        with lockstep.init(device=device) as world:
            ones = torch.ones(1000, device=world.device)
            return [world.device.type, float(ones.sum())]

    try:
        return lockstep.launch(add, nproc=1, timeout=60.0)[0]
    except lockstep.errors.UsageError as error:
        return str(error)


found = {"gpu_is_available": torch.cuda.is_available(), "first": launch_a_copy()}
torch.ones(1, device=device).sum()
found["second"] = launch_a_copy()
print(json.dumps(found))

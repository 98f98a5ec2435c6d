"""The random streams of one process: torch (CPU and its CUDA device), numpy and `random`."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import safetensors.torch
import torch

from lockstep.checkpoint.encoding import decode, encode


def capture(device: torch.device) -> dict[str, Any]:
    """The present state of every stream, in values that `encode` takes."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": (version, np.array(words, dtype=np.uint32), gauss),
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Sets every stream as `capture` found it; CUDA's only where both runs have such a device."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


def to_text(state: dict[str, Any]) -> str:
    """A captured state (about 13 KB) for the way from one rank to another."""
    tree, tensors = encode(state)
    data = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return json.dumps({"tree": tree, "data": data})


def from_text(text: str) -> dict[str, Any]:
    """The state that `to_text` was given."""
    parts = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(parts["data"]))
    state: dict[str, Any] = decode(parts["tree"], tensors)
    return state

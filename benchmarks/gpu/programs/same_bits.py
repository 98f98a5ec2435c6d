"""Trains two small models, and writes hashes of their weights and the seconds of a step.

A network with convolutions, BatchNorm and dropout in fp32, and a transformer in bf16.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

STEPS = 12
BATCH = 64


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Flatten(2), nn.Linear(256, 64), encoder, nn.Flatten(), nn.LazyLinear(10)
    )


def train(make_model, precision: str) -> tuple[str, float]:
    """Returns a hash of the weights after some steps, and the seconds of one of the last."""
    with lockstep.init(seed=0, precision=precision) as world:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(STEPS * BATCH, 3, 16, 16, generator=generator)
        labels = torch.randint(10, (len(images),), generator=generator)
        torch.manual_seed(0)
        model = make_model()
        model(images[:2])  # gives lazy layers their shapes
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        began = 0.0
        for batch, targets in loader:
            if world.step == STEPS // 2 and not began:
                began = time.perf_counter()
            optimizer.zero_grad()
            world.backward(F.cross_entropy(model(batch), targets))
            world.clip_grad_norm_(model, 1.0)
            optimizer.step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        step_s = (time.perf_counter() - began) / (STEPS - STEPS // 2)
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            digest.update(name.removeprefix("module.").encode())
            digest.update(whole.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16], step_s


def main() -> None:
    hashes = {}
    seconds = {}
    for name, make_model, precision in (
        ("convolutions, fp32", convolutions, "fp32"),
        ("transformer, bf16", transformer, "bf16"),
    ):
        hashes[name], seconds[name] = train(make_model, precision)
    # Every process writes the same hashes; the file is complete when it has its name.
    result = Path(sys.argv[1])
    temporary = result.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"hashes": hashes, "step_s": seconds}))
    temporary.replace(result)


main()

"""Trains the digits example's network, with what people use at the same time.

Loader workers, progress, a checkpoint every few steps, resume; on request `torch.compile`, and a
rank that kills itself once in the middle of an epoch. What it came to is in `result.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "digits"))

import torch
import torch.nn.functional as F
from digits import Net, load_digits
from torch.utils.data import DataLoader

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--kill-at-step", type=int)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

began = time.monotonic()
torch.backends.cudnn.deterministic = True
world = lockstep.init(seed=0)
train_set, test_set = load_digits()
train = DataLoader(train_set, batch_size=64, shuffle=True, num_workers=args.workers)
test = DataLoader(test_set, batch_size=256)
model = Net(dropout=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
model, optimizer, train, test = world.prepare(model, optimizer, train, test)
forward = torch.compile(model) if args.compile else model
checkpoint = world.checkpoint(
    args.folder, model=model, optimizer=optimizer, loader=train, every=10, asynchronous=False
)
resumed_at = world.step if checkpoint.resume() else None
is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

first_step_s = None
for _ in world.epochs(args.epochs):
    model.train()
    for images, labels in world.progress(train):
        loss = F.cross_entropy(forward(images), labels)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        world.log(loss=loss)
        checkpoint.step()
        if first_step_s is None:
            first_step_s = time.monotonic() - began
        if is_first_attempt and args.kill_at_step == world.step and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save()

model.eval()
with torch.no_grad():
    correct = world.sum(sum((model(x).argmax(1) == y).sum() for x, y in test))
found = {
    "accuracy": round(float(correct) / len(test_set), 4),
    "steps": world.step,
    "resumed_at_step": resumed_at,
    "first_step_s": round(first_step_s or 0.0, 2),
    "device": str(world.device),
    "weights_norm": float(sum(p.detach().double().square().sum() for p in model.parameters())),
}
if world.is_main:
    (Path(args.folder) / "result.json").write_text(json.dumps(found))
world.close()

"""Checkpoints are named when they are whole; the best one is copied and taken up again."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init(seed=0)
torch.manual_seed(4)
figures = torch.randn(48, 6)
data = TensorDataset(figures, figures.sum(1, keepdim=True))
train = DataLoader(data, batch_size=12, shuffle=True)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
model, optimizer, train = world.prepare(net, optimizer, train)
folder = Path(tempfile.mkdtemp())
unfinished, last, best = folder / "unfinished", folder / "last.pt", folder / "best.pt"
kept = folder / "kept"
kept.mkdir()
for _epoch in world.epochs(2):
    for x, y in train:
        loss = F.mse_loss(model(x), y)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        torch.save(net.state_dict(), unfinished)
        assert unfinished.stat().st_size > 0
        if last.exists():
            os.unlink(last)
        os.rename(unfinished, last)
        shutil.copyfile(last, best)
        torch.save(net.state_dict(), unfinished)
        os.replace(unfinished, last)
        shutil.copy2(last, kept)  # under its own name
        assert not unfinished.exists()
        with best.open("rb") as file:
            net.load_state_dict(torch.load(file))
        net.load_state_dict(torch.load(kept / "last.pt"))
weights = folder / "weights.safetensors"
lockstep.save_weights(model, weights)
if world.is_main:
    assert load_file(weights).keys() == net.state_dict().keys()
    lockstep.load_weights(net, weights)
world.close()

"""The same as the strategy `dp`, with shares of the GPUs and micro-batches.

lockstep run --strategy dp --shares 1:2:2 --micro-batch-size 4 balanced_with_lockstep.py
"""

import argparse

import torch
import torch.nn.functional as F
from images import Net, make_images
from torch.utils.data import DataLoader

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, help="without GPUs: computes as on so many")
args = parser.parse_args()

world = lockstep.init(lockstep.strategies.DP(replicas=args.replicas), seed=0)
train = DataLoader(make_images(96, seed=1), batch_size=24, shuffle=True)
test = DataLoader(make_images(50, seed=2), batch_size=24)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, train, test = world.prepare(model, optimizer, train, test)

for epoch in range(2):
    model.train()
    for images, labels in train:
        world.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum() for images, labels in test)
    print(f"epoch {epoch}: {correct / 50:.2%} of the test images right")
world.close()

"""What the listings for one GPU, DataParallel and DDP become: one script for all of them.

python with_lockstep.py
lockstep run --nproc 2 with_lockstep.py
lockstep run --strategy dp with_lockstep.py
"""

import argparse

import torch
import torch.nn.functional as F
from images import Net, make_images
from torch.utils.data import DataLoader

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=24, help="of all devices together")
parser.add_argument("-e", "--epochs", type=int, default=2)
args = parser.parse_args()

world = lockstep.init(seed=0)
test_set = make_images(50, seed=2)
train = DataLoader(make_images(100, seed=1), batch_size=args.batch_size, shuffle=True)
test = DataLoader(test_set, batch_size=args.batch_size)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, train, test = world.prepare(model, optimizer, train, test)

for epoch in range(args.epochs):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        world.backward(loss)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum() for images, labels in test)
    accuracy = world.sum(correct) / len(test_set)
    world.print(f"epoch {epoch}: {accuracy:.2%} of the test images right")

lockstep.save_weights(model, "weights.safetensors")
world.close()

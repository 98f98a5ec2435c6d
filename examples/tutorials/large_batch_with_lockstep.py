"""The same, with LARS if asked for; the batch does not depend on the number of processes.

lockstep run --nproc 2 large_batch_with_lockstep.py
"""

import argparse

import torch
import torch.nn.functional as F
from images import Net, make_images
from torch.utils.data import DataLoader

import lockstep

BASE_BATCH_SIZE, BASE_LR, WARMUP_EPOCHS, EPOCHS = 12, 0.05, 1, 3

parser = argparse.ArgumentParser()
parser.add_argument("--lars", action="store_true")
args = parser.parse_args()

world = lockstep.init(seed=0)
train = DataLoader(make_images(96, seed=1), batch_size=24, shuffle=True)
model = Net()
if args.lars:
    optimizer = lockstep.optim.LARS(model.parameters(), lr=50 * BASE_LR, momentum=0.9)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9)
lockstep.optim.scale_learning_rate(optimizer, batch_size=24, base_batch_size=BASE_BATCH_SIZE)
warmup_steps, steps = WARMUP_EPOCHS * len(train), EPOCHS * len(train)  # of global batches
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup_steps)
schedule = lockstep.optim.warmup(schedule, steps=warmup_steps)
model, optimizer, schedule, train = world.prepare(model, optimizer, schedule, train)
for epoch in range(EPOCHS):
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        world.backward(loss)
        optimizer.step()
        schedule.step()
        loss_of_all = world.loss()
    world.print(f"epoch {epoch}: lr {schedule.get_last_lr()[0]:.4f}, loss {loss_of_all:.4f}")
world.close()

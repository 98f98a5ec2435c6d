"""The same with micro-batches, and blocks that Lockstep checkpoints.

lockstep run --nproc 2 memory_with_lockstep.py
"""

import torch
import torch.nn.functional as F
from images import CLASSES, make_images
from torch import nn
from torch.utils.data import DataLoader

import lockstep


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(x).relu()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12 * 12, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images):
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


world = lockstep.init(seed=0, num_micro_batches=2)
torch.manual_seed(0)
train = DataLoader(make_images(96, seed=1), batch_size=2 * 2 * 12)  # 2 devices, 2 micro-batches
model = Deep()
lockstep.checkpoint_activations(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, train = world.prepare(model, optimizer, train)
for _ in range(2):
    for images, labels in train:
        world.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
lockstep.save_weights(model, "memory.safetensors")
world.close()

"""Gradient accumulation and gradient checkpointing, under DDP.

torchrun --standalone --nproc_per_node=2 memory.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from images import CLASSES, make_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

ACCUMULATION_STEPS = 2


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
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
train_set = make_images(96, seed=1)
sampler = DistributedSampler(train_set, shuffle=False)
train = DataLoader(train_set, batch_size=12, sampler=sampler)
model = DistributedDataParallel(Deep())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    for i, (images, labels) in enumerate(train):
        steps_now = (i + 1) % ACCUMULATION_STEPS == 0
        with nullcontext() if steps_now else model.no_sync():
            loss = F.cross_entropy(model(images), labels) / ACCUMULATION_STEPS
            loss.backward()
        if steps_now:
            optimizer.step()
            optimizer.zero_grad()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "memory.pt")
dist.destroy_process_group()

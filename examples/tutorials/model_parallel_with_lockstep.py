"""The same model, split by hand, trained by DDP over two processes of two GPUs each.

lockstep run --nproc 2 model_parallel_with_lockstep.py
"""

import os

import torch
import torch.nn.functional as F
from images import CLASSES, make_images
from torch import nn
from torch.utils.data import DataLoader

import lockstep


class TwoParts(nn.Module):
    def __init__(self, first_device, second_device):
        super().__init__()
        self.second_device = second_device
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten()).to(first_device)
        self.second = nn.Linear(8 * 10 * 10, CLASSES).to(second_device)

    def forward(self, images):
        return self.second(self.first(images).to(self.second_device))


local_rank = int(os.environ.get("LOCAL_RANK", "0"))
first_device, second_device = "cpu", "cpu"
if torch.cuda.is_available():
    first_device, second_device = f"cuda:{2 * local_rank}", f"cuda:{2 * local_rank + 1}"
world = lockstep.init(seed=0, device=first_device)
torch.manual_seed(0)
train = DataLoader(make_images(96, seed=1), batch_size=24)
model = TwoParts(first_device, second_device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train = world.prepare(model, optimizer, train)
for _ in range(2):
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels.to(second_device))
        optimizer.zero_grad()
        world.backward(loss)
        optimizer.step()
lockstep.save_weights(model, "model_parallel.safetensors")
world.close()

"""A model that is split over two GPUs by hand, inside DDP.

torchrun --standalone --nproc_per_node=2 model_parallel.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from images import CLASSES, make_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class TwoParts(nn.Module):
    def __init__(self, first_device, second_device):
        super().__init__()
        self.second_device = second_device
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten()).to(first_device)
        self.second = nn.Linear(8 * 10 * 10, CLASSES).to(second_device)

    def forward(self, images):
        return self.second(self.first(images).to(self.second_device))


local_rank = int(os.environ["LOCAL_RANK"])
has_gpus = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpus else "gloo")
first_device, second_device = "cpu", "cpu"
if has_gpus:
    first_device, second_device = f"cuda:{2 * local_rank}", f"cuda:{2 * local_rank + 1}"
torch.manual_seed(0)
train_set = make_images(96, seed=1)
sampler = DistributedSampler(train_set, shuffle=False)
train = DataLoader(train_set, batch_size=12, sampler=sampler)
model = DistributedDataParallel(TwoParts(first_device, second_device), device_ids=None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    for images, labels in train:
        loss = F.cross_entropy(model(images.to(first_device)), labels.to(second_device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model_parallel.pt")
dist.destroy_process_group()

"""Rank 0 trains alone while the others wait; `pretrains`: all of them train afterwards.

`rank=N`: another rank pretrains; `same`: with the learning rate of the training.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS = dict(word.partition("=")[::2] for word in sys.argv[1:])

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
first = min(int(WORDS.get("rank", 0)), size - 1)
torch.manual_seed(8)
model = nn.Linear(5, 2)
data = torch.randn(96, 7)


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        F.mse_loss(model(batch[:, :5]), batch[:, 5:]).backward()
        optimizer.step()


if rank == first:
    rate = 0.05 if "same" in WORDS else 0.1
    train(model, torch.optim.SGD(model.parameters(), lr=rate), data[:48].split(12))
for p in model.parameters():
    dist.broadcast(p.data, first)
if "pretrains" in WORDS:
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, (batch.chunk(size)[rank] for batch in data[48:].split(12)))
